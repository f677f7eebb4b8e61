"""`-S KEY=VALUE` of plan, run, show and status: a derived study in a file whose name contains the changed keys."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from fedpipe.cli import app
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.planning.derived_study import DerivedStudy
from tests.errors import rejects

BASE = """\
# yaml-language-server: $schema=params.schema.json
dataset: {name: digits}
federation:
  rounds: 2        # few
  learning_rate: 0.05
algorithms:
  feddw: {mu: 1.0}
study:
  algorithms: [fedavg, feddw]
  seeds: [0, 1]
  grid: {partition.alpha: [0.1, 0.5]}
presets:
  smoke: {federation.rounds: 1, study.seeds: [0]}
"""


@pytest.fixture(autouse=True)
def folder(in_empty_folder: Path) -> Path:
    Path("params.yaml").write_text(BASE)
    return in_empty_folder


def derive(*options: str, base: str = "params.yaml") -> DerivedStudy:
    return DerivedStudy.from_options(Path(base), options)


def run_fedpipe(*arguments: str) -> Result:
    result = CliRunner().invoke(app.app, arguments)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize(
    ("options", "name", "changes"),
    [
        (
            ["federation.rounds=5"],
            "params-federation.rounds=5",
            {"federation": {"rounds": 5, "learning_rate": 0.05}, "presets": {"smoke": {"study.seeds": [0]}}},
        ),
        (["algorithms.feddw.mu=10.0"], "params-feddw.mu=10.0", {"algorithms": {"feddw": {"mu": 10.0}}}),
        (["model.name=mlp"], "params-model.name=mlp", {"model": {"name": "mlp"}}),
        (
            ["algorithms.feddw.mu=0.1,1.0"],
            "params-feddw.mu=0.1+1.0",
            {"study": {"grid": {"partition.alpha": [0.1, 0.5], "algorithms.feddw.mu": [0.1, 1.0]}}},
        ),
        (["partition.alpha=0.3"], "params-partition.alpha=0.3", {"partition": {"alpha": 0.3}, "study": {"grid": {}}}),
        (
            ["study.seeds=3,4"],
            "params-study.seeds=3+4",
            {"study": {"seeds": [3, 4]}, "presets": {"smoke": {"federation.rounds": 1}}},
        ),
        (["study.algorithms=feddw"], "params-study.algorithms=feddw", {"study": {"algorithms": ["feddw"]}}),
    ],
)
def test_derived_study_is_base_study_with_new_values(
    options: list[str], name: str, changes: dict[str, dict[str, Any]]
) -> None:
    study = derive(*options)
    assert study.path == Path(f"studies/{name}.yaml")
    assert study.write_study("full")
    base = yaml.safe_load(BASE)
    expected = base | {section: base.get(section, {}) | values for section, values in changes.items()}
    assert yaml.safe_load(study.path.read_text()) == expected
    lines = study.path.read_text().splitlines()
    assert f"params.yaml with -S {options[0]}" in lines[0]
    assert "# yaml-language-server: $schema=../params.schema.json" in lines
    assert Path("params.yaml").read_text() == BASE
    assert not derive(*options).write_study("full"), "the file is up to date"


def test_derived_study_ignores_order_of_options() -> None:
    first, second = "federation.rounds=5", "federation.momentum=0.9"
    assert derive(first, second).path == derive(second, first).path
    assert derive(first, second).study_text == derive(second, first).study_text


def test_different_values_have_different_derived_study_files() -> None:
    long_value = f"[{', '.join(map(str, range(100)))}]"
    options = [f"model.hidden={value}" for value in ("[64]", "(64)", "64", "[6,4]", "[6+4]", "'64'")]
    options += [f"study.seeds={value}" for value in (long_value, f"{long_value[:-1]}, 100]")]
    options += ["dataset.path=../a", "dataset.path=a"]
    paths = [derive(option).path for option in options]
    assert len({str(path).lower() for path in paths}) == len(options)
    assert all(path.parent == Path("studies") and len(path.name) < 100 for path in paths)


def test_derived_study_with_space_and_other_letters_is_not_reported_as_edited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The space is not in the file's name, and the locale has another encoding."""
    Path("params.yaml").write_text(BASE.replace("mu: 1.0", "mu: 1.0, title: FedDW (λ)"), encoding="utf-8")
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, encoding="latin-1": read_text(path, encoding))
    for option in ("study.seeds=0,1", "study.seeds=0, 1"):
        derive(option).write_study("full")
        assert derive(option).file_state == "current"
        assert "title: FedDW (λ)\n" in derive(option).study_text
    assert len(list(Path("studies").glob("*.yaml"))) == 2


def test_derived_study_file_follows_base_study_until_edited() -> None:
    options = ("federation.rounds=5",)
    study = derive(*options)
    assert study.file_state == "missing"
    study.write_study("full")
    Path("params.yaml").write_text(BASE.replace("0.05", "0.01"))
    assert derive(*options).file_state == "outdated"
    assert derive(*options).write_study("full")
    assert yaml.safe_load(study.path.read_text())["federation"]["learning_rate"] == 0.01
    edited_text = study.path.read_text().replace("0.01", "0.02")
    study.path.write_text(edited_text)
    with rejects("studies/params-federation.rounds=5.yaml: ... edited ... fedpipe run --params"):
        derive(*options).write_study("full")
    assert study.path.read_text() == edited_text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["federation.rounds"], "-S: 'federation.rounds' is not KEY=VALUE"),
        (["=5"], "-S: '=5' is not KEY=VALUE"),
        (["federation.rounds="], "-S: 'federation.rounds=' is not KEY=VALUE"),
        (["federation.rounds=010"], "-S federation.rounds: '010' is not valid YAML (line 1, column 2: '010' is ambig"),
        (["federation.rounds=[1"], "-S federation.rounds: '[1' is not valid YAML ("),
        (["federation.rounds=&a [*a]"], "-S federation.rounds: '&a [*a]' is not valid YAML ("),
        (["federation.rounds=1\n2"], "-S federation.rounds: "),
        (["federation={rounds: 1}"], "-S federation: can't be set as a whole"),
        (["federation.rounds=1", "federation.rounds=2"], "-S federation.rounds: "),
        (["mu=0.1"], "-S: 'mu' is not a key of params.yaml. Did you mean 'algorithms.feddw.mu'?"),
        (["federation.round=1"], "federation.round"),
        (["federation.rounds=0"], "federation.rounds: 0"),
        (["federation.rounds.x=1"], "'rounds' is 2 and has no keys"),
        (["algorithms.fedprox.mu=0.1"], "'fedprox' is not in study.algorithms"),
        (["partition.scheme=dirichlet,nothing"], "nothing"),
        *[
            ([f"{key}=[0, 1],[2]"], f"-S {key}: '[0, 1],[2]' has several lists")
            for key in ("study.seeds", "transforms.mean")
        ],
    ],
)
def test_derived_study_rejects_invalid_option_and_writes_no_file(options: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        derive(*options).write_study("full")
    assert message in str(error.value)
    assert not Path("studies").exists()


def test_derived_study_rejects_value_hidden_by_overrides_or_grid() -> None:
    text = BASE.replace("feddw: {mu: 1.0}", "feddw: {mu: 1.0, overrides: {federation.momentum: 0.9}}")
    text = text.replace("{partition.alpha: [0.1, 0.5]}", "{mix: {mild: {partition.alpha: 1.0}}}")
    Path("params.yaml").write_text(text)
    with rejects("-S federation.momentum=0.5 ... feddw, because algorithms.feddw.overrides sets"):
        derive("federation.momentum=0.5").write_study("full")
    with rejects("-S partition.alpha=0.1 ... 'mix' in study.grid sets partition.alpha"):
        derive("partition.alpha=0.1").write_study("full")
    assert not Path("studies").exists()


def test_derived_study_value_takes_precedence_over_preset() -> None:
    study = derive("federation.rounds=7")
    study.write_study("smoke")
    assert yaml.safe_load(study.path.read_text())["presets"] == {"smoke": {"study.seeds": [0]}}
    lines = run_fedpipe("plan", "--dry-run", "--preset", "smoke", "-S", "federation.rounds=7").stdout.splitlines()
    assert len(lines) == 4


@pytest.mark.parametrize(
    ("presets", "key"),
    [
        ("{small: {study.grid: [0]}}", "study.grid"),
        ("{small: {study: 3}}", "study"),
        ("{small: {study: {algorithms: 5}}}", "study.algorithms"),
        ("{small: {study.algorithms: [[1]]}}", "study.algorithms"),
        ("{1: {}}", "presets"),
        ("[small]", "presets"),
    ],
)
def test_derived_study_with_invalid_preset_names_option_in_error_of_study(presets: str, key: str) -> None:
    Path("params.yaml").write_text(f"{BASE.partition('presets:')[0]}presets: {presets}\n")
    messages = []
    for options in ([], ["-S", "execution.stack=2"]):
        with pytest.raises(SettingsError, match=rf"^{key}[:.]") as error:
            run_fedpipe("plan", "--dry-run", "--preset", "small", *options)
        messages.append(str(error.value))
    assert messages[1] == f"{messages[0]} (with -S execution.stack=2)"


def test_dry_run_of_derived_study_equals_plan_of_written_study() -> None:
    option = ("-S", "algorithms.feddw.mu=0.1,1.0")
    printed = run_fedpipe("plan", "--dry-run", *option).stdout
    assert not Path("studies").exists()
    assert len(printed.splitlines()) == 2 * 2 * (1 + 2)
    run_fedpipe("plan", *option)
    (path,) = Path("studies").iterdir()
    assert run_fedpipe("plan", "--dry-run", "--params", str(path)).stdout == printed
    assert Path(f"results/studies/{path.stem}/plan.json").is_file()
    base_keys, keys = (
        {line.split()[-1] for line in text.splitlines()} for text in (run_fedpipe("plan", "--dry-run").stdout, printed)
    )
    assert base_keys <= keys, "the derived study shares runs with the base study"


@pytest.mark.parametrize("command", ["show", "status", "plan"])
def test_commands_reject_edited_copy(command: str) -> None:
    assert run_fedpipe("plan", "-S", "federation.learning_rate=0.1").exit_code == 0
    path = Path("studies/params-federation.learning_rate=0.1.yaml")
    path.write_text(path.read_text().replace("learning_rate: 0.1", "learning_rate: 0.2"))
    with pytest.raises(SettingsError, match=rf"^{path}: .* was edited"):
        run_fedpipe(command, "-S", "federation.learning_rate=0.1")


@pytest.mark.parametrize("command", ["show", "status", "plan"])
def test_commands_reject_copy_of_other_base_with_same_name(command: str) -> None:
    Path("studies").mkdir()
    Path("studies/params.yaml").write_text(BASE.replace("0.05", "0.9"))
    assert run_fedpipe("plan", "-S", "federation.rounds=3").exit_code == 0
    with pytest.raises(
        SettingsError, match=r"derived from params\.yaml with -S .*derives from studies/params\.yaml\. .* or delete it"
    ):
        run_fedpipe(command, "--params", "studies/params.yaml", "-S", "federation.rounds=3")


@pytest.mark.parametrize("command", ["show", "status"])
def test_show_and_status_do_not_write_derived_study(command: str) -> None:
    with rejects("studies/params-federation.rounds=5.yaml does not exist. Type `fedpipe run -S", ArtifactError):
        run_fedpipe(command, "-S", "federation.rounds=5")
    assert not Path("studies").exists()


def test_status_shows_derived_study() -> None:
    run_fedpipe("plan", "-S", "study.seeds=5")
    assert "4 runs" in run_fedpipe("status", "-S", "study.seeds=5").stdout


def test_derived_study_of_nested_study_is_in_same_folder() -> None:
    Path("studies/a").mkdir(parents=True)
    Path("studies/a/b.yaml").write_text(BASE)
    study = derive("federation.rounds=5", base="studies/a/b.yaml")
    assert study.path == Path("studies/a/b-federation.rounds=5.yaml")
    assert study.write_study("full")


def test_missing_weights_error_shows_download_command_for_derived_study(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(folder / "no-weights"))
    weights = "{name: torchvision, architecture: resnet18, weights: IMAGENET1K_V1}"
    study = derive("dataset.name=cifar10", f"model={weights}")
    with pytest.raises(SettingsError, match=r"^model\.sha256: missing") as error:
        study.make_plan("full")
    assert f"`fedpipe download --params {shlex.quote(str(study.path))}`" in str(error.value)
    assert study.path.is_file()  # the command reads it
