"""Executes examples/results.ipynb and stores its outputs. `make notebook` calls it after `make demo`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

import fedpipe

NOTEBOOK = Path(__file__).with_name("results.ipynb")


def execute_notebook(path: Path) -> Any:
    """Execute a notebook in its folder, which is next to params.yaml of a complete study.

    Return it with its outputs, and with the device of the study in its metadata.
    """
    book = nbformat.read(path, as_version=4)
    folder = path.resolve().parent
    NotebookClient(book, resources={"metadata": {"path": str(folder)}}, record_timing=False).execute()
    for cell in book.cells:
        for output in cell.get("outputs", ()):
            html = output.get("data", {}).get("text/html")
            if html:  # without pandas' style sheet
                output["data"]["text/html"] = re.sub(r"<style scoped>.*?</style>\n", "", html, flags=re.S)
    device = fedpipe.load(folder.parent / "params.yaml").provenance["device"].iloc[0]
    book.metadata = {
        "fedpipe": {"device": device},
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return book


if __name__ == "__main__":
    notebook = Path(sys.argv[1]) if len(sys.argv) > 1 else NOTEBOOK
    nbformat.write(execute_notebook(notebook), notebook)
