"""What the rules of the Snakefile call: which studies are made, and which files each job reads and writes.

``workflow/rules/common.smk`` selects the studies, plans what is not current and builds one `Dag`. Snakemake does so in
the process of every job, too, so nothing here imports torch, pandas or pydantic unless it plans.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from snakemake.io import ancient

from fedpipe.core.errors import SettingsError
from fedpipe.core.storage.files import RESULTS
from fedpipe.core.storage.layout import (
    FULL_PRESET,
    PARAMS,
    DiagnosticFiles,
    MergedFiles,
    RunFiles,
    StudyFiles,
    assignment_file,
    dataset_file,
    format_show_command,
    heterogeneity_file,
    list_studies,
    normalize_study_path,
)
from fedpipe.planning import freshness
from fedpipe.planning.combined import CombinedPlan
from fedpipe.planning.plan import Plan, PlannedDiagnostic, PlannedRun
from fedpipe.report.contents import compute_plans_fingerprint
from fedpipe.settings.execution import Execution

LOCKS = Path(".snakemake/locks")  #: Snakemake's lists of the outputs that its processes are making
#: The files of a run's joined rounds, as an output of rules with these wildcards.
MERGED_PATTERN = [
    str(path) for path in MergedFiles(RunFiles.from_key("{algorithm}", "{key}").path / "joined" / "{stop}").all_files
]
_T = TypeVar("_T")


class Wildcards(Protocol):
    """The wildcards of a job, by name."""

    def __getattr__(self, name: str) -> str:
        """The value of one."""
        ...


def require_simple_folder(folder: Path) -> None:
    """Reject a folder that jobs could not import code from: they find it by PYTHONPATH, which is split at colons.

    Raises
    ------
    SettingsError
        The path contains such a separator.
    """
    if os.pathsep in str(folder):
        raise SettingsError(
            f"{folder}: '{os.pathsep}' can't be part of the path of a study's folder, since jobs would run "
            "other code than lies here; rename it."
        )


@dataclass(frozen=True)
class StudySelection:
    """The studies that one call of Snakemake makes: one, or all in a folder, whose runs are made together."""

    params: Path  #: the study's file, or the folder
    preset: str = FULL_PRESET

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> StudySelection:
        """The studies that `--config` and `--configfile` select.

        Raises
        ------
        SettingsError
            They contain another key, which Snakemake would silently ignore.
        """
        if unknown_keys := [key for key in config if key not in ("params", "preset")]:
            keys = ", ".join(f"'{key}'" for key in unknown_keys)
            raise SettingsError(
                f"{keys} in --config or --configfile would change nothing; settings belong in params.yaml, or in "
                "another study's file, named by --config params=studies/NAME.yaml."
            )
        params = normalize_study_path(Path(str(config.get("params", PARAMS))))
        return cls(params, str(config.get("preset", FULL_PRESET)))

    @cached_property
    def is_folder(self) -> bool:
        """Whether all studies in a folder are made."""
        return self.params.is_dir()

    @cached_property
    def studies(self) -> dict[Path, StudyFiles]:
        """The files of each study.

        Raises
        ------
        SettingsError
            There is none in the folder, or a study has no valid path.
        """
        return {path: StudyFiles.from_params(path, self.preset) for path in list_studies(self.params)}

    def needs_planning(self, is_main_process: bool) -> bool:
        """Whether a study has to be planned: in a job's process only if it has no plan.

        The studies of a folder are always planned, because the data of runs that were left out may be here by now.
        """
        if not is_main_process:
            return not all(files.plan.is_file() for files in self.studies.values())
        return self.is_folder or any(freshness.needs_planning(path, self.preset) for path in self.studies)

    def write_plans(self) -> None:
        """Plan all studies in a separate process, because planning imports torch.

        Raises
        ------
        SystemExit
            A study can't be planned; the reason is printed.
        """
        completed_process = subprocess.run(
            [sys.executable, "-m", "fedpipe", "plan", "--params", str(self.params), "--preset", self.preset],
            capture_output=True,
            text=True,
            check=False,
        )
        sys.stderr.write(completed_process.stderr)
        if completed_process.returncode:
            sys.exit(2)

    def read_plans(self) -> CombinedPlan:
        """The plans of all studies; of a folder without the runs whose data or weights are not here."""
        unavailable_runs: set[str] = set()
        for files in self.studies.values() if self.is_folder else ():
            with suppress(FileNotFoundError):
                unavailable_runs.update(json.loads(files.unavailable_runs.read_text()))
        return CombinedPlan(
            tuple(Plan.read(files.plan) for files in self.studies.values()), frozenset(unavailable_runs)
        )


@dataclass(frozen=True)
class Dag:
    """What one call of Snakemake makes, and what each of its jobs reads.

    There are three grains of one DAG, with the same bits: a job is a run, a segment of consecutive rounds of a run
    (`execution.rounds_per_job`), or a stage of a round (`execution.clients_per_job`).
    """

    selection: StudySelection
    plan: CombinedPlan
    execution: Execution

    @classmethod
    def from_selection(cls, selection: StudySelection) -> Dag:
        """The DAG of studies that are planned.

        Raises
        ------
        UserError
            A plan can't be read, or the studies can't be made together.
        """
        plan = selection.read_plans()
        return cls(selection, plan, plan.execution)

    @property
    def block_size(self) -> int | None:
        """The number of participants that a job trains; None if a job makes all rounds of a segment."""
        return self.execution.clients_per_job

    @property
    def has_run_jobs(self) -> bool:
        """Whether a run is one job, which collects its rounds, too."""
        return self.execution.rounds_per_job is None

    @property
    def job_environment(self) -> dict[str, object]:
        """How jobs execute. It is no part of a run's key, so that a change runs nothing again."""
        return {
            "FEDPIPE_DEVICE": self.execution.device,
            "FEDPIPE_STACK": self.execution.stack,
            "FEDPIPE_GRAPHS": int(self.execution.graphs),
            "FEDPIPE_KEEP_MODELS": self.plan.plans[0].keep_models,
            "FEDPIPE_CALLBACKS": " ".join(self.execution.callbacks),
        }

    @cached_property
    def plans_fingerprint(self) -> str:
        """A hash of all plans."""
        return compute_plans_fingerprint(self.plan.plans)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def get_run(self, wildcards: Wildcards) -> PlannedRun:
        """The run of a job."""
        return self.plan.runs[str(RunFiles.from_key(wildcards.algorithm, wildcards.key).path)]

    def get_segment_ends(self, run: PlannedRun) -> list[int]:
        """The last rounds of a run's segments, ascending. A segment also ends with each number of rounds in a table."""
        length = self.execution.rounds_per_job or run.rounds
        return sorted({*range(length, run.rounds, length), *self.plan.round_counts[str(run.path)]})

    def get_segment_manifests(self, run: PlannedRun) -> list[str]:
        """The manifests of a run's segments."""
        return [str(run.files.segment_manifest(stop)) for stop in self.get_segment_ends(run)]

    def get_partition_input(self, wildcards: Wildcards) -> str:
        """The data set of a partition."""
        runs = self.plan.runs.values()
        return str(dataset_file(next(run.dataset for run in runs if run.partition == wildcards.key)))

    def get_run_input(self, wildcards: Wildcards) -> dict[str, Any]:
        """What each job of a run reads: its settings, data set and partition."""
        run = self.get_run(wildcards)
        return {
            "settings": ancient(str(run.files.settings)),
            "data": str(dataset_file(run.dataset)),
            "assignment": str(assignment_file(run.partition)),
        }

    def get_segment_input(self, wildcards: Wildcards) -> dict[str, Any]:
        """What a segment reads: a run's files, and the manifest of the segment before it."""
        run, stop = self.get_run(wildcards), int(wildcards.stop)
        start = max((end for end in self.get_segment_ends(run) if end < stop), default=0)
        previous = {"previous": str(run.files.segment_manifest(start))} if start else {}
        return self.get_run_input(wildcards) | previous

    def get_round_input(self, wildcards: Wildcards) -> dict[str, Any]:
        """What training and aggregation of a round read: a run's files, and the state after the round before it."""
        previous_round = self.get_run(wildcards).files.round(int(wildcards.round) - 1)
        return self.get_run_input(wildcards) | {"state": str(previous_round.state_marker)}

    def count_blocks(self, wildcards: Wildcards) -> int:
        """The number of blocks of a round's participants."""
        participants = self.get_run(wildcards).participants
        return -(-participants // (self.block_size or participants))

    def get_block_input(self, wildcards: Wildcards) -> list[str]:
        """The uploads of all blocks of a round."""
        files = self.get_run(wildcards).files.round(int(wildcards.round))
        return [str(files.block_uploads(block)) for block in range(self.count_blocks(wildcards))]

    def get_collect_input(self, wildcards: Wildcards) -> list[str]:
        """The manifests of all rounds or segments of a run, ascending, else Snakemake would build the DAG depth first.

        If tables show several numbers of rounds of a run, the jobs that collect them run one after another, and after
        all segments.
        """
        run, rounds = self.get_run(wildcards), int(wildcards.stop)
        fewer_rounds = [count for count in self.plan.round_counts[str(run.path)] if count < rounds]
        earlier = [str(run.files.merged_files(max(fewer_rounds)).marker)] if fewer_rounds else []
        if self.block_size:
            return [str(run.files.round(number).marker) for number in range(1, run.rounds + 1)] + earlier
        return self.get_segment_manifests(run) + earlier

    def get_diagnostic(self, wildcards: Wildcards) -> PlannedDiagnostic:
        """The diagnostic of a job."""
        path = RESULTS / "diagnostics" / wildcards.algorithm / wildcards.key / wildcards.round / wildcards.diagnostic
        return self.plan.diagnostics[str(DiagnosticFiles(path).table)]

    def get_diagnostic_input(self, wildcards: Wildcards) -> dict[str, Any]:
        """Input of a diagnostic: its settings, a run's files, and the marker of the merged rounds."""
        diagnostic = self.get_diagnostic(wildcards)
        return self.get_run_input(wildcards) | {
            "settings": ancient(str(diagnostic.files.settings)),
            "joined": ancient(str(diagnostic.run.merged_files(diagnostic.rounds).marker)),
        }

    # -- results -------------------------------------------------------------------------------------------------------

    def get_rule_suffix(self, plan: Plan) -> str:
        """What follows the names of a study's rules if several studies have such rules."""
        return "_" + re.sub(r"\W", "_", str(plan.study_files.path)) if self.selection.is_folder else ""

    def get_table_input(self, plan: Plan) -> list[str]:
        """What a study's tables are made of: the joined rounds of all runs, and the partitions."""
        partition_files = [file for key in plan.partitions for file in (assignment_file(key), heterogeneity_file(key))]
        return [str(path) for merged in plan.merged_files for path in merged.all_files] + list(
            map(str, partition_files)
        )

    def get_run_output(self) -> list[str]:
        """The joined rounds of all runs, and the manifests of runs that are one job: deleted rounds are recomputed."""
        runs = self.plan.runs.values() if self.has_run_jobs else ()
        return [
            *(str(merged.marker) for merged in self.plan.merged_files),
            *(manifest for run in runs for manifest in self.get_segment_manifests(run)),
        ]

    def get_partition_output(self) -> list[str]:
        """The partitions of all runs."""
        return [str(assignment_file(key)) for key in self.plan.partitions]

    def get_pages_input(self) -> list[str]:
        """Input of the papers' pages: the tables of all studies, the merged rounds of all runs, and diagnostics."""
        return [
            *(str(path) for plan in self.plan.complete_plans for path in get_table_output(plan)),
            *(str(merged.marker) for merged in self.plan.merged_files),
            *self.plan.diagnostics,
        ]

    def get_final_output(self) -> list[str]:
        """All results, with the files that they are made of, so that deleted files are made again."""
        return [
            *sorted({str(dataset_file(run.dataset)) for run in self.plan.runs.values()}),
            *self.get_partition_output(),
            *self.get_run_output(),
            *self.plan.diagnostics,
            *(
                path
                for plan in self.plan.complete_plans
                for path in (*get_table_output(plan), *get_figure_output(plan))
            ),
        ]

    # -- messages ------------------------------------------------------------------------------------------------------

    def has_locked_files(self) -> bool:
        """Whether another Snakemake has locked files of these studies."""
        own_prefixes = (
            *(f"{dataset_file(run.dataset).with_suffix('')}." for run in self.plan.runs.values()),
            *(f"{assignment_file(key).parent}/" for key in self.plan.partitions),
            *(f"{run.files.rounds_folder}/" for run in self.plan.runs.values() if self.block_size),
            *(manifest for run in self.plan.runs.values() for manifest in self.get_segment_manifests(run)),
            *(f"{merged.path}/" for merged in self.plan.merged_files),
            *(f"{files.tables}/" for files in self.selection.studies.values()),
        )
        locked_files: list[str] = []
        for lock in LOCKS.glob("*.output.lock"):
            with suppress(FileNotFoundError):  # its Snakemake has just ended
                locked_files += lock.read_text().splitlines()
        return any(file.startswith(own_prefixes) for file in locked_files)

    def format_done_message(self) -> str:
        """What to type next if all results have been made."""
        params, preset = self.selection.params, self.selection.preset
        if self.selection.is_folder:
            command, table = format_show_command(Path("FILE"), preset), "each study's table"
        else:
            table_path = self.selection.studies[params].result_table("md")
            command, table = format_show_command(params, preset), f"the table, {table_path},"
        return f"fedpipe: done; `{command}` prints {table} and where the figures lie."


def get_figure_input(plan: Plan, name: str) -> list[str]:
    """What the figure `curves` or `matrices` is drawn of: the joined file of all runs that has its numbers."""
    paths = [merged.metrics if name == "curves" else merged.matrices for merged in plan.merged_files]
    return list(map(str, paths))


def get_table_output(plan: Plan) -> list[str]:
    """The files that rule `table` makes for a study."""
    return list(map(str, plan.study_files.table_files(plan.algorithms)))


def get_figure_output(plan: Plan) -> list[str]:
    """The figures of a study."""
    return list(map(str, plan.study_files.figure_files(plan.partition_names.values())))


def with_partition_key(plan: Plan, function: Callable[[str], _T]) -> Callable[[Wildcards], _T]:
    """A function of wildcards, which calls one of the key of the partition that `{partition}` names."""
    keys = {name: key for key, name in plan.partition_names.items()}
    return lambda wildcards: function(keys[wildcards.partition])


def format_lock_message(arguments: Sequence[str]) -> str:
    """What to type if Snakemake is about to report that the folder is locked."""
    return (
        "fedpipe: another snakemake makes files of this study; or it was killed, then type\n"
        f"    snakemake --unlock\n    {shlex.join(['snakemake', *arguments])}\n"
        "Complete rounds will be found, and jobs that it left behind do no harm."
    )


def format_error_message(arguments: Sequence[str]) -> str:
    """What to type after a failure or Ctrl+C, which Snakemake does not distinguish."""
    return (
        "fedpipe: this ended before all was done. Complete rounds are kept, and the same command goes on after them:\n"
        f"    {shlex.join(['snakemake', *arguments])}"
    )


def format_shell_prefix(environment: Mapping[str, object]) -> str:
    """What precedes the command of each job, with these variables.

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
    """A text that Snakemake formats into itself."""
    return text.replace("{", "{{").replace("}", "}}")


def hash_page_sources() -> str:
    """Hash the sources of the papers' pages: published numbers, layouts, and the code that draws them."""
    package = Path(__file__).parents[1]
    report = [package / "report" / name for name in ("contrasts.py", "figures/panels.py", "figures/style.py")]
    paths = [*sorted((package / "papers").glob("*.*")), *report]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
