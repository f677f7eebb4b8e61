"""Job servers of tests are forks of a template, but only if their process would be the same."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.conftest import ENVIRONMENT, start_server_template
from tests.pipeline.start.server_template import THREAD_VARIABLES

#: Sends what a server has.
CODE = """  # instead of job_server.main()
import json, os, socket, sys
listener = socket.socket(fileno=int(sys.argv[2]))
listener.send(json.dumps([os.getppid(), os.getcwd(), sys.path[0], sys.argv[1:], dict(os.environ)]).encode())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="job servers need Linux")
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
