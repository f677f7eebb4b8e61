"""The table of verdicts in docs/papers.md, computed again from the stored numbers of each preset."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from tests.docs.page_blocks import ROOT, read

#: Beginning of a claim, with the paper, its table, the method and its rival, and the preset of the measured numbers.
CLAIMS = {
    "FedDW is ahead": ("FedDW", "Table I", "FedDW", "FedAvg", "reduced"),
    "FedDUAL is ahead": ("FedDUAL", "Table 1", "FedDUAL", "FedAvg", "reduced"),
    "PFPS-LWC is ahead": ("PFPS-LWC", "Table 2", "PFPS-LWC", "FedPer", "reduced"),
    "the same, with the paper's settings": ("FedDW", "Table I", "FedDW", "FedAvg", "full"),
    "the same, with the paper's number of images": ("PFPS-LWC", "Table 2", "PFPS-LWC", "FedPer", "full"),
    "cwFedAvg is ahead": ("cwFedAvg", "Table 1", "cwFedAvg", "FedAvg", "reduced"),
}

STEMS = {"FedDW": "feddw", "FedDUAL": "feddual", "PFPS-LWC": "pfps_lwc", "cwFedAvg": "cwfedavg"}


def compute_differences(paper: str, table: str, method: str, rival: str, preset: str) -> pd.DataFrame:
    """Return published and measured accuracy of the method minus its rival's, one row per column of the table."""
    cells = pd.read_csv(ROOT / f"docs/papers/{preset}/cells.csv")
    accuracies = cells[(cells["paper"] == paper) & (cells["table"] == table)].set_index(["row", "column"])
    accuracies = accuracies[["published_mean", "measured_mean"]]
    return accuracies.loc[method] - accuracies.loc[rival]


def parse_numbers(text: str) -> list[float]:
    """Return all numbers with a sign."""
    return [float(number.replace("−", "-")) for number in re.findall(r"[+−]\d+\.\d+", text)]


def read_intervals(paper: str, preset: str) -> list[list[float]]:
    """Return each difference on a paper's page with the limits of its interval."""
    page = (ROOT / f"docs/papers/{preset}/{STEMS[paper]}.html").read_text()
    return [*map(parse_numbers, re.findall(r"[+−]\d+\.\d+ \[[^\]]*\]", page))]


@pytest.mark.parametrize("claim", CLAIMS)
def test_verdicts_of_papers_page_match_stored_numbers(claim: str) -> None:
    (line,) = [line for line in read("docs/papers.md").splitlines() if line.startswith(f"| {claim}")]
    paper_text, measured_text = line.split(" | ")[1:3]
    differences = compute_differences(*CLAIMS[claim])
    measured = differences["measured_mean"].dropna()
    published = differences["published_mean"].dropna()
    if CLAIMS[claim][-1] == "full":  # the page compares the columns that were run
        published = published[measured.index]
    for text, values in ((paper_text, published), (re.sub(r"\[.*?\]", "", measured_text), measured)):
        numbers, rounded_values = parse_numbers(text), [round(value, 1) for value in values]
        assert set(numbers) <= set(rounded_values)
        assert {min(rounded_values), max(rounded_values)} <= set(numbers)
        assert " to " in text or set(numbers) == set(rounded_values), "without a range, the text lists all differences"
    intervals = read_intervals(CLAIMS[claim][0], CLAIMS[claim][-1])
    for numbers in map(parse_numbers, re.findall(r"[+−]\d+\.\d+ \[[^\]]*\]", measured_text)):
        assert any(numbers == pytest.approx(interval, abs=0.051) for interval in intervals), numbers
