"""`fedpipe compare`, on real commits and DVC's records of a small study."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import fedpipe
from fedpipe.analysis import compare as lineage
from fedpipe.report.statistics import compute_paired_difference
from fedpipe.report.words import format_metric
from tests import small_studies as studies
from tests.analysis.conftest import ROUNDS, finish
from tests.docs.page_blocks import ROOT
from tests.pipeline.conftest import ENVIRONMENT

SEEDS = [0, 1, 2]


def params(mu: float, seeds: list[int] = SEEDS, **sections: Any) -> dict[str, Any]:
    made = studies.settings(("fedavg", "feddw"), 2, study={"seeds": seeds}, federation={"batch_size": 10}, **sections)
    made["algorithms"]["feddw"] = {"mu": mu}
    return made


def typed(folder: Path, *command: str, fails: bool = False) -> str:
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


def compare(folder: Path, *names: str, fails: bool = False) -> str:
    return typed(folder, sys.executable, "-m", "fedpipe", "compare", *names, fails=fails)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three commits, recorded by DVC: a baseline, another mu, and another alpha with one seed less; then an edit."""
    folder = tmp_path_factory.mktemp("history")
    for name in ("dvc.yaml", ".dvcignore", "Snakefile"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "workflow/rules", folder / "workflow/rules")
    shutil.copytree(ROOT / ".dvc", folder / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp", "config.local"))
    (folder / "results").mkdir()
    shutil.copy(ROOT / "results/.gitignore", folder / "results")
    typed(folder, "git", "init", "-q", "-b", "main")
    before = Path.cwd()
    os.chdir(folder)
    try:
        for tag, made in (
            ("v1", params(0.1)),
            ("v2", params(5.0)),
            ("v3", params(5.0, [0, 2], partition={"alpha": 0.5})),
            (None, params(1.0)),
        ):
            finish(made)
            for name in ("results/figures", "results/diagnostics", "results/features", "results/.provenance"):
                (folder / name).mkdir(exist_ok=True, parents=True)
                (folder / name / "nothing").write_text("")
            if tag:
                typed(folder, "dvc", "commit", "-fq")
                typed(folder, "git", "add", "-A")
                typed(folder, "git", "commit", "-qm", tag)
                typed(folder, "git", "tag", tag)
    finally:
        os.chdir(before)
    return folder


def cells(said: str, algorithm: str, protocol: str) -> list[str]:
    """The numbers of a row of the table."""
    start = rf"\| {re.escape(algorithm)} +\| {re.escape(format_metric(protocol))} "
    (line,) = [line for line in said.splitlines() if re.match(start, line)]
    return [" ".join(cell.split()) for cell in line.strip("|").split("|")[2:]]


def accuracies(folder: Path, algorithm: str, protocol: str) -> pd.Series:
    frame = fedpipe.load(folder / "results").accuracies
    rows = frame.query(
        f"algorithm == '{algorithm}' and protocol == '{protocol}' and round == 2 and average == 'sample'"
    )
    return 100 * rows.set_index("seed")["accuracy"]


@pytest.mark.slow
def test_numbers_are_those_of_each_commit(history: Path, tmp_path: Path) -> None:
    """Against each commit's own results, brought back by git and DVC in a clone of its own."""
    said = compare(history, "v1", "v2")
    found = {}
    for tag in ("v1", "v2"):
        shutil.copytree(history, tmp_path / tag, ignore=shutil.ignore_patterns("tmp"), symlinks=True)
        typed(tmp_path / tag, "git", "checkout", "-qf", tag)
        typed(tmp_path / tag, "dvc", "checkout", "-fq")
        found[tag] = accuracies(tmp_path / tag, "feddw", "personal-on-local")
    one, other, change = cells(said, "FedDW", "personal-on-local")
    assert one == f"{found['v1'].mean():.2f} ± {found['v1'].std():.2f}"
    assert other == f"{found['v2'].mean():.2f} ± {found['v2'].std():.2f}"
    low, high = stats.ttest_rel(found["v2"], found["v1"]).confidence_interval(0.95)
    star = " *" if low > 0 or high < 0 else ""
    assert change == f"{(low + high) / 2:+.2f} ± {(high - low) / 2:.2f}{star}"
    assert cells(said, "FedAvg", "personal-on-local")[2] == "same runs"
    (setting,) = [line for line in said.splitlines() if "algorithm.mu" in line]
    assert [cell.strip() for cell in setting.strip("|").split("|")] == ["algorithm.mu", "FedDW", "0.1", "5.0"]
    assert said.count("\n| ") == 2 + 4 + 1, "no other setting differs"


@pytest.mark.slow
def test_seeds_are_paired_and_what_differs_for_all_is_said_once(history: Path) -> None:
    said = compare(history, "v2", "v3", "v1")
    assert [line.split("|")[2].strip() for line in said.splitlines() if "partition.alpha" in line] == ["all"]
    assert "| study.seeds" in said
    row = cells(said, "FedAvg", "global-on-global")
    assert len(row) == 5
    assert row[4] == "same runs"
    assert "±" in row[3]


@pytest.mark.slow
def test_one_revision_is_compared_with_what_lies_here_and_none_is_head(history: Path) -> None:
    said = compare(history, "v1")
    assert "workspace − v1" in said
    mean = accuracies(history, "feddw", "global-on-global")
    assert cells(said, "FedDW", "global-on-global")[1] == f"{mean.mean():.2f} ± {mean.std():.2f}"
    assert "workspace − HEAD" in compare(history)


@pytest.mark.slow
def test_files_that_are_gone_here_come_from_the_cache_and_else_it_is_said(history: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(history, folder, ignore=shutil.ignore_patterns("tmp"), symlinks=True)
    said = compare(folder, "v1", "v2")
    shutil.rmtree(folder / "results")
    assert compare(folder, "v1", "v2") == said
    assert "results/plan.json is missing" in compare(folder, "v1", fails=True)
    shutil.rmtree(folder / ".dvc/cache")
    assert "is neither here nor in DVC's cache or remote; `dvc fetch" in compare(folder, "v1", "v2", fails=True)


def removed(folder: Path, tag: str, *outs: str) -> None:
    """Take what DVC recorded of outs, folders with a list of their files, from the cache."""
    lock = typed(folder, "git", "show", f"{tag}:dvc.lock")
    for out in outs:
        (md5,) = re.findall(rf"path: {out}\n +hash: md5\n +md5: (\w+\.dir)", lock)
        (folder / f".dvc/cache/files/md5/{md5[:2]}/{md5[2:]}").unlink()


@pytest.mark.slow
def test_what_the_cache_lacks_comes_from_a_remote_beside_the_clone(history: Path, tmp_path: Path) -> None:
    """As docs/dvc.md sets it up; and where neither has the list of a folder's files, that is a sentence."""
    folder = tmp_path / "copy"
    shutil.copytree(history, folder, ignore=shutil.ignore_patterns("tmp"), symlinks=True)
    said = compare(history, "v1", "v2")  # DVC remembers in a folder of its own what a folder has read
    typed(folder, "dvc", "remote", "add", "-d", "store", "../store")
    shutil.copytree(folder / ".dvc/cache", tmp_path / "store")  # `dvc push` sends what has a remote in its own commit
    removed(folder, "v1", "results/runs/feddw", "results/runs/fedavg")
    (tmp_path / "store").rename(tmp_path / "away")
    sentence = re.compile(
        r"fedpipe: results/runs/fedavg/\w+/joined/0002/joined.json of 'v1' is neither here nor in DVC's cache or "
        r"remote; `dvc fetch --all-commits` may bring it.\n"
    )
    assert sentence.fullmatch(compare(folder, "v1", "v2", fails=True))
    (tmp_path / "away").rename(tmp_path / "store")
    shutil.rmtree(folder / ".dvc/cache")
    shutil.rmtree(folder / "results")
    assert compare(folder, "v1", "v2") == said, "the remote is this folder's, and of no commit"


@pytest.mark.slow
def test_a_remote_that_is_not_set_up_is_a_sentence(history: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(history, folder, ignore=shutil.ignore_patterns("tmp"), symlinks=True)
    typed(folder, "dvc", "config", "--local", "core.remote", "nowhere")
    said = "fedpipe: 'v1' can't be read: config file error: remote 'nowhere' doesn't exist\n"
    assert compare(folder, "v1", "v2", fails=True) == said


@pytest.mark.slow
def test_a_revision_whose_params_give_another_table_is_told(history: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(history, folder, ignore=shutil.ignore_patterns("tmp"), symlinks=True)
    kept = (folder / "params.yaml").read_text()
    for name, made in (
        ("mu", params(7.0, [0, 2], partition={"alpha": 0.5})),
        ("seeds", params(5.0, [0, 1], partition={"alpha": 0.5})),
        ("report", params(5.0, [0, 2], partition={"alpha": 0.5}, report={"round": "best"})),
        ("same", params(5.0, [0, 2], partition={"alpha": 0.5}, execution={"device": "cpu"})),
        ("own", params(5.0, [0, 2], partition={"alpha": 0.5}) | {"model": {"name": "absent.Model"}}),
    ):
        studies.write(made, folder)
        typed(folder, "git", "commit", "-qm", name, "params.yaml")
        typed(folder, "git", "tag", name)
    (folder / "params.yaml").write_text(kept)

    def warned(*names: str) -> list[str]:
        command = [sys.executable, "-m", "fedpipe", "compare", *names]
        environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        return done.stderr.splitlines()

    sentence = (
        "fedpipe: params.yaml of '{0}' gives another table than '{0}' records; run `dvc repro` there, and commit."
    )
    wrong = ["mu", "seeds", "report"]
    assert warned("v1", "v2", "v3", *wrong, "same", "own") == [sentence.format(name) for name in wrong]
    assert warned("mu") == [sentence.format("mu")], "of what lies here there is nothing to tell"


@pytest.mark.slow
def test_a_study_in_a_folder_of_a_repository_is_compared_as_any_other(history: Path, tmp_path: Path) -> None:
    folder = tmp_path / "thesis/experiments"
    shutil.copytree(history, folder, ignore=shutil.ignore_patterns(".git", "tmp"), symlinks=True)
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "all of it")):
        typed(folder.parent, "git", *command)
    assert compare(folder) == compare(history)


@pytest.mark.slow
def test_mistakes_are_told_in_a_sentence(history: Path, tmp_path: Path) -> None:
    assert "'v9' is no commit or experiment here" in compare(history, "v9", fails=True)
    assert "'v1' is named twice" in compare(history, "v1", "v1", fails=True)
    typed(tmp_path, "git", "init", "-q")
    assert "Traceback" not in compare(tmp_path, "HEAD", "main", fails=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_repository_of_another_user_is_a_sentence(history: Path, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(history, folder, ignore=shutil.ignore_patterns("tmp"), symlinks=True)
    for path in (folder, folder / ".git"):
        os.chown(path, 65534, 65534)
    said = compare(folder, "v1", "v2", fails=True)
    assert re.fullmatch(r"fedpipe: 'v1' can't be read: .* is not owned by current user\n", said)


def test_a_run_that_went_on_is_told_as_another(study: Path) -> None:
    """The number of rounds is in no key, and its table is another one all the same."""
    before = lineage._read_revision("before", None)
    made = studies.settings(("fedavg", "scaffold"), ROUNDS + 1, study={"seeds": [0, 1]})
    made["algorithms"]["scaffold"] = {}
    finish(made)
    after = lineage._read_revision("after", before.plan.report)
    assert {key for run in before.runs.values() for key, _ in run} == {
        key for run in after.runs.values() for key, _ in run
    }
    said = lineage._render_table([before, after])
    one, other, change = cells(said, "SCAFFOLD", "global-on-global")
    told = float(other.split()[0]) - float(one.split()[0])
    assert float(change.split()[0]) == pytest.approx(told, abs=0.011)
    assert "same runs" not in said
    assert re.search(
        rf"\| federation\.rounds +\| all +\| {ROUNDS} +\| {ROUNDS + 1} +\|", lineage._render_settings([before, after])
    )
    assert lineage._render_table([before, before]).count("same runs") == 2 * 2


def test_a_method_that_two_revisions_lack_has_no_same_runs_in_them(study: Path) -> None:
    third = lineage._read_revision("third", None)
    without = {
        name: {key: value for key, value in part.items() if "scaffold" not in str(key)}
        for name, part in (("accuracies", third.accuracies), ("runs", third.runs))
    }
    first, second = (third._replace(name=name, **without) for name in ("first", "second"))
    row = cells(lineage._render_table([first, second, third]), "SCAFFOLD", "global-on-global")
    assert row[:2] == [lineage.DASH] * 2
    assert row[3:] == [lineage.DASH] * 2


def test_an_interval_is_students_and_of_one_seed_there_is_none() -> None:
    one, other = (pd.Series(values, index=[0, 1, 2]) for values in ([1.0, 2.0, 3.0], [2.0, 4.0, 3.5]))
    found = compute_paired_difference(one, other)
    low, high = stats.ttest_rel(other, one).confidence_interval(0.95)
    np.testing.assert_allclose([found.mean - found.half_width, found.mean + found.half_width], [low, high])
    assert not found.is_significant
    assert compute_paired_difference(one, one + pd.Series([1.0, 1.1, 0.9])).is_significant
    assert not compute_paired_difference(one, one + 1).is_significant, "equal in all seeds: of chance that says nothing"
    assert not compute_paired_difference(one / 3, one / 3 + 0.1).is_significant, "but for rounding"
    assert not compute_paired_difference(one, one).is_significant
    single = compute_paired_difference(one.loc[[0]], other)
    assert math.isnan(single.half_width)
    assert (single.mean, single.seeds, single.is_significant) == (1.0, 1, False)
    assert compute_paired_difference(one.loc[[0]], other.loc[[1]]) is None
