"""Commands and job servers of tests are forks of a template, but only if their process would be the same."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.conftest import ENVIRONMENT, start_server_template
from tests.pipeline.start.server_template import THREAD_VARIABLES
from tests.pipeline.start.sitecustomize import is_command

#: Sends what a server has.
CODE = """  # instead of job_server.main()
import json, os, socket, sys
listener = socket.socket(fileno=int(sys.argv[2]))
listener.send(json.dumps([os.getppid(), os.getcwd(), sys.path[0], sys.argv[1:], dict(os.environ)]).encode())
"""
#: A command that sends what it has, reads its input, and ends with the status or signal in its arguments.
COMMAND = """
import json, os, sys
print(json.dumps([os.getpid(), os.getppid(), os.getpgid(0), os.getcwd(), sys.argv[1:], dict(os.environ)]), flush=True)
sys.stdin.read()
if int(sys.argv[1]) < 0:
    os.kill(os.getpid(), -int(sys.argv[1]))
sys.exit(int(sys.argv[1]))
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="job servers need Linux")]


def start_command(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    (folder / "fedpipe").write_text(COMMAND)
    command, pipe = [sys.executable, str(folder / "fedpipe"), *arguments], subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=ENVIRONMENT | variables, stdin=pipe, stdout=pipe, text=True)


@pytest.mark.parametrize(
    ("arguments", "variables", "is_fork"),
    [
        (["7"], {"GIT_AUTHOR_NAME": "another"}, True),
        (["-15"], {"OMP_NUM_THREADS": "2"}, True),
        (["7"], {"PYTHONHASHSEED": "1"}, False),
        (["7"], {"FEDPIPE_FORKS": "servers"}, False),
        (["7"], {"FEDPIPE_SNAKEMAKE": "1"}, False),
        (["7", "segment"], {}, True),
    ],
)
def test_command_is_fork_of_template_only_if_its_process_is_equal(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], is_fork: bool
) -> None:
    start_server_template()
    with start_command(tmp_path, *arguments, **variables) as command:
        number, parent, group, folder, received, environment = json.loads(command.stdout.readline())
        command.stdin.close()
        assert command.wait() == int(arguments[0])
    assert (number == command.pid, parent == os.getpid()) == (not is_fork, not is_fork)
    assert (group, folder, received) == (os.getpgid(0), str(tmp_path), arguments)
    assert environment.items() >= (ENVIRONMENT | variables).items()


def test_fork_ends_with_its_command(tmp_path: Path) -> None:
    start_server_template()
    with start_command(tmp_path, "0") as command:
        number = json.loads(command.stdout.readline())[0]
        assert number != command.pid
        command.kill()
        assert command.stdout.read() == "", "the stream ends with the fork"
        command.stdin.close()


def test_commands_that_train_are_no_forks() -> None:
    assert is_command(["/bin/fedpipe", "plan"])
    assert is_command(["-m", "fedpipe", "plan"])
    assert not is_command(["/bin/fedpipe", "segment"])
    assert not is_command(["-m", "fedpipe", "verify"])
    assert not is_command(["-m", "pytest"])


def test_server_is_fork_of_template_only_if_its_process_is_equal(tmp_path: Path) -> None:
    template = start_server_template()
    equal = ENVIRONMENT | dict.fromkeys(THREAD_VARIABLES, "1") | {"GIT_AUTHOR_NAME": "another"}
    for environment, is_fork in ((equal, True), (equal | {"OMP_NUM_THREADS": "2"}, False), (equal, True)):
        received, sent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-c", CODE, "7", str(sent.fileno()), "path"]
        with received, sent:
            server = subprocess.Popen(command, cwd=tmp_path, env=environment, pass_fds=[sent.fileno()])
            parent, folder, first, arguments, variables = json.loads(received.recv(1 << 17))
            assert server.wait() == 0
        assert parent == (template.pid if is_fork else os.getpid())
        assert (folder, first) == (str(tmp_path), str(tmp_path))
        assert arguments == ["7", command[5], "path"]
        assert variables.items() >= environment.items()
