"""Compare fedpipe's training step with steps of other kernels, and its evaluation with larger batches.

    python benchmarks/kernels.py [--models NAME ...] [--seconds N] [--json FILE]

The benchmark uses one thread of a CPU and synthetic images. A step is loss, gradient and update, as in a client's
round. Each part has a table:

- ``compilation``: the first step with ``torch.compile`` in two processes, of which the second finds the cache of the
  first. It includes imports and the C++ compiler.
- ``training``: steps of FedAvg with ReLU in place, a fused convolution, oneDNN's linear layers, ``torch.compile`` and
  contiguous images. The fused convolution computes ReLU in its kernel. oneDNN has none that also computes the pooling.
- ``evaluation``: the score of a model on 2,500 samples, with several batch sizes.
- ``algorithms``: steps of FedDyn and FedUV, and of bare loops that compute the same gradients.

All variants run in turn for a few hundredths of a second each. The time is processor time, and a ratio is the median
over the turns. So other programs on the machine have little influence. The difference in parentheses is the largest one
of a gradient's elements, relative to the largest element. Some operations are private in PyTorch. If its version does
not have them, the cell is the error.
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from common import make_parser, measure_processor_time, write_json
from torch import Tensor, nn
from typing_extensions import override

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import Batch
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.feddyn import FedDyn
from fedpipe.algorithms.feduv import FedUV
from fedpipe.algorithms.passes import Train
from fedpipe.core.components import component, registry
from fedpipe.engine.clients import loop
from fedpipe.engine.clients.executor import ClientPass, make_client_start_state, make_initial_client_state
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.engine.torch_env.layout import optimize_layout, to_channels_last
from fedpipe.engine.torch_env.memory import retain_freed_memory
from fedpipe.engine.torch_env.numerics import configure_torch
from fedpipe.models.base import FunctionalNetwork, Model
from fedpipe.settings.federation import Federation

CLASSES, EVALUATED, TURN = 10, 2500, 0.03  #: number of classes, samples of a score, and seconds of a variant's turn
RATE = 1e-6  #: so small that the models hardly change
SIZES = (250, 500, 1000, 2500)  #: samples per call in evaluation. The first is fedpipe's

Row = dict[str, Any]  #: a text, a number, or a ratio with a difference for each column


class Case(NamedTuple):
    """A model, the shape of its images, and its batch size."""

    model: str
    shape: tuple[int, ...]
    batch: int
    parameters: dict[str, Any] = {}  # noqa: RUF012


MODELS = {
    "cnn4": Case("cnn4", (1, 28, 28), 10),
    "cnn5": Case("cnn5", (3, 32, 32), 64),
    "cnn5-norm": Case("cnn5", (3, 32, 32), 64, {"batch_norm": "convolutions"}),
    "feddw_cnn": Case("feddw_cnn", (3, 32, 32), 128),
    "resnet18": Case("resnet18", (3, 32, 32), 64),
}
ALGORITHMS: dict[str, Callable[[], Algorithm]] = {"fedavg": FedAvg, "feddyn": FedDyn, "feduv": FedUV}


class Client:
    """A client that trains on one batch, as in fedpipe's loop."""

    def __init__(self, name: str, algorithm: str = "fedavg", is_contiguous: bool = False) -> None:
        torch.manual_seed(0)
        case = MODELS[name]
        family = cast(Model, registry.build_component(component.MODEL, case.model, case.parameters))
        self.build = functools.partial(family.build, case.shape, CLASSES)
        x, y, everyone = torch.rand(EVALUATED, *case.shape), torch.randint(CLASSES, (EVALUATED,)), np.arange(EVALUATED)
        self.net = FunctionalNetwork(self.build)
        federation = Federation(clients=1, batch_size=case.batch, learning_rate=RATE)
        self.algorithm = ALGORITHMS[algorithm]().bind(self.net, federation)
        self.clients = FederatedData(x, y, [everyone], [everyone], everyone, CLASSES, 0)
        server = self.algorithm.init(lambda _: self.net.make_initial_model(0))
        kept_state = make_initial_client_state(self.algorithm, server, self.net.make_initial_model)
        info = self.clients.get_client_info(0, 1, torch.ones(()))
        self.state = make_client_start_state(self.algorithm, kept_state, self.algorithm.send(server, [0])[0], info)
        self.batch = Batch(x[: case.batch], y[: case.batch])
        if not is_contiguous:
            self.state, self.batch = optimize_layout(self.state), self.batch._replace(x=to_channels_last(self.batch.x))
        training = next(pass_ for pass_ in self.algorithm.local_passes() if isinstance(pass_, Train))
        self.client_pass = ClientPass(
            self.algorithm, training, self.state, loop._compute_gradient_and_loss, can_overwrite=True
        )
        self.state = self.client_pass.add_optimizer_state(self.state)

    def step(self) -> None:
        """Take a step."""
        with torch.no_grad():
            self.client_pass.take_step(self.state, self.batch)

    def compute_gradient(self) -> Iterable[Tensor]:
        """Compute the gradient of a step."""
        with torch.no_grad():
            return self.client_pass.compute_gradient(self.state, self.batch)[0].values()

    def score(self, batch_size: int) -> None:
        """Evaluate the model."""
        run = loop.ClientRun(self.algorithm, self.clients, 1, 0)
        with torch.no_grad(), mock.patch.object(loop, "MEASURE_BATCH", batch_size):
            run.score("train", self.state, "global")


class BareLoop:
    """Steps with only the operations of an algorithm's formula, in the layouts of a client."""

    def __init__(self, client: Client) -> None:
        self.algorithm, self.batch, self.network = client.algorithm, client.batch, client.build()
        self.parameters = list(self.network.parameters())
        self.targets = list(client.state["model"].values())
        for value, target in zip(self.parameters, self.targets, strict=True):
            value.data = target.clone(memory_format=torch.preserve_format)

    def compute_gradient(self) -> list[Tensor]:
        """Compute the gradient of FedUV's loss, or that of FedDyn with its pull and its clipping."""
        features = self.network.body(self.batch.x)
        logits = self.network.head(features)
        loss = F.cross_entropy(logits, self.batch.y)
        if isinstance(self.algorithm, FedUV):
            variance = F.relu(CLASSES**-0.5 - logits.softmax(-1).std(0)).mean()
            distances = torch.pdist(features).square()
            uniformity = (-distances / distances.median()).exp().mean()
            loss = loss + self.algorithm.variance * variance + self.algorithm.uniformity * uniformity
        gradient = list(torch.autograd.grad(loss, self.parameters))
        if isinstance(self.algorithm, FedDyn):
            with torch.no_grad():
                differences = torch._foreach_sub(self.parameters, self.targets)
                torch._foreach_add_(gradient, differences, alpha=self.algorithm.alpha)
                if (norm := torch.nn.utils.get_total_norm(gradient)) > self.algorithm.clip:
                    torch._foreach_mul_(gradient, self.algorithm.clip / norm)
        return gradient

    def step(self) -> None:
        """Take a step."""
        gradient = self.compute_gradient()
        with torch.no_grad():
            torch._foreach_add_(self.parameters, gradient, alpha=-RATE)


class FusedConvolution(torch.autograd.Function):
    """A convolution and ReLU in one kernel, and 2x2 max-pooling."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        convolve, geometry = torch.ops.mkldnn._convolution_pointwise, ([0, 0], [1, 1], [1, 1], 1)
        activations = convolve(x, weight, bias, *geometry, "relu", [], "")
        y, indices = torch.ops.aten.max_pool2d_with_indices(activations, [2, 2])
        ctx.save_for_backward(x, weight, activations, y, indices)
        return y

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, activations, y, indices = ctx.saved_tensors
        gradient, geometry = torch.ops.aten.threshold_backward(gradients[0], y, 0), ([2, 2], [2, 2], [0, 0], [1, 1])
        gradient = torch.ops.aten.max_pool2d_with_indices_backward(gradient, activations, *geometry, False, indices)
        geometry = ([len(weight)], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        return torch.ops.aten.convolution_backward(gradient, x, weight, *geometry, ctx.needs_input_grad)


class OneDNNLinear(torch.autograd.Function):
    """A linear layer whose products are oneDNN's. By default PyTorch uses MKL."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return OneDNNLinear.multiply(x, weight, bias)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,), (x, weight), multiply = gradients, ctx.saved_tensors, OneDNNLinear.multiply
        is_by_rows = weight.is_contiguous()  # the gradient has the layout of the weight
        weight_gradient = multiply(gradient.t(), x.t()) if is_by_rows else multiply(x.t(), gradient.t()).t()
        return multiply(gradient, weight.t()), weight_gradient, gradient.sum(0)

    @staticmethod
    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply ``x`` by the transposed weight."""
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))


def write_relu_in_place(network: nn.Module) -> bool:
    """Let ReLU overwrite its input. Return whether there are such layers, like the next functions."""
    layers = [layer for layer in network.modules() if isinstance(layer, nn.ReLU)]
    for layer in layers:
        layer.inplace = True
    return bool(layers)


def fuse_convolutions(network: nn.Module) -> bool:
    """Fuse convolutions that are followed by pooling and ReLU."""
    layers = list(network.modules())
    triples = [layers[i : i + 3] for i in range(len(layers)) if isinstance(layers[i], nn.Conv2d)]
    triples = [triple for triple in triples if isinstance(triple[1], nn.MaxPool2d) and isinstance(triple[2], nn.ReLU)]
    for convolution, pooling, relu in triples:
        convolution.forward = functools.partial(apply_layer, FusedConvolution, convolution)
        pooling.forward = relu.forward = nn.Identity().forward
    return bool(triples)


def replace_linear_layers(network: nn.Module) -> bool:
    """Compute linear layers with oneDNN."""
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear)]
    for layer in layers:
        layer.forward = functools.partial(apply_layer, OneDNNLinear, layer)  # type: ignore[method-assign]
    return bool(layers)


def apply_layer(function: Any, layer: nn.Module, x: Tensor) -> Tensor:
    """Apply a function with the weights of a layer."""
    return cast(Tensor, function.apply(x, layer.weight, layer.bias))


def compile_network(network: nn.Module) -> bool:
    """Compile the network at its first step, forward and backward."""
    network.compile()
    return True


VARIANTS: dict[str, Callable[[nn.Module], bool]] = {
    "ReLU in place": write_relu_in_place,
    "fused convolution": fuse_convolutions,
    "oneDNN linear": replace_linear_layers,
    "torch.compile": compile_network,
    "contiguous": lambda _: True,
}


def measure_in_turn(works: dict[str, Callable[[], None]], budget: float) -> tuple[float, dict[str, float]]:
    """Seconds of the first work, and the time of each relative to it."""
    for work in works.values():
        work()
    first = next(iter(works.values()))
    count, turns, begin = max(1, round(TURN / measure_seconds(first, 1))), [], time.thread_time()
    while len(turns) < 3 or time.thread_time() - begin < budget:
        turns.append([measure_seconds(work, count) for work in works.values()])
    ratios = np.median([[seconds / turn[0] for seconds in turn] for turn in turns], axis=0)
    return min(turn[0] for turn in turns), dict(zip(works, ratios.tolist(), strict=True))


def measure_seconds(work: Callable[[], None], count: int) -> float:
    """Processor seconds of this thread for one of ``count`` calls."""
    begin = time.thread_time()
    for _ in range(count):
        work()
    return (time.thread_time() - begin) / count


def compute_difference(gradient: Iterable[Tensor], reference: Iterable[Tensor]) -> float:
    """Compute the largest difference of elements, relative to the largest element."""
    pairs = list(zip(gradient, reference, strict=True))
    return float(max((a - b).abs().max() for a, b in pairs) / max(b.abs().max() for _, b in pairs))


def measure_training(name: str, seconds: float) -> Row:
    """Measure steps of all variants."""
    clients, row = {"fedpipe": Client(name)}, Row(model=name)
    for variant, change in VARIANTS.items():
        client, row[variant] = Client(name, is_contiguous=variant == "contiguous"), "–"
        try:
            if change(client.net._module):
                row[variant] = compute_difference(client.compute_gradient(), clients["fedpipe"].compute_gradient())
                clients[variant] = client
        except Exception as error:  # an operation is missing, or the compiler fails
            row[variant] = f"{type(error).__name__}: {error}".splitlines()[0].replace("|", "/")
    fastest, ratios = measure_in_turn({variant: client.step for variant, client in clients.items()}, seconds)
    row |= {variant: (ratios[variant], row[variant]) for variant in clients if variant != "fedpipe"}
    return {"model": name, "fedpipe (ms)": fastest * 1e3} | row


def measure_compilation(name: str, _: float) -> Row:
    """Measure the first compiled step of two processes."""
    command, row = [sys.executable, __file__, "--first-step", name], Row(model=name)
    for process_name in ("first process (s)", "second process (s)"):
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        row[process_name] = "failed" if process.returncode else float(process.stdout)
    return row


def measure_first_step(name: str) -> float:
    """Processor seconds of the first compiled step, of this process and its children."""
    client = Client(name)
    client.step()
    compile_network(client.net._module)
    processes = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    begin = measure_processor_time(*processes)
    client.step()
    return measure_processor_time(*processes) - begin


def measure_evaluation(name: str, seconds: float) -> Row:
    """Measure the score of a model, whose speed is relative to fedpipe's batches."""
    client = Client(name)
    fastest, ratios = measure_in_turn({str(size): functools.partial(client.score, size) for size in SIZES}, seconds)
    speeds = {f"batches of {size}": 1 / ratio for size, ratio in ratios.items()}
    return {"model": name, "samples/s": EVALUATED / fastest} | speeds


def measure_algorithm(name: str, seconds: float) -> Row:
    """Measure steps of an algorithm and of FedAvg on cnn4, in fedpipe and in bare loops."""
    clients = {"fedavg": Client("cnn4"), name: Client("cnn4", name)}
    bare_loops = {algorithm: BareLoop(client) for algorithm, client in clients.items()}
    difference = compute_difference(clients[name].compute_gradient(), bare_loops[name].compute_gradient())
    works = {"fedavg": clients["fedavg"].step, "step": clients[name].step}
    works |= {"bare fedavg": bare_loops["fedavg"].step, "bare step": bare_loops[name].step}
    _, ratios = measure_in_turn(works, seconds)
    return {
        "algorithm": name,
        "over FedAvg": ratios["step"],
        "bare loop over FedAvg's": ratios["bare step"] / ratios["bare fedavg"],
        "over bare loop": (ratios["step"] / ratios["bare step"], difference),
    }


#: Title of each part's table, the function that measures a row, and the rows.
PARTS: dict[str, tuple[str, Callable[[str, float], Row], Iterable[str]]] = {
    "compilation": ("Seconds of the first step with `torch.compile`:", measure_compilation, MODELS),
    "training": ("Time of a step, relative to fedpipe's, and difference of the gradient:", measure_training, MODELS),
    "evaluation": ("Speed of evaluation, relative to batches of 250:", measure_evaluation, MODELS),
    "algorithms": ("Time of a step of cnn4, and difference of the gradient:", measure_algorithm, ALGORITHMS),
}


def render_table(rows: list[Row]) -> str:
    """Render rows in Markdown."""
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([render_cell(cell) for cell in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def render_cell(cell: Any) -> str:
    """Render a text, a number, or a ratio with a difference."""
    if isinstance(cell, tuple):
        return f"{cell[0]:.2f} ({cell[1]:.0e})"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if cell >= 100 else f"{cell:.2f}"
    return str(cell)


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], help="models (default all)")
    parser.add_argument("--seconds", type=float, default=10, help="processor seconds for each row (default 10)")
    parser.add_argument("--first-step", choices=MODELS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    retain_freed_memory()
    configure_torch()
    if options.first_step:
        print(measure_first_step(options.first_step))
        return
    figures = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        for part, (title, measure, names) in PARTS.items():
            figures[part] = []
            for name in options.models if names is MODELS else names:
                figures[part].append(measure(name, options.seconds))
                print(f"{part}: {figures[part][-1]}", file=sys.stderr, flush=True)
            print(f"{title}\n\n{render_table(figures[part])}\n", flush=True)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
