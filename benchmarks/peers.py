"""Compare rounds of FedAvg in fedpipe, PFLlib, FL-bench, fluke and Flower's simulation, one system after the other.

    pip install fluke-fl "flwr[simulation]"
    python benchmarks/peers.py --pfllib CLONE --fl-bench CLONE --json FILE --markdown FILE --figure FILE.svg

All systems train the same PyTorch module from the same initial weights, on the same samples of the same clients, with
the same participants, batch size and learning rate. Each client has a multiple of the batch size of training samples,
because PFLlib omits smaller batches. Each system runs in its own process: one round for warming up, and ``--rounds``
measured rounds. It has the evaluation of its default settings (see the functions ``run`` in peer_systems). The time
without evaluation is that of the round minus that of the evaluation. Peak memory is the largest sum over the process
and its children, in which a shared page counts once.

Accuracy is that of the final global model on all test samples, which this program computes. BatchNorm uses the
statistics of the batch there, because PFLlib does not average running statistics. If an accuracy is more than
``--tolerance`` points (by default that of the case) from the median, or a system fails, the program ends with an error
after all systems.

fluke and Flower are installed packages. PFLlib (github.com/TsingZ0/PFLlib) and FL-bench (github.com/KarhouTam/FL-bench)
are clones, which the program copies. The Python of this program needs the packages that they import. The table gives
the reason why a system is missing. Images come from ``--mirror``, the cache or their publishers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import psutil
import torch
from common import make_parser, write_json
from matplotlib.figure import Figure
from peer_systems.fedpipe import open_run
from peer_systems.job import CASES, Job, assign_clients, load_parameters, make_synthetic_images, read_images
from torch import nn

import fedpipe
from fedpipe.data.sources.fetch import MIRROR_VARIABLE
from fedpipe.engine.environment import get_cpu_name
from fedpipe.report.figures import style

SYSTEMS = {"fedpipe": "fedpipe", "pfllib": "PFLlib", "fl-bench": "FL-bench", "fluke": "fluke", "flower": "Flower"}
CLONES = {"pfllib": "system/main.py", "fl-bench": "src/server/fedavg.py"}  #: systems with a clone, and one of its files
PACKAGES = {"fluke": ("fluke-fl",), "flower": ("flwr", "ray")}  #: systems that are installed
GPU_SYSTEMS = ("fedpipe", "pfllib")  #: systems that can be measured on a GPU
SAMPLING_SECONDS = 0.2  #: time between two measurements of memory
EVALUATION_BATCH = 500

Row = dict[str, Any]


def prepare_job(case_name: str, folder: Path, options: argparse.Namespace) -> Job:
    """Write the samples, the partition, the participants and the initial parameters of a case."""
    case = CASES[case_name]
    x, y = make_synthetic_images(case) if options.synthetic else read_images(case, options.mirror)
    chosen = np.sort(np.random.default_rng(0).permutation(len(y))[: options.samples])
    x, y = x[chosen], y[chosen]
    folder.mkdir()
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    plan: dict[str, Any] = assign_clients(case, y)
    torch.save(plan, folder / "plan.pt")
    run = open_run(folder / "initial", Job(str(folder), case_name, options.rounds, options.threads, options.seed))
    plan["schedule"] = [run.select_participants(number) for number in range(1, options.rounds + 2)]
    if any(len(plan["train"][client]) == 0 for clients in plan["schedule"] for client in clients):
        sys.exit(
            f"--samples: {options.samples} is too few for {case_name}, in which each client needs {case.batch_size} "
            "training samples. Use more."
        )
    plan["initial"] = list(run.algorithm.net.parameters(run.make_initial_model(0)).values())
    torch.save(plan, folder / "plan.pt")
    return Job(str(folder), case_name, options.rounds, options.threads, options.seed)


def explain_absence(system: str, options: argparse.Namespace) -> str | None:
    """Reason why a system can't run here. None if it can."""
    if options.device != "cpu" and system not in GPU_SYSTEMS:
        return (
            f"--device {options.device} measures only {' and '.join(map(SYSTEMS.get, GPU_SYSTEMS))}. Use --device cpu."
        )
    if system in CLONES:
        option, clone = f"--{system}", vars(options)[system.replace("-", "_")]
        if clone is None:
            return f"{option} is missing. Name a clone of {SYSTEMS[system]}."
        if not (clone / CLONES[system]).is_file():
            return f"{option}: {clone} is not a clone of {SYSTEMS[system]}. It needs {CLONES[system]}."
    for package in PACKAGES.get(system, ()):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"The package {package} is missing. Install it in the environment of this program."
    return None


def describe_version(system: str, options: argparse.Namespace) -> str:
    """Version or commit of a system."""
    if system in PACKAGES:
        return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in PACKAGES[system])
    clone = Path(__file__).parents[1] if system == "fedpipe" else vars(options)[system.replace("-", "_")]
    if not (clone / ".git").exists():
        return fedpipe.__version__ if system == "fedpipe" else "unknown commit"
    command = ["git", "-C", str(clone), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown commit"


def describe_machine(options: argparse.Namespace) -> Row:
    """Machine and versions that all systems share."""
    return {
        "processor": get_cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "threads": options.threads,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "rounds": options.rounds,
        "seed": options.seed,
        "images": "synthetic" if options.synthetic else "published",
        "samples": options.samples or "all",
    }


def measure_memory(processes: Iterable[psutil.Process]) -> int:
    """Bytes of some processes, in which a shared page counts once."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has just ended
            memory = process.memory_full_info()
            total += getattr(memory, "pss", memory.rss)
    return total


def run_process(system: str, job: Job, log: Path) -> tuple[int, int]:
    """Run a system in its own process. Return its exit code, and its peak memory in bytes."""
    job_file, work = Path(job.folder, f"{system}.job.json"), Path(job.folder, f"{system}.work")
    job_file.write_text(json.dumps(asdict(job)))
    work.mkdir()
    paths = [str(Path(__file__).absolute().parent), str(Path(fedpipe.__file__).parents[1])]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(job.threads)}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(work)}
    command, peak, tree = [sys.executable, "-m", "peer_systems", system, str(job_file)], 0, set()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=work, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        parent = psutil.Process(process.pid)
        try:
            while process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    tree |= (children := set(parent.children(recursive=True)))
                    peak = max(peak, measure_memory([parent, *children]))
                time.sleep(SAMPLING_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
            for child in tree:  # such as a cluster of Ray, if its driver has failed
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
    return process.returncode, peak


def measure_system(system: str, job: Job) -> Row:
    """Run a system. Return its measurements, or the reason why it failed."""
    log, results, load = Path(job.folder, f"{system}.log"), Path(job.folder, f"{system}.json"), os.getloadavg()[0]
    exit_code, peak = run_process(system, job, log)
    if exit_code or not results.is_file():
        lines = log.read_text(errors="replace").strip().splitlines()
        print(*lines[-30:], sep="\n", file=sys.stderr)
        return {"failed": True, "reason": f"It failed: {lines[-1] if lines else f'exit code {exit_code}'}"}
    measured = json.loads(results.read_text())
    network = job.build_network()
    load_parameters(network, torch.load(results.with_suffix(".pt"), weights_only=True))
    rounds, evaluations = measured["rounds"][1:], measured["evaluations"][1:]
    gpu_memory = {"peak_gpu_memory_gib": measured["gpu_memory"] / 2**30} if "gpu_memory" in measured else {}
    return gpu_memory | {
        "seconds_per_round": statistics.fmean(rounds),
        "seconds_without_evaluation": statistics.fmean(rounds) - statistics.fmean(evaluations),
        "peak_memory_gib": peak / 2**30,
        "accuracy": compute_accuracy(job, network),
        "load": load,
        "round_seconds": rounds,
        "evaluation_seconds": evaluations,
    }


def compute_accuracy(job: Job, network: nn.Module) -> float:
    """Accuracy on all test samples in percent, in which BatchNorm uses the statistics of the batch."""
    samples = np.concatenate([job.list_samples("test", client) for client in range(job.case.clients)])
    samples, correct = np.random.default_rng(0).permutation(samples), 0
    network.train()
    with torch.no_grad():
        for indices in np.array_split(samples, max(1, len(samples) // EVALUATION_BATCH)):
            x, y = job.gather(indices)
            correct += int((network(x).argmax(1) == y).sum())
    return 100 * correct / len(samples)


def find_deviations(rows: Sequence[Row], tolerance: float | None) -> list[str]:
    """Find accuracies that are far from the median of their case. Return a sentence for each."""
    sentences = []
    for case_name, case_rows in group_by_case(rows):
        limit = CASES[case_name].tolerance if tolerance is None else tolerance
        accuracies = {row["system"]: row["accuracy"] for row in case_rows if "accuracy" in row}
        for system, accuracy in accuracies.items():
            median = statistics.median(accuracies.values())
            if abs(accuracy - median) > limit:
                sentences.append(
                    f"{case_name}: {SYSTEMS[system]} has accuracy {accuracy:.1f}, but the median is {median:.1f}. The "
                    f"difference is larger than --tolerance {limit:g}, so this system trains in another way, and "
                    "its times can't be compared. Find out what differs, or set a larger tolerance."
                )
    return sentences


def group_by_case(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Group rows by case, in the order of the cases."""
    names = [name for name in CASES if any(row["case"] == name for row in rows)]
    return [(name, [row for row in rows if row["case"] == name]) for name in names]


def format_table(case_name: str, rows: Iterable[Row]) -> str:
    """Make the Markdown table of a case, with ratios to fedpipe and the reasons why systems are missing."""
    rows = list(rows)
    base: Row = next((row for row in rows if row["system"] == "fedpipe"), {})
    header = "system", "version", "s per round", "ratio", "s without evaluation", "ratio", "peak memory (GiB)"
    lines = [f"{CASES[case_name].title}:", "", f"| {' | '.join((*header, 'accuracy (%)'))} |", "|" + "---|" * 8]
    for row in rows:
        if "accuracy" not in row:
            continue
        cells = [SYSTEMS[row["system"]], row["version"]]
        for name in ("seconds_per_round", "seconds_without_evaluation"):
            cells += [f"{row[name]:.3g}", f"{row[name] / base[name]:.2f}" if name in base else "–"]
        cells += [f"{row['peak_memory_gib']:.2f}", f"{row['accuracy']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    reasons = [f"- {SYSTEMS[row['system']]}: {row['reason']}" for row in rows if "reason" in row]
    return "\n".join([*lines, *(["", "Missing:", "", *reasons] if reasons else [])])


def plot_figure(path: Path, rows: Sequence[Row]) -> None:
    """Draw the seconds of a round in each case as bars, whose dark part is the time without evaluation."""
    cases = [(name, [row for row in case_rows if "accuracy" in row]) for name, case_rows in group_by_case(rows)]
    page = style.PAGES["icml"]
    with style.use_matplotlib_style(page):
        figure = Figure(figsize=(page.width, 1.1 * len(cases) + 0.6))
        for ax, (name, case_rows) in zip(figure.subplots(len(cases), squeeze=False)[:, 0], cases, strict=True):
            labels = [SYSTEMS[row["system"]] for row in case_rows]
            total = [row["seconds_per_round"] for row in case_rows]
            ax.barh(labels, total, color=style.COLORS[6], label="evaluation")
            parts = [row["seconds_without_evaluation"] for row in case_rows]
            ax.barh(labels, parts, color=style.COLORS[0], label="without evaluation")
            for label, seconds in zip(labels, total, strict=True):
                ax.text(seconds, label, f" {seconds:.3g} s", va="center", fontsize=mpl.rcParams["xtick.labelsize"])
            ax.invert_yaxis()
            ax.grid(axis="y", visible=False)
            ax.set_xlim(0, 1.12 * max(total, default=1))
            ax.set_title(CASES[name].title)
        figure.supxlabel("Seconds per round", fontsize=page.font_size)
        handles, texts = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles[::-1], texts[::-1], loc="outside upper left", ncols=2)
        figure.savefig(path, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--case", nargs="*", choices=CASES, default=[*CASES], help="cases (default all)")
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=[*SYSTEMS], help="systems (default all)")
    parser.add_argument("--pfllib", type=Path, help="clone of PFLlib")
    parser.add_argument("--fl-bench", type=Path, help="clone of FL-bench")
    parser.add_argument("--mirror", default=os.environ.get(MIRROR_VARIABLE), help="mirror of the data sets")
    parser.add_argument("--synthetic", action="store_true", help="make images instead of reading data sets")
    parser.add_argument("--samples", type=int, help="number of samples (default all)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="number of cores (default all)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="device (default cpu)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of the samples (default 0)")
    parser.add_argument("--tolerance", type=float, help="points of accuracy (default: that of the case)")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    parser.add_argument("--figure", type=Path, help="draw the seconds per round in this file, such as peers.svg")
    return parser.parse_args()


def measure_case(case_name: str, options: argparse.Namespace) -> Iterator[Row]:
    """Measure each system in a case. The row of a missing system has the reason."""
    with tempfile.TemporaryDirectory() as folder:
        job = prepare_job(case_name, Path(folder, "job"), options)
        for system in options.system:
            row: Row = {"case": case_name, "system": system}
            if reason := explain_absence(system, options):
                yield row | {"reason": reason}
                continue
            clone = vars(options).get(system.replace("-", "_"))
            clone_path = clone and str(clone.absolute())
            yield row | {
                "version": describe_version(system, options),
                **measure_system(system, replace(job, clone=clone_path, device=options.device)),
            }


def main() -> None:
    """Measure and print."""
    options = parse_options()
    rows: list[Row] = []
    for row in itertools.chain.from_iterable(measure_case(case_name, options) for case_name in options.case):
        rows.append(row)
        print(*(f"{name}={value}" for name, value in row.items()), flush=True)
        write_json(options.json, {"machine": describe_machine(options), "rows": rows})
    deviations = find_deviations(rows, options.tolerance)
    tables = "\n\n".join(format_table(name, case_rows) for name, case_rows in group_by_case(rows))
    print(f"\n{tables}")
    if options.markdown:
        options.markdown.write_text(tables + "\n")
    if options.figure:
        plot_figure(options.figure, rows)
    failures = [f"{row['case']}: {SYSTEMS[row['system']]}. {row['reason']}" for row in rows if row.get("failed")]
    if failures or deviations:
        sys.exit("\n".join([*failures, *deviations]))


if __name__ == "__main__":
    main()
