"""Users' YAML: hostile texts are rejected quickly with one message, and aliases are separate objects."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fedpipe.cli import app
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import layout
from fedpipe.core.yaml_text import MAX_ALIASED_VALUES, MAX_DEPTH, format_yaml, read_generated_yaml, read_yaml
from fedpipe.planning import download, partition, planner
from fedpipe.planning.run_settings import RunSettings
from fedpipe.settings import parser
from tests import small_studies as studies
from tests.errors import rejects

pytestmark = pytest.mark.usefixtures("in_empty_folder")


def build_bomb(kind: str = "[{}]", part: str = "{}", first: str = "[x, x]") -> str:
    """Build ten levels of aliases. Each level repeats the previous one ten times, which makes 10^10 values."""
    aliases = [kind.format(", ".join([part.format(f"*a{level}")] * 10)) for level in range(10)]
    return f"a0: &a0 {first}\n" + "".join(f"a{level + 1}: &a{level + 1} {text}\n" for level, text in enumerate(aliases))


ENDLESS = "an alias contains itself"
TOO_MANY_VALUES = f"line 1, column 1: aliases repeat more than {MAX_ALIASED_VALUES:,} values"
HOSTILE = {
    "endless-scale": ("presets: &s {x: *s}", f"line 1, column 10: {ENDLESS}"),
    "endless-axis": ("study: {grid: &g {x: *g}}", f"line 1, column 15: {ENDLESS}"),
    "endless-list": ("study: {grid: {model.hidden: &l [*l]}}", f"line 1, column 30: {ENDLESS}"),
    "endless-method": ("algorithms: {fedavg: {overrides: &w {model: *w}}}", f"line 1, column 34: {ENDLESS}"),
    "endless-merge": ("model: &m {<<: *m}", f"line 1, column 8: {ENDLESS}"),
    "endless-whole": ("&a [*a]", f"line 1, column 1: {ENDLESS}"),
    "bomb": (build_bomb(), TOO_MANY_VALUES),
    "bomb-of-merges": (build_bomb("{{<<: [{}]}}", first="{x: 1}"), TOO_MANY_VALUES),
    "base-8": ("federation: {batch_size: 050}", "line 1, column 26: '050' is ambiguous in YAML"),
    "base-60": ("study: {seeds: [1:30]}", "line 1, column 17: '1:30' is ambiguous in YAML"),
    "long-seed": (f"study: {{seeds: [{'9' * 5000}]}}", "line 1, column 17: a number has 5,000 characters"),
    "long-hexadecimal": (f"study: {{seeds: [0x{'f' * 5000}]}}", "a number has 5,002 characters"),
    "long-sexagesimal": (f"study: {{seeds: [{'1:' * 40000}1]}}", "a number has 80,001 characters"),
    "long-fraction": (f"federation: {{learning_rate: 0.{'9' * 9000}}}", "a number has 9,002 characters"),
    "no-integer": ("study: {seeds: [!!int ten]}", "line 1, column 17: 'ten' is not a valid int"),
    "no-digits": ("study: {seeds: [0x_]}", "line 1, column 17: '0x_' is not a valid int"),
    "no-truth": ("transforms: {flip: !!bool ten}", "line 1, column 20: 'ten' is not a valid bool"),
    "code": ("study: !!python/object/apply:os.system [ls]", "python/object/apply:os.system'"),
    "set": ("study: {seeds: !!set {1, 2}}", "could not determine a constructor for the tag 'tag:yaml.org,2002:set'"),
}


@pytest.mark.parametrize(("text", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_yaml_is_rejected_in_one_line(text: str, reason: str) -> None:
    Path("params.yaml").write_text(text)
    with rejects(f"params.yaml: not valid YAML ( ... {reason}"):
        planner.make_plan()


@pytest.mark.parametrize(
    "text",
    [
        f"study: {'[' * 5000}{']' * 5000}",
        f"study: {'[' * 100}{']' * 100}",
        f"study: {'{x: ' * 150}1{'}' * 150}",
        "study:\n" + "".join(f"{' ' * level}- \n" for level in range(1, 400)),
    ],
)
def test_deeply_nested_yaml_is_rejected(text: str) -> None:
    Path("params.yaml").write_text(text)
    with pytest.raises(SettingsError, match=rf"^params\.yaml: .*nested too deeply.* {MAX_DEPTH} levels\.$"):
        planner.make_plan()


def test_job_settings_and_set_option_reject_hostile_yaml(tmp_path: Path) -> None:
    plan = studies.prepare(studies.settings())
    (run,), (key,) = plan.runs, plan.partitions
    hostile = "dataset: &d {name: *d}\n"
    for path, read in (
        (run.files.settings, lambda: RunSettings.read(run.files.settings)),
        (layout.get_assignment_path(key).with_name("partition.yaml"), lambda: partition.read_partition_settings(key)),
        (Path(f"results/data/{run.dataset}.yaml"), lambda: download.download_dataset(run.dataset)),
    ):
        path.write_text(hostile)
        with pytest.raises(ArtifactError, match=f"^{path} is damaged"):
            read()
    result = CliRunner().invoke(app.app, ["check", "fedprox", "--set", "mu=&m [*m]"])
    assert result.output.startswith("--set: 'mu=&m [*m]' ")
    assert result.output.count("\n") == 1


def test_grid_value_does_not_change_yaml_alias() -> None:
    """A grid over one of two methods that share an anchor must not change the other method."""
    Path("params.yaml").write_text(
        "dataset: {name: digits}\nmodel: {name: mlp}\n"
        "algorithms:\n  fedprox: &p {algorithm: fedprox, mu: 0.5}\n  twin: *p\n"
        "study: {algorithms: [fedprox, twin], grid: {algorithms.fedprox.mu: [0.1, 1.0]}}\n"
    )
    plan = planner.make_plan()
    strengths = {(run.algorithm, plan.run_settings[run.key].algorithm["mu"]) for run in plan.runs}
    assert strengths == {("fedprox", 0.1), ("fedprox", 1.0), ("twin", 0.5)}


def test_read_yaml_matches_pyyaml() -> None:
    text = (studies.ROOT / "params.yaml").read_text()
    assert read_yaml(text, "params.yaml") == yaml.safe_load(text)
    assert read_yaml("", "params.yaml") is None
    assert read_yaml("day: 2026-01-02", "params.yaml") == {"day": "2026-01-02"}, (
        "a date is text, because JSON has no dates"
    )


def test_read_generated_yaml_rejects_missing_and_damaged_files() -> None:
    path, value = Path("run.yaml"), {"name": "μ", "alpha": 0.1, "hidden": [16, 16], "off": None, "day": "2026-01-02"}
    with pytest.raises(ArtifactError, match=r"^run\.yaml is missing.*`fedpipe plan`"):
        read_generated_yaml(path)
    path.write_text(format_yaml(value), encoding="utf-8")
    assert read_generated_yaml(path) == read_yaml(path.read_text(encoding="utf-8"), path) == value
    for damage in (b"name: [", b"name: \xff", b"when: 2026-13-45"):
        path.write_bytes(damage)
        with pytest.raises(ArtifactError, match=r"^run\.yaml is damaged \(.*`fedpipe plan`"):
            read_generated_yaml(path)


def test_error_messages_for_large_values_are_short() -> None:
    for settings, beginning in (
        ({"study": {"seeds": ["9" * 5000]}}, "study.seeds.0: '9999"),
        ({"federation": {"clients": [[1] * 1000] * 50}}, "federation.clients: [[1, 1"),
    ):
        with pytest.raises(SettingsError) as error:
            parser.parse_params(settings)
        assert str(error.value).startswith(beginning)
        assert len(str(error.value)) < 250
    with pytest.raises(SettingsError) as error:
        parser.parse_params({"study": {"algorithms": [{}] * 1000}})
    assert str(error.value).count("\n") == 20
    assert str(error.value).splitlines()[-1].startswith("params.yaml: 980 more")
