"""``fedpipe``, and ``python -m fedpipe``: the command line."""

import os


def main() -> None:
    """Run the command line; a local job's in a process that has done its imports (`fedpipe.local`)."""
    if snakemake := os.environ.get("FEDPIPE_SNAKEMAKE"):
        from fedpipe import local

        local.hand_over(int(snakemake))
    from fedpipe.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
