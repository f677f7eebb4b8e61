"""docs/python.md lists the complete public interface, and nothing else."""

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
LISTED_NAMES = {name for text in CODE for name in re.findall(r"^(?:self\.net\.)?(\w+)(?:\(|$)", text)}
#: Names for the engine, which a custom algorithm does not use or define.
ENGINE_NAMES = {
    Algorithm: {"bind", "bind_round", "net", "federation", "pinned_file", "list_hashed_code"},
    FunctionalNetwork: {"make_initial_model", "copy_for_thread"},
}


def list_public_names(owner: type) -> set[str]:
    """Return the public names of a class and its fields, without those of its bases."""
    annotated = set(inspect.get_annotations(owner))
    return {name for name in {*vars(owner), *annotated} if not name.startswith("_")} - ENGINE_NAMES.get(owner, set())


@pytest.mark.parametrize(
    "owner", [Results, Algorithm, FunctionalNetwork, Tensors, Batch, ClientInfo, callbacks.Callback, callbacks.RunInfo]
)
def test_python_page_lists_every_public_name(owner: type) -> None:
    assert list_public_names(owner) - LISTED_NAMES - {"plan", "folder"} == set()


def test_network_attributes_of_python_page_exist() -> None:
    net = FunctionalNetwork(lambda: Network(nn.Flatten(), nn.Linear(4, 2)))
    section = re.search(r"`self\.net` is the network.*?(?=\n### )", PAGE, flags=re.S)
    assert section
    names = [re.match(r"(?:self\.)?(\w+)", text).group(1) for text in re.findall(r"`([^`]+)`", section[0])]  # type: ignore[union-attr]
    assert len(names) > 10
    for name in names:
        assert name == "net" or hasattr(net, name), name


SIGNATURES: dict[str, Any] = {
    **{name: getattr(Results, name) for name in ("to_target", "settings", "model", "state", "test")},
    **{
        name: value for name, value in vars(Algorithm).items() if inspect.isfunction(value) and not name.startswith("_")
    },
}


def test_signatures_of_python_page_match_code() -> None:
    checked = set()
    for text in CODE:
        call = re.fullmatch(r"(\w+)\((.*)\)", text)
        if not call or call[1] not in SIGNATURES:
            continue
        real = inspect.signature(SIGNATURES[call[1]]).parameters.values()
        names = [parameter.name for parameter in real][1:]
        arguments = [re.split("[=:]", part.strip().lstrip("*"))[0] for part in call[2].split(",")]
        if call[1] == "model" and arguments == ["tensors"]:
            continue  # the network's method
        assert [name for name in arguments if name] == names, text
        checked.add(call[1])
    assert {
        "to_target",
        "settings",
        "model",
        "state",
        "test",
        "start",
        "loss",
        "aggregate",
        "finetune_passes",
    } <= checked


def test_pass_fields_match_python_page() -> None:
    assert [field.name for field in dataclasses.fields(Measure)][:2] == ["sums", "then"]
    assert [field.name for field in dataclasses.fields(Update)] == ["then"]
    assert next(iter(dataclasses.fields(Train))).name == "loss"
    assert Pull._fields == ("to", "strength")
    assert {"mean", "with_equal_weights", "mark"} <= set(dir(Uploads))
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE, flags=re.M)
    assert {name for row in rows for name in re.findall(r"\w+", row)} == {
        field.name for field in dataclasses.fields(Train)[1:]
    }
