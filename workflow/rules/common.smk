# Steps while Snakemake parses the Snakefile, also in the process of every job.
# The functions that rules call are methods of STUDY_DAG, see fedpipe/workflow/dag.py.
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from fedpipe.cli.job_server import SNAKEMAKE_PID_VARIABLE
from fedpipe.core.errors import UserError, format_permission_error
from fedpipe.core.storage.layout import PAPERS
from fedpipe.workflow import dag, hangup, snakemake_patches
from fedpipe.workflow.dag import Dag
from fedpipe.workflow.selection import StudySelection, require_importable_folder
from snakemake_logger_plugin_fedpipe import progress

# 1. Read the command line, which Snakemake exposes only after parsing. It accepts abbreviations of --unlock.
WORDS = sys.argv[1:]
MAKES_PAPERS = "papers" in WORDS
UNLOCKS = any(word[:4] == "--un" and "--unlock".startswith(word) for word in WORDS)
IS_DRY_RUN = any(
    word in ("--dry-run", "--dryrun", "--lint")
    or re.fullmatch("-[A-Za-z]*n[A-Za-z]*", word)
    for word in WORDS
)

# 2. Prepare Snakemake. A DAG of single rounds is deep.
sys.setrecursionlimit(max(sys.getrecursionlimit(), 20000))

# Snakemake's record of each file is in results/.provenance, which DVC versions. So a clone that pulled the results has
# nothing to run, but notices a changed parameter. Without a folder `incomplete`, Snakemake would treat the records as
# those of an old version.
Path("results/.provenance").mkdir(parents=True, exist_ok=True)
Path(".snakemake/incomplete").mkdir(parents=True, exist_ok=True)
with suppress(FileExistsError):
    os.symlink("../results/.provenance", ".snakemake/metadata")
snakemake_patches.require_snakemake_version()
snakemake_patches.patch_record_writing()
snakemake_patches.patch_linked_outputs()
snakemake_patches.patch_missing_records()
snakemake_patches.patch_outdated_records()
snakemake_patches.patch_pandas_import()

# Several Snakemakes may share a folder. This only concerns the main process.
if workflow.is_main_process:
    hangup.install_hangup_handler()
    snakemake_patches.patch_scheduler_alarm()
    snakemake_patches.patch_graceful_exit()
    if not UNLOCKS:
        snakemake_patches.patch_lock_deletion()

# Planning and local jobs share one import of PyTorch, see fedpipe/cli/job_server.py. Local rules of a cluster don't. A
# cluster's profile has `jobs` without `cores`. A local one has `cores`, and maybe `jobs`, if you typed `-j`.
ENVIRONMENT = {}
if (
    workflow.is_main_process
    and not (IS_DRY_RUN or UNLOCKS)
    and workflow.resource_settings.cores is not None
    and hasattr(os, "pidfd_open")
):
    ENVIRONMENT[SNAKEMAKE_PID_VARIABLE] = os.getpid()
shell.prefix(dag.format_shell_prefix(ENVIRONMENT))

# `papers` runs all studies in a folder. Remote jobs get the key from config_args.
if MAKES_PAPERS and "params" not in config:
    config["params"] = str(PAPERS)
    workflow.config_settings.config_args = [
        *(workflow.config_settings.config_args or []),
        f"params={PAPERS}",
    ]

# 3. Select the studies: --config params=studies/NAME.yaml preset=smoke, or --config params=FOLDER for all in a folder.
# Each study has its plan, tables and figures in results/studies/NAME@PRESET. Studies share runs, partitions and data.
# 4. Plan the studies whose plans are not current, and read the plans.
try:
    snakemake_patches.require_records_in_files(workflow)
    require_importable_folder(Path.cwd())
    SELECTION = StudySelection.from_config(config)
    if SELECTION.needs_planning(workflow.is_main_process):
        SELECTION.write_plans()
    STUDY_DAG = progress.study = Dag.from_selection(SELECTION)
except UserError as error:
    sys.stderr.write(f"fedpipe: {error}\n")
    sys.exit(2)
except PermissionError as error:
    sys.stderr.write(f"fedpipe: {format_permission_error(error)}\n")
    sys.exit(2)

# 5. Pass the settings of section `execution` to jobs.
shell.prefix(dag.format_shell_prefix(ENVIRONMENT | STUDY_DAG.job_environment))


onstart:
    if workflow.is_main_process:
        STUDY_DAG.remove_completion_marks()


onerror:
    if workflow.is_main_process:
        snakemake_patches.wait_for_log_records(workflow.logger_manager)
        print(dag.format_resume_advice(WORDS), file=sys.stderr)
        # The pages show a dash with the reason for each missing number.
        if MAKES_PAPERS:
            subprocess.run(
                [
                    *(sys.executable, "-m", "fedpipe", "papers"),
                    *("--preset", SELECTION.preset),
                    *("--plan-fingerprint", STUDY_DAG.plans_fingerprint),
                ]
            )


onsuccess:
    if workflow.is_main_process and snakemake_patches.is_complete_dag(workflow):
        STUDY_DAG.write_completion_marks()
        snakemake_patches.wait_for_log_records(workflow.logger_manager)
        with suppress(OSError):  # the pipe of `| head` is closed
            print(STUDY_DAG.format_done_message(), file=sys.stderr, flush=True)


CONDA = dag.escape_braces(f"{workflow.basedir}/workflow/envs/fedpipe.yaml")


wildcard_constraints:
    algorithm=r"[a-z][a-z0-9_]*",
    key=r"[0-9a-f]{12}",
    round=r"(?!0000)\d{4}",
    stop=r"\d{4}",
    rung=r"\d{4}",
    block=r"\d{4}",
    diagnostic=r"[a-z-]+-[0-9a-f]{12}",
    dataset=r"[A-Za-z0-9_.]+-[0-9a-f]{12}",
    partition=r"[A-Za-z0-9_.-]+",
