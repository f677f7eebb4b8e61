"""``fedpipe``, and ``python -m fedpipe``: the command line."""

import gc
import os
import sys
from typing import NoReturn


def main() -> None:
    """Run the command line; a local job's in a process that has done its imports (`fedpipe.local`)."""
    if snakemake := os.environ.get("FEDPIPE_SNAKEMAKE"):
        from fedpipe import local

        local.hand_over(int(snakemake))
    if sys.argv[1:2] == ["plan"]:
        gc.disable()  # modules, syntax trees and settings: all stay until the end, which is near
    finish()


def finish() -> NoReturn:
    """Run the command line in this process, and leave when it has ended, its threads too, and what was to be done then.

    To take down all that was imported would take a third of a second more, and in what was forked, which shares it
    with others, a whole one.
    """
    import atexit
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
    os._exit(status)


if __name__ == "__main__":
    main()
