"""The stored outputs of examples/results.ipynb match a fresh execution and have no noise."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests import small_studies as studies
from tests.pipeline.conftest import BIN, Project

NOTEBOOK = studies.ROOT / "examples/results.ipynb"
NOISE = {
    "machine path": r"/(?:home|root|tmp|work|usr|opt|Users|mnt)/",
    "hash": r"\b[0-9a-f]{12,}\b",
    "version": r"\b\d+\.\d+\.\d+",
    "time": r"\b\d\d:\d\d\b|\b20\d\d-\d\d",
    "address": r"\b0x[0-9a-f]+",
}


def list_texts(book: Any) -> Iterator[str]:
    """Yield the text of each output. Pictures have the text of a figure."""
    for output in (output for cell in book.cells for output in cell.get("outputs", ())):
        yield output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"]


def test_notebook_outputs_are_stored_without_noise() -> None:
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    codes = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in codes] == list(range(1, len(codes) + 1))
    assert all(cell.outputs for cell in codes)
    outputs = [output for cell in codes for output in cell.outputs]
    assert {output["output_type"] for output in outputs} == {"stream", "execute_result", "display_data"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    html = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert "<style" not in "".join(html)
    for name, pattern in NOISE.items():
        assert not re.search(pattern, "\n".join([*list_texts(book), *html])), name


@pytest.mark.slow
def test_notebook_outputs_match_fresh_execution(tmp_path: Path) -> None:
    """Execute the notebook in a clone after the demo. Compare accuracies if the processor is the stored one."""
    clone = Project(studies.copy_project(tmp_path / "clone"))
    clone.run("fedpipe", "run")
    clone.run("env", f"PYTHONPATH={clone.folder}", str(BIN / "python"), "examples/execute_notebook.py")
    stored, fresh = (nbformat.read(path, as_version=4) for path in (NOTEBOOK, clone.folder / "examples/results.ipynb"))
    assert [cell.source for cell in fresh.cells] == [cell.source for cell in stored.cells]
    has_same_processor = stored.metadata == fresh.metadata
    for before, after in zip(list_texts(stored), list_texts(fresh), strict=True):
        if has_same_processor:
            assert after == before
        else:
            shapes = [re.sub(r" *\b\d+\.\d+|'\d'", "#", text) for text in (before, after)]
            assert shapes[0] == shapes[1]
