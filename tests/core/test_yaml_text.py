"""YAML that somebody wrote: hostile texts are one sentence at once, and what is alike in a file is not one object."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fedpipe.cli import app
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import layout
from fedpipe.core.yaml_text import ALIASED, format_yaml, read_generated_yaml, read_yaml
from fedpipe.planning import download, partition, planner
from fedpipe.planning.run_settings import RunSettings
from fedpipe.settings import parser
from tests import small_studies as studies


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def bomb(kind: str = "[{}]", part: str = "{}", first: str = "[x, x]") -> str:
    """Ten levels, each of which is ten times the one before: 10^10 values."""
    aliases = [kind.format(", ".join([part.format(f"*a{level}")] * 10)) for level in range(10)]
    return f"a0: &a0 {first}\n" + "".join(f"a{level + 1}: &a{level + 1} {text}\n" for level, text in enumerate(aliases))


ENDLESS = "an alias repeats what contains it, without end"
TOO_MUCH = f"line 1, column 1: its aliases repeat more than {ALIASED:,} values"
DEEP = "params.yaml: its lists or mappings lie too deep in one another to be read."
HOSTILE = {
    "endless-scale": ("presets: &s {x: *s}", f"line 1, column 10: {ENDLESS}"),
    "endless-axis": ("study: {grid: &g {x: *g}}", f"line 1, column 15: {ENDLESS}"),
    "endless-list": ("study: {grid: {model.hidden: &l [*l]}}", f"line 1, column 30: {ENDLESS}"),
    "endless-method": ("algorithms: {fedavg: {overrides: &w {model: *w}}}", f"line 1, column 34: {ENDLESS}"),
    "endless-merge": ("model: &m {<<: *m}", f"line 1, column 8: {ENDLESS}"),
    "endless-whole": ("&a [*a]", f"line 1, column 1: {ENDLESS}"),
    "bomb": (bomb(), TOO_MUCH),
    "bomb-of-merges": (bomb("{{<<: [{}]}}", first="{x: 1}"), TOO_MUCH),
    "long-seed": (f"study: {{seeds: [{'9' * 5000}]}}", "line 1, column 17: a number of 5,000 characters can't be used"),
    "long-hexadecimal": (f"study: {{seeds: [0x{'f' * 5000}]}}", "a number of 5,002 characters can't be used"),
    "long-sexagesimal": (f"study: {{seeds: [{'1:' * 40000}1]}}", "a number of 80,001 characters can't be used"),
    "long-fraction": (f"federation: {{learning_rate: 0.{'9' * 9000}}}", "a number of 9,002 characters can't be used"),
    "no-integer": ("study: {seeds: [!!int ten]}", "line 1, column 17: 'ten' is no int"),
    "no-digits": ("study: {seeds: [0x_]}", "line 1, column 17: '0x_' is no int"),
    "no-truth": ("transforms: {flip: !!bool ten}", "line 1, column 20: 'ten' is no bool"),
    "code": ("study: !!python/object/apply:os.system [ls]", "python/object/apply:os.system'"),
    "set": ("study: {seeds: !!set {1, 2}}", "could not determine a constructor for the tag 'tag:yaml.org,2002:set'"),
}


@pytest.mark.parametrize(("text", "told"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_study_is_one_sentence(text: str, told: str) -> None:
    Path("params.yaml").write_text(text)
    with pytest.raises(SettingsError) as error:
        planner.make_plan()
    assert str(error.value).startswith("params.yaml: it is not valid YAML (")
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        f"study: {'[' * 5000}{']' * 5000}",
        f"study: {'[' * 100}{']' * 100}",
        f"study: {'{x: ' * 150}1{'}' * 150}",
        "study:\n" + "".join(f"{' ' * level}- \n" for level in range(1, 400)),
    ],
)
def test_what_lies_too_deep_is_one_sentence(text: str) -> None:
    Path("params.yaml").write_text(text)
    with pytest.raises(SettingsError) as error:
        planner.make_plan()
    assert str(error.value) == DEEP


def test_all_of_a_users_yaml_is_read_so(tmp_path: Path) -> None:
    """Settings of jobs and of `--set`, too."""
    made = studies.prepare(studies.settings())
    (run,), (key,) = made.runs, made.partitions
    hostile = "dataset: &d {name: *d}\n"
    for place, read in (
        (run.files.settings, lambda: RunSettings.read(run.files.settings)),
        (layout.assignment_file(key).with_name("partition.yaml"), lambda: partition.read_partition_settings(key)),
        (Path(f"results/data/{run.dataset}.yaml"), lambda: download.download_dataset(run.dataset)),
    ):
        place.write_text(hostile)
        with pytest.raises(ArtifactError, match=f"{place} is damaged"):
            read()
    printed = CliRunner().invoke(app.app, ["check", "fedprox", "--set", "mu=&m [*m]"])
    assert printed.output.startswith("--set: 'mu=&m [*m]' can't be read.")


def test_a_change_at_one_place_is_none_at_an_alias_of_it() -> None:
    """A grid over one of two methods that share an anchor once changed the other one, too."""
    Path("params.yaml").write_text(
        "dataset: {name: digits}\nmodel: {name: mlp}\n"
        "algorithms:\n  fedprox: &p {algorithm: fedprox, mu: 0.5}\n  twin: *p\n"
        "study: {algorithms: [fedprox, twin], grid: {algorithms.fedprox.mu: [0.1, 1.0]}}\n"
    )
    made = planner.make_plan()
    found = {(run.algorithm, made.run_settings[run.key].algorithm["mu"]) for run in made.runs}
    assert found == {("fedprox", 0.1), ("fedprox", 1.0), ("twin", 0.5)}


def test_plain_yaml_is_read_as_ever() -> None:
    text = (studies.ROOT / "params.yaml").read_text()
    assert read_yaml(text, "params.yaml") == yaml.safe_load(text)
    assert read_yaml("", "params.yaml") is None
    assert read_yaml("day: 2026-01-02", "params.yaml") == {"day": "2026-01-02"}, "text, which JSON has"


def test_a_file_that_fedpipe_wrote_is_read_back_and_a_damaged_one_is_a_sentence() -> None:
    path, value = Path("run.yaml"), {"name": "μ", "alpha": 0.1, "hidden": [16, 16], "off": None, "day": "2026-01-02"}
    with pytest.raises(ArtifactError, match=r"^run\.yaml is missing; run `fedpipe plan` to write it again\.$"):
        read_generated_yaml(path)
    path.write_text(format_yaml(value), encoding="utf-8")
    assert read_generated_yaml(path) == read_yaml(path.read_text(encoding="utf-8"), path) == value
    for damage in (b"name: [", b"name: \xff", b"when: 2026-13-45"):
        path.write_bytes(damage)
        with pytest.raises(ArtifactError, match=r"^run\.yaml is damaged \(.*\); delete it and run `fedpipe plan`\.$"):
            read_generated_yaml(path)


def test_a_wrong_value_of_any_size_is_one_short_sentence() -> None:
    for settings, told in (
        ({"study": {"seeds": ["9" * 5000]}}, "study.seeds.0: '9999"),
        ({"federation": {"clients": [[1] * 1000] * 50}}, "federation.clients: [[1, 1"),
    ):
        with pytest.raises(SettingsError) as error:
            parser.parse_params(settings)
        assert str(error.value).startswith(told)
        assert len(str(error.value)) < 250
    with pytest.raises(SettingsError) as error:
        parser.parse_params({"study": {"algorithms": [{}] * 1000}})
    assert str(error.value).count("\n") == 20
    assert str(error.value).endswith("params.yaml: 980 more values can't be used.")
