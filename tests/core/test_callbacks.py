"""Callbacks: what they are told, that they change nothing, and that their mistakes cost nothing."""

from __future__ import annotations

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
from tests.cli.test_cli import run_command as printed
from tests.docs.page_blocks import blocks

ROUNDS = 3
#: One's own; the diary is a file, since a callback lives in the job's process.
OWN = """
import json
from fedpipe.core.callbacks import Callback

class Diary(Callback):
    def _write(self, *entry):
        with open("diary.jsonl", "a") as stream:
            stream.write(json.dumps(entry) + "\\n")
    def begin(self, run):
        self._write("begin", run.name, run.last_round, run.completed_rounds)
    def round(self, run, number, accuracies):
        self._write("round", run.name, number, accuracies)
    def end(self, run):
        self._write("end", run.name)

class Clumsy(Callback):
    def round(self, run, number, accuracies):
        raise OSError("no space left on device")

class Stillborn(Callback):
    def __init__(self):
        raise OSError("no such board")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def study(*names: str, **sections: Any) -> dict[str, Any]:
    return studies.settings(("fedavg",), ROUNDS, execution={"callbacks": list(names)}, **sections)


def diary() -> list[Any]:
    return [json.loads(line) for line in Path("diary.jsonl").read_text().splitlines()]


def segment(made: planner.NewPlan, stop: int) -> str:
    """A job as the Snakefile's rule begins it; what it says."""
    (run,) = made.runs
    names = " ".join(made.execution.callbacks)
    return printed("segment", str(run.path), "--stop", str(stop), "--callbacks", names)


def counted(made: planner.NewPlan) -> dict[int, dict[str, float]]:
    """Accuracies by round and protocol, of the run's own files."""
    found: dict[int, dict[str, float]] = {}
    (run,) = made.runs
    for number in range(1, ROUNDS + 1):
        table = files.read_parquet(run.files.round(number).metrics).to_pandas()
        sums = table.groupby("protocol")[["correct", "total"]].sum()
        found[number] = dict(sums["correct"] / sums["total"])
    return found


def test_a_callback_is_told_of_every_round_and_of_each_job_that_goes_on(folder: Path) -> None:
    made = studies.prepare(study("own.Diary"))
    assert Plan.read(made.study_files.plan).execution.callbacks == ("own.Diary",)
    segment(made, 2)
    segment(made, ROUNDS)
    (run,) = made.runs
    name = f"fedavg-seed0-{run.key}"
    accuracies = counted(made)
    assert diary() == [
        ["begin", name, 2, 0],
        ["round", name, 1, accuracies[1]],
        ["round", name, 2, accuracies[2]],
        ["end", name],
        ["begin", name, 3, 2],
        ["round", name, 3, accuracies[3]],
        ["end", name],
    ]


def test_no_key_and_no_bit_depends_on_callbacks(folder: Path) -> None:
    made = studies.prepare(study("own.Diary"))
    segment(made, ROUNDS)
    watched = studies.bits(folder / "results/runs")
    studies.forget(made.runs[0].path)
    plain = studies.prepare(study())
    assert [run.key for run in plain.runs] == [run.key for run in made.runs]
    segment(plain, ROUNDS)
    assert studies.bits(folder / "results/runs") == watched
    assert sum(entry[0] == "begin" for entry in diary()) == 1


def test_one_that_fails_is_left_out_and_the_run_goes_on(folder: Path) -> None:
    made = studies.prepare(study("own.Clumsy", "own.Diary"))
    told = segment(made, ROUNDS)
    (run,) = made.runs
    assert told.count("Clumsy.round failed (OSError: no space left on device)") == 1
    assert f"{run.path} goes on without it." in told
    assert run.files.list_complete_rounds() == [0, 1, 2, 3]
    assert [entry[0] for entry in diary()] == ["begin", *["round"] * 3, "end"]


def test_one_that_can_not_be_made_or_imported_is_left_out_too(folder: Path) -> None:
    """As on a node that lacks what its module imports, which the machine of the plan has."""
    made = studies.prepare(study("own.Stillborn", "own.Diary"))
    (run,) = made.runs
    told = printed("segment", str(run.path), "--stop", "1", "--callbacks", "own.Stillborn elsewhere.Board own.Diary")
    assert "own.Stillborn failed (OSError: no such board)" in told
    assert "elsewhere.Board failed (SettingsError: execution.callbacks: 'elsewhere.Board' can't be imported" in told
    assert told.count(f"{run.path} goes on without it.") == 2
    assert run.files.list_complete_rounds() == [0, 1]
    assert [entry[0] for entry in diary()] == ["begin", "round", "end"]


def test_a_round_that_is_not_measured_has_no_accuracies(folder: Path) -> None:
    made = studies.prepare(study("own.Diary", evaluation={"every": 3, "protocols": ["trained-on-local"]}))
    segment(made, ROUNDS)
    rounds = [entry[3] for entry in diary() if entry[0] == "round"]
    assert rounds[:2] == [{}, {}]
    assert list(rounds[2]) == ["trained-on-local"]


def test_single_rounds_are_watched_where_they_are_measured(folder: Path) -> None:
    made = studies.prepare(study("own.Diary"))
    (run,) = made.runs
    path = str(run.path)
    printed("initialize", path)
    printed("train", path, "--round", "1", "--block", "0", "--size", "5")
    printed("aggregate", path, "--round", "1", "--blocks", "1")
    printed("evaluate", path, "--round", "1", "--callbacks", "own.Diary")
    assert [entry[0] for entry in diary()] == ["begin", "round", "end"]
    assert diary()[1][2:] == [1, callbacks.read_accuracies(run.files, 1)]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["own.Nothing"], r"execution.callbacks: 'own.Nothing' can't be imported \(module 'own' has no attribute"),
        (["other.Board"], r"execution.callbacks: 'other.Board' can't be imported \(No module named 'other'\)"),
        (
            ["own.json"],
            r"execution.callbacks: 'own.json' is not a callback. It must derive from fedpipe.core.callbacks",
        ),
        (["tensorboard"], r"execution.callbacks: unknown callback 'tensorboard'. Use dvclive, or"),
        (["own.Diary", "own.Diary"], r"execution.callbacks: 'own.Diary' is listed twice"),
    ],
)
def test_what_is_no_callback_is_refused_before_any_job(folder: Path, names: list[str], told: str) -> None:
    studies.write(study(*names), folder)
    with pytest.raises(SettingsError, match=told):
        planner.make_plan()


def test_dvclive_is_refused_where_it_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    studies.write(study("dvclive"), folder)
    with pytest.raises(SettingsError, match=r"execution.callbacks: dvclive is not installed; `pip install dvclive`"):
        planner.make_plan()


class Live:
    """What dvclive.Live takes, where DVCLive is not installed."""

    def __init__(self, dir: str, resume: bool, report: None, save_dvc_exp: bool, dvcyaml: str) -> None:
        self.curves, self.step = Path(dir, "plots/metrics"), 0
        assert (report, save_dvc_exp, dvcyaml) == (None, False, f"{dir}/dvc.yaml")
        assert resume == self.curves.exists(), "a job that goes on keeps what is there"
        self.curves.mkdir(parents=True, exist_ok=True)

    def log_metric(self, name: str, val: float) -> None:
        path = self.curves / f"{name}.tsv"
        lines = path.read_text() if path.exists() else f"step\t{name}\n"
        path.write_text(f"{lines}{self.step}\t{val!r}\n")

    def next_step(self) -> None:
        self.step += 1

    def end(self) -> None:
        self.step = -1


def test_dvclive_has_the_accuracies_of_each_round(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        import dvclive  # noqa: F401
    except ImportError:
        module = types.ModuleType("dvclive")
        module.Live, module.__spec__ = Live, ModuleSpec("dvclive", None)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "dvclive", module)
    else:
        subprocess.run(["git", "init", "-q"], check=True)
        author = ("-c", "user.name=fedpipe", "-c", "user.email=fedpipe@example.org")
        subprocess.run(["git", *author, "commit", "-q", "--allow-empty", "-m", "it has a commit"], check=True)
    made = studies.prepare(study("dvclive"))
    assert "goes on without it" not in segment(made, 2) + segment(made, ROUNDS)
    (run,) = made.runs
    found = {}
    for path in Path(f"dvclive/fedavg-seed0-{run.key}/plots/metrics").glob("*.tsv"):
        head, *rows = [line.split("\t") for line in path.read_text().splitlines()]
        assert head == ["step", path.stem]
        found[path.stem] = {int(step): float(accuracy) for step, accuracy in rows}
    rounds = counted(made)
    assert found == {name: {number: rounds[number][name] for number in rounds} for name in rounds[1]}
    assert "/dvclive/" in (studies.ROOT / ".gitignore").read_text().splitlines()


class Writer:
    """What torch.utils.tensorboard.SummaryWriter takes, where TensorBoard is not installed."""

    written: list[tuple[Any, ...]] = []  # noqa: RUF012  # all writers' own

    def __init__(self, log_dir: str, purge_step: int) -> None:
        self.log_dir = log_dir
        self.written.append(("opened", log_dir, purge_step))

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.written.append((self.log_dir, tag, scalar_value, global_step))


def test_the_example_of_the_page_runs_as_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [block.text for block in blocks("docs/callbacks.md") if block.language == "python"]
    (section,) = [block.text for block in blocks("docs/callbacks.md") if block.language == "yaml"]
    body = [line for line in code.splitlines() if line.strip() and not line.startswith("#")]
    assert len(body) <= 10
    (folder / "own.py").write_text(code)
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        board = types.ModuleType("torch.utils.tensorboard")
        board.SummaryWriter = Writer  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    Writer.written.clear()
    made = studies.prepare(study() | yaml.safe_load(section))
    segment(made, 2)
    segment(made, ROUNDS)
    (run,) = made.runs
    folder_of_run = f"board/fedavg-seed0-{run.key}"
    if Writer.written:
        assert [entry[2] for entry in Writer.written if entry[0] == "opened"] == [1, 3]
        scalars = {entry for entry in Writer.written if entry[0] == folder_of_run}
        wanted = counted(made).items()
        assert scalars == {
            (folder_of_run, name, value, number) for number, found in wanted for name, value in found.items()
        }
    else:
        assert list((folder / folder_of_run).glob("events.out.tfevents.*"))
