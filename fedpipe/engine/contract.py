"""What an algorithm does against the contract, as a sentence in place of a traceback; `fedpipe check` says the same.

Hooks are looked at where a client's phase or a round ends, not in its steps: that costs nothing that can be measured.
"""

from __future__ import annotations

import functools
import linecache
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

import fedpipe
from fedpipe import registry
from fedpipe.algorithms.base import Algorithm, Measure, Pass, State, Train, Update
from fedpipe.config import Protocol
from fedpipe.errors import SettingsError, UserError
from fedpipe.tensors import NamesDifferError, Tensors

#: Of what PyTorch says where clients that train in one call would have to part.
DEPENDENT = ("data-dependent control flow", ".item()", "dynamic shape", "not possible to vmap over .tolist")
RANDOM = ("random operation", "randomness")
IN_PLACE = ("in-place", "inplace", "doesn't match the broadcast shape")

#: Columns of every run's rounds, which no metric may be called.
COUNTED = ("algorithm", "seed", "key", "round", "participants", "left_out", "bytes_down", "bytes_up")

STATE = "it should give named parts, each a tensor or Tensors"


def name_of(algorithm: Algorithm) -> str:
    """As params.yaml has it: a packaged algorithm's name, or a dotted path; without the modules that go on top."""
    kinds = [found for found in type(algorithm).__mro__ if issubclass(found, Algorithm)]
    own = [found for found in kinds if not found.__module__.startswith(("fedpipe.algorithms._", "fedpipe.testing"))]
    inner = getattr(algorithm, "inner", None)  # of DW on a method
    return registry.name_of(registry.ALGORITHM, type(inner) if isinstance(inner, Algorithm) else own[0])


# -- what hooks give ---------------------------------------------------------------------------------------------------


def state(algorithm: Algorithm, hook: str, given: Any) -> State:
    """What a hook gave, where it is a state.

    Raises
    ------
    SettingsError
        It is none; the sentence names the hook, and what it gave.
    """
    if type(given) is not dict:
        raise SettingsError(f"{name_of(algorithm)}.{hook} gives {kind(given)}; {STATE}, as {{'model': model}}.")
    for part, value in given.items():
        if not isinstance(part, str):
            raise SettingsError(f"{name_of(algorithm)}.{hook} names a part {part!r}; its name should be a string.")
        if isinstance(value, Tensor):
            continue
        if not isinstance(value, Tensors):
            instead = "torch.tensor(...)" if isinstance(value, (bool, int, float)) else "Tensors(...)"
            raise SettingsError(
                f"{name_of(algorithm)}.{hook} gives '{part}' as {kind(value)}; it should be a tensor or Tensors, "
                f"as {instead} makes them."
            )
        for name, tensor in value.items():
            if not isinstance(tensor, Tensor):
                raise SettingsError(
                    f"{name_of(algorithm)}.{hook} gives '{name}' in '{part}' as {kind(tensor)}; it should be a tensor."
                )
    return given


def sent(algorithm: Algorithm, given: Any) -> tuple[State, State]:
    """What `send` gave, where it is two states."""
    if not isinstance(given, tuple) or len(given) != 2:
        raise SettingsError(
            f"{name_of(algorithm)}.send gives {kind(given)}; it should give two states: what is common to all clients, "
            "and own parts stacked along a first axis, as ({'model': model}, {})."
        )
    common, own = (state(algorithm, "send", part) for part in given)
    return common, own


def passes(algorithm: Algorithm, hook: str, given: Any) -> list[Pass]:
    """What a hook gave, where it is a list of passes."""
    if not isinstance(given, Sequence) or not all(isinstance(listed, (Train, Measure, Update)) for listed in given):
        raise SettingsError(
            f"{name_of(algorithm)}.{hook} gives {kind(given)}; it should give a tuple of passes, each a Train, Measure "
            "or Update, as (Train(self.loss),)."
        )
    for listed in given:
        by_epochs = isinstance(listed, Train) and listed.epochs is None and (listed.when or listed.after)
        if by_epochs and algorithm.federation.local_steps is not None:
            raise SettingsError(
                f"federation.local_steps: {algorithm.federation.local_steps} can't be used with {name_of(algorithm)}."
                f"{hook}, whose `when` or `after` goes by epochs; it should be null, or the pass should have `epochs`."
            )
    return list(given)


def metrics(algorithm: Algorithm, given: Mapping[str, Any]) -> dict[str, float]:
    """What `metrics` gave, none of it under the name of what every round records."""
    if taken := next((name for name in given if name in COUNTED), None):
        raise SettingsError(
            f"{name_of(algorithm)}.metrics gives '{taken}', which is recorded of every round already; it should have "
            "another name."
        )
    return {name: float(value) for name, value in given.items()}


def extra_models(algorithm: Algorithm, given: Mapping[str, Tensors]) -> dict[str, Tensors]:
    """What `extra_models` gave, none of it under the name of a model that a study may ask for."""
    if taken := next((name for name in given if f"{name}-on-global" in get_args(Protocol)), None):
        raise SettingsError(
            f"{name_of(algorithm)}.extra_models gives '{taken}', which is a model of protocols; it should have another "
            "name."
        )
    return dict(given)


def pull(algorithm: Algorithm, training: Train, names: Sequence[str], client: State) -> None:
    """Refuse a pass that is pulled to what is not there; ``names`` are those of the tensors that it trains.

    Raises
    ------
    SettingsError
        The sentence names the part.
    """
    if training.pull is None:
        return
    to, trained = training.pull.to, client[training.group]
    target, told = client.get(to), ""
    if not isinstance(target, Tensors):
        told = f"no '{to}'" if to not in client else f"'{to}' as {kind(target)}"
    else:
        for name in reversed(names):
            if name not in target:
                told = f"no '{name}' in '{to}'"
            elif (target[name].shape, target[name].dtype) != (trained[name].shape, trained[name].dtype):
                told = f"'{name}' in '{to}' as {_told(target[name])}, where it trains {_told(trained[name])}"
    if told:
        raise SettingsError(
            f"{name_of(algorithm)}: a Train pass has a pull to '{to}', but the client has {told}; it should be a part "
            f"that holds what the pass trains of '{training.group}', as `start` may give it."
        )


def loss(algorithm: Algorithm, training: Train, given: Any) -> None:
    """Refuse a loss in which nothing has a part that its pass trains: nothing would be learned by it.

    Raises
    ------
    SettingsError
        The sentence names what is trained.
    """
    if not isinstance(given, Tensor):
        raise SettingsError(
            f"{name_of(algorithm)}: the loss of a Train pass is {kind(given)}; it should be a scalar, a mean over the "
            "batch, as a tensor."
        )
    if not given.requires_grad:
        raise SettingsError(
            f"{name_of(algorithm)}: the loss of a Train pass depends on nothing that the pass trains of "
            f"'{training.group}'; it should be computed from client['{training.group}'], without detach()."
        )


def alike(algorithm: Algorithm, hook: str, given: State, before: State, other: str) -> None:
    """Refuse a state whose parts, shapes or dtypes are not those that another hook gave, or the same one before.

    Raises
    ------
    SettingsError
        The sentence names the hook and the part.
    """
    found, wanted = outline(given), outline(before)
    if found == wanted:
        return
    begin = f"{name_of(algorithm)}.{hook}"
    right = "a state should have the same parts, of the same shapes and dtypes, in every round"
    for part in [*wanted, *(part for part in found if part not in wanted)]:
        if part not in found:
            raise SettingsError(f"{begin} gives no '{part}', which {other} gives; {right}.")
        if part not in wanted:
            raise SettingsError(f"{begin} gives '{part}', which {other} does not give; {right}.")
        if found[part] != wanted[part]:
            raise SettingsError(f"{begin} gives '{part}' as {found[part]}, and {other} as {wanted[part]}; {right}.")


def outline(given: State) -> dict[str, str]:
    """The parts of a state in words: name to dtype and shape."""
    flat: dict[str, str] = {}
    for part, value in given.items():
        if isinstance(value, Tensors):
            flat |= {f"{part}.{name}": _told(tensor) for name, tensor in value.items()}
            flat |= {} if value else {part: "Tensors without a tensor"}
        else:
            flat[part] = _told(value)
    return flat


def kind(given: Any) -> str:
    """A value in a few words."""
    if given is None:
        return "nothing (None)"
    if isinstance(given, (bool, int, float, str)):
        return f"{given!r}, a Python {type(given).__name__}"
    if isinstance(given, (tuple, list)):
        return f"a {type(given).__name__} of {len(given)}"
    return "a bare tensor" if isinstance(given, Tensor) else f"a {type(given).__name__}"


def _told(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


# -- what fails --------------------------------------------------------------------------------------------------------


@contextmanager
def told(algorithm: Algorithm) -> Iterator[None]:
    """An error of the user's own code within, algorithm or model, becomes a sentence that names its file and line.

    What packaged code does wrong keeps its traceback, and so does a lack of memory.
    """
    try:
        yield
    except (UserError, MemoryError, OSError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if sentence := sentence_of(algorithm, error):
            raise SettingsError(sentence) from error
        raise


def sentence_of(algorithm: Algorithm, error: Exception) -> str | None:
    """What the user's own code did wrong; None where no code of theirs took part."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_own(frame.filename)]
    name, message = name_of(algorithm), str(error).strip().split("\n", 1)[0]
    if not own:
        if name in registry.names(registry.ALGORITHM):
            return None
        if isinstance(error, NotImplementedError) and hasattr(Algorithm, frames[-1].name):
            return f"{name} has no '{frames[-1].name}'; it should define that hook, or derive from FedAvg."
        last = [frame for frame in frames if Path(frame.filename).is_relative_to(_ROOM)][-1]
        place = Path(last.filename).relative_to(_ROOM.parent)
        return (
            f"{name}: what one of its hooks gives can't be used ({type(error).__name__}: {message}; {place}, line "
            f"{last.lineno}); `fedpipe check {name}` tells which, and what it should be."
        )
    frame = own[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    begin = f"{name}: {Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
    whole = str(error)
    if any(words in whole for words in DEPENDENT):
        return (
            f"{begin}: `{line}` takes a tensor's value into Python, as `if`, float() and item() do; clients that train "
            "in one call differ in it, so that it should be torch.where, or the condition `when` of a Train pass."
        )
    if any(words in whole for words in RANDOM):
        return (
            f"{begin}: `{line}` draws random numbers of its own, which no seed of the study gives; an algorithm should "
            "leave what is random to batches, dropout and initial models."
        )
    if any(words in whole for words in IN_PLACE):
        return f"{begin}: `{line}` changes a tensor in place; it should make a new one, as a = a + b."
    if type(error).__name__ == "FrozenInstanceError":
        return (
            f"{begin}: `{line}` keeps something on the algorithm, which is frozen and one for all clients; what a "
            "client remembers should be given by `keep`, what the server remembers by `aggregate`."
        )
    if isinstance(error, NamesDifferError):
        return f"{begin}: `{line}` combines tensors of different names: {_in_one_only(algorithm, error.names)}"
    if isinstance(error, KeyError):
        return f"{begin}: `{line}` asks for {message}, which is not there; it should be one of the parts at hand."
    return f"{begin}: `{line}` fails ({type(error).__name__}: {message}); it should work for any client and round."


def _in_one_only(algorithm: Algorithm, names: Sequence[str]) -> str:
    """The end of a sentence about names that one of two Tensors alone has."""
    listed = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} in one only"
    net = getattr(algorithm, "net", None)
    if net is None or not {*names} <= {*net.buffer_names}:
        return f"{listed}; it should be tensors of the same names."
    return (
        f"{listed}; BatchNorm's running statistics, which a gradient does not have, are left out by "
        "self.net.parameters(model)."
    )


def failure(error: Exception) -> str:
    """An error in a few words, with the line of the user's own code where it arose."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    told = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
    return f"{told}, {Path(own[-1].filename).name}, line {own[-1].lineno}" if own else told


def is_own(filename: str) -> bool:
    """Whether a file is the user's own: neither fedpipe's nor an installed package's."""
    path = Path(filename)
    return path.is_file() and not any(path.is_relative_to(room) for room in (_ROOM, *_installed()))


_ROOM = Path(fedpipe.__file__).parent


@functools.cache
def _installed() -> tuple[Path, ...]:
    paths = sysconfig.get_paths()
    named = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {
        str(Path(torch.__file__).parents[1])
    }
    return tuple(Path(path) for path in sorted(named))
