"""Fixtures of all tests: the small federations of `fedpipe.testing`, and settings that make tests deterministic."""

import gc
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from torchvision.models import vgg

from fedpipe import testing
from fedpipe.cli import app
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.testing import Trial
from tests.browser import BROWSER, Browser
from tests.small_studies import RunFedpipe

#: Use the same examples on every machine, regardless of its speed.
hypothesis.settings.register_profile(
    "fedpipe", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("fedpipe")


#: Files with the longest slow tests. They begin first, so that no process waits for the last one. pytest-xdist would
#: begin with the files with the most tests.
LONGEST_FILES = (
    *("cluster/test_slurm.py", "cluster/test_slurm_faults.py", "pipeline/test_tuning_dag.py"),
    *("pipeline/test_code_edits.py", "pipeline/test_several_studies.py", "pipeline/test_readme_commands.py"),
    *("pipeline/test_dvc_tutorial.py", "pipeline/test_snakemake.py", "pipeline/test_dataset_model_pairs.py"),
    *("project/test_benchmarks.py", "pipeline/test_dvc_cache.py", "analysis/test_compare.py", "pipeline/test_run.py"),
    *("pipeline/test_forked_jobs.py", "docs/test_notebook.py", "pipeline/test_tutorial.py"),
    *("pipeline/test_make_papers.py", "report/test_trackers.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the files with the longest tests to the front."""
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


#: Commands of tests can be interrupted, even if the tests run in the background of a shell, which ignores Ctrl+C.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _prepare_process_after_collection() -> None:
    """Write no bytecode, because tests rewrite modules within a second. Skip collected tests in garbage collections."""
    sys.dont_write_bytecode = True
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_proxy() -> Iterator[None]:
    """Test servers run on this machine, so tests use no proxy."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("no_proxy", "NO_PROXY"):
            patch.setenv(name, "127.0.0.1,localhost")
        yield


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, with a copy of ``sys.path``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.fixture
def own_module(in_empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file own.py in the empty folder. A test writes it, and imports it as the module `own`."""
    monkeypatch.syspath_prepend(str(in_empty_folder))
    monkeypatch.delitem(sys.modules, "own", raising=False)
    yield in_empty_folder / "own.py"
    sys.modules.pop("own", None)  # other tests import another own.py


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not BROWSER:
        pytest.skip("needs Chromium")
    chromium = Browser(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.close()


@pytest.fixture
def make_clients() -> Callable[..., FederatedData]:
    """The function :func:`fedpipe.testing.make_synthetic_clients`, which returns a small federation."""
    return testing.make_synthetic_clients


@pytest.fixture
def make_trial() -> Callable[..., Trial]:
    """The function :func:`fedpipe.testing.make_trial`."""
    return testing.make_trial


@pytest.fixture
def narrow_vgg16(monkeypatch: pytest.MonkeyPatch) -> None:
    """VGG16 with the layers of the original but few channels, because its convolutions need a minute in float64."""
    channels = [8, 8, "M", 8, 8, "M", 16, 16, 16, "M", 16, 16, 16, "M", 16, 16, 512, "M"]
    monkeypatch.setitem(vgg.cfgs, "D", channels)


@pytest.fixture
def assert_same() -> Callable[..., None]:
    """The function :func:`fedpipe.testing.assert_same`, which compares tensors."""
    return testing.assert_same


@pytest.fixture
def run_fedpipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunFedpipe:
    """``run_fedpipe("plan")`` runs a command in this process. It returns the exit status, the output and the errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedpipe", *arguments])
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(SystemExit) as end:
            app.main()
        return int(end.value.code or 0), *capsys.readouterr()

    return run
