"""A process that has imported PyTorch, parts of Snakemake and DVC. In tests, it forks commands and job servers.

The slow tests type about 600 commands, and Snakemake starts about 200 job servers (`fedpipe.cli.job_server`). Each of
them would import packages for one to two seconds. A fork imports fedpipe itself, from its own folder. A command or
server starts as usual if its process is different from the template: another Python, other limits, rights, ignored
signals, or variables that these packages may read. Commands that train start as usual too, because PyTorch reads the
number of threads when it is imported.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

PACKAGES = ("torch", "torch.func", "pandas", "pyarrow.dataset", "pyarrow.parquet", "typer", "yaml", "filelock")
PACKAGES += ("sklearn.datasets",)  # for the digits, which each new project reads
PACKAGES += tuple(f"pydantic.{name}" for name in ("main", "type_adapter", "dataclasses", "functional_validators"))
PACKAGES += ("snakemake.rules", "snakemake.persistence", "snakemake.report", "snakemake.spawn_jobs")
PACKAGES += ("dvc.cli.parser", "dvc.repo.reproduce", "dvc.stage.run", "dvc.repo.experiments.queue.celery")
#: Variables that the packages don't read when they are imported.
OTHER_VARIABLES = ("FEDPIPE_", "PYTHONPATH", "PYTEST_", "GIT_", "DVC_", "XDG_", "PATH", "PWD", "OLDPWD", "SHLVL")
OTHER_VARIABLES += ("TMP", "TEMP", "_")
#: Snakemake sets these variables to the threads of a job.
THREAD_VARIABLES = tuple(f"{name}_NUM_THREADS" for name in ("OMP", "GOTO", "OPENBLAS", "MKL", "NUMEXPR"))
THREAD_VARIABLES += ("VECLIB_MAXIMUM_THREADS",)
STATUS = ("Umask", "Uid", "Gid", "Groups", "SigIgn", "CapInh", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")
MAX_REQUEST_BYTES = 1 << 17


def describe_process() -> list[Any]:
    """Describe what a fork has from its parent, and what a new process may have otherwise."""
    status = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(STATUS)]
    namespaces = [str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("mnt", "net", "pid", "user")]
    variables = {name: value for name, value in sorted(os.environ.items()) if not name.startswith(OTHER_VARIABLES)}
    limits, priority = Path("/proc/self/limits").read_text(), os.getpriority(os.PRIO_PROCESS, 0)
    return [sys.executable, status, limits, namespaces, priority, variables]


def describe_command() -> list[Any]:
    """Describe the process of a command. A job's threads don't matter to it, but its terminal and group do."""
    *others, variables = describe_process()
    return [*others, os.getsid(0), {name: value for name, value in variables.items() if name not in THREAD_VARIABLES}]


def delegate_server(address: str, command: list[str]) -> None:
    """Let a fork of the template run a server's command, and end. Return if the template can't do it."""
    code, *arguments = command
    request = {"process": describe_process(), "code": code, "arguments": ["-c", *arguments]}
    with suppress(OSError), send_request(address, request, [int(arguments[1])]) as template:
        if template.recv(1):
            os._exit(0)


def delegate_command(address: str, arguments: list[str]) -> None:
    """Let a fork of the template run a command, and end like it. Return if the template can't do it.

    The template kills the fork if this process ends.
    """
    request = {"process": describe_command(), "arguments": arguments, "group": os.getpgid(0)}
    with suppress(OSError), send_request(address, request, [0, 1, 2]) as template:
        if template.recv(1):
            message = template.recv(16)  # empty if the template and its processes were killed
            status = os.waitstatus_to_exitcode(int(message)) if message else -signal.SIGKILL
            if status < 0:  # a signal has ended the fork
                signal.signal(-status, signal.SIG_DFL)
                os.kill(os.getpid(), -status)
            os._exit(status)


def send_request(address: str, request: dict[str, object], files: list[int]) -> socket.socket:
    """Send a request with this process's folder, variables and files to the template. Return the connection."""
    template = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    template.connect(f"\0{address}")
    request |= {"folder": str(Path.cwd()), "variables": dict(os.environ)}
    socket.send_fds(template, [json.dumps(request).encode()], files)
    return template


def start_template(address: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a template, which ends with this process."""
    environment = {**environment, **dict.fromkeys(THREAD_VARIABLES, "1")}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{address}")
        listener.listen(128)  # servers wait until the template has imported the packages
        number = listener.fileno()
        command = [sys.executable, "-P", __file__, str(number)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=[number])


def main() -> None:
    """Import the packages, and fork a process for each request, until the end of standard input."""
    gc.disable()
    descriptions = [describe_process(), describe_command()]
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # as in job_server.main
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        for name in PACKAGES:
            __import__(name)
        gc.freeze()
        while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
            connection, _ = listener.accept()
            message, files, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 3)
            if not message:  # the process was killed
                connection.close()
                continue
            request = json.loads(message)
            is_equal = request["process"] in descriptions
            if is_equal and os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                if "code" in request:
                    connection.close()
                    return run_server(request, files[0])
                if (process := os.fork()) == 0:
                    connection.close()
                    return run_command(request, files)
                report_end(process, connection)
            with suppress(OSError):
                connection.send(b"\0" if is_equal else b"")
            connection.close()
            for file in files:
                os.close(file)


def report_end(process: int, connection: socket.socket) -> NoReturn:
    """Send the status of a fork when it ends. Kill it if the process that waits for it has ended."""
    end = os.pidfd_open(process)
    if end not in select.select([connection, end], [], [])[0]:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    with suppress(OSError):
        connection.send(str(status).encode())
    os._exit(0)


def run_server(request: dict[str, Any], listener: int) -> None:
    """Run a server's command like a new process."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    enter_process(request, [null] * 3)
    os.dup2(listener, int(request["arguments"][2]))
    exec(request["code"], {"__name__": "__main__"})


def run_command(request: dict[str, Any], files: list[int]) -> None:
    """Run a command like a new process."""
    os.setpgid(0, request["group"])
    enter_process(request, files)
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


def enter_process(request: dict[str, Any], files: list[int]) -> None:
    """Use the standard streams, folder, variables and arguments of a request."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in set(files):
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.argv = request["arguments"]
    sys.path[:0] = map(os.path.abspath, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    gc.enable()


if __name__ == "__main__":
    main()
