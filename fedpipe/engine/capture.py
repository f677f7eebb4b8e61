"""Steps that are recorded once and then replayed: on a GPU, launching a step's kernels takes longer than they do.

A recorded step reads and writes memory of its own: a counter, the plan of a leg, and the stack's state. A replay takes
the row of the plan that the counter points to, computes the next state beside the current one, and puts it in its
place; nothing of it is on the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedpipe.algorithms.base import State
from fedpipe.engine.schedule import Feed, Row

Step = Callable[[State, Row], State]  #: a stack before and after a step
Advance = Callable[..., tuple[Tensor, ...]]  #: all buffers before and after a step
Replay = Callable[[], None]
Record = Callable[[Advance, Sequence[Tensor]], Replay]  #: a step that moves these buffers on, each time it is called


class Captured:
    """A step of a pass at one width.

    Parameters
    ----------
    step
        What it does; a pure function of its arguments and of tensors that never change.
    state
        A stack that it is for, which tells names, shapes and dtypes.
    feed
        The plan of a leg, which tells what of it there is.
    capacity
        Steps of a leg, at most.
    masked
        Whether some clients may stand still.
    record
        How it is recorded.
    """

    def __init__(self, step: Step, state: State, feed: Feed, capacity: int, masked: bool, record: Record) -> None:
        leaves, self._tree = pytree.tree_flatten(state)
        parts = [part for part in (feed.samples, feed.mask, feed.live, feed.key) if part is not None]
        self.capacity, self._leaves = capacity, len(leaves)
        self._counter = torch.zeros((), dtype=torch.int64, device=feed.samples.device)
        self._state = [torch.empty_like(leaf, memory_format=torch.contiguous_format) for leaf in leaves]
        self._plan = [part.new_zeros((capacity, *part.shape[1:])) for part in parts]

        def advance(counter: Tensor, *buffers: Tensor) -> tuple[Tensor, ...]:
            held, plan = list(buffers[: len(leaves)]), buffers[len(leaves) :]
            samples, mask, live, *key = (part.index_select(0, counter.reshape(1)).squeeze(0) for part in plan)
            row = Row(samples, mask, live if masked else None, key[0] if key else None)
            after, tree = pytree.tree_flatten(step(pytree.tree_unflatten(held, self._tree), row))
            if tree != self._tree:
                raise RuntimeError("a step changes the parts of the state")
            return (counter + 1, *after, *plan)

        self._load(leaves, parts)
        self._replay = record(advance, [self._counter, *self._state, *self._plan])

    def run(self, state: State, feed: Feed) -> State:
        """The stack after all steps of a leg."""
        leaves = pytree.tree_leaves(state)
        self._load(leaves, [part for part in (feed.samples, feed.mask, feed.live, feed.key) if part is not None])
        for _ in range(len(feed.samples)):
            self._replay()
        after: State = pytree.tree_unflatten([leaf.clone() for leaf in self._state], self._tree)
        return after

    def _load(self, leaves: Sequence[Tensor], plan: Sequence[Tensor]) -> None:
        self._counter.zero_()
        for held, leaf in zip(self._state, leaves, strict=True):
            held.copy_(leaf)
        for rows, part in zip(self._plan, plan, strict=True):
            rows[: len(part)].copy_(part)


class Library:
    """The recorded steps of a job: of each pass, at each width, with and without clients that stand still."""

    def __init__(self, record: Record) -> None:
        self._record, self._held = record, dict[Hashable, Captured]()
        self._eager = set[Hashable]()

    def run(self, name: Hashable, step: Step, state: State, feed: Feed, masked: bool) -> State | None:
        """The stack after a leg of the pass of this name; None where its step can't be recorded, which is said once."""
        if name in self._eager:
            return None
        shapes = [(leaf.shape, leaf.dtype) for leaf in pytree.tree_leaves([state, feed.samples[:0], feed.mask[:0]])]
        key = (name, masked, *shapes)
        found, steps = self._held.get(key), len(feed.samples)
        if found is None or found.capacity < steps:
            try:
                found = Captured(step, state, feed, 1 << (steps - 1).bit_length(), masked, self._record)
            except RuntimeError as error:
                reason = str(error).strip().partition("\n")[0]
                print(f"execution.graphs: {name} runs step by step; it can't be recorded ({reason})", file=sys.stderr)
                self._eager.add(name)
                return None
            self._held[key] = found
        return found.run(state, feed)


def cuda_graph() -> Record:
    """Records steps as CUDA graphs, which share their working memory, since no two are at work at once."""
    pool = torch.cuda.graph_pool_handle()

    def record(advance: Advance, buffers: Sequence[Tensor]) -> Replay:
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # kernels are chosen and libraries begun before anything is recorded
            for _ in range(2):
                advance(*buffers)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            donate(buffers, advance(*buffers))
        return graph.replay

    return record


def donate(buffers: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Put the next values in the place of the current ones."""
    for held, value in zip(buffers, after, strict=True):
        if value is not held:
            held.copy_(value)
