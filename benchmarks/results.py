"""Measure this clone, and write the tables of benchmarks/RESULTS.md with their conditions.

    python benchmarks/results.py [SECTION ...] [--page FILE] [--pfllib CLONE] [--fl-bench CLONE]

A section's block is between comments with its name. It begins with the machine, its load before the program, the date
and the commit. The table is the one that the section's program prints, or its numbers one by one. A section is written
as soon as it is measured. If a program fails, its block and figure stay as they are, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from all_methods import replace_tables
from common import ROOT
from gpu_figures import describe_commit

from fedpipe.engine.environment import get_cpu_name

PAGE, FIGURE = ROOT / "benchmarks/RESULTS.md", ROOT / "docs/images/peers.svg"
#: Programs and their arguments, by section. {json}, {markdown} and {figure} are files.
PROGRAMS: dict[str, tuple[str, ...]] = {
    "startup": ("startup.py", "--json", "{json}"),
    "demo": ("demo.py", "--json", "{json}"),
    "round": ("round.py", "--device", "cpu", "--json", "{json}"),
    "models": ("models.py", "--seconds", "20"),
    "algorithms": ("algorithms.py",),
    "kernels": ("kernels.py",),
    "versioning": ("versioning.py", "--json", "{json}"),
    "partitions": ("partitions.py",),
    "clients": ("clients.py",),
    "scale": ("scale.py",),
    "learns": ("learns.py",),
    "peers": ("peers.py", "--markdown", "{markdown}", "--figure", "{figure}"),
}
SEPARATE = ("peers",)  #: sections that need other systems, which are measured only by name


def describe_conditions(commit: str | None) -> str:
    """Describe machine, load, date and commit."""
    load = f"load {os.getloadavg()[0]:.1f} before"
    return f"{os.cpu_count()} cores, {get_cpu_name()}, {load}, {time.strftime('%Y-%m-%d')}, at {commit or 'no commit'}:"


def measure_table(section: str, extra_arguments: list[str]) -> str:
    """Run the program of a section. Return its tables."""
    program, *arguments = PROGRAMS[section]
    with tempfile.TemporaryDirectory() as folder:
        names = {"json": "figures.json", "markdown": "tables.md", "figure": "figure.svg"}
        files = {kind: Path(folder, name) for kind, name in names.items()}
        command = [sys.executable, str(ROOT / "benchmarks" / program)]
        command += [argument.format(**files) for argument in arguments] + extra_arguments
        process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        if files["figure"].is_file():
            FIGURE.write_bytes(files["figure"].read_bytes())
        if files["markdown"].is_file():
            return files["markdown"].read_text().strip()
        if files["json"].is_file():
            return render_figures(json.loads(files["json"].read_text()))
    return process.stdout.strip()


def render_figures(figures: dict[str, Any]) -> str:
    """Render numbers as a table, without lists and digests."""
    rows = [
        f"| {name} | {format_value(value)} |"
        for name, value in figures.items()
        if name != "digest" and not isinstance(value, list)
    ]
    return "\n".join(["| figure | value |", "|---|---|", *rows])


def format_value(value: Any) -> str:
    """Format a number with three digits, or all digits before the point."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    """Measure the sections and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [name for name in PROGRAMS if name not in SEPARATE]
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"default: {' '.join(default)}")
    parser.add_argument("--page", type=Path, default=PAGE, help="page (default benchmarks/RESULTS.md)")
    parser.add_argument("--pfllib", type=Path, help="clone of PFLlib, for the section peers")
    parser.add_argument("--fl-bench", type=Path, help="clone of FL-bench, for the section peers")
    options = parser.parse_args()
    if unknown := [name for name in options.sections if name not in PROGRAMS]:
        parser.error(f"SECTION: {unknown[0]} is none of {', '.join(PROGRAMS)}.")
    clones = {"--pfllib": options.pfllib, "--fl-bench": options.fl_bench}
    clone_arguments = [text for name, path in clones.items() if path for text in (name, str(path.absolute()))]
    failed, commit = [], describe_commit()
    for section in options.sections or default:
        print(f"results.py: {section}", file=sys.stderr)
        conditions = describe_conditions(commit)
        try:
            table = measure_table(section, clone_arguments if section == "peers" else [])
        except subprocess.CalledProcessError as error:
            failed.append(f"{section}: {error}")
            continue
        options.page.write_text(replace_tables(options.page.read_text(), {section: f"{conditions}\n\n{table}"}))
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
