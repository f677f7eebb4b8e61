"""A finished study of two algorithms, made once; each test has a copy of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedpipe.artifacts import PARAMS, StudyFiles, write_json
from fedpipe.engine import collecting
from fedpipe.report import stage
from tests import studies

ROUNDS = 3


def finish(params: dict[str, Any]) -> dict[str, Any]:
    """Run a study in the current folder, from its plan to its table."""
    made = studies.prepare(params)
    for run in studies.open_runs(made):
        list(run.segment(made["rounds"]))
        collecting.collect(run.files, made["rounds"], made["artifacts"]["keep_models"])
    stage.write_tables(made)
    for label in made["algorithms"]:
        keys = sorted(run["key"] for run in made["runs"] if run["algorithm"] == label)
        write_json(StudyFiles.of(PARAMS).keys(label), {"keys": keys, "rounds": made["rounds"]})
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
