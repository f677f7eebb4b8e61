"""``fedpipe``, and ``python -m fedpipe``: the command line."""

import atexit
import gc
import io
import os
import sys

from fedpipe.cli import fast_exit, job_server
from fedpipe.core import garbage


def main() -> None:
    """Run the command line, for a local job in a process that has done its imports (`fedpipe.cli.job_server`)."""
    if snakemake := os.environ.get(job_server.SNAKEMAKE_PID_VARIABLE):
        job_server.delegate_command_to_server(int(snakemake))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # in a locale that lacks ± or µ
    garbage.reduce_collections()
    if sys.argv[1:2] in (["plan"], ["figure"]):
        gc.disable()
    atexit.register(fast_exit.end_process)
    fast_exit.run_command_line()


if __name__ == "__main__":
    main()
