"""Output and errors of the command line."""

import dataclasses
import importlib
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.main import get_command

from fedpipe.cli import app, group
from fedpipe.cli.docs import equations, pages
from fedpipe.core.components import code_digest, component, registry
from tests import small_studies as studies
from tests.small_studies import AS_USER, RunFedpipe, run_command

pytestmark = pytest.mark.usefixtures("in_empty_folder")

KINDS = {kind.plural: kind for kind in component.COMPONENT_KINDS}
GROUP: Any = get_command(app.app)
COMPONENTS = [(kind, name) for kind in KINDS.values() for name in registry.list_components(kind)]


def read_error(run_fedpipe: RunFedpipe, *arguments: str) -> str:
    """Run a command that fails with one line on standard error and status 2. Return the message."""
    status, output, error = run_fedpipe(*arguments)
    assert (status, output) == (2, "")
    assert "Traceback" not in error
    (line,) = error.splitlines()
    return line.removeprefix("fedpipe: ")


def test_plan_rejects_boolean_as_number_and_writes_nothing(run_fedpipe: RunFedpipe) -> None:
    params = studies.settings(federation={"learning_rate": 1.0}, partition={"alpha": 1.0})
    studies.write(params, Path())
    first_output = run_command("plan", "--dry-run")
    text = Path("params.yaml").read_text()
    Path("params.yaml").write_text(text.replace("learning_rate: 1.0", "learning_rate: true"))
    error = read_error(run_fedpipe, "plan")
    assert error.startswith("federation.learning_rate: true ")
    assert "number" in error
    assert not Path("results").exists()
    Path("params.yaml").write_text(text.replace("learning_rate: 1.0", "learning_rate: 1e0"))  # a string in YAML 1.1
    assert run_command("plan", "--dry-run") == first_output


@pytest.mark.parametrize("command", ["rune", "runs", "prun", "prunes", "pruning", "purge", "delete", "tran", "statsu"])
def test_mistyped_command_error_never_suggests_prune(command: str, run_fedpipe: RunFedpipe) -> None:
    output = read_error(run_fedpipe, command)
    assert output.startswith(f"'{command}' is not a command")
    assert "prune" not in output.replace(f"'{command}'", "")
    suggestions = {"runs": "'run'?", "tran": "'train'?", "statsu": "'status'?"}
    assert suggestions.get(command, "`fedpipe --help`") in output


# -- list and describe -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_list_prints_one_name_and_summary_per_line(kind: str) -> None:
    names = registry.list_components(KINDS[kind])
    lines = run_command("list", kind).splitlines()
    assert [line.split()[0] for line in lines] == list(names) == sorted(names)
    for line, name in zip(lines, names, strict=True):
        summary = line.removeprefix(name).strip()
        assert summary == component.get_docstring_summary(registry.find_component(KINDS[kind], name))
        assert len(summary) > 10
    assert len({len(line) - len(line[len(line.split()[0]) :].lstrip()) for line in lines}) == 1, "columns are aligned"


@pytest.mark.parametrize(("kind", "name"), COMPONENTS, ids=[name for _, name in COMPONENTS])
def test_describe_prints_docstring_parameters_and_defaults(kind: component.ComponentKind, name: str) -> None:
    text = run_command("describe", name)
    component_class = registry.find_component(kind, name)
    doc = inspect.getdoc(component_class)
    assert doc
    assert equations.render_docstring_equations(doc) in text
    assert not re.search(r"\\[a-zA-Z]|:math:|\.\. math::", text), "equations are rendered as plain text"
    assert text.startswith(f"{name} ({kind.name})\n")
    if kind is component.ALGORITHM:
        assert all(re.search(rf"\b{part}: ", doc) for part in ("Source", "State", "Traffic")), name
    inherited_docs = pages.get_inherited_parameter_docs(component_class)
    own_docs = doc.partition("Parameters\n----------\n")[2].splitlines()
    documented_names = {name.strip() for line in own_docs if line[:1].strip() for name in line.split(",")}
    for field in component.list_parameters(component_class):
        assert field.name in documented_names | {*inherited_docs}, "each parameter is documented"
        default = "(required)" if field.default is dataclasses.MISSING else json.dumps(field.default)
        inherited = inherited_docs.get(field.name)
        meaning = f"    # {equations.render_docstring_equations(inherited)}" if inherited else ""
        assert f"  {field.name}: {default}{meaning}\n" in text


def test_list_and_describe_show_diagnostics() -> None:
    lines = run_command("list", "diagnostics").splitlines()
    assert [line.split()[0] for line in lines] == ["head-norms", "features", "surface", "gradients", "locals"]
    assert lines[0] == "head-norms  Norms of the rows of heads, next to the class fractions of the owners."
    for kind in code_digest.DIAGNOSTIC_MODULES:
        text, module = run_command("describe", kind), importlib.import_module(code_digest.DIAGNOSTIC_MODULES[kind])
        columns = text.partition("Columns of its table")[2].splitlines()[1:]
        assert [line.split()[0] for line in columns] == module.SCHEMA.names, kind
        assert f"\n  kind: {kind}\n" in text
        assert '\n  rounds: ["last"]    # Rounds to analyze.' in text
    assert "\n  norm    # Euclidean norm\n" in run_command("describe", "head-norms")


def test_describe_finds_custom_components() -> None:
    """`describe` accepts class paths and labels of params.yaml."""
    text = run_command("describe", "fedpipe.algorithms.fedprox.FedProx")
    assert "  mu: 0.01\n" in text
    Path("params.yaml").write_text("algorithms: {mine: {algorithm: fedpipe.algorithms.fedprox.FedProx, mu: 1.0}}\n")
    assert run_command("describe", "mine") == text


# -- errors ------------------------------------------------------------------------------------------------------------


def test_describe_shows_mistake_in_custom_module_and_study(run_fedpipe: RunFedpipe) -> None:
    Path("own_broken.py").write_text("x = 1 / 0\n")
    assert "division by zero, own_broken.py, line 1" in read_error(run_fedpipe, "describe", "own_broken.X")
    Path("params.yaml").write_bytes(b"\xff")
    assert read_error(run_fedpipe, "describe", "prox").startswith("params.yaml: not UTF-8 text")


@pytest.mark.parametrize(
    ("study", "plan", "command"),
    [
        ("params.yaml", "results/plan.json", "fedpipe run"),
        ("studies/two.yaml", "results/studies/two/plan.json", "fedpipe run --params studies/two.yaml"),
    ],
)
def test_missing_results_error_shows_run_command_of_study(
    study: str, plan: str, command: str, run_fedpipe: RunFedpipe
) -> None:
    Path("studies").mkdir()
    Path(study).touch()
    error = read_error(run_fedpipe, "status", "--params", study)
    assert error.startswith(f"{plan} is missing. Type `{command}` first")
    Path("dvc.lock").touch()  # as in a clone of a repository whose results are recorded
    assert ("`dvc pull`" in read_error(run_fedpipe, "status", "--params", study)) == (study == "params.yaml")


@pytest.mark.parametrize("command", ["show", "status"])
def test_unknown_preset_is_not_advised_to_be_run(command: str, run_fedpipe: RunFedpipe) -> None:
    studies.write(studies.settings() | {"presets": {"smoke": {"federation.rounds": 1}}}, Path())
    error = read_error(run_fedpipe, command, "--preset", "smok")
    assert error.startswith("--preset: 'smok' is not a preset of this study. Did you mean 'smoke'?")
    assert "`fedpipe run --preset smoke` first" in read_error(run_fedpipe, command, "--preset", "smoke")


@pytest.mark.parametrize(
    ("arguments", "problem", "advice"),
    [
        (("describe", "fedavgg"), "'fedavgg' is unknown", "'fedavg'?"),
        (("list", "algos"), "'algos' ", "'algorithms'?"),
        (("list", "zzz"), "'zzz' ", "algorithms, datasets, models, partitions, diagnostics"),
        (("download", "digit"), "dataset.name: ", "'digits'?"),
        (("plan",), "params.yaml: ", "file"),
        (("show",), "params.yaml: ", "file"),
        (("store",), "studies/papers: the file does not exist", "folder"),
        (("status", "--params", "other"), "other: the file does not exist", "folder"),
        (
            ("run", "--params", "studies/a", "--preset", "smoke"),
            "--params: studies/a is a folder",
            "`snakemake all --config params=studies/a preset=smoke --profile workflow/profiles/local`",
        ),
        (("status", "--params", "studies/a"), "--params: studies/a is a folder", "`--html FILE`"),
        (
            ("segment", "results/runs/fedavg/0123456789ab", "--stop", "3"),
            "results/runs/fedavg/0123456789ab/run.yaml is missing",
            "`fedpipe plan`",
        ),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_invalid_arguments_print_one_message_and_exit_with_status_2(
    arguments: tuple[str, ...], problem: str, advice: str, run_fedpipe: RunFedpipe
) -> None:
    Path("studies/a").mkdir(parents=True)
    error = read_error(run_fedpipe, *arguments)
    assert error.startswith(problem)
    assert advice in error


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("train", "RUN", "--round", "3", "--block", "0", "--size", "5"), "0002"),
        (("aggregate", "RUN", "--round", "3", "--blocks", "1"), "block-0000.pt"),
        (("evaluate", "RUN", "--round", "3"), "0003"),
        (("collect", "RUN", "--rounds", "3"), "0001"),
        (("partition", "0123456789ab"), "0123456789ab"),
        (("figure", "partition", "0123456789ab"), "0123456789ab"),
        (("figure", "partition"), "KEY: missing"),
        (("figure", "pie"), "'pie' is not a figure of params.yaml. Use one of: partition, curves, matrices."),
        (("record", "fedprox"), "fedprox"),  # not in the study
        (("show",), "results/tables/results.md"),
        (("table",), "joined.json"),
    ],
    ids=lambda value: "-".join(value[:2]).replace("/", "-") if isinstance(value, tuple) else "",
)
def test_stage_without_inputs_prints_error_without_traceback(
    arguments: tuple[str, ...], name: str, run_fedpipe: RunFedpipe
) -> None:
    path = str(studies.prepare(studies.settings()).runs[0].path)
    assert name in read_error(run_fedpipe, *(path if argument == "RUN" else argument for argument in arguments))


def test_train_rejects_block_outside_round(run_fedpipe: RunFedpipe) -> None:
    new_plan = studies.prepare(studies.settings(execution={"rounds_per_job": 1, "clients_per_job": 3}))
    path = str(new_plan.runs[0].path)
    run_command("initialize", path)
    run_command("train", path, "--round", "1", "--block", "1", "--size", "3")
    error = read_error(run_fedpipe, "train", path, "--round", "1", "--block", "2", "--size", "3")
    assert error.startswith("--block: 2 ")
    assert "0 to 1" in error


# -- help and schema ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", *GROUP.commands])
def test_every_command_has_help(command: str) -> None:
    text = run_command(*command.split(), "--help")
    assert "Usage" in text
    assert "--help" in text
    assert run_command(*command.split(), "-h") == text


def test_schema_is_valid_json_schema() -> None:
    schema = json.loads(pages.render_json_schema())
    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    assert not list(validator(schema).iter_errors(studies.settings()))
    assert list(validator(schema).iter_errors({"federation": {"client": 3}}))


# -- plan --------------------------------------------------------------------------------------------------------------


def test_plan_writes_runs_that_dry_run_prints() -> None:
    studies.write(studies.settings(study={"seeds": [0, 1]}), Path())
    lines = run_command("plan", "--dry-run").splitlines()
    assert [line.split()[:3] for line in lines] == [["fedavg", "seed", "0"], ["fedavg", "seed", "1"]]
    assert [path.name for path in Path().iterdir()] == ["params.yaml"], "a dry run writes nothing"
    run_command("plan")
    new_plan = json.loads(Path("results/plan.json").read_text())
    assert [run["key"] for run in new_plan["runs"]] == [line.split()[-1] for line in lines]
    assert all(Path(name).is_file() for name in new_plan["files"])


def test_dry_run_prints_one_line_per_run_that_ends_with_run_key() -> None:
    settings = studies.settings(("fedavg", "fedprox"))
    settings["study"]["grid"] = {"dataset.test_fraction": [0.2, 0.3], "algorithms.fedprox.mu": [0.1, 1.0]}
    studies.write(settings, Path())
    lines = run_command("plan", "--dry-run").splitlines()
    first_line, *other_lines = [line for line in lines if not line.startswith("fedpipe: warning: ")]
    assert re.fullmatch(
        r"fedavg +seed 0  dataset\.test_fraction=0\.2; dataset\.test_fraction=0\.3  [0-9a-f]{12}", first_line
    )
    assert len(other_lines) == 2
    assert all(re.search(r"^fedprox .* [0-9a-f]{12}$", line) for line in other_lines)


def test_plan_error_in_folder_of_studies_begins_with_study_file(run_fedpipe: RunFedpipe) -> None:
    Path("studies").mkdir()
    for name in ("one", "two"):
        Path(f"studies/{name}.yaml").write_text("study: {algorithms: [fedavg]}\n")
    *runs, output = run_command("plan", "--dry-run", "--params", "studies").splitlines()
    assert len(runs) == 2
    assert re.match("fedpipe: 2 studies: 1 run .*, 20 rounds", output)
    for text, pattern in (
        ("federation: {rounds: 0}\n", "studies/two.yaml: federation.rounds: 0 .* 1"),
        ("a: [\n", r"studies/two.yaml: .*YAML \(line 2, column 1: expected the node content"),
    ):
        Path("studies/two.yaml").write_text(text)
        assert re.match(pattern, read_error(run_fedpipe, "plan", "--params", "studies"))
    Path("studies/one.yaml").write_text("presets: {smoke: {federation.rounds: 1}}\n")
    Path("studies/two.yaml").write_text("study: {algorithms: [fedavg]}\n")
    error = read_error(run_fedpipe, "plan", "--params", "studies", "--preset", "smoke")
    assert re.match("studies/two.yaml: --preset: 'smoke' .*full", error)
    assert not Path("results").exists(), "no study of the folder is planned"


@pytest.mark.parametrize("command", ["plan", "download"])
def test_each_line_of_error_in_folder_of_studies_begins_with_study_file(command: str, run_fedpipe: RunFedpipe) -> None:
    Path("studies").mkdir()
    for name in ("one", "two"):
        Path(f"studies/{name}.yaml").write_text("dataset: {a: 1, b: 2}\n")
    _, _, errors = run_fedpipe(command, "--params", "studies")
    lines = errors.removeprefix("fedpipe: ").splitlines()
    assert len(lines) > 1
    assert all(re.match("studies/(one|two).yaml: dataset.[ab]: unknown key", line) for line in lines)


def test_plan_of_other_study_is_in_its_results_folder() -> None:
    Path("studies").mkdir()
    studies.write(studies.settings(), Path("studies"))
    run_command("plan", "--params", "studies/params.yaml")
    assert json.loads(Path("results/studies/params/plan.json").read_text())["params"] == "studies/params.yaml"
    assert not Path("results/plan.json").exists()


@pytest.mark.parametrize(
    "command",
    [
        *("plan", "plan --dry-run", "plan --dry-run -S federation.rounds=2", "download", "download digits"),
        *("partition --preview", "check fedavg", "run -n", "run -S federation.rounds=2", "show", "status", "table"),
    ],
)
def test_every_command_rejects_study_outside_studies_folder(run_fedpipe: RunFedpipe, command: str) -> None:
    """Otherwise the results would be in results/studies/other, like the results of studies/other.yaml."""
    Path("other.yaml").write_text(yaml.safe_dump(studies.settings()))
    error = read_error(run_fedpipe, *command.split(), "--params", "other.yaml")
    assert error.startswith("other.yaml: not the path of a study")
    assert "studies/other.yaml" in error
    assert [path.name for path in Path().iterdir()] == ["other.yaml"], "nothing is written"


@pytest.mark.parametrize("path", ["sensors/params.yaml", "sensors/studies/own.yaml"])
def test_study_of_other_project_gets_command_to_change_folder(run_fedpipe: RunFedpipe, path: str) -> None:
    Path(path).parent.mkdir(parents=True)
    Path(path).write_text(yaml.safe_dump(studies.settings()))
    Path("sensors/Snakefile").touch()
    assert read_error(run_fedpipe, "plan", "--params", path) == (
        f"{path}: not the path of a study. It belongs to another project. Type `cd sensors` first."
    )


def test_plan_warns_about_unreadable_plan_of_other_study() -> None:
    """All runs keep every state, because the unreadable study may need it."""
    studies.write(studies.settings(artifacts={"keep_models": "last"}), Path())
    assert "warning" not in run_command("plan")
    other = Path("results/studies/other/plan.json")
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    (warning,) = run_command("plan").splitlines()
    assert warning.startswith(f"fedpipe: warning: {other} can't be read")
    assert "artifacts.keep_models" in warning


# -- entry point -------------------------------------------------------------------------------------------------------


def test_help_separates_user_commands_from_stages() -> None:
    panels = {name: command.rich_help_panel for name, command in GROUP.commands.items()}
    assert set(panels.values()) == {group.USER_PANEL, group.STAGES_PANEL, group.GENERATED_PANEL}, (
        "each command is in a group"
    )
    user_commands = {name for name, panel in panels.items() if panel == group.USER_PANEL}
    assert user_commands >= {"plan", "run", "show", "status", "trace", "verify", "diff", "prune", "list", "describe"}
    text = run_command("--help")
    panel_positions = [text.index(panel) for panel in (group.USER_PANEL, group.STAGES_PANEL, group.GENERATED_PANEL)]
    assert panel_positions == sorted(panel_positions)
    for name, panel in panels.items():
        assert GROUP.commands[name].help.split("\n")[0].endswith("."), name
        (line,) = re.findall(rf"^\W*{name} {{2,}}\w", text, flags=re.M)
        before = [position for position in panel_positions if position < text.index(line)]
        assert text[before[-1] :].startswith(panel), name


def test_stages_are_commands_that_rules_and_dvc_call() -> None:
    files = [*(studies.ROOT / "workflow/rules").glob("*.smk"), studies.ROOT / "dvc.yaml"]
    called_names = {name for file in files for name in re.findall(r"fedpipe (\w+)", file.read_text())}
    stages = {name for name, command in GROUP.commands.items() if command.rich_help_panel == group.STAGES_PANEL}
    shared = {"plan", "download", "partition", "papers"}  # users call these, too
    assert stages | shared == called_names & set(GROUP.commands)
    assert stages == {
        *("segment", "initialize", "train", "aggregate", "evaluate", "collect"),
        *("diagnostic", "rank", "table", "figure", "record"),
    }


@pytest.mark.parametrize("profile", ["gpu", "slurm"])
def test_gpu_profiles_request_gpu_for_each_rule_with_device_option(profile: str) -> None:
    """Otherwise a profile for GPUs starts as many jobs as there are cores."""
    settings = yaml.safe_load((studies.ROOT / f"workflow/profiles/{profile}/config.yaml").read_text())
    variables = {name: {option.envvar for option in command.params} for name, command in GROUP.commands.items()}
    computing = {name for name in variables if "FEDPIPE_DEVICE" in variables[name]}
    assert {name for name, resources in settings["set-resources"].items() if resources["gpu"] == 1} == computing
    assert {"segment", "diagnostic"} < computing


@pytest.mark.parametrize(
    ("command", "is_stderr_full"),
    [("list algorithms", False), ("--help", False), ("plan --dry-run", False), ("plan --dry-run", True)],
)
def test_full_disk_prints_one_message(command: str, is_stderr_full: bool) -> None:
    studies.write(studies.settings(), Path())
    arguments = [sys.executable, "-m", "fedpipe", *command.split()]
    with Path("/dev/full").open("w") as full:
        error = full if is_stderr_full else subprocess.PIPE
        process = subprocess.run(arguments, stdout=full, stderr=error, text=True)
    assert process.returncode == 2
    if not is_stderr_full:
        (line,) = process.stderr.splitlines()
        assert line.startswith("fedpipe: ")
        assert "No space left on device" in line


def test_unreadable_results_of_another_user_print_one_message() -> None:
    """For example, another user of the folder has the umask 077."""
    studies.write(studies.settings(), Path())
    run_command("plan")
    folder = Path("results/runs")
    folder.chmod(0)
    command = [*AS_USER, sys.executable, "-m", "fedpipe", "status"]
    process = subprocess.run(command, capture_output=True, text=True)
    folder.chmod(0o755)
    assert process.returncode == 2
    (line,) = process.stderr.splitlines()
    assert line.startswith("fedpipe: results/runs/")
    assert "Permission denied" in line


def test_describe_escapes_greek_letters_in_latin_1_locale() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "fedpipe", "describe", "feddw"],
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=True,
    )
    assert rb"\u03a9" in process.stdout


def test_bash_completion_lists_matching_words() -> None:
    """Load the script of --show-completion once and call its function for each line, as bash does."""
    completions = {
        "fedpipe stat": ["status"],
        "fedpipe plan --d": ["--dry-run"],
        "fedpipe run --prof": ["--profile"],
        "fedpipe nonsense ''": list(GROUP.commands),  # without an error between the words
    }
    script = f"""
        eval "$(fedpipe --show-completion)"
        function=$(complete -p fedpipe | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
        for line in {shlex.join(completions)}; do
            eval "COMP_WORDS=($line)"
            COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
            $function fedpipe
            echo "${{COMPREPLY[@]}}"
        done
    """
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SHELL": "/bin/bash"}
    environment |= {"PYTHONPATH": str(studies.ROOT)}
    process = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")
    assert [line.split() for line in process.stdout.splitlines()] == list(completions.values())
