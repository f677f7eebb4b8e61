"""Functions for the rules of the Snakefile: they select studies and list the files that each job reads and writes.

``workflow/rules/common.smk`` selects the studies, updates their plans and builds one `Dag`. Snakemake does the same in
the process of every job, so this module imports torch, pandas and pydantic only to plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from snakemake.io import ancient
from snakemake.shell import shell

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

LOCKS = Path(".snakemake/locks")  #: Snakemake's lists of the outputs that its processes write
#: Files of a run's merged rounds, as an output of rules with these wildcards.
MERGED_PATTERN = [
    str(path) for path in MergedFiles(RunFiles.from_key("{algorithm}", "{key}").path / "joined" / "{stop}").all_files
]
_T = TypeVar("_T")


class Wildcards(Protocol):
    """The wildcards of a job, by name."""

    def __getattr__(self, name: str) -> str:
        """Get the value of a wildcard."""
        ...


def require_simple_folder(folder: Path) -> None:
    """Reject a folder that jobs can't import code from: it is in PYTHONPATH, which is split at colons.

    Raises
    ------
    SettingsError
        The path contains such a separator.
    """
    if os.pathsep in str(folder):
        raise SettingsError(
            f"{folder}: '{os.pathsep}' can't be part of the path of a study's folder, because jobs would import other "
            "code. Rename the folder."
        )


@dataclass(frozen=True)
class StudySelection:
    """The studies that one call of Snakemake runs: one study, or all studies in a folder together."""

    params: Path  #: the study's file, or the folder
    preset: str = FULL_PRESET

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> StudySelection:
        """Read the selection from `--config` and `--configfile`.

        Raises
        ------
        SettingsError
            They contain other keys, which Snakemake would silently ignore.
        """
        if unknown_keys := [key for key in config if key not in ("params", "preset")]:
            keys = ", ".join(f"'{key}'" for key in unknown_keys)
            raise SettingsError(
                f"{keys} in --config or --configfile would have no effect. Set them in params.yaml, or in another "
                "study's file that you select with --config params=studies/NAME.yaml."
            )
        params = normalize_study_path(Path(str(config.get("params", PARAMS))))
        return cls(params, str(config.get("preset", FULL_PRESET)))

    @cached_property
    def is_folder(self) -> bool:
        """Whether all studies in a folder are run."""
        return self.params.is_dir()

    @cached_property
    def studies(self) -> dict[Path, StudyFiles]:
        """The files of each study.

        Raises
        ------
        SettingsError
            The folder contains no study, or a study has an invalid path.
        """
        return {path: StudyFiles.from_params(path, self.preset) for path in list_studies(self.params)}

    def needs_planning(self, is_main_process: bool) -> bool:
        """Whether a study has to be planned. In the process of a job, only if it has no plan.

        The studies of a folder are always planned, because missing data may be available now.
        """
        if not is_main_process:
            return not all(files.plan.is_file() for files in self.studies.values())
        return self.is_folder or any(freshness.needs_planning(path, self.preset) for path in self.studies)

    def write_plans(self) -> None:
        """Plan all studies in a separate process, because planning imports torch. The job server forks it, if possible.

        Raises
        ------
        SystemExit
            A study can't be planned. The reason is printed.
        """
        try:
            shell(
                "fedpipe plan --params {params:q} --preset {preset:q} > /dev/null",
                params=str(self.params),
                preset=self.preset,
                resources={"tmpdir": tempfile.gettempdir()},  # the environment of jobs, see fedpipe/cli/job_server.py
            )
        except subprocess.CalledProcessError:
            sys.exit(2)

    def read_plans(self) -> CombinedPlan:
        """Read the plans of all studies. For a folder, omit runs whose data or weights are missing."""
        unavailable_runs: set[str] = set()
        for files in self.studies.values() if self.is_folder else ():
            with suppress(FileNotFoundError):
                unavailable_runs.update(json.loads(files.unavailable_runs.read_text()))
        return CombinedPlan(
            tuple(Plan.read(files.plan) for files in self.studies.values()), frozenset(unavailable_runs)
        )


@dataclass(frozen=True)
class Dag:
    """Outputs of one call of Snakemake, and inputs of each of its jobs.

    A job is a run, a segment of consecutive rounds of a run (`execution.rounds_per_job`), or a stage of a round
    (`execution.clients_per_job`). All three give the same bits.
    """

    selection: StudySelection
    plan: CombinedPlan
    execution: Execution

    @classmethod
    def from_selection(cls, selection: StudySelection) -> Dag:
        """Build the DAG of planned studies.

        Raises
        ------
        UserError
            A plan can't be read, or the studies can't be run together.
        """
        plan = selection.read_plans()
        return cls(selection, plan, plan.execution)

    @property
    def block_size(self) -> int | None:
        """Number of participants that a job trains. None if a job runs all rounds of a segment."""
        return self.execution.clients_per_job

    @property
    def has_run_jobs(self) -> bool:
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
        """Get the run of a job."""
        return self.plan.runs[str(RunFiles.from_key(wildcards.algorithm, wildcards.key).path)]

    def get_segment_ends(self, run: PlannedRun) -> list[int]:
        """List the last rounds of a run's segments. A segment also ends at each number of rounds in a table."""
        length = self.execution.rounds_per_job or run.rounds
        return sorted({*range(length, run.rounds, length), *self.plan.round_counts[str(run.path)]})

    def get_segment_manifests(self, run: PlannedRun) -> list[str]:
        """List the manifests of a run's segments."""
        return [str(run.files.segment_manifest(stop)) for stop in self.get_segment_ends(run)]

    def get_partition_input(self, wildcards: Wildcards) -> str:
        """Get the data set of a partition."""
        runs = self.plan.runs.values()
        return str(dataset_file(next(run.dataset for run in runs if run.partition == wildcards.key)))

    def get_run_input(self, wildcards: Wildcards) -> dict[str, Any]:
        """Get the input of each job of a run: settings, data set and partition."""
        run = self.get_run(wildcards)
        return {
            "settings": ancient(str(run.files.settings)),
            "data": str(dataset_file(run.dataset)),
            "assignment": str(assignment_file(run.partition)),
        }

    def get_segment_input(self, wildcards: Wildcards) -> dict[str, Any]:
        """Get the input of a segment: a run's files, and the manifest of the segment before it."""
        run, stop = self.get_run(wildcards), int(wildcards.stop)
        start = max((end for end in self.get_segment_ends(run) if end < stop), default=0)
        previous = {"previous": str(run.files.segment_manifest(start))} if start else {}
        return self.get_run_input(wildcards) | previous

    def get_round_input(self, wildcards: Wildcards) -> dict[str, Any]:
        """Get the input of a round's training and aggregation: a run's files, and the previous round's state."""
        previous_round = self.get_run(wildcards).files.round(int(wildcards.round) - 1)
        return self.get_run_input(wildcards) | {"state": str(previous_round.complete_states_marker)}

    def count_blocks(self, wildcards: Wildcards) -> int:
        """Count the blocks of a round's participants."""
        participants = self.get_run(wildcards).participants
        return -(-participants // (self.block_size or participants))

    def get_block_input(self, wildcards: Wildcards) -> list[str]:
        """List the uploads of all blocks of a round."""
        files = self.get_run(wildcards).files.round(int(wildcards.round))
        return [str(files.block_uploads(block)) for block in range(self.count_blocks(wildcards))]

    def get_collect_input(self, wildcards: Wildcards) -> list[str]:
        """List the manifests of all rounds or segments of a run, ascending. Otherwise the DAG is built depth first.

        If tables show several numbers of rounds of a run, the jobs that merge them run one after another, after all
        segments.
        """
        run, rounds = self.get_run(wildcards), int(wildcards.stop)
        fewer_rounds = [count for count in self.plan.round_counts[str(run.path)] if count < rounds]
        earlier = [str(run.files.merged_files(max(fewer_rounds)).marker)] if fewer_rounds else []
        if self.block_size:
            return [str(run.files.round(number).marker) for number in range(1, run.rounds + 1)] + earlier
        return self.get_segment_manifests(run) + earlier

    def get_diagnostic(self, wildcards: Wildcards) -> PlannedDiagnostic:
        """Get the diagnostic of a job."""
        path = RESULTS / "diagnostics" / wildcards.algorithm / wildcards.key / wildcards.round / wildcards.diagnostic
        return self.plan.diagnostics[str(DiagnosticFiles(path).table)]

    def get_diagnostic_input(self, wildcards: Wildcards) -> dict[str, Any]:
        """Get the input of a diagnostic: its settings, a run's files, and the marker of the merged rounds."""
        diagnostic = self.get_diagnostic(wildcards)
        return self.get_run_input(wildcards) | {
            "settings": ancient(str(diagnostic.files.settings)),
            "joined": ancient(str(diagnostic.run.merged_files(diagnostic.rounds).marker)),
        }

    # -- results -------------------------------------------------------------------------------------------------------

    def get_rule_suffix(self, plan: Plan) -> str:
        """Get the suffix of the names of a study's rules. Empty if there is only one study."""
        return "_" + re.sub(r"\W", "_", str(plan.study_files.path)) if self.selection.is_folder else ""

    def get_table_input(self, plan: Plan) -> list[str]:
        """List the input of a study's tables: the merged rounds of all runs, and the partitions."""
        partition_files = [file for key in plan.partitions for file in (assignment_file(key), heterogeneity_file(key))]
        return [str(path) for merged in plan.merged_files for path in merged.all_files] + list(
            map(str, partition_files)
        )

    def get_run_output(self) -> list[str]:
        """List the merged rounds of all runs. Manifests of runs that are one job let deleted rounds be recomputed."""
        runs = self.plan.runs.values() if self.has_run_jobs else ()
        return [
            *(str(merged.marker) for merged in self.plan.merged_files),
            *(manifest for run in runs for manifest in self.get_segment_manifests(run)),
        ]

    def get_partition_output(self) -> list[str]:
        """List the partitions of all runs."""
        return [str(assignment_file(key)) for key in self.plan.partitions]

    def get_pages_input(self) -> list[str]:
        """List the input of the papers' pages: tables of all studies, merged rounds of all runs, and diagnostics."""
        return [
            *(str(path) for plan in self.plan.complete_plans for path in get_table_output(plan)),
            *(str(merged.marker) for merged in self.plan.merged_files),
            *self.plan.diagnostics,
        ]

    def get_final_output(self) -> list[str]:
        """List all results and the files that they depend on, so that deleted files are restored."""
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

    @cached_property
    def run_names(self) -> dict[Path, str]:
        """Name of each run by path."""
        from fedpipe.report import status  # only the process that prints progress needs it

        return {path: name for plan in self.plan.plans for path, name in status.format_run_names(plan).items()}

    def describe_work(self) -> str:
        """Describe how many runs are to do."""
        runs = self.plan.runs.values()
        count = sum(not run.merged_files.marker.is_file() for run in runs)
        return f"{count} of {len(runs)} run{'' if len(runs) == 1 else 's'} to do"

    def describe_job(self, rule: str, wildcards: Mapping[str, str]) -> str:
        """Describe a job by its rule and what it makes, such as "segment FedAvg seed 0"."""
        if "algorithm" in wildcards:
            subject = self.run_names[RunFiles.from_key(wildcards["algorithm"], wildcards["key"]).path]
        elif "key" in wildcards:
            subject = next(filter(None, (plan.partition_names.get(wildcards["key"]) for plan in self.plan.plans)))
        else:
            subject = wildcards.get("partition", wildcards.get("dataset", "").rpartition("-")[0])
        last_round = "" if self.has_run_jobs else wildcards.get("stop", "")
        number = wildcards.get("round", last_round)
        parts = [
            f"{rule} {subject}".rstrip(),
            f"round {int(number)}" if number else "",
            f"block {int(wildcards['block'])}" if "block" in wildcards else "",
            wildcards.get("diagnostic", "").rpartition("-")[0],
        ]
        return ", ".join(filter(None, parts))

    def format_done_message(self) -> str:
        """Format the message after success: the next command."""
        params, preset = self.selection.params, self.selection.preset
        if self.selection.is_folder:
            command, table = format_show_command(Path("FILE"), preset), "each study's table"
        else:
            table_path = self.selection.studies[params].result_table("md")
            command, table = format_show_command(params, preset), f"the table, {table_path},"
        return f"fedpipe: done. `{command}` prints {table} and the paths of the figures."


def get_figure_input(plan: Plan, name: str) -> list[str]:
    """List the input of a figure: one merged file of each run."""
    paths = [merged.matrices if name == "matrices" else merged.metrics for merged in plan.merged_files]
    return list(map(str, paths))


def get_table_output(plan: Plan) -> list[str]:
    """List the files that rule `table` writes for a study."""
    ranks_table = [plan.study_files.ranks_table] if plan.report.rank_test else []
    return list(map(str, [*plan.study_files.list_table_files(plan.algorithms), *ranks_table]))


def get_figure_output(plan: Plan) -> list[str]:
    """List the figures of a study."""
    return list(map(str, plan.figure_files))


def with_partition_key(plan: Plan, function: Callable[[str], _T]) -> Callable[[Wildcards], _T]:
    """Convert a function of a partition's key to a function of wildcards, where `{partition}` is its name."""
    keys = {name: key for key, name in plan.partition_names.items()}
    return lambda wildcards: function(keys[wildcards.partition])


def format_lock_message(arguments: Sequence[str]) -> str:
    """Format the message before Snakemake reports that the folder is locked."""
    return (
        "fedpipe: another Snakemake is running this study. If it was killed, type\n"
        f"    snakemake --unlock\n    {shlex.join(['snakemake', *arguments])}\n"
        "Complete rounds are reused. Jobs of the killed Snakemake may still be running, which is safe."
    )


def format_error_message(arguments: Sequence[str]) -> str:
    """Format the message after a failure or Ctrl+C, which Snakemake does not distinguish."""
    return (
        "fedpipe: Snakemake ended before all jobs were done. Complete rounds are kept. To continue after them, type:\n"
        f"    {shlex.join(['snakemake', *arguments])}"
    )


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


def hash_page_sources() -> str:
    """Hash the sources of the papers' pages: published numbers, layouts, and the code that draws them."""
    package = Path(__file__).parents[1]
    report = [package / "report" / name for name in ("contrasts.py", "figures/panels.py", "figures/style.py")]
    paths = [*sorted((package / "papers").glob("*.*")), *report]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
