"""A finished study of two algorithms, made once; each test has a copy of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedpipe.engine import collect
from fedpipe.planning.planner import NewPlan
from fedpipe.report import contents
from fedpipe.report.data import StudyData
from tests import small_studies as studies

ROUNDS = 3


def finish(params: dict[str, Any]) -> NewPlan:
    """Run a study in the current folder, from its plan to its table."""
    made = studies.prepare(params)
    for planned, run in zip(made.runs, studies.open_runs(made), strict=True):
        list(run.run_segment(planned.rounds))
        collect.collect_rounds(run.files, planned.rounds, made.keep_models)
    contents.write_files(contents.build_report_files(StudyData(made)))
    return made


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, before = tmp_path_factory.mktemp("finished"), Path.cwd()
    params = studies.settings(("fedavg", "scaffold"), ROUNDS, study={"seeds": [0, 1]})
    params["algorithms"]["scaffold"] = {}
    os.chdir(folder)
    try:
        finish(params)
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def study(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one's own with the finished study, and the working directory."""
    folder = tmp_path / "study"
    shutil.copytree(finished, folder)
    monkeypatch.chdir(folder)
    return folder
