"""Write the tables of docs/tuned-methods.md from the results of studies/tuned.yaml.

    fedpipe run --params studies/tuned.yaml
    python benchmarks/tuned_methods.py

The numbers are stored in docs/tuned-methods.csv with the key of each run. The page's tables are made from this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
from all_methods import replace_tables

from fedpipe.analysis.load import load
from fedpipe.planning.rungs import TUNED, TUNING, UNTUNED
from fedpipe.report.words import DASH, format_mean

ROOT = Path(__file__).parents[1]
STUDY = ROOT / "studies/tuned.yaml"
PAGE, NUMBERS = ROOT / "docs/tuned-methods.md", ROOT / "docs/tuned-methods.csv"
#: Headings of the tuned keys, by the last part of the key.
KEYS = {
    "learning_rate": "learning rate",
    "local_epochs": "local epochs",
    "attraction": "Ditto's attraction",
    "rate": "FedALA's rate",
}


def collect_numbers() -> pd.DataFrame:
    """Collect the study's numbers: a row per run with its key, its accuracy in percent, and the winning values.

    Each method is measured by its own protocol.
    """
    results = load(STUDY)
    plan, draws = results.plan, results.draws
    accuracies = results.accuracies.query("average == 'sample'")
    accuracies = accuracies[accuracies["round"] == accuracies["round"].max()]
    winners = draws[draws["selected"] & (draws["rounds"] == draws["rounds"].max())].set_index("algorithm")
    rows = []
    for cell in plan.cells:
        protocol = plan.method_protocols.get(cell.algorithm, plan.protocols[0])
        name, is_tuned = cell.grid[TUNING], cell.grid[TUNING] == TUNED
        selected = accuracies[
            (accuracies["algorithm"] == cell.algorithm)
            & (accuracies["seed"] == cell.seed)
            & (accuracies[TUNING] == name)
            & (accuracies["protocol"] == protocol)
        ]
        row: dict[str, Any] = {
            "algorithm": cell.algorithm,
            "method": plan.get_method_title(cell.algorithm),
            "tuning": name,
            "seed": cell.seed,
            "key": cell.key,
            "protocol": protocol,
            "accuracy": round(100 * float(selected["accuracy"].item()), 4),
        }
        winner = winners.loc[cell.algorithm]
        row |= {key.rpartition(".")[2]: winner[key] if is_tuned else None for key in plan.tuning.over}
        row["validation"] = round(100 * float(winner["score"]), 4) if is_tuned else None
        rows.append(row)
    return pd.DataFrame(rows)


def render_accuracies(numbers: pd.DataFrame) -> str:
    """Render means and standard deviations over seeds with default and tuned values, sorted by the tuned ones."""
    by_row = numbers.groupby(["algorithm", "tuning"], sort=False)["accuracy"].agg(["mean", "std"])
    means = by_row["mean"].unstack()
    ranks = means.rank(ascending=False, method="min").astype(int)
    methods = numbers.groupby("algorithm")["method"].first()
    lines = ["| method | default | rank | tuned | rank | difference |", "|---|---:|---:|---:|---:|---:|"]
    for name in means.sort_values(TUNED, ascending=False).index:
        cells = [methods[name]]
        for tuning in (UNTUNED, TUNED):
            mean, deviation = by_row.loc[(name, tuning)]
            cells += [format_mean(mean, deviation), str(ranks.loc[name, tuning])]
        cells.append(f"{means.loc[name, TUNED] - means.loc[name, UNTUNED]:+.2f}".replace("-", "−"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def render_winners(numbers: pd.DataFrame) -> str:
    """Render the winning values of each method, in the order of the study."""
    winners = numbers[numbers["tuning"] == TUNED].groupby("algorithm", sort=False).first()
    lines = [f"| method | {' | '.join(KEYS.values())} | validation accuracy |", "|---|" + "---:|" * (len(KEYS) + 1)]
    for _, row in winners.iterrows():
        values = [DASH if pd.isna(row[key]) else f"{row[key]:g}" for key in KEYS]
        lines.append(f"| {row['method']} | {' | '.join(values)} | {row['validation']:.2f} |")
    return "\n".join(lines)


def write_tables(page: str, numbers: pd.DataFrame) -> str:
    """Write the tables of the page."""
    return replace_tables(page, {"accuracies": render_accuracies(numbers), "winners": render_winners(numbers)})


def main() -> None:
    """Write the numbers and the tables."""
    collect_numbers().to_csv(NUMBERS, index=False)
    PAGE.write_text(write_tables(PAGE.read_text(), pd.read_csv(NUMBERS)))


if __name__ == "__main__":
    main()
