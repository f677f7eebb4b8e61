"""The command line with all of its commands, and its entry point."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

import typer

# Each module adds its commands to `app`. The help page lists them in this order.
# isort: off
from fedpipe.cli import study  # noqa: F401
from fedpipe.cli import stages  # noqa: F401
from fedpipe.cli import lineage  # noqa: F401
from fedpipe.cli import components  # noqa: F401
from fedpipe.cli import project  # noqa: F401

# isort: on
from fedpipe.cli.group import app
from fedpipe.core.errors import UserError

__all__ = ["app", "main"]

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)  #: of a disk, or of a user's share of it


def main() -> None:
    """Run the command line; a user's mistake is one sentence and status 2."""
    sys.path.insert(0, str(Path.cwd()))  # own algorithms lie beside params.yaml
    try:
        app()
    except UserError as error:
        typer.echo(f"fedpipe: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        if error.errno not in DISK_FULL_ERRORS:
            raise
        with suppress(OSError):  # both may go to one disk
            typer.echo(f"fedpipe: what it prints can't be written ({error.strerror}).", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left of it, as Python ends
        sys.exit(2)
