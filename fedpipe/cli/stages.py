"""Commands that the rules of the Snakefile call, one per stage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedpipe.cli.group import (
    STAGES_PANEL,
    USER_PANEL,
    Callbacks,
    Device,
    Graphs,
    KeepModels,
    PlanFingerprint,
    Preset,
    RoundNumber,
    RunPath,
    Stack,
    StudyFile,
    Threads,
    app,
    require_study_path,
)
from fedpipe.cli.plans import format_study_error, read_plan
from fedpipe.core.errors import ArtifactError, SettingsError, UserError, suggest_name
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import write_bytes, write_pt
from fedpipe.core.storage.layout import FULL_PRESET, PARAMS, RunFiles


@app.command("download", rich_help_panel=USER_PANEL)
def download_data(
    name: Annotated[
        str | None, typer.Argument(help="Name of a data set. By default, the data sets of the study.")
    ] = None,
    params: Annotated[
        Path, typer.Option("--params", help="Study file, or a folder of studies.", callback=require_study_path)
    ] = PARAMS,
) -> None:
    """Download a data set, check it and store it as tensors. Write the SHA-256 of a study's files into the study."""
    from fedpipe.planning import download as stage

    if name is not None and stage.is_planned_dataset(name):
        stage.download_dataset(name)
        return
    failed: list[str] = []
    stored: set[Path] = set()
    for path in layout.list_studies(params):
        try:
            typer.echo(stage.download_and_pin_dataset(name, path, stored))
        except UserError as error:
            if not params.is_dir():
                raise
            failed.append(format_study_error(path, error))
    if failed:
        raise ArtifactError("\n".join(failed))


@app.command("partition", rich_help_panel=USER_PANEL)
def partition_data(
    key: Annotated[str | None, typer.Argument(help="Key of the partition in the plan.")] = None,
    preview: Annotated[
        bool, typer.Option("--preview", help="Print the samples per client and class. Download missing data.")
    ] = False,
    params: StudyFile = PARAMS,
) -> None:
    """Partition the samples of a data set among the clients."""
    from fedpipe.data.assignment import Assignment
    from fedpipe.planning import partition as stage

    if preview:
        from fedpipe.planning.preview import preview_partitions
        from fedpipe.report.preview import render_partition_preview

        previews = [item for item in preview_partitions(params) if key in (None, item.key)]
        if not previews:
            raise SettingsError(f"'{key}' is not a partition of {params}. Leave it out to print all partitions.")
        for item in previews:
            counts, clients = item.assignment.class_counts, item.assignment.names
            typer.echo(
                render_partition_preview(
                    item.key, item.settings, counts, clients, item.class_names, item.held_out, item.unused_keys
                )
            )
            for warning in stage.list_partition_warnings(item.key, item.settings, item.assignment):
                typer.echo(f"fedpipe: warning: {warning}", err=True)
    elif key is None:
        raise SettingsError("KEY: missing. Use a partition of the plan (--preview prints all of them).")
    else:
        assignment = Assignment.read(stage.partition_dataset(key))
        for warning in stage.list_partition_warnings(key, stage.read_partition_settings(key), assignment):
            typer.echo(f"fedpipe: warning: {warning}", err=True)


@app.command("segment", rich_help_panel=STAGES_PANEL)
def run_segment(
    path: RunPath,
    stop: Annotated[int, typer.Option(min=1, help="Last round. Rounds that are complete are skipped.")],
    threads: Threads = 1,
    device: Device = "auto",
    stack: Stack = "auto",
    graphs: Graphs = True,
    keep_models: KeepModels = "all",
    callbacks: Callbacks = "",
    needs_collection: Annotated[
        bool, typer.Option("--collect", help="Merge all rounds afterwards, like `collect`.")
    ] = False,
) -> None:
    """Run or resume consecutive rounds: train, aggregate, evaluate. SIGTERM stops it after the current round."""
    from fedpipe.engine import collect as stage
    from fedpipe.engine import interrupts
    from fedpipe.report.callback_list import CallbackList

    finished_rounds: list[int] = []

    def explain_sigterm() -> str:
        if finished_rounds:
            return f"{path}: received SIGTERM, stops after round {finished_rounds[-1] + 1}"
        return (
            f"{path}: received SIGTERM before a round was complete. If the job reached its time limit, increase the "
            "limit or split rounds into jobs (execution: {rounds_per_job: 1, clients_per_job: 1})."
        )

    with (
        interrupts.defer_sigterm(explain_sigterm) as has_stop_request,
        CallbackList(callbacks.split(), RunFiles(path), stop) as callback_list,
    ):
        run = _open_run(path, threads, device, stack, graphs, keep_models)
        typer.echo(f"{path}: {run.describe_executor_and_device()}")
        rounds = callback_list.iterate_rounds_with_hooks(run.run_segment(stop))
        typer.echo(f"{path}: {next(rounds)} of {stop} rounds are complete")
        for number in rounds:
            typer.echo(f"{path}: round {number} of {stop}")
            finished_rounds.append(number)
            if number < stop and has_stop_request():
                typer.echo(f"{path}: stopped by SIGTERM after round {number}. Type the same command to resume.")
                raise typer.Exit(interrupts.SIGTERM_EXIT_STATUS)
        if needs_collection:
            stage.collect_rounds(run.files, stop, _parse_keep_models(keep_models))


@app.command("initialize", rich_help_panel=STAGES_PANEL)
def initialize_run(path: RunPath) -> None:
    """Write the initial server state of a run (round 0), if each round is split into jobs."""
    _open_run(path, device="cpu").write_initial_round()  # on the CPU, because the job requests no GPU


@app.command("train", rich_help_panel=STAGES_PANEL)
def train_block(
    path: RunPath,
    round: RoundNumber,
    block: Annotated[int, typer.Option(min=0, help="Index of the block of participants.")],
    size: Annotated[int, typer.Option(min=1, help="Participants per block, same as execution.clients_per_job.")],
    threads: Threads = 1,
    device: Device = "auto",
    stack: Stack = "auto",
    graphs: Graphs = True,
) -> None:
    """Train a block of the participants of a round."""
    run = _open_run(path, threads, device, stack, graphs)
    participants = run.select_participants(round)
    ids = participants[block * size : (block + 1) * size]
    if not ids:
        last_block = (len(participants) - 1) // size
        raise SettingsError(f"--block: {block} is not a block of round {round}. Use a number from 0 to {last_block}.")
    write_pt(run.files.get_round_files(round).get_block_uploads_path(block), run.train(round, ids).to_tensors())


@app.command("aggregate", rich_help_panel=STAGES_PANEL)
def aggregate_round(
    path: RunPath,
    round: RoundNumber,
    blocks: Annotated[int, typer.Option(min=1, help="Number of blocks of the round.")],
    device: Device = "auto",
) -> None:
    """Aggregate the uploads of a round into the next server state."""
    from fedpipe.engine.blocks import Block

    run = _open_run(path, device=device)
    files = run.files.get_round_files(round)
    run.aggregate(round, [Block.read(files.get_block_uploads_path(index)) for index in range(blocks)])


@app.command("evaluate", rich_help_panel=STAGES_PANEL)
def evaluate_round(
    path: RunPath,
    round: RoundNumber,
    threads: Threads = 1,
    device: Device = "auto",
    stack: Stack = "auto",
    graphs: Graphs = True,
    callbacks: Callbacks = "",
) -> None:
    """Evaluate the models of a round, which completes the round."""
    from fedpipe.report.callback_list import CallbackList

    run = _open_run(path, threads, device, stack, graphs)
    with CallbackList(callbacks.split(), run.files, round) as callback_list:
        callback_list.call_begin_run_hooks(round - 1)
        run.evaluate(round)
        callback_list.call_end_round_hooks(round)


@app.command("collect", rich_help_panel=STAGES_PANEL)
def collect_rounds(
    path: RunPath,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds to merge.")],
    keep_models: KeepModels = "all",
) -> None:
    """Merge the metrics, matrices, traffic and times of all rounds into one file each."""
    from fedpipe.engine import collect as stage

    stage.collect_rounds(RunFiles(path), rounds, _parse_keep_models(keep_models))


@app.command("diagnostic", rich_help_panel=STAGES_PANEL)
def compute_diagnostic(
    path: Annotated[
        Path, typer.Argument(help="Settings of the diagnostic, results/diagnostics/ALGORITHM/KEY/ROUND/KIND-KEY.yaml.")
    ],
    threads: Threads = 1,
    device: Device = "auto",
    stack: Stack = "auto",
) -> None:
    """Compute a diagnostic of a study (section `diagnostics`) from the stored states of a run."""
    from fedpipe.engine.diagnostics import stage

    stage.run_diagnostic(path, _build_execution_settings(device, stack), threads)


@app.command("rank", rich_help_panel=STAGES_PANEL)
def rank_draws(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the rung, as in tune.rungs.")],
    params: StudyFile = PARAMS,
    preset: Preset = FULL_PRESET,
    search: Annotated[
        str | None, typer.Option("--search", help="Hash of the search, which must not have changed.")
    ] = None,
) -> None:
    """Rank the draws of a rung of `tune`, and select those that continue, or the winners."""
    from fedpipe.planning.rungs import encode_rung
    from fedpipe.planning.search import write_winner_settings
    from fedpipe.report import contents, tuning

    study_plan = read_plan(params, preset)
    contents.require_unchanged_search(study_plan, search)
    if rounds not in (study_plan.tuning.rungs if study_plan.tuning else ()):
        raise SettingsError(f"--rounds: {rounds} is not in tune.rungs of {params}.")
    if study_plan.tuning and study_plan.tuning.sampler == "tpe":
        from fedpipe.planning import planner

        new_plan = planner.make_plan(params, preset)
        contents.require_unchanged_search(new_plan, study_plan.search_digest)
        rung = tuning.compute_rung_result(new_plan, rounds, new_plan.draw_planners)
        planner.write_job_files(new_plan)
    else:
        rung = tuning.compute_rung_result(study_plan, rounds)
    write_bytes(study_plan.study_files.get_rung_result_path(rounds), encode_rung(rung))
    write_winner_settings(study_plan)


@app.command("table", rich_help_panel=STAGES_PANEL)
def write_tables(
    params: StudyFile = PARAMS, preset: Preset = FULL_PRESET, plan_fingerprint: PlanFingerprint = None
) -> None:
    """Write the result table, metrics.json, the data of the plots, and the keys of each algorithm's runs."""
    from fedpipe.report import contents
    from fedpipe.report.data import StudyData

    study_plan = read_plan(params, preset)
    contents.require_unchanged_plan(study_plan, plan_fingerprint)
    study_plan.require_finished_search()
    contents.write_report_files(contents.build_report_files(StudyData(study_plan)))


@app.command("figure", rich_help_panel=STAGES_PANEL)
def plot_figure(
    name: Annotated[
        str,
        typer.Argument(help="Figure: curves, matrices, ranks or partition. `curves_METRIC` shows a further metric."),
    ],
    key: Annotated[str | None, typer.Argument(help="Key of the partition, for partition.")] = None,
    params: StudyFile = PARAMS,
    preset: Preset = FULL_PRESET,
    plan_fingerprint: PlanFingerprint = None,
) -> None:
    """Draw a figure as SVG, PDF and PNG."""
    from fedpipe.report import contents
    from fedpipe.report.data import StudyData
    from fedpipe.report.figures import curves, matrices, partition, ranks

    study_plan = read_plan(params, preset)
    contents.require_unchanged_plan(study_plan, plan_fingerprint)
    if name == "partition":
        if key is None:
            raise SettingsError("KEY: missing. Use the name of a folder in results/partitions.")
        partition.write_partition_figure(study_plan, key)
        return
    if name not in study_plan.figure_labels:
        names = ", ".join(["partition", *study_plan.figure_labels])
        raise SettingsError(f"'{name}' is not a figure of {params}. Use one of: {names}.")
    study_plan.require_finished_search()
    if name in study_plan.metrics_by_figure:
        curves.write_curves_figure(StudyData(study_plan), name)
    elif name == "matrices":
        matrices.write_matrices_figure(StudyData(study_plan))
    else:
        ranks.write_ranks_figure(StudyData(study_plan))


@app.command("record", rich_help_panel=STAGES_PANEL)
def require_complete_runs(
    algorithm: Annotated[str, typer.Argument(help="Algorithm in study.algorithms.")],
    params: StudyFile = PARAMS,
    preset: Preset = FULL_PRESET,
) -> None:
    """Check that all runs of an algorithm have the rounds of the plan, so that DVC can record them."""
    study_plan = read_plan(params, preset)
    if algorithm not in study_plan.algorithms:
        raise SettingsError(f"'{algorithm}' is not in the study. {suggest_name(algorithm, study_plan.algorithms)}")
    study_plan.require_finished_search()
    cells = study_plan.add_search_results(has_draws=True).cells
    for merged_files in dict.fromkeys(cell.merged_files for cell in cells if cell.algorithm == algorithm):
        merged_files.check_hashes()


def _open_run(
    path: Path,
    threads: int = 1,
    device: str = "auto",
    stack: str = "auto",
    graphs: bool = True,
    keep_models: str = "all",
) -> Any:
    from fedpipe.engine.run import Run

    execution, keep = _build_execution_settings(device, stack, graphs), _parse_keep_models(keep_models)
    return Run(RunFiles(path), execution, threads, keep)


def _build_execution_settings(device: str, stack: str, graphs: bool = True) -> Any:
    from fedpipe.settings.execution import Execution

    settings = {"device": device, "stack": _parse_integer_or_text(stack), "graphs": graphs}
    return Execution.from_settings(settings, "execution")


def _parse_keep_models(keep_models: str) -> Any:
    from fedpipe.settings.execution import Artifacts

    return Artifacts.from_settings({"keep_models": _parse_integer_or_text(keep_models)}, "artifacts").keep_models


def _parse_integer_or_text(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
