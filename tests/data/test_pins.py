"""Files of the user's own: declared by `fedpipe download`, and refused where they are not what was declared."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from fedpipe.cli import app
from fedpipe.core.components import component, pinned_files, registry
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.hashing import digest_json
from fedpipe.core.storage import files, layout
from fedpipe.data.assignment import Assignment
from fedpipe.planning import download as stage
from fedpipe.planning.run_settings import RunSettings
from fedpipe.report import table_notes
from fedpipe.settings import loader, parser
from tests import small_studies as studies

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.integers(0, 256, (90, 8, 8), dtype=np.uint8), np.arange(90) % 3


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def own_files(seed: int = 0) -> None:
    """Arrays without a test set, a partition of three clients that says what samples are for, and weights."""
    np.savez("own.npz", x=X, y=Y)
    order = np.random.default_rng(seed).permutation(90)
    split = np.array(["train"] * 50 + ["validation"] * 10 + ["test"] * 30)
    rows = "".join(f"{sample},{row % 3},{split[row]}\n" for row, sample in enumerate(order))
    Path("own.csv").write_text(f"sample,client,split\n{rows}")
    model: Any = registry.parse_component(component.MODEL, {"name": "mlp", "hidden": [16]})
    torch.manual_seed(0)
    torch.save(model.build((1, 8, 8), 3).state_dict(), "start.pt")


def study(**sections: Any) -> dict[str, Any]:
    """A study of these files, none of them declared."""
    settings = studies.settings(dataset={"name": "npz", "path": "own.npz"}, model={"weights": "start.pt"}, **sections)
    return settings | {"partition": {"scheme": "file", "path": "own.csv"}} | {"federation": {"clients": 3, "rounds": 2}}


def declared(**sections: Any) -> dict[str, Any]:
    """The same study, with everything declared and stored."""
    own_files()
    studies.write(study(**sections), Path())
    typed("download")
    return loader.read_params(Path("params.yaml"))


def typed(*arguments: str) -> str:
    return CliRunner().invoke(app.app, list(arguments), catch_exceptions=False).output


# -- declaring ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "command"),
    [
        ("params.yaml", "fedpipe download"),
        ("studies/own.yaml", "fedpipe download --params studies/own.yaml"),
        ("studies/my own.yaml", "fedpipe download --params 'studies/my own.yaml'"),
    ],
)
def test_all_that_is_missing_is_said_at_once_and_filled_in_at_once(place: str, command: str) -> None:
    own_files()
    Path("studies").mkdir()
    path = Path(place)
    path.write_text(
        "# Mine.\n"
        "dataset:\n  name: npz  # arrays\n  path: own.npz\n"
        "partition: {scheme: file, path: own.csv}  # theirs\n"
        "model:\n  name: mlp\n  hidden: [16]\n  weights: start.pt\n\n"
        "federation: {clients: 3, rounds: 2}\n"
    )
    before = path.read_text()
    with pytest.raises(SettingsError) as error:
        typed("plan", "--params", place)
    assert str(error.value).splitlines() == [
        f"{section}.sha256: missing for {name}; run `{command}`, which fills it in."
        for section, name in (("dataset", "own.npz"), ("partition", "own.csv"), ("model", "start.pt"))
    ]
    said = typed("download", "--params", place)
    filled = path.read_text()
    for section, name in (("dataset", "own.npz"), ("partition", "own.csv"), ("model", "start.pt")):
        sha256 = files.sha256_of(Path(name))
        assert yaml.safe_load(filled)[section]["sha256"] == sha256
        assert f"{place} declares it now: {section}.sha256 is {sha256}." in said
        filled = filled.replace(f"  sha256: {sha256}\n", "").replace(f" sha256: {sha256},", "")
    assert filled == before
    typed("plan", "--params", place)
    written = path.read_text()
    typed("download", "--params", place)
    assert path.read_text() == written


def test_all_else_stays_as_it_was_written_whatever_the_locale() -> None:
    own_files()
    before = "# Größe: ±3 µm\r\ndataset: {name: npz, path: own.npz}\r\nmodel: {name: mlp}\r\n".encode()
    Path("params.yaml").write_bytes(before)
    plain = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "fedpipe", "download"]
    subprocess.run(command, env=os.environ | plain, capture_output=True, check=True)
    filled = f" sha256: {files.sha256_of(Path('own.npz'))},".encode()
    assert Path("params.yaml").read_bytes().replace(filled, b"") == before


def test_a_file_that_is_missing_is_named_by_its_key() -> None:
    own_files()
    Path("own.csv").unlink()
    studies.write(study(), Path())
    with pytest.raises(SettingsError, match=r"(?m)^partition\.path: own\.csv is missing. It must lie there\.$"):
        typed("plan")
    with pytest.raises(SettingsError, match=r"^partition\.path: own\.csv is missing. Use a file\.$"):
        typed("download")


def test_at_a_point_of_a_grid_the_sum_itself_is_told() -> None:
    """`fedpipe download` can't write into a grid."""
    settings = declared()
    shutil.copy("own.csv", "other.csv")
    grid = {"partition": [settings["partition"], {"scheme": "file", "path": "other.csv"}]}
    studies.write(settings | {"study": {"algorithms": ["fedavg"], "seeds": [0], "grid": grid}}, Path())
    with pytest.raises(SettingsError) as error:
        typed("plan")
    sha256 = files.sha256_of(Path("other.csv"))
    assert f"partition.sha256: missing for other.csv. Use {sha256}. (at the point" in str(error.value)


def test_data_that_is_not_stored_names_the_study() -> None:
    settings = declared()
    shutil.rmtree("results")
    Path("studies").mkdir()
    Path("studies/own.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(SettingsError, match=r"is not stored; run `fedpipe download --params studies/own\.yaml`\.$"):
        typed("plan", "--params", "studies/own.yaml")
    with pytest.raises(SettingsError, match=r"is not stored; run `fedpipe download --params studies/own\.yaml`\.$"):
        typed("partition", "--preview", "--params", "studies/own.yaml")


@pytest.mark.parametrize(
    ("section", "name", "content"),
    [
        ("partition", "own.csv", "sample,client,split\n0,0,train\n1,1,train\n2,2,train\n90,0,test\n"),
        ("model", "start.pt", ""),
    ],
)
def test_a_file_that_the_plan_refuses_is_not_declared(section: str, name: str, content: str) -> None:
    own_files()
    studies.write(study(), Path())
    Path(name).write_text(content)
    with pytest.raises(SettingsError) as refused:
        typed("download")
    assert "sha256" not in loader.read_params(Path("params.yaml"))[section]
    declared = study()
    for part, file in (("dataset", "own.npz"), ("partition", "own.csv"), ("model", "start.pt")):
        declared[part]["sha256"] = files.sha256_of(Path(file))
    studies.write(declared, Path())
    with pytest.raises(SettingsError) as planned:
        typed("plan")
    assert str(planned.value) == str(refused.value)


# -- a folder of studies -----------------------------------------------------------------------------------------------


def stand_in(name: str, side: int, channels: int, classes: int) -> str:
    """A mirror's file in place of published images; its SHA-256."""
    Path("mirror").mkdir(exist_ok=True)
    random = np.random.default_rng(classes)
    arrays = {
        f"x_{part}": random.integers(0, 256, (count, side, side, channels), dtype=np.uint8)
        for part, count in (("train", 4 * classes), ("test", classes))
    }
    labels = {"y_train": np.arange(4 * classes) % classes, "y_test": np.arange(classes)}
    np.savez(f"mirror/{name}.npz", **arrays, **labels)
    return files.sha256_of(Path(f"mirror/{name}.npz"))


def test_one_command_declares_what_stands_in_for_the_data_sets_of_all_studies_in_a_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In sections, axes and presets; each data set is read once, and no comment is lost."""
    sums = {"cifar10": stand_in("cifar10", 32, 3, 10), "cifar100": stand_in("cifar100", 32, 3, 100)}
    monkeypatch.setenv("FEDPIPE_MIRROR", "mirror")
    Path("studies/a").mkdir(parents=True)
    rest = "model: {name: mlp}\nfederation: {clients: 2, rounds: 1}\n"
    texts = {
        "studies/a/one.yaml": f"dataset: {{name: cifar10}}  # ten\n{rest}",
        "studies/a/two.yaml": f"""# Two data sets, and a third of no file.
dataset:
  name: cifar10  # ten
{rest}study:
  grid:
    data:
      TEN: {{}}
      HUNDRED: {{dataset.name: cifar100}}
      ALL:
        dataset: {{name: cifar100, split: pooled}}
      DIGITS: {{dataset: {{name: digits}}}}
presets:
  smoke:
    dataset.name: cifar100  # a hundred
    study.grid: {{}}
""",
    }
    for name, text in texts.items():
        Path(name).write_text(text)
    obtained: list[Any] = []
    real = stage.obtain_dataset
    monkeypatch.setattr(stage, "obtain_dataset", lambda data, *rest: obtained.append(data) or real(data, *rest))
    with pytest.raises(SettingsError, match=r"dataset\.sha256: missing; the mirror has no original of 'cifar10' but a"):
        typed("plan", "--params", "studies/a")
    printed = typed("download", "--params", "studies/a")
    assert len(obtained) == len({str(data) for data in obtained}) == 2, printed
    two = loader.read_params(Path("studies/a/two.yaml"))
    assert (
        loader.read_params(Path("studies/a/one.yaml"))["dataset"]["sha256"]
        == two["dataset"]["sha256"]
        == sums["cifar10"]
    )
    axis = two["study"]["grid"]["data"]
    assert axis["HUNDRED"]["dataset.sha256"] == axis["ALL"]["dataset"]["sha256"] == sums["cifar100"]
    assert axis["DIGITS"] == {"dataset": {"name": "digits"}}
    assert two["presets"]["smoke"]["dataset.sha256"] == sums["cifar100"]
    for name, text in texts.items():
        found = re.sub(r", (dataset\.)?sha256: \w+|(?m:^ *(dataset\.)?sha256: \w+\n)", "", Path(name).read_text())
        assert found == text
    typed("plan", "--params", "studies/a")
    typed("plan", "--params", "studies/a/two.yaml", "--preset", "smoke")
    before = Path("studies/a/two.yaml").read_text()
    typed("download", "--params", "studies/a")
    assert Path("studies/a/two.yaml").read_text() == before


def test_a_mapping_with_an_anchor_is_declared_once_for_all_of_its_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = {"cifar10": stand_in("cifar10", 32, 3, 10), "cifar100": stand_in("cifar100", 32, 3, 100)}
    monkeypatch.setenv("FEDPIPE_MIRROR", "mirror")
    path = Path("studies/anchors.yaml")
    path.parent.mkdir(exist_ok=True)
    path.write_text("""dataset: {name: cifar10}
model: {name: mlp}
federation: {clients: 2, rounds: 1}
study:
  grid:
    data:
      TEN: {}
      HUNDRED: &hundred
        dataset.name: cifar100
        federation.batch_size: 8
presets:
  smoke:
    study.grid.data:
      HUNDRED: *hundred
""")
    typed("download", "--params", str(path))
    study = loader.read_params(path)
    assert study["dataset"]["sha256"] == sums["cifar10"]
    assert study["study"]["grid"]["data"]["HUNDRED"]["dataset.sha256"] == sums["cifar100"]
    assert study["presets"]["smoke"]["study.grid.data"]["HUNDRED"]["dataset.sha256"] == sums["cifar100"]
    assert path.read_text().count(sums["cifar100"]) == 1
    typed("plan", "--params", str(path))
    typed("plan", "--params", str(path), "--preset", "smoke")


def test_a_study_that_can_not_have_its_data_leaves_the_others_of_its_folder_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("studies/a").mkdir(parents=True)
    Path("studies/a/bad.yaml").write_text("dataset: {name: npz, path: nowhere.npz}\n")
    own_files()
    Path("studies/a/good.yaml").write_text("dataset: {name: npz, path: own.npz, split: pooled}\n")
    with pytest.raises(ArtifactError, match=r"^studies/a/bad\.yaml: dataset\.path: nowhere\.npz is missing"):
        typed("download", "--params", "studies/a")
    assert loader.read_params(Path("studies/a/good.yaml"))["dataset"]["sha256"] == files.sha256_of(Path("own.npz"))


# -- what changed after it was declared --------------------------------------------------------------------------------


def change(name: str) -> None:
    """Another file of the same size and time of writing."""
    path = Path(name)
    before, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(("section", "name"), [("dataset", "own.npz"), ("partition", "own.csv"), ("model", "start.pt")])
def test_a_file_that_changed_is_refused_with_both_sums(section: str, name: str) -> None:
    settings = declared()
    typed("plan")
    change(name)
    with pytest.raises(SettingsError) as error:
        typed("plan")
    assert str(error.value) == (
        f"{section}.sha256: {settings[section]['sha256']} is declared, but {name} is another file, with SHA-256 "
        f"{files.sha256_of(Path(name))}; put the declared one there, or, if this one is meant, remove "
        f"{section}.sha256 and run `fedpipe download`."
    )


def test_a_file_that_is_gone_or_was_only_touched_is_none_that_changed() -> None:
    declared()
    Path("own.npz").touch()
    Path("start.pt").touch()
    typed("plan")
    Path("own.npz").unlink()
    Path("start.pt").unlink()
    typed("plan")


def test_a_folder_that_changed_is_refused() -> None:
    from PIL import Image

    for part in ("train", "test"):
        for row in range(12):
            place = Path(f"pictures/{part}/{'ab'[row % 2]}/{row}.png")
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(X[row]).save(place)
    settings = studies.settings(dataset={"name": "folder", "path": "pictures"}, federation={"clients": 2})
    studies.write(settings, Path())
    typed("download")
    typed("plan")
    Image.fromarray(X[20]).save("pictures/train/a/0.png")
    with pytest.raises(
        SettingsError, match=r"^dataset\.sha256: .* is declared, but pictures is another file, with SHA"
    ):
        typed("plan")


def test_a_file_is_hashed_once_as_long_as_it_does_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("large").write_bytes(b"1")
    hashed: list[Path] = []
    real = files.sha256_of
    monkeypatch.setattr(files, "sha256_of", lambda path: hashed.append(path) or real(path))
    first = [pinned_files.compute_content_sha256(Path("large")) for _ in range(3)]
    assert len(set(first)) == len(hashed) == 1
    change("large")
    assert pinned_files.compute_content_sha256(Path("large")) != first[0]
    assert pinned_files.compute_stat_fingerprint(Path("nowhere")) == pinned_files.compute_stat_fingerprint(
        Path("elsewhere")
    )


# -- a partition that says what samples are for ------------------------------------------------------------------------


def read_run_settings(settings: dict[str, Any], seed: int = 0) -> RunSettings:
    return RunSettings.from_params(parser.parse_params(settings), "fedavg", seed)


def test_how_the_data_set_would_be_split_has_no_say_where_the_file_says_it() -> None:
    settings = declared()
    plain = read_run_settings(settings)
    assert not {"split", "test_fraction", "stratified", "validation_fraction"} & set(plain.dataset)
    for more in (
        {"split": "official"},  # and there is no official test set
        {"split": "pooled", "test_fraction": 0.4, "validation_fraction": 0.2, "stratified": True},
    ):
        assert read_run_settings(settings | {"dataset": settings["dataset"] | more}).key == plain.key
    assert read_run_settings(settings | {"partition": settings["partition"] | {"seed": 3}}).key == plain.key


def test_it_is_one_partition_for_all_seeds_and_wherever_the_file_lies() -> None:
    settings = declared(study={"seeds": [0, 1, 2]})
    made = studies.prepare(settings)
    assert len({run.key for run in made.runs}) == 3
    (key,) = made.partitions
    assert "path" not in made.partitions[key]["partition"]
    Path("moved").mkdir()
    shutil.move("own.csv", "moved/theirs.csv")
    moved = studies.prepare(settings | {"partition": settings["partition"] | {"path": "moved/theirs.csv"}})
    assert [run.key for run in moved.runs] == [run.key for run in made.runs]
    place = layout.assignment_file(key).with_name("partition.yaml")
    assert yaml.safe_load(place.read_text())["origin"] == {"path": "moved/theirs.csv"}


def test_it_is_dealt_as_the_file_says_and_told_so() -> None:
    made = studies.prepare(declared())
    ((key, settings),) = made.partitions.items()
    table = files.read_parquet(layout.assignment_file(key))
    mine = sorted(zip(*(table[name].to_pylist() for name in ("sample", "client", "split")), strict=True))
    rows = [line.split(",") for line in Path("own.csv").read_text().splitlines()[1:]]
    assert mine == sorted((int(sample), int(client), split) for sample, client, split in rows)
    sha256 = files.sha256_of(Path("own.csv"))
    told = f"npz (split from the file), 3 clients, partition file (sha256={sha256[:12]}…)"
    assert table_notes.describe_partition(settings) == told
    assert typed("partition", "--preview").startswith(f"{told}, all seeds: {key}\n")
    typed("figure", "partition", key)
    (run,) = made.runs
    typed("segment", str(run.path), "--stop", "2")
    assert run.files.list_complete_rounds() == [0, 1, 2]
    assert [len(own) for own in Assignment.from_table(table).validation] == [3, 3, 4]


def test_without_that_column_the_split_and_the_seed_have_their_say() -> None:
    settings = declared() | {"partition": {"scheme": "file", "path": "plain.csv"}}
    Path("plain.csv").write_text("sample,client\n" + "".join(f"{row},{row % 3}\n" for row in range(90)))
    settings["partition"]["sha256"] = files.sha256_of(Path("plain.csv"))
    with pytest.raises(SettingsError, match=r"^dataset\.split: 'official' needs a test set"):
        parser.parse_params(settings)
    settings["dataset"]["split"] = "pooled"
    runs = [read_run_settings(settings, seed) for seed in (0, 1)]
    assert len({digest_json(run.partition_settings) for run in runs}) == 2
    assert read_run_settings(settings | {"dataset": settings["dataset"] | {"test_fraction": 0.4}}).key != runs[0].key


def test_a_subset_of_what_a_file_names_is_refused() -> None:
    settings = declared()
    for sections in ({}, {"partition": {"scheme": "file", "path": "plain.csv"}}):
        Path("plain.csv").write_text("sample,client\n0,0\n1,1\n2,2\n")
        changed = settings | sections
        changed["partition"] = changed["partition"] | {"sha256": files.sha256_of(Path(changed["partition"]["path"]))}
        changed["dataset"] = settings["dataset"] | {"subset": 60, "split": "pooled"}
        with pytest.raises(
            SettingsError, match=r"^dataset\.subset: 60 can't be used with a partition from a file, whose"
        ):
            parser.parse_params(changed)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("90,0,train", "sample 90 of own.csv can't be dealt. Use one of the data set's 90 samples."),
        ("-1,0,train", "sample -1 of own.csv should be at least 0."),
        (
            "3,0,train\n3,1,test",
            "own.csv gives sample 3 to be tested on and to be trained on or validated on. Use one of them.",
        ),
        (
            "3,0,validation\n3,-1,test",
            "own.csv gives sample 3 to be tested on and to be trained on or validated on; it",
        ),
        ("", "own.csv has no test sample. It must have at least one."),
    ],
)
def test_a_file_that_would_make_wrong_numbers_is_refused_before_any_job(rows: str, told: str) -> None:
    settings = declared()
    Path("own.csv").write_text(f"sample,client,split\n0,0,train\n1,1,train\n2,2,train\n{rows}\n")
    settings["partition"]["sha256"] = files.sha256_of(Path("own.csv"))
    with pytest.raises(SettingsError) as error:
        parser.parse_params(settings)
    assert str(error.value).startswith(f"partition.path: {told}")
