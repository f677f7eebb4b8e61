import contextlib
import shutil
from pathlib import Path

import pytest

from fedpipe.engine.run import Run
from fedpipe.planning.planner import NewPlan
from tests import small_studies as studies

SCAFFOLD_ROUNDS = 4


@pytest.fixture(autouse=True)
def in_empty_folder(in_empty_folder: Path) -> Path:
    return in_empty_folder


@pytest.fixture(scope="session")
def _scaffold_study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NewPlan]:
    folder = tmp_path_factory.mktemp("scaffold")
    with contextlib.chdir(folder):
        plan, _ = studies.train_scaffold(SCAFFOLD_ROUNDS)
    return folder, plan


@pytest.fixture
def scaffold(_scaffold_study: tuple[Path, NewPlan], in_empty_folder: Path) -> tuple[NewPlan, Run]:
    """A plan of SCAFFOLD and its complete run, copied into the current folder."""
    folder, plan = _scaffold_study
    shutil.copytree(folder, in_empty_folder, dirs_exist_ok=True)
    return plan, studies.open_runs(plan)[0]
