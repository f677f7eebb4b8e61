"""``fedpipe``, and ``python -m fedpipe``: the command line."""

import os

from fedpipe.cli import command_process, job_server


def main() -> None:
    """Run the command line, for a local job in a process that has done its imports (`fedpipe.cli.job_server`)."""
    if snakemake := os.environ.get(job_server.SNAKEMAKE_PID_VARIABLE):
        job_server.delegate_command_to_server(int(snakemake))
    command_process.prepare_process()
    command_process.run_command_line()


if __name__ == "__main__":
    main()
