"""The contract of algorithms: results do not depend on executor, blocks or order, and all memory is in the states.

A check takes an algorithm and returns one message per violation. Federations are small and in float64, so that any
difference beyond rounding is an error.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import files
from fedpipe.engine import contract
from fedpipe.engine.blocks import Block, restore_state
from fedpipe.engine.clients.executor import Phase
from fedpipe.engine.clients.loop import Loop
from fedpipe.engine.torch_env.trees import size_in_bytes, stack_states, unstack_client
from fedpipe.models.mlp import MLP
from fedpipe.testing import names
from fedpipe.testing.comparisons import (
    ADAM,
    BATCH_NORM_ROUNDING,
    PADDING_ADVICE,
    ROUNDING,
    SGD,
    TESTS,
    Check,
    call_recording_hooks,
    check_omitted_parts,
    collect_all,
    collect_results,
    compare_loop_and_stacks,
    describe_trial_difference,
    explain_outlying_statistic,
    find_invalid_tensors,
    get_received_state,
    list_models,
    list_remembered_values,
    make_digit_clients,
    mean_loss,
    watch_generators,
)
from fedpipe.testing.trial import difference, make_trial, synthetic


def _make_check(body: Callable[[Algorithm], Iterator[str]]) -> Check:
    """What :data:`CHECKS` holds: a list of sentences, also of what fails on the way."""

    @functools.wraps(body)
    def check(algorithm: Algorithm) -> list[str]:
        breaches = []
        try:
            with contract.explain_user_errors(algorithm):
                breaches += [f"{contract.get_algorithm_name(algorithm)}: {sentence}" for sentence in body(algorithm)]
        except SettingsError as error:
            breaches.append(str(error))
        return breaches

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
    breaches = check_names(algorithm)
    naming_breach_count = len(breaches)
    for number, check in enumerate(CHECKS):
        if len(breaches) > naming_breach_count and check in (check_memory, check_loop_and_stack):
            break
        if progress:
            progress(title(check), number, len(CHECKS))
        breaches += [sentence for sentence in check(algorithm) if sentence not in breaches]
    return breaches


def _list_evaluation_phases(algorithm: Algorithm) -> list[Phase]:
    phases: list[Phase] = ["receive", "finetune"]
    return [*phases, "prototype"] if algorithm.has_prototype_logits else phases


# -- one algorithm by itself -------------------------------------------------------------------------------------------


def check_names(algorithm: Algorithm) -> list[str]:
    """Public names that are nearly a hook's, and arguments of hooks."""
    return list(names.find_naming_mistakes(algorithm))


@_make_check
def check_hooks(algorithm: Algorithm) -> Iterator[str]:
    """What each hook gives, in loop and stack: of the right kind, and of the same shapes in every round."""
    for width in (None, 3):
        trial = make_trial(algorithm, width=width)
        initial_server = trial.server
        for _ in range(2):
            trial.run(tests=TESTS)
            contract.require_same_structure(algorithm, "aggregate", trial.server, initial_server, "init")
            for outcome in trial.outcomes:
                contract.require_same_structure(algorithm, "keep", outcome.keep, trial.initial, "init_client")
                contract.require_same_structure(
                    algorithm, "upload", outcome.upload, trial.outcomes[0].upload, "another client"
                )
            yield from find_invalid_tensors(trial)
        for phase in _list_evaluation_phases(algorithm):
            trial.train([0, 1, 2], TESTS, phase)
        model = call_recording_hooks(trial)
        if model is not None and (missing_names := [name for name in trial.net.names if name not in model]):
            yield (
                f"global_model gives no '{missing_names[0]}'. It must have all parameters of the network, or be None."
            )


@_make_check
def check_memory(algorithm: Algorithm) -> Iterator[str]:
    """All memory is in the states: nothing on the algorithm, and nothing changed in place."""
    trial = make_trial(algorithm)
    workers = cast(Loop, trial.executor)._idle_workers
    remembered_values = [list_remembered_values(worker) for worker in (trial.algorithm, *workers)]
    trial.run(1)
    previous_states = pytree.tree_map(torch.clone, (trial.server, trial.kept))
    trial.aggregate(trial.uploads(trial.train(tests=TESTS)))
    if message := difference((trial.server, trial.kept), previous_states):
        owner = "the server's state" if message.startswith("0") else "what clients keep"
        yield f"a round changes {owner} in place ({message}); hooks should make new tensors, as a = a + b."
    for old, new in zip(remembered_values, map(list_remembered_values, (trial.algorithm, *workers)), strict=True):
        for name in new:
            if new[name] != old.get(name):
                yield (
                    f"'{name}' changes while clients train; what a client remembers should be given by `keep`, what "
                    "the server remembers by `aggregate`: nothing else is stored, sent or resumed."
                )
                return


@_make_check
def check_randomness(algorithm: Algorithm) -> Iterator[str]:
    """A run repeats bit by bit, whatever the global generators hold; it draws nothing from them."""
    for width in (None, 3):
        trials = []
        for seed in (1, 2):
            with watch_generators(seed) as used_generators:
                trials.append(make_trial(algorithm, width=width).run(1 if width else 2, tests=TESTS))
            if used_generators:
                yield (
                    f"random numbers are drawn from {used_generators[0]}'s global generator, which no seed of the "
                    "study sets; an "
                    "algorithm should leave what is random to batches, dropout and initial models."
                )
                return
        if message := difference(collect_all(trials[1]), collect_all(trials[0])):
            yield f"the same run twice gives other numbers ({message}). It must repeat bit by bit."


# -- the same numbers on every way -------------------------------------------------------------------------------------


@_make_check
def check_loop_and_stack(algorithm: Algorithm) -> Iterator[str]:
    """Four participants of unequal sizes: a width of 3 pads the last stack, a width of 7 the only one."""
    yield from compare_loop_and_stacks(algorithm, (3, 7), 3, **SGD)


@_make_check
def check_loop_and_stack_with_adam(algorithm: Algorithm) -> Iterator[str]:
    """As with SGD, where the algorithm can do with Adam."""
    if not algorithm.needs_sgd:
        yield from compare_loop_and_stacks(algorithm, (3,), 3, **ADAM)


@_make_check
def check_loop_and_stack_with_convolutions(algorithm: Algorithm) -> Iterator[str]:
    """Images, and layers whose layout in memory differs between loop and stack."""
    yield from compare_loop_and_stacks(algorithm, (3,), 2, model="cnn", local_epochs=1)


@_make_check
def check_evaluation(algorithm: Algorithm) -> Iterator[str]:
    """All clients' models before training, and fine-tuned: in loop and stack alike, on all test samples."""
    loop, other = (make_trial(algorithm, width=width).run(2) for width in (None, 3))
    all_clients = range(len(loop.clients))
    for phase in _list_evaluation_phases(algorithm):
        stack_outcomes, loop_outcomes = (trial.train(all_clients, TESTS, phase) for trial in (other, loop))
        if message := difference(collect_results(stack_outcomes), collect_results(loop_outcomes), ROUNDING):
            yield (
                f"in the phase '{phase}', clients in one call differ from clients one by one ({message}); "
                f"{PADDING_ADVICE}."
            )
        totals = [outcome.scores["local"].total for outcome in stack_outcomes]
        assert totals == [len(indices) for indices in loop.clients.test]
    # All clients together: one alone may have nothing to learn, as of a single class.
    received_outcomes, finetuned_outcomes = (
        [outcome.scores["local"].loss for outcome in loop.train(all_clients[1:], ("local",), phase)]
        for phase in ("receive", "finetune")
    )
    if finetuned_outcomes == received_outcomes:
        yield (
            "fine-tuning leaves the personal model as it is; the passes of `finetune` should train what `predict` "
            "reads."
        )


@_make_check
def check_batch_normalization(algorithm: Algorithm) -> Iterator[str]:
    """Running statistics move, stay finite, and are averaged: none leaves the span of those that were there."""
    loop, other = (make_trial(algorithm, "norm", width=width) for width in (None, 3))
    initial_model, buffer_names = loop.fresh(0), loop.net.buffer_names
    for _ in range(3):
        previous_server = loop.server
        for trial in (loop, other):
            trial.run(tests=TESTS)
        for outcome in loop.outcomes:
            models = list_models(outcome.upload) + list_models(outcome.keep)
            statistics = [
                (model[name], initial_model[name]) for model in models for name in buffer_names if name in model
            ]
            if not all(value.isfinite().all() for value, _ in statistics):
                yield "running statistics of batch normalization become infinite or NaN."
                return
            if loop.clients.sizes[outcome.client] > 1 and all(torch.equal(value, start) for value, start in statistics):
                yield (
                    "running statistics of batch normalization never move; `upload` or `keep` should give the model as "
                    "training left it, buffers too."
                )
                return
        if message := describe_trial_difference(other, loop, BATCH_NORM_ROUNDING):
            yield (
                f"with batch normalization, clients in one call differ from clients one by one ({message}); "
                f"{PADDING_ADVICE}."
            )
            return
        known_models = [
            *list_models(previous_server),
            *(model for client_outcome in loop.outcomes for model in list_models(client_outcome.upload)),
        ]
        received_states = [
            loop.algorithm.traffic(get_received_state(loop, client)) for client in range(len(loop.clients))
        ]
        for model in [model for state in received_states for model in list_models(state)]:
            for name in buffer_names:
                if name in model and (message := explain_outlying_statistic(name, model[name], known_models)):
                    yield message
                    return


@_make_check
def check_blocks(algorithm: Algorithm) -> Iterator[str]:
    """Participants in blocks, the last block first, or over two threads send the same bits."""
    for width in (None, 4):
        trial = make_trial(algorithm, width=width).run(2)
        all_clients = list(range(len(trial.clients)))
        outcomes = trial.train(all_clients, tests=("local",))
        blocks = [all_clients[first : first + 3] for first in (6, 3, 0)]
        block_outcomes = [outcome for block in blocks for outcome in trial.train(block, tests=("local",))]
        if message := difference(
            collect_results(sorted(block_outcomes, key=lambda outcome: outcome.client)), collect_results(outcomes)
        ):
            yield (
                f"clients send other bits where other clients train before or beside them ({message}); what a client "
                "does "
                "should depend on what it keeps and receives alone."
            )
            return
    one, two = (make_trial(algorithm, threads=threads).run(2, tests=("local",)) for threads in (1, 2))
    if message := difference(collect_all(two), collect_all(one)):
        yield (
            f"two threads give other bits than one ({message}); passes should be pure functions of the client's state."
        )


@_make_check
def check_order_of_uploads(algorithm: Algorithm) -> Iterator[str]:
    """The server's next state is the same in whatever order uploads come."""
    trial = make_trial(algorithm, participation=1.0).run(1)
    uploads = trial.uploads(trial.train())
    shuffled_indices = [
        (3 * index + 1) % len(uploads) for index in range(len(uploads))
    ]  # of eight, none stays in its place
    ids, weights, states = zip(*(uploads[index] for index in shuffled_indices), strict=True)
    assert ids != uploads.ids
    if message := difference(trial.aggregate(Uploads(ids, weights, states)), trial.aggregate(uploads), ROUNDING):
        yield (
            f"aggregate gives another state where uploads come in another order ({message}); all clients should count."
        )


@_make_check
def check_resuming(algorithm: Algorithm) -> Iterator[str]:
    """A run that resumes from its files, block by block, gives the bits of an uninterrupted run."""
    straight_trial, resumed_trial = (make_trial(algorithm).run(2) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:

        def store_and_read(tree: dict[str, Any]) -> dict[str, Any]:
            path = Path(folder) / "state.pt"
            return files.read_pt(path, files.write_pt(path, tree))

        resumed_trial.server = restore_state(store_and_read(resumed_trial.server))
        kept_stack = restore_state(
            store_and_read(stack_states([resumed_trial.kept[client] for client in range(len(resumed_trial.clients))]))
        )
        resumed_trial.kept = {
            client: unstack_client(kept_stack, client) for client in range(len(resumed_trial.clients))
        }
        straight_trial.run(1)
        block = Block("trial", 2, {})
        for outcome in resumed_trial.train():
            block.add(outcome)
        loaded_block = Block.from_tensors(store_and_read(block.to_tensors()))
        ids = [outcome.client for outcome in straight_trial.outcomes]
        uploads = Uploads(ids, straight_trial.uploads(straight_trial.outcomes).weights, loaded_block.uploads)
        actual = {"server": resumed_trial.aggregate(uploads), "keep": loaded_block.kept_states}
        expected = {"server": straight_trial.server, "keep": [outcome.keep for outcome in straight_trial.outcomes]}
        if message := difference(actual, expected):
            yield f"a run that goes on from its files gives other bits ({message}); states should hold all that counts."


@_make_check
def check_traffic(algorithm: Algorithm) -> Iterator[str]:
    """The counted bytes are those of all tensors that travel. Parts that `traffic` omits have no effect."""
    for width in (None, 3):
        trial = make_trial(algorithm, width=width).run(1)
        ids = trial.participants(2)
        outcomes = trial.train(ids)
        received_states = [get_received_state(trial, client) for client in ids]
        pairs = [(outcome.bytes_down, state) for outcome, state in zip(outcomes, received_states, strict=True)]
        pairs += [(outcome.bytes_up, outcome.upload) for outcome in outcomes]
        has_traffic_hook = type(trial.algorithm).traffic is not Algorithm.traffic
        for byte_count, state in pairs:
            expected_bytes = size_in_bytes(trial.algorithm.traffic(state))
            if byte_count != expected_bytes or (
                byte_count != size_in_bytes(state) if not has_traffic_hook else byte_count > size_in_bytes(state)
            ):
                yield f"{byte_count} bytes are counted where {size_in_bytes(state)} travel."
                return
        if has_traffic_hook and width is None:
            yield from check_omitted_parts(trial, outcomes, received_states)


@_make_check
def check_missing_classes(algorithm: Algorithm) -> Iterator[str]:
    """One class has no owner, another's first owner joins in the third round, and a client has one sample."""
    clients = synthetic(labels=lambda client: [1, 2] if client in (3, 6) else [0, 1])
    advice = "no class needs to have an owner, and a client may have one sample"
    for width in (None, 3):
        trial = make_trial(algorithm, clients=clients, width=width, participation=0.3)
        for ids in ([0, 1], [1, 7], [0, 3]):
            trial.run(1, ids=ids, tests=TESTS)
            client_states = [(outcome.upload, outcome.keep) for outcome in trial.outcomes]
            if not all(leaf.isfinite().all() for leaf in pytree.tree_leaves([trial.server, client_states])):
                yield f"states become infinite or NaN where the clients {ids} train, who lack classes; {advice}."
                return
        outcomes = trial.train(range(8), TESTS, "receive")
        if not all(math.isfinite(score.loss) for outcome in outcomes for score in outcome.scores.values()):
            yield f"losses become infinite or NaN where clients lack classes; {advice}."
            return


@_make_check
def check_training_on_digits(algorithm: Algorithm) -> Iterator[str]:
    """Clients that train fit their own digits better than the initial model does, and no number is NaN."""
    clients, family = make_digit_clients(), MLP(hidden=(16,))
    settings: dict[str, Any] = {"participation": 1.0, "learning_rate": 0.1, "batch_size": 10, "dtype": "float32"}
    trial = make_trial(algorithm, lambda: family.build((1, 8, 8), 10), clients, **settings)
    initial_loss = mean_loss(trial.train(tests=("local",), phase="begin"))
    final_loss = mean_loss(trial.run(3, tests=("local",)).outcomes)
    if not math.isfinite(final_loss) or not all(leaf.isfinite().all() for leaf in pytree.tree_leaves(trial.server)):
        yield (
            f"three rounds on handwritten digits end at a loss of {final_loss:.3g}; no number should be infinite or "
            "NaN."
        )
    elif final_loss >= initial_loss:
        yield (
            f"three rounds on handwritten digits do not help: the clients' mean loss was {initial_loss:.3g} and is "
            f"{final_loss:.3g}; "
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
