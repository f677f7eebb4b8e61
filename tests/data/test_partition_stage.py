"""The partition stage: its files, its key and the preview."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from fedpipe.cli import app
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import files, layout
from fedpipe.data import class_names, heterogeneity
from fedpipe.data.assignment import Assignment
from fedpipe.data.heterogeneity import HeterogeneitySummary
from fedpipe.planning import download
from fedpipe.planning.preview import preview_partitions
from fedpipe.planning.run_settings import RunSettings
from fedpipe.report import preview
from fedpipe.report.figures import style
from fedpipe.report.figures.partition import write_partition_figure
from fedpipe.settings import loader, parser
from tests import small_studies as studies

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def test_heterogeneity_file_matches_assignment() -> None:
    (key,) = studies.prepare(studies.settings(dataset={"validation_fraction": 0.1})).partitions
    path = layout.get_assignment_path(key)
    assignment = Assignment.read(path, files.read_recorded_sha256(path))
    table = files.read_parquet(path.with_name("heterogeneity.parquet"))
    assert table["samples"].to_pylist() == assignment.class_counts.sum(axis=1).tolist()
    assert sum(map(len, assignment.validation)) == pytest.approx(143, abs=10)
    summary = HeterogeneitySummary.from_table(table)
    assert summary == HeterogeneitySummary.from_counts(assignment.class_counts)
    assert summary.entropy == pytest.approx(np.mean(table["entropy"].to_pylist()))
    assert summary.js_distance == pytest.approx(np.mean(table["js_distance"].to_pylist()))
    assert summary.gini == pytest.approx(heterogeneity.compute_gini(assignment.class_counts.sum(axis=1)))


# -- keys --------------------------------------------------------------------------------------------------------------


def test_partition_file_content_changes_key() -> None:
    keys = set()
    for shift in (0, 1):
        Path("own.csv").write_text("sample,client\n" + "".join(f"{n},{(n + shift) % 10}\n" for n in range(20)))
        partition = {"scheme": "file", "path": "own.csv", "sha256": files.compute_file_sha256(Path("own.csv"))}
        params = studies.settings()
        keys.add(RunSettings.from_params(parser.parse_params(params | {"partition": partition}), "fedavg", 0).key)
    assert len(keys) == 2


# -- the preview -------------------------------------------------------------------------------------------------------


def test_preview_equals_partition_and_writes_no_files() -> None:
    params = studies.settings(study={"seeds": [0, 1], "grid": {"partition.alpha": [0.1, 10.0]}})
    studies.write(params, Path())
    previews = list(preview_partitions(Path("params.yaml")))
    assert [path.name for path in Path().iterdir()] == ["params.yaml"]
    plan = studies.prepare(params)
    assert [key for key, *_ in previews] == list(plan.partitions)
    previews += preview_partitions(Path("params.yaml"))
    for key, settings, assignment, names, held_out, unused_keys in previews:
        assert names == tuple("0123456789")
        assert held_out == unused_keys == ()
        assert settings == yaml.safe_load(layout.get_assignment_path(key).with_name("partition.yaml").read_text())
        assert np.array_equal(assignment.class_counts, Assignment.read(layout.get_assignment_path(key)).class_counts)


def test_preview_shows_all_partitions_or_one() -> None:
    studies.write(studies.settings(study={"seeds": [0, 1]}), Path())
    (first, *_), (second, *_) = preview_partitions(Path("params.yaml"))
    all_partitions = CliRunner().invoke(app.app, ["partition", "--preview"])
    assert all_partitions.exit_code == 0
    assert f"seed 0: {first}\n" in all_partitions.output
    assert f"seed 1: {second}\n" in all_partitions.output
    one_partition = CliRunner().invoke(app.app, ["partition", second, "--preview"])
    assert first not in one_partition.output
    assert one_partition.output in all_partitions.output
    for arguments, problem in (
        (["0123456789ab", "--preview"], "'0123456789ab' is not a partition of params.yaml"),
        ([], "^KEY: missing"),
    ):
        with pytest.raises(SettingsError, match=problem):
            CliRunner().invoke(app.app, ["partition", *arguments], catch_exceptions=False)


SETTINGS = {
    "dataset": {"name": "digits", "split": "pooled"},
    "partition": {"scheme": "iid", "code": "0123456789ab"},
    "clients": 2,
    "seed": 4,
}


def test_preview_with_few_classes_shows_counts() -> None:
    assert preview.render_partition_preview("0a", SETTINGS, np.array([[4, 0], [3, 13]]), ["ann", "bob"], "01") == (
        "digits (pooled split), 2 clients, partition iid, seed 4: 0a\n\n"
        "client  0   1  samples\n"
        "   ann  4   ·        4\n"
        "   bob  3  13       16\n"
        "   all  7  13       20\n\n"
        "Training samples of each client and class.\n"
        f"{HeterogeneitySummary.from_counts(np.array([[4, 0], [3, 13]]))}\n"
    )


def test_preview_marks_held_out_clients() -> None:
    counts = np.array([[4, 0], [3, 13]])
    lines = preview.render_partition_preview("0a", SETTINGS, counts, ["ann", "bob"], "01", [1]).splitlines()
    assert lines[2:8] == [
        "client  0   1  samples",
        "   ann  4   ·        4",
        "  bob*  3  13       16",
        "   all  7  13       20",
        "",
        "Training samples of each client and class. An asterisk marks held-out clients, which never train.",
    ]
    params = studies.settings(federation={"held_out": [3, 7]}, evaluation={"protocols": ["personal-on-local"]})
    studies.write(params, Path())
    output = CliRunner().invoke(app.app, ["partition", "--preview"]).output
    assert [line.split()[0] for line in output.splitlines() if "*" in line] == ["3*", "7*"]
    assert "asterisk" in output


def test_preview_shows_class_names_that_fit_into_line(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = np.ones((2, 10), dtype=np.int64)
    names = class_names.select_class_names("fashion_mnist", 10)
    head = preview.render_partition_preview("0a", SETTINGS, counts, "01", names).splitlines()[2]
    assert head.split()[1:4] == ["T-shirt/top", "Trouser", "Pullover"]
    assert head.endswith("  Ankle boot  samples")
    assert len(head) <= preview.LINE_WIDTH
    monkeypatch.setattr(preview, "LINE_WIDTH", len(head) - 1)
    head = preview.render_partition_preview("0a", SETTINGS, counts, "01", names).splitlines()[2]
    assert head.split()[1:4] == ["0", "1", "2"]


def test_preview_with_many_classes_shows_shades() -> None:
    counts = np.zeros((2, 30), dtype=np.int64)
    counts[0, :3], counts[1, 3:6] = [1, 50, 100], [99, 12, 11]
    lines = preview.render_partition_preview("0a", SETTINGS, counts, ["0", "writer 12"], ["dog"] * 30).splitlines()
    assert lines[2] == "   client |classes 0 to 29               | samples"
    assert lines[3] == "        0 |.+@                           |     151"
    assert lines[4] == "writer 12 |   @:.                        |     122"


def test_preview_and_figure_show_class_names_of_custom_table(monkeypatch: pytest.MonkeyPatch) -> None:
    animals = ["dog", "ant"] * 20
    pd.DataFrame({"height": np.arange(40.0), "weight": np.arange(40.0), "kind": animals}).to_parquet("own.parquet")
    dataset = {"name": "parquet", "path": "own.parquet", "input": ["height", "weight"], "label": "kind"}
    params = studies.settings(dataset=dataset | {"split": "pooled"}, federation={"clients": 2})
    studies.write(params, Path())
    download.download_and_pin_dataset(None, Path("params.yaml"))
    output = CliRunner().invoke(app.app, ["partition", "--preview"], catch_exceptions=False).output
    assert output.splitlines()[2].split() == ["client", "ant", "dog", "samples"]
    assert "input=['height', 'weight'], label=kind" in output
    assert not {"tokens", "vocabulary", "length"} & {*re.findall("[a-z]+", output)}, (
        "the preview shows no settings of texts"
    )
    plan = studies.prepare(loader.read_params(Path("params.yaml")))
    drawn = []
    monkeypatch.setattr(style, "save_figure", lambda figure, *_: drawn.append(figure))
    write_partition_figure(plan, *plan.partitions)
    assert [label.get_text() for label in drawn[0].axes[0].get_xticklabels()] == ["ant", "dog"]
