"""Commands that list, describe, check and create components, generate the pages about them, and create projects."""

from __future__ import annotations

import inspect
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedpipe.cli.group import DIAGNOSTIC_KIND, GENERATED_PANEL, USER_PANEL, app, require_study_path
from fedpipe.core.errors import SettingsError, suggest_name
from fedpipe.core.storage.layout import PARAMS

if TYPE_CHECKING:
    from fedpipe.core.components.component import ComponentKind


@app.command("list", rich_help_panel=USER_PANEL)
def list_components(
    kind: Annotated[str, typer.Argument(help="What to list: algorithms, datasets, models, partitions or diagnostics.")],
) -> None:
    """List the names that you can use in params.yaml, each with a one-line description."""
    from fedpipe.cli.docs.pages import get_diagnostic_summary
    from fedpipe.core.components import code_digest, registry
    from fedpipe.core.components.component import get_docstring_summary

    if kind == DIAGNOSTIC_KIND:
        summaries = {name: get_diagnostic_summary(name) for name in code_digest.DIAGNOSTIC_MODULES}
    else:
        component_kind = _find_component_kind(kind)
        summaries = {
            name: get_docstring_summary(registry.find_component(component_kind, name))
            for name in registry.list_components(component_kind)
        }
    for name, summary in summaries.items():
        typer.echo(f"{name:<{max(map(len, summaries))}}  {summary}")


@app.command("describe", rich_help_panel=USER_PANEL)
def describe_component(
    name: Annotated[
        str,
        typer.Argument(
            help="An algorithm, data set, model, partition scheme or diagnostic, or a method of params.yaml."
        ),
    ],
) -> None:
    """Print the documentation and parameters of a component, or of a diagnostic with its columns."""
    from fedpipe.cli.docs import pages
    from fedpipe.cli.docs.equations import render_docstring_equations
    from fedpipe.core.components import code_digest, registry
    from fedpipe.core.components.component import ALGORITHM, COMPONENT_KINDS, list_parameters

    def find_kind(name: str) -> ComponentKind | None:
        return next((kind for kind in COMPONENT_KINDS if registry.is_component(kind, name)), None)

    kind = find_kind(name)
    if kind is None and name in code_digest.DIAGNOSTIC_MODULES:
        typer.echo(pages.describe_diagnostic(name))
        return
    if kind is None:
        name = _find_algorithm_of_entry(name)
        kind = find_kind(name)
    if kind is None and "." in name:
        registry.find_component(ALGORITHM, name)  # raises an error with the reason, such as a mistake in own.py
    if kind is None:
        known_names = {component for kind in COMPONENT_KINDS for component in registry.list_components(kind)}
        hint = suggest_name(name, sorted(known_names | {*code_digest.DIAGNOSTIC_MODULES}))
        raise SettingsError(f"'{name}' is unknown. {hint}")
    component_class = registry.add_dw_parameter(kind, registry.find_component(kind, name))
    typer.echo(f"{name} ({kind.name})\n\n{render_docstring_equations(inspect.getdoc(component_class) or '')}\n")
    if sentence := pages.get_inherited_new_client_sentence(component_class):
        typer.echo(f"{sentence}\n")
    fields = list_parameters(component_class)
    if fields:
        typer.echo(f"In params.yaml, under {kind.section}:")
    inherited_docs = pages.get_inherited_parameter_docs(component_class)
    for field in fields:
        docs = inherited_docs.get(field.name)
        meaning = f"    # {render_docstring_equations(docs)}" if docs else ""
        typer.echo(f"  {field.name}: {pages.format_default(field)}{meaning}")


@app.command("docs", rich_help_panel=GENERATED_PANEL)
def generate_docs() -> None:
    """Write the generated pages and params.schema.json into a clone of fedpipe.

    The pages list all keys of params.yaml, all commands, and all components of each kind. params.schema.json is the
    JSON Schema of params.yaml, with which editors complete and check its keys.
    """
    from fedpipe.cli.docs.pages import write_docs

    write_docs()


@app.command("new-algorithm", rich_help_panel=USER_PANEL)
def create_algorithm(
    name: Annotated[str, typer.Argument(help="Name of the algorithm in params.yaml, such as my_avg.")],
) -> None:
    """Write a commented template for an algorithm and its test, in a clone of fedpipe."""
    from fedpipe.cli.scaffold.new_algorithm import write_algorithm_template

    code, test = write_algorithm_template(name)
    typer.echo(
        f"Created {code} and {test}: a variant of FedAvg to start from.\n"
        f"Test it:     pytest {test} tests/algorithms/test_contract.py -k {name}\n"
        f"Run it:      `algorithms: {{{name}: {{}}}}` and `study: {{algorithms: [fedavg, {name}]}}` in params.yaml\n"
        "Document it: make docs"
    )


@app.command("check", rich_help_panel=USER_PANEL)
def check_algorithm(
    name: Annotated[
        str, typer.Argument(help="An algorithm, such as own.Prox or fedavg. With --params, a method of that study.")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A parameter, such as mu=0.1. You can repeat this option."),
    ] = None,
    params: Annotated[
        Path | None,
        typer.Option("--params", help="Study file. NAME is then a method of this study.", callback=require_study_path),
    ] = None,
) -> None:
    """Check an algorithm against the interface. Print a message for each violation, and exit with status 1 if any."""
    from fedpipe.testing import command

    violations = command.build_and_check_algorithm(name, set_ or [], params)
    for violation in violations:
        typer.echo(violation)
    if violations:
        raise typer.Exit(1)
    typer.echo(f"{name} passes all checks.")


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
        quoted_folder = shlex.quote(f"./{folder}" if str(folder).startswith("-") else str(folder))  # `cd` has options
        typer.echo(
            f"Created the project {folder}. Run its study:  cd {quoted_folder} && fedpipe run\n"
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


def _find_algorithm_of_entry(name: str) -> str:
    """Find the algorithm of an entry of params.yaml, such as own.Prox of `prox`. Return other names unchanged."""
    from fedpipe.settings import loader

    study = loader.read_params(PARAMS) if PARAMS.is_file() else {}
    entries = study.get("algorithms")
    entry = entries.get(name) if isinstance(entries, dict) else None
    return str(entry["algorithm"]) if isinstance(entry, dict) and "algorithm" in entry else name


def _find_component_kind(plural_name: str) -> ComponentKind:
    """Find a kind of components by its name on the command line."""
    from fedpipe.core.components.component import COMPONENT_KINDS

    kinds = {kind.plural: kind for kind in sorted(COMPONENT_KINDS, key=lambda kind: kind.plural)}
    if plural_name not in kinds:
        raise SettingsError(
            f"'{plural_name}' is not a kind of component. {suggest_name(plural_name, [*kinds, DIAGNOSTIC_KIND])}"
        )
    return kinds[plural_name]
