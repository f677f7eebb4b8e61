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

SNAKEMAKE_PID_VARIABLE = (
    "FEDPIPE_SNAKEMAKE"  #: in a job's environment: the process number of the snakemake that it ends with
)
SOCKET_FOLDER = ".snakemake/fedpipe/workers"  #: for sockets; relative, since their paths have to be short
#: What most commands import, also late: pyarrow reads tables as arrays with the help of pandas.
PRELOADED_MODULES = (
    "fedpipe.cli.app",
    "fedpipe.engine.run",
    "fedpipe.report.progress",
    "fedpipe.engine.collect",
    "filelock",
    "pandas",
    "pyarrow.dataset",
    "pyarrow.parquet",
)
#: What figures import, of which none is the first that a study makes; none of fedpipe's own code, which may change.
FIGURE_MODULES = tuple(
    f"matplotlib.{name}" for name in ("backends.backend_pdf", "backends.backend_svg", "figure", "style")
)
#: What a waiting command hands on. Those that stop and continue it (Ctrl+Z, `fg`) do so to the job as well.
FORWARDED_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGCONT")
#: What differs between processes that are alike: bash counts there, and names the command.
IGNORED_VARIABLES = ("SHLVL", "_")
VARIABLE_PREFIX = "FEDPIPE_"  #: how the variables begin that are handed over with each command
#: How Arrow's allocator is told to have no thread of its own: whatever that holds would stay locked in what is forked.
ALLOCATOR_VARIABLE, ALLOCATOR_OPTIONS = "JE_ARROW_MALLOC_CONF", "background_thread:false"
MAX_MESSAGE_BYTES = 1 << 16  #: bytes of a message at most; longer commands run by themselves
SERVER_LOST_MESSAGE = (
    "fedpipe: the process that local jobs are forked from, or snakemake, was killed; type the same command again.\n"
)
SERVER_CODE = "from fedpipe.cli import job_server; job_server.main()"
PR_SET_PDEATHSIG = 1  #: Linux's PR_SET_PDEATHSIG

# -- the command that waits --------------------------------------------------------------------------------------------


def delegate_to_server(snakemake: int) -> None:
    """Let a preloaded process do this process' command, and end as it ends; returns where that can't be had."""
    message = _encode_request()
    if len(message) > MAX_MESSAGE_BYTES:
        return
    try:
        server = _connect_to_server(snakemake)
        socket.send_fds(server, [message], [0, 1, 2])
        job = server.recv(MAX_MESSAGE_BYTES)
    except OSError:
        return
    except KeyboardInterrupt:  # Ctrl+C before the job has begun
        raise SystemExit(128 + signal.SIGINT) from None
    if job:  # else it could not import, and this process will tell why
        _forward_signals(int(job))
        _exit_like_job(server.recv(MAX_MESSAGE_BYTES))


def _encode_request() -> bytes:
    """Fedpipe's own variables and the arguments of this process; what :func:`_decode_request` takes apart."""
    variables = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(VARIABLE_PREFIX)]
    return "\0".join([*variables, "", *sys.argv[1:]]).encode("utf-8", "surrogateescape")


def _connect_to_server(snakemake: int) -> socket.socket:
    """A connection to the server for processes like this one, which is started where there is none."""
    os.makedirs(SOCKET_FOLDER, exist_ok=True)
    socket_path = f"{SOCKET_FOLDER}/{snakemake}-{_compute_process_fingerprint()}"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with open(f"{SOCKET_FOLDER}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(socket_path)
        except (FileNotFoundError, ConnectionRefusedError):
            _start_server(socket_path, snakemake)
            connection.connect(socket_path)
    return connection


def _compute_process_fingerprint() -> str:
    """A digest of what a process is like before it does its command.

    That is its environment and folder, the signals that it ignores, Python and fedpipe's code.
    """
    names = sorted(
        name for name in os.environ if name not in IGNORED_VARIABLES and not name.startswith(VARIABLE_PREFIX)
    )
    variables = (f"{name}={os.environ[name]}" for name in names)
    ignored_signals = (name for name in FORWARDED_SIGNALS if signal.getsignal(signal.Signals[name]) == signal.SIG_IGN)
    fingerprint_parts = [sys.executable, os.getcwd(), *variables, *ignored_signals]
    folders = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    for folder in folders:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.is_dir():
                    folders.append(entry.path)
                elif entry.name.endswith(".py"):
                    stat = entry.stat()
                    fingerprint_parts.append(f"{entry.path} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\0".join(fingerprint_parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _start_server(socket_path: str, snakemake: int) -> None:
    """Start a server, in a session of its own: Ctrl+C reaches its jobs by the processes that wait for them."""
    import subprocess

    os.pidfd_open(snakemake)  # an error, where there is no such process, or this system can't watch one
    with suppress(FileNotFoundError):
        os.unlink(socket_path)  # of a server that was killed
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        previous_umask = os.umask(0o077)  # nobody else's commands
        try:
            listener.bind(socket_path)
        finally:
            os.umask(previous_umask)
        listener.listen(128)
        subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER_CODE, str(snakemake), str(listener.fileno()), socket_path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )


def _forward_signals(job: int) -> None:
    def forward_signal(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(job, signal.SIGSTOP if number == signal.SIGTSTP else number)
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    for name in FORWARDED_SIGNALS:
        if signal.getsignal(number := signal.Signals[name]) != signal.SIG_IGN:  # as by nohup
            signal.signal(number, forward_signal)


def _exit_like_job(message: bytes) -> None:
    """End as the job has ended: by its signal, or with its status."""
    if not message:
        sys.stderr.write(SERVER_LOST_MESSAGE)
        sys.stderr.flush()
        os._exit(1)
    status = os.waitstatus_to_exitcode(int(message))
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


# -- the server --------------------------------------------------------------------------------------------------------


class ForkedJob(NamedTuple):
    """A command at work."""

    pid: int
    pidfd: int  #: readable when it has ended
    connection: socket.socket  #: the connection to the process that waits for it; readable when that has ended


def serve_commands(snakemake: int, listener: socket.socket) -> list[str] | None:
    """Fork a process for each command that comes, until snakemake ends; returns in each of them, with its arguments.

    Returns None at the end, or where fedpipe's code changed while it was imported: nobody knows what of it was.
    """
    import gc
    import importlib

    server_pid, snakemake_pidfd, initial_fingerprint = (
        os.getpid(),
        os.pidfd_open(snakemake),
        _compute_process_fingerprint(),
    )
    user_options = os.environ.get(ALLOCATOR_VARIABLE)
    os.environ[ALLOCATOR_VARIABLE] = user_options or ALLOCATOR_OPTIONS
    for name in PRELOADED_MODULES:
        importlib.import_module(name)
    importlib.import_module(
        "fedpipe.core.components.code_digest"
    ).compute_shared_digest()  # reads the code, once for all
    gc.freeze()  # what is here stays, and what is forked need not copy it to look for garbage
    if user_options is None:
        del os.environ[ALLOCATOR_VARIABLE]
    if _compute_process_fingerprint() != initial_fingerprint:
        return None
    jobs: list[ForkedJob] = []
    while True:
        readable_files = _wait_until_readable(
            [snakemake_pidfd, listener, *(job.pidfd for job in jobs), *(job.connection for job in jobs)]
        )
        if snakemake_pidfd in readable_files:
            return None  # and what was forked dies with its parent
        for job in [job for job in jobs if job.connection in readable_files]:
            os.kill(job.pid, signal.SIGKILL)  # as whoever waited for it
        for job in [job for job in jobs if job.pidfd in readable_files]:
            with suppress(OSError):
                job.connection.send(str(os.waitpid(job.pid, 0)[1]).encode())
            os.close(job.pidfd)
            job.connection.close()
            jobs.remove(job)
        if listener in readable_files:
            connection, _ = listener.accept()
            message, streams, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 3)
            if len(streams) < 3:  # it has ended already
                connection.close()
            elif child_pid := os.fork():
                for stream in streams:
                    os.close(stream)
                jobs.append(ForkedJob(child_pid, os.pidfd_open(child_pid), connection))
                with suppress(OSError):
                    connection.send(str(child_pid).encode())
                with suppress(Exception):  # where that fails, figures' own jobs will tell
                    for name in FIGURE_MODULES:  # while the job is at work
                        importlib.import_module(name)
            else:
                _set_up_child(
                    server_pid,
                    streams,
                    [snakemake_pidfd, *(job.pidfd for job in jobs)],
                    [connection, *(job.connection for job in jobs)],
                )
                return _decode_request(message)


def _decode_request(message: bytes) -> list[str]:
    """In what was forked: take the variables of the command that it does; its arguments."""
    words = message.decode("utf-8", "surrogateescape").split("\0")
    arguments_start = words.index("")  # no variable is empty
    for name in [name for name in os.environ if name.startswith(VARIABLE_PREFIX)]:
        del os.environ[name]
    for word in words[:arguments_start]:
        name, _, value = word.partition("=")
        os.environ[name] = value
    return words[arguments_start + 1 :]


def _wait_until_readable(files: list[int | socket.socket]) -> list[int | socket.socket]:
    """Those of the files that can be read now, once there are any."""
    descriptors = {file if isinstance(file, int) else file.fileno(): file for file in files}
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return [descriptors[descriptor] for descriptor, _ in poller.poll()]


def _set_up_child(server: int, streams: list[int], descriptors: list[int], connections: list[socket.socket]) -> None:
    """In what was forked: take the streams of the command that it does, and leave to the server what is the server's.

    Its files, and what it is to do as it ends.
    """
    import atexit
    import ctypes
    import weakref

    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
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
    snakemake, descriptor, socket_path = sys.argv[1:]
    with socket.socket(fileno=int(descriptor)) as listener:
        arguments = serve_commands(int(snakemake), listener)
        if arguments is None:
            os.unlink(socket_path)
            return
    sys.argv = ["fedpipe", *arguments]
    run_command_line()


# -- both --------------------------------------------------------------------------------------------------------------


def run_command_line() -> NoReturn:
    """Run the command line in this process, and leave when it has ended, its threads too, and what was to be done then.

    To take down all that was imported would take a third of a second more, and in what was forked, which shares it
    with others, a whole one. What that would have done for files that are still open is done: they are flushed.
    """
    import atexit
    import gc
    import io
    import threading

    from fedpipe.cli.app import main as command_line

    try:
        command_line()
        status = 0
    except SystemExit as system_exit:
        if not isinstance(system_exit.code, int):
            raise
        status = system_exit.code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # there is none where it was closed
        stream.flush()
    for open_object in gc.get_objects():  # in what was forked those that are its own: the server's are frozen
        if issubclass(type(open_object), io.IOBase):
            with suppress(Exception):  # it is closed, or one's own; Python would say nothing, too
                open_object.flush()
    os._exit(status)
