"""The command line in process: what it prints, and how it refuses."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

import fedpipe
from fedpipe.cli import app, group
from fedpipe.cli.docs import equations, pages
from fedpipe.core.components import code_digest, component, registry
from fedpipe.planning.planner import NewPlan
from tests import small_studies as studies

KINDS = {
    "algorithms": component.ALGORITHM,
    "datasets": component.DATASET,
    "models": component.MODEL,
    "partitions": component.PARTITION,
}
PHASES = {"plan", "download", "partition", "segment", "train", "aggregate", "evaluate", "collect", "table", "figure"}
COMMANDS = sorted(
    command.name or command.callback.__name__ for command in app.app.registered_commands if command.callback
)
GROUP: Any = get_command(app.app)
EVERYTHING = [(kind, name) for kind in KINDS.values() for name in registry.list_components(kind)]


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app.app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence on standard error with which `fedpipe` ends, and status 2."""
    monkeypatch.setattr(sys, "argv", ["fedpipe", *arguments])
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    (line,) = err.splitlines()
    return line.removeprefix("fedpipe: ")


def test_a_truth_value_is_no_number_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    params = studies.settings(federation={"learning_rate": 1.0}, partition={"alpha": 1.0})
    studies.write(params, Path())
    one = printed("plan", "--dry-run")
    text = Path("params.yaml").read_text()
    Path("params.yaml").write_text(text.replace("learning_rate: 1.0", "learning_rate: true"))
    assert refused(monkeypatch, capsys, "plan") == ("federation.learning_rate: true can't be used. Use a valid number.")
    assert not Path("results").exists()
    Path("params.yaml").write_text(text.replace("learning_rate: 1.0", "learning_rate: 1e0"))  # text, to YAML 1.1
    assert printed("plan", "--dry-run") == one


@pytest.mark.parametrize("command", ["rune", "runs", "prun", "prunes", "pruning", "purge", "delete", "tran", "statsu"])
def test_a_mistyped_command_never_suggests_one_that_deletes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    said = refused(monkeypatch, capsys, command)
    assert said.startswith(f"'{command}' is not a command; ")
    assert "prune" not in said.replace(f"'{command}'", "")
    suggested = {"runs": "did you mean 'run'?", "tran": "did you mean 'train'?", "statsu": "did you mean 'status'?"}
    assert suggested.get(command, "`fedpipe --help` lists them") in said


def test_a_mistyped_option_of_prune_never_suggests_not_to_ask() -> None:
    result = CliRunner().invoke(app.app, ["prune", "--ye"])
    assert result.exit_code == 2
    assert "No such option" in result.output
    assert "--yes" not in result.output
    assert "--dry-run" in CliRunner().invoke(app.app, ["plan", "--dry"]).output


def planned() -> NewPlan:
    return studies.prepare(studies.settings())


# -- list and describe -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_list_prints_a_name_a_line_with_its_summary(kind: str) -> None:
    names = registry.list_components(KINDS[kind])
    lines = printed("list", kind).splitlines()
    assert [line.split()[0] for line in lines] == list(names) == sorted(names)
    for line, name in zip(lines, names, strict=True):
        summary = line.removeprefix(name).strip()
        assert summary == component.get_docstring_summary(registry.find_component(KINDS[kind], name))
        assert len(summary) > 10
    assert len({len(line) - len(line[len(line.split()[0]) :].lstrip()) for line in lines}) == 1, "columns are aligned"


def test_shipped_algorithms_and_four_schemes_are_listed() -> None:
    assert set(studies.SHIPPED) <= set(registry.list_components(component.ALGORITHM))
    assert {"dirichlet", "iid", "pathological", "shards"} <= set(registry.list_components(component.PARTITION))
    assert "digits" in registry.list_components(component.DATASET)


@pytest.mark.parametrize(("kind", "name"), EVERYTHING, ids=[name for _, name in EVERYTHING])
def test_describe_prints_docstring_parameters_and_defaults(kind: component.ComponentKind, name: str) -> None:
    text = printed("describe", name)
    found = registry.find_component(kind, name)
    doc = inspect.getdoc(found)
    assert doc
    assert equations.render_docstring(doc) in text
    assert not re.search(r"\\[a-zA-Z]|:math:|\.\. math::", text), "equations are for people"
    assert text.startswith(f"{name} ({kind.name})\n")
    if kind is component.ALGORITHM:
        assert all(re.search(rf"\b{part}: ", doc) for part in ("Source", "State", "Traffic")), name
    for field in component.list_parameters(found):
        default = "(required)" if field.default is dataclasses.MISSING else json.dumps(field.default)
        inherited = pages.get_inherited_docs(found).get(field.name)
        meaning = f"    # {equations.render_docstring(inherited)}" if inherited else ""
        assert f"  {field.name}: {default}{meaning}\n" in text


@pytest.mark.parametrize(("kind", "name"), EVERYTHING, ids=[name for _, name in EVERYTHING])
def test_every_parameter_is_documented(kind: component.ComponentKind, name: str) -> None:
    found = registry.find_component(kind, name)
    documented = inspect.getdoc(found) or ""
    parameters = documented.partition("Parameters\n----------\n")[2]
    told = {name.strip() for line in parameters.splitlines() if line[:1].strip() for name in line.split(",")}
    told |= set(pages.get_inherited_docs(found))
    assert told.issuperset(field.name for field in component.list_parameters(found))


def test_list_and_describe_know_diagnostics() -> None:
    lines = printed("list", "diagnostics").splitlines()
    assert [line.split()[0] for line in lines] == ["head-norms", "features", "surface", "gradients", "locals"]
    assert lines[0] == "head-norms  Norms of the rows of heads, next to the class fractions of the owners."
    for kind in code_digest.DIAGNOSTIC_MODULES:
        text, module = printed("describe", kind), importlib.import_module(code_digest.DIAGNOSTIC_MODULES[kind])
        columns = text.partition("Columns of its table")[2].splitlines()[1:]
        assert [line.split()[0] for line in columns] == module.SCHEMA.names, kind
        assert f"\n  kind: {kind}\n" in text
        assert '\n  rounds: ["last"]    # Rounds to analyze.' in text
    assert "\n  norm    # Euclidean norm\n" in printed("describe", "head-norms")


def test_describe_finds_ones_own_components() -> None:
    """What params.yaml may name, `describe` should explain."""
    text = printed("describe", "fedpipe.algorithms.fedprox.FedProx")
    assert "  mu: 0.01\n" in text


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("study", "plan", "command"),
    [
        ("params.yaml", "results/plan.json", "fedpipe run"),
        ("studies/two.yaml", "results/studies/two/plan.json", "fedpipe run --params studies/two.yaml"),
    ],
)
def test_a_study_that_was_never_run_is_told_how_to(
    study: str, plan: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("studies").mkdir()
    Path(study).touch()
    sentence = f"{plan} is missing; type `{command}` first."
    assert refused(monkeypatch, capsys, "status", "--params", study) == sentence


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("describe", "fedavgg"), "'fedavgg' is unknown. Did you mean 'fedavg'?"),
        (("list", "algos"), "'algos' can't be listed. Did you mean 'algorithms'?"),
        (
            ("list", "zzz"),
            "'zzz' can't be listed. Use one of: algorithms, datasets, models, partitions, diagnostics.",
        ),
        (("figure", "pie"), "'pie' can't be drawn. Use curves, matrices, or partition with its key."),
        (("download", "digit"), "dataset.name: unknown data set 'digit'. Did you mean 'digits'?"),
        (("plan",), "params.yaml: there is no such file; run from the folder that holds it."),
        (("show",), "params.yaml: there is no such file; run from the folder that holds it."),
        *(
            (
                (command, "--params", "studies/a", "--preset", "smoke"),
                "studies/a is a folder, and --params should be one study's file here; "
                "`snakemake all --config params=studies/a preset=smoke --profile workflow/profiles/local` makes all "
                "studies in a folder.",
            )
            for command in ("run", "show")
        ),
        (
            ("segment", "results/runs/fedavg/0123456789ab", "--stop", "3"),
            "results/runs/fedavg/0123456789ab/run.yaml is missing; run `fedpipe plan` to write it again.",
        ),
    ],
    ids=lambda told: "-".join(told[:2]) if isinstance(told, tuple) else "",
)
def test_a_mistake_is_one_sentence_and_status_2(
    arguments: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("studies/a").mkdir(parents=True)
    assert refused(monkeypatch, capsys, *arguments) == sentence


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("segment", "results/runs/fedavg/0123456789ab", "--stop", "3"), "results/runs/fedavg/0123456789ab/run.yaml"),
        (("train", "RUN", "--round", "3", "--block", "0", "--size", "5"), "0002"),
        (("aggregate", "RUN", "--round", "3", "--blocks", "1"), "block-0000.pt"),
        (("evaluate", "RUN", "--round", "3"), "0003"),
        (("collect", "RUN", "--rounds", "3"), "0001"),
        (("partition", "0123456789ab"), "0123456789ab"),
        (("figure", "partition", "0123456789ab"), "0123456789ab"),
        (("figure", "partition"), "partition"),
        (("record", "fedprox"), "fedprox"),  # not in the study
        (("show",), "results/tables/results.md"),
        (("table",), "joined.json"),
    ],
    ids=lambda told: "-".join(told[:2]).replace("/", "-") if isinstance(told, tuple) else "",
)
def test_a_stage_that_can_not_run_says_so_without_a_traceback(
    arguments: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(planned().runs[0].path)
    sentence = refused(monkeypatch, capsys, *(path if argument == "RUN" else argument for argument in arguments))
    assert named in sentence


def test_a_block_that_the_round_does_not_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = studies.prepare(studies.settings(execution={"rounds_per_job": 1, "clients_per_job": 3}))
    path = str(made.runs[0].path)
    printed("initialize", path)
    printed("train", path, "--round", "1", "--block", "1", "--size", "3")
    sentence = refused(monkeypatch, capsys, "train", path, "--round", "1", "--block", "2", "--size", "3")
    assert "block" in sentence


# -- help and schema ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    text = printed(command.rstrip("_"), "--help")
    assert "Usage" in text
    assert "--help" in text


def test_every_command_says_what_it_does() -> None:
    assert set(COMMANDS) >= PHASES
    text = printed("--help")
    for command in app.app.registered_commands:
        assert command.callback
        summary = (inspect.getdoc(command.callback) or "").split("\n")[0]
        assert summary.endswith(".")
        assert (command.name or command.callback.__name__) in text


def test_schema_is_valid_json_schema() -> None:
    schema = json.loads(printed("schema"))
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    assert not list(validator(schema).iter_errors(studies.settings()))
    assert list(validator(schema).iter_errors({"federation": {"client": 3}}))


# -- plan --------------------------------------------------------------------------------------------------------------


def test_plan_writes_the_plan_and_a_dry_run_shows_it() -> None:
    studies.write(studies.settings(study={"seeds": [0, 1]}), Path())
    lines = printed("plan", "--dry-run").splitlines()
    assert [line.split()[:3] for line in lines] == [["fedavg", "seed", "0"], ["fedavg", "seed", "1"]]
    assert not Path("results").exists()
    printed("plan")
    made = json.loads(Path("results/plan.json").read_text())
    assert [run["key"] for run in made["runs"]] == [line.split()[-1] for line in lines]
    assert all(Path(name).is_file() for name in made["files"])


def test_a_dry_run_prints_a_line_a_run_that_ends_with_its_key() -> None:
    settings = studies.settings(("fedavg", "fedprox"))
    settings["study"]["grid"] = {"dataset.test_fraction": [0.2, 0.3], "algorithms.fedprox.mu": [0.1, 1.0]}
    studies.write(settings, Path())
    one, *others = printed("plan", "--dry-run").splitlines()
    assert re.fullmatch(r"fedavg +seed 0  dataset\.test_fraction=0\.2; dataset\.test_fraction=0\.3  [0-9a-f]{12}", one)
    assert len(others) == 2
    assert all(re.search(r"^fedprox .* [0-9a-f]{12}$", line) for line in others)


def test_a_mistake_in_a_folder_of_studies_names_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("studies").mkdir()
    for name in ("one", "two"):
        Path(f"studies/{name}.yaml").write_text("study: {algorithms: [fedavg]}\n")
    *runs, said = printed("plan", "--dry-run", "--params", "studies").splitlines()
    assert len(runs) == 2
    assert said == "fedpipe: 2 studies: 1 run to make, 20 rounds in all."
    for text, sentence in (
        ("federation: {rounds: 0}\n", "federation.rounds: 0 can't be used. Use a value greater than or equal to 1."),
        ("a: [\n", "it is not valid YAML (line 2, column 1: expected the node content, but found '<stream end>')."),
    ):
        Path("studies/two.yaml").write_text(text)
        assert refused(monkeypatch, capsys, "plan", "--params", "studies") == f"studies/two.yaml: {sentence}"
    Path("studies/one.yaml").write_text("presets: {smoke: {federation.rounds: 1}}\n")
    Path("studies/two.yaml").write_text("study: {algorithms: [fedavg]}\n")
    assert refused(monkeypatch, capsys, "plan", "--params", "studies", "--preset", "smoke") == (
        "studies/two.yaml: --preset: 'smoke' is no preset of this study. Use one of: full."
    )
    assert not Path("results").exists(), "nothing is written of the others"


def test_plan_takes_another_study() -> None:
    Path("studies").mkdir()
    studies.write(studies.settings(), Path("studies"))
    printed("plan", "--params", "studies/params.yaml")
    assert json.loads(Path("results/studies/params/plan.json").read_text())["params"] == "studies/params.yaml"
    assert not Path("results/plan.json").exists()


def test_a_plan_that_can_not_be_read_is_told_since_it_costs_disk() -> None:
    """All runs keep what its study may want, which is every state."""
    studies.write(studies.settings(artifacts={"keep_models": "last"}), Path())
    assert "can't be read" not in printed("plan")
    other = Path("results/studies/other/plan.json")
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    assert printed("plan").splitlines() == [
        f"fedpipe: warning: {other} can't be read, so that all runs keep the states of every round, whatever "
        "artifacts.keep_models says; plan that study again, or delete the file."
    ]


# -- the door ----------------------------------------------------------------------------------------------------------


def test_help_tells_commands_for_people_from_stages() -> None:
    panels = {name: command.rich_help_panel for name, command in GROUP.commands.items()}
    assert set(panels.values()) == {group.PEOPLE_PANEL, group.STAGES_PANEL, group.GENERATED_PANEL}, (
        "each command is in a group"
    )
    people = {name for name, panel in panels.items() if panel == group.PEOPLE_PANEL}
    assert people >= {"plan", "run", "show", "status", "trace", "verify", "diff", "prune", "list", "describe"}
    text = printed("--help")
    places = [text.index(panel) for panel in (group.PEOPLE_PANEL, group.STAGES_PANEL, group.GENERATED_PANEL)]
    assert places == sorted(places)
    for name, panel in panels.items():
        (line,) = re.findall(rf"^\W*{name} {{2,}}\w", text, flags=re.M)
        before = [place for place in places if place < text.index(line)]
        assert text[before[-1] :].startswith(panel), name


def test_stages_are_what_rules_and_dvc_call() -> None:
    files = [*(studies.ROOT / "workflow/rules").glob("*.smk"), studies.ROOT / "dvc.yaml"]
    called = {name for file in files for name in re.findall(r"fedpipe (\w+)", file.read_text())}
    stages = {name for name, command in GROUP.commands.items() if command.rich_help_panel == group.STAGES_PANEL}
    both = {"plan", "download", "partition", "papers"}  # people call these, too
    assert stages == (called & set(GROUP.commands)) - both


@pytest.mark.parametrize("profile", ["gpu", "slurm"])
def test_each_job_that_computes_on_a_gpu_asks_for_one(profile: str) -> None:
    """Else a profile for GPUs starts as many of them at once as there are cores."""
    asked = yaml.safe_load((studies.ROOT / f"workflow/profiles/{profile}/config.yaml").read_text())["set-resources"]
    computing = {
        name
        for name, command in GROUP.commands.items()
        if any(parameter.envvar == "FEDPIPE_DEVICE" for parameter in command.params)
    }
    assert {name for name, resources in asked.items() if resources["gpu"] == 1} == computing
    assert {"segment", "diagnostic"} < computing


@pytest.mark.parametrize("arguments", [("list", "algorithms"), ("--help",), ("plan", "--dry-run")])
@pytest.mark.parametrize("where", ["stdout", "both"])
def test_a_full_disk_that_it_prints_to_is_one_sentence(arguments: tuple[str, ...], where: str) -> None:
    studies.write(studies.settings(), Path())
    with Path("/dev/full").open("w") as full:
        error = full if where == "both" else subprocess.PIPE
        done = subprocess.run([sys.executable, "-m", "fedpipe", *arguments], stdout=full, stderr=error, text=True)
    assert done.returncode == 2
    assert done.stderr in (None, "fedpipe: what it prints can't be written (No space left on device).\n")


def test_a_locale_without_greek_letters_has_their_numbers() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "fedpipe", "describe", "feddw"],
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=True,
    )
    assert rb"\u03a9" in told.stdout


def test_version_and_help_import_nothing_heavy() -> None:
    code = (
        "import sys, fedpipe.cli.app;"
        "print(sorted({'torch', 'pandas', 'snakemake', 'matplotlib', 'dvc'} & {*sys.modules}))"
    )
    for command in (["-c", code], ["-m", "fedpipe", "--version"]):
        done = subprocess.run([sys.executable, *command], cwd=studies.ROOT, capture_output=True, text=True, check=True)
        assert done.stdout in {"[]\n", f"fedpipe {fedpipe.__version__}\n"}


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("fedpipe stat", ["status"]),
        ("fedpipe ver", ["verify"]),
        ("fedpipe plan --d", ["--dry-run"]),
        ("fedpipe run --prof", ["--profile"]),
        ("fedpipe nonsense ", list(GROUP.commands)),  # and no error between the words that one types
    ],
)
def test_bash_completes(line: str, offered: list[str]) -> None:
    """As bash would: the script of --show-completion is loaded, and its function called."""
    words = line.split(" ")
    script = f"""
        eval "$(fedpipe --show-completion)"
        function=$(complete -p fedpipe | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
        COMP_WORDS=({" ".join(words) if words[-1] else " ".join(words) + '""'}) COMP_CWORD={len(words) - 1}
        $function fedpipe
        echo "${{COMPREPLY[@]}}"
    """
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SHELL": "/bin/bash"}
    environment |= {"PYTHONPATH": str(studies.ROOT)}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == offered
