"""The overview table of docs/algorithms.md matches the algorithms and their tests."""

import re
import sys

import pytest

from fedpipe.cli.docs import overview
from fedpipe.core.components import registry
from fedpipe.core.components.component import ALGORITHM
from tests.algorithms.expected import Expected, Sizes
from tests.small_studies import ROOT

ALGORITHMS = registry.list_components(ALGORITHM)


def read_expectations(name: str, monkeypatch: pytest.MonkeyPatch) -> Expected:
    monkeypatch.setattr(sys, "path", [str(ROOT / "tests/algorithms"), *sys.path])
    expectations: Expected = __import__(f"test_{name}").EXPECTED
    return expectations


@pytest.mark.parametrize("name", ALGORITHMS)
def test_overview_traffic_matches_expectations_of_algorithm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expectations = read_expectations(name, monkeypatch)
    parameters, formula = expectations.traffic[0]
    trial = overview.make_overview_trial(name, batch_norm=False, **expectations.parameters, **parameters)
    model, net = trial.initial_model(0), trial.net
    body, head = (sum(model[part].numel() for part in names) for names in (net.body_names, net.head_names))
    features = model["head.weight"].shape[1]
    expected = formula(Sizes(body + head, body, head, overview.CLASSES, features))
    exchange = overview.compute_exchanged_and_kept_states(trial)[:2]
    counts = tuple(overview.count_tensor_elements(trial.algorithm.traffic(state)) for state in exchange)
    assert counts == expected, "without empty slots"


def test_overview_table_matches_known_facts() -> None:
    """The facts come from the papers and other libraries, not from the code."""
    page = (ROOT / "docs/algorithms.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| \[.*\]\(#", line)]
    table = {re.sub(r".*\(#(\w+)\)", r"\1", row[0]): row[1:] for row in rows}
    assert sorted(table) == [*ALGORITHMS]
    assert table["fedavg"] == ["global", "1", "1", "–", "shared", "PFLlib, FL-bench, fluke, pfl-research"]
    assert table["local"][:5] == ["personal", "0", "0", "1 (model)", "own"]
    assert table["fedbn"][0] == "personal"
    assert table["fedbn"][4] == "own"
    assert [table[name][0] for name in ("scaffold", "ditto", "fedrod", "fedper", "fedbabu")] == [
        "global",
        "both",
        "both",
        "personal",
        "both",
    ]
    assert table["ditto"][4] == "shared, own"
    assert table["feddw"][5] == "–"


def test_other_libraries_have_known_methods_and_commits() -> None:
    for peer in overview.read_methods_of_other_libraries().values():
        assert set(peer["methods"]) <= set(ALGORITHMS)
        assert peer["methods"] == sorted(set(peer["methods"]))
        assert re.fullmatch(r"[0-9a-f]{40}", peer["commit"])
