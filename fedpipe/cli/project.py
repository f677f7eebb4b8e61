"""The command that creates a project."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from fedpipe.cli.group import USER_PANEL, app


@app.command("init", rich_help_panel=USER_PANEL)
def init_project(
    folder: Annotated[Path, typer.Argument(help="Folder of the project. It is created if it does not exist.")],
    update: Annotated[
        bool,
        typer.Option("--update", help="Update the files of a project to this version. Your own and edited files stay."),
    ] = False,
) -> None:
    """Create a project with Snakefile, workflow, dvc.yaml, params.yaml and a custom algorithm in own.py."""
    from fedpipe.cli.scaffold import project

    if not update:
        for name in project.create_project(folder):
            typer.echo(f"Your {name} is kept.")
        typer.echo(
            f"Created the project {folder}. Run its study:  cd {_quote_folder(folder)} && fedpipe run\n"
            "Its settings are in params.yaml. A custom algorithm is in own.py: `prox: {algorithm: own.Prox}`.\n"
            "With DVC:  git init && git add . && git commit -m begin, then dvc repro"
        )
        return
    changed_files, edited_files = project.update_project(folder)
    typer.echo("\n".join(["Updated:", *changed_files]) if changed_files else "The project is up to date.")
    for name in edited_files:
        typer.echo(
            f"fedpipe: {name} is kept, because you edited it. `fedpipe init NEW` writes its new version.", err=True
        )


def _quote_folder(folder: Path) -> str:
    """Quote a folder for a shell. A dash at its beginning would be an option of `cd`."""
    return shlex.quote(f"./{folder}" if str(folder).startswith("-") else str(folder))
