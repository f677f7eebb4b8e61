"""Write docs/all-methods.md from the results of studies/all_methods.yaml.

    fedpipe run --params studies/all_methods.yaml
    python benchmarks/all_methods.py

The numbers are stored in docs/all-methods.csv with the key of each run. The page's tables are made from this file. The
figure docs/images/all-methods-ranks.svg is a copy of the study's.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pandas as pd

from fedpipe.analysis.load import load
from fedpipe.core.yaml_text import read_yaml
from fedpipe.report.words import DASH

ROOT = Path(__file__).parents[1]
STUDY = ROOT / "studies/all_methods.yaml"
PAGE, NUMBERS = ROOT / "docs/all-methods.md", ROOT / "docs/all-methods.csv"
FIGURE = ROOT / "docs/images/all-methods-ranks.svg"
GRID = "partition.alpha"
ALPHA = 0.1  #: of the page's first table
#: Columns of the first table: heading, and protocol and metric.
COLUMNS = {
    "personalized": "personal-on-local accuracy",
    "personalized, new clients": "new-personal-on-local accuracy",
    "fine-tuned": "finetuned-on-local accuracy",
    "fine-tuned, new clients": "new-finetuned-on-local accuracy",
    "ECE, personalized": "personal-on-local ece",
    "ECE, fine-tuned": "finetuned-on-local ece",
}
RANKED = "personal-on-local accuracy"  #: what the ranks compare


def collect_numbers() -> pd.DataFrame:
    """Collect the study's numbers: a row per run with its key, and a column per protocol and metric, in percent."""
    results = load(STUDY)
    table = results.table
    table = table[(table["average"] == "sample") & (table["round"] == "last")]
    table = table.assign(column=table["protocol"] + " " + table["metric"], alpha=table[GRID].astype(float))
    numbers = table.pivot_table("mean", ["algorithm", "alpha"], "column", sort=False).round(4).reset_index()
    keys = {(cell.algorithm, float(cell.grid[GRID])): cell.key for cell in results.plan.cells}
    numbers.insert(1, "method", [results.plan.get_method_title(name) for name in numbers["algorithm"]])
    numbers.insert(3, "key", [keys[pair] for pair in zip(numbers["algorithm"], numbers["alpha"], strict=True)])
    return numbers


def render_accuracies(numbers: pd.DataFrame) -> str:
    """Render the table of all methods at `ALPHA`, sorted by the mean rank."""
    rows = numbers[numbers["alpha"] == ALPHA].set_index("algorithm")
    ranks = compute_mean_ranks(numbers)
    lines = [f"| method | mean rank | {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (1 + len(COLUMNS))]
    for name in ranks.index:
        cells = [format_number(rows.loc[name, column]) for column in COLUMNS.values()]
        lines.append(f"| {rows.loc[name, 'method']} | {ranks[name]:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def render_alphas(numbers: pd.DataFrame) -> str:
    """Render the table of personalized accuracies of seen and new clients for each alpha."""
    alphas = sorted(numbers["alpha"].unique())
    heads = [f"{clients}, alpha = {alpha:g}" for alpha in alphas for clients in ("seen", "new")]
    lines = [f"| method | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    table, methods = (
        numbers.set_index(["algorithm", "alpha"]),
        dict(zip(numbers["algorithm"], numbers["method"], strict=True)),
    )
    for name in compute_mean_ranks(numbers).index:
        cells = [
            format_number(table.loc[(name, alpha), f"{prefix}{RANKED}"]) for alpha in alphas for prefix in ("", "new-")
        ]
        lines.append(f"| {methods[name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def compute_mean_ranks(numbers: pd.DataFrame) -> pd.Series:
    """Compute the mean rank of each method over the values of alpha, best first."""
    ranks = numbers.groupby("alpha")[RANKED].rank(ascending=False)
    return ranks.groupby(numbers["algorithm"], sort=False).mean().sort_values(kind="stable")


def format_number(value: float) -> str:
    """Format a number in percent. Methods without such a model have a dash."""
    return DASH if pd.isna(value) else f"{value:.1f}"


def write_tables(page: str, numbers: pd.DataFrame) -> str:
    """Write the tables of the page."""
    return replace_tables(page, {"accuracies": render_accuracies(numbers), "alphas": render_alphas(numbers)})


def replace_tables(page: str, tables: dict[str, str]) -> str:
    """Replace the tables of a page, which are between comments with their names."""
    for name, text in tables.items():
        page, count = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda match, text=text: match[1] + text + "\n" + match[2],
            page,
            flags=re.S,
        )
        assert count == 1, name
    return page


def main() -> None:
    """Store the numbers and the figure, and write the page."""
    numbers = collect_numbers()
    assert {*numbers["alpha"]} == {*read_yaml(STUDY.read_text(), STUDY)["study"]["grid"][GRID]}
    numbers.to_csv(NUMBERS, index=False)
    PAGE.write_text(write_tables(PAGE.read_text(), pd.read_csv(NUMBERS)))
    shutil.copy(ROOT / f"results/studies/{STUDY.stem}/figures/ranks.svg", FIGURE)


if __name__ == "__main__":
    main()
