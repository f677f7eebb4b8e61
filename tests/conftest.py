"""Fixtures of all tests: the small federations of `fedpipe.testing`, and what keeps tests the same on every machine."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch

from fedpipe import testing
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.testing import Trial

#: The same examples on every machine, however slow it is.
hypothesis.settings.register_profile(
    "fedpipe", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("fedpipe")


#: What tests start can be interrupted, also where the tests run in the background of a shell, which ignores Ctrl+C.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_proxy() -> Iterator[None]:
    """Servers of tests are on this machine, which no proxy of its user's need reach."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("no_proxy", "NO_PROXY"):
            patch.setenv(name, "127.0.0.1,localhost")
        yield


@pytest.fixture
def make_clients() -> Callable[..., FederatedData]:
    """See :func:`fedpipe.testing.make_synthetic_clients`."""
    return testing.make_synthetic_clients


@pytest.fixture
def make_trial() -> Callable[..., Trial]:
    """See :func:`fedpipe.testing.make_trial`."""
    return testing.make_trial


@pytest.fixture
def assert_same() -> Callable[..., None]:
    """See :func:`fedpipe.testing.assert_same`."""
    return testing.assert_same
