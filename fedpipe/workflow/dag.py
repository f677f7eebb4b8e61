"""Functions for the rules of the Snakefile: they select studies and list the files that each job reads and writes.

``workflow/rules/common.smk`` selects the studies, updates their plans and builds one `Dag`. Snakemake does the same in
the process of every job, so this module imports torch, pandas and pydantic only to plan.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from snakemake.io import ancient
from snakemake.iocontainers import Wildcards

from fedpipe.core.components.pinned_files import compute_stat_fingerprint
from fedpipe.core.errors import SettingsError, UserError
from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.storage.layout import (
    PAPERS,
    DiagnosticFiles,
    MergedRoundFiles,
    RunFiles,
    format_command,
    get_assignment_path,
    get_dataset_path,
    get_heterogeneity_path,
)
from fedpipe.planning import completion
from fedpipe.planning.combined import CombinedPlan
from fedpipe.planning.plan import Plan, PlannedDiagnostic, PlannedRun
from fedpipe.report.contents import compute_plans_fingerprint
from fedpipe.settings.execution import Execution
from fedpipe.workflow.selection import StudySelection

PROGRESS_OPTION = "--logger-fedpipe-progress"  #: of `fedpipe run` and `dvc repro`, which print a line per job
#: Files of a run's merged rounds, as an output of rules with these wildcards.
MERGED_PATTERN = [
    str(path)
    for path in MergedRoundFiles(RunFiles.from_key("{algorithm}", "{key}").path / "joined" / "{stop}").all_files
]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Dag:
    """Outputs of one call of Snakemake, and inputs of each of its jobs.

    A job is a run, a segment of consecutive rounds of a run (`execution.rounds_per_job`), or a stage of a round
    (`execution.clients_per_job`). All three give the same bits.
    """

    selection: StudySelection
    planned: CombinedPlan  #: the plans when Snakemake began
    execution: Execution
    _cache: dict[Any, Any] = field(default_factory=dict, compare=False)  #: the last plan, and names of its runs

    @property
    def plan(self) -> CombinedPlan:
        """The plans with the present results of `tune`. Snakemake calls functions again after each rung."""
        rung_files = [path for plan in self.planned.plans for path in plan.rung_files if path.is_file()]
        state = tuple((path, compute_stat_fingerprint(path)) for path in rung_files)
        if state not in self._cache:
            self._cache.clear()
            plans = tuple(plan.add_search_results() for plan in self.planned.plans)
            self._cache[state] = replace(self.planned, plans=plans)
        return self._cache[state]

    @classmethod
    def from_selection(cls, selection: StudySelection) -> Dag:
        """Build the DAG of planned studies, which can be run together.

        Raises a UserError if a plan can't be read, or the studies can't be run together.
        """
        plan = selection.read_plans()
        return cls(selection, plan, plan.execution)

    @property
    def participants_per_job(self) -> int | None:
        """Number of participants that a job trains. None if a job runs all rounds of a segment."""
        return self.execution.clients_per_job

    @property
    def has_one_job_per_run(self) -> bool:
        """Whether a run is one job, which also merges its rounds."""
        return self.execution.rounds_per_job is None

    @property
    def job_environment(self) -> dict[str, object]:
        """Environment variables of jobs. They are not part of a run's key, so a change does not rerun anything."""
        return {
            "FEDPIPE_DEVICE": self.execution.device,
            "FEDPIPE_STACK": self.execution.stack,
            "FEDPIPE_GRAPHS": int(self.execution.graphs),
            "FEDPIPE_KEEP_MODELS": self.plan.plans[0].keep_models,
            "FEDPIPE_CALLBACKS": " ".join(self.execution.callbacks),
        }

    @cached_property
    def plans_fingerprint(self) -> str:
        """Hash of all plans."""
        return compute_plans_fingerprint(self.plan.plans)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def get_run(self, wildcards: Wildcards) -> PlannedRun:
        """Get the run of a job, unless another command has planned the study without it since.

        Raises a SettingsError if another command has planned the study without it since.
        """
        path = RunFiles.from_key(wildcards.algorithm, wildcards.key).path
        if str(path) not in self.plan.runs:
            raise self._make_edited_study_error(path)
        return self.plan.runs[str(path)]

    def _make_edited_study_error(self, path: Path) -> SettingsError:
        return SettingsError(
            f"{path} is not in the plan of {self.selection.params}. If you edited the study while this job was queued, "
            "type the same command again."
        )

    def get_segment_ends(self, run: PlannedRun) -> list[int]:
        """List the last rounds of a run's segments. A segment also ends at each number of rounds in a table."""
        length = self.execution.rounds_per_job or run.rounds
        return sorted({*range(length, run.rounds, length), *self.plan.round_counts_by_run[str(run.path)]})

    def get_segment_manifests(self, run: PlannedRun) -> list[str]:
        """List the manifests of a run's segments."""
        return [str(run.files.get_segment_manifest_path(stop)) for stop in self.get_segment_ends(run)]

    def get_partition_input(self, wildcards: Wildcards) -> str:
        """Get the data set of a partition."""
        for run in self.plan.runs.values():
            if run.partition == wildcards.key:
                return str(get_dataset_path(run.dataset))
        raise self._make_edited_study_error(get_assignment_path(wildcards.key))

    def get_run_input(self, wildcards: Wildcards) -> dict[str, Any]:
        """Get the input of each job of a run: settings, data set and partition."""
        run = self.get_run(wildcards)
        return {
            "settings": ancient(str(run.files.settings)),
            "data": str(get_dataset_path(run.dataset)),
            "assignment": str(get_assignment_path(run.partition)),
        }

    def get_segment_input(self, wildcards: Wildcards) -> dict[str, Any]:
        """Get the input of a segment: a run's files, and the manifest of the segment before it."""
        run, stop = self.get_run(wildcards), int(wildcards.stop)
        start = max((end for end in self.get_segment_ends(run) if end < stop), default=0)
        previous = {"previous": str(run.files.get_segment_manifest_path(start))} if start else {}
        return self.get_run_input(wildcards) | previous | self._get_rung_marker(run, start)

    def get_round_input(self, wildcards: Wildcards) -> dict[str, Any]:
        """Get the input of a round's training and aggregation: a run's files, and the previous round's state."""
        run, previous_round = self.get_run(wildcards), int(wildcards.round) - 1
        state = {"state": str(run.files.get_round_files(previous_round).complete_states_marker)}
        return self.get_run_input(wildcards) | state | self._get_rung_marker(run, previous_round)

    def _get_rung_marker(self, run: PlannedRun, rounds: int) -> dict[str, str]:
        """Get the marker of a draw's merged rounds at the end of a rung. The next rung waits for the merge."""
        is_rung_end = run.path in self.plan.search_run_paths and rounds in self.plan.round_counts_by_run[str(run.path)]
        if self.has_one_job_per_run or not is_rung_end:
            return {}
        return {"merged": str(run.files.get_merged_files(rounds).marker)}

    def count_blocks(self, wildcards: Wildcards) -> int:
        """Count the blocks of a round's participants."""
        participants = self.get_run(wildcards).participants
        return -(-participants // (self.participants_per_job or participants))

    def get_block_input(self, wildcards: Wildcards) -> list[str]:
        """List the uploads of all blocks of a round."""
        files = self.get_run(wildcards).files.get_round_files(int(wildcards.round))
        return [str(files.get_block_uploads_path(block)) for block in range(self.count_blocks(wildcards))]

    def get_collect_input(self, wildcards: Wildcards) -> list[str]:
        """List the manifests of all rounds or segments of a run, ascending. Otherwise the DAG is built depth first.

        If tables show several numbers of rounds of a run, the jobs that merge them run one after another, after all
        segments. The rounds of a draw of `tune` are merged after each rung.
        """
        run, rounds = self.get_run(wildcards), int(wildcards.stop)
        last = rounds if run.path in self.plan.search_run_paths else run.rounds
        fewer_rounds = [count for count in self.plan.round_counts_by_run[str(run.path)] if count < rounds]
        earlier = [str(run.files.get_merged_files(max(fewer_rounds)).marker)] if fewer_rounds else []
        if self.participants_per_job:
            return [str(run.files.get_round_files(number).marker) for number in range(1, last + 1)] + earlier
        ends = (end for end in self.get_segment_ends(run) if end <= last)
        return [*(str(run.files.get_segment_manifest_path(end)) for end in ends), *earlier]

    def get_diagnostic(self, wildcards: Wildcards) -> PlannedDiagnostic:
        """Get the diagnostic of a job."""
        kind, _, key = wildcards.diagnostic.rpartition("-")
        files = DiagnosticFiles.from_key(wildcards.algorithm, wildcards.key, int(wildcards.round), kind, key)
        if str(files.table) not in self.plan.diagnostics:
            raise self._make_edited_study_error(files.table)
        return self.plan.diagnostics[str(files.table)]

    def get_diagnostic_input(self, wildcards: Wildcards) -> dict[str, Any]:
        """Get the input of a diagnostic: its settings, a run's files, and the marker of the merged rounds."""
        diagnostic = self.get_diagnostic(wildcards)
        return self.get_run_input(wildcards) | {
            "settings": ancient(str(diagnostic.files.settings)),
            "joined": ancient(str(diagnostic.run_files.get_merged_files(diagnostic.rounds).marker)),
        }

    # -- section `tune` ------------------------------------------------------------------------------------------------

    def get_rung_input(self, plan: Plan, checkpoints: Any) -> Callable[[Wildcards], list[str]]:
        """Get the function of a rung's input: the merged rounds of all draws that it ranks, and the rung before."""

        def list_input(wildcards: Wildcards) -> list[str]:
            rounds, rungs = int(wildcards.rung), plan.tuning.rungs if plan.tuning else ()
            earlier = [number for number in rungs if number < rounds]
            if earlier:
                self._wait_for_rung(plan, max(earlier), checkpoints)
            resolved = plan.add_search_results(has_draws=True)
            cells = (cell for cell in resolved.cells if cell.files.path in resolved.search_run_paths)
            merged = (cell.merged_files for cell in cells if cell.rounds == rounds)
            return [
                *(str(plan.study_files.get_rung_result_path(number)) for number in earlier),
                *dict.fromkeys(str(path) for files in merged for path in (files.metrics, files.rounds, files.marker)),
            ]

        return list_input

    def get_input_after_search(
        self, plan: Plan, list_input: Callable[[Plan], list[str]], checkpoints: Any
    ) -> list[str] | Callable[[Wildcards], list[str]]:
        """List input that depends on the winners of `tune`. With `tune` it is a function, which waits for them."""
        if plan.tuning is None:
            return list_input(plan)
        last_rung = plan.tuning.rungs[-1]

        def list_input_of_winners(_: Wildcards) -> list[str]:
            self._wait_for_rung(plan, last_rung, checkpoints)
            return [*map(str, plan.rung_files), *list_input(plan.add_search_results())]

        return list_input_of_winners

    def get_tuned_run_output(self, checkpoints: Any) -> list[Any]:
        """List functions that list the runs of each study with `tune`. `get_untuned_run_output` lists all others."""
        plans = [plan for plan in self.planned.available_plans if plan.tuning]
        return [self.get_input_after_search(plan, self._list_run_output, checkpoints) for plan in plans]

    def _list_run_output(self, plan: Plan) -> list[str]:
        manifests = [manifest for run in plan.runs for manifest in self.get_segment_manifests(run)]
        return [*_list_merged_files(plan.merged_files), *(manifests if self.has_one_job_per_run else [])]

    def _wait_for_rung(self, plan: Plan, rounds: int, checkpoints: Any) -> None:
        """Let Snakemake call this function again after a rung, unless its result is current."""
        getattr(checkpoints, f"rank{self.get_rule_name_suffix(plan)}").get(rung=f"{rounds:04d}")

    # -- results -------------------------------------------------------------------------------------------------------

    def get_rule_name_suffix(self, plan: Plan) -> str:
        """Get the suffix of the names of a study's rules. Empty if there is only one study."""
        return self._rule_name_suffixes[plan.study_files.path] if self.selection.is_folder else ""

    @cached_property
    def _rule_name_suffixes(self) -> dict[Path, str]:
        """Suffixes by the folder of a study. Equal ones, such as those of a-b and a_b, have a digest of the folder."""
        suffixes = {
            study.study_files.path: re.sub(r"\W", "_", f"_{study.study_files.path}") for study in self.planned.plans
        }
        counts = Counter(suffixes.values())
        return {
            path: suffix if counts[suffix] == 1 else f"{suffix}_{compute_json_digest(str(path))}"
            for path, suffix in suffixes.items()
        }

    @staticmethod
    def get_table_input(plan: Plan) -> list[str]:
        """List the input of a study's tables: the merged rounds of all runs, and the partitions."""
        return [*_list_merged_files(plan.merged_files), *_list_partition_files(plan.partitions)]

    def get_untuned_run_output(self) -> list[str]:
        """List the merged rounds of all runs, except those that depend on the search of `tune`.

        Manifests of runs that are one job let deleted rounds be recomputed.
        """
        untuned = replace(self.planned, plans=tuple(plan.plan_without_tuning for plan in self.planned.plans))
        paths = {run.path for plan in untuned.plans for run in plan.runs}
        runs = [run for run in self.planned.runs.values() if run.path in paths]
        return [
            *_list_merged_files(untuned.merged_files),
            *(manifest for run in runs if self.has_one_job_per_run for manifest in self.get_segment_manifests(run)),
        ]

    def get_partition_output(self) -> list[str]:
        """List the partitions of all runs, and the records of their SHA-256."""
        records = [str(get_assignment_path(key).with_suffix(".json")) for key in self.plan.partitions]
        return [*_list_partition_files(self.plan.partitions), *records]

    def get_paper_pages_input(self) -> list[str]:
        """List the input of the papers' pages: tables of all studies, merged rounds of all runs, and diagnostics."""
        return [
            *(str(path) for plan in self.plan.available_plans for path in get_table_output(plan)),
            *_list_merged_files(self.plan.merged_files),
            *self.plan.diagnostics,
        ]

    def get_all_results(self) -> list[str]:
        """List all results and the files that they depend on, so that deleted files are restored."""
        data = sorted({get_dataset_path(run.dataset) for run in self.plan.runs.values()})
        return [
            *(str(path.with_suffix(suffix)) for path in data for suffix in (".pt", ".json")),
            *self.get_partition_output(),
            *self.get_untuned_run_output(),
            *self.plan.diagnostics,
            *(
                path
                for plan in self.plan.available_plans
                for path in (*get_table_output(plan), *map(str, plan.figure_files))
            ),
        ]

    # -- messages ------------------------------------------------------------------------------------------------------

    @property
    def names_by_run_path(self) -> dict[Path, str]:
        """Name of each run by path."""
        from fedpipe.report import status  # only the process that prints progress needs it

        plans = self.plan.plans_with_draws
        if "names" not in self._cache:
            names_by_plan = map(status.format_run_names, plans)
            self._cache["names"] = {path: name for names in names_by_plan for path, name in names.items()}
        return self._cache["names"]

    def describe_remaining_runs(self) -> str:
        """Describe how many runs are to do, and how many more can follow from the results of `tune`."""
        runs = self.plan.runs.values()
        count = sum(not run.merged_files.marker.is_file() for run in runs)
        later_runs = sum(
            plan.tuning.count_later_runs(len(plan.read_rungs()), len(plan.seeds))
            for plan in self.plan.plans
            if plan.tuning
        )
        later = f", at most {later_runs} later runs" if later_runs else ""
        return f"{count} of {len(runs)} run{'' if len(runs) == 1 else 's'} to do{later}"

    def describe_job(self, rule: str, wildcards: Mapping[str, str]) -> str:
        """Describe a job by its rule and what it makes, such as "segment FedAvg seed 0"."""
        if "algorithm" in wildcards:
            subject = self.names_by_run_path[RunFiles.from_key(wildcards["algorithm"], wildcards["key"]).path]
        elif "key" in wildcards:
            names = (plan.partition_names.get(wildcards["key"]) for plan in self.plan.plans)
            runs = (run for run in self.plan.runs.values() if run.partition == wildcards["key"])
            subject = next(filter(None, names), "") or f"of draws, seed {next(runs).seed}"
        else:
            subject = wildcards.get("partition", wildcards.get("dataset", "").rpartition("-")[0])
        last_round = "" if self.has_one_job_per_run else wildcards.get("stop", "")
        number = wildcards.get("round", wildcards.get("rung", last_round))
        parts = [
            f"{rule} {subject}".rstrip(),
            f"round {int(number)}" if number else "",
            f"block {int(wildcards['block'])}" if "block" in wildcards else "",
            wildcards.get("diagnostic", "").rpartition("-")[0],
        ]
        return ", ".join(filter(None, parts))

    def remove_completion_marks(self) -> None:
        """Remove the completion mark of each study before jobs begin."""
        for plan in self.planned.plans:
            completion.remove_completion_marks(plan)

    def write_completion_marks(self) -> None:
        """Write the completion mark of each study after all jobs. Without it, `dvc repro` makes its tables again."""
        try:
            for plan in self.planned.available_plans:
                completion.write_completion_mark(plan)
        except UserError as error:
            print(f"fedpipe: {error}", file=sys.stderr)

    def format_done_message(self) -> str:
        """Format the message after success: the next command."""
        params, preset = self.selection.params, self.selection.preset
        if self.selection.is_folder:
            command, table = format_command("show", Path("FILE"), preset), "each study's table"
        else:
            table_path = self.selection.studies[params].get_result_table_path("md")
            command, table = format_command("show", params, preset), f"the table, {table_path},"
        return f"fedpipe: done. `{command}` prints {table} and the paths of the figures."


def get_figure_input(plan: Plan, name: str) -> list[str]:
    """List the input of a figure: one merged file of each run."""
    paths = [merged.matrices if name == "matrices" else merged.metrics for merged in plan.merged_files]
    return list(map(str, paths))


def get_table_output(plan: Plan) -> list[str]:
    """List the files that rule `table` writes for a study."""
    ranks_table = [plan.study_files.ranks_table] if plan.report.rank_test else []
    return list(map(str, [*plan.study_files.list_table_rule_files(plan.algorithms), *ranks_table]))


def _list_merged_files(merged_files: Iterable[MergedRoundFiles]) -> list[str]:
    """List all merged files of runs, so that a deleted one is made again."""
    return [str(path) for merged in merged_files for path in merged.all_files]


def _list_partition_files(partitions: Iterable[str]) -> list[str]:
    """List all files of partitions that tables read."""
    return [str(path) for key in partitions for path in (get_assignment_path(key), get_heterogeneity_path(key))]


def make_partition_wildcards_function(plan: Plan, function: Callable[[str], _T]) -> Callable[[Wildcards], _T]:
    """Convert a function of a partition's key to a function of wildcards, where `{partition}` is its name."""
    keys = {name: key for key, name in plan.partition_names.items()}

    def call_with_key(wildcards: Wildcards) -> _T:
        if wildcards.partition not in keys:
            raise SettingsError(f"partition '{wildcards.partition}' is not in the plan. Use one of {', '.join(keys)}.")
        return function(keys[wildcards.partition])

    return call_with_key


def format_resume_advice(arguments: Sequence[str]) -> str:
    """Format the message after a failure or Ctrl+C, which Snakemake does not distinguish."""
    message = "fedpipe: Snakemake ended before all jobs were done."
    if "/.dvc/tmp/" in str(Path.cwd()):
        return f"{message} DVC deletes this temporary folder with its rounds."
    if experiment := os.environ.get("DVC_EXP_NAME"):
        return (
            f"{message} To continue after the complete rounds, type `dvc repro`, then `dvc exp save -n "
            f"{experiment} -I results/keys`. Another `dvc exp run` would delete them."
        )
    message += " Complete rounds are kept. To continue after them, type"
    if PROGRESS_OPTION in arguments:
        return f"{message} the same command again."
    return f"{message}:\n    {shlex.join(['snakemake', *arguments])}"


def format_shell_prefix(environment: Mapping[str, object]) -> str:
    """Format the prefix of each job's command, which sets these variables.

    Jobs call `fedpipe` of the environment that Snakemake runs in, activated or not, with the code in this folder, so
    that an experiment of DVC in a separate folder runs its own code. Snakemake formats the prefix.
    """
    assignments = [
        f'PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"',
        'PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"',
        *(f"{name}={shlex.quote(str(value))}" for name, value in environment.items()),
    ]
    return escape_braces(f"export {' '.join(assignments)};")


def escape_braces(text: str) -> str:
    """Escape a text that Snakemake formats."""
    return text.replace("{", "{{").replace("}", "}}")


def hash_paper_pages_sources() -> str:
    """Hash the sources of the papers' pages: published numbers, layouts, stored runs, and the code that draws them."""
    package = Path(__file__).parents[1]
    report = [package / "report" / name for name in ("contrasts.py", "figures/panels.py", "figures/style.py")]
    paths = [*sorted((package / "papers").glob("*.*")), *report, *sorted(PAPERS.glob("*/measured/*.csv"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
