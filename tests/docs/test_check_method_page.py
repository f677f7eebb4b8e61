"""Run the study and the program of docs/check-method.md."""

import contextlib
import io

import pytest
import yaml

from tests.analysis.conftest import finish
from tests.docs.page_blocks import blocks

PAGE = "docs/check-method.md"


@pytest.mark.parametrize("noise", [{}, {"feature_noise": 0.1, "label_noise": 0.3}])
@pytest.mark.usefixtures("in_empty_folder")
def test_plain_loop_of_page_computes_almost_equal_models(noise: dict[str, float]) -> None:
    """With noise, each client has separate rows."""
    code = {block.language: block.text for block in blocks(PAGE)}
    study = yaml.safe_load(code["yaml"])
    study["dataset"] |= noise
    finish(study)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(code["python"].replace("studies/exact.yaml", "params.yaml"), {})
    lines = [line.split() for line in output.getvalue().splitlines()]
    assert [(number, name) for number, name, _ in lines] == [
        (number, name) for number in "123" for name in ("body.1.weight", "body.1.bias", "head.weight", "head.bias")
    ]
    assert 0 < max(float(difference) for *_, difference in lines) < 1e-15
