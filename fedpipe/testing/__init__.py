"""The contract of algorithms as tests. `fedpipe check` and fedpipe's own tests run them.

Use it in your test::

    from fedpipe import testing

    def test_prox_satisfies_contract():
        assert testing.check_algorithm(Prox(mu=0.1)) == []

or one test for each check::

    @pytest.mark.parametrize("check", testing.CHECKS, ids=testing.get_check_title)
    def test_prox_satisfies(check):
        assert check(Prox(mu=0.1)) == []

:func:`make_trial` makes a small federation in memory, for tests of one algorithm. :func:`assert_same` compares its
states.
"""

from fedpipe.testing.checks import CHECKS, check_algorithm, get_check_title
from fedpipe.testing.comparisons import Check
from fedpipe.testing.trial import (
    CLASSES,
    MODELS,
    SIZES,
    Trial,
    assert_same,
    describe_difference,
    make_synthetic_clients,
    make_trial,
)

__all__ = [
    "CHECKS",
    "CLASSES",
    "MODELS",
    "SIZES",
    "Check",
    "Trial",
    "assert_same",
    "check_algorithm",
    "describe_difference",
    "get_check_title",
    "make_synthetic_clients",
    "make_trial",
]
