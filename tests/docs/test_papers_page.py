"""The table of verdicts in docs/papers.md, computed again from the stored numbers of each preset."""

import re
from typing import NamedTuple

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
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def compute_differences(paper: str, table: str, method: str, rival: str, preset: str) -> pd.DataFrame:
    """Return published and measured accuracy of the method minus its rival's, one row per column of the table."""
    cells = pd.read_csv(ROOT / f"docs/papers/{preset}/cells.csv")
    accuracies = cells[(cells["paper"] == paper) & (cells["table"] == table)].set_index(["row", "column"])
    accuracies = accuracies[["published_mean", "measured_mean"]]
    return accuracies.loc[method] - accuracies.loc[rival]


def parse_numbers(text: str) -> list[float]:
    """Return all numbers with a sign."""
    return [float(number.replace("−", "-")) for number in re.findall(r"[+−]\d+\.\d+", text)]


class Interval(NamedTuple):
    """A measured difference, with its 95% interval and the data set of its column."""

    data: str
    difference: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.low > 0:
            return "reproduced"
        return "not reproduced" if self.high < 0 else "undecided"


def read_intervals(paper: str, preset: str, table: str, claim: str) -> list[Interval]:
    """Return the measured intervals of a claim about a table, from the paper's page."""
    page = (ROOT / f"docs/papers/{preset}/{STEMS[paper]}.html").read_text()
    (section,) = [part for part in page.split("<h2")[1:] if re.match(rf"[^>]*>{table}<", part)]
    (rows,) = [part.split("</table>")[0] for part in section.split("<h3>")[1:] if part.startswith(claim)]
    intervals = []
    for row in rows.split("<tr>")[2:]:
        column, _, measured = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)[:3]
        if "[" in measured:
            data = column.split(", ")[-1].replace("FMNIST", "Fashion-MNIST")
            intervals.append(Interval(data, *parse_numbers(measured)))
    return intervals


def read_row(claim: str) -> list[str]:
    """Return the cells behind a claim of the table of verdicts: published, measured, runs and verdict."""
    (line,) = [line for line in read("docs/papers.md").splitlines() if line.startswith(f"| {claim}")]
    return [cell.strip() for cell in line.split("|")[2:6]]


def check_intervals(text: str, intervals: list[Interval]) -> None:
    """Check that a text lists all intervals, or those of the lowest and highest difference with "to" between them."""
    if " to " in text:
        intervals = [min(intervals, key=lambda one: one.difference), max(intervals, key=lambda one: one.difference)]
    printed = [parse_numbers(numbers) for numbers in re.findall(r"[+−]\d+\.\d+ \[[^\]]*\]", text)]
    for numbers, interval in zip(sorted(printed), sorted(one[1:] for one in intervals), strict=True):
        assert numbers == pytest.approx(interval, abs=0.051)
    for data, numbers_of_data in re.findall(r"(?:^|, )([A-Z][\w-]+) ([+−].*?)(?=, [A-Z]|$)", text):
        expected = sorted(one.difference for one in intervals if one.data == data)
        assert sorted(parse_numbers(re.sub(r"\[.*?\]", "", numbers_of_data))) == pytest.approx(expected, abs=0.051), (
            data
        )


@pytest.mark.parametrize("claim", CLAIMS)
def test_differences_of_papers_page_match_stored_numbers(claim: str) -> None:
    paper, table, method, rival, preset = CLAIMS[claim]
    paper_text, measured_text, *_ = read_row(claim)
    differences = compute_differences(paper, table, method, rival, preset)
    measured = differences["measured_mean"].dropna()
    published = differences["published_mean"].dropna()
    if preset == "full":  # the page compares the columns that were run
        published = published[measured.index]
    for text, values in ((paper_text, published), (re.sub(r"\[.*?\]", "", measured_text), measured)):
        numbers, rounded_values = parse_numbers(text), [round(value, 1) for value in values]
        assert set(numbers) <= set(rounded_values)
        assert {min(rounded_values), max(rounded_values)} <= set(numbers)
        assert " to " in text or set(numbers) == set(rounded_values), "without a range, the text lists all differences"
    columns = f"in {(published > 0).sum()} of {len(published)} columns"
    assert re.findall(r"in \d+ of \d+ columns", paper_text) == ([columns] if " to " in paper_text else [])
    check_intervals(measured_text, read_intervals(paper, preset, table, f"{method} is ahead of {rival}"))


@pytest.mark.parametrize("claim", CLAIMS)
def test_verdicts_of_papers_page_match_stored_intervals(claim: str) -> None:
    paper, table, method, rival, preset = CLAIMS[claim]
    paper_text, _, runs, verdict = read_row(claim)
    intervals = read_intervals(paper, preset, table, f"{method} is ahead of {rival}")
    verdicts = [interval.verdict for interval in intervals]
    reproduced, undecided = verdicts.count("reproduced"), verdicts.count("undecided")
    assert reproduced + undecided == len(verdicts), "no claim of this table is contradicted"
    expected = f"reproduced in {reproduced} of {len(verdicts)} columns" if reproduced else "undecided"
    if reproduced and undecided:
        expected += f" and undecided in {WORDS[undecided]}"
    assert re.split(r"[,.]", verdict)[0] == expected
    if len(intervals) == 1:
        (published,) = parse_numbers(paper_text) if preset == "full" else parse_numbers(paper_text)[:1]
        is_outside = not intervals[0].low <= published <= intervals[0].high
        assert ("the published difference is outside our interval" in verdict) == is_outside
    cells = pd.read_csv(ROOT / f"docs/papers/{preset}/cells.csv").query("paper == @paper and table == @table")
    (seeds,) = cells[cells["row"].isin([method, rival])]["measured_runs"].dropna().unique()
    assert runs.startswith(f"`{preset}`")
    assert f"{WORDS[int(seeds)]} seeds" in runs or (seeds == 1 and "seeds" not in runs)


def test_differences_to_best_other_method_match_stored_numbers() -> None:
    paper_text, measured_text, runs, verdict = read_row("cwFedAvg is the best of nine")
    cells = pd.read_csv(ROOT / "docs/papers/reduced/cells.csv").query("paper == 'cwFedAvg' and table == 'Table 1'")
    assert cells["row"].nunique() == 9
    for text, values in ((paper_text, "published_mean"), (measured_text, "measured_mean")):
        accuracies = cells.pivot_table(index="row", columns="column", values=values)
        differences = (accuracies.loc["cwFedAvg"] - accuracies.drop(index="cwFedAvg").max()).round(1)
        numbers = parse_numbers(re.sub(r"\[.*?\]", "", text))
        assert set(numbers) == (set(differences) if "[" in text else {differences.min(), differences.max()})
        assert "[" in text or f"in {(differences > 0).sum()} of {len(differences)} columns" in text
    intervals = read_intervals("cwFedAvg", "reduced", "Table 1", "cwFedAvg is the best method")
    check_intervals(measured_text, intervals)
    data_by_verdict = {one.verdict: one.data for one in sorted(intervals, key=lambda one: one.difference)}
    assert len({(one.verdict, one.data) for one in intervals}) == len(data_by_verdict), "one data set for each verdict"
    assert verdict == ", ".join(f"{word} on {data}" for word, data in data_by_verdict.items())
    assert runs.startswith("`reduced`")


def test_accuracies_of_feddual_figure_5_match_stored_curves() -> None:
    _, measured_text, runs, verdict = read_row("FedDUAL's barycenter helps near the classifier")
    points = pd.read_csv(ROOT / "docs/papers/reduced/figures/feddual-figure-5.csv")
    curves = points.pivot_table(index="x", columns="line", values="mean")
    one, two, *others = curves.loc[curves.index.max()].round(1)
    expected = f"one layer {one}, two layers {two}, three to five layers {min(others)} to {max(others)}"
    assert (len(others), measured_text) == (3, expected)
    assert runs == "`reduced`"
    best_lines = [curves.loc[number].idxmax() for number in curves.index]
    assert best_lines[-1] == "last layers = 1" != best_lines[0]
    assert verdict == "undecided: the curves cross before the last round"


def test_values_of_server_memory_match_stored_cells() -> None:
    _, measured_text, runs, verdict = read_row("cwFedAvg's server memory (Table 7)")
    cells = pd.read_csv(ROOT / "docs/papers/full/cells.csv").query("paper == 'cwFedAvg' and table == 'Table 7'")
    agreeing = ((cells["measured_mean"] / cells["published_mean"] - 1).abs() <= 0.001).sum()
    assert measured_text == f"{WORDS[agreeing]} of {WORDS[len(cells)]} values agree within 0.1%"
    assert runs == "`full`, needs no training"
    assert (len(cells) - agreeing, verdict) == (1, "reproduced, except one value")
    text = " ".join(read("docs/papers.md").split())
    assert f"{WORDS[agreeing].capitalize()} of its {WORDS[len(cells)]} values agree within 0.1%" in text
    output = cells[cells["row"] == "cwFedAvg (Output)"].set_index("column")
    (our_100, paper_100), (our_1000, paper_1000) = (
        output.loc[classes, ["measured_mean", "published_mean"]] for classes in ("100", "1000")
    )
    assert f"stores {our_100:.2f} million parameters here and {paper_100:.2f} million in the paper" in text
    assert f"with 100 classes, and {our_1000:.2f} and {paper_1000:.2f} million with 1,000 classes" in text


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
