"""Local jobs without their start: processes forked from one that has imported PyTorch and fedpipe already.

A job of a small study computes for two seconds, after imports of two. So `fedpipe`, where a local snakemake calls it,
hands its command over to a fork server and waits. That is a process that has done all imports and nothing else: it has
not computed, and its only threads are OpenBLAS', which that library ends before each fork. It forks one process for
each command. What is forked has the arguments, streams and exit status of the process that waits for it, gets its
signals, and dies with it.

The first command starts the server, in its own environment and folder; a command that has others, or finds that
fedpipe's code has changed, starts another one. So what is forked is what the command itself would have been after its
imports: with the same threads and bits. Only fedpipe's own variables, which nothing reads as it is imported, are handed
over with a command: so that a server can start before the plan that says how jobs execute. A server and all that it
forked end with snakemake, however that ends.
Where a server can't be had, a command runs in its own process. Imports next to nothing, since each job waits for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType
from typing import NamedTuple, NoReturn

SNAKEMAKE = "FEDPIPE_SNAKEMAKE"  #: in a job's environment: the process number of the snakemake that it ends with
FOLDER = ".snakemake/fedpipe/workers"  #: for sockets; relative, since their paths have to be short
#: What most commands import, also late: pyarrow reads tables as arrays with the help of pandas.
PRELOADED = (
    "fedpipe.cli",
    "fedpipe.engine.run",
    "fedpipe.report.progress",
    "fedpipe.stages.collect",
    "filelock",
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet",
)
#: What figures import, of which none is the first that a study makes; none of fedpipe's own code, which may change.
LATER = tuple(f"matplotlib.{name}" for name in ("backends.backend_pdf", "backends.backend_svg", "figure", "style"))
#: What a waiting command hands on. Those that stop and continue it (Ctrl+Z, `fg`) do so to the job as well.
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGCONT")
#: What differs between processes that are alike: bash counts there, and names the command.
IDLE = ("SHLVL", "_")
OWN = "FEDPIPE_"  #: how the variables begin that are handed over with each command
#: How Arrow's allocator is told to have no thread of its own: whatever that holds would stay locked in what is forked.
ALLOCATOR, ALONE = "JE_ARROW_MALLOC_CONF", "background_thread:false"
MESSAGE = 1 << 16  #: bytes of a message at most; longer commands run by themselves
LOST = "fedpipe: the process that local jobs are forked from, or snakemake, was killed; type the same command again.\n"
SERVER = "from fedpipe import local; local.main()"
DEATH = 1  #: Linux's PR_SET_PDEATHSIG

# -- the command that waits --------------------------------------------------------------------------------------------


def hand_over(snakemake: int) -> None:
    """Let a preloaded process do this process' command, and end as it ends; returns where that can't be had."""
    message = _message()
    if len(message) > MESSAGE:
        return
    try:
        server = _connected(snakemake)
        socket.send_fds(server, [message], [0, 1, 2])
        job = server.recv(MESSAGE)
    except OSError:
        return
    except KeyboardInterrupt:  # Ctrl+C before the job has begun
        raise SystemExit(128 + signal.SIGINT) from None
    if job:  # else it could not import, and this process will tell why
        _hand_on_signals(int(job))
        _end(server.recv(MESSAGE))


def _message() -> bytes:
    """Fedpipe's own variables and the arguments of this process; what :func:`_taken` takes apart."""
    variables = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(OWN)]
    return "\0".join([*variables, "", *sys.argv[1:]]).encode("utf-8", "surrogateescape")


def _connected(snakemake: int) -> socket.socket:
    """A connection to the server for processes like this one, which is started where there is none."""
    os.makedirs(FOLDER, exist_ok=True)
    place = f"{FOLDER}/{snakemake}-{_likeness()}"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with open(f"{FOLDER}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(place)
        except (FileNotFoundError, ConnectionRefusedError):
            _start(place, snakemake)
            connection.connect(place)
    return connection


def _likeness() -> str:
    """A digest of what a process is like before it does its command.

    That is its environment and folder, the signals that it ignores, Python and fedpipe's code.
    """
    names = sorted(name for name in os.environ if name not in IDLE and not name.startswith(OWN))
    variables = (f"{name}={os.environ[name]}" for name in names)
    ignored = (name for name in SIGNALS if signal.getsignal(signal.Signals[name]) == signal.SIG_IGN)
    marks = [sys.executable, os.getcwd(), *variables, *ignored]
    folders = [os.path.dirname(os.path.abspath(__file__))]
    for folder in folders:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir():
                    folders.append(entry.path)
                elif entry.name.endswith(".py"):
                    stat = entry.stat()
                    marks.append(f"{entry.path} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\0".join(marks).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _start(place: str, snakemake: int) -> None:
    """Start a server, in a session of its own: Ctrl+C reaches its jobs by the processes that wait for them."""
    import subprocess

    os.pidfd_open(snakemake)  # an error, where there is no such process, or this system can't watch one
    with suppress(FileNotFoundError):
        os.unlink(place)  # of a server that was killed
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        before = os.umask(0o077)  # nobody else's commands
        try:
            listener.bind(place)
        finally:
            os.umask(before)
        listener.listen(128)
        subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER, str(snakemake), str(listener.fileno()), place],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )


def _hand_on_signals(job: int) -> None:
    def hand_on(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(job, signal.SIGSTOP if number == signal.SIGTSTP else number)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    for name in SIGNALS:
        if signal.getsignal(number := signal.Signals[name]) != signal.SIG_IGN:  # as by nohup
            signal.signal(number, hand_on)


def _end(message: bytes) -> None:
    """End as the job has ended: by its signal, or with its status."""
    if not message:
        sys.stderr.write(LOST)
        sys.stderr.flush()
        os._exit(1)
    status = os.waitstatus_to_exitcode(int(message))
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


# -- the server --------------------------------------------------------------------------------------------------------


class Job(NamedTuple):
    """A command at work."""

    process: int
    ended: int  #: readable when it has ended
    asked: socket.socket  #: the connection to the process that waits for it; readable when that has ended


def serve(snakemake: int, listener: socket.socket) -> list[str] | None:
    """Fork a process for each command that comes, until snakemake ends; returns in each of them, with its arguments.

    Returns None at the end, or where fedpipe's code changed while it was imported: nobody knows what of it was.
    """
    import gc
    import importlib

    here, watched, begun = os.getpid(), os.pidfd_open(snakemake), _likeness()
    told = os.environ.get(ALLOCATOR)
    os.environ[ALLOCATOR] = told or ALONE
    for name in PRELOADED:
        importlib.import_module(name)
    importlib.import_module("fedpipe.code").shared()  # reads the code, once for all
    gc.freeze()  # what is here stays, and what is forked need not copy it to look for garbage
    if told is None:
        del os.environ[ALLOCATOR]
    if _likeness() != begun:
        return None
    jobs: list[Job] = []
    while True:
        ready = _readable([watched, listener, *(job.ended for job in jobs), *(job.asked for job in jobs)])
        if watched in ready:
            return None  # and what was forked dies with its parent
        for job in [job for job in jobs if job.asked in ready]:
            os.kill(job.process, signal.SIGKILL)  # as whoever waited for it
        for job in [job for job in jobs if job.ended in ready]:
            with suppress(OSError):
                job.asked.send(str(os.waitpid(job.process, 0)[1]).encode())
            os.close(job.ended)
            job.asked.close()
            jobs.remove(job)
        if listener in ready:
            asked, _ = listener.accept()
            message, streams, _, _ = socket.recv_fds(asked, MESSAGE, 3)
            if len(streams) < 3:  # it has ended already
                asked.close()
            elif process := os.fork():
                for stream in streams:
                    os.close(stream)
                jobs.append(Job(process, os.pidfd_open(process), asked))
                with suppress(OSError):
                    asked.send(str(process).encode())
                with suppress(Exception):  # where that fails, figures' own jobs will tell
                    for name in LATER:  # while the job is at work
                        importlib.import_module(name)
            else:
                _become(here, streams, [watched, *(job.ended for job in jobs)], [asked, *(job.asked for job in jobs)])
                return _taken(message)


def _taken(message: bytes) -> list[str]:
    """In what was forked: take the variables of the command that it does; its arguments."""
    words = message.decode("utf-8", "surrogateescape").split("\0")
    end = words.index("")  # no variable is empty
    for name in [name for name in os.environ if name.startswith(OWN)]:
        del os.environ[name]
    for word in words[:end]:
        name, _, value = word.partition("=")
        os.environ[name] = value
    return words[end + 1 :]


def _readable(files: list[int | socket.socket]) -> list[int | socket.socket]:
    """Those of the files that can be read now, once there are any."""
    descriptors = {file if isinstance(file, int) else file.fileno(): file for file in files}
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    return [descriptors[descriptor] for descriptor, _ in waiting.poll()]


def _become(server: int, streams: list[int], descriptors: list[int], connections: list[socket.socket]) -> None:
    """In what was forked: take the streams of the command that it does, and leave to the server what is the server's.

    Its files, and what it is to do as it ends.
    """
    import atexit
    import ctypes
    import weakref

    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    ctypes.CDLL(None).prctl(DEATH, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)  # the server has ended meanwhile
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for descriptor in (*streams, *descriptors):
        os.close(descriptor)
    for connection in connections:
        connection.close()


def main() -> None:
    """Serve; in what was forked, run the command line."""
    snakemake, descriptor, place = sys.argv[1:]
    with socket.socket(fileno=int(descriptor)) as listener:
        arguments = serve(int(snakemake), listener)
        if arguments is None:
            os.unlink(place)
            return
    sys.argv = ["fedpipe", *arguments]
    finish()


# -- both --------------------------------------------------------------------------------------------------------------


def finish() -> NoReturn:
    """Run the command line in this process, and leave when it has ended, its threads too, and what was to be done then.

    To take down all that was imported would take a third of a second more, and in what was forked, which shares it
    with others, a whole one. What that would have done for files that are still open is done: they are flushed.
    """
    import atexit
    import gc
    import io
    import threading

    from fedpipe.cli import main as command_line

    try:
        command_line()
        status = 0
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise
        status = end.code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # there is none where it was closed
        stream.flush()
    for found in gc.get_objects():  # in what was forked those that are its own: the server's are frozen
        if issubclass(type(found), io.IOBase):
            with suppress(Exception):  # it is closed, or one's own; Python would say nothing, too
                found.flush()
    os._exit(status)
