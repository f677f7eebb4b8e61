"""docs/python.md as GitHub shows it: its lists name all of the public interface, and nothing else."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest
from torch import nn

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import Batch, ClientInfo
from fedpipe.algorithms.passes import Measure, Pull, Train, Update
from fedpipe.algorithms.uploads import Uploads
from fedpipe.analysis.load import Results
from fedpipe.core import callbacks
from fedpipe.core.tensors import Tensors
from fedpipe.models.base import FunctionalNetwork, Network
from tests.docs.page_blocks import read

PAGE = re.sub(r"^```.*?^```$", "", read("docs/python.md"), flags=re.M | re.S)
CODE = re.findall(r"`([^`]+)`", PAGE)
SHOWN = {name for text in CODE for name in re.findall(r"^(?:self\.net\.)?(\w+)(?:\(|$)", text)}
#: Names that the engine calls, and no algorithm of one's own does or has to define.
INNER = {
    Algorithm: {
        "bind",
        "bind_round",
        "net",
        "federation",
        "pinned_file",
        "code_objects",
    },
    FunctionalNetwork: {"make_initial_model", "copy_for_thread"},
}


def public(owner: type) -> set[str]:
    """Its own names, and those of its fields."""
    annotated = set(inspect.get_annotations(owner))
    return {name for name in {*vars(owner), *annotated} if not name.startswith("_")} - INNER.get(owner, set())


@pytest.mark.parametrize(
    "owner", [Results, Algorithm, FunctionalNetwork, Tensors, Batch, ClientInfo, callbacks.Callback, callbacks.RunInfo]
)
def test_every_public_name_is_listed(owner: type) -> None:
    assert public(owner) - SHOWN - {"plan", "folder"} == set()


def test_every_attribute_that_the_page_gives_a_network_is_there() -> None:
    net = FunctionalNetwork(lambda: Network(nn.Flatten(), nn.Linear(4, 2)))
    told = re.search(r"`self\.net` is the network.*?(?=\nA model, a gradient)", PAGE, flags=re.S)
    assert told
    names = [re.match(r"(?:self\.)?(\w+)", text).group(1) for text in re.findall(r"`([^`]+)`", told[0])]  # type: ignore[union-attr]
    assert len(names) > 10
    for name in names:
        assert name == "net" or hasattr(net, name), name


SIGNATURES: dict[str, Any] = {
    **{name: getattr(Results, name) for name in ("to_target", "settings", "model", "state", "test")},
    **{
        name: value for name, value in vars(Algorithm).items() if inspect.isfunction(value) and not name.startswith("_")
    },
}


def test_signatures_are_those_of_the_code() -> None:
    checked = set()
    for text in CODE:
        called = re.fullmatch(r"(\w+)\((.*)\)", text)
        if not called or called[1] not in SIGNATURES:
            continue
        real = inspect.signature(SIGNATURES[called[1]]).parameters.values()
        names = [parameter.name for parameter in real][1:]
        shown = [re.split("[=:]", part.strip().lstrip("*"))[0] for part in called[2].split(",")]
        if called[1] == "model" and shown == ["tensors"]:
            continue  # the network's
        assert [name for name in shown if name] == names, text
        checked.add(called[1])
    assert {"to_target", "settings", "model", "state", "test", "start", "loss", "aggregate", "finetune"} <= checked


def test_passes_have_the_fields_that_the_page_tells() -> None:
    assert [field.name for field in dataclasses.fields(Measure)][:2] == ["sums", "then"]
    assert [field.name for field in dataclasses.fields(Update)] == ["then"]
    assert next(iter(dataclasses.fields(Train))).name == "loss"
    assert Pull._fields == ("to", "strength")
    assert {name for name in dir(Uploads) if name in {"mean", "uniform"}} == {"mean", "uniform"}
