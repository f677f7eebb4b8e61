import itertools
import subprocess
import sys

import pytest

from fedpipe.core import rng

USES = list(itertools.product((0, 1), ("batches/0", "batches/1", "participants"), (0, 1, 11), (0, 1, 11)))


def draw_integers(use):
    return tuple(rng.make_generator(*use).integers(2**62, size=4).tolist())


def test_generator_repeats_draws_in_any_order_of_uses():
    expected = {use: draw_integers(use) for use in USES}
    assert {use: draw_integers(use) for use in reversed(USES)} == expected


def test_generators_of_different_uses_have_different_draws():
    assert len({draw_integers(use) for use in USES}) == len(USES)
    assert len({rng.derive_entropy(*use) for use in USES}) == len(USES)


def test_entropy_separates_adjacent_numbers():
    """Round 1 of client 11 is not round 11 of client 1."""
    assert rng.derive_entropy(1, "a", 1, 11) != rng.derive_entropy(1, "a", 11, 1)
    assert rng.derive_entropy(1, "a", 1, 1) != rng.derive_entropy(11, "a", 1)


def test_entropy_is_equal_in_another_process():
    """The entropy must not depend on Python's salted hash."""
    program = "from fedpipe.core import rng; print(rng.derive_entropy(3, 'batches/0', 2, 5))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert int(output) == rng.derive_entropy(3, "batches/0", 2, 5)


def test_entropy_has_128_bits():
    values = [rng.derive_entropy(seed, "bits") for seed in range(200)]
    assert all(0 <= value < 2**128 for value in values)
    assert max(values) > 2**127
    assert {value % 2 for value in values} == {0, 1}


def test_entropy_uses_zero_for_missing_round_and_client():
    assert rng.derive_entropy(5, "init/0") == rng.derive_entropy(5, "init/0", 0, 0)


@pytest.mark.parametrize(("seed", "value"), [(0, 0.5), (1, 0.5)])
def test_first_draws_of_generators_have_uniform_mean(seed, value):
    numbers = [rng.make_generator(seed, "spread", number).random() for number in range(400)]
    assert sum(numbers) / 400 == pytest.approx(value, abs=0.05)
