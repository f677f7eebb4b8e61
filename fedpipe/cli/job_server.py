"""Fork server: local jobs start from a process that has already imported PyTorch and fedpipe.

A job of a small study imports for two seconds and computes for two. If a local snakemake calls `fedpipe`, the command
therefore sends its arguments, streams and ``FEDPIPE_`` variables to a server, which forks a process that runs it. The
command waits: it forwards its signals, and ends with the fork's exit status. If it can't reach a server, it runs in its
own process. It waits for the imports of this module too, so they are few.

The first command starts the server in its own environment and folder. A command with another environment, folder or
code starts another server (:func:`_compute_process_fingerprint`), so a fork has the command's own threads and bits.
The server waits for the end of snakemake and of each command, and kills their forks. If it is killed, each command
kills its fork.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from fedpipe.cli import command_process

SNAKEMAKE_PID_VARIABLE = "FEDPIPE_SNAKEMAKE"  #: environment variable of a job: process ID of its snakemake
SOCKET_FOLDER = ".snakemake/fedpipe/workers"  #: relative, because the path of a socket has to be short
#: What most commands import, also late: pyarrow reads tables as arrays with the help of pandas.
PRELOADED_MODULES = (
    *("fedpipe.cli.app", "fedpipe.engine.run", "fedpipe.report.callback_list", "fedpipe.engine.collect"),
    *("fedpipe.algorithms.extensions.dw", "fedpipe.engine.interrupts"),
    *("filelock", "pandas", "pyarrow.dataset", "pyarrow.parquet", "torch.utils.serialization.config"),
)
FIGURE_MODULES = (
    *("fedpipe.report.contents", "fedpipe.report.figures.partition", "fedpipe.report.figures.ranks"),
    *("matplotlib.backends.backend_pdf", "matplotlib.backends.backend_svg", "matplotlib.figure"),
)
FORWARDED_SIGNALS = [
    signal.Signals[f"SIG{name}"] for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "TSTP", "CONT")
]
#: Signals that a job gets instead.
SENT_SIGNALS: dict[int, int] = {signal.SIGTSTP: signal.SIGSTOP, signal.SIGHUP: signal.SIGTERM}
VARIABLE_PREFIX = "FEDPIPE_"  #: of variables that no import reads, so that they can come with each command
MAX_MESSAGE_BYTES = 1 << 16  #: a longer command runs in its own process
SERVER_LOST_MESSAGE = (
    "fedpipe: Snakemake, or the process that starts local jobs, was killed. Type the same command again.\n"
)
SERVER_CODE = "from fedpipe.cli import job_server; job_server.main()"


def delegate_command_to_server(snakemake_pid: int) -> None:
    """Let a fork of the server run this process's command, and end like it. Return if there is no server."""
    variables = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(VARIABLE_PREFIX)]
    request = "\0".join([*variables, "", *sys.argv[1:]]).encode("utf-8", "surrogateescape")
    if len(request) > MAX_MESSAGE_BYTES:
        return
    try:
        server = _connect_or_start_server(snakemake_pid)
        socket.send_fds(server, [request], [0, 1, 2])
        _, jobs, _, _ = socket.recv_fds(server, 1, 1)
        if not jobs:  # the server can't import or fork, so this process runs the command
            return
        _forward_signals(jobs[0])
    except OSError:
        return
    except KeyboardInterrupt:  # Ctrl+C before the job has begun
        raise SystemExit(128 + signal.SIGINT) from None
    message = server.recv(MAX_MESSAGE_BYTES)
    if not message:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(jobs[0], signal.SIGKILL)
        os.write(2, SERVER_LOST_MESSAGE.encode())
        os._exit(1)
    status = os.waitstatus_to_exitcode(int(message))
    os._exit(status if status >= 0 else 128 - status)  # like a shell if a signal has ended the job


def _connect_or_start_server(snakemake_pid: int) -> socket.socket:
    """Return a connection to the server for processes like this one, after starting it if there is none."""
    os.makedirs(SOCKET_FOLDER, exist_ok=True)
    os.chmod(SOCKET_FOLDER, 0o700)  # no other user may send commands
    socket_path = f"{SOCKET_FOLDER}/{snakemake_pid}-{_compute_process_fingerprint()}"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with open(f"{SOCKET_FOLDER}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(socket_path)
        except (FileNotFoundError, ConnectionRefusedError):
            _start_server(socket_path, snakemake_pid)
            connection.connect(socket_path)
    return connection


def _compute_process_fingerprint() -> str:
    """Hash what a process is like before its command: environment, folder, ignored signals, Python, fedpipe's code."""
    parts = [sys.executable, os.getcwd()]
    parts += (number.name for number in FORWARDED_SIGNALS if signal.getsignal(number) == signal.SIG_IGN)
    for name, value in sorted(os.environ.items()):
        if name not in ("SHLVL", "_") and not name.startswith(VARIABLE_PREFIX):  # bash sets those two itself
            parts.append(f"{name}={value}")
    for folder, _, names in sorted(os.walk(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))):
        for path in sorted(f"{folder}/{name}" for name in names if name.endswith(".py")):
            stat = os.stat(path)
            parts.append(f"{path} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _start_server(socket_path: str, snakemake_pid: int) -> None:
    """Start a server in its own session: Ctrl+C reaches its forks through the commands that wait for them."""
    from subprocess import DEVNULL, Popen

    os.close(os.pidfd_open(snakemake_pid))  # OSError if there is no such process, or if this system can't watch one
    with suppress(FileNotFoundError):
        os.unlink(socket_path)  # of a server that was killed
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(socket_path)
        listener.listen(128)
        arguments = [str(snakemake_pid), str(listener.fileno()), socket_path]
        command, files = [sys.executable, "-P", "-c", SERVER_CODE, *arguments], [listener.fileno()]
        Popen(command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, pass_fds=files, start_new_session=True)


def _forward_signals(job: int) -> None:
    """From now on, send the signals of this process to a job, a pidfd. If the terminal is closed, the job stops."""

    def forward_signal(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(job, SENT_SIGNALS.get(number, number))
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    for number in FORWARDED_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, forward_signal)


def main() -> None:
    """Import what jobs need, then fork a process for each command until snakemake ends."""
    from importlib import import_module

    command_process.prepare_process()
    # Arrow's allocator has a thread, whose locks would stay locked in forks.
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    fingerprint = _compute_process_fingerprint()
    gc.disable()  # imports would spend a fifth of their time on looking for garbage
    for name in PRELOADED_MODULES:
        import_module(name)
    command_line = import_module("fedpipe.cli.app").build_command_line()
    command_line.commands["segment"].make_context("segment", [], resilient_parsing=True)  # makes its validators, once
    # This reads the code, once for all jobs.
    code_digest = import_module("fedpipe.core.components.code_digest")
    code_digest.compute_shared_code_digest()
    code_digest.parse_component_modules()
    _share_memory_with_forks()
    with socket.socket(fileno=int(sys.argv[2])) as listener:
        if _compute_process_fingerprint() == fingerprint:  # otherwise the imported code is unknown
            _serve_commands(os.pidfd_open(int(sys.argv[1])), listener)
        os.unlink(sys.argv[3])


def _share_memory_with_forks() -> None:
    """Share everything in memory with forks. A fork need not copy it to look for garbage in it."""
    gc.freeze()
    gc.enable()


def _import_figure_modules() -> None:
    """Import what figures need, before the first of them is drawn."""
    from importlib import import_module

    if FIGURE_MODULES[-1] not in sys.modules:
        with suppress(Exception):  # the job shows the error
            for name in FIGURE_MODULES:
                import_module(name)
        _share_memory_with_forks()


def _serve_commands(snakemake_pidfd: int, listener: socket.socket) -> None:
    """Fork a process for each command until snakemake ends, a pidfd."""
    jobs: dict[int, tuple[int, socket.socket]] = {}  #: by pidfd, process ID and the connection to the command
    readable: list[Any] = []
    while snakemake_pidfd not in readable:
        files: list[Any] = [snakemake_pidfd, listener, *jobs, *(connection for _, connection in jobs.values())]
        readable, _, _ = select.select(files, [], [])
        for job, (process, connection) in list(jobs.items()):
            if snakemake_pidfd in readable or connection in readable:  # no process waits for the job any more
                os.kill(process, signal.SIGKILL)
            if job in readable:
                with suppress(OSError):
                    connection.send(str(os.waitpid(process, 0)[1]).encode())
                os.close(job)
                connection.close()
                del jobs[job]
        if listener in readable:
            connection, _ = listener.accept()
            request, streams, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 3)
            if b"\0\0figure\0" in request:
                _import_figure_modules()
            process = -1  # without streams, the command has ended already
            with suppress(OSError):  # too many processes: the command runs without a fork
                process = os.fork() if len(streams) == 3 else -1
            if process == 0:
                for server_socket in (listener, connection, *(other for _, other in jobs.values())):
                    server_socket.close()
                _run_request(request, streams)
            for stream in streams:
                os.close(stream)
            if process > 0:
                job = os.pidfd_open(process)
                jobs[job] = (process, connection)
                with suppress(OSError):
                    socket.send_fds(connection, [b"\0"], [job])
            else:
                connection.close()


def _run_request(request: bytes, streams: list[int]) -> NoReturn:
    """Run a command with its own streams, variables and arguments."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    words = request.decode("utf-8", "surrogateescape").split("\0")
    end = words.index("")  # no variable is empty
    for name in [name for name in os.environ if name.startswith(VARIABLE_PREFIX)]:
        del os.environ[name]
    os.environ.update(dict(word.split("=", 1) for word in words[:end]))
    sys.argv = ["fedpipe", *words[end + 1 :]]
    command_process.run_command_line()
