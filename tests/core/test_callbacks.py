"""Callbacks receive all rounds, do not change results, and do not stop a run if they fail."""

import json
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedpipe.core import callbacks
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import files
from fedpipe.planning import planner
from fedpipe.planning.plan import Plan
from tests import small_studies as studies
from tests.docs.page_blocks import blocks
from tests.small_studies import run_command

ROUNDS = 3
#: A user's module. The diary is a file, because a callback runs in the job's process.
CUSTOM_MODULE = """
import json
from fedpipe.core.callbacks import Callback

class Mute(Callback):
    def end(self, run):
        raise AssertionError

class Diary(Callback):
    def _write(self, *entry):
        with open("diary.jsonl", "a") as stream:
            stream.write(json.dumps(entry) + "\\n")
    def begin_run(self, run):
        self._write("begin", run.name, run.last_round, run.completed_rounds)
    def end_round(self, run, round_number, accuracies):
        self._write("round", run.name, round_number, accuracies)
    def end_run(self, run):
        self._write("end", run.name)

class Failing(Callback):
    def end_round(self, run, round_number, accuracies):
        raise OSError("no space left on device")

class Quitting(Callback):
    def end_round(self, run, round_number, accuracies):
        raise SystemExit(0)

class Changing(Callback):
    def begin_run(self, run):
        run.settings["seed"] = 99
    def end_round(self, run, round_number, accuracies):
        accuracies.clear()

class Broken(Callback):
    def __init__(self):
        raise OSError("no such board")
    def end_run(self, run):
        pass

class Misspelled(Callback):
    def begin_run(self, run):
        pass
    def end_rounds(self, run, round_number, accuracies):
        pass

class Helper(Callback):
    def begin_run(self, run):
        self.begin_runs(run)
    def begin_runs(self, run):
        pass
    def _end_round(self, run):
        pass  # called by another module

class Required(Callback):
    def __init__(self, path):
        self.path = path
    def end_run(self, run):
        pass

class Short(Callback):
    def end_round(self, run, accuracies):
        pass
"""


@pytest.fixture
def folder(own_module: Path) -> Path:
    own_module.write_text(CUSTOM_MODULE)
    return own_module.parent


def study(*names: str, **sections: Any) -> dict[str, Any]:
    return studies.settings(("fedavg",), ROUNDS, execution={"callbacks": list(names)}, **sections)


def read_diary() -> list[Any]:
    return [json.loads(line) for line in Path("diary.jsonl").read_text().splitlines()]


def run_segment(plan: planner.NewPlan, stop: int) -> str:
    """Run a job with the command of the Snakefile's rule. Return its output."""
    names = " ".join(plan.execution.callbacks)
    return run_command("segment", str(plan.runs[0].path), "--stop", str(stop), "--callbacks", names)


def compute_accuracies(plan: planner.NewPlan) -> dict[int, dict[str, float]]:
    """Compute the accuracies by round and protocol from the run's files."""
    accuracies: dict[int, dict[str, float]] = {}
    for number in range(1, ROUNDS + 1):
        table = files.read_parquet(plan.runs[0].files.get_round_files(number).metrics).to_pandas()
        sums = table.groupby("protocol")[["correct", "total"]].sum()
        accuracies[number] = dict(sums["correct"] / sums["total"])
    return accuracies


def test_callback_receives_every_round_of_resumed_run(folder: Path) -> None:
    plan = studies.prepare(study("own.Diary"))
    assert Plan.read(plan.study_files.plan).execution.callbacks == ("own.Diary",)
    run_segment(plan, 2)
    run_segment(plan, ROUNDS)
    name = f"fedavg-seed0-{plan.runs[0].key}"
    accuracies = compute_accuracies(plan)
    assert read_diary() == [
        ["begin", name, 2, 0],
        ["round", name, 1, accuracies[1]],
        ["round", name, 2, accuracies[2]],
        ["end", name],
        ["begin", name, 3, 2],
        ["round", name, 3, accuracies[3]],
        ["end", name],
    ]


def test_keys_and_results_do_not_depend_on_callbacks(folder: Path) -> None:
    plan = studies.prepare(study("own.Diary"))
    run_segment(plan, ROUNDS)
    bits = studies.hash_results(folder / "results/runs")
    studies.delete_rounds(plan.runs[0].path)
    plain = studies.prepare(study())
    assert [run.key for run in plain.runs] == [run.key for run in plan.runs]
    run_segment(plain, ROUNDS)
    assert studies.hash_results(folder / "results/runs") == bits
    assert sum(entry[0] == "begin" for entry in read_diary()) == 1


@pytest.mark.parametrize(
    ("name", "error"), [("Failing", "OSError: no space left on device"), ("Quitting", "SystemExit: 0")]
)
def test_run_continues_without_failing_callback(folder: Path, name: str, error: str) -> None:
    plan = studies.prepare(study(f"own.{name}", "own.Diary"))
    output = run_segment(plan, ROUNDS)
    (run,) = plan.runs
    assert output.count(f"{name}.end_round failed ({error})") == 1
    assert f"{run.path} continues without it" in output
    assert run.files.list_complete_rounds() == [0, 1, 2, 3]
    assert [entry[0] for entry in read_diary()] == ["begin", *["round"] * 3, "end"]


def test_callbacks_get_separate_copies_of_settings_and_accuracies(folder: Path) -> None:
    plan = studies.prepare(study("own.Changing", "own.Diary"))
    run_segment(plan, ROUNDS)
    entries = read_diary()
    assert {entry[1].split("-")[1] for entry in entries} == {"seed0"}
    assert all(entry[3] for entry in entries if entry[0] == "round")


def test_run_continues_if_callback_cannot_be_imported_or_created(folder: Path) -> None:
    """For example, a node may lack the packages that the module imports."""
    plan = studies.prepare(study("own.Broken", "own.Diary"))
    (run,) = plan.runs
    output = run_command("segment", str(run.path), "--stop", "1", "--callbacks", "own.Broken elsewhere.Board own.Diary")
    assert "own.Broken failed (OSError: no such board)" in output
    assert "elsewhere.Board failed (SettingsError: execution.callbacks: 'elsewhere.Board' can't be imported" in output
    assert output.count(f"{run.path} continues without it") == 2
    assert run.files.list_complete_rounds() == [0, 1]
    assert [entry[0] for entry in read_diary()] == ["begin", "round", "end"]


def test_round_without_evaluation_has_no_accuracies(folder: Path) -> None:
    plan = studies.prepare(study("own.Diary", evaluation={"every": 3, "protocols": ["trained-on-local"]}))
    run_segment(plan, ROUNDS)
    rounds = [entry[3] for entry in read_diary() if entry[0] == "round"]
    assert rounds[:2] == [{}, {}]
    assert list(rounds[2]) == ["trained-on-local"]


def test_evaluate_command_calls_callbacks_for_its_round(folder: Path) -> None:
    plan = studies.prepare(study("own.Diary"))
    (run,) = plan.runs
    path = str(run.path)
    run_command("initialize", path)
    run_command("train", path, "--round", "1", "--block", "0", "--size", "5")
    run_command("aggregate", path, "--round", "1", "--blocks", "1")
    run_command("evaluate", path, "--round", "1", "--callbacks", "own.Diary")
    assert [entry[0] for entry in read_diary()] == ["begin", "round", "end"]
    assert read_diary()[1][2:] == [1, callbacks.read_round_accuracies(run.files, 1)]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["own.Nothing"], r"'own\.Nothing' can't be imported \(module 'own' has no attribute"),
        (["own.Diry"], r"'own\.Diry' can't be imported .*Did you mean 'own\.Diary'"),
        (["absent_module.Board"], r"'absent_module\.Board' can't be imported \(No module named 'absent_module'\)"),
        (["own.json"], r"'own\.json' is not a callback"),
        (["own.Mute"], r"'own\.Mute' does nothing.* begin_run, end_round, end_run"),
        (["own.Misspelled"], r"own\.Misspelled\.end_rounds is never used.* 'end_round'"),
        (["own.Required"], r"own\.Required\.__init__ .*'path'"),
        (["own.Short"], r"own\.Short\.end_round takes \(run, accuracies\)\. Use \(run, round_number, accuracies\)"),
        (["neptune"], r"unknown callback 'neptune'.*dvclive, mlflow, tensorboard, wandb"),
        (["own.Diary", "own.Diary"], r"'own\.Diary' is listed twice"),
    ],
)
def test_plan_rejects_invalid_callback_names(folder: Path, names: list[str], message: str) -> None:
    studies.write(study(*names), folder)
    with pytest.raises(SettingsError, match=rf"^execution\.callbacks: {message}"):
        planner.make_plan()


def test_plan_accepts_method_of_callback_that_its_class_calls(folder: Path) -> None:
    callbacks.check_callback("own.Helper")


@pytest.mark.parametrize("name", callbacks.TRACKERS)
@pytest.mark.parametrize("has_folder", [False, True])
def test_plan_rejects_tracker_that_is_not_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, has_folder: bool
) -> None:
    """A folder with the tracker's name, which Python could import as an empty package, changes nothing."""
    spec = ModuleSpec(name, None) if has_folder else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    studies.write(study(name), folder)
    with pytest.raises(SettingsError, match=rf"^execution\.callbacks: '{name}'.*`pip install 'fedpipe\[{name}\]'`"):
        planner.make_plan()


class Live:
    """Replaces dvclive.Live if DVCLive is not installed."""

    def __init__(self, dir: str, resume: bool, report: None, save_dvc_exp: bool, dvcyaml: str) -> None:
        self.curves = Path(dir, "plots/metrics")
        assert (report, save_dvc_exp, dvcyaml) == (None, False, f"{dir}/dvc.yaml")
        assert resume == self.curves.exists(), "a job that resumes keeps the curves"
        self.curves.mkdir(parents=True, exist_ok=True)
        last_lines = [path.read_text().splitlines()[-1] for path in self.curves.rglob("*.tsv")]
        self.step = max((int(line.split("\t")[0]) + 1 for line in last_lines), default=0)

    def log_metric(self, name: str, val: float) -> None:
        path = self.curves / f"{name}.tsv"
        path.parent.mkdir(exist_ok=True)
        lines = path.read_text() if path.exists() else f"step\t{path.stem}\n"
        path.write_text(f"{lines}{self.step}\t{val!r}\n")

    def next_step(self) -> None:
        self.step += 1

    def end(self) -> None:
        self.step = -1


def test_dvclive_logs_accuracies_of_each_round(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        import dvclive  # noqa: F401
    except ImportError:
        module = types.ModuleType("dvclive")
        module.Live, module.__spec__ = Live, ModuleSpec("dvclive", None, origin="test")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "dvclive", module)
    else:
        subprocess.run(["git", "init", "-q"], check=True)
        author = ("-c", "user.name=fedpipe", "-c", "user.email=fedpipe@example.org")
        subprocess.run(["git", *author, "commit", "-q", "--allow-empty", "-m", "it has a commit"], check=True)
    plan = studies.prepare(study("dvclive"))
    assert "continues without it" not in run_segment(plan, 2) + run_segment(plan, ROUNDS)
    curves = {}
    for path in Path(f"dvclive/fedavg-seed0-{plan.runs[0].key}/plots/metrics/accuracy").glob("*.tsv"):
        head, *rows = [line.split("\t") for line in path.read_text().splitlines()]
        assert head == ["step", path.stem]
        curves[path.stem] = {int(step): float(accuracy) for step, accuracy in rows}
    rounds = compute_accuracies(plan)
    assert curves == {name: {number: rounds[number][name] for number in rounds} for name in rounds[1]}
    assert "/dvclive/" in (studies.ROOT / ".gitignore").read_text().splitlines()


def test_example_in_callbacks_page_runs_as_written(folder: Path) -> None:
    (code,) = [block.text for block in blocks("docs/callbacks.md") if block.language == "python"]
    (section,) = [block.text for block in blocks("docs/callbacks.md") if block.language == "yaml"]
    body = [line for line in code.splitlines() if line.strip() and not line.startswith("#")]
    assert len(body) <= 10
    (folder / "own.py").write_text(code)
    plan = studies.prepare(study() | yaml.safe_load(section))
    run_segment(plan, 2)
    run_segment(plan, ROUNDS)
    (run,) = plan.runs
    lines = [json.loads(line) for line in Path("rounds.jsonl").read_text().splitlines()]
    accuracies = compute_accuracies(plan)
    assert lines == [{"run": f"fedavg-seed0-{run.key}", "round": number} | accuracies[number] for number in accuracies]
