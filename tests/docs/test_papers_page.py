"""The table of verdicts in docs/papers.md, computed again from the stored numbers of each preset."""

import re

import pandas as pd
import pytest

from tests.docs.page_blocks import ROOT, read

#: Beginning of a claim, with the paper, its table, the method and its rival, and the preset of the measured numbers.
CLAIMS = {
    "FedDW is ahead": ("FedDW", "Table I", "FedDW", "FedAvg", "reduced"),
    "FedDUAL is ahead": ("FedDUAL", "Table 1", "FedDUAL", "FedAvg", "reduced"),
    "PFPS-LWC is ahead": ("PFPS-LWC", "Table 2", "PFPS-LWC", "FedPer", "reduced"),
    "the same, with the paper's 500 rounds": ("FedDUAL", "Table 1", "FedDUAL", "FedAvg", "full"),
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


def test_differences_to_best_other_method_match_stored_numbers() -> None:
    (line,) = [
        line for line in read("docs/papers.md").splitlines() if line.startswith("| cwFedAvg is the best of nine")
    ]
    paper_text, measured_text = line.split(" | ")[1:3]
    cells = pd.read_csv(ROOT / "docs/papers/reduced/cells.csv").query("paper == 'cwFedAvg' and table == 'Table 1'")
    assert cells["row"].nunique() == 9
    for text, values in ((paper_text, "published_mean"), (measured_text, "measured_mean")):
        accuracies = cells.pivot_table(index="row", columns="column", values=values)
        differences = (accuracies.loc["cwFedAvg"] - accuracies.drop(index="cwFedAvg").max()).round(1)
        numbers = parse_numbers(re.sub(r"\[.*?\]", "", text))
        assert set(numbers) == (set(differences) if "[" in text else {differences.min(), differences.max()})
        assert "[" in text or f"in {(differences > 0).sum()} of {len(differences)} columns" in text
    intervals = read_intervals("cwFedAvg", "reduced")
    for numbers in map(parse_numbers, re.findall(r"[+−]\d+\.\d+ \[[^\]]*\]", measured_text)):
        assert any(numbers == pytest.approx(interval, abs=0.051) for interval in intervals), numbers


#: Beginning of a sentence with values of Kendall's tau, with the paper, preset, table, kind of methods, and columns.
ORDERS = [
    ("τ is 0.71 over 14 pairs in both settings", "cwFedAvg", "reduced", "Table 1", "personal", "CIFAR-10"),
    ("On MNIST it is 0.31 over", "cwFedAvg", "reduced", "Table 1", "personal", "MNIST"),
    ("τ is 0.7 to 1.0 in the nine columns of Table 2", "PFPS-LWC", "reduced", "Table 2", "personal", ""),
    (", and 0.8 to 1.0 in the three of Table 4", "PFPS-LWC", "reduced", "Table 4", "personal", "CIFAR-10,"),
    ("On CIFAR-100 it is 1.0 at", "PFPS-LWC", "reduced", "Table 3", "personal", "β = 0.1"),
    (", 0.2 to 0.4 at", "PFPS-LWC", "reduced", "Table 3", "personal", "β = 0.[35]"),
    (", and 0.6 to 1.0 in Table 4", "PFPS-LWC", "reduced", "Table 4", "personal", "CIFAR-100"),
    ("(τ is 1.00 over 7 pairs)", "PFPS-LWC", "full", "Table 2", "personal", "β = 0.5"),
    ("(τ is 0.60 and 0.78)", "FedDW", "reduced", "Table I", "personal", "MNIST"),
    ("(τ is 0.25 and 0.14)", "FedDW", "reduced", "Table I", "personal", "CIFAR-10"),
    ("τ is −0.25 and 0.50 on MNIST", "FedDW", "reduced", "Table I", "global", "MNIST"),
    (", and −0.33 and 0.00 on", "FedDW", "reduced", "Table I", "global", "CIFAR-10"),
    ("(τ is 0.06 over 17 pairs)", "FedDUAL", "full", "Table 1", "global", "FMNIST"),
    ("(τ is 0.71 over 7 pairs)", "FedDW", "full", "Table I", "personal", "CIFAR-10"),
    ("(τ is 0.07 over 15 pairs)", "FedDW", "full", "Table I", "global", "CIFAR-10"),
]


def read_orders(paper: str, preset: str, table: str, kind: str, column: str) -> list[float]:
    """Return Kendall's tau of each column with a value, from the section of a table on a paper's page."""
    page = (ROOT / f"docs/papers/{preset}/{STEMS[paper]}.html").read_text()
    (section,) = [part for part in page.split("<h2")[1:] if re.match(rf"[^>]*>{table}<", part)]
    rows = [re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", row) for row in section.split("<tr>")]
    rows = [row for row in rows if len(row) > 4 and row[1] == kind and re.search(column, row[0])]
    return [float(row[3].replace("−", "-")) for row in rows if row[3] != "–"]


@pytest.mark.parametrize(("text", "paper", "preset", "table", "kind", "column"), ORDERS)
def test_orders_of_papers_page_match_stored_pages(
    text: str, paper: str, preset: str, table: str, kind: str, column: str
) -> None:
    assert " ".join(read("docs/papers.md").split()).count(text) == 1
    measured = read_orders(paper, preset, table, kind, column)
    printed = [float(number.replace("−", "-")) for number in re.findall(r"−?\d\.\d+", text)]
    if " to " in text:
        assert printed == [round(min(measured), 1), round(max(measured), 1)]
    else:
        assert list(dict.fromkeys(measured)) == printed


def test_widths_of_minima_match_stored_surfaces() -> None:
    surfaces = pd.read_csv(ROOT / "docs/papers/reduced/figures/feddual-figure-1.csv").groupby("panel")["value"]
    fractions = {panel: (values <= values.min() + 0.5).mean() for panel, values in surfaces}
    text = " ".join(read("docs/papers.md").split())
    assert f"value in {fractions['non-IID']:.0%} of the plane, and in {fractions['IID']:.0%} after IID training" in text
