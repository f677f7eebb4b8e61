"""A finished study of two algorithms, run once. Each test has its own copy."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedpipe.planning import completion
from fedpipe.planning.planner import NewPlan
from fedpipe.report import contents
from fedpipe.report.data import StudyData
from tests import small_studies as studies

ROUNDS = 3


def finish(params: dict[str, Any]) -> NewPlan:
    """Run a study in the current folder, from its plan to its table."""
    new_plan = studies.prepare(params)
    studies.finish_study(new_plan)
    contents.write_report_files(contents.build_report_files(StudyData(new_plan)))
    completion.write_completion_mark(new_plan)
    return new_plan


@pytest.fixture(scope="session")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(folder):
        finish(studies.settings(("fedavg", "scaffold"), ROUNDS, study={"seeds": [0, 1]}))
    return folder


@pytest.fixture
def study(finished_study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished study, which is the working directory."""
    folder = tmp_path / "study"
    shutil.copytree(finished_study, folder)
    monkeypatch.chdir(folder)
    return folder
