"""Errors are for people: one sentence that names the setting or file, what it is, and what would be right.

What pydantic finds wrong with settings becomes such sentences here, one a line. pydantic itself is imported where it is
needed, since every node that parses the Snakefile imports this.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

Location = tuple[int | str, ...]

WORDS = {
    "tuple_type": "a valid list",
    "list_type": "a valid list",
    "dict_type": "a valid mapping",
    "model_type": "a valid mapping",
    "dataclass_type": "a valid mapping",
    "string_type": "a name",
}


class UserError(Exception):
    """A mistake that the user can mend; the command line prints it without a traceback and exits with status 2."""


class SettingsError(UserError, ValueError):
    """A setting of params.yaml is unknown, of the wrong type, or impossible."""


class ArtifactError(UserError):
    """A stored file is missing, damaged, or not what its manifest says."""


def sentences(
    error: ValidationError, settings: Any, prefix: str, known: Callable[[Location], Sequence[str]]
) -> list[str]:
    """One sentence for each setting that is wrong.

    Parameters
    ----------
    error
        What pydantic found.
    settings
        What was validated, to tell keys from pydantic's names for the branches of a union.
    prefix
        Key of the section that was validated; empty for the whole of params.yaml.
    known
        The keys that may stand in the section at a location.
    """
    whole: list[str] = []
    wanted: dict[str, tuple[Any, list[str]]] = {}
    for problem in error.errors(include_url=False):
        location = _keys(problem["loc"], settings)
        key = ".".join(str(part) for part in (*([prefix] if prefix else []), *location))
        kind, context = problem["type"], problem.get("ctx", {})
        if kind in {"extra_forbidden", "unexpected_keyword_argument", "invalid_key"}:
            whole.append(f"{key}: unknown key; {nearest(str(location[-1]), known(location[:-1]))}")
        elif kind == "missing" and isinstance(problem["loc"][-1], int):  # of a list of fixed length, entry by entry
            wanted[key] = (problem["input"], [f"should have at least {problem['loc'][-1] + 1} items"])
        elif kind in {"missing", "missing_argument"}:
            whole.append(f"{key}: missing; it must be given.")
        elif kind == "value_error":
            sentence = str(context["error"])
            named = not key or sentence.startswith(key.split(".")[0])
            whole += (sentence if named else f"{key}: {sentence}").splitlines()
        elif kind == "too_short":
            count = context["min_length"]
            wanted[key] = (problem["input"], [f"should have at least {count} item{'s' if count > 1 else ''}"])
        elif kind == "too_long":
            wanted[key] = (problem["input"], [f"should have at most {context['max_length']} items"])
        elif kind == "string_pattern_mismatch":
            wanted[key] = (problem["input"], [f"should match pattern '{context['pattern']}'"])
        else:
            words = WORDS.get(
                kind, problem["msg"].removeprefix("Input should be ").split(", unable")[0].split(", got")[0]
            )
            value, others = wanted.setdefault(key, (problem["input"], []))
            others.append(words if others else f"should be {words}")
    for key, (value, phrases) in wanted.items():
        if phrases[0].startswith("should have") and any(other.startswith(f"{key}.") for other in wanted):
            continue  # a list that is short since one of its entries is wrong
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        whole.append(f"{key}: {shown} can't be used; it {' or '.join(phrases)}.")
    return whole


def refuse_truths(given: Any, made: Any) -> None:
    """Refuse truth values where numbers are wanted, which pydantic takes as 0 and 1.

    Parameters
    ----------
    given
        A value, a list or a mapping as it stands in params.yaml.
    made
        What pydantic made of it.

    Raises
    ------
    ValidationError
        As of a value of another type.
    """
    from pydantic import ValidationError
    from pydantic_core import InitErrorDetails

    wrong = [InitErrorDetails(type=kind, loc=place, input=value) for place, value, kind in _truths(given, made, ())]
    if wrong:
        raise ValidationError.from_exception_data("number", wrong)


def _truths(given: Any, made: Any, place: Location) -> Iterator[tuple[Location, bool, str]]:
    if isinstance(given, bool):
        if type(made) in (int, float):
            yield place, given, f"{type(made).__name__}_type"
    elif isinstance(given, Mapping):
        for name, value in given.items():
            part = made.get(name) if isinstance(made, Mapping) else getattr(made, str(name), None)
            yield from _truths(value, part, (*place, name))
    elif isinstance(given, (list, tuple)) and isinstance(made, (list, tuple)):
        for index, pair in enumerate(zip(given, made, strict=False)):
            yield from _truths(*pair, (*place, index))


def nearest(name: str, options: Sequence[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known one, or all of them."""
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"it should be one of: {', '.join(options)}." if options else "remove it."


def _keys(location: Location, settings: Any) -> Location:
    """The location without pydantic's names for a union's branches or a mapping's keys."""
    keys: list[int | str] = []
    for index, part in enumerate(location):
        inside = isinstance(settings, dict) and part in settings
        inside = inside or (isinstance(settings, (list, tuple)) and isinstance(part, int) and part < len(settings))
        if inside:
            keys.append(part)
            settings = settings[part]
        elif isinstance(settings, dict) and index == len(location) - 1 and part != "[key]":
            keys.append(part)  # a key that is missing
    return tuple(keys)
