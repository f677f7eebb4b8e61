"""The wide tables for papers, as LaTeX and CSV."""

import csv
import dataclasses
import io
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from typer.testing import CliRunner

from fedpipe.cli import app
from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import files, layout
from fedpipe.planning.plan import Plan
from fedpipe.report import contents, table_notes, wide
from fedpipe.report.data import StudyData

LAST = "global-on-global"
GLOBAL, LOCAL = "Global test accuracy (global model)", "Local test accuracy (personalized)"


def make_round_counts(server, clients=None):
    """Return the counts of one round: correct answers of 100 of the server and of each client, if they are given."""
    result = {} if server is None else {LAST: [(server, 100)]}
    return [result | ({} if clients is None else {"personal-on-local": [(clients, 100)] * 2})]


def render_latex(tree):
    return wide.render_latex_table(tree.data)


def parse_latex_rows(text):
    """Return the cells of each row of a tabular."""
    body = text.split("\\midrule\n")[1].split("\\bottomrule")[0]
    return [[cell.strip() for cell in line.removesuffix(" \\\\").split(" & ")] for line in body.splitlines()]


def parse_csv(tree):
    """Return the header and the rows of the wide CSV table."""
    head, *rows = csv.reader(io.StringIO(wide.render_wide_csv(tree.data)))
    return head, rows


@pytest.fixture
def paper(make):
    """Three methods and two seeds, with two shared grid axes and one grid axis of FedProx."""
    grid = {"data": ["MNIST", "own_set"], "partition.alpha": [0.1, 0.5], "algorithms.fedprox.mu": [1, 2]}
    tree = make(["fedavg", "fedprox", "local"], (0, 1), grid)
    for index, run in enumerate(tree.runs):
        tree.write(index, make_round_counts(None if run.algorithm == "local" else 20 + index, 90 - index))
    return tree


@pytest.fixture
def one(make):
    """Three methods on a grid of two values, with one seed and only the global model."""
    tree = make(["fedavg", "fedprox", "local"], [0], {"partition.alpha": [0.1, 0.5]})
    tree.change(protocols=(LAST,))
    tree.write_all(map(make_round_counts, (70, 80, None, 90, 90, 60)))
    return tree


def test_wide_tables_show_overrides_of_one_method(one):
    one.set_overrides(lambda cell: {"federation.local_epochs": 15} if cell.algorithm == "fedprox" else {})
    result = render_latex(one)
    assert "% Overrides of fedprox: federation.local_epochs=15.\n" in result
    assert [row[0] for row in parse_latex_rows(result)] == ["fedavg", r"fedprox\textsuperscript{a}", "local"]
    assert r"\multicolumn{3}{l}{\textsuperscript{a} federation.local\_epochs=15} \\" in result
    _, rows = parse_csv(one)
    assert [row[0] for row in rows] == ["fedavg", "fedprox (federation.local_epochs=15)", "local"]


def test_star_in_latex_marks_significant_difference_to_baseline(make):
    tree = make(["fedavg", "fedprox", "local"], (0, 1, 2), {"partition.alpha": [0.1, 0.5]})
    correct_answers = [
        *((70, 71, 72), (75, 76, 78), (60, 61, 62)),  # differences to FedAvg: 5, 5, 6, and always -10 without interval
        *((80, 81, 82), (83, 80, 82), (60, 62, 63)),  # 3, -1, 0, and -20, -19, -19
    ]
    tree.write_all(make_round_counts(number, 90) for number in itertools.chain(*correct_answers))
    assert not re.search(r"superscript\{\*", render_latex(tree)), "without the statistic there is no star"
    tree.change_report(baseline="fedavg", statistics=("difference",))
    result = render_latex(tree)
    assert "% A star marks accuracy that differs from fedavg at the same grid point: " in result
    rows = {name: cells for name, *cells in parse_latex_rows(result)}
    assert {name: [cell.endswith(r"\textsuperscript{*}") for cell in cells] for name, cells in rows.items()} == {
        "fedavg": [False] * 4,
        "fedprox": [True, False, False, False],
        "local": [False, False, True, False],
    }


def test_latex_row_begins_with_no_star_or_bracket(one):
    """The end of the row before it would take them as its argument."""
    one.change(titles={"fedavg": "*ours", "fedprox": "[ours] FedX"})
    assert [row[0] for row in parse_latex_rows(render_latex(one))] == ["{}*ours", "{}[ours] FedX", "local"]


def test_wide_tables_note_overrides_at_some_grid_points(one):
    one.set_overrides(lambda cell: {"federation.precision": "bfloat16"} if cell.grid["partition.alpha"] == 0.5 else {})
    result = render_latex(one)
    names = "fedavg (alpha=0.5), fedprox (alpha=0.5), local (alpha=0.5)"
    assert f"% Overrides of {names}: federation.precision=bfloat16.\n" in result
    assert [row[0] for row in parse_latex_rows(result)] == ["fedavg", "fedprox", "local"]
    assert ["textsuperscript{a}" in cell for cell in parse_latex_rows(result)[0]] == [False, False, True]
    _, rows = parse_csv(one)
    assert rows[0][1:] == ["70.00", "90.00 (federation.precision=bfloat16)"]


def test_wide_csv_escapes_formulas(make):
    tree = make(["fedavg", "fedprox"], [0], {"data": ["=1+2", -1]})
    tree.write_all(map(make_round_counts, range(4)))
    tree.change(titles={"fedavg": "@SUM(A1)", "fedprox": "-x"}, protocols=(LAST,))
    head, rows = parse_csv(tree)
    assert head == ["algorithm", f"'=1+2 / {GLOBAL}", f"'-1 / {GLOBAL}"]
    assert [row[0] for row in rows] == ["'@SUM(A1)", "'-x"]


def test_latex_table_shows_two_grid_axes_and_two_protocols(paper):
    text = render_latex(paper)
    comments = [line for line in text.splitlines() if line.startswith("%")]
    facts = (
        r"`fedpipe show --params params.yaml --format latex`. The table needs \usepackage{booktabs}.",
        "(3 rounds), over all test samples. Mean ± standard deviation over 2 seeds.",
        "Global test accuracy (global model), Local test accuracy (personalized).",
        "Local test accuracy (personalized) is personal-on-local.",
        "bold",
        "Data: digits (official split), 2 clients, partition dirichlet (alpha=0.3).",
        "loop executor, with fedpipe 0.1.0, torch 2.11.0.",
    )
    assert len(comments) == len(facts)
    assert [fact for fact, comment in zip(facts, comments, strict=True) if fact not in comment] == []
    assert text.removeprefix("\n".join(comments)) == (
        r"""
\begin{tabular}{llcccccccc}
\toprule
&  & \multicolumn{4}{c}{MNIST} & \multicolumn{4}{c}{own\_set} \\
\cmidrule(lr){3-6} \cmidrule(lr){7-10}
&  & \multicolumn{2}{c}{alpha=0.1} & \multicolumn{2}{c}{alpha=0.5} & \multicolumn{2}{c}{alpha=0.1} & \multicolumn{2}{c}{alpha=0.5} \\
\cmidrule(lr){3-4} \cmidrule(lr){5-6} \cmidrule(lr){7-8} \cmidrule(lr){9-10}
algorithm & mu & Global test accuracy (global model) & Local test accuracy (personalized) & Global test accuracy (global model) & Local test accuracy (personalized) & Global test accuracy (global model) & Local test accuracy (personalized) & Global test accuracy (global model) & Local test accuracy (personalized) \\
\midrule
fedavg & -- & 20.50 $\pm$ 0.71 & \textbf{89.50 $\pm$ 0.71} & 28.50 $\pm$ 0.71 & \textbf{81.50 $\pm$ 0.71} & 36.50 $\pm$ 0.71 & \textbf{73.50 $\pm$ 0.71} & 44.50 $\pm$ 0.71 & \textbf{65.50 $\pm$ 0.71} \\
fedprox & 1 & \underline{22.50 $\pm$ 0.71} & \underline{87.50 $\pm$ 0.71} & \underline{30.50 $\pm$ 0.71} & \underline{79.50 $\pm$ 0.71} & \underline{38.50 $\pm$ 0.71} & \underline{71.50 $\pm$ 0.71} & \underline{46.50 $\pm$ 0.71} & \underline{63.50 $\pm$ 0.71} \\
fedprox & 2 & \textbf{26.50 $\pm$ 0.71} & 83.50 $\pm$ 0.71 & \textbf{34.50 $\pm$ 0.71} & 75.50 $\pm$ 0.71 & \textbf{42.50 $\pm$ 0.71} & 67.50 $\pm$ 0.71 & \textbf{50.50 $\pm$ 0.71} & 59.50 $\pm$ 0.71 \\
local & -- & -- & 85.50 $\pm$ 0.71 & -- & 77.50 $\pm$ 0.71 & -- & 69.50 $\pm$ 0.71 & -- & 61.50 $\pm$ 0.71 \\
\bottomrule
\end{tabular}
"""  # noqa: E501
    )


def test_wide_csv_joins_header_levels_in_one_line(paper):
    head, rows = parse_csv(paper)
    assert head[:4] == ["algorithm", "mu", *(f"MNIST / alpha=0.1 / {name}" for name in (GLOBAL, LOCAL))]
    assert len(head) == 2 + 2 * 2 * 2
    assert [row[:2] for row in rows] == [["fedavg", "–"], ["fedprox", "1"], ["fedprox", "2"], ["local", "–"]]
    assert rows[0][2] == "20.50 ± 0.71"
    assert rows[3][2] == "–"


def test_wide_tables_keep_grid_order_of_study_after_plan_is_read(make):
    tree = make(["fedavg"], [0], {"partition.alpha": [0.5, 0.1], "data": ["MNIST", "IMDB"]})
    tree.write_all(map(make_round_counts, range(50, 54)))
    tree.plan.write()
    tree.plan = Plan.read(tree.plan.study_files.plan)
    assert list(tree.plan.grid) == ["data", "partition.alpha"]
    head, (row,) = parse_csv(tree)
    assert head[1:] == [f"alpha={alpha} / {name} / {GLOBAL}" for alpha in (0.5, 0.1) for name in ("MNIST", "IMDB")]
    assert row[1:] == ["50.00", "51.00", "52.00", "53.00"]
    assert r"\multicolumn{2}{c}{alpha=0.5} & \multicolumn{2}{c}{alpha=0.1}" in render_latex(tree)


def test_wide_csv_numbers_are_in_markdown_table(paper):
    markdown = paper.render_markdown()
    for row in parse_csv(paper)[1]:
        for text in row[2:]:
            assert f" {text} |" in markdown


def test_latex_table_marks_best_and_second_best_with_ties(one):
    assert parse_latex_rows(render_latex(one)) == [
        ["fedavg", r"\underline{70.00}", r"\textbf{90.00}"],
        ["fedprox", r"\textbf{80.00}", r"\textbf{90.00}"],
        ["local", "--", r"\underline{60.00}"],
    ]


def test_latex_table_marks_equally_rounded_numbers_as_ties(make):
    tree = make(["fedavg", "fedprox", "local"], [0])
    tree.change(protocols=(LAST,))
    tree.write_all([{LAST: [(server, 1000000)]}] for server in (500001, 500002, 400000))
    assert [row[1] for row in parse_latex_rows(render_latex(tree))] == [
        r"\textbf{50.00}",
        r"\textbf{50.00}",
        r"\underline{40.00}",
    ]


def test_latex_table_of_one_method_marks_no_best(make):
    tree = make(["fedavg"], [0], {"algorithms.fedavg.mu": [1]})
    tree.write(0, make_round_counts(50))
    assert parse_latex_rows(render_latex(tree)) == [["fedavg", "1", "50.00"]]


def test_latex_table_without_grid_has_column_per_protocol(two):
    text = render_latex(two)
    assert f"\nalgorithm & {GLOBAL} & {LOCAL} \\\\\n\\midrule" in text


def test_single_protocol_is_in_latex_comment_and_csv_header(one):
    text = render_latex(one)
    assert r"algorithm & alpha=0.1 & alpha=0.5 \\" in text
    assert f"% Metrics: {GLOBAL}. " in text
    assert r"\cmidrule" not in text
    assert parse_csv(one)[0] == ["algorithm", f"alpha=0.1 / {GLOBAL}", f"alpha=0.5 / {GLOBAL}"]


def test_wide_tables_omit_validation_and_traffic_columns(make):
    tree = make(["fedavg", "fedprox"], [0])
    tree.change(protocols=(LAST, "global-on-validation"))
    for index in (0, 1):
        tree.write(index, [{LAST: [(5, 10)], "global-on-validation": [(6, 10)]}])
    assert "validation" not in render_latex(tree)
    assert parse_csv(tree)[0] == ["algorithm", GLOBAL]


def test_latex_table_escapes_special_characters(make):
    assert wide.escape_latex(r"a_b % & # $ {x} ~ ^ \ ± –") == (
        r"a\_b \% \& \# \$ \{x\} \textasciitilde{} \textasciicircum{} \textbackslash{} $\pm$ --"
    )
    tree = make(["fed_avg", "fedprox"], [0], {"data": ["10% & more", "#1_$"]})
    tree.write_all(map(make_round_counts, range(50, 54)))
    text = render_latex(tree)
    assert r"algorithm & 10\% \& more & \#1\_\$ \\" in text
    assert parse_latex_rows(text)[0][0] == r"fed\_avg"


def test_wide_tables_show_titles_in_rows_and_comments(searched):
    searched.change(titles={"fedavg": "Fed_Avg & λ = 10 %", "fedprox": "FedProx"})
    text = render_latex(searched)
    assert [row[0] for row in parse_latex_rows(text)] == [r"Fed\_Avg \& $\lambda$ = 10 \%", "FedProx"]
    assert "%   Fed_Avg & λ = 10 %: learning_rate=0.1 (alpha=0.1)" in text
    assert [row[0] for row in parse_csv(searched)[1]] == ["Fed_Avg & λ = 10 %", "FedProx"]
    assert "fedavg" not in text
    assert wide.escape_latex("λμωΩ ≤ ∞") == r"$\lambda$$\mu$$\omega$$\Omega$ $\le$ $\infty$"


def test_wide_tables_note_method_reported_by_another_protocol(make):
    tree = make(["fedavg", "local"], [0])
    tree.write(0, make_round_counts(60, 70))
    tree.write(1, make_round_counts(None, 80))
    tree.change(method_protocols={"local": "personal-on-local"}, titles={"local": "Local (τ)"})
    text = render_latex(tree)
    assert f"algorithm & reported accuracy & {LOCAL} \\\\\n" in text
    assert f"% Column reported accuracy: {GLOBAL}, or the metric in a note.\n" in text
    assert parse_latex_rows(text)[1] == [r"Local ($\tau$)", r"\textbf{80.00}\textsuperscript{a}", r"\textbf{80.00}"]
    assert f"\\bottomrule\n\\multicolumn{{3}}{{l}}{{\\textsuperscript{{a}} {LOCAL}}} \\\\\n\\end" in text
    assert parse_csv(tree)[1][1] == ["Local (τ)", f"80.00 ({LOCAL})", "80.00"]


def test_latex_table_notes_diverged_runs(one):
    for number in (0, 1):
        path = one.merged_files(number).rounds
        lost = files.table_to_frame(layout.read_merged_table(path)).assign(left_out=2)
        one.write_table(path, pa.Table.from_pandas(lost, preserve_index=False))
    text = render_latex(one)
    assert parse_latex_rows(text)[0][1] == r"\underline{70.00}\textsuperscript{a}"
    assert parse_latex_rows(text)[1][1] == r"\textbf{80.00}\textsuperscript{a}"
    assert r"\textsuperscript{a} diverged in 1 of 1 run}" in text
    assert "% fedavg (alpha=0.1): 2 updates were not finite and were omitted. 1 of 1 run diverged" in text


@pytest.fixture
def searched(make):
    """Two methods at two grid points. The table shows each with the best of three learning rates."""
    grid = {"partition.alpha": [0.1, 0.5], "federation.learning_rate": [0.01, 0.05, 0.1]}
    tree = make(["fedavg", "fedprox"], [0], grid)
    tree.change(protocols=(LAST,))
    tree.change_report(best_over=("federation.learning_rate",))
    tree.write_all(map(make_round_counts, (10, 30, 20, 10, 30, 20, 40, 50, 60, 20, 10, 50)))
    return tree


EDGE = (
    "learning_rate: the best values, 0.01 for fedprox and 0.1 for fedavg (alpha=0.1), are at the edge of the grid. "
    "Try a wider grid."
)


def test_latex_comments_show_best_grid_values(searched):
    text = render_latex(searched)
    assert parse_latex_rows(text) == [
        ["fedavg", r"\textbf{30.00}", r"\textbf{60.00}"],
        ["fedprox", r"\textbf{30.00}", r"\underline{50.00}"],
    ]
    assert (
        "best value of federation.learning_rate, selected on the test samples:\n"
        "%   fedavg: learning_rate=0.1 (alpha=0.1); learning_rate=0.05 (alpha=0.5)\n"
        "%   fedprox: learning_rate=0.01\n"
        f"% {EDGE}\n"
    ) in text


def test_markdown_table_warns_about_best_value_at_grid_edge(searched):
    paragraphs = searched.render_markdown().split("\n\n")
    assert paragraphs[2] == EDGE
    contents.write_report_files(contents.build_table_files(searched.data))
    contents.require_current_tables(searched.data, "results.md", "results.html")
    assert EDGE in contents.render_results(searched.data)


def test_grid_edge_warning_includes_numbers_that_yaml_reads_as_text(searched):
    """YAML 1.1 reads 1.0e-2 as a number, but 1e-2 as text."""
    rates = ["5e-2", 0.1, "1e-2"]
    cells = tuple(
        dataclasses.replace(cell, grid=cell.grid | {"federation.learning_rate": rates[index // 2 % 3]})
        for index, cell in enumerate(searched.plan.cells)
    )
    searched.change(cells=cells, grid=searched.plan.grid | {"federation.learning_rate": rates})
    (warning,) = table_notes.describe_best_values_at_grid_edges(searched.data)
    assert "learning_rate: the best values, 1e-2 for fedavg (alpha=0.1) and 0.1 for fedavg (alpha=0.5)," in warning


def test_grid_edge_warning_needs_best_value_at_edge(searched):
    inside = (10, 20, 30, 40, 20, 20)
    searched.write_all(map(make_round_counts, (*inside, *inside)))
    assert table_notes.describe_best_values_at_grid_edges(searched.data) == []
    searched.change_report(best_over=())
    assert table_notes.describe_best_values_at_grid_edges(searched.data) == []


def test_grid_edge_warning_ignores_text_values_and_missing_numbers(make):
    tree = make(["fedavg", "local"], [0], {"data": ["A", "B"], "federation.learning_rate": [0.1, 0.2, 0.3]})
    tree.change(protocols=(LAST,))
    tree.change_report(best_over=("data", "federation.learning_rate"))
    for index, run in enumerate(tree.runs):
        tree.write(index, make_round_counts(90 if index == 2 else 50) if run.algorithm == "fedavg" else [{}])
    assert table_notes.describe_best_values_at_grid_edges(tree.data) == []


@pytest.fixture
def begun(make):
    """Two methods, two grid points and two seeds. The second point has only one run of FedAvg."""
    tree = make(["fedavg", "fedprox"], (0, 1), {"partition.alpha": [0.1, 0.5]})
    tree.change(protocols=(LAST,))
    for index in (0, 1, 2, 3, 4):  # fedavg and fedprox at 0.1, and fedavg with seed 0 at 0.5
        tree.write(index, make_round_counts(50 + index))
    for index in (5, 6, 7):
        shutil.rmtree(tree.merged_files(index).marker.parent, ignore_errors=True)
    return tree


def test_partial_tables_mark_incomplete_numbers(begun):
    text = contents.render_partial_results(begun.plan, "latex")
    assert text.startswith("% PARTIAL ")
    assert ": 8 runs (" in text.splitlines()[0]
    assert parse_latex_rows(text) == [
        ["fedavg", r"\underline{50.50 $\pm$ 0.71}", r"\textbf{54.00}\textsuperscript{a}"],
        ["fedprox", r"\textbf{52.50 $\pm$ 0.71}", r"\dots{}"],
    ]
    assert r"\textsuperscript{a} 1 of 2 seeds" in text
    first, *rows = contents.render_partial_results(begun.plan, "csv").splitlines()
    assert first.startswith("# PARTIAL")
    assert rows == [
        f"algorithm,alpha=0.1 / {GLOBAL},alpha=0.5 / {GLOBAL}",
        "fedavg,50.50 ± 0.71,54.00 (1 of 2 seeds)",
        "fedprox,52.50 ± 0.71,…",
    ]
    with pytest.raises(ArtifactError, match=r"results.md is missing"):
        contents.render_results(begun.data, "latex")


def test_partial_latex_table_keeps_grid_axis_of_one_method(make):
    tree = make(["fedavg", "fedprox"], [0], {"data": ["A", "B"], "model.hidden": [1, 2]})
    cells = [c for c in tree.plan.cells if c.algorithm == "fedprox" or c.grid["model.hidden"] == 1]
    cells = [c if c.algorithm == "fedprox" else dataclasses.replace(c, grid={"data": c.grid["data"]}) for c in cells]
    tree.change(cells=tuple(cells), protocols=(LAST,))
    for index, run in enumerate(tree.runs):
        if run.algorithm == "fedprox":
            tree.write(index, make_round_counts(50 + index))
    finished_plan = dataclasses.replace(tree.plan, cells=tuple(c for c in cells if c.algorithm == "fedprox"))
    text = wide.render_latex_table(StudyData(finished_plan), tree.plan)
    assert "algorithm & hidden & A & B" in text
    assert [row[:2] for row in parse_latex_rows(text)] == [["fedprox", "1"], ["fedprox", "2"]]


def test_show_command_prints_latex_and_csv(one):
    one.plan.write()
    contents.write_report_files(contents.build_table_files(one.data))
    for form, expected_text in (("latex", render_latex(one)), ("csv", wide.render_wide_csv(one.data))):
        result = CliRunner().invoke(app.app, ["show", "--format", form], catch_exceptions=False)
        assert result.exit_code == 0
        assert result.stdout == expected_text
    assert CliRunner().invoke(app.app, ["show", "--format", "html"]).exit_code == 2
    (one.plan.study_files.tables_folder / "results.md").write_text("edited")
    with pytest.raises(ArtifactError, match=r"results.md does not match the runs"):
        contents.render_results(one.data, "latex")


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_latex_table_compiles(paper):
    paper.change(
        method_protocols={"local": "personal-on-local"},
        titles={"fedavg": wide.GREEK_LETTERS.replace(" ", "") + "≤≥∞→ % & $_x"},
    )
    page = (
        "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n"
        + render_latex(paper)
        + "\\end{document}\n"
    )
    Path("page.tex").write_text(page)
    subprocess.run(["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "page.tex"], check=True)
    assert Path("page.pdf").is_file()


TEXT_WIDTH = 397.5  #: text width of a NeurIPS page in points
COLUMN_SEPARATION = 12  #: two times \tabcolsep in points


def measure_cell(cell):
    """Return the width of a cell in Times at 10 pt, and the number of its columns."""
    span, _, text = re.fullmatch(r"(?:\\multicolumn\{(\d+)\}\{(c)\})?(.*)", cell).groups()
    for command, char in ((r"\$\\pm\$", "±"), (r"\\(textbf|underline|textsuperscript)", ""), (r"[{}]", "")):
        text = re.sub(command, char, text)
    font = FontProperties(family="STIXGeneral", size=10)
    return TextPath((0, 0), text, prop=font).get_extents().width if text else 0.0, int(span or 1)


def estimate_width(text):
    """Return the width of a tabular. A cell wider than the columns it spans widens the last one, as in LaTeX."""
    body = text.split("\\toprule\n")[1].split("\\bottomrule")[0]
    rows = [f" {line}".removesuffix(r" \\").split(" & ") for line in body.splitlines() if line.endswith(r"\\")]
    widths = [0.0] * len(rows[-1])
    cells = []
    for row in rows:
        start = 0
        for width, span in map(measure_cell, map(str.strip, row)):
            cells.append((span, start, width))
            start += span
        assert start == len(widths)
    for span, start, width in sorted(cells):
        gap = width - sum(widths[start : start + span]) - COLUMN_SEPARATION * (span - 1)
        widths[start + span - 1] += max(0.0, gap)
    return sum(widths) + COLUMN_SEPARATION * (len(widths) - 1)


def test_latex_table_of_seen_and_new_clients_fits_page_width(make):
    """Each protocol of clients has two columns, with deviations over seeds."""
    protocols = ["personal-on-local", "new-personal-on-local", LAST, "finetuned-on-local", "new-finetuned-on-local"]
    tree = make(["fedavg", "scaffold"], (0, 1))
    tree.change(protocols=tuple(protocols))
    tree.change_report(clients="both")
    for index in range(4):
        counts = {name: [(60 + 7 * index, 100)] * (1 if name == LAST else 2) for name in protocols}
        tree.write(index, [counts])
    text = render_latex(tree)
    head = text.split("\\toprule\n")[1].split("\\midrule")[0].splitlines()
    assert head == [
        r"& \multicolumn{2}{c}{Local test} & \multicolumn{1}{c}{Global test} & \multicolumn{2}{c}{Local test} \\",
        r"& \multicolumn{2}{c}{personalized} & \multicolumn{1}{c}{global model} & \multicolumn{2}{c}{fine-tuned} \\",
        r"\cmidrule(lr){2-3} \cmidrule(lr){4-4} \cmidrule(lr){5-6}",
        r"algorithm & seen & new &  & seen & new \\",
    ]
    assert estimate_width(text) < TEXT_WIDTH
    assert "% Metrics: Local test accuracy (personalized), Local test accuracy (new clients, personalized)" in text
    assert parse_csv(tree)[0][2] == "Local test accuracy (new clients, personalized)"


@pytest.mark.parametrize(("first", "clients"), [(LAST, ""), ("personal-on-local", "seen & new")])
def test_column_of_methods_own_protocols_is_no_column_of_first_protocol(make, first, clients):
    """With new clients, samples and model have levels of the head, which would name the first protocol's."""
    second = {LAST: "personal-on-local", "personal-on-local": LAST}[first]
    protocols = [first, "new-personal-on-local", "finetuned-on-local", "new-finetuned-on-local", second]
    tree = make(["fedavg", "scaffold"], (0,))
    tree.change(protocols=tuple(protocols), method_protocols={"scaffold": "finetuned-on-local"})
    tree.change_report(clients="both")
    for index in range(2):
        tree.write(index, [{name: [(60 + index, 100)] * (1 if name == LAST else 2) for name in protocols}])
    lines = render_latex(tree).split("\\toprule\n")[1].split("\\midrule")[0].splitlines()
    levels = [line for line in lines if not line.startswith(r"\cmidrule")]
    assert [re.findall(r"{c}{(.*?)}", level)[0] for level in levels[:2]] == ["reported", "accuracy"]
    assert levels[2].startswith(f"algorithm & {clients} &")
    heads = [name for name in parse_csv(tree)[0] if name.startswith("reported")]
    assert heads == ["reported accuracy", "reported accuracy (new clients)"][: 2 if clients else 1]


def test_latex_header_of_new_clients_has_level_for_metrics():
    kinds = itertools.product(("personal-on-local", "new-personal-on-local"), ("accuracy", "nll"))
    columns = [wide.Column(("alpha=0.1", "a head"), protocol, metric) for protocol, metric in kinds]
    empty = wide.WideTable(("algorithm",), columns, [])
    assert list(wide._render_latex_table_head(empty))[2:] == [
        r"& \multicolumn{4}{c}{personalized} \\",
        r"\cmidrule(lr){2-5}",
        r"& \multicolumn{2}{c}{seen} & \multicolumn{2}{c}{new} \\",
        r"\cmidrule(lr){2-3} \cmidrule(lr){4-5}",
        r"algorithm & accuracy & NLL & accuracy & NLL \\",
    ]
