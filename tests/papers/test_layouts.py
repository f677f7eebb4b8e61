"""Layouts of the papers have a cell for each published number."""

import re
from collections import Counter
from typing import get_args

import pytest

from fedpipe.papers import layouts, published
from fedpipe.papers.published import CellId
from fedpipe.settings.base import Protocol

PAPERS = layouts.load_papers()
TABLES = [(paper, name) for paper in PAPERS.values() for name in paper.tables]
for_each_table = pytest.mark.parametrize(
    ("paper", "name"), TABLES, ids=[f"{paper.stem}-{name}" for paper, name in TABLES]
)


def test_layouts_contain_20_tables_and_45_figures():
    assert len(TABLES) == 20
    assert list(PAPERS["FedDW"].tables) == ["Table I", "Table II", "Table III", "Table IV"]
    others = {name: len(paper.tables) for name, paper in PAPERS.items() if name != "FedDW"}
    assert others == {"FedDUAL": 4, "PFPS-LWC": 5, "cwFedAvg": 7}
    figures = {name: list(paper.figures) for name, paper in PAPERS.items()}
    for name, count in {"FedDW": 8, "FedDUAL": 15, "PFPS-LWC": 8, "cwFedAvg": 14}.items():
        assert figures[name] == [f"Figure {number}" for number in range(1, count + 1)]
    diagrams = sum(figure.form == "none" for paper in PAPERS.values() for figure in paper.figures.values())
    assert diagrams == 8, "seven diagrams, and a toy network whose data are not published"


@for_each_table
def test_table_layout_has_published_cells(paper, name):
    table = paper.tables[name]
    layout_ids = list(paper.iterate_cell_ids(name))
    assert len(set(layout_ids)) == len(layout_ids)
    published_ids = {
        cell_id
        for cell_id, number in published.load_published_numbers().items()
        if (cell_id.paper, cell_id.table) == (paper.paper, name)
    }
    if not table.columns:
        assert table.reason
        assert not published_ids
    elif name == "Table IV":  # its published numbers are missing, which one row of published.csv records
        assert [(cell_id.row, cell_id.column) for cell_id in published_ids] == [("(unnamed)", "with and without DW")]
    elif table.metric == "hyperparameter":
        assert published_ids < set(layout_ids)
    else:
        assert set(layout_ids) == published_ids


def test_text_layout_has_published_numbers():
    for paper in PAPERS.values():
        texts = [CellId(paper.paper, "text", text.row, text.column, text.metric) for text in paper.text]
        assert texts == [
            cell_id for cell_id in published.load_published_numbers() if cell_id[:2] == (paper.paper, "text")
        ]


@for_each_table
def test_table_layout_is_consistent(paper, name):
    table = paper.tables[name]
    assert len(table.caption) > 20
    methods = {row.method for row in table.rows.values()}
    for label, row in table.rows.items():
        assert len(row.stub) == len(table.stub), label
        assert (row.method is None) == (row.minus is not None)
        assert set(row.minus or ()) <= set(table.rows)
    assert set(table.method_protocols) <= methods | {"feduv"}  # Table 6 of cwFedAvg shares a list with larger tables
    assert set(table.metrics) <= {*table.rows, *table.column_paths}
    for claim in table.claims:
        assert {claim.row, claim.rival or claim.row} <= set(table.rows)
        assert set(claim.columns) <= set(table.column_paths)
    if table.metric == "accuracy_pct":
        assert {table.get_protocol(row) for row in table.rows} <= set(get_args(Protocol))
        assert table.study


@for_each_table
def test_repeated_cells_equal_original_cells(paper, name):
    numbers, table = published.load_published_numbers(), paper.tables[name]
    repeated = {
        cell_id: paper.find_original_cell(cell_id)
        for cell_id in paper.iterate_cell_ids(name)
        if paper.find_original_cell(cell_id)
    }
    assert bool(repeated) == bool(table.repeats)
    for cell_id, original in repeated.items():
        assert numbers[cell_id].mean == pytest.approx(numbers[original].mean, abs=0.05), cell_id


def test_layouts_contain_51_repeated_cells():
    repeated = [
        cell_id
        for paper, name in TABLES
        for cell_id in paper.iterate_cell_ids(name)
        if paper.find_original_cell(cell_id)
    ]
    assert Counter(cell_id.paper for cell_id in repeated) == {"FedDW": 24, "FedDUAL": 3, "PFPS-LWC": 12, "cwFedAvg": 12}


def test_table_header_has_three_levels():
    table = PAPERS["FedDW"].tables["Table I"]
    names = ["MNIST", "CIFAR-10", "CIFAR-100", "IMDB"]
    assert table.header_rows == [
        [("Practical heterogeneous", 4), ("Pathological heterogeneous", 4)],
        [("CV", 3), ("NLP", 1)] * 2,
        [(name, 1) for name in names] * 2,
    ]
    assert table.column_paths["pathological/MNIST"] == ("Pathological heterogeneous", "CV", "MNIST")


def test_table_header_has_columns_of_one_and_two_levels():
    heads = PAPERS["cwFedAvg"].tables["Table 2"].header_rows
    assert heads[0] == [("Comm. cost", 1), ("Number of clients", 2), ("Data heterogeneity", 3)]
    assert [label for label, _ in heads[1]] == ["", "50 clients", "100 clients", "α = 0.01", "α = 0.5", "α = 1.0"]


def test_main_claim_compares_method_with_baseline():
    main_claims = {name: paper.main_claim for name, paper in PAPERS.items()}
    claims = {name: (table, claim.row, claim.rival) for name, (table, claim) in main_claims.items()}
    assert claims == {
        "FedDW": ("Table I", "FedDW", "FedAvg"),
        "FedDUAL": ("Table 1", "FedDUAL", "FedAvg"),
        "PFPS-LWC": ("Table 2", "PFPS-LWC", "FedPer"),
        "cwFedAvg": ("Table 1", "cwFedAvg", "FedAvg"),
    }


def test_differences_in_text_use_existing_cells():
    for paper in PAPERS.values():
        for text in paper.text:
            for table, row, column in text.minus or ():
                assert row in paper.tables[table].rows
                assert column in paper.tables[table].column_paths
            if text.largest:
                assert text.largest[1] in paper.tables[text.largest[0]].rows


def test_study_is_named_after_table_or_figure():
    for paper in PAPERS.values():
        entries = [*paper.tables.values(), *paper.figures.values()]
        assert all(re.fullmatch(r"(table|figure)\d+", entry.study) for entry in entries if entry.study)  # type: ignore[attr-defined]
        assert all(bool(figure.study) != (figure.form == "none") for figure in paper.figures.values())


def test_protocol_of_table_depends_on_method():
    table = PAPERS["cwFedAvg"].tables["Table 1"]
    assert table.get_protocol("FedUV") == "trained-on-local"
    assert table.get_protocol("cwFedAvg") == "personal-on-local"
    assert PAPERS["FedDW"].tables["Table I"].get_protocol("FedPer") == "kept-on-global"
    assert PAPERS["PFPS-LWC"].tables["Table 4"].get_protocol("FedProto") == "personal-on-local"
