# The plan, and every helper function of the rules.
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from fedpipe.core.storage.layout import (
    FULL_SCALE,
    PAPERS,
    PARAMS,
    StudyFiles,
    format_show_command,
    list_studies,
    normalize_study_path,
)
from fedpipe.core.errors import UserError
from fedpipe import papers
from fedpipe.cli.job_server import SNAKEMAKE_PID_VARIABLE
from fedpipe.planning.combined import CombinedPlan
from fedpipe.planning.plan import FORECAST_CORES, Plan
from fedpipe.report.contents import (
    compute_plans_fingerprint,
    compute_report_fingerprint,
)
from fedpipe.workflow import snakemake_patches

# A literal DAG of single rounds is deep.
sys.setrecursionlimit(max(sys.getrecursionlimit(), 20000))

# Snakemake's records of what made each file lie in results/.provenance, which DVC versions: a clone that pulled the
# results has nothing to do, and still notices a changed parameter.
Path("results/.provenance").mkdir(parents=True, exist_ok=True)
Path(".snakemake/incomplete").mkdir(parents=True, exist_ok=True)
with suppress(FileExistsError):
    os.symlink("../results/.provenance", ".snakemake/metadata")
snakemake_patches.patch_records()


# Also abbreviated, as Snakemake understands it.
UNLOCKS = any(word[:4] == "--un" and "--unlock".startswith(word) for word in sys.argv)

# As far as that can be told before the Snakefile is read.
DRY = any(
    word in ("--dry-run", "--dryrun", "--lint")
    or re.fullmatch("-[A-Za-z]*n[A-Za-z]*", word)
    for word in sys.argv
)

# For several snakemakes at once; not where jobs themselves read this.
if workflow.is_main_process:
    snakemake_patches.patch_scheduler()
    if not UNLOCKS:
        snakemake_patches.patch_locks()


# What jobs import is found by PYTHONPATH, whose entries a colon parts: they would run other code than lies here.
if os.pathsep in os.getcwd():
    sys.stderr.write(
        f"fedpipe: {os.getcwd()}: '{os.pathsep}' can't be part of the path of a study's folder, since jobs would run "
        "other code than lies here; rename it.\n"
    )
    sys.exit(2)


def refuse_settings():
    """Refuse what `--config` and `--configfile` can't set, so that nobody believes that it was heard."""
    unknown = [key for key in config if key not in ("params", "scale")]
    if unknown:
        keys = ", ".join(f"'{key}'" for key in unknown)
        sys.stderr.write(
            f"fedpipe: {keys} in --config or --configfile would change nothing; settings belong in params.yaml, or in "
            "another study's file, named by --config params=studies/NAME.yaml.\n"
        )
        sys.exit(2)


refuse_settings()

# The papers' studies are all of a folder; what jobs elsewhere are told of the study is what was typed here.
if "papers" in sys.argv[1:] and "params" not in config:
    config["params"] = str(PAPERS)
    workflow.config_settings.config_args = [
        *(workflow.config_settings.config_args or []),
        f"params={PAPERS}",
    ]

# Another study beside the main one: snakemake all --config params=studies/NAME.yaml. Its plan, tables and figures lie in
# results/studies/NAME; runs, partitions and data lie under their keys, so that studies share them. So do the scales of
# a study, as --config params=studies/NAME.yaml scale=smoke, whose tables lie in results/studies/NAME@smoke; and all
# studies in a folder, as --config params=studies/papers, whose runs are made in one go.
STUDY = normalize_study_path(Path(str(config.get("params", PARAMS))))
SCALE = str(config.get("scale", FULL_SCALE))
try:
    FILES = {path: StudyFiles.from_params(path, SCALE) for path in list_studies(STUDY)}
except UserError as error:
    sys.stderr.write(f"fedpipe: {error}\n")
    sys.exit(2)
TOGETHER = STUDY.is_dir()


def stale(path):
    """Whether the plan is of another study or other files than lie here, can't be read, or what it wrote is gone.

    So is one with generated samples: the real ones may have come meanwhile.
    """
    from fedpipe.core.components.pinned_files import has_changed

    try:
        plan = Plan.read(FILES[path].plan)
        sources = json.loads(FILES[path].sources.read_text())
        return (
            (plan.params, plan.scale) != (path, SCALE)
            or any(has_changed(Path(name), mark) for name, mark in sources.items())
            or not all(Path(name).is_file() for name in plan.files)
            or any(run.dataset.startswith("generated-") for run in plan.runs)
        )
    except (UserError, OSError, ValueError, LookupError, TypeError):
        return True


def unforeseen():
    """Whether the study may start only if it takes no more than a day, and runs of it are missing."""
    return FORECAST_CORES in os.environ and not all(
        joined.marker.is_file() for joined in Plan.read(FILES[STUDY].plan).merged_files
    )


def outdated():
    """Whether a study has no plan, or a stale one; where data may have come meanwhile, all are planned again."""
    if not workflow.is_main_process:
        return not all(files.plan.is_file() for files in FILES.values())
    return TOGETHER or any(map(stale, FILES)) or unforeseen()


# Jobs of this machine share one import of PyTorch, see fedpipe/cli/job_server.py; not those that run here beside submitted ones.
ENVIRONMENT = {}
if (
    workflow.is_main_process
    and workflow.resource_settings.nodes is None
    and hasattr(os, "pidfd_open")
):
    ENVIRONMENT[SNAKEMAKE_PID_VARIABLE] = os.getpid()


def prefix():
    """What stands before each command: jobs call `fedpipe` of the environment that snakemake runs in, whether or not it
    is activated, with the code that lies here: an experiment of DVC in a folder of its own runs its own.
    """
    told = {name: shlex.quote(str(value)) for name, value in ENVIRONMENT.items()}
    words = [
        f'PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"',
        'PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"',
        *(f"{name}={value}" for name, value in told.items()),
    ]
    text = f"export {' '.join(words)};"
    return text.replace("{", "{{").replace("}", "}}")  # Snakemake formats it


shell.prefix(prefix())


def preload():
    """Let the process that local jobs are forked from begin with its imports, while the plan is made.

    It is started by any command that runs as jobs do, for which nobody waits here; in bash's background it would ignore
    Ctrl+C, and so would all jobs.
    """
    if SNAKEMAKE_PID_VARIABLE in ENVIRONMENT and not (DRY or UNLOCKS):
        resources = {"tmpdir": tempfile.gettempdir()}
        shell("fedpipe --version 2> /dev/null", iterable=True, resources=resources)


def load_plans():
    """The plans of all studies, made anew where one is stale; runs of several that want data are left out."""
    if outdated():
        preload()
        done = subprocess.run(
            [
                *(sys.executable, "-m", "fedpipe", "plan"),
                *("--params", str(STUDY), "--scale", SCALE),
            ],
            capture_output=True,
            text=True,
        )
        sys.stderr.write(done.stderr)
        if done.returncode:
            sys.exit(2)
    absent = {}
    for files in FILES.values() if TOGETHER else ():
        absent |= (
            json.loads(files.unavailable_runs.read_text())
            if files.unavailable_runs.is_file()
            else {}
        )
    return CombinedPlan(
        tuple(Plan.read(files.plan) for files in FILES.values()), frozenset(absent)
    )


WORK = load_plans()


def shown(plan):
    """A hash of what the tables and figures of a study say: they are made again at another grid point of the same runs."""
    return compute_report_fingerprint(plan)


try:
    EXECUTION = WORK.execution
except UserError as error:
    sys.stderr.write(f"fedpipe: {error}\n")
    sys.exit(2)
BLOCK = EXECUTION.clients_per_job
LENGTH = EXECUTION.rounds_per_job
WHOLE = LENGTH is None  # a run is one job


def stops(run):
    """The last rounds of a run's segments, ascending."""
    length = LENGTH or run.rounds
    return sorted(
        {*range(length, run.rounds, length), *WORK.round_counts[str(run.path)]}
    )


def collected(made, *names):
    """What tables are made of: files that join the rounds of all runs of a study, or of all studies."""
    return [f"{joined.path}/{name}" for name in names for joined in made.merged_files]


# The number of rounds is part of the place, so that studies of other lengths share a run's rounds, never its results.
JOINED = [
    f"results/runs/{{algorithm}}/{{key}}/joined/{{stop}}/{name}"
    for name in (
        "metrics.parquet",
        "matrices.parquet",
        "rounds.parquet",
        "joined.json",
        "times.json",
    )
]


def ended():
    """The markers of runs that are one job each: their rounds are wanted, also where what joins them is there."""
    runs = WORK.runs.values() if WHOLE else ()
    return [
        f"{run.path}/segments/{stop:04d}.json" for run in runs for stop in stops(run)
    ]


def tell_of_lock():
    """What to type where Snakemake is about to say that the folder is locked."""
    ours = (
        *(f"results/data/{run.dataset}." for run in WORK.runs.values()),
        *(f"results/partitions/{key}/" for key in WORK.partitions),
        *(f"{run.path}/rounds/" for run in WORK.runs.values() if BLOCK),
        *(
            f"{run.path}/segments/{stop:04d}.json"
            for run in WORK.runs.values()
            for stop in stops(run)
        ),
        *collected(WORK, ""),
        *(f"{files.tables}/" for files in FILES.values()),
    )
    locked = []
    for lock in Path(".snakemake/locks").glob("*.output.lock"):
        with suppress(FileNotFoundError):  # its snakemake ends at this moment
            locked += lock.read_text().splitlines()
    if any(line.startswith(ours) for line in locked):
        print(
            "fedpipe: another snakemake makes files of this study; or it was killed, then type\n"
            f"    snakemake --unlock\n    {shlex.join(['snakemake', *sys.argv[1:]])}\n"
            "Complete rounds will be found, and jobs that it left behind do no harm.",
            file=sys.stderr,
        )


if workflow.is_main_process and not UNLOCKS:
    tell_of_lock()


# After a failure, and after Ctrl+C, which Snakemake does not tell apart.
onerror:
    if workflow.is_main_process:
        print(
            "fedpipe: this ended before all was done. Complete rounds are kept, and the same command goes on after them:\n"
            f"    {shlex.join(['snakemake', *sys.argv[1:]])}",
            file=sys.stderr,
        )
        if "papers" in sys.argv[1:]:  # what did not come is a dash with its reason
            subprocess.run(
                [
                    *(sys.executable, "-m", "fedpipe", "papers", "--scale", SCALE),
                    *("--said", compute_plans_fingerprint(WORK.plans)),
                ]
            )


# Where jobs have made all results of a study, what to type next.
onsuccess:
    if workflow.is_main_process and "all" in (
        workflow.dag_settings.targets or ["all"]
    ):
        command = format_show_command(Path("FILE") if TOGETHER else STUDY, SCALE)
        table = (
            "each study's table"
            if TOGETHER
            else f"the table, {FILES[STUDY].tables}/results.md,"
        )
        print(
            f"fedpipe: done; `{command}` prints {table} and where the figures lie.",
            file=sys.stderr,
        )


# How jobs execute is told in their environment: it is not part of what a run is, so that its change runs nothing again.
ENVIRONMENT |= {
    "FEDPIPE_DEVICE": EXECUTION.device,
    "FEDPIPE_STACK": EXECUTION.stack,
    "FEDPIPE_GRAPHS": int(EXECUTION.graphs),
    "FEDPIPE_KEEP_MODELS": WORK.plans[0].keep_models,
    "FEDPIPE_CALLBACKS": " ".join(EXECUTION.callbacks),
}
shell.prefix(prefix())


# Snakemake takes the path of an environment for a pattern, and the clone's own may hold braces.
CONDA = f"{workflow.basedir}/workflow/envs/fedpipe.yaml"
CONDA = CONDA.replace("{", "{{").replace("}", "}}")


wildcard_constraints:
    algorithm=r"[a-z][a-z0-9_]*",
    key=r"[0-9a-f]{12}",
    round=r"(?!0000)\d{4}",
    stop=r"\d{4}",
    block=r"\d{4}",
    probe=r"[a-z-]+-[0-9a-f]{12}",
    dataset=r"[A-Za-z0-9_.]+-[0-9a-f]{12}",
    partition=r"[A-Za-z0-9_.-]+",


def run_of(wildcards):
    return WORK.runs[f"results/runs/{wildcards.algorithm}/{wildcards.key}"]


def assignment(wildcards):
    return f"results/partitions/{run_of(wildcards).partition}/assignment.parquet"


def dataset_of_partition(wildcards):
    runs = WORK.runs.values()
    dataset = next(run.dataset for run in runs if run.partition == wildcards.key)
    return f"results/data/{dataset}.pt"


def run_inputs(wildcards):
    """What every job of a run reads: its settings, data set and partition."""
    run = run_of(wildcards)
    return {
        "settings": ancient(f"{run.path}/run.yaml"),
        "data": f"results/data/{run.dataset}.pt",
        "assignment": assignment(wildcards),
    }


def segment_inputs(wildcards):
    run, stop = run_of(wildcards), int(wildcards.stop)
    start = max((earlier for earlier in stops(run) if earlier < stop), default=0)
    previous = {"previous": f"{run.path}/segments/{start:04d}.json"} if start else {}
    return run_inputs(wildcards) | previous


def blocks(wildcards):
    """Indices of a round's blocks of participants."""
    return range(-(-run_of(wildcards).participants // BLOCK))


def block_files(wildcards):
    run = run_of(wildcards)
    return [
        f"{run.path}/rounds/{wildcards.round}/block-{block:04d}.pt"
        for block in blocks(wildcards)
    ]


def state_before(wildcards):
    return f"{run_of(wildcards).path}/rounds/{int(wildcards.round) - 1:04d}/state.json"


def train_inputs(wildcards):
    return run_inputs(wildcards) | {"state": state_before(wildcards)}


def rounds_done(wildcards):
    """Manifests of a run's rounds, ascending, so that the DAG is never built depth first; and what is joined before.

    Of a run that is collected after several numbers of rounds, one job at a time, and none beside a segment.
    """
    run, rounds = run_of(wildcards), int(wildcards.stop)
    shorter = [length for length in WORK.round_counts[str(run.path)] if length < rounds]
    earlier = [f"{run.path}/joined/{max(shorter):04d}/joined.json"] if shorter else []
    if BLOCK:
        numbers = range(1, run.rounds + 1)
        return [
            f"{run.path}/rounds/{number:04d}/round.json" for number in numbers
        ] + earlier
    return [f"{run.path}/segments/{stop:04d}.json" for stop in stops(run)] + earlier


def probe_of(wildcards):
    return WORK.probes[
        f"results/probes/{wildcards.algorithm}/{wildcards.key}/{wildcards.round}/{wildcards.probe}.parquet"
    ]


def probe_inputs(wildcards):
    probe = probe_of(wildcards)
    return run_inputs(wildcards) | {
        "settings": ancient(str(probe.files.settings)),
        "joined": ancient(str(probe.run.merged_files(probe.rounds).marker)),
    }


def printed():
    """A hash of what is printed, and of how pages show it."""
    parts = sorted(Path(papers.__file__).parent.glob("*.*"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in parts)).hexdigest()


def of_partition(plan, told):
    """A function of wildcards: what is told of the partition that a figure's name stands for."""
    keys = {name: key for key, name in plan.partition_names.items()}
    return lambda wildcards: told(keys[wildcards.partition])


def summaries(plan):
    """Tables, numbers and keys that are made of all runs of a study."""
    files = plan.study_files
    return [
        *(
            f"{files.tables}/{name}"
            for name in (
                "results.csv",
                "results.md",
                "results.html",
                "statistics.csv",
                "times.csv",
            )
        ),
        f"{files.metrics}",
        *(
            f"{files.plots}/{name}.csv"
            for name in ("curves", "clients", "matrices", "partition")
        ),
        *(f"{files.run_keys(algorithm)}" for algorithm in plan.algorithms),
    ]


def figures(plan):
    """The figures of a study."""
    names = [
        "curves",
        "matrices",
        *(f"partition-{name}" for name in plan.partition_names.values()),
    ]
    return [
        f"{plan.study_files.figures}/{name}.{kind}"
        for name in names
        for kind in ("svg", "pdf", "png")
    ]


def all_results():
    """Everything, also what the rest is made of: so that what was deleted is made again."""
    return [
        *sorted({f"results/data/{run.dataset}.pt" for run in WORK.runs.values()}),
        *(f"results/partitions/{key}/assignment.parquet" for key in WORK.partitions),
        *collected(WORK, "joined.json"),
        *ended(),
        *WORK.probes,
        *(
            name
            for plan in WORK.complete_plans
            for name in (*summaries(plan), *figures(plan))
        ),
    ]
