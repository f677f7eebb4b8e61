"""The data of DVC's plots, for small studies that are easy to check by hand."""

import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fedpipe.core.storage import layout
from fedpipe.data.assignment import NAMES_METADATA
from fedpipe.report import contents, plots
from fedpipe.report.figures import style
from tests.browser import BROWSER, Browser, list_problems
from tests.report.conftest import PARTITION, select_rows
from tests.small_studies import ROOT


def test_learning_curves_name_lines_by_algorithm(two: Any) -> None:
    frame = plots.build_learning_curves(two.data)
    assert list(frame.columns) == ["line", "algorithm", "protocol", "round", "mean", "std", "seeds"]
    assert list(frame["line"].unique()) == ["fedavg", "local"]
    fedavg = select_rows(frame, line="fedavg", protocol="global-on-global")
    assert list(fedavg["mean"]) == pytest.approx([25.0, 60.0, 70.0])


def test_learning_curves_of_grid_name_lines_by_grid_point(make: Any) -> None:
    tree = make(["fedavg"], seeds=(0,), grid={"partition.alpha": [0.1, 1.0]})
    tree.write_all([{"global-on-global": [(run + 1, 10)]}] * 3 for run in range(2))
    lines = plots.build_learning_curves(tree.data)["line"]
    assert list(lines.unique()) == ["fedavg (alpha=0.1)", "fedavg (alpha=1.0)"]


def test_client_accuracies_contain_clients_with_test_samples(two: Any) -> None:
    write_partition(two)
    frame = plots.build_client_accuracies(two.data)
    first = select_rows(frame, line="fedavg", seed=0, protocol="personal-on-local")
    assert first[["client", "samples", "accuracy"]].to_numpy().tolist() == [[0, 2, 50.0], [1, 8, 50.0]]
    second = select_rows(frame, line="fedavg", seed=1, protocol="personal-on-local")
    assert list(second["accuracy"]) == [100.0, 50.0]
    assert list(frame["client_name"].unique()) == ["0", "1"]


def test_clients_csv_contains_client_names(two: Any) -> None:
    write_partition(two, ["writer 7", "Ann"])
    contents.write_report_files(contents.build_plot_data_files(two.data))
    header, first, second, *_ = Path("results/plots/clients.csv").read_text().splitlines()
    assert header == "line,seed,protocol,client,samples,accuracy,client_name", "client_name is the last column"
    assert first == "fedavg,0,personal-on-local,0,2,50.0,writer 7"
    assert second == "fedavg,0,personal-on-local,1,8,50.0,Ann"


def test_matrix_cells_are_from_last_measured_round(two: Any) -> None:
    for run, measured in enumerate(({"SL": 0.1, "CR": 0.2}, None, None, None)):
        two.write_matrices(run, measured)
    frame = plots.build_matrix_entries(two.data)
    assert list(frame.columns) == ["line", "matrix", "row", "column", "value"]
    assert len(frame) == 2 * 4
    assert set(frame["line"]) == {"fedavg"}
    assert list(frame[frame["matrix"] == "SL"]["value"]) == pytest.approx([0.3] * 4)


def write_partition(tree: Any, names: Sequence[str] = ()) -> None:
    """Write a partition of five samples to two clients, and empty matrices, which the plots need."""
    for run in range(len(tree.runs)):
        tree.write_matrices(run, None)
    assignment = {"sample": [0, 1, 2, 3, 4], "client": [0, 0, 1, 1, 1], "label": [0, 0, 0, 1, 1]}
    split = ["train", "train", "train", "train", "test"]
    metadata = {NAMES_METADATA: json.dumps(names)} if names else None
    table = pa.table(assignment | {"split": split}, metadata=metadata)
    tree.write_table(layout.get_assignment_path(PARTITION), table, "assignment.json")


def test_partition_csv_counts_samples_by_client_and_class(two: Any) -> None:
    write_partition(two)
    contents.write_report_files(contents.build_plot_data_files(two.data))
    assert Path("results/plots/partition.csv").read_text().splitlines() == [
        "partition,client,class,samples",
        '"digits (official split), 2 clients, partition dirichlet (alpha=0.3), seed 0",0,0,2',
        '"digits (official split), 2 clients, partition dirichlet (alpha=0.3), seed 0",1,0,1',
        '"digits (official split), 2 clients, partition dirichlet (alpha=0.3), seed 0",1,1,1',
    ]
    assert Path("results/plots/matrices.csv").read_text() == "line,matrix,row,column,value\n"
    assert len(Path("results/plots/clients.csv").read_text().splitlines()) == 1 + 2 * 2 + 2 * 2


def test_template_of_partition_plot_shows_names_of_clients() -> None:
    """`toNumber` sorts numbers, and would make one row "NaN" of all names."""
    template = json.loads((ROOT / ".dvc/plots/partition.json").read_text())
    assert template["transform"][1] == {
        "calculate": "isNaN(toNumber(datum.client)) ? datum.client : toNumber(datum.client)",
        "as": "client",
    }


def show_dvc_plots(tree: Any) -> Path:
    """Run `dvc plots show` with the project's settings. Return its page."""
    shutil.copytree(ROOT / ".dvc/plots", ".dvc/plots")
    for name in (".dvc/config", "dvc.yaml", "params.yaml"):
        shutil.copy(ROOT / name, name)
    data = tree.data
    contents.write_report_files(contents.build_table_files(data) | contents.build_plot_data_files(data))
    subprocess.run(["git", "init", "-q"], check=True)
    command = [Path(sys.executable).parent / "dvc", "plots", "show", "-o", "elsewhere"]
    subprocess.run(command, check=True, capture_output=True)
    return Path("elsewhere/index.html").absolute()


def test_dvc_page_keeps_hostile_names_inside_scripts(make: Any) -> None:
    """DVC writes the data of plots into scripts of its page without escaping."""
    hostile = '</script><img src=x onerror="alert(1)">'
    tree = make(["fedavg"], [0], {"data": [hostile, "< 5 & <!-- <script>"]})
    tree.write_all([{"global-on-global": [(run + 1, 10)]}] * 3 for run in range(2))
    write_partition(tree)
    tree.change(titles={"fedavg": hostile})
    page = show_dvc_plots(tree).read_text("utf-8")
    assert "img src=x onerror" in page, "the page contains the name"
    assert page.isascii(), "DVC's page declares no encoding"
    assert "<img" not in page
    assert "<!-- <" not in page
    assert page.count("<script") == page.count("</script>") == 3 + 4, "three libraries and four plots"
    assert "data=< 5 & ＜!-- ＜script>" in Path("results/plots/curves.csv").read_text("utf-8")


def test_browser_draws_all_dvc_plots(two: Any, tmp_path: Path) -> None:
    """With the project's settings, `dvc plots show` writes a page into any folder. Vega is Snakemake's copy."""
    if not BROWSER:
        pytest.skip("needs Chromium")
    write_partition(two)
    two.write_matrices(0, {"SL": 0.1, "CR": 0.2})
    painted = count_pixels(show_dvc_plots(two), tmp_path / "profile")
    assert len(painted) == 4
    for line in range(2):
        color = style.get_line_style(line)["color"].lower()
        assert painted[0].get(color, 0) > 100, f"the curve of line {line} is not in its color of the figures"
    assert all(len(colors) > 3 for colors in painted), "each plot has more colors than text and background"


#: Number of pixels by color of each plot, after Vega has drawn all four.
COLORS = """(async () => {
  for (let frame = 0; frame < 300 && document.querySelectorAll("canvas.marks[width]").length < 4; frame++)
    await new Promise(requestAnimationFrame);
  await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  return [...document.querySelectorAll("canvas")].map(canvas => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, found = {};
    for (let at = 0; at < pixels.length; at += 4) {
      const color = "#" + [0, 1, 2].map(part => pixels[at + part].toString(16).padStart(2, "0")).join("");
      found[color] = (found[color] || 0) + 1;
    }
    return found;
  });
})()"""


def count_pixels(page: Path, profile: Path) -> list[dict[str, int]]:
    """Return the number of pixels by color of each plot in a browser, without a network.

    Fail if the browser reports an error or requests another file.
    """
    runpy.run_path(str(ROOT / "docs/images/take_screenshots.py"))["include_vega"](page)
    browser = Browser(profile)
    try:
        assert list_problems(browser, page, 1280) == ([], [])
        answer = browser("Runtime.evaluate", expression=COLORS, returnByValue=True, awaitPromise=True)
        runtime_events = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled"}
        event_names = runtime_events | {"Log.entryAdded", "Network.requestWillBeSent"}
        late = [event for event in browser.events if event.get("method") in event_names]
        assert [event for event in late if event["params"].get("request", {}).get("url") != page.as_uri()] == []
        painted: list[dict[str, int]] = answer["result"]["value"]
        return painted
    finally:
        browser.close()
