"""The contract of algorithms: results do not depend on executor, blocks or order, and all memory is in the states.

A check takes an algorithm and returns one message per violation. Federations are small and in float64, so that any
difference beyond rounding is an error.
"""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import State
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import files
from fedpipe.engine import contract
from fedpipe.engine.blocks import Block, convert_tree_to_state
from fedpipe.engine.clients.executor import Phase
from fedpipe.engine.clients.loop import LoopExecutor
from fedpipe.engine.torch_env.trees import count_bytes, move_state, stack_states, unstack_client
from fedpipe.engine.user_errors import explain_user_errors, format_check_advice
from fedpipe.models.mlp import MLP
from fedpipe.planning import hook_names
from fedpipe.testing.comparisons import (
    ADAM,
    BATCH_NORM_ROUNDING,
    PADDING_ADVICE,
    ROUNDING,
    SGD,
    TESTS,
    Check,
    call_recorded_hooks,
    check_omitted_parts,
    collect_client_results,
    collect_results_and_states,
    compare_loop_and_stacks,
    compute_mean_loss,
    describe_trial_difference,
    explain_outlying_statistic,
    find_dependent_download,
    find_invalid_tensors,
    find_measure_sum_mismatch,
    get_received_state,
    list_attributes,
    list_attributes_and_globals,
    list_models,
    make_digit_clients,
    seed_and_watch_generators,
    watch_round_copies,
)
from fedpipe.testing.trial import (
    Trial,
    describe_difference,
    make_synthetic_clients,
    make_trial,
    select_trial_device,
)

#: Advice in checks. Elsewhere the advice is to type `fedpipe check`.
RESULT_ADVICE = "Return the types and shapes that FedAvg's hooks return."
DRAW_MESSAGE = (
    "its code draws random numbers from {}'s global generator, which does not depend on the study's seed. Use "
    "draw_normal or draw_uniform."
)


def _make_check(find_violations: Callable[[Algorithm], Iterator[str]]) -> Check:
    """Make a check of a generator of messages. An error of the algorithm is one more message.

    Every check watches the global random generators, because a cached function draws only in the first check.
    """

    @functools.wraps(find_violations)
    def check(algorithm: Algorithm) -> list[str]:
        messages, name = [], hook_names.get_algorithm_name(algorithm)
        with seed_and_watch_generators(0) as used_generators:
            try:
                with explain_user_errors(algorithm):
                    messages += [f"{name}: {message}" for message in find_violations(algorithm)]
            except SettingsError as error:
                messages.append(str(error).replace(format_check_advice(algorithm), RESULT_ADVICE))
        if used_generators and not messages:
            messages.append(f"{name}: {DRAW_MESSAGE.format(used_generators[0])}")
        return messages

    return check


def get_check_title(check: Check) -> str:
    """Title of a check, such as ``order of uploads``."""
    return check.__name__.removeprefix("check_").replace("_", " ")


def check_algorithm(algorithm: Algorithm, progress: Callable[[str, int, int], None] | None = None) -> list[str]:
    """Run all checks. Return one message per violation of the contract.

    If hooks, memory or randomness have a violation, the checks that compare numbers are skipped, because they would
    only repeat it.

    Parameters
    ----------
    algorithm
        The algorithm with its parameters.
    progress
        Called before each check with its title, its number and their count.
    """
    messages = check_names(algorithm)
    naming_message_count = len(messages)
    for number, check in enumerate(CHECKS):
        if len(messages) > naming_message_count and check in (check_statelessness, check_loop_and_stack):
            break
        if progress:
            progress(get_check_title(check), number, len(CHECKS))
        messages += check(algorithm)
    return list(dict.fromkeys(messages))


def _list_evaluation_phases(algorithm: Algorithm) -> list[Phase]:
    phases: list[Phase] = ["receive", "finetune"]
    return [*phases, "prototype"] if algorithm.has_prototype_logits else phases


# -- one algorithm by itself -------------------------------------------------------------------------------------------


def check_names(algorithm: Algorithm) -> list[str]:
    """Names that are similar to a hook's, and hooks with wrong arguments."""
    return list(hook_names.find_naming_mistakes(algorithm))


@_make_check
def check_hooks(algorithm: Algorithm) -> Iterator[str]:
    """Results of hooks have the right types, and the same shapes in every round, in loop and stack."""
    for width in (None, 3):
        trial = make_trial(algorithm, width=width)
        initial_server = trial.server
        for _ in range(2):
            trial.run(tests=TESTS)
            contract.require_same_structure(algorithm, "aggregate", trial.server, initial_server, "init")
            for outcome in trial.outcomes:
                contract.require_same_structure(
                    algorithm, "keep", outcome.kept_state, trial.initial_client_state, "init_client"
                )
                contract.require_same_structure(algorithm, "upload", outcome.upload, trial.outcomes[0].upload)
            yield from find_invalid_tensors(trial)
        for phase in _list_evaluation_phases(algorithm):
            trial.train([0, 1, 2], TESTS, phase)
        call_recorded_hooks(trial)


@_make_check
def check_statelessness(algorithm: Algorithm) -> Iterator[str]:
    """All memory is in the states. Nothing is stored on the algorithm, and no tensor is changed in place."""
    trial = make_trial(algorithm)
    workers = (trial.algorithm, *cast(LoopExecutor, trial.executor)._idle_workers)
    copies = [watch_round_copies(worker) for worker in workers]
    old_values = [(worker, list_attributes_and_globals(worker)) for worker in workers]
    trial.run(1)
    states = {"server": trial.server} | {f"client {client}": state for client, state in trial.client_states.items()}
    previous_states = pytree.tree_map(torch.clone, states)
    trial.aggregate(trial.collect_uploads(trial.train(tests=TESTS)))
    call_recorded_hooks(trial)
    if message := describe_difference(states, previous_states):
        owner = "the server's state" if message.startswith("server") else "a client's state"
        yield f"a round changes {owner} in place ({message}). Make new tensors, such as a = a + b."
    pairs = [(old, list_attributes_and_globals(worker)) for worker, old in old_values]
    pairs += [(old, list_attributes(copy)) for copy, old in itertools.chain(*copies)]
    for old, new in pairs:
        for name in new:
            if new[name] != old.get(name):
                yield (
                    f"'{name}' changes while clients train, but only states are saved. Return what a client remembers "
                    "from `keep`, and what the server remembers from `aggregate`."
                )
                return


@_make_check
def check_reproducibility(algorithm: Algorithm) -> Iterator[str]:
    """A run repeats bit by bit with any state of the global generators, and draws nothing from them."""
    for width in (None, 3):
        trials = []
        for seed in (1, 2):
            with seed_and_watch_generators(seed) as used_generators:
                trials.append(make_trial(algorithm, width=width).run(1 if width else 2, tests=TESTS))
            if used_generators:
                yield DRAW_MESSAGE.format(used_generators[0])
                return
        if message := describe_difference(collect_results_and_states(trials[1]), collect_results_and_states(trials[0])):
            yield f"the same run twice has different results ({message}). Make hooks pure functions of their arguments."


@_make_check
def check_send(algorithm: Algorithm) -> Iterator[str]:
    """What a client receives does not depend on the other clients of `send`, or on their number."""
    if message := find_dependent_download(make_trial(algorithm).run(2)):
        yield (
            f"`send` depends on the other clients of `ids` ({message}). Compute each value only from the client's own "
            "id, and what depends on the participants in `aggregate`."
        )


@_make_check
def check_measure_passes(algorithm: Algorithm) -> Iterator[str]:
    """The sums of a Measure pass add up over the batches of a client."""
    trial = make_trial(algorithm).run(1)
    with torch.no_grad():
        if message := find_measure_sum_mismatch(trial):
            yield (
                f"the sums of a Measure pass over two batches differ from those over all samples ({message}). Return "
                "sums over the samples from `sums`, such as batch.sum(losses), and divide in `then`."
            )


# -- equal results of all executors ------------------------------------------------------------------------------------


@_make_check
def check_loop_and_stack(algorithm: Algorithm) -> Iterator[str]:
    """Four participants of unequal sizes. A width of 3 pads the last stack, a width of 7 pads the only one."""
    yield from compare_loop_and_stacks(algorithm, (3, 7), 3, **SGD)


@_make_check
def check_loop_and_stack_with_adam(algorithm: Algorithm) -> Iterator[str]:
    """The same with Adam, unless the algorithm needs SGD."""
    if not algorithm.needs_sgd:
        yield from compare_loop_and_stacks(algorithm, (3,), 3, **ADAM)


@_make_check
def check_loop_and_stack_with_convolutions(algorithm: Algorithm) -> Iterator[str]:
    """Images, and layers whose layout in memory differs between loop and stack."""
    yield from compare_loop_and_stacks(algorithm, (3,), 2, model="cnn", local_epochs=1)


@_make_check
def check_evaluation(algorithm: Algorithm) -> Iterator[str]:
    """Evaluation of all clients before training and after fine-tuning: equal in loop and stack, on all test samples."""
    loop, stack = (make_trial(algorithm, width=width).run(2) for width in (None, 3))
    all_clients = range(len(loop.clients))
    for phase in _list_evaluation_phases(algorithm):
        stack_outcomes, loop_outcomes = (trial.train(all_clients, TESTS, phase) for trial in (stack, loop))
        if message := describe_difference(
            collect_client_results(stack_outcomes), collect_client_results(loop_outcomes), ROUNDING
        ):
            yield (
                f"in the phase '{phase}', clients in one call differ from clients one after the other ({message}). "
                f"{PADDING_ADVICE}"
            )
        totals = [outcome.scores["local"].total for outcome in stack_outcomes]
        assert totals == [len(indices) for indices in loop.clients.test]
    # All clients together, because a single client may have nothing to learn, for example from one class.
    received_outcomes, finetuned_outcomes = (
        [outcome.scores["local"].loss for outcome in loop.train(all_clients[1:], ("local",), phase)]
        for phase in ("receive", "finetune")
    )
    if finetuned_outcomes == received_outcomes:
        yield (
            "fine-tuning does not change the personal model. Train what `predict` reads in the passes of "
            "`finetune_passes`."
        )


@_make_check
def check_batch_normalization(algorithm: Algorithm) -> Iterator[str]:
    """Running statistics change and stay finite. Their averages are within the range of the clients' statistics."""
    loop, stack = (make_trial(algorithm, "norm", width=width) for width in (None, 3))
    for _ in range(3):
        previous_server = loop.server
        for trial in (loop, stack):
            trial.run(tests=TESTS)
        violations = itertools.chain(
            _find_bad_statistics(loop),
            _find_batch_norm_difference(stack, loop),
            _find_outlying_statistics(loop, previous_server),
        )
        if message := next(violations, None):
            yield message
            return


def _find_bad_statistics(trial: Trial) -> Iterator[str]:
    """Find clients whose running statistics are not finite, or those of the initial model."""
    initial_model = move_state(trial.initial_model(0), trial.clients.device)
    for outcome in trial.outcomes:
        models = list_models(outcome.upload, trial.net) + list_models(outcome.kept_state, trial.net)
        statistics = [
            (model[name], initial_model[name]) for model in models for name in trial.net.buffer_names if name in model
        ]
        if not all(value.isfinite().all() for value, _ in statistics):
            yield (
                "running statistics of batch normalization become infinite or NaN. Keep divisions and logarithms away "
                "from 0."
            )
        if trial.clients.sizes[outcome.client] > 1 and all(torch.equal(value, start) for value, start in statistics):
            yield (
                "running statistics of batch normalization never change. Return the trained model with its buffers "
                "from `upload` or `keep`."
            )


def _find_batch_norm_difference(stack: Trial, loop: Trial) -> Iterator[str]:
    if message := describe_trial_difference(stack, loop, BATCH_NORM_ROUNDING):
        yield (
            f"with batch normalization, clients in one call differ from clients one after the other ({message}). "
            f"{PADDING_ADVICE}"
        )


def _find_outlying_statistics(trial: Trial, previous_server: State) -> Iterator[str]:
    """Find running statistics that clients receive, but that can't be averages of those that they sent."""
    old_models = list_models(previous_server, trial.net)
    uploaded_models = [model for outcome in trial.outcomes for model in list_models(outcome.upload, trial.net)]
    for client in range(len(trial.clients)):
        state = trial.algorithm.traffic(get_received_state(trial, client))
        for model, name in itertools.product(list_models(state, trial.net), trial.net.buffer_names):
            if name in model and (
                message := explain_outlying_statistic(name, model[name], old_models, uploaded_models)
            ):
                yield message


@_make_check
def check_training_in_blocks(algorithm: Algorithm) -> Iterator[str]:
    """Clients in blocks, in reverse order, or over two threads send the same bits."""
    for width in (None, 4):
        trial = make_trial(algorithm, width=width).run(2)
        all_clients = list(range(len(trial.clients)))
        outcomes = trial.train(all_clients, tests=("local",))
        blocks = [all_clients[first : first + 3] for first in (6, 3, 0)]
        block_outcomes = [outcome for block in blocks for outcome in trial.train(block, tests=("local",))]
        if message := describe_difference(
            collect_client_results(sorted(block_outcomes, key=lambda outcome: outcome.client)),
            collect_client_results(outcomes),
        ):
            yield (
                f"a client's results depend on the clients that train before or together with it ({message}). Use only "
                "what the client keeps and receives."
            )
            return
    loop, threaded_loop = (make_trial(algorithm, threads=threads).run(2, tests=("local",)) for threads in (1, 2))
    if message := describe_difference(collect_results_and_states(threaded_loop), collect_results_and_states(loop)):
        yield (
            f"results of two threads differ from results of one ({message}). Make passes pure functions of the "
            "client's state."
        )


@_make_check
def check_order_of_uploads(algorithm: Algorithm) -> Iterator[str]:
    """The server's next state does not depend on the order of uploads."""
    trial = make_trial(algorithm, participation=1.0).run(1)
    uploads = trial.collect_uploads(trial.train())
    shuffled_indices = [(3 * index + 1) % len(uploads) for index in range(len(uploads))]  # moves all eight
    ids, weights, states = zip(*(uploads[index] for index in shuffled_indices), strict=True)
    assert ids != uploads.ids
    shuffled_uploads = Uploads(ids, weights, states)
    if message := describe_difference(trial.aggregate(shuffled_uploads), trial.aggregate(uploads), ROUNDING):
        yield f"`aggregate` depends on the order of uploads ({message}). Combine all uploads alike."


@_make_check
def check_resuming(algorithm: Algorithm) -> Iterator[str]:
    """A run that resumes from its files, block by block, gives the bits of an uninterrupted run."""
    straight_trial, stopped_trial = (make_trial(algorithm).run(2) for _ in range(2))
    resumed_trial = make_trial(algorithm)
    resumed_trial.rounds = stopped_trial.rounds
    with tempfile.TemporaryDirectory() as folder:

        def write_and_read(tree: dict[str, Any]) -> dict[str, Any]:
            path = Path(folder) / "state.pt"
            return move_state(files.read_pt(path, files.write_pt(path, tree)), resumed_trial.clients.device)

        resumed_trial.server = convert_tree_to_state(write_and_read(stopped_trial.server))
        kept_stack = convert_tree_to_state(
            write_and_read(
                stack_states([stopped_trial.client_states[client] for client in range(len(stopped_trial.clients))])
            )
        )
        resumed_trial.client_states = {
            client: unstack_client(kept_stack, client) for client in range(len(resumed_trial.clients))
        }
        straight_trial.run(1)
        block = Block("trial", 2, {})
        for outcome in resumed_trial.train():
            block.outcomes.append(outcome)
        loaded_block = Block.from_tensors(write_and_read(block.to_tensors()))
        straight_uploads = straight_trial.collect_uploads(straight_trial.outcomes)
        uploads = Uploads(straight_uploads.ids, straight_uploads.weights, loaded_block.uploads)
        actual = {"server": resumed_trial.aggregate(uploads), "keep": loaded_block.kept_states}
        expected = {
            "server": straight_trial.server,
            "keep": [outcome.kept_state for outcome in straight_trial.outcomes],
        }
        if message := describe_difference(actual, expected):
            yield (
                f"a resumed run differs from an uninterrupted run ({message}). Return all that a round needs from "
                "`keep` and `aggregate`, because only states are saved."
            )


@_make_check
def check_traffic(algorithm: Algorithm) -> Iterator[str]:
    """The counted bytes are those of all tensors that travel. Parts that `traffic` omits have no effect."""
    for width in (None, 3):
        trial = make_trial(algorithm, width=width).run(1)
        ids = trial.select_participants(2)
        outcomes = trial.train(ids)
        received_states = [get_received_state(trial, client) for client in ids]
        pairs = [(outcome.bytes_down, state) for outcome, state in zip(outcomes, received_states, strict=True)]
        pairs += [(outcome.bytes_up, outcome.upload) for outcome in outcomes]
        has_traffic_hook = type(trial.algorithm).traffic is not Algorithm.traffic
        for byte_count, state in pairs:
            expected_bytes = count_bytes(trial.algorithm.traffic(state))
            if byte_count != expected_bytes or (
                byte_count != count_bytes(state) if not has_traffic_hook else byte_count > count_bytes(state)
            ):
                yield (
                    f"{byte_count} bytes are counted, but {count_bytes(state)} are sent. Return only tensors of the "
                    "state from `traffic`."
                )
                return
        if has_traffic_hook and width is None:
            yield from check_omitted_parts(trial, outcomes, received_states)


@_make_check
def check_missing_classes(algorithm: Algorithm) -> Iterator[str]:
    """No client has one of the classes, another class first appears in the third round, and a client has one sample."""
    clients = make_synthetic_clients(labels=lambda client: [1, 2] if client in (3, 6) else [0, 1])
    advice = "Handle classes without samples and clients with one sample."
    for width in (None, 3):
        trial = make_trial(algorithm, clients=clients, width=width, participation=0.3)
        for ids in ([0, 1], [1, 7], [0, 3]):
            trial.run(1, ids=ids, tests=TESTS)
            client_states = [(outcome.upload, outcome.kept_state) for outcome in trial.outcomes]
            if not all(leaf.isfinite().all() for leaf in pytree.tree_leaves([trial.server, client_states])):
                yield f"states become infinite or NaN when the clients {ids} train, which lack classes. {advice}"
                return
        outcomes = trial.train(range(8), TESTS, "receive")
        if not all(math.isfinite(score.loss) for outcome in outcomes for score in outcome.scores.values()):
            yield f"losses of clients that lack classes become infinite or NaN. {advice}"
            return


@_make_check
def check_training_on_digits(algorithm: Algorithm) -> Iterator[str]:
    """Training lowers the clients' loss on handwritten digits, and no number is infinite or NaN."""
    clients, family = make_digit_clients(select_trial_device()), MLP(hidden=(16,))
    settings: dict[str, Any] = {"participation": 1.0, "learning_rate": 0.1, "batch_size": 10, "dtype": "float32"}
    trial = make_trial(algorithm, lambda: family.build((1, 8, 8), 10), clients, **settings)
    initial_loss = compute_mean_loss(trial.train(tests=("local",), phase="begin"))
    final_loss = compute_mean_loss(trial.run(3, tests=("local",)).outcomes)
    if not math.isfinite(final_loss) or not all(leaf.isfinite().all() for leaf in pytree.tree_leaves(trial.server)):
        yield (
            f"three rounds on handwritten digits end with infinite or NaN values (the loss is {final_loss:.3g}). Keep "
            "divisions and logarithms away from 0."
        )
    elif final_loss >= initial_loss:
        yield (
            f"three rounds on handwritten digits do not lower the clients' mean loss ({initial_loss:.3g} before, "
            f"{final_loss:.3g} after). Check the loss, and whether the parameters suit a learning rate of 0.1."
        )


#: All checks. Causes come before their consequences.
CHECKS: tuple[Check, ...] = (
    check_names,
    check_hooks,
    check_statelessness,
    check_reproducibility,
    check_send,
    check_measure_passes,
    check_loop_and_stack,
    check_loop_and_stack_with_adam,
    check_loop_and_stack_with_convolutions,
    check_evaluation,
    check_batch_normalization,
    check_training_in_blocks,
    check_order_of_uploads,
    check_resuming,
    check_traffic,
    check_missing_classes,
    check_training_on_digits,
)
