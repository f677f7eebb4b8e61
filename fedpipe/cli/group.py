"""The command group, and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

from fedpipe import __version__
from fedpipe.core.errors import SettingsError, find_nearest_name
from fedpipe.core.storage.layout import StudyFiles

DELETING_COMMANDS = ("prune",)  #: commands that a typing mistake never suggests
USER_PANEL = "User commands"
STAGES_PANEL = "Stages (called by Snakemake and DVC)"
GENERATED_PANEL = "Generated files (called by make docs)"
DIAGNOSTIC_KIND = "diagnostics"  #: listed like a kind of components
LOCAL_PROFILE = "workflow/profiles/local"  #: profile of `fedpipe run`


class CommandGroup(TyperGroup):
    """Group of all commands. It never suggests a command that deletes."""

    @override
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command. An unknown command is an error with a suggestion."""
        if args[0] in self.commands or args[0].startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        nearest_name = find_nearest_name(args[0], [*self.commands], cutoff=0.6)
        hint = "Type `fedpipe --help` to list all commands, or `fedpipe run` to run a study."
        if nearest_name and nearest_name not in DELETING_COMMANDS:
            hint = f"Did you mean '{nearest_name}'?"
        raise SettingsError(f"'{args[0]}' is not a command. {hint}")


app = typer.Typer(
    cls=CommandGroup,
    help="Reproducible federated-learning experiments: a DAG of cached stages on Snakemake and DVC.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def require_study_path(params: Path | None) -> Path | None:
    """Require that commands can store results of a study's file. All options `--params` do."""
    if params is not None and params.is_file():
        StudyFiles.from_params(params)
    return params


StudyFile = Annotated[Path, typer.Option("--params", help="Study file.", callback=require_study_path)]
Preset = Annotated[str, typer.Option("--preset", help="Preset of the study.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "-S",
        "--set",
        metavar="KEY=VALUE",
        help="Use a copy of the study in which this key has another value. Several values make a grid: KEY=0.1,1.0.",
    ),
]
PlanFingerprint = Annotated[
    str | None, typer.Option("--plan-fingerprint", help="Fail if the plan has another fingerprint.")
]
RunPath = Annotated[Path, typer.Argument(help="Folder of the run, results/runs/ALGORITHM/KEY.")]
RoundNumber = Annotated[int, typer.Option("--round", min=1, help="Number of the round.")]
Threads = Annotated[int, typer.Option(min=1, help="Number of CPU cores to use.")]
Device = Annotated[str, typer.Option(envvar="FEDPIPE_DEVICE", help="Same as execution.device: auto, cpu or cuda.")]
Stack = Annotated[
    str, typer.Option(envvar="FEDPIPE_STACK", help="Same as execution.stack: clients that train in one call, or auto.")
]
Callbacks = Annotated[
    str, typer.Option(envvar="FEDPIPE_CALLBACKS", help="Same as execution.callbacks, separated by spaces.")
]
Graphs = Annotated[
    bool, typer.Option("--graphs/--no-graphs", envvar="FEDPIPE_GRAPHS", help="Same as execution.graphs.")
]
KeepModels = Annotated[str, typer.Option(envvar="FEDPIPE_KEEP_MODELS", help="Same as artifacts.keep_models.")]


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"fedpipe {__version__}")
        raise typer.Exit


@app.callback()
def handle_global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Handle options before a command."""
