"""Compare rounds of FedAvg in fedpipe, PFLlib, FL-bench, fluke and Flower's simulation, one system after the other.

    pip install fluke-fl "flwr[simulation]"
    python benchmarks/peers.py --pfllib CLONE --fl-bench CLONE --json FILE --markdown FILE --figure FILE.svg

All systems train the same PyTorch module from the same initial weights, on the same samples of the same clients, with
the same participants, batch size and learning rate. Every (case, system) pair runs in its own process: one round for
warming up, and ``--rounds`` measured rounds. Each system has the evaluation of its default settings, which differs
(see the functions ``run_...``). The column "without evaluation" is the time of a round minus that of the evaluation.
Peak memory is the largest sum over the process and its children, in which shared pages count once. Accuracy is that of
the final global model on all test samples, computed by this program. Models are normalized by the statistics of a
batch there, because PFLlib doesn't average running statistics. The program fails if an accuracy is more than
``--tolerance`` points from the median.

fluke and Flower are installed packages. PFLlib (github.com/TsingZ0/PFLlib) and FL-bench (github.com/KarhouTam/FL-bench)
are clones, which are not changed. The Python of this program needs the packages that they import. A missing system has
no numbers, and the table gives the reason. Images come from ``--mirror``, the cache or their publisher, or they are
``--synthetic``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import json
import os
import pickle
import platform
import random
import runpy
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedpipe
from fedpipe.core.storage import files as storage_files
from fedpipe.core.storage.layout import RunFiles
from fedpipe.data.assignment import Assignment, assign_samples
from fedpipe.data.datasets.base import PublishedImages
from fedpipe.data.datasets.cifar10 import CIFAR10
from fedpipe.data.datasets.mnist import MNIST
from fedpipe.data.partitions.base import Scheme
from fedpipe.data.partitions.dirichlet import Dirichlet
from fedpipe.data.partitions.iid import IID
from fedpipe.data.sources.fetch import MIRROR_VARIABLE, Fetcher
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.run import Run
from fedpipe.models.base import Model, Network
from fedpipe.models.cnn4 import CNN4
from fedpipe.models.mlp import MLP
from fedpipe.models.resnet18 import ResNet18
from fedpipe.planning.run_settings import RunSettings
from fedpipe.settings.execution import Execution
from fedpipe.settings.parser import parse_params
from fedpipe.settings.transforms import Transforms

CLASSES = 10
SYSTEMS = {"fedpipe": "fedpipe", "pfllib": "PFLlib", "fl-bench": "FL-bench", "fluke": "fluke", "flower": "Flower"}
CLONES = {"pfllib": "system/main.py", "fl-bench": "src/server/fedavg.py"}  #: systems with a clone, and a file in it
PACKAGES = {"fluke": "fluke-fl", "flower": "flwr", "ray": "ray", "torch": "torch"}


class Case(NamedTuple):
    """A data set, its partition and the settings of FedAvg."""

    title: str
    dataset: PublishedImages
    scheme: Scheme
    model: Model
    clients: int
    participation: float
    batch_size: int
    learning_rate: float


CASES = {
    "mnist": Case(
        "MNIST, Dir(0.1), 20 clients, cnn4, batches of 10",
        *(MNIST(), Dirichlet(alpha=0.1, minimum=40), CNN4(), 20, 1.0, 10, 0.005),
    ),
    "cifar10": Case(
        "CIFAR-10, Dir(0.5), 10 of 100 clients, ResNet-18, batches of 64",
        *(CIFAR10(), Dirichlet(alpha=0.5, minimum=40), ResNet18(), 100, 0.1, 64, 0.05),
    ),
    "clients": Case(
        "MNIST, IID, 10 of 1,000 clients, mlp, batches of 10", *(MNIST(), IID(), MLP(), 1000, 0.01, 10, 0.1)
    ),
}


def read_images(case: Case, mirror: str | None) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images in bytes and classes of a case's data set."""
    dataset, fetcher = case.dataset, Fetcher(mirror)
    sha256 = dataset.find_missing_sha256(fetcher)  # of the mirror's substitute file, if there is one
    samples = (replace(dataset, sha256=sha256) if sha256 else dataset).load(fetcher)
    return samples.x, samples.y


def make_synthetic_images(case: Case) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images of the data set's shape and number, which are the noisy template of their class."""
    rng, count = np.random.default_rng(0), case.dataset.size
    labels = rng.integers(0, CLASSES, count)
    templates = rng.integers(0, 128, (CLASSES, *case.dataset.shape), np.uint8)
    return templates[labels] + rng.integers(0, 128, (count, *case.dataset.shape), np.uint8), labels


@dataclass
class Job:
    """The files that a process trains on, and its results."""

    folder: str
    case_name: str
    rounds: int  #: measured rounds
    threads: int
    clone: str | None = None

    @property
    def case(self) -> Case:
        """The job's case."""
        return CASES[self.case_name]

    @functools.cached_property
    def arrays(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """All images in bytes, which are read when they are used, and all classes."""
        return np.load(Path(self.folder, "x.npy"), mmap_mode="r"), np.load(Path(self.folder, "y.npy"))

    @functools.cached_property
    def plan(self) -> dict[str, Any]:
        """Samples of each client, participants of each round, and the initial parameters."""
        return dict(torch.load(Path(self.folder, "plan.pt"), weights_only=True))

    def list_samples(self, part: str, client: int) -> np.ndarray[Any, Any]:
        """Indices of a client's samples for "train" or "test"."""
        indices: np.ndarray[Any, Any] = self.plan[part][client].numpy()
        return indices

    def gather(self, indices: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
        """Images with values in [-1, 1], and classes."""
        x, y = self.arrays
        return torch.from_numpy(x[indices]).float() / 127.5 - 1, torch.from_numpy(y[indices])

    def build_network(self) -> Network:
        """Build the initial network as a plain PyTorch module."""
        network = self.case.model.build(self.case.dataset.shape, CLASSES)
        load_parameters(network, self.plan["initial"])
        for module in network.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = True
        return network


def load_parameters(network: nn.Module, values: Sequence[Tensor]) -> None:
    """Load trained parameters in the network's order."""
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), values, strict=True):
            parameter.copy_(value)


class Clock:
    """Seconds of each round, and of the evaluation in it."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.evaluations: list[float] = []
        self._begin = self._evaluation = self._evaluation_begin = 0.0

    def begin_round(self, *_: Any) -> None:
        """Begin a round."""
        self._begin, self._evaluation = time.perf_counter(), 0.0

    def end_round(self, *_: Any) -> None:
        """End a round."""
        self.rounds.append(time.perf_counter() - self._begin)
        self.evaluations.append(self._evaluation)

    def begin_evaluation(self, *_: Any) -> None:
        """Begin an evaluation."""
        self._evaluation_begin = time.perf_counter()

    def end_evaluation(self, *_: Any) -> None:
        """End an evaluation."""
        self._evaluation += time.perf_counter() - self._evaluation_begin


def add_hooks(
    owner: Any, name: str, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> None:
    """Call other functions before and after a method, with its arguments."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if before:
            before(*args)
        result = function(*args, **kwargs)
        if after:
            after(*args)
        return result

    setattr(owner, name, call)


def open_run(folder: Path, job: Job) -> Run:
    """Open fedpipe's run in an empty folder, with the default evaluation."""
    case = job.case
    federation = {"clients": case.clients, "participation": case.participation, "batch_size": case.batch_size}
    params = parse_params(
        {
            "dataset": {"name": "mnist"},
            "model": {"name": type(case.model).__name__.lower()},
            "federation": federation | {"learning_rate": case.learning_rate},
            "algorithms": {"fedavg": {}},
            "study": {"algorithms": ["fedavg"]},
        }
    )
    settings = RunSettings.from_params(params, "fedavg", seed=0)
    run_files = RunFiles(folder / settings.key)
    storage_files.write_bytes(run_files.settings, settings.to_yaml().encode())
    train, test = (
        [job.list_samples(part, client) for client in range(case.clients)] for part in ("train", "test")
    )
    x, y = map(torch.from_numpy, (np.array(job.arrays[0]), job.arrays[1]))
    transforms = Transforms(mean=(0.5,), std=(0.5,))
    clients = FederatedData(x, y, train, test, np.sort(np.concatenate(test)), CLASSES, 0, transforms=transforms)
    return Run(run_files, Execution(device="cpu"), job.threads, clients=clients)


def run_fedpipe(job: Job, clock: Clock) -> Sequence[Tensor]:
    """Run fedpipe, which evaluates the global model on all test samples after each round."""
    run = open_run(Path("runs"), job)
    for number in run.run_segment(job.rounds + 1):
        if number:
            clock.end_round()
            clock.evaluations[-1] = storage_files.read_json(run.files.round(number).times)["evaluate"]
        clock.begin_round()
    server = run.load_server_state(job.rounds + 1)
    return list(run.algorithm.net.parameters(run.algorithm.global_model(server)).values())


class PFLlibNetwork(nn.Module):
    """The network with PFLlib's name of the head."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.body, self.fc = network.body, network.head

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, C)."""
        logits: Tensor = self.fc(self.body(x))
        return logits


def run_pfllib(job: Job, clock: Clock) -> Sequence[Tensor]:
    """Run PFLlib, which evaluates the global model on all test and training samples before each round.

    It omits the last, smaller batch of a client.
    """
    shutil.copytree(Path(str(job.clone), "system"), "system")
    for part in ("train", "test"):
        data = Path("dataset/MNIST", part)
        data.mkdir(parents=True)
        for client in range(job.case.clients):
            x, y = job.gather(job.list_samples(part, client))
            np.savez(data / str(client), data=np.array({"x": x.numpy(), "y": y.numpy()}))
    os.chdir("system")
    sys.path.insert(0, str(Path.cwd()))
    models = importlib.import_module("flcore.trainmodel.models")
    server_class = importlib.import_module("flcore.servers.serveravg").FedAvg
    models.FedAvgCNN = lambda **_: PFLlibNetwork(job.build_network())  # type: ignore[attr-defined]
    schedule, servers = iter(job.plan["schedule"]), []

    def select_clients(server: Any) -> list[Any]:
        clock.begin_round()
        servers.append(server)
        return [server.clients[client] for client in next(schedule)]

    server_class.select_clients = select_clients
    add_hooks(server_class, "evaluate", clock.begin_evaluation, clock.end_evaluation)
    add_hooks(server_class, "aggregate_parameters", after=clock.end_round)
    case = job.case
    sys.argv = ["main.py", "-data", "MNIST", "-m", "CNN", "-algo", "FedAvg", "-dev", "cpu", "-gr", str(job.rounds)]
    sys.argv += ["-nc", str(case.clients), "-jr", str(case.participation)]
    sys.argv += ["-lbs", str(case.batch_size), "-lr", str(case.learning_rate)]
    runpy.run_path("main.py", run_name="__main__")  # it runs one more round, which is for warming up
    return list(servers[-1].global_model.parameters())


def run_fl_bench(job: Job, clock: Clock) -> Sequence[Tensor]:
    """Run FL-bench in one process, which evaluates each participant on its test samples before and after training."""
    case, name = job.case, "cifar10" if job.case_name == "cifar10" else "mnist"
    shutil.copytree(str(job.clone), "clone", ignore=shutil.ignore_patterns(".git", "out", "raw", "*.pkl"))
    os.chdir("clone")
    sys.path.insert(0, str(Path.cwd()))
    folder, everyone = Path("data", name), list(range(case.clients))
    folder.mkdir(exist_ok=True)
    (folder / "args.json").write_text(json.dumps({"split": "sample"}))
    samples = [{part: job.list_samples(part, client) for part in ("train", "test")} for client in everyone]
    partition = {
        "separation": {"train": everyone, "test": everyone, "val": everyone, "total": case.clients},
        "data_indices": [indices | {"val": np.empty(0, np.int64)} for indices in samples],
    }
    (folder / "partition.pkl").write_bytes(pickle.dumps(partition))
    module = importlib.import_module("src.server.fedavg")
    datasets = importlib.import_module("data.utils.datasets")
    models = importlib.import_module("src.utils.models")

    class Pixels(datasets.BaseDataset):  # type: ignore[misc, name-defined]
        def __init__(self, root: Path, args: Any, **transforms: Any) -> None:
            x, y = job.arrays
            super().__init__(torch.from_numpy(x / np.float32(255)), torch.from_numpy(y), list(range(CLASSES)), **transforms)

    class Decoupled(models.DecoupledModel):  # type: ignore[misc, name-defined]
        def __init__(self, dataset: str, pretrained: bool) -> None:
            super().__init__()
            network = job.build_network()
            self.base, self.classifier = network.body, network.head

    module.DATASETS[name], module.MODELS["peers"] = Pixels, Decoupled
    for constants in (module.DATA_MEAN, module.DATA_STD):
        constants[name] = [0.5] * case.dataset.shape[0]
    servers = []

    def begin_training(server: Any) -> None:
        servers.append(server)
        server.client_sample_stream = job.plan["schedule"]

    add_hooks(module.FedAvgServer, "train", begin_training)
    add_hooks(module.FedAvgServer, "train_one_round", clock.begin_round, clock.end_round)
    add_hooks(module.FedAvgClient, "evaluate", clock.begin_evaluation, clock.end_evaluation)
    sys.argv = ["main.py", "method=fedavg", f"dataset.name={name}", "model.name=peers", f"optimizer.lr={case.learning_rate}"]
    common = {"join_ratio": case.participation, "global_epoch": job.rounds + 1, "local_epoch": 1, "use_cuda": "false"}
    common["batch_size"] = case.batch_size
    sys.argv += [f"common.{key}={value}" for key, value in common.items()]
    runpy.run_path("main.py", run_name="__main__")
    return [value for value in servers[-1].model.parameters() if value.requires_grad]


class FlukeSplitter:
    """Data loaders of fluke."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def assign(self, clients: int, batch_size: int) -> tuple[tuple[list[Any], list[Any]], Any]:
        """Make the loaders of the clients for training and testing, and that of the server."""
        make_loader = importlib.import_module("fluke.data").FastDataLoader

        def load(indices: np.ndarray[Any, Any], size: int, shuffle: bool) -> Any:
            return make_loader(*self.job.gather(indices), num_labels=CLASSES, batch_size=size, shuffle=shuffle)

        train, test = (
            [self.job.list_samples(part, client) for client in range(clients)] for part in ("train", "test")
        )
        loaders = [load(indices, batch_size, True) for indices in train], [load(indices, batch_size, False) for indices in test]
        return loaders, load(np.concatenate(test), 128, False)


def run_fluke(job: Job, clock: Clock) -> Sequence[Tensor]:
    """Run fluke, whose server evaluates the global model on all test samples after each round."""
    fluke = importlib.import_module("fluke")
    algorithms = importlib.import_module("fluke.algorithms.fedavg")
    evaluation = importlib.import_module("fluke.evaluation")
    environment, case = fluke.FlukeENV(), job.case
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_evaluator(evaluation.ClassificationEval(eval_every=1, n_classes=CLASSES))
    client = {"batch_size": case.batch_size, "local_epochs": 1, "loss": "CrossEntropyLoss"}
    client |= {"optimizer": {"name": "SGD", "lr": case.learning_rate}}
    client |= {"scheduler": {"name": "StepLR", "gamma": 1, "step_size": 1}}
    settings = {"client": client, "server": {"weighted": True}, "model": job.build_network()}
    federation = algorithms.FedAVG(case.clients, FlukeSplitter(job), fluke.DDict(settings))
    schedule = iter(job.plan["schedule"])

    def select_clients(_: float) -> list[Any]:
        clock.begin_round()
        return [federation.clients[client] for client in next(schedule)]

    federation.server.get_eligible_clients = select_clients
    add_hooks(evaluation.ClassificationEval, "evaluate", clock.begin_evaluation, clock.end_evaluation)
    add_hooks(federation, "_compute_evaluation", after=clock.end_round)
    federation.finalize = environment.close_cache  # without another evaluation after the last round
    federation.run(job.rounds + 1, case.participation)
    return list(federation.server.model.parameters())


@functools.lru_cache(maxsize=1)
def read_job(path: Path) -> Job:
    """Read a job, once per process."""
    torch.set_num_threads(1)  # each of Flower's actors has one core
    return Job(**json.loads(path.read_text()))


def make_client_app(job_file: Path) -> Any:
    """Make Flower's client, in the form of its tutorial."""
    app = importlib.import_module("flwr.app")
    client_app = importlib.import_module("flwr.clientapp").ClientApp()

    def load(message: Any, client: int, part: str) -> tuple[Network, Any]:
        job = read_job(job_file)
        network = job.build_network()
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        data = torch.utils.data.TensorDataset(*job.gather(job.list_samples(part, client)))
        return network, torch.utils.data.DataLoader(data, job.case.batch_size, shuffle=part == "train")

    def reply(message: Any, loader: Any, **records: Any) -> Any:
        metrics = app.MetricRecord({"num-examples": len(loader.dataset), **records.pop("metrics", {})})
        return app.Message(content=app.RecordDict({"metrics": metrics, **records}), reply_to=message)

    @client_app.train()  # type: ignore[untyped-decorator]
    def train(message: Any, context: Any) -> Any:
        network, loader = load(message, int(message.content["config"]["client"]), "train")
        optimizer = torch.optim.SGD(network.parameters(), lr=read_job(job_file).case.learning_rate)
        network.train()
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
        return reply(message, loader, arrays=app.ArrayRecord(network.state_dict()))

    @client_app.evaluate()  # type: ignore[untyped-decorator]
    def evaluate(message: Any, context: Any) -> Any:
        network, loader = load(message, int(context.node_config["partition-id"]), "test")
        network.eval()
        with torch.no_grad():
            correct = sum(int((network(x).argmax(1) == y).sum()) for x, y in loader)
        return reply(message, loader, metrics={"accuracy": correct / len(loader.dataset)})

    return client_app


def run_flower(job: Job, clock: Clock) -> Sequence[Tensor]:
    """Run Flower's simulation with an actor per core. After each round, every client evaluates the global model."""
    app, serverapp = importlib.import_module("flwr.app"), importlib.import_module("flwr.serverapp")
    strategies = importlib.import_module("flwr.serverapp.strategy")
    simulation = importlib.import_module("flwr.simulation")
    case, results = job.case, []

    class Strategy(strategies.FedAvg):  # type: ignore[misc, name-defined]
        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
            clock.begin_round()
            nodes, participants = sorted(grid.get_node_ids()), job.plan["schedule"][server_round - 1]
            configs = [app.ConfigRecord({"client": client}) for client in participants]
            return [
                app.Message(app.RecordDict({"arrays": arrays, "config": config}), nodes[index], "train")
                for index, config in enumerate(configs)
            ]

    add_hooks(Strategy, "aggregate_train", after=clock.begin_evaluation)
    add_hooks(Strategy, "aggregate_evaluate", None, lambda *_: (clock.end_evaluation(), clock.end_round()))
    server_app = serverapp.ServerApp()

    @server_app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        arrays = app.ArrayRecord(job.build_network().state_dict())
        results.append(Strategy().start(grid, arrays, job.rounds + 1).arrays)

    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": job.threads}}
    client_app = make_client_app(Path(job.folder, "flower.job.json"))
    simulation.run_simulation(server_app, client_app, case.clients, backend_config=backend)
    network = job.build_network()
    network.load_state_dict(results[0].to_torch_state_dict())
    return list(network.parameters())


RUNNERS: dict[str, Callable[[Job, Clock], Sequence[Tensor]]] = {
    "fedpipe": run_fedpipe,
    "pfllib": run_pfllib,
    "fl-bench": run_fl_bench,
    "fluke": run_fluke,
    "flower": run_flower,
}


def run_worker(system: str, job_file: str) -> None:
    """Run one system in this process, in an empty current folder, and write its results."""
    job, clock = Job(**json.loads(Path(job_file).read_text())), Clock()
    torch.set_num_threads(job.threads)
    results = Path(job.folder).absolute() / system
    parameters = RUNNERS[system](job, clock)
    torch.save([value.detach().cpu().clone() for value in parameters], results.with_suffix(".pt"))
    results.with_suffix(".json").write_text(json.dumps({"rounds": clock.rounds, "evaluations": clock.evaluations}))


def prepare_job(case_name: str, folder: Path, options: argparse.Namespace) -> Job:
    """Write the samples, the partition, the participants and the initial parameters of a case."""
    case = CASES[case_name]
    x, y = make_synthetic_images(case) if options.synthetic else read_images(case, options.mirror)
    chosen = np.sort(np.random.default_rng(0).permutation(len(y))[: options.samples])
    x, y = x[chosen], y[chosen]
    folder.mkdir()
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    table = assign_samples(case.scheme, y, np.zeros(len(y), bool), case.clients, "pooled", 0.25, seed=0)
    assignment = Assignment.from_table(table)
    # BatchNorm can't train on a batch of one sample, so that systems omit it or fail.
    train = [samples[: len(samples) - (len(samples) % case.batch_size == 1)] for samples in assignment.train]
    plan: dict[str, Any] = {"train": list(map(torch.from_numpy, train))}
    plan["test"] = list(map(torch.from_numpy, assignment.test))
    torch.save(plan, folder / "plan.pt")
    job = Job(str(folder), case_name, options.rounds, options.threads)
    run = open_run(folder / "unused", job)
    plan["schedule"] = [run.participants(number) for number in range(1, options.rounds + 2)]
    plan["initial"] = list(run.algorithm.net.parameters(run.make_initial_model(0)).values())
    torch.save(plan, folder / "plan.pt")
    return Job(str(folder), case_name, options.rounds, options.threads)


def measure_memory(process: psutil.Process) -> int:
    """Bytes of a process and its children, in which shared pages count once."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += member.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has just ended
    return total


def explain_absence(system: str, options: argparse.Namespace) -> str | None:
    """Reason why a system can't run here. None if it can."""
    if system in CLONES:
        option = f"--{system}"
        clone = vars(options)[system.replace("-", "_")]
        if clone is None:
            return f"{option} is missing. Name a clone of {SYSTEMS[system]} there."
        if not (clone / CLONES[system]).is_file():
            return f"{option}: {clone} is not a clone of {SYSTEMS[system]}, because {CLONES[system]} is missing."
    for module in {"fluke": ["fluke"], "flower": ["flwr", "ray"]}.get(system, []):
        try:
            importlib.metadata.version(PACKAGES.get(module, module))
        except importlib.metadata.PackageNotFoundError:
            return f"The package {PACKAGES.get(module, module)} is not installed."
    return None


def run_system(system: str, job: Job) -> dict[str, Any]:
    """Run a system in its own process. Return its measurements, or the reason why it failed."""
    job_file, log = Path(job.folder, f"{system}.job.json"), Path(job.folder, f"{system}.log")
    job_file.write_text(json.dumps(asdict(job)))
    work = Path(job.folder, f"{system}.work")
    work.mkdir()
    paths = [str(Path(__file__).absolute().parent), str(Path(fedpipe.__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(job.threads)}
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0", "FLWR_HOME": str(work)}
    command = [sys.executable, "-c", f"import peers; peers.run_worker({system!r}, {str(job_file)!r})"]
    peak, load = 0, os.getloadavg()[0]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=work, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            while process.poll() is None:
                peak = max(peak, measure_memory(psutil.Process(process.pid)))
                time.sleep(0.2)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # children that outlive it
    if process.returncode:
        lines = log.read_text().strip().splitlines()
        print(*lines[-30:], sep="\n", file=sys.stderr)
        return {"reason": f"It failed: {lines[-1] if lines else f'exit code {process.returncode}'}"}
    measured = json.loads(Path(job.folder, f"{system}.json").read_text())
    network = job.build_network()
    load_parameters(network, torch.load(Path(job.folder, f"{system}.pt"), weights_only=True))
    rounds, evaluations = measured["rounds"][1:], measured["evaluations"][1:]
    return {
        "seconds_per_round": statistics.fmean(rounds),
        "seconds_without_evaluation": statistics.fmean(rounds) - statistics.fmean(evaluations),
        "peak_memory_gib": peak / 2**30,
        "accuracy": compute_accuracy(job, network),
        "load": load,
        **measured,
    }


def compute_accuracy(job: Job, network: nn.Module) -> float:
    """Accuracy on all test samples in percent, with BatchNorm's statistics of a batch."""
    samples = np.concatenate([job.list_samples("test", client) for client in range(job.case.clients)])
    samples, correct = np.random.default_rng(0).permutation(samples), 0
    network.train()
    with torch.no_grad():
        for indices in np.array_split(samples, max(1, len(samples) // 500)):
            x, y = job.gather(indices)
            correct += int((network(x).argmax(1) == y).sum())
    return 100 * correct / len(samples)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=[*CASES], help="cases (default all)")
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=[*SYSTEMS], help="systems (default all)")
    parser.add_argument("--pfllib", type=Path, help="clone of PFLlib")
    parser.add_argument("--fl-bench", type=Path, help="clone of FL-bench")
    parser.add_argument("--mirror", default=os.environ.get(MIRROR_VARIABLE), help="mirror of the data sets")
    parser.add_argument("--synthetic", action="store_true", help="make images instead of reading data sets")
    parser.add_argument("--samples", type=int, help="number of samples (default all)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="number of cores (default all)")
    parser.add_argument("--tolerance", type=float, default=5.0, help="points of accuracy (default 5)")
    parser.add_argument("--json", type=Path, help="write all numbers to this file, after each system")
    options = parser.parse_args()
    reasons = {system: explain_absence(system, options) for system in options.system}
    rows = []
    for case_name in options.case:
        with tempfile.TemporaryDirectory() as folder:
            job = prepare_job(case_name, Path(folder, "job"), options)
            for system in options.system:
                clone = vars(options).get(system.replace("-", "_"))
                system_job = replace(job, clone=clone and str(clone.absolute()))
                reason = reasons[system]
                row = {"reason": reason} if reason else run_system(system, system_job)
                rows.append({"case": case_name, "system": system} | row)
                print(rows[-1], flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
