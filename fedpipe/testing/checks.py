"""What holds for every algorithm: no executor, block or order changes a result, and all that counts is in the states.

A check takes an algorithm and gives a sentence for each breach. Federations are small and in float64, so that all that
is more than rounding is a mistake.
"""

from __future__ import annotations

import functools
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedpipe import artifacts
from fedpipe.algorithms.base import Algorithm, State, Uploads
from fedpipe.engine import contract
from fedpipe.engine.block import Block, named
from fedpipe.engine.clients import Clients
from fedpipe.engine.executor import Outcome, Phase, Test
from fedpipe.engine.loop import Loop
from fedpipe.engine.trees import size_in_bytes, stack, unstack
from fedpipe.errors import SettingsError
from fedpipe.models.mlp import MLP
from fedpipe.tensors import Tensors
from fedpipe.testing import names
from fedpipe.testing.passes import watched
from fedpipe.testing.trial import Trial, difference, make_trial, synthetic

Check = Callable[[Algorithm], list[str]]

TESTS: tuple[Test, ...] = ("local", "global")
SGD: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01}
ADAM: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.01, "weight_decay": 0.01}
ROUNDING = 1e-12  #: share of a tensor's largest entry by which float64 may differ where sums are in another order
STATISTICS = 1e-10  #: the same with batch normalization, which divides by small variances

PADDING = (
    "no number should depend on how many train at once: the samples that pad a batch are left out by batch.mean, "
    "batch.sum and batch.size, and nothing may be shared between clients"
)


def _check(body: Callable[[Algorithm], Iterator[str]]) -> Check:
    """What :data:`CHECKS` holds: a list of sentences, also of what fails on the way."""

    @functools.wraps(body)
    def check(algorithm: Algorithm) -> list[str]:
        found = []
        try:
            with contract.told(algorithm):
                found += [f"{contract.name_of(algorithm)}: {sentence}" for sentence in body(algorithm)]
        except SettingsError as error:
            found.append(str(error))
        return found

    return check


def title(check: Check) -> str:
    """What a check looks at, in a few words."""
    return check.__name__.removeprefix("check_").replace("_", " ")


def check_algorithm(algorithm: Algorithm, progress: Callable[[str, int, int], None] | None = None) -> list[str]:
    """A sentence for each breach of the contract; none where it is kept.

    Where hooks, memory or randomness are wrong already, it ends there: what compares numbers would only say the same
    again.

    Parameters
    ----------
    algorithm
        With its parameters.
    progress
        Called before each check with its title, its number and their count.
    """
    found = check_names(algorithm)
    named = len(found)
    for number, check in enumerate(CHECKS):
        if len(found) > named and check in (check_memory, check_loop_and_stack):
            break
        if progress:
            progress(title(check), number, len(CHECKS))
        found += [sentence for sentence in check(algorithm) if sentence not in found]
    return found


# -- one algorithm by itself -------------------------------------------------------------------------------------------


def check_names(algorithm: Algorithm) -> list[str]:
    """Public names that are nearly a hook's, former names, and arguments of hooks."""
    return list(names.sentences(algorithm))


@_check
def check_hooks(algorithm: Algorithm) -> Iterator[str]:
    """What each hook gives, in loop and stack: of the right kind, and of the same shapes in every round."""
    for width in (None, 3):
        trial = make_trial(watched(algorithm), width=width)
        before = trial.server
        for _ in range(2):
            trial.run(tests=TESTS)
            contract.alike(algorithm, "aggregate", trial.server, before, "init")
            for outcome in trial.outcomes:
                contract.alike(algorithm, "keep", outcome.keep, trial.initial, "init_client")
                contract.alike(algorithm, "upload", outcome.upload, trial.outcomes[0].upload, "another client")
            yield from _odd(trial)
        phases: list[Phase] = ["receive", "finetune", *(["prototype"] if algorithm.prototypes else [])]  # type: ignore[list-item]
        for phase in phases:
            trial.train([0, 1, 2], TESTS, phase)
        model = algorithm_model(trial)
        if model is not None and (lacking := [name for name in trial.net.names if name not in model]):
            yield f"global_model gives no '{lacking[0]}'; it should have all parameters of the network, or be None."


def algorithm_model(trial: Trial) -> Tensors | None:
    """The global model after the rounds so far; also asks for all else that is recorded."""
    algorithm, server = trial.algorithm, trial.server
    contract.extra_models(algorithm, algorithm.extra_models(server))
    algorithm.matrices(server)
    contract.metrics(algorithm, algorithm.metrics(server))
    return algorithm.global_model(server)


def _odd(trial: Trial) -> Iterator[str]:
    """Tensors of a round that can't be stored or counted."""
    states = {"aggregate": [trial.server], "send": list(trial.send([0]))}
    states |= {hook: [getattr(outcome, hook) for outcome in trial.outcomes] for hook in ("upload", "keep")}
    for hook, given in states.items():
        for value in pytree.tree_leaves(given):
            if value.requires_grad:
                yield f"{hook} gives a tensor with a gradient; it should be detached."
            elif value.dtype == torch.bool or value.is_complex():
                yield f"{hook} gives a tensor of {value.dtype}; it should be of floating point or of integers."
            elif not value.isfinite().all():
                yield f"{hook} gives infinity or NaN on easy data; divisions and logarithms should be kept from 0."
            else:
                continue
            break


@_check
def check_memory(algorithm: Algorithm) -> Iterator[str]:
    """What is remembered lies in the states alone: nothing on the algorithm, nothing changed in place."""
    trial = make_trial(algorithm)
    bound = cast(Loop, trial.executor)._idle
    remembered = [_remembered(worker) for worker in (trial.algorithm, *bound)]
    trial.run(1)
    before = pytree.tree_map(torch.clone, (trial.server, trial.kept))
    trial.aggregate(trial.uploads(trial.train(tests=TESTS)))
    if told := difference((trial.server, trial.kept), before):
        whose = "the server's state" if told.startswith("0") else "what clients keep"
        yield f"a round changes {whose} in place ({told}); hooks should make new tensors, as a = a + b."
    for old, new in zip(remembered, map(_remembered, (trial.algorithm, *bound)), strict=True):
        for name in new:
            if new[name] != old.get(name):
                yield (
                    f"'{name}' changes while clients train; what a client remembers should be given by `keep`, what "
                    "the server remembers by `aggregate`: nothing else is stored, sent or resumed."
                )
                return


@_check
def check_randomness(algorithm: Algorithm) -> Iterator[str]:
    """A run repeats bit by bit, whatever the global generators hold; it draws nothing from them."""
    for width in (None, 3):
        trials = []
        for seed in (1, 2):
            with _generators(seed) as drawn:
                trials.append(make_trial(algorithm, width=width).run(1 if width else 2, tests=TESTS))
            if drawn:
                yield (
                    f"random numbers are drawn from {drawn[0]}'s global generator, which no seed of the study sets; an "
                    "algorithm should leave what is random to batches, dropout and initial models."
                )
                return
        if told := difference(_all(trials[1]), _all(trials[0])):
            yield f"the same run twice gives other numbers ({told}); it should repeat bit by bit."


# -- the same numbers on every way -------------------------------------------------------------------------------------


@_check
def check_loop_and_stack(algorithm: Algorithm) -> Iterator[str]:
    """Four participants of unequal sizes: a width of 3 pads the last stack, a width of 7 the only one."""
    yield from _compared(algorithm, (3, 7), 3, **SGD)


@_check
def check_loop_and_stack_with_adam(algorithm: Algorithm) -> Iterator[str]:
    """As with SGD, where the algorithm can do with Adam."""
    if not algorithm.needs_sgd:
        yield from _compared(algorithm, (3,), 3, **ADAM)


@_check
def check_loop_and_stack_with_convolutions(algorithm: Algorithm) -> Iterator[str]:
    """Images, and layers whose layout in memory differs between loop and stack."""
    yield from _compared(algorithm, (3,), 2, model="cnn", local_epochs=1)


@_check
def check_evaluation(algorithm: Algorithm) -> Iterator[str]:
    """All clients' models before training, and fine-tuned: in loop and stack alike, on all test samples."""
    loop, other = (make_trial(algorithm, width=width).run(2) for width in (None, 3))
    everyone = range(len(loop.clients))
    phases: list[Phase] = ["receive", "finetune", *(["prototype"] if algorithm.prototypes else [])]  # type: ignore[list-item]
    for phase in phases:
        found, wanted = (trial.train(everyone, TESTS, phase) for trial in (other, loop))
        if told := difference(_results(found), _results(wanted), ROUNDING):
            yield f"in the phase '{phase}', clients in one call differ from clients one by one ({told}); {PADDING}."
        totals = [outcome.scores["local"].total for outcome in found]
        assert totals == [len(indices) for indices in loop.clients.test]
    # All clients together: one alone may have nothing to learn, as of a single class.
    received, finetuned = (
        [outcome.scores["local"].loss for outcome in loop.train(everyone[1:], ("local",), phase)]
        for phase in ("receive", "finetune")
    )
    if finetuned == received:
        yield (
            "fine-tuning leaves the personal model as it is; the passes of `finetune` should train what `predict` "
            "reads."
        )


@_check
def check_batch_normalization(algorithm: Algorithm) -> Iterator[str]:
    """Running statistics move, stay finite, and are averaged: none leaves the span of those that were there."""
    loop, other = (make_trial(algorithm, "norm", width=width) for width in (None, 3))
    fresh, held = loop.fresh(0), loop.net.buffer_names
    for _ in range(3):
        before = loop.server
        for trial in (loop, other):
            trial.run(tests=TESTS)
        for outcome in loop.outcomes:
            parts = _models(outcome.upload) + _models(outcome.keep)
            found = [(model[name], fresh[name]) for model in parts for name in held if name in model]
            if not all(value.isfinite().all() for value, _ in found):
                yield "running statistics of batch normalization become infinite or NaN."
                return
            if loop.clients.sizes[outcome.client] > 1 and all(torch.equal(value, start) for value, start in found):
                yield (
                    "running statistics of batch normalization never move; `upload` or `keep` should give the model as "
                    "training left it, buffers too."
                )
                return
        if told := _apart(other, loop, STATISTICS):
            yield f"with batch normalization, clients in one call differ from clients one by one ({told}); {PADDING}."
            return
        known = [*_models(before), *(model for sent in loop.outcomes for model in _models(sent.upload))]
        received = [loop.algorithm.traffic(_received(loop, client)) for client in range(len(loop.clients))]
        for model in [model for state in received for model in _models(state)]:
            for name in held:
                if name in model and (told := _beyond(name, model[name], known)):
                    yield told
                    return


@_check
def check_blocks(algorithm: Algorithm) -> Iterator[str]:
    """Participants in blocks, the last block first, or over two threads send the same bits."""
    for width in (None, 4):
        trial = make_trial(algorithm, width=width).run(2)
        everyone = list(range(len(trial.clients)))
        whole = trial.train(everyone, tests=("local",))
        blocks = [everyone[first : first + 3] for first in (6, 3, 0)]
        sent = [outcome for block in blocks for outcome in trial.train(block, tests=("local",))]
        if told := difference(_results(sorted(sent, key=lambda outcome: outcome.client)), _results(whole)):
            yield (
                f"clients send other bits where other clients train before or beside them ({told}); what a client does "
                "should depend on what it keeps and receives alone."
            )
            return
    one, two = (make_trial(algorithm, threads=threads).run(2, tests=("local",)) for threads in (1, 2))
    if told := difference(_all(two), _all(one)):
        yield f"two threads give other bits than one ({told}); passes should be pure functions of the client's state."


@_check
def check_order_of_uploads(algorithm: Algorithm) -> Iterator[str]:
    """The server's next state is the same in whatever order uploads come."""
    trial = make_trial(algorithm, participation=1.0).run(1)
    uploads = trial.uploads(trial.train())
    shuffled = [(3 * index + 1) % len(uploads) for index in range(len(uploads))]  # of eight, none stays in its place
    ids, weights, states = zip(*(uploads[index] for index in shuffled), strict=True)
    assert ids != uploads.ids
    if told := difference(trial.aggregate(Uploads(ids, weights, states)), trial.aggregate(uploads), ROUNDING):
        yield f"aggregate gives another state where uploads come in another order ({told}); all clients should count."


@_check
def check_resuming(algorithm: Algorithm) -> Iterator[str]:
    """A run that goes on from its files, block by block, gives the bits of one that never stopped."""
    straight, resumed = (make_trial(algorithm).run(2) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:

        def stored(tree: dict[str, Any]) -> dict[str, Any]:
            path = Path(folder) / "state.pt"
            return artifacts.read_pt(path, artifacts.write_pt(path, tree))

        resumed.server = named(stored(resumed.server))
        kept = named(stored(stack([resumed.kept[client] for client in range(len(resumed.clients))])))
        resumed.kept = {client: unstack(kept, client) for client in range(len(resumed.clients))}
        straight.run(1)
        block = Block("trial", 2, {})
        for outcome in resumed.train():
            block.add(outcome)
        read = Block.of(stored(block.tree()))
        ids = [outcome.client for outcome in straight.outcomes]
        uploads = Uploads(ids, straight.uploads(straight.outcomes).weights, read.uploads)
        found = {"server": resumed.aggregate(uploads), "keep": read.kept}
        wanted = {"server": straight.server, "keep": [outcome.keep for outcome in straight.outcomes]}
        if told := difference(found, wanted):
            yield f"a run that goes on from its files gives other bits ({told}); states should hold all that counts."


@_check
def check_traffic(algorithm: Algorithm) -> Iterator[str]:
    """The bytes counted are those of all tensors that travel; what `traffic` leaves out, nobody reads."""
    for width in (None, 3):
        trial = make_trial(algorithm, width=width).run(1)
        ids = trial.participants(2)
        outcomes = trial.train(ids)
        received = [_received(trial, client) for client in ids]
        pairs = [(outcome.down, state) for outcome, state in zip(outcomes, received, strict=True)]
        pairs += [(outcome.up, outcome.upload) for outcome in outcomes]
        own = type(trial.algorithm).traffic is not Algorithm.traffic
        for counted, state in pairs:
            travels = size_in_bytes(trial.algorithm.traffic(state))
            if counted != travels or (counted != size_in_bytes(state) if not own else counted > size_in_bytes(state)):
                yield f"{counted} bytes are counted where {size_in_bytes(state)} travel."
                return
        if own and width is None:
            yield from _left_out(trial, outcomes, received)


def _left_out(trial: Trial, outcomes: Sequence[Outcome], received: Sequence[State]) -> Iterator[str]:
    """Other values where `traffic` counts nothing change nothing."""
    states = dict(zip((outcome.client for outcome in outcomes), received, strict=True))

    def send(ids: Sequence[int]) -> tuple[State, State]:
        return {}, stack([_scrambled(trial.algorithm, states[client]) for client in ids])

    again = list(trial.executor.run("train", trial.rounds + 1, list(states), trial.kept.__getitem__, send))
    right = "it should count all tensors, or leave out what nobody reads"
    for found, wanted in zip(again, outcomes, strict=True):
        if difference((found.upload, found.keep), (wanted.upload, wanted.keep)):
            yield f"traffic leaves out a part of the download that clients read; {right}."
            return
    ids, weights = zip(*((client, weight) for client, weight, _ in trial.uploads(outcomes)), strict=True)
    scrambled = Uploads(ids, weights, [_scrambled(trial.algorithm, outcome.upload) for outcome in outcomes])
    if difference(trial.aggregate(scrambled), trial.aggregate(trial.uploads(outcomes))):
        yield f"traffic leaves out a part of the upload that the server reads; {right}."


def _scrambled(algorithm: Algorithm, state: State) -> State:
    """The state with other values in what `traffic` leaves out; single numbers, which tell how much that is, stay."""
    counted = algorithm.traffic(state)

    def other(value: Tensor, kept: Tensor | None) -> Tensor:
        if value.numel() < 2 or (kept is not None and (kept.dim() == 0 or kept.shape[1:] != value.shape[1:])):
            return value
        value, first = value.clone(), 0 if kept is None else len(kept)
        value[first:] = value[first:] * 3 + 1
        return value

    made: State = {}
    for part, value in state.items():
        kept = counted.get(part)
        if isinstance(value, Tensors):
            made[part] = Tensors((name, other(tensor, kept and kept.get(name))) for name, tensor in value.items())
        else:
            made[part] = other(value, kept)
    return made


@_check
def check_missing_classes(algorithm: Algorithm) -> Iterator[str]:
    """One class is nobody's at all, another's first owner joins in the third round; a client has a single sample."""
    clients = synthetic(labels=lambda client: [1, 2] if client in (3, 6) else [0, 1])
    right = "no class needs to have an owner, and a client may have one sample"
    for width in (None, 3):
        trial = make_trial(algorithm, clients=clients, width=width, participation=0.3)
        for ids in ([0, 1], [1, 7], [0, 3]):
            trial.run(1, ids=ids, tests=TESTS)
            sent = [(outcome.upload, outcome.keep) for outcome in trial.outcomes]
            if not all(leaf.isfinite().all() for leaf in pytree.tree_leaves([trial.server, sent])):
                yield f"states become infinite or NaN where the clients {ids} train, who lack classes; {right}."
                return
        everyone = trial.train(range(8), TESTS, "receive")
        if not all(math.isfinite(score.loss) for outcome in everyone for score in outcome.scores.values()):
            yield f"losses become infinite or NaN where clients lack classes; {right}."
            return


@_check
def check_training_on_digits(algorithm: Algorithm) -> Iterator[str]:
    """Clients that train fit their own digits better than the initial model does, and no number is NaN."""
    clients, family = _digits(), MLP(hidden=(16,))
    settings: dict[str, Any] = {"participation": 1.0, "learning_rate": 0.1, "batch_size": 10, "dtype": "float32"}
    trial = make_trial(algorithm, lambda: family.build((1, 8, 8), 10), clients, **settings)
    begin = _mean_loss(trial.train(tests=("local",), phase="begin"))
    end = _mean_loss(trial.run(3, tests=("local",)).outcomes)
    if not math.isfinite(end) or not all(leaf.isfinite().all() for leaf in pytree.tree_leaves(trial.server)):
        yield f"three rounds on handwritten digits end at a loss of {end:.3g}; no number should be infinite or NaN."
    elif end >= begin:
        yield (
            f"three rounds on handwritten digits do not help: the clients' mean loss was {begin:.3g} and is {end:.3g}; "
            "it should fall, if the parameters are right for a learning rate of 0.1."
        )


#: All of them, the causes before what follows from them.
CHECKS: tuple[Check, ...] = (
    check_names,
    check_hooks,
    check_memory,
    check_randomness,
    check_loop_and_stack,
    check_loop_and_stack_with_adam,
    check_loop_and_stack_with_convolutions,
    check_evaluation,
    check_batch_normalization,
    check_blocks,
    check_order_of_uploads,
    check_resuming,
    check_traffic,
    check_missing_classes,
    check_training_on_digits,
)


# -- what they are made of ---------------------------------------------------------------------------------------------


def _compared(
    algorithm: Algorithm, widths: Sequence[int], rounds: int, model: str = "mlp", **settings: Any
) -> Iterator[str]:
    """Rounds in the loop, beside the same rounds in stacks."""
    loop = make_trial(algorithm, model, **settings)
    stacks = [make_trial(algorithm, model, width=width, **settings) for width in widths]
    met = set()
    for _ in range(rounds):
        loop.run(tests=TESTS)
        met |= {outcome.client for outcome in loop.outcomes}
        for trial in stacks:
            trial.run(tests=TESTS)
            if told := _apart(trial, loop, ROUNDING):
                yield f"clients that train in one call differ from clients one by one ({told}); {PADDING}."
                return
    assert rounds < 3 or 0 in met, "the client with a single sample should be among the participants"


def _apart(trial: Trial, other: Trial, within: float) -> str | None:
    """Where two trials differ after a round."""
    found, wanted = (_results(side.outcomes) | {"server": side.server} for side in (trial, other))
    return difference(found, wanted, within)


def _results(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What clients sent, kept and scored, as one tree."""
    return {
        f"client {outcome.client}": {
            "upload": outcome.upload,
            "keep": outcome.keep,
            "scores": {test: tuple(score) for test, score in outcome.scores.items()},
            "bytes": (outcome.down, outcome.up),
        }
        for outcome in outcomes
    }


def _all(trial: Trial) -> dict[str, Any]:
    return _results(trial.outcomes) | {"server": trial.server, "kept": trial.kept}


def _models(state: State) -> list[Tensors]:
    return [part for part in state.values() if isinstance(part, Tensors)]


def _received(trial: Trial, client: int) -> State:
    common, own = trial.send([client])
    return common | unstack(own, 0)


def _beyond(name: str, value: Tensor, known: Sequence[Tensors]) -> str | None:
    """A statistic that is no mean of those that were known, if a sentence can be said of it."""
    right = "the server should average running statistics, and move self.net.parameters alone further than that"
    if name.endswith("running_var") and bool((value < 0).any()):
        return f"the server's '{name}' has a variance of {value.min():.3g}; {right}."
    rows = torch.cat([model[name].reshape(-1, *value.shape[-1:]) for model in known if name in model])
    low, high = rows.min(0).values, rows.max(0).values
    slack = STATISTICS * rows.abs().max()
    if bool((value < low - slack).any()) or bool((value > high + slack).any()):
        return f"the server's '{name}' lies outside of what clients sent; {right}."
    return None


def _remembered(algorithm: Algorithm) -> dict[str, Any]:
    """All that an algorithm could keep a number in: itself, its classes and their modules."""
    kinds = [kind for kind in type(algorithm).__mro__ if kind not in Algorithm.__mro__]
    found = {f"self.{name}": value for name, value in vars(algorithm).items() if name not in ("net", "federation")}
    for kind in kinds:
        cached = {name for name, value in vars(kind).items() if isinstance(value, functools.cached_property)}
        found = {name: value for name, value in found.items() if name.removeprefix("self.") not in cached}
        found |= {f"{kind.__name__}.{name}": value for name, value in vars(kind).items() if not name.startswith("__")}
        module = sys.modules.get(kind.__module__)
        own = {name: value for name, value in vars(module).items() if not name.startswith("__")} if module else {}
        found |= {f"{kind.__module__}.{name}": value for name, value in own.items()}
    return {name: _frozen(value) for name, value in found.items()}


def _frozen(value: Any) -> Any:
    """A value that compares by content where it is a number, a tensor or holds such ones, else by what it is."""
    match value:
        case Tensor():
            return (value.shape, value.detach().cpu().contiguous().view(-1).tolist())
        case np.ndarray():
            return (value.shape, value.tobytes())
        case dict():
            return {repr(name): _frozen(part) for name, part in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_frozen(part) for part in value]
        case bool() | int() | float() | str() | None:
            return value
    return id(value)


@contextmanager
def _generators(seed: int) -> Iterator[list[str]]:
    """The global generators begin at a seed, and are put back; gives the names of those that were drawn from."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    drawn: list[str] = []
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    begun: Any = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield drawn
    finally:
        if not torch.equal(torch.get_rng_state(), begun[0]):
            drawn.append("PyTorch")
        state: Any = np.random.get_state()  # noqa: NPY002
        if state[2] != begun[1][2] or not np.array_equal(state[1], begun[1][1]):
            drawn.append("NumPy")
        if random.getstate() != begun[2]:
            drawn.append("Python")
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])


def _mean_loss(outcomes: Sequence[Outcome]) -> float:
    scores = [outcome.scores["local"] for outcome in outcomes]
    return sum(score.loss for score in scores) / sum(score.total for score in scores)


@functools.cache
def _digits() -> Clients:
    """Ten clients of 30 handwritten digits each, of three kinds; 6 more to test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    train, test = [], []
    for client in range(10):
        owned = [np.flatnonzero(labels == (client + step) % 10)[12 * step : 12 * step + 12] for step in range(3)]
        train.append(np.concatenate([indices[:10] for indices in owned]))
        test.append(np.concatenate([indices[10:] for indices in owned]))
    x = torch.as_tensor(images.reshape(-1, 1, 8, 8) / 16, dtype=torch.float32)
    return Clients(x, torch.as_tensor(labels), train, test, np.concatenate(test), 10, 0)
