"""Renders the page of all commands, docs/cli.md, from their help texts."""

from __future__ import annotations

HEAD = """\
# Command line

Generated from the help texts by `fedpipe docs`. `fedpipe COMMAND --help` prints the same text. Type commands in the
folder of params.yaml. After a mistake, a command prints one message and exits with status 2."""
HELP_OPTION = "* `--help`: Show this message and exit.\n"


def render_commands_page() -> str:
    """Render the page of all commands by the panels of `fedpipe --help`, with Typer's description of each command.

    It has the commands of the modules that :mod:`fedpipe.cli.app` imports.
    """
    import typer
    from typer.cli import get_docs_for_click
    from typer.main import get_group

    from fedpipe.cli.group import app

    group = get_group(app)
    context = typer.Context(group, info_name="fedpipe")
    panels: dict[str, list[str]] = {}
    for name, command in group.commands.items():
        text = get_docs_for_click(obj=command, ctx=context, name=name, call_prefix="fedpipe", indent=2)
        text = text.replace(HELP_OPTION, "").replace("**Options**:\n\n\n", "").replace("```console\n$ ", "```text\n")
        text = text.replace("; ", ", ")  # of defaults and limits
        panels.setdefault(str(getattr(command, "rich_help_panel", "")), []).append(text.strip())
    return "\n\n".join([HEAD, *(text for panel, texts in panels.items() for text in (f"## {panel}", *texts))]) + "\n"
