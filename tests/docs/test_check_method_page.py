"""Run the study and the program of docs/check-method.md."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import yaml

from tests.analysis.conftest import finish
from tests.docs.page_blocks import blocks

PAGE = "docs/check-method.md"


def test_the_plain_loop_computes_the_same_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = {block.language: block.text for block in blocks(PAGE)}
    finish(yaml.safe_load(code["yaml"]))
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(code["python"].replace("studies/exact.yaml", "params.yaml"), {})
    lines = [line.split() for line in output.getvalue().splitlines()]
    assert [(number, name) for number, name, _ in lines] == [
        (number, name) for number in "123" for name in ("body.1.weight", "body.1.bias", "head.weight", "head.bias")
    ]
    assert 0 < max(float(difference) for *_, difference in lines) < 1e-15
