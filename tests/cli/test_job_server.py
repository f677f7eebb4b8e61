"""Jobs of the fork server behave like separate processes and end with the command that waits for them."""

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
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedpipe.cli import job_server
from fedpipe.core.storage.layout import RunFiles
from tests import small_studies as studies
from tests.pipeline.conftest import RunningCommand, read_until

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


class Snakemake:
    """A process that replaces snakemake, and the commands that it calls.

    Parameters
    ----------
    folder
        Working directory of the commands.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.process = folder, subprocess.Popen(["cat"], stdin=subprocess.PIPE)

    def call(self, *command: str, is_served: bool = True, **environment: str) -> RunningCommand[str]:
        """Start a command."""
        return RunningCommand(
            [sys.executable, "-c", INSTALLED, *command],
            cwd=self.folder,
            env=self.build_environment(is_served) | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def build_environment(self, is_served: bool = True) -> dict[str, str]:
        variables = {job_server.SNAKEMAKE_PID_VARIABLE: str(self.process.pid)} if is_served else {}
        return os.environ | {"PYTHONPATH": str(studies.ROOT), "OMP_NUM_THREADS": "1"} | variables

    def run(self, *command: str, is_served: bool = True, **environment: str) -> tuple[int, str, str]:
        """Run a command. Return its status, output and errors."""
        with self.call(*command, is_served=is_served, **environment) as running:
            output = running.communicate()
        return running.returncode, *output

    def start_segment(self, path: str, is_served: bool = True) -> RunningCommand[str]:
        """Start a job that a test stops."""
        return self.call("segment", path, "--stop", str(LONG), is_served=is_served)

    def list_processes(self) -> list[int]:
        return list_processes(self.process.pid)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def list_processes(snakemake: int) -> list[int]:
    """List the servers of a snakemake process, and their forks."""
    process_ids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has just ended
            if f"{job_server.SERVER_CODE}\0{snakemake}\0" in path.read_text(errors="replace"):
                process_ids.append(int(path.parent.name))
    return sorted(process_ids)


@pytest.fixture
def snakemake(in_empty_folder: Path) -> Iterator[Snakemake]:
    process = Snakemake(in_empty_folder)
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
    take_facts()  # those of this process
    return run


def take_facts() -> list[dict[str, Any]]:
    """Read what the custom module has recorded about each process since the last call, and delete it."""
    paths = [*Path().glob("like-*.json")]
    facts = [json.loads(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return facts


@pytest.mark.slow
def test_server_job_equals_separate_process(snakemake: Snakemake) -> None:
    path = prepare_run(2, own=True)
    results = {}
    for threads in ("1", "2"):
        for is_served in (True, False):
            command = ("segment", path, "--stop", "2", "--threads", threads, "--collect")
            status, output, errors = snakemake.run(
                *command, is_served=is_served, OMP_NUM_THREADS=threads, QUOTED="a 'quote' ü\n"
            )
            assert (status, errors) == (0, "")
            (facts,) = take_facts()
            made_by = json.loads(Path(path, "joined/0002/times.json").read_text())["made_by"]
            assert (job_server.SERVER_CODE in facts.pop("parent")) == is_served
            for name in (job_server.SNAKEMAKE_PID_VARIABLE, "JE_ARROW_MALLOC_CONF"):
                facts["environment"].pop(name, None)
            results[threads, is_served] = (facts, output, made_by, studies.hash_results(Path(path)))
            studies.delete_rounds(Path(path))
    for threads in ("1", "2"):
        assert results[threads, True] == results[threads, False]
        assert results[threads, True][0]["threads"] == int(threads)
        assert f", {threads} thread{'s' * (threads == '2')} of " in results[threads, True][1]
    assert results["1", True][-1] == results["2", True][-1]
    assert len(snakemake.list_processes()) == 2, "each environment has a server"
    threads_of = [len(list(Path(f"/proc/{server}/task").iterdir())) for server in snakemake.list_processes()]
    assert min(threads_of) == 1, "a lock of another thread would stay locked in the fork"


def test_command_runs_in_its_own_process_if_server_cannot_fork(snakemake: Snakemake, tmp_path: Path) -> None:
    """A limit of processes must not end the server and its other jobs."""
    path = prepare_run(1, own=True)
    (tmp_path / "limit").mkdir()
    (tmp_path / "limit/sitecustomize.py").write_text(
        "import os\nfrom pathlib import Path\nfork = os.fork\n"
        "def fork_once():\n    if Path('limited').exists():\n        Path('limited').unlink()\n"
        "        raise BlockingIOError(11, 'Resource temporarily unavailable')\n    return fork()\n"
        "os.fork = fork_once\n"
    )
    parents = []
    for is_limited in (True, False):
        if is_limited:
            Path("limited").touch()
        python_path = f"{tmp_path / 'limit'}:{studies.ROOT}"
        assert snakemake.run("segment", path, "--stop", "1", PYTHONPATH=python_path)[::2] == (0, "")
        (facts,) = take_facts()
        parents.append(job_server.SERVER_CODE in facts["parent"])
        assert not Path("limited").exists()
    assert parents == [False, True]
    assert len(snakemake.list_processes()) == 1, "the server continues"


@pytest.mark.slow
def test_server_job_uses_fedpipe_variables_of_its_command(snakemake: Snakemake) -> None:
    """One server starts jobs with different execution settings."""
    path = prepare_run(2)
    command = ("segment", path, "--stop", "2")
    for wrong in ({"FEDPIPE_STACK": "few"}, {"FEDPIPE_DEVICE": "gpu"}):
        with_server, alone = (snakemake.run(*command, is_served=where, **wrong) for where in (True, False))
        assert with_server == alone
        assert with_server[0] == 2, "the command ignored the variable"
        assert with_server[2].startswith("fedpipe: execution.")
    assert snakemake.run(*command, FEDPIPE_LONG="x" * job_server.MAX_MESSAGE_BYTES)[0] == 0, (
        "a command that is too long for a message runs without the server"
    )
    studies.delete_rounds(Path(path))
    assert snakemake.run(*command)[0] == 0, "variables of earlier commands have no effect"
    assert len(snakemake.list_processes()) == 1


@pytest.mark.slow
def test_server_job_ignores_sigint_only_if_its_command_ignores_it(snakemake: Snakemake) -> None:
    """Ctrl+C ends a job, no matter which command started the server."""
    prepare_run(2, own=True)
    for how in ("trap '' INT;", ""):
        script = f"{how} exec {sys.executable} -m fedpipe describe witness.Own > /dev/null"
        with RunningCommand(["bash", "-c", script], env=snakemake.build_environment(), text=True) as running:
            running.wait()
        commands = [facts for facts in take_facts() if facts["arguments"][:1] == ["describe"]]
        assert [facts["ignored"] for facts in commands] == [bool(how)]
    assert len(snakemake.list_processes()) == 2


def test_failed_figure_does_not_affect_later_server_jobs(snakemake: Snakemake) -> None:
    """The server imports matplotlib before it starts the first figure."""
    path = prepare_run(1)
    assert snakemake.run("figure", "curves", MPLBACKEND="none-such")[0] != 0
    assert snakemake.run("segment", path, "--stop", "1", MPLBACKEND="none-such")[0] == 0
    assert len(snakemake.list_processes()) == 1


def test_command_ends_although_daemon_thread_blocks_file() -> None:
    """The thread waits for a full pipe, and has the lock of its file."""
    program = (
        "import os, sys, threading\n"
        "from fedpipe.__main__ import main\n"
        "stream = os.fdopen(os.pipe()[1], 'wb')\n"
        "threading.Thread(target=stream.write, args=[bytes(1 << 20)], daemon=True).start()\n"
        "sys.argv = ['fedpipe', 'describe', 'fedavg']\n"
        "main()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("fedavg (algorithm)")


@pytest.mark.slow
@pytest.mark.parametrize("is_served", [True, False])
def test_command_runs_exit_functions_and_flushes_files_at_end(snakemake: Snakemake, is_served: bool) -> None:
    """Experiment trackers have threads and exit functions that run at the end."""
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
    status, output, errors = snakemake.run("describe", "late.Own", is_served=is_served)
    assert (status, errors) == (0, "")
    assert "no end of line" in output
    assert Path("ended").read_text() == "ended"
    assert Path("open").read_text() == "flushed"
    assert not Path(Path("folder").read_text()).exists()


@pytest.mark.slow
@pytest.mark.parametrize("is_served", [True, False])
def test_command_with_closed_standard_streams_writes_plan(snakemake: Snakemake, is_served: bool) -> None:
    prepare_run(1)
    Path("results/plan.json").unlink()
    command = f"exec {sys.executable} -m fedpipe plan <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], env=snakemake.build_environment(is_served)).returncode == 0
    assert Path("results/plan.json").is_file()


def test_server_job_escapes_letters_that_its_locale_lacks(snakemake: Snakemake) -> None:
    status, output, errors = snakemake.run("describe", "feddw", PYTHONIOENCODING="iso8859-5")
    assert (status, errors) == (0, "")
    assert r"\u03a9" in output
    assert len(snakemake.list_processes()) == 1


@pytest.mark.slow
def test_server_job_has_output_errors_and_status_of_separate_process(snakemake: Snakemake) -> None:
    path = prepare_run(2)
    for command in (f"segmnt {path}", f"segment {path}", "segment results/runs/none --stop 1", "describe fedavg"):
        assert snakemake.run(*command.split()) == snakemake.run(*command.split(), is_served=False)
    assert len(snakemake.list_processes()) == 1


def test_sigterm_reaches_segment_once_and_ends_it_after_round(snakemake: Snakemake) -> None:
    path = prepare_run(LONG)
    with snakemake.start_segment(path) as running:
        read_until("round 2 of", running)  # so round 1 is complete
        running.send_signal(signal.SIGTERM)
        output = running.communicate()[0]
    assert running.returncode == 143
    assert output.count("received SIGTERM") == 1
    stopped = re.search(r"stopped by SIGTERM after round (\d+)\b.*\n$", output)
    assert stopped, output
    assert RunFiles(Path(path)).list_complete_rounds() == list(range(int(stopped[1]) + 1))


@pytest.mark.slow
def test_ctrl_c_ends_server_job_like_separate_process(snakemake: Snakemake) -> None:
    path = prepare_run(LONG)
    ends = []
    for is_served in (True, False):
        with snakemake.start_segment(path, is_served) as running:
            read_until("round ", running)
            running.send_signal(signal.SIGINT)
            ends.append((running.communicate()[1], running.returncode))
    assert ends[0] == ends[1]
    assert ends[0][1] == 130


def has_stopped(process: int) -> bool:
    """Return whether a process stops within a minute. A process on another core receives a signal with a delay."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        os.sched_yield()
    return False


@pytest.mark.slow
def test_server_job_stops_and_continues_with_its_command(snakemake: Snakemake) -> None:
    path = prepare_run(LONG)
    with snakemake.start_segment(path) as running:
        read_until("round 1 of", running)
        (job,) = set(snakemake.list_processes()) - {min(snakemake.list_processes())}
        running.send_signal(signal.SIGTSTP)
        os.waitpid(running.pid, os.WUNTRACED)
        stopped = has_stopped(job)
        running.send_signal(signal.SIGCONT)  # first, because this block waits for the command
        assert stopped, "the job did not stop"
        read_until("round 2 of", running)
        running.kill()
        wait_for_end([job])


@pytest.mark.slow
def test_server_job_ends_with_its_command_and_other_jobs_continue(snakemake: Snakemake) -> None:
    path = prepare_run(LONG)
    with snakemake.start_segment(path) as running:
        read_until("round 1 of", running)
        (server, job) = snakemake.list_processes()
        with snakemake.start_segment(path) as other:
            read_until("rounds are complete", other)
            running.kill()
            wait_for_end([job])
            assert snakemake.run("describe", "fedavg")[0] == 0
            (still, another) = snakemake.list_processes()
            assert still == server
            read_until("round ", other)
            os.kill(another, signal.SIGSEGV)
            other.wait()
    assert other.returncode == 128 + signal.SIGSEGV, "a shell returns this status if a signal ended the command"


@pytest.mark.slow
def test_servers_jobs_and_commands_end_with_snakemake(snakemake: Snakemake) -> None:
    path = prepare_run(LONG)
    with snakemake.start_segment(path) as running:
        read_until("round 1 of", running)
        before = snakemake.list_processes()
        assert len(before) == 2
        snakemake.end()
        wait_for_end([*before, running.pid])
        assert running.returncode is None or running.wait() == 1
        assert running.stderr.read() == job_server.SERVER_LOST_MESSAGE
    assert not [path for path in Path(job_server.SOCKET_FOLDER).iterdir() if path.name != "lock"], (
        "sockets are left behind"
    )
    complete = RunFiles(Path(path)).list_complete_rounds()
    with snakemake.start_segment(path) as orphan:  # runs its command without a server
        read_until(f"{complete[-1]} of {LONG} rounds are complete", orphan)
        assert not snakemake.list_processes()
        orphan.kill()
    assert len(studies.list_temporary_files(Path(path))) <= 2, "at most one half-written file of each killed job"


@pytest.mark.slow
def test_killed_server_ends_its_jobs_and_next_command_starts_new_server(snakemake: Snakemake) -> None:
    path = prepare_run(LONG)
    with snakemake.start_segment(path) as running:
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
def test_server_job_runs_edited_code(tmp_path: Path) -> None:
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
def test_server_job_prints_import_error_of_separate_process(snakemake: Snakemake) -> None:
    poison = snakemake.folder / "poison"
    poison.mkdir()
    (poison / "torch.py").write_text("raise SystemExit('torch was imported')")
    path = prepare_run(2)
    python_path = f"{poison}{os.pathsep}{studies.ROOT}"
    result = snakemake.run("segment", path, "--stop", "1", PYTHONPATH=python_path)
    assert result == snakemake.run("segment", path, "--stop", "1", is_served=False, PYTHONPATH=python_path)
    assert "torch was imported" in result[2]


def test_waiting_command_imports_few_modules() -> None:
    code = "import sys, fedpipe.__main__, fedpipe.cli.job_server; print(*sorted(sys.modules))"
    script = f"import sys; sys.path.insert(0, {str(studies.ROOT)!r}); {code}"
    modules = subprocess.check_output([sys.executable, "-I", "-S", "-c", script], text=True).split()
    assert "fedpipe.cli.job_server" in modules
    assert not {"torch", "numpy", "typer", "pydantic", "pathlib", "subprocess", "fedpipe.cli.app"} & set(modules)
    assert len(modules) < 90


def test_only_owner_has_access_to_socket_folder(snakemake: Snakemake) -> None:
    before = os.umask(0)
    try:
        assert snakemake.run("describe", "fedavg")[0] == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(Path(job_server.SOCKET_FOLDER).stat().st_mode) == 0o700


def test_ctrl_c_before_server_connection_exits_without_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(snakemake: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job_server, "_connect_or_start_server", interrupted)
    with pytest.raises(SystemExit) as end:
        job_server.delegate_command_to_server(1)
    assert end.value.code == 130
