"""Equations in a terminal."""

import pytest

from fedpipe.cli.docs import equations


@pytest.mark.parametrize(
    ("tex", "text"),
    [
        (r"\theta^{t+1} = \sum_{k \in S} w_k \theta_k", "θᵗ⁺¹ = Σ_(k ∈ S) wₖ θₖ"),
        (r"F_k(\theta) + \frac{\mu}{2} \lVert \theta - \theta^t \rVert^2", "Fₖ(θ) + μ/2 ‖ θ - θᵗ ‖²"),
        (r"\frac{a + b}{\sqrt{c}} \tilde{w}", "(a + b)/(√c) w̃"),
        (r"x \leftarrow y, \qquad y_{local} = \lambda", "x ← y,    y_local = λ"),
        (r"a &= b \\ c &= \text{softmax}(d)", "a = b\nc = softmax(d)"),
        (r"\Bigl( \tfrac{1}{N} \Bigr)^{-1/2}", "( 1/N )^(-1/2)"),
        (r"a}", "a"),
    ],
)
def test_render_equation_returns_plain_text(tex: str, text: str) -> None:
    assert equations.render_equation(tex) == text


def test_render_docstring_equations_indents_equations_and_keeps_literals() -> None:
    text = "Before.\n\n.. math:: a_k \\\\\n          b^2\n\nWith :math:`\\beta` of :class:`~x.y`, and ``{0, 1}``.\n"
    assert equations.render_docstring_equations(text) == "Before.\n\n    aₖ\n    b²\n\nWith β of `x.y`, and `{0, 1}`."
    assert equations.render_docstring_equations("No equation here.") == "No equation here."
