"""A process that has imported PyTorch. In tests, job servers (`fedpipe.cli.job_server`) are forks of it.

Snakemake starts about 200 job servers in the slow tests, and each of them would import PyTorch and other packages for
two seconds. A fork imports fedpipe itself, from its own folder. A server starts as usual if its process is different
from the template: other limits, rights, ignored signals, or variables that these packages may read.
"""

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "torch.func", "pandas", "pyarrow.dataset", "pyarrow.parquet", "typer", "yaml", "filelock")
PACKAGES += ("sklearn.datasets",)  # for the digits, which each new project reads
PACKAGES += tuple(f"pydantic.{name}" for name in ("main", "type_adapter", "dataclasses", "functional_validators"))
#: Variables that the packages don't read when they are imported.
OTHER_VARIABLES = ("FEDPIPE_", "PYTHONPATH", "PYTEST_", "GIT_", "DVC_", "XDG_", "PATH", "PWD", "OLDPWD", "SHLVL")
OTHER_VARIABLES += ("TMP", "TEMP", "_")
#: Snakemake sets these variables to the threads of a job.
THREAD_VARIABLES = tuple(f"{name}_NUM_THREADS" for name in ("OMP", "GOTO", "OPENBLAS", "MKL", "NUMEXPR"))
THREAD_VARIABLES += ("VECLIB_MAXIMUM_THREADS",)
STATUS = ("Umask", "Uid", "Gid", "Groups", "SigIgn", "CapInh", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")
MAX_REQUEST_BYTES = 1 << 17


def describe_process() -> list[object]:
    """Describe what a fork has from its parent, and what a new process may have otherwise."""
    status = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(STATUS)]
    namespaces = [str(Path(f"/proc/self/ns/{name}").readlink()) for name in ("mnt", "net", "pid", "user")]
    variables = {name: value for name, value in sorted(os.environ.items()) if not name.startswith(OTHER_VARIABLES)}
    return [status, Path("/proc/self/limits").read_text(), namespaces, os.getpriority(os.PRIO_PROCESS, 0), variables]


def delegate_server(address: str, command: list[str]) -> None:
    """Let a fork of the template run a server's command, and end. Return if the template can't do it."""
    code, snakemake, listener, path = command
    request = {"process": describe_process(), "folder": str(Path.cwd()), "variables": dict(os.environ)}
    request |= {"code": code, "arguments": [snakemake, listener, path]}
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as template:
        template.connect(f"\0{address}")
        socket.send_fds(template, [json.dumps(request).encode()], [int(listener)])
        if template.recv(1):
            os._exit(0)


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
    """Import the packages, and fork a process for each server, until the end of standard input."""
    gc.disable()
    process = describe_process()
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # as in job_server.main
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        for name in PACKAGES:
            __import__(name)
        gc.freeze()
        while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
            connection, _ = listener.accept()
            message, files, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 1)
            if not message:  # the server was killed
                connection.close()
                continue
            request = json.loads(message)
            is_equal = request["process"] == process
            if is_equal and os.fork() == 0:
                listener.close()
                connection.close()
                return run_server(request, files[0])
            with suppress(OSError):
                connection.send(b"\0" if is_equal else b"")
            connection.close()
            os.close(files[0])


def run_server(request: dict[str, Any], listener: int) -> None:
    """Run a server's command like a new process."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.close(null)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    os.dup2(listener, int(request["arguments"][1]))
    sys.argv = ["-c", *request["arguments"]]
    sys.path[:0] = map(os.path.abspath, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    gc.enable()
    exec(request["code"], {"__name__": "__main__"})


if __name__ == "__main__":
    main()
