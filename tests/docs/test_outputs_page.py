"""docs/outputs.md has the runs and methods of the demo, in the formats that the commands print."""

import re

import yaml

from fedpipe.core.components import component, registry
from fedpipe.report import words
from fedpipe.settings import methods
from tests.docs.page_blocks import blocks, read

RERUN, DIFFERENCE, TABLE = blocks("docs/outputs.md")
STUDY = yaml.safe_load(read("params.yaml"))
TITLES = [
    methods.get_algorithm_display_name(registry.build_component(component.ALGORITHM, label, {}))
    for label in STUDY["study"]["algorithms"]
]
LABELS = [words.format_metric_label(protocol) for protocol in STUDY["evaluation"]["protocols"]]


def test_rerun_output_has_runs_of_one_method() -> None:
    seeds = STUDY["study"]["seeds"]
    work = f"{len(seeds)} of {len(TITLES) * len(seeds)} runs to do, {len(RERUN.lines) - 2} jobs"
    assert RERUN.lines[0] == work
    assert f"`{work}`" in read("README.md")
    lines = [re.fullmatch(r"(\d) of 6  ([\w ]+) \(\d+ s(?:, about \d+ s left)?\)", line) for line in RERUN.lines[1:-1]]
    assert [line and line[1] for line in lines] == list("123456")
    runs = {f"segment FedDW seed {seed}" for seed in seeds}
    assert {line[2] for line in lines if line} == runs | {"table", "curves", "matrices"}
    assert RERUN.lines[-1].startswith("fedpipe: done. ")


def test_diff_output_shows_feddw() -> None:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in DIFFERENCE.lines]
    assert cells[0] == ["algorithm", "metric", "HEAD", "workspace", "workspace − HEAD"]
    assert [row[:2] for row in cells[2:4]] == [["FedDW", label] for label in LABELS]
    assert cells[-1] == ["algorithm.mu", "FedDW", str(STUDY["algorithms"]["feddw"]["mu"]), "10.0"]


def test_latex_output_has_all_methods() -> None:
    rows = [line.split(" & ") for line in TABLE.lines if line.endswith(r"\\")]
    assert rows[0] == ["algorithm", LABELS[0], rf"{LABELS[1]} \\"]
    assert [row[0] for row in rows[1:]] == TITLES
