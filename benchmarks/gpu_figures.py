"""Merge the files of the parts of benchmarks/gpu.sh, and print them as JSON.

    python benchmarks/gpu_figures.py FOLDER

Each part has its seconds, its numbers (``figures``), and an ``error`` if it failed or took too long. ``checks``
compares the digests of the parts. A check is null if there is nothing to compare, for example because no step was
recorded. The exit status is 1 if a part has an error or a check is false.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
LOG_LINES = 15  #: of an error
STOPPED = (124, 137)  #: exit statuses of a part that took too long

Figures = dict[str, Any]


def read_part(folder: Path, name: str) -> Figures:
    """Read the numbers of a part, and explain its failure."""
    status, seconds, limit = map(int, (folder / f"{name}.status").read_text().split())
    part: Figures = {"seconds": seconds}
    numbers, tests, log = (folder / f"{name}.{suffix}" for suffix in ("json", "xml", "log"))
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    if status:
        reason = f"exit status {status}"
        if status in STOPPED:
            reason = f"it took longer than {limit} s" if limit > 0 else "there was no time left"
        part["error"] = "\n".join([reason, *lines[-LOG_LINES:]])
    try:
        part["figures"] = json.loads(numbers.read_text()) if numbers.is_file() else None
        if tests.is_file():
            part["figures"] = count_tests(tests)
    except (ValueError, ElementTree.ParseError) as error:  # it was stopped while it wrote
        part.setdefault("error", f"its numbers can't be read: {error}")
    if part.get("figures") is None:
        part.setdefault("error", "it wrote no numbers")
    return part


def count_tests(path: Path) -> Figures:
    """Count the tests of a report of pytest, and list those that failed."""
    suite = next(ElementTree.parse(path).iter("testsuite"))
    failed = [
        case.get("name")
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {"tests": int(suite.get("tests", 0)), "skipped": int(suite.get("skipped", 0)), "failed": failed}


def list_variants(parts: dict[str, Figures], prefix: str) -> dict[str, dict[tuple[Any, Any, bool], Figures]]:
    """List the measured variants of the parts whose names begin with ``prefix``, by stack, ladder and graphs."""
    return {
        name: {
            (row["stack"], row["ladder"], row["graphs"]): row for row in part["figures"]["variants"] if "digest" in row
        }
        for name, part in parts.items()
        if name.startswith(prefix) and part.get("figures")
    }


def check_repetition(parts: dict[str, Figures]) -> bool | None:
    """Whether two runs have the same bits."""
    runs = list_variants(parts, "bits-")
    pairs = [
        (rows[key], again[key])
        for name, rows in runs.items()
        if name.endswith("-1")
        for again in [runs.get(name.removesuffix("-1") + "-2", {})]
        for key in rows.keys() & again.keys()
    ]
    return compare_digests(pairs)


def check_graphs(parts: dict[str, Figures]) -> bool | None:
    """Whether steps that were recorded as CUDA graphs have the bits of the others."""
    pairs = [
        (row, rows[stack, ladder, False])
        for rows in list_variants(parts, "").values()
        for (stack, ladder, graphs), row in rows.items()
        if graphs and row["recorded_steps"] and (stack, ladder, False) in rows
    ]
    return compare_digests(pairs)


def compare_digests(pairs: Iterable[tuple[Figures, Figures]]) -> bool | None:
    """Whether all pairs have the same bits. None if there is no pair."""
    results = [first["digest"] == second["digest"] for first, second in pairs]
    return all(results) if results else None


def describe_commit() -> str | None:
    """Commit of this clone, with "-dirty" if files differ. None without Git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except FileNotFoundError:
        return None


def main(folder: Path) -> int:
    """Print the JSON. Return the exit status."""
    parts = {name: read_part(folder, name) for name in (folder / "parts").read_text().split()}
    rounds = {name: part for name, part in parts.items() if name.startswith(("bits-", "round-"))}
    checks = {"two_runs_have_equal_bits": check_repetition(rounds), "graphs_have_equal_bits": check_graphs(rounds)}
    devices = [part["figures"]["device"] for part in rounds.values() if part.get("figures")]
    figures = {
        "commit": describe_commit(),
        "date": time.strftime("%Y-%m-%d"),
        "device": devices[0] if devices else None,
        "seconds": sum(part["seconds"] for part in parts.values()),
        "checks": checks,
        "parts": parts,
    }
    print(json.dumps(figures, indent=1))
    return int(any("error" in part for part in parts.values()) or False in checks.values())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])) if len(sys.argv) == 2 else __doc__)
