"""The command that creates a project."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedpipe.cli.group import PEOPLE_PANEL, app


@app.command(rich_help_panel=PEOPLE_PANEL)
def init(
    folder: Annotated[Path, typer.Argument(help="Where; it is made if it is not there.")],
    update: Annotated[
        bool,
        typer.Option("--update", help="Bring the files of a project to this version, but for yours and edited ones."),
    ] = False,
) -> None:
    """Create a project with Snakefile, workflow, dvc.yaml, params.yaml and a first own.py."""
    from fedpipe.cli.scaffold import project

    if not update:
        project.create_project(folder)
        typer.echo(
            f"{folder} is laid out. A study:  cd {shlex.quote(str(folder))} && fedpipe run\n"
            "Its settings stand in params.yaml; own.py has an algorithm to begin with: `prox: {algorithm: own.Prox}`.\n"
            "With DVC:  git init && git add . && git commit -m begin, then dvc repro"
        )
        return
    changed_files, edited_files = project.update_project(folder)
    typer.echo("\n".join(changed_files) if changed_files else "Nothing is new.")
    for name in edited_files:
        typer.echo(f"fedpipe: {name} was edited here and stays; `fedpipe init NEW` has this version's.", err=True)
