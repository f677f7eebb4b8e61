"""Errors for users: one message with the setting or file, its value, and what would be right.

Errors of pydantic are converted to such messages, one per line. pydantic is imported inside functions, because every
job imports this module.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, LiteralString

if TYPE_CHECKING:
    from pydantic import ValidationError

Location = tuple[int | str, ...]

SIMILARITY_MARGIN = 0.08  #: names that are so much less similar than the nearest one are suggested, too
LARGEST = 2**63 - 1  #: integer in tables
TINY, HUGE = 1.1754943508222875e-38, 3.4028234663852886e38  #: range of normal float32 numbers
MAX_VALUE_LENGTH, MAX_MESSAGES = 120, 20  #: maximum printed characters of a value, and printed mistakes
#: Names of version 0.1 in params.yaml and on the command line, with their new names.
RENAMED_KEYS = {
    "scales": "presets",
    "probes": "diagnostics",
    "test_share": "test_fraction",
    "validation_share": "validation_fraction",
    "absent": "on_missing",
    "with": "overrides",
    "shown": "protocol",
    "scale": "preset",
    "paper": "full",
}
#: Names of keys in other libraries, such as PFLlib, Flower and LEAF, and in papers.
OTHER_NAMES = {
    "federation.clients": ("num_clients", "n_clients", "num_users"),
    "federation.participation": ("join_ratio", "fraction", "frac", "fraction_fit", "client_fraction", "sample_rate"),
    "federation.rounds": ("global_rounds", "num_rounds", "comm_rounds", "communication_rounds"),
    "federation.local_epochs": ("epochs", "num_epochs", "local_ep"),
    "federation.batch_size": ("batch", "local_bs"),
    "federation.learning_rate": ("lr", "local_lr", "client_lr", "local_learning_rate"),
    "federation.schedule": ("learning_rate_decay", "lr_decay", "scheduler", "lr_scheduler"),
    "federation.momentum": ("local_momentum", "sgd_momentum", "client_momentum"),
    "federation.weight_decay": ("wd", "l2"),
    "evaluation.every": ("eval_gap", "eval_every"),
    "study.seeds": ("seed", "random_seed"),
}
EMPTY_MAPPING_ADVICE = "Use {} for the defaults, or remove the key."
TYPE_PHRASES = {
    "tuple_type": "a valid list",
    "list_type": "a valid list",
    "dict_type": "a valid mapping",
    "model_type": "a valid mapping",
    "dataclass_type": "a valid mapping",
    "string_type": "a name",
    "int_parsing_size": "an integer of at most 64 bits",
}


class UserError(Exception):
    """A user error. The command line prints its message without a traceback and exits with status 2."""


class SettingsError(UserError, ValueError):
    """A setting of params.yaml is unknown, of the wrong type, or impossible."""


class HookError(SettingsError):
    """A hook reads a value that hooks do not have, such as `federation.rounds`.

    The engine puts the hook, its file and line before the message.
    """


class ArtifactError(UserError):
    """A stored file is missing, damaged, or differs from its manifest."""


def format_error(error: Exception) -> str:
    """Format an error of a library on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def format_permission_error(error: PermissionError) -> str:
    """Format the error of a file that another user may have written."""
    return f"{error.filename} can't be accessed ({error.strerror}). Let its owner use chmod, and run again."


def format_validation_errors(
    error: ValidationError, settings: Any, prefix: str, list_known_keys: Callable[[Location], Sequence[str]]
) -> list[str]:
    """Format one message for each invalid setting.

    ``settings`` distinguish keys from pydantic's names for branches of a union. ``prefix`` is the key of the validated
    section, empty for all of params.yaml. ``list_known_keys`` lists the known keys of the section at a location.
    """
    messages: list[str] = []
    expectations: dict[str, tuple[Any, list[str]]] = {}
    literals: dict[str, list[str]] = {}  #: possible texts by key
    for problem in error.errors(include_url=False):
        location = _remove_union_branches(problem["loc"], settings)
        key = ".".join(str(part) for part in (*([prefix] if prefix else []), *location))
        kind, context = problem["type"], problem.get("ctx", {})
        if kind in {"extra_forbidden", "unexpected_keyword_argument", "invalid_key"}:
            messages.append(f"{key}: unknown key. {suggest_key(str(location[-1]), list_known_keys(location[:-1]))}")
        elif kind == "missing" and isinstance(problem["loc"][-1], int):  # an entry of a list with fixed length
            expectations[key] = (problem["input"], [f"at least {problem['loc'][-1] + 1} items"])
        elif kind in {"missing", "missing_argument"}:
            messages.append(f"{key}: missing. Give a value.")
        elif kind == "value_error":
            message = str(context["error"])
            has_key = not key or message.startswith(key.split(".")[0])
            messages += (message if has_key else f"{key}: {message}").splitlines()
        elif kind == "too_short":
            count = context["min_length"]
            expectations[key] = (problem["input"], [f"at least {count} item{'s' if count > 1 else ''}"])
        elif kind == "too_long":
            expectations[key] = (problem["input"], [f"at most {context['max_length']} items"])
        elif kind == "string_pattern_mismatch":
            expectations[key] = (problem["input"], [f"text that matches the pattern '{context['pattern']}'"])
        else:
            value, phrase = problem["input"], problem["msg"].removeprefix("Input should be ")
            phrase = TYPE_PHRASES.get(kind, phrase.split(", unable")[0].split(", got")[0])
            if phrase.startswith(("greater", "less")):
                phrase = f"a value {phrase}"
            if kind in {"tuple_type", "list_type"} and type(value) in {str, int, float}:
                phrase = f"a list, such as [{value}]"
            literals.setdefault(key, []).extend(re.findall("'([^']+)'", context.get("expected", "")))
            expectations.setdefault(key, (value, []))[1].append(phrase)
    for key, (value, phrases) in expectations.items():
        phrases = [one for one in dict.fromkeys(phrases) if one != "a valid integer" or "a valid number" not in phrases]
        if phrases[0].endswith(("item", "items")) and any(other.startswith(f"{key}.") for other in expectations):
            continue  # the list is too short because of an invalid entry
        if value is None and "a valid mapping" in phrases:
            messages.append(f"{key}: empty. {EMPTY_MAPPING_ADVICE}")
            continue
        if isinstance(value, str) and find_nearest_name(value, literals.get(key, ()), cutoff=0.8):
            messages.append(f"{key}: {value!r} can't be used. {suggest_name(value, literals[key])}")
            continue
        value_text = str(value).lower() if isinstance(value, bool) else repr(value)
        value_text = value_text if len(value_text) <= MAX_VALUE_LENGTH else f"{value_text[:MAX_VALUE_LENGTH]}…"
        messages.append(f"{key}: {value_text} can't be used. Use {' or '.join(phrases)}.")
    if (omitted_count := len(messages) - MAX_MESSAGES) > 0:
        messages[MAX_MESSAGES:] = [f"{prefix or 'params.yaml'}: {omitted_count:,} more values can't be used."]
    return messages


def reject_booleans_and_huge_numbers(raw: Any, parsed: Any) -> None:
    """Reject Booleans for numbers, which pydantic converts to 0 and 1, and numbers out of range.

    ``raw`` is a value, list or mapping of params.yaml, and ``parsed`` is pydantic's result. Raises a `ValidationError`,
    like for a value of another type.
    """
    from pydantic import ValidationError
    from pydantic_core import InitErrorDetails, PydanticCustomError

    problems = [
        InitErrorDetails(type=PydanticCustomError("number", phrase), loc=location, input=value)
        for location, value, phrase in _find_invalid_numbers(raw, parsed, ())
    ]
    if problems:
        raise ValidationError.from_exception_data("number", problems)


def _find_invalid_numbers(raw: Any, parsed: Any, location: Location) -> Iterator[tuple[Location, Any, LiteralString]]:
    """Locations of invalid numbers, with the raw value and a phrase that describes valid ones."""
    if isinstance(raw, Mapping):
        for name, value in raw.items():
            part = parsed.get(name) if isinstance(parsed, Mapping) else getattr(parsed, str(name), None)
            yield from _find_invalid_numbers(value, part, (*location, name))
    elif isinstance(parsed, (list, tuple)):
        if not isinstance(raw, (list, tuple)):  # one number instead of a list
            for part in parsed:
                yield from _find_invalid_numbers(raw, part, location)
            return
        for index, (value, part) in enumerate(zip(raw, parsed, strict=False)):
            yield from _find_invalid_numbers(value, part, (*location, index))
    elif type(parsed) is int:
        if isinstance(raw, bool):
            yield location, raw, "a valid integer"
        elif not -LARGEST <= parsed <= LARGEST:
            yield location, raw, "an integer of at most 64 bits"
    elif type(parsed) is float:
        if isinstance(raw, bool):
            yield location, raw, "a valid number"
        elif parsed and not TINY <= abs(parsed) <= HUGE:
            yield location, raw, "0, or a size from 1.2e-38 to 3.4e+38, the range of float32"


def suggest_name(name: str, options: Sequence[str]) -> str:
    """Suggest a replacement for an unknown name: its new name, the nearest known ones, or all of them. A sentence."""
    if RENAMED_KEYS.get(name) in options:
        return f"It is now '{RENAMED_KEYS[name]}'."
    if matches := find_nearest_names(name, options):
        *others, last = (f"'{match}'" for match in matches)
        return f"Did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
    return f"Use one of: {', '.join(options)}." if options else "Remove it."


def suggest_key(name: str, options: Sequence[str]) -> str:
    """Suggest a key for an unknown one, also by its name in other libraries. ``options`` are the keys of its section.

    If another section has the key, it is a dotted key.
    """
    key = find_key_by_other_name(name)
    own_key = key.rpartition(".")[2]
    if own_key in options:
        return f"Did you mean '{own_key}'?"
    if key and not find_nearest_name(name, options, cutoff=0.7):
        return f"Did you mean '{key}'?"
    return suggest_name(name, options)


def find_key_by_other_name(name: str) -> str:
    """Find the dotted key with this name in fedpipe or in other libraries. Empty if there is none."""
    return next((key for key, names in OTHER_NAMES.items() if name.lower() in (key.partition(".")[2], *names)), "")


def find_nearest_name(name: str, options: Sequence[str], cutoff: float = 0.5) -> str | None:
    """Find the first of :func:`find_nearest_names`. None if there is no such name."""
    return next(iter(find_nearest_names(name, options, cutoff)), None)


def find_nearest_names(name: str, options: Sequence[str], cutoff: float = 0.5) -> list[str]:
    """Find the known names with the nearest spelling, without regard to case and punctuation: at most three.

    Names of algorithms in papers have their name in params.yaml, such as ``feddistill_plus`` for ``FedDistill+``.
    ``cutoff`` is the minimum similarity, from 0 to 1. Names that are about as similar as the nearest one are included.
    """
    options_by_letters = {_normalize_name(option): option for option in options}
    if (letters := _normalize_name(name)) in options_by_letters:
        return [options_by_letters[letters]]
    options_by_case = {option.lower(): option for option in options}
    lower_name, lower_options = name.lower(), list(options_by_case)
    for nearest in difflib.get_close_matches(lower_name, lower_options, n=1, cutoff=cutoff):
        cutoff = max(cutoff, difflib.SequenceMatcher(None, nearest, lower_name).ratio() - SIMILARITY_MARGIN)
    return [options_by_case[match] for match in difflib.get_close_matches(lower_name, lower_options, cutoff=cutoff)]


def _normalize_name(name: str) -> str:
    """Letters and digits of a name in lower case, with ``plus`` for ``+``."""
    return "".join(char for char in name.lower().replace("+", "plus") if char.isalnum())


def _remove_union_branches(location: Location, settings: Any) -> Location:
    """Remove pydantic's names for branches of a union and keys of a mapping."""
    keys: list[int | str] = []
    for index, part in enumerate(location):
        is_entry = isinstance(settings, (list, tuple)) and isinstance(part, int) and part < len(settings)
        if is_entry or (isinstance(settings, dict) and part in settings):
            keys.append(part)
            settings = settings[part]
        elif isinstance(settings, dict) and index == len(location) - 1 and part != "[key]":
            keys.append(part)  # a missing key
    return tuple(keys)
