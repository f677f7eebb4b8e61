# The plan, and every helper function of the rules.
import hashlib
import json
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from fedpipe.artifacts import PARAMS, StudyFiles

# A literal DAG of single rounds is deep.
sys.setrecursionlimit(max(sys.getrecursionlimit(), 20000))

# Snakemake's records of what made each file lie in results/.provenance, which DVC versions: a clone that pulled the
# results has nothing to do, and still notices a changed parameter.
Path("results/.provenance").mkdir(parents=True, exist_ok=True)
Path(".snakemake/incomplete").mkdir(parents=True, exist_ok=True)
with suppress(FileExistsError):
    os.symlink("../results/.provenance", ".snakemake/metadata")


# Another study beside the main one: snakemake all --config params=studies/NAME.yaml. Its plan, tables and figures lie in
# results/studies/NAME; runs, partitions and data lie under their keys, so that studies share them.
STUDY = str(Path(config.get("params", PARAMS)))
FILES = StudyFiles.of(Path(STUDY))


def stale():
    """Whether the plan is of another study or other files than lie here, can't be read, or what it wrote is gone."""
    from fedpipe.pins import STAMP, stamp

    def changed(path, mark):
        # A file of one's own may be large: the plan finds out whether it is another indeed.
        if mark.startswith(STAMP):
            return stamp(Path(path)) != mark
        try:
            return hashlib.sha256(Path(path).read_bytes()).hexdigest() != mark
        except FileNotFoundError:
            return True

    try:
        plan = json.loads(FILES.plan.read_text())
        return (
            plan["params"] != STUDY
            or any(changed(path, mark) for path, mark in plan["sources"].items())
            or not all(Path(path).is_file() for path in plan["files"])
        )
    except (ValueError, LookupError, TypeError):
        return True


def load_plan():
    """The study's plan, made anew where it is stale."""
    if not FILES.plan.is_file() or (workflow.is_main_process and stale()):
        done = subprocess.run(
            [sys.executable, "-m", "fedpipe", "plan", "--params", STUDY],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.stderr.write(done.stderr)
            sys.exit(2)
    return json.loads(FILES.plan.read_text())


PLAN = load_plan()
RUNS = {run["path"]: run for run in PLAN["runs"]}
ROUNDS = PLAN["rounds"]
BLOCK = PLAN["execution"]["clients_per_job"]
SEGMENT = PLAN["execution"]["rounds_per_job"] or ROUNDS
STOPS = [
    *range(SEGMENT, ROUNDS, SEGMENT),
    ROUNDS,
]  # last rounds of the segments, ascending
STARTS = dict(zip(STOPS, [0, *STOPS]))


def tell_of_lock():
    """What to type where Snakemake is about to say that the folder is locked."""
    ours = ("results/data/", "results/partitions/", f"{FILES.tables}/", *RUNS)
    locked = []
    for lock in Path(".snakemake/locks").glob("*.output.lock"):
        with suppress(FileNotFoundError):  # its snakemake ends at this moment
            locked += lock.read_text().split()
    if any(line.startswith(ours) for line in locked):
        print(
            "fedpipe: another snakemake makes files of this study; or it was killed, then type\n"
            f"    snakemake --unlock\n    {shlex.join(['snakemake', *sys.argv[1:]])}\n"
            "Complete rounds will be found, and jobs that it left behind do no harm.",
            file=sys.stderr,
        )


if workflow.is_main_process and "--unlock" not in sys.argv:
    tell_of_lock()

# Jobs call `fedpipe` of the environment that snakemake runs in, whether or not it is activated, with the code that lies
# here: an experiment of DVC in a folder of its own runs its own. How they execute is told in their environment: it is
# not part of what a run is, so that its change runs nothing again.
shell.prefix(
    f"export PATH='{Path(sys.executable).parent}':\"$PATH\"; "
    'export PYTHONPATH="$PWD${{{{PYTHONPATH:+:$PYTHONPATH}}}}"; '
    "export FEDPIPE_DEVICE={device} FEDPIPE_STACK={stack} ".format(**PLAN["execution"])
    + "FEDPIPE_KEEP_MODELS={keep_models}; ".format(**PLAN["artifacts"])
)


wildcard_constraints:
    algorithm=r"[a-z][a-z0-9_]*",
    key=r"[0-9a-f]{12}",
    round=r"(?!0000)\d{4}",
    stop=r"\d{4}",
    block=r"\d{4}",
    dataset=r"[A-Za-z0-9_.]+-[0-9a-f]{12}",


def run_of(wildcards):
    return RUNS[f"results/runs/{wildcards.algorithm}/{wildcards.key}"]


def assignment(wildcards):
    return f"results/partitions/{run_of(wildcards)['partition']}/assignment.parquet"


def dataset_of_partition(wildcards):
    dataset = next(
        run["dataset"] for run in PLAN["runs"] if run["partition"] == wildcards.key
    )
    return f"results/data/{dataset}.pt"


def run_inputs(wildcards):
    """What every job of a run reads: its settings, data set and partition."""
    run = run_of(wildcards)
    return {
        "settings": ancient(f"{run['path']}/run.yaml"),
        "data": f"results/data/{run['dataset']}.pt",
        "assignment": assignment(wildcards),
    }


def segment_inputs(wildcards):
    run, start = run_of(wildcards), STARTS[int(wildcards.stop)]
    previous = {"previous": f"{run['path']}/segments/{start:04d}.json"} if start else {}
    return run_inputs(wildcards) | previous


def blocks(wildcards):
    """Indices of a round's blocks of participants."""
    return range(-(-run_of(wildcards)["participants"] // BLOCK))


def block_files(wildcards):
    run = run_of(wildcards)
    return [
        f"{run['path']}/rounds/{wildcards.round}/block-{block:04d}.pt"
        for block in blocks(wildcards)
    ]


def state_before(wildcards):
    return (
        f"{run_of(wildcards)['path']}/rounds/{int(wildcards.round) - 1:04d}/state.json"
    )


def train_inputs(wildcards):
    return run_inputs(wildcards) | {"state": state_before(wildcards)}


def rounds_done(wildcards):
    """Manifests of all of a run's rounds, ascending, so that the DAG is never built depth first."""
    path = run_of(wildcards)["path"]
    if BLOCK:
        return [
            f"{path}/rounds/{number:04d}/round.json" for number in range(1, ROUNDS + 1)
        ]
    return [f"{path}/segments/{stop:04d}.json" for stop in STOPS]


def collected(name):
    return [f"{run['path']}/{name}" for run in PLAN["runs"]]


def summaries():
    """Tables, numbers and keys that are made of all runs."""
    return [
        *(
            f"{FILES.tables}/{name}"
            for name in ("results.csv", "results.md", "times.csv")
        ),
        f"{FILES.metrics}",
        *(
            f"{FILES.plots}/{name}.csv"
            for name in ("curves", "clients", "matrices", "partition")
        ),
        *(f"{FILES.keys(algorithm)}" for algorithm in PLAN["algorithms"]),
    ]


def all_results():
    """Everything, also what the rest is made of: so that what was deleted is made again."""
    figures = [
        "curves",
        "matrices",
        *(f"partition-{key}" for key in PLAN["partitions"]),
    ]
    return [
        *sorted({f"results/data/{run['dataset']}.pt" for run in PLAN["runs"]}),
        *(f"results/partitions/{key}/assignment.parquet" for key in PLAN["partitions"]),
        *collected("metrics.parquet"),
        *summaries(),
        *(
            f"{FILES.figures}/{name}.{kind}"
            for name in figures
            for kind in ("svg", "png")
        ),
    ]
