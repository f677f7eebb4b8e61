"""The tables of docs/papers.md that average over rounds, computed again from the stored curves."""

import functools
import math
import re

import pandas as pd
import pytest
from scipy import stats

from tests.docs.page_blocks import ROOT, read

PAPERS = ROOT / "studies/papers"
ROUND_11_TO_20, ROUND_26_TO_50, ROUND_405_TO_500 = slice(11, 20), slice(26, 50), slice(405, 500)


@functools.cache
def read_curves(table: str, protocol: str) -> pd.DataFrame:
    """Accuracy in percent, one row per round and one column per point, algorithm and seed."""
    runs, curves = (pd.read_csv(PAPERS / f"{table}.{kind}.csv", index_col="id") for kind in ("runs", "accuracies"))
    runs = runs[runs["preset"] == "full"]
    curves = curves[(curves["protocol"] == protocol) & curves.index.isin(runs.index)]
    columns = {}
    for run, row in curves.iterrows():
        first, last, step = map(int, re.findall(r"\d+", f"{row['rounds']}/1")[:3])
        accuracies = [100 * float(accuracy) for accuracy in row["accuracies"].split()]
        name = (runs.at[run, "point"], runs.at[run, "algorithm"], runs.at[run, "seed"])
        columns[name] = pd.Series(accuracies, index=range(first, last + 1, step))
    return pd.DataFrame(columns)


def read_table(first_cell: str) -> dict[str, list[str]]:
    """Return the cells behind the first of each row of the table whose heading begins with these cells."""
    lines = read("docs/papers.md").splitlines()
    (heading,) = [number for number, line in enumerate(lines) if line.startswith(first_cell)]
    rows = {}
    for line in lines[heading + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = line.strip("| ").split(" | ")
        rows[name] = cells
    return rows


def parse_numbers(text: str) -> list[float]:
    return [float(number.replace("−", "-")) for number in re.findall(r"[+−]?\d+\.\d+", text)]


def check_published(text: str, paper: str, table: str, row: str, column: str) -> None:
    """Check a cell with a published accuracy, or "failed"."""
    cells = pd.read_csv(ROOT / "docs/papers/full/cells.csv")
    ((published, status),) = cells.query("paper == @paper and table == @table and row == @row and column == @column")[
        ["published_mean", "status"]
    ].to_numpy()
    if status == "failed":
        assert text == "failed", row
    else:
        assert float(text) == pytest.approx(published, abs=0.0501), row


PARTICIPATIONS = ("0.3", "0.5", "0.7")


def test_accuracies_of_pfps_lwc_match_stored_curves() -> None:
    rows = read_table("| method | P = 0.3 | P = 0.5 | P = 0.7 |")
    assert len(rows) == 8
    published = pd.read_csv(ROOT / "docs/papers/full/cells.csv").query("paper == 'PFPS-LWC' and table == 'Table 2'")
    published_means = published.set_index(["row", "column"])["published_mean"]
    for name, cells in rows.items():
        method, _, model = name.partition(", ")
        protocol = "kept-on-local" if model == "right after local training" else "personal-on-local"
        for participation, cell in zip(PARTICIPATIONS, cells, strict=True):
            curves = read_curves("pfps_lwc/measured/table2", protocol)[f"participation={participation}, alpha=0.5"]
            measured = curves.at[20, (method.lower().replace("-", "_"), 0)]
            expected = [measured, published_means[method, f"0.5/{participation}"]]
            assert parse_numbers(cell) == pytest.approx(expected, abs=0.0501), (name, participation)


def test_other_cells_and_draws_of_pfps_lwc_match_stored_curves() -> None:
    text = " ".join(read("docs/papers.md").split())
    in_table_4 = read_curves("pfps_lwc/measured/table4", "personal-on-local")["data=CIFAR-10, participation=0.7"].loc[
        20
    ]
    assert f"FedPer has {in_table_4['fedper', 0]:.1f} (74.7) and FedAvg {in_table_4['fedavg', 0]:.1f} (61.0)" in text
    received, trained = (
        read_curves("pfps_lwc/measured/table2", protocol)["participation=0.3, alpha=0.1"].loc[20]["fedbn", 0]
        for protocol in ("personal-on-local", "kept-on-local")
    )
    assert f"FedBN has {received:.1f} as received and {trained:.1f} right after local training (67.9)" in text
    for row, cell, value in (("FedPer", "CIFAR-10/0.7", "74.7"), ("FedAvg", "CIFAR-10/0.7", "61.0")):
        check_published(value, "PFPS-LWC", "Table 4", row, cell)
    check_published("67.9", "PFPS-LWC", "Table 2", "FedBN", "0.1/0.3")
    draws = read_curves("pfps_lwc/readings/measured/claim-draws", "personal-on-local").loc[20].droplevel(0)
    differences = draws["pfps_lwc"] - draws["fedper"]
    half_width = stats.t.ppf(0.975, 2) * differences.std() / math.sqrt(3)
    low, high = differences.mean() - half_width, differences.mean() + half_width
    assert f"ahead by {differences.mean():.1f} points in the mean of the last rounds" in text
    assert f"interval from −{-low:.1f} to {high:.1f} (" in text
    first, second, third = differences.tolist()
    assert f"ahead by {first:.1f}, {second:.1f} and {third:.1f} |" in text


def test_differences_of_pfps_lwc_match_stored_curves() -> None:
    rows = read_table("| ahead of FedPer (published, in the last round) | P = 0.3 | P = 0.5 | P = 0.7 |")
    for number, participation in enumerate(PARTICIPATIONS):
        received, trained = (
            read_curves("pfps_lwc/measured/table5", protocol)[
                f"data=CIFAR-10, participation={participation}"
            ].droplevel(1, axis="columns")
            for protocol in ("personal-on-local", "kept-on-local")
        )
        leads = {name: received[name] - received["fedper"] for name in ("plt", "lwc", "pfps_lwc")}
        trained_lead = trained["pfps_lwc"] - trained["fedper"]
        means = [lead.loc[ROUND_11_TO_20].mean() for lead in leads.values()]
        measured = [*means, leads["pfps_lwc"][20], trained_lead.loc[ROUND_11_TO_20].mean()]
        printed = [parse_numbers(cells[number])[0] for cells in rows.values()]
        assert printed == pytest.approx(measured, abs=0.0501), participation


@pytest.mark.parametrize("protocol", ["global-on-global", "kept-on-global"])
def test_rounds_of_feddw_match_stored_curves(protocol: str) -> None:
    curves = read_curves("feddw/measured/table1", protocol)["data=CIFAR-10, environment=pathological"]
    fedavg = curves["fedavg", 0]
    tested = 0
    rows = read_table("| method | published | last round | rounds 26")
    for name, (published, last, mean_and_range, lead) in rows.items():
        check_published(published, "FedDW", "Table I", name, "pathological/CIFAR-10")
        algorithm = name.lower().replace("-", "")
        is_personal = lead == "–" and algorithm not in ("fedavg", "perfedavg")
        if is_personal != (protocol == "kept-on-global"):
            continue
        curve, difference = curves[algorithm, 0], curves[algorithm, 0] - fedavg
        measured = [curve[50]]
        for text, values in ((mean_and_range, curve.loc[ROUND_26_TO_50]), (lead, difference.loc[ROUND_26_TO_50])):
            if text != "–":
                measured += [values.mean(), values.min(), values.max()][: len(parse_numbers(text))]
        assert [number for cell in (last, mean_and_range, lead) for number in parse_numbers(cell)] == pytest.approx(
            measured, abs=0.0501
        ), name
        tested += 1
    assert tested == {"global-on-global": 7, "kept-on-global": 5}[protocol]


def test_rounds_of_feddual_match_stored_curves() -> None:
    curves, modules = (
        read_curves(f"feddual/measured/{table}", "global-on-global")["data=FMNIST"].droplevel(1, axis="columns")
        for table in ("table1", "table2")
    )
    labels = {"its adaptive loss alone": "adaptive", "its barycenter alone": "dynamic"}  # rows of Table 2
    rows = read_table("| method | published | last round | rounds 405")
    assert len(rows) == 11
    for name, (published, *cells) in rows.items():
        check_published(published, "FedDUAL", f"Table {2 if name in labels else 1}", labels.get(name, name), "FMNIST")
        curve = modules[labels[name]] if name in labels else curves[name.lower()]
        lead = curve - curves["fedavg"]
        measured = [curve[500]]
        for values in (curve, lead)[: 1 if name == "FedAvg" else 2]:
            last_values = values.loc[ROUND_405_TO_500]
            assert last_values.size == 20
            measured += [last_values.mean(), last_values.min(), last_values.max()]
        assert parse_numbers(" ".join(cells)) == pytest.approx(measured, abs=0.0501), name
