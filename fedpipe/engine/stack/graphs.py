"""Records steps once and replays them, because on a GPU launching kernels takes longer than running them.

A recorded step reads and writes its own memory: a counter, the plan of a step range, and the stack's state. A replay
takes the counter's row of the plan, computes the next state, and replaces the current one, without the CPU.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedpipe.algorithms.batch import State
from fedpipe.engine.stack.schedule import BatchPlan, StackBatch

StackStep = Callable[[State, StackBatch], State]  #: step of a stack
BufferUpdate = Callable[..., tuple[Tensor, ...]]  #: step of all buffers
Replay = Callable[[], None]
#: Makes a function that applies one step to the buffers.
CaptureBackend = Callable[[BufferUpdate, Sequence[Tensor]], Replay]

MAX_PLAIN_STEPS = 4  #: recording a step takes about as long as running it this often


class CapturedStep:
    """A recorded step of a pass at one width, for ranges of at most ``capacity`` steps.

    ``step`` is a pure function of its arguments and constant tensors. ``state`` and ``batch_plan`` are examples with
    names, shapes and dtypes.
    """

    def __init__(
        self,
        step: StackStep,
        state: State,
        batch_plan: BatchPlan,
        capacity: int,
        has_idle_clients: bool,
        backend: CaptureBackend,
    ) -> None:
        leaves, self._tree = pytree.tree_flatten(state)
        self.capacity, self._leaves = capacity, len(leaves)
        self._counter = torch.zeros((), dtype=torch.int64, device=batch_plan.samples.device)
        self._state = [torch.empty_like(leaf, memory_format=torch.contiguous_format) for leaf in leaves]
        self._plan = [tensor.new_zeros((capacity, *tensor.shape[1:])) for tensor in batch_plan.tensors]

        def advance_one_step(counter: Tensor, *buffers: Tensor) -> tuple[Tensor, ...]:
            state_leaves, plan = list(buffers[: len(leaves)]), buffers[len(leaves) :]
            samples, mask, live, *noise_keys = (
                tensor.index_select(0, counter.reshape(1)).squeeze(0) for tensor in plan
            )
            stack_batch = StackBatch(
                samples, mask, live if has_idle_clients else None, noise_keys[0] if noise_keys else None
            )
            new_leaves, tree = pytree.tree_flatten(step(pytree.tree_unflatten(state_leaves, self._tree), stack_batch))
            if tree != self._tree:
                raise RuntimeError("a step adds or removes parts of the state")
            return (counter + 1, *new_leaves, *plan)

        self._load_buffers(state, batch_plan)
        self._replay = backend(advance_one_step, [self._counter, *self._state, *self._plan])

    def run_steps(self, state: State, batch_plan: BatchPlan) -> State:
        """Run all steps of a range."""
        self._load_buffers(state, batch_plan)
        for _ in range(len(batch_plan.samples)):
            self._replay()
        return pytree.tree_unflatten([leaf.clone() for leaf in self._state], self._tree)

    def _load_buffers(self, state: State, batch_plan: BatchPlan) -> None:
        self._counter.zero_()
        for buffer, leaf in zip(self._state, pytree.tree_leaves(state), strict=True):
            buffer.copy_(leaf)
        for rows, tensor in zip(self._plan, batch_plan.tensors, strict=True):
            rows[: len(tensor)].copy_(tensor)


class GraphCache:
    """The recorded steps of a job, by pass, width, and idle clients."""

    def __init__(self, backend: CaptureBackend) -> None:
        self._backend, self._captured_steps = backend, dict[Hashable, CapturedStep]()
        self._eager_names, self._step_counts = set[Hashable](), Counter[Hashable]()

    def run_step_range(
        self, name: Hashable, step: StackStep, state: State, batch_plan: BatchPlan, has_idle_clients: bool
    ) -> State | None:
        """Run a step range of a pass. None if its step is not recorded, with one warning if it can't be.

        A step first runs up to :data:`MAX_PLAIN_STEPS` times. So short ranges lose no time, also if a learning-rate
        schedule discards all recorded steps after each round.
        """
        if name in self._eager_names:
            return None
        shapes = [
            (leaf.shape, leaf.dtype)
            for leaf in pytree.tree_leaves([state, batch_plan.samples[:0], batch_plan.mask[:0]])
        ]
        key = (name, has_idle_clients, *shapes)
        captured_step, steps = self._captured_steps.get(key), len(batch_plan.samples)
        if captured_step is None or captured_step.capacity < steps:
            self._step_counts[key] += steps
            if self._step_counts[key] <= MAX_PLAIN_STEPS:
                return None
            try:
                captured_step = CapturedStep(
                    step, state, batch_plan, 1 << (steps - 1).bit_length(), has_idle_clients, self._backend
                )
            except RuntimeError as error:
                reason = str(error).strip().partition("\n")[0]
                print(f"execution.graphs: {name} can't be recorded and runs step by step ({reason}).", file=sys.stderr)
                self._eager_names.add(name)
                return None
            self._captured_steps[key] = captured_step
        return captured_step.run_steps(state, batch_plan)


def make_cuda_graph_backend() -> CaptureBackend:
    """Make a backend that records steps as CUDA graphs, which share working memory."""
    pool = torch.cuda.graph_pool_handle()

    def capture_graph(advance_one_step: BufferUpdate, buffers: Sequence[Tensor]) -> Replay:
        side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):  # select kernels and initialize libraries before recording
            for _ in range(2):
                advance_one_step(*buffers)
        torch.cuda.current_stream().wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            overwrite_buffers(buffers, advance_one_step(*buffers))
        return graph.replay

    return capture_graph


def overwrite_buffers(buffers: Sequence[Tensor], new_values: Sequence[Tensor]) -> None:
    """Copy the next values into the current ones."""
    for buffer, value in zip(buffers, new_values, strict=True):
        if value is not buffer:
            buffer.copy_(value)
