"""The process of a command, which may be a fork: how often it looks for garbage, and a fast end.

To take down all modules at the end would take 0.3 seconds, and a second in a forked process.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from contextlib import suppress
from typing import NoReturn

from fedpipe.core import garbage

_exit_statuses: list[int] = []  #: of the command, once it has ended


def prepare_process() -> None:
    """Let the output have escapes in a locale without ± or µ, and let the process end with :func:`end_process`.

    Call this before other imports, because exit functions run in reverse order, after the end of all threads.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    atexit.register(end_process)


def run_command_line() -> NoReturn:
    """Run the command line, and note its exit status. The commands `plan` and `figure` never look for garbage."""
    garbage.reduce_collections()
    if sys.argv[1:2] in (["plan"], ["figure"]):
        gc.disable()
    from fedpipe.cli.app import main as command_line

    try:
        command_line()
        raise SystemExit(0)
    except SystemExit as system_exit:
        if isinstance(system_exit.code, int):
            _exit_statuses.append(system_exit.code)
        raise


def end_process() -> None:
    """Flush open files and end the process with its exit status. Without one, Python prints the exception."""
    from threading import active_count  # no command that waits for its fork ends here, so it need not import this

    if not _exit_statuses or active_count() > 1:  # a daemon thread may block a file for ever
        return
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if the process started with a closed stream
        stream.flush()
    for item in gc.get_objects():  # the files that user code left open
        if issubclass(type(item), io.IOBase):
            with suppress(Exception):
                item.flush()
    os._exit(_exit_statuses[0])
