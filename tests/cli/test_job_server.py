"""Commands in processes of the fork server are the same as separate ones, and end with the process that waits."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from fedpipe.cli import job_server
from fedpipe.core.storage.layout import RunFiles
from tests import small_studies as studies
from tests.runs.test_resume import list_temporary_files

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="fork servers need Linux")

LONG = 400  #: rounds of a run that a test stops
#: Code of the installed `fedpipe`.
INSTALLED = "import sys; from fedpipe.__main__ import main; sys.argv[0] = 'fedpipe'; sys.exit(main())"
#: A custom module that records the process that imports it.
OWN = """
import json, os, signal, sys
from dataclasses import dataclass
from pathlib import Path
import torch
from fedpipe.algorithms.fedavg import FedAvg

parent = Path(f"/proc/{os.getppid()}/cmdline").read_text().replace("\\0", " ")
facts = {"parent": parent, "arguments": sys.argv[1:], "folder": os.getcwd(), "threads": torch.get_num_threads()}
facts["ignored"] = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
facts["environment"] = {name: value for name, value in os.environ.items() if name not in ("SHLVL", "_")}
Path(f"like-{os.getpid()}.json").write_text(json.dumps(facts))

@dataclass(frozen=True, kw_only=True)
class Own(FedAvg):
    pass
"""


class Running(subprocess.Popen[str]):
    """A running command. If the test fails, the command is killed, because it may never end by itself."""

    @override
    def __exit__(self, kind: Any, *others: Any) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, *others)


class Snakemake:
    """A process that commands take for snakemake, and the commands that it calls.

    Parameters
    ----------
    folder
        Working directory of the commands.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.process = folder, subprocess.Popen(["cat"], stdin=subprocess.PIPE)

    def call(self, *command: str, served: bool = True, **environment: str) -> Running:
        """Start a command."""
        return Running(
            [sys.executable, "-c", INSTALLED, *command],
            cwd=self.folder,
            env=self.environment(served) | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def environment(self, served: bool = True) -> dict[str, str]:
        variables = {job_server.SNAKEMAKE_PID_VARIABLE: str(self.process.pid)} if served else {}
        return os.environ | {"PYTHONPATH": str(studies.ROOT), "OMP_NUM_THREADS": "1"} | variables

    def run(self, *command: str, served: bool = True, **environment: str) -> tuple[int, str, str]:
        """Status, output and errors of a command."""
        with self.call(*command, served=served, **environment) as running:
            output = running.communicate()
        return running.returncode, *output

    def list_processes(self) -> list[int]:
        return list_processes(self.process.pid)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def list_processes(snakemake: int) -> list[int]:
    """List the servers of a snakemake, and their forks."""
    process_ids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"{job_server.SERVER_CODE}\0{snakemake}\0" in path.read_text(errors="replace"):
                process_ids.append(int(path.parent.name))
        except OSError:  # it has just ended
            continue
    return sorted(process_ids)


@pytest.fixture
def snakemake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Snakemake]:
    monkeypatch.chdir(tmp_path)
    process = Snakemake(tmp_path)
    yield process
    process.end()


def wait_for_end(processes: list[int]) -> None:
    """Wait until these processes have ended. Fails after a minute."""
    for process in processes:
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            continue
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        assert ended.poll(60_000), f"process {process} should have ended"
        os.close(descriptor)


def prepare_run(rounds: int, own: bool = False) -> str:
    """Prepare a run without starting it."""
    params = studies.settings(("scaffold",), rounds)
    if own:
        Path("witness.py").write_text(OWN)
        params |= {"algorithms": {"own": {"algorithm": "witness.Own"}}, "study": {"algorithms": ["own"]}}
    run: str = str(studies.prepare(params).runs[0].path)
    return run


def read_until(words: str, running: subprocess.Popen[str]) -> None:
    assert running.stdout
    for line in running.stdout:
        if words in line:
            return
    raise AssertionError(f"it ended before it printed '{words}': {running.stderr.read() if running.stderr else ''}")


def test_a_served_command_is_what_it_would_be_by_itself(snakemake: Snakemake) -> None:
    path = prepare_run(2, own=True)
    for like in Path().glob("like-*.json"):  # of this process
        like.unlink()
    results = {}
    for threads in ("1", "2"):
        for served in (True, False):
            command = ("segment", path, "--stop", "2", "--threads", threads, "--collect")
            status, output, errors = snakemake.run(
                *command, served=served, OMP_NUM_THREADS=threads, TOLD="a 'quote' ü\n"
            )
            assert (status, errors) == (0, "")
            (like,) = Path().glob("like-*.json")
            facts = json.loads(like.read_text())
            made_by = json.loads(Path(path, "joined/0002/times.json").read_text())["made_by"]
            assert (job_server.SERVER_CODE in facts.pop("parent")) == served
            for name in (job_server.SNAKEMAKE_PID_VARIABLE, "JE_ARROW_MALLOC_CONF"):
                facts["environment"].pop(name, None)
            results[threads, served] = (facts, output, made_by, studies.hash_results(Path(path)))
            like.unlink()
            studies.delete_rounds(Path(path))
    for threads in ("1", "2"):
        assert results[threads, True] == results[threads, False]
        assert results[threads, True][0]["threads"] == int(threads)
        assert f"{threads} threads" in results[threads, True][1]
    assert results["1", True][-1] == results["2", True][-1]
    assert len(snakemake.list_processes()) == 2, "a server for each environment"
    threads_of = [len(list(Path(f"/proc/{server}/task").iterdir())) for server in snakemake.list_processes()]
    assert min(threads_of) == 1, "a lock of another thread would stay locked in the fork"


@pytest.mark.slow
def test_fedpipes_own_variables_come_with_the_command(snakemake: Snakemake) -> None:
    """One server serves jobs with different execution settings."""
    path = prepare_run(2)
    command = ("segment", path, "--stop", "2")
    for wrong in ({"FEDPIPE_STACK": "few"}, {"FEDPIPE_DEVICE": "gpu"}):
        served, alone = (snakemake.run(*command, served=where, **wrong) for where in (True, False))
        assert served == alone
        assert served[0] == 2, "the variable was ignored"
        assert served[2].startswith("fedpipe: execution.")
    assert snakemake.run(*command, FEDPIPE_LONG="x" * job_server.MAX_MESSAGE_BYTES)[0] == 0, "it has to run by itself"
    studies.delete_rounds(Path(path))
    assert snakemake.run(*command)[0] == 0, "nothing is left of other commands' variables"
    assert len(snakemake.list_processes()) == 1


@pytest.mark.slow
def test_jobs_ignore_the_signals_that_their_command_ignores_and_no_others(snakemake: Snakemake) -> None:
    """Ctrl+C ends them, whichever command started their server."""
    prepare_run(2, own=True)
    for how in ("trap '' INT;", ""):
        script = f"{how} exec {sys.executable} -m fedpipe describe witness.Own > /dev/null"
        with Running(["bash", "-c", script], env=snakemake.environment(), text=True) as running:
            running.wait()
        facts = [json.loads(like.read_text()) for like in Path().glob("like-*.json")]
        assert [like["ignored"] for like in facts if like["arguments"][:1] == ["describe"]] == [bool(how)]
        for written in Path().glob("like-*.json"):
            written.unlink()
    assert len(snakemake.list_processes()) == 2


def test_figures_that_can_not_be_drawn_cost_no_other_job(snakemake: Snakemake) -> None:
    """The server does their imports before the first of them."""
    path = prepare_run(1)
    assert snakemake.run("figure", "curves", MPLBACKEND="none-such")[0] != 0
    assert snakemake.run("segment", path, "--stop", "1", MPLBACKEND="none-such")[0] == 0
    assert len(snakemake.list_processes()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("served", [True, False])
def test_what_was_to_be_done_at_the_end_is_done(snakemake: Snakemake, served: bool) -> None:
    """Trackers of experiments have threads and exit functions that run at the end."""
    Path("late.py").write_text(
        OWN
        + """
import atexit, tempfile, threading

FOLDER = tempfile.TemporaryDirectory(dir=".")
Path("folder").write_text(FOLDER.name)

def after_main():
    threading.main_thread().join()
    Path("thread").write_text("ended")

threading.Thread(target=after_main).start()
KEPT = open("open", "w")
KEPT.write("flushed")
atexit.register(lambda: Path("ended").write_text(Path("thread").read_text()))
print("no end of line", end="")
"""
    )
    status, output, errors = snakemake.run("describe", "late.Own", served=served)
    assert (status, errors) == (0, "")
    assert "no end of line" in output
    assert Path("ended").read_text() == "ended"
    assert Path("open").read_text() == "flushed"
    assert not Path(Path("folder").read_text()).exists()


@pytest.mark.slow
@pytest.mark.parametrize("served", [True, False])
def test_a_command_without_streams_does_its_work(snakemake: Snakemake, served: bool) -> None:
    prepare_run(1)
    Path("results/plan.json").unlink()
    variables = {job_server.SNAKEMAKE_PID_VARIABLE: str(snakemake.process.pid)} if served else {}
    command = f"exec {sys.executable} -m fedpipe plan <&- >&- 2>&-"
    environment = os.environ | {"PYTHONPATH": str(studies.ROOT)} | variables
    assert subprocess.run(["bash", "-c", command], env=environment).returncode == 0
    assert Path("results/plan.json").is_file()


@pytest.mark.slow
def test_mistakes_statuses_and_help_are_those_of_the_command(snakemake: Snakemake) -> None:
    path = prepare_run(2)
    commands = (
        ("segmnt", path),
        ("segment", path),
        ("segment", "results/runs/none", "--stop", "1"),
        ("describe", "fedavg"),
    )
    for command in commands:
        assert snakemake.run(*command) == snakemake.run(*command, served=False)
    assert len(snakemake.list_processes()) == 1


def test_sigterm_reaches_a_segment_once_and_ends_it_after_its_round(snakemake: Snakemake) -> None:
    path = prepare_run(LONG)
    with snakemake.call("segment", path, "--stop", str(LONG)) as running:
        read_until("round 2 of", running)  # then the first is known to be done
        running.send_signal(signal.SIGTERM)
        output = running.communicate()[0]
    assert running.returncode == 143
    assert output.count("received SIGTERM") == 1
    stopped = re.search(r"stopped by SIGTERM after round (\d+)\b.*\n$", output)
    assert stopped, output
    assert RunFiles(Path(path)).list_complete_rounds() == list(range(int(stopped[1]) + 1))


@pytest.mark.slow
def test_ctrl_c_is_what_it_is_for_the_command_itself(snakemake: Snakemake) -> None:
    path = prepare_run(LONG)
    ends = []
    for served in (True, False):
        with snakemake.call("segment", path, "--stop", str(LONG), served=served) as running:
            read_until("round ", running)
            running.send_signal(signal.SIGINT)
            ends.append((running.communicate()[1], running.returncode))
    assert ends[0] == ends[1]
    assert ends[0][1] == 130


def has_stopped(process: int) -> bool:
    """Whether it stops within a minute. A signal reaches a process on another core a little later."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        os.sched_yield()
    return False


@pytest.mark.slow
def test_a_stopped_command_stops_and_continues(snakemake: Snakemake) -> None:
    path = prepare_run(LONG)
    with snakemake.call("segment", path, "--stop", str(LONG)) as running:
        read_until("round 1 of", running)
        (job,) = set(snakemake.list_processes()) - {min(snakemake.list_processes())}
        running.send_signal(signal.SIGTSTP)
        os.waitpid(running.pid, os.WUNTRACED)
        stopped = has_stopped(job)
        running.send_signal(signal.SIGCONT)  # first, because this block waits for the command
        assert stopped, "the job continues"
        read_until("round 2 of", running)
        running.kill()
        wait_for_end([job])


@pytest.mark.slow
def test_a_job_dies_with_the_command_that_waits_for_it_and_no_other_does(snakemake: Snakemake) -> None:
    path = prepare_run(LONG)
    with snakemake.call("segment", path, "--stop", str(LONG)) as running:
        read_until("round 1 of", running)
        (server, job) = snakemake.list_processes()
        with snakemake.call("segment", path, "--stop", str(LONG)) as other:
            read_until("rounds are complete", other)
            running.kill()
            wait_for_end([job])
            assert snakemake.run("describe", "fedavg")[0] == 0
            (still, another) = snakemake.list_processes()
            assert still == server
            read_until("round ", other)
            os.kill(another, signal.SIGSEGV)
            other.wait()
    assert other.returncode == 128 + signal.SIGSEGV, "the status that a shell gives if a signal ended the command"


@pytest.mark.slow
def test_all_ends_with_snakemake_however_that_ends(snakemake: Snakemake) -> None:
    path = prepare_run(LONG)
    with snakemake.call("segment", path, "--stop", str(LONG)) as running:
        read_until("round 1 of", running)
        before = snakemake.list_processes()
        assert len(before) == 2
        snakemake.end()
        wait_for_end([*before, running.pid])
        assert running.returncode is None or running.wait() == 1
        assert running.stderr
        assert running.stderr.read() == job_server.SERVER_LOST_MESSAGE
    assert not [path for path in Path(job_server.SOCKET_FOLDER).iterdir() if path.name != "lock"], (
        "sockets are left behind"
    )
    complete = RunFiles(Path(path)).list_complete_rounds()
    with snakemake.call("segment", path, "--stop", str(LONG)) as orphan:  # it runs its command itself
        read_until(f"{complete[-1]} of {LONG} rounds are complete", orphan)
        assert not snakemake.list_processes()
        orphan.kill()
    assert len(list_temporary_files(Path(path))) <= 2, "at most one half-written file of each killed job"


@pytest.mark.slow
def test_a_server_that_is_killed_costs_its_jobs_and_the_next_command_starts_another(snakemake: Snakemake) -> None:
    path = prepare_run(LONG)
    with snakemake.call("segment", path, "--stop", str(LONG)) as running:
        read_until("round 1 of", running)
        (server, job) = snakemake.list_processes()
        os.kill(server, signal.SIGKILL)
        wait_for_end([server, job])
        assert running.communicate()[1] == job_server.SERVER_LOST_MESSAGE
    assert running.returncode == 1
    assert snakemake.run("describe", "fedavg")[0] == 0
    (new,) = snakemake.list_processes()
    assert new != server


@pytest.mark.slow
def test_edited_code_is_what_runs(tmp_path: Path) -> None:
    """A server that imported the code before the edit is not used."""
    clone = studies.copy_project(tmp_path / "clone")
    snakemake = Snakemake(clone)
    try:
        assert snakemake.run("describe", "fedavg", PYTHONPATH=".")[0] == 0
        before = snakemake.list_processes()
        edited = clone / "fedpipe/algorithms/fedavg.py"
        edited.write_text(edited.read_text().replace("Local training, then", "Edited. Local training, then"))
        assert "Edited. " in snakemake.run("describe", "fedavg", PYTHONPATH=".")[1]
        assert len(snakemake.list_processes()) == len(before) + 1
    finally:
        snakemake.end()


@pytest.mark.slow
def test_if_imports_fail_the_command_prints_the_same_error(snakemake: Snakemake) -> None:
    poison = snakemake.folder / "poison"
    poison.mkdir()
    (poison / "torch.py").write_text("raise SystemExit('torch was imported')")
    path = prepare_run(2)
    python_path = f"{poison}{os.pathsep}{studies.ROOT}"
    result = snakemake.run("segment", path, "--stop", "1", PYTHONPATH=python_path)
    assert result == snakemake.run("segment", path, "--stop", "1", served=False, PYTHONPATH=python_path)
    assert "torch was imported" in result[2]


def test_the_waiting_command_imports_few_modules() -> None:
    code = "import sys, fedpipe.__main__, fedpipe.cli.job_server; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(studies.ROOT)!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    modules = done.stdout.split()
    assert "fedpipe.cli.job_server" in modules
    assert not {"torch", "numpy", "typer", "pydantic", "pathlib", "subprocess", "fedpipe.cli.app"} & set(modules)
    assert len(modules) < 90


def test_no_other_user_can_send_commands(snakemake: Snakemake) -> None:
    before = os.umask(0)
    try:
        assert snakemake.run("describe", "fedavg")[0] == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(Path(job_server.SOCKET_FOLDER).stat().st_mode) == 0o700


def test_ctrl_c_before_a_job_has_begun_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(snakemake: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job_server, "_connect_or_start_server", interrupted)
    with pytest.raises(SystemExit) as end:
        job_server.delegate_command_to_server(1)
    assert end.value.code == 130
