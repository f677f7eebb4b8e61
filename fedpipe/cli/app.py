"""Entry point of the command line."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import typer

# Each module adds its commands to `app`. The help page lists them in this order.
# isort: off
from fedpipe.cli import study  # noqa: F401
from fedpipe.cli import stages  # noqa: F401
from fedpipe.cli import lineage  # noqa: F401
from fedpipe.cli import components  # noqa: F401

# isort: on
from fedpipe.cli.group import app
from fedpipe.core.errors import UserError, format_permission_error

__all__ = ["app", "main"]

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)  #: errors of a full disk or an exceeded quota


@functools.cache
def build_command_line() -> Callable[[], object]:
    """Build the command line from all functions. The job server does this once for all jobs."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the command line. A user error prints one message and exits with status 2."""
    sys.path.insert(0, str(Path.cwd()))  # for custom algorithms next to params.yaml
    try:
        build_command_line()()
    except UserError as error:
        typer.echo(f"fedpipe: {error}", err=True)
        sys.exit(2)
    except PermissionError as error:
        if error.filename is None:  # it is not about a file
            raise
        typer.echo(f"fedpipe: {format_permission_error(error)}", err=True)
        sys.exit(2)
    except OSError as error:
        if error.errno not in DISK_FULL_ERRORS:
            raise
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            typer.echo(f"fedpipe: the output can't be written ({error.strerror}).", err=True)
        except OSError:  # stderr is on the same disk
            os.dup2(null, 2)
        os.dup2(null, 1)  # discards the rest of stdout at exit
        sys.exit(2)
