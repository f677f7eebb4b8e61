"""The bits of every algorithm: SHA-256 of all tensors, metrics and matrices of small runs, in one JSON.

Use this program to check that a change of the code does not change results::

    python tests/runs/digests.py > new.json                       # the code in this folder
    git worktree add ../old REVISION
    python tests/runs/digests.py --code ../old > old.json         # the code of another revision
    python tests/runs/digests.py --code ../old --tensors          # one line per tensor and column, to see what differs

It runs all algorithms for two rounds on digits, as a loop over clients and as a stack of clients, with a plain
network, with BatchNorm and with dropout. It also runs FedDW's regularizer on three methods, four server optimizers,
Adam, and other training settings. It uses only the commands `plan`, `download`, `partition` and `segment` and the
formats of their files, so it runs with any revision.

``tests/runs/digests.json`` has the digests of version 0.2.0. They are those of revision 0663cab, except ``clients.pt``
of FedALA, MOON and PFPS-LWC, which no longer contains a flag for clients that have trained. Since 6a6f35d, losses of
personal models that are the global model differ in the last digits, and so do digests of ``metrics``. Running
statistics of APFL in ``new-batch-norm`` differ since e906ea6, and CCVR and FedAS in ``new-...`` since 6983bcc. The
studies ``new-...`` have the methods that were added later. PyTorch's kernels round differently on different processors,
so the program limits them to instructions that all x86-64 processors with AVX2 have.
"""

import argparse
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROUNDS = 2
WIDTH = 4  #: clients in one call of the stack
KERNELS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
FILES = {".pt", ".parquet"}

NETWORKS = """
from torch import nn

def normalized(shape, classes):
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU())
    return body, nn.Linear(8, classes)

def noisy(shape, classes):
    body = nn.Sequential(
        nn.Conv2d(shape[0], 4, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.2),
        nn.MaxPool2d(4), nn.Flatten(), nn.Dropout(0.3),
    )
    return body, nn.Linear(16, classes)
"""

PARAMETERS: dict[str, dict[str, Any]] = {
    "ccvr": {"samples": 20},
    "cfl": {"after": 1, "eps1": 100.0, "eps2": 0.0},
    "ditto": {"attraction": 0.1},
    "fedala": {"passes": 3},
    "fedprox": {"mu": 0.1},
    "ifca": {"clusters": 2},
    "pfedme": {"attraction": 5.0},
    "pfps_lwc": {"penalty": 0.02},
}
NAMES = (
    *("cfl", "cwfedavg", "fedala", "fedamp", "fedavg", "fedbabu", "fedbn", "feddistill_plus", "feddual"),
    *("feddw", "feddyn", "fedfomo", "fednh", "fednova", "fedper", "fedproto", "fedprox", "fedpvr", "fedrep"),
    *("feduv", "ifca", "local", "moon", "perfedavg", "pfedme", "pfps_lwc", "scaffold"),
)
NEW_NAMES = (  # added since version 0.2.0
    *("apfl", "ccvr", "ditto", "fedas", "fedcm", "fedcp", "feddbe", "feddecorr", "fedexp", "fedlc", "fedntd"),
    *("fedpac", "fedrod", "fedsam", "gpfl", "lg_fedavg"),
)
ALGORITHMS, NEW_ALGORITHMS = ({name: PARAMETERS.get(name, {}) for name in names} for names in (NAMES, NEW_NAMES))
OTHER_METHODS: dict[str, dict[str, Any]] = {
    "dw_on_fedavg": {"algorithm": "fedavg", "dw": {"mu": 0.5}},
    "dw_on_fedala": {"algorithm": "fedala", "dw": {"mu": 0.5}},
    "dw_on_fedrep": {"algorithm": "fedrep", "dw": {"mu": 0.5}},
    "feddw_code": {"algorithm": "feddw", "mode": "code"},
    "feddual_code": {"algorithm": "feddual", "mode": "code"},
    "feddistill_code": {"algorithm": "feddistill_plus", "mode": "code"},
}
PROTOCOLS = [f"{model}-on-local" for model in ("personal", "trained", "kept", "finetuned")] + ["global-on-global"]
BASE: dict[str, Any] = {
    "dataset": {"name": "digits"},
    "partition": {"scheme": "dirichlet", "alpha": 0.3},
    "model": {"name": "mlp", "hidden": [12, 8]},
    "federation": {"clients": 8, "participation": 0.75, "rounds": ROUNDS, "batch_size": 40, "learning_rate": 0.1},
    "evaluation": {"protocols": PROTOCOLS},
}


def make_studies() -> dict[str, dict[str, Any]]:
    """Make the studies by name, each as the content of a params.yaml."""
    small = ["fedavg", "scaffold", "fedala", "pfps_lwc", "feddyn", "perfedavg"]
    servers = ["momentum", "adam", "yogi", "adagrad"]
    prototypes = {"protocols": [*PROTOCOLS, "prototype-on-local"]}
    studies: dict[str, dict[str, Any]] = {
        "plain": {"algorithms": ALGORITHMS | OTHER_METHODS, "evaluation": prototypes},
        "batch-norm": {"model": {"name": "own.normalized"}, "algorithms": ALGORITHMS},
        "batch-norm-kept": {
            "model": {"name": "own.normalized"},
            "federation": {"buffers": "keep"},
            "evaluation": {"protocols": PROTOCOLS[:-1]},
            "algorithms": {name: ALGORITHMS[name] for name in small},
        },
        "dropout": {"model": {"name": "own.noisy"}, "algorithms": ALGORITHMS},
        "new-plain": {"algorithms": NEW_ALGORITHMS},
        "new-batch-norm": {"model": {"name": "own.normalized"}, "algorithms": NEW_ALGORITHMS},
        "new-dropout": {"model": {"name": "own.noisy"}, "algorithms": NEW_ALGORITHMS},
        "adam": {
            "federation": {"optimizer": "adam", "learning_rate": 0.01},
            "algorithms": {name: ALGORITHMS[name] for name in ("fedavg", "fedprox", "moon", "fedper", "ifca")},
        },
        "momentum": {
            "federation": {
                **{"momentum": 0.9, "weight_decay": 0.01, "clip_norm": 1.0, "local_epochs": None, "local_steps": 5},
                **{"schedule": {"name": "step", "step_size": 1, "gamma": 0.5}, "weighting": "uniform"},
            },
            "algorithms": {name: ALGORITHMS[name] for name in ("fedavg", "fednova", "fedpvr", "fedper", "cwfedavg")},
        },
        "bfloat16": {"federation": {"precision": "bfloat16"}, "algorithms": {"fedavg": {}, "pfps_lwc": {}}},
        "double": {"federation": {"dtype": "float64"}, "algorithms": {"fedavg": {}, "feddual": {}}},
    }
    for name in servers:
        studies[f"server-{name}"] = {
            "federation": {"server": {"optimizer": name, "learning_rate": 0.5}},
            "algorithms": {"fedavg": {}, "fedprox": {"mu": 0.1}},
        }
    for study in studies.values():
        for section, values in BASE.items():
            changes = study.get(section, {})
            study[section] = changes if "name" in changes else values | changes
        study["study"] = {"algorithms": list(study["algorithms"]), "seeds": [0]}
    return studies


def run_command(*arguments: str) -> None:
    """Run a command of fedpipe in a child of this process, which has imported PyTorch already."""
    child = os.fork()
    if not child:
        try:
            sys.argv = ["fedpipe", *arguments]
            from fedpipe.__main__ import main

            main()
            os._exit(0)
        except SystemExit as error:
            sys.stdout.flush()
            os._exit(error.code if isinstance(error.code, int) else 1 if error.code else 0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        sys.exit(f"fedpipe {' '.join(arguments)} ended with {code}")


def read_files(run: Path) -> dict[str, bytes]:
    """Read all tensors and tables of a run by relative path, including those in zip files."""
    files = {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.suffix in FILES}
    for archive in run.rglob("*.zip"):
        folder = archive.relative_to(run).with_suffix("")
        with zipfile.ZipFile(archive) as members:
            names = [name for name in members.namelist() if Path(name).suffix in FILES]
            files |= {str(folder / name): members.read(name) for name in names}
    return dict(sorted(files.items()))


def iterate_leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the SHA-256 of each tensor or number in a tree."""
    import torch

    if isinstance(value, dict):
        for key, item in value.items():
            yield from iterate_leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from iterate_leaves(item, f"{name}.{index}" if name else str(index))
    elif isinstance(value, torch.Tensor):
        head = f"{value.dtype} {tuple(value.shape)}".encode()
        is_scalar = not value.dim()  # a scalar has no view as bytes
        data = repr(value.item()).encode() if is_scalar else value.contiguous().view(torch.uint8).numpy().tobytes()
        yield name, hashlib.sha256(head + data).hexdigest()
    else:
        yield name, hashlib.sha256(repr(value).encode()).hexdigest()


def digest_file(path: str, data: bytes) -> dict[str, str]:
    """Compute the SHA-256 of each tensor of a ``.pt`` file, or of each column of a Parquet file."""
    import pyarrow.parquet as pq
    import torch

    if path.endswith(".pt"):
        return dict(iterate_leaves(torch.load(io.BytesIO(data), weights_only=True)))
    table = pq.read_table(io.BytesIO(data))
    return {
        name: hashlib.sha256(repr(table.column(name).to_pylist()).encode()).hexdigest() for name in table.column_names
    }


def digest_run(run: Path, per_tensor: bool) -> dict[str, Any]:
    """Compute the digests of a run: one per file, or one per tensor and column of each file."""
    digests: dict[str, Any] = {}
    for path, data in read_files(run).items():
        leaves = {name: value[:24] for name, value in digest_file(path, data).items()}
        text = json.dumps(leaves, sort_keys=True)
        digests[path] = leaves if per_tensor else hashlib.sha256(text.encode()).hexdigest()[:24]
    return digests


def digest_study(name: str, study: dict[str, Any], per_tensor: bool) -> dict[str, Any]:
    """Run a study in a new folder as a loop and as a stack. Return the digests by executor and method."""
    digests: dict[str, Any] = {}
    for executor, width in (("loop", "1"), ("stack", str(WIDTH))):
        folder = tempfile.mkdtemp()  # a TemporaryDirectory would be deleted at the end of each child
        os.chdir(folder)
        Path("own.py").write_text(NETWORKS)
        Path("params.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
        run_command("plan")
        for settings in Path("results/data").glob("*.yaml"):
            run_command("download", settings.stem)
        for settings in Path("results/partitions").glob("*/partition.yaml"):
            run_command("partition", settings.parent.name)
        for settings in sorted(Path("results/runs").glob("*/*/run.yaml")):
            run = settings.parent
            run_command("segment", str(run), "--stop", str(ROUNDS), "--stack", width, "--collect")
            digests[f"{name}/{executor}/{run.parent.name}"] = digest_run(run, per_tensor)
        os.chdir("/")
        shutil.rmtree(folder)
    return digests


def main() -> None:
    """Print the digests as JSON, and the progress to standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", type=Path, default=Path(__file__).parents[2], help="Folder of the code to run.")
    parser.add_argument("--only", default="", help="Studies to run, with commas between them. Default: all.")
    parser.add_argument("--tensors", action="store_true", help="Print one digest per tensor and column.")
    arguments = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in KERNELS.items()):
        code = str(arguments.code.resolve())
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KERNELS | {"PYTHONPATH": code})
    sys.path.insert(0, str(arguments.code.resolve()))
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of the commands
    sys.stdout = os.fdopen(1, "w", closefd=False)
    import torch  # noqa: F401  # once, for all commands

    import fedpipe

    print(f"fedpipe of {Path(fedpipe.__file__).parent}", file=sys.stderr)
    digests: dict[str, Any] = {}
    for name, study in make_studies().items():
        if not arguments.only or name in arguments.only.split(","):
            print(f"study {name}: {len(study['algorithms'])} methods", file=sys.stderr)
            digests |= digest_study(name, study, arguments.tensors)
    lines = [f"{json.dumps(name)}: {json.dumps(values)}" for name, values in digests.items()]
    output.write("{\n" + ",\n".join(lines) + "\n}\n")
    output.close()


if __name__ == "__main__":
    main()
