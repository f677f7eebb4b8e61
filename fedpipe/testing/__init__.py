"""The contract of algorithms as tests, which `fedpipe check` and fedpipe's tests run.

Use it in your test::

    from fedpipe import testing

    def test_it_keeps_the_contract():
        assert testing.check_algorithm(Prox(mu=0.1)) == []

or one test for each part of it::

    @pytest.mark.parametrize("check", testing.CHECKS, ids=testing.title)
    def test_it_keeps(check):
        assert check(Prox(mu=0.1)) == []

:func:`make_trial` gives a small federation in memory, for tests of what the algorithm alone does, and
:func:`assert_same` compares the states that it leaves.
"""

from fedpipe.testing.checks import CHECKS, check_algorithm, title
from fedpipe.testing.comparisons import Check
from fedpipe.testing.expected import Expected, Sizes, check_expected
from fedpipe.testing.trial import CLASSES, MODELS, SIZES, Trial, assert_same, difference, make_trial, synthetic

__all__ = [
    "CHECKS",
    "CLASSES",
    "MODELS",
    "SIZES",
    "Check",
    "Expected",
    "Sizes",
    "Trial",
    "assert_same",
    "check_algorithm",
    "check_expected",
    "difference",
    "make_trial",
    "synthetic",
    "title",
]
