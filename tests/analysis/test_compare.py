"""`fedpipe compare` on commits and DVC records of a small study."""

import contextlib
import dataclasses
import io
import json
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
from fedpipe.cli import app
from fedpipe.report.results import read_merged_frame
from fedpipe.report.statistics import compute_paired_difference
from fedpipe.report.words import format_metric_label
from tests import small_studies as studies
from tests.analysis.conftest import ROUNDS, finish
from tests.docs.page_blocks import ROOT
from tests.pipeline.conftest import ENVIRONMENT

SEEDS = [0, 1, 2]


def build_params(mu: float, seeds: list[int] = SEEDS, **sections: Any) -> dict[str, Any]:
    params = studies.settings(("fedavg", "feddw"), 2, study={"seeds": seeds}, federation={"batch_size": 10}, **sections)
    params["algorithms"]["feddw"] = {"mu": mu}
    return params


def run_command(folder: Path, *command: str, fails: bool = False) -> str:
    process = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert bool(process.returncode) == fails, process.stdout + process.stderr
    return process.stderr if fails else process.stdout


def compare(folder: Path, *names: str, fails: bool = False) -> str:
    """Run `fedpipe compare` in this process. Return its output, or its errors if it fails."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["fedpipe", "compare", *names])
        patch.setattr(sys, "path", [*sys.path])
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as end:
            app.main()
    assert bool(end.value.code) == fails, output.getvalue() + errors.getvalue()
    return errors.getvalue() if fails else output.getvalue()


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three commits with DVC records (a baseline, another mu, another alpha with one seed less), then an edit."""
    folder = tmp_path_factory.mktemp("history")
    for name in ("dvc.yaml", ".dvcignore", "Snakefile"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "workflow/rules", folder / "workflow/rules")
    shutil.copytree(ROOT / ".dvc", folder / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp", "config.local"))
    (folder / "results").mkdir()
    shutil.copy(ROOT / "results/.gitignore", folder / "results")
    run_command(folder, "git", "init", "-q", "-b", "main")
    with contextlib.chdir(folder):
        for tag, params in (
            ("v1", build_params(0.1)),
            ("v2", build_params(5.0)),
            ("v3", build_params(5.0, [0, 2], partition={"alpha": 0.5})),
            (None, build_params(1.0)),
        ):
            finish(params)
            for name in ("results/figures", "results/diagnostics", "results/features", "results/.provenance"):
                (folder / name).mkdir(exist_ok=True, parents=True)
                (folder / name / "nothing").write_text("")
            if tag:
                run_command(folder, "dvc", "commit", "-fq")
                run_command(folder, "git", "add", "-A")
                run_command(folder, "git", "commit", "-qm", tag)
                run_command(folder, "git", "tag", tag)
    return folder


@pytest.fixture
def folder(history: Path, tmp_path: Path) -> Path:
    """A copy of the history."""
    return shutil.copytree(history, tmp_path / "copy", ignore=shutil.ignore_patterns("tmp"), symlinks=True)


@pytest.fixture(scope="module")
def difference(history: Path) -> str:
    """The output of `fedpipe compare v1 v2`."""
    return compare(history, "v1", "v2")


def read_cells(output: str, algorithm: str, protocol: str) -> list[str]:
    """Read the numbers of a row of the table."""
    start = rf"\| {re.escape(algorithm)} +\| {re.escape(format_metric_label(protocol))} "
    (line,) = [line for line in output.splitlines() if re.match(start, line)]
    return [" ".join(cell.split()) for cell in line.strip("|").split("|")[2:]]


def load_accuracies(folder: Path, algorithm: str, protocol: str) -> pd.Series:
    frame = fedpipe.load(folder / "results").accuracies
    rows = frame.query(
        f"algorithm == '{algorithm}' and protocol == '{protocol}' and round == 2 and average == 'sample'"
    )
    return 100 * rows.set_index("seed")["accuracy"]


@pytest.mark.slow
def test_compare_numbers_equal_results_of_each_commit(history: Path, difference: str, tmp_path: Path) -> None:
    """Compare with the results of each commit, which git and DVC restore in a clone."""
    results = {}
    for tag in ("v1", "v2"):
        shutil.copytree(history, tmp_path / tag, ignore=shutil.ignore_patterns("tmp"), symlinks=True)
        run_command(tmp_path / tag, "git", "checkout", "-qf", tag)
        run_command(tmp_path / tag, "dvc", "checkout", "-fq")
        results[tag] = load_accuracies(tmp_path / tag, "feddw", "personal-on-local")
    baseline, changed, change = read_cells(difference, "FedDW", "personal-on-local")
    assert baseline == f"{results['v1'].mean():.2f} ± {results['v1'].std():.2f}"
    assert changed == f"{results['v2'].mean():.2f} ± {results['v2'].std():.2f}"
    low, high = stats.ttest_rel(results["v2"], results["v1"]).confidence_interval(0.95)
    star = " *" if low > 0 or high < 0 else ""
    assert change == f"{(low + high) / 2:+.2f} ± {(high - low) / 2:.2f}{star}"
    assert read_cells(difference, "FedAvg", "personal-on-local")[2] == "same runs"
    (setting,) = [line for line in difference.splitlines() if "algorithm.mu" in line]
    assert [cell.strip() for cell in setting.strip("|").split("|")] == ["algorithm.mu", "FedDW", "0.1", "5.0"]
    assert difference.count("\n| ") == 2 + 4 + 1, "no other setting differs"
    rows = [line for line in difference.splitlines() if not line.startswith("| FedAvg")]
    changed_rows = compare(history, "v1", "v2", "--changed").splitlines()
    assert [line.split() for line in changed_rows] == [line.split() for line in rows], "only FedDW has different runs"


@pytest.mark.slow
def test_compare_pairs_seeds_and_lists_common_difference_once(history: Path) -> None:
    output = compare(history, "v2", "v3", "v1")
    assert [line.split("|")[2].strip() for line in output.splitlines() if "partition.alpha" in line] == ["all"]
    assert "| study.seeds" in output
    row = read_cells(output, "FedAvg", "global-on-global")
    assert len(row) == 5
    assert row[4] == "same runs"
    assert "±" in row[3]


@pytest.mark.slow
def test_compare_with_one_revision_uses_workspace_and_default_is_head(history: Path) -> None:
    output = compare(history, "v1")
    assert "workspace − v1" in output
    mean = load_accuracies(history, "feddw", "global-on-global")
    assert read_cells(output, "FedDW", "global-on-global")[1] == f"{mean.mean():.2f} ± {mean.std():.2f}"
    assert "workspace − HEAD" in compare(history)
    assert compare(history, "v1", "v1~0", "--changed") == (
        "All revisions have the same runs.\n\nThe methods that all revisions contain have the same settings.\n"
    )


@pytest.mark.slow
def test_compare_reads_missing_files_from_dvc_cache_or_prints_error(folder: Path, difference: str) -> None:
    shutil.rmtree(folder / "results")
    assert compare(folder, "v1", "v2") == difference
    assert "results/plan.json is missing" in compare(folder, "v1", fails=True)
    shutil.rmtree(folder / ".dvc/cache")
    assert re.search("of 'v1' is not .*`dvc fetch --all-commits`", compare(folder, "v1", "v2", fails=True))


def remove_from_cache(folder: Path, tag: str, *outs: str) -> None:
    """Remove DVC's lists of the files of these folders from the cache."""
    lock = run_command(folder, "git", "show", f"{tag}:dvc.lock")
    for out in outs:
        (md5,) = re.findall(rf"path: {out}\n +hash: md5\n +md5: (\w+\.dir)", lock)
        (folder / f".dvc/cache/files/md5/{md5[:2]}/{md5[2:]}").unlink()


@pytest.mark.slow
def test_compare_reads_files_from_relative_dvc_remote(folder: Path, difference: str, tmp_path: Path) -> None:
    """The remote is the one of docs/dvc.md. A list of files in neither cache nor remote causes an error."""
    run_command(folder, "dvc", "remote", "add", "-d", "store", "../store")
    shutil.copytree(folder / ".dvc/cache", tmp_path / "store")  # because `dvc push` needs the remote in the commit
    remove_from_cache(folder, "v1", "results/runs/feddw", "results/runs/fedavg")
    (tmp_path / "store").rename(tmp_path / "away")
    error = r"fedpipe: results/runs/fedavg/\w+/joined/0002/joined.json of 'v1' is not .*`dvc fetch --all-commits`.*\n"
    assert re.fullmatch(error, compare(folder, "v1", "v2", fails=True))
    (tmp_path / "away").rename(tmp_path / "store")
    shutil.rmtree(folder / ".dvc/cache")
    shutil.rmtree(folder / "results")
    assert compare(folder, "v1", "v2") == difference, "the remote is in this folder's configuration"


@pytest.mark.slow
def test_compare_rejects_undefined_dvc_remote(folder: Path) -> None:
    run_command(folder, "dvc", "config", "--local", "core.remote", "nowhere")
    assert re.fullmatch("fedpipe: 'v1' .*remote 'nowhere' doesn't exist.*\n", compare(folder, "v1", "v2", fails=True))


@pytest.mark.slow
def test_compare_rejects_revision_without_recorded_results(folder: Path) -> None:
    run_command(folder, "git", "rm", "-q", "dvc.lock")
    run_command(folder, "git", "commit", "-qm", "before the first record")
    error = r"^fedpipe: 'HEAD' does not contain results/plan\.json\. Check out 'HEAD', type `dvc repro`, and commit\.$"
    assert re.search(error, compare(folder, "HEAD", fails=True))


@pytest.mark.slow
def test_compare_rejects_plan_of_another_version(folder: Path) -> None:
    plan_path = folder / "results/plan.json"
    plan = json.loads(plan_path.read_text())
    plan_path.write_text(json.dumps({name: value for name, value in plan.items() if name != "cells"}))
    for command in (("dvc", "commit", "-fq"), ("git", "add", "-A"), ("git", "commit", "-qm", "another version")):
        run_command(folder, *command)
    error = (
        r"^fedpipe: HEAD: its results/plan\.json was written by another version of fedpipe\. Name another revision\.$"
    )
    assert re.search(error, compare(folder, "HEAD", "v1", fails=True))


@pytest.mark.slow
def test_compare_warns_about_revisions_with_outdated_results(folder: Path) -> None:
    original_params = (folder / "params.yaml").read_text()
    for name, params in (
        ("mu", build_params(7.0, [0, 2], partition={"alpha": 0.5})),
        ("seeds", build_params(5.0, [0, 1], partition={"alpha": 0.5})),
        ("report", build_params(5.0, [0, 2], partition={"alpha": 0.5}, report={"round": "best"})),
        ("same", build_params(5.0, [0, 2], partition={"alpha": 0.5}, execution={"device": "cpu"})),
        ("own", build_params(5.0, [0, 2], partition={"alpha": 0.5}) | {"model": {"name": "absent.Model"}}),
    ):
        studies.write(params, folder)
        run_command(folder, "git", "commit", "-qm", name, "params.yaml")
        run_command(folder, "git", "tag", name)
    (folder / "params.yaml").write_text(original_params)

    def read_warnings(*names: str) -> list[str]:
        command = [sys.executable, "-m", "fedpipe", "compare", *names]
        environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
        process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
        return process.stderr.splitlines()

    outdated_names = ["mu", "seeds", "report"]
    warnings = read_warnings("v1", "v2", "v3", *outdated_names, "same", "own")
    for name, warning in zip(outdated_names, warnings, strict=True):
        assert re.match(f"fedpipe: the params.yaml of '{name}' .*`dvc repro`", warning)
    (warning,) = read_warnings("mu")
    assert "'mu'" in warning, "the workspace is up to date"


@pytest.mark.slow
def test_compare_works_in_subfolder_of_repository(history: Path, tmp_path: Path) -> None:
    folder = tmp_path / "thesis/experiments"
    shutil.copytree(history, folder, ignore=shutil.ignore_patterns(".git", "tmp"), symlinks=True)
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "all of it")):
        run_command(folder.parent, "git", *command)
    assert run_command(folder, sys.executable, "-m", "fedpipe", "compare") == compare(history)


@pytest.mark.slow
def test_compare_rejects_invalid_revisions_and_folder_without_study(history: Path, tmp_path: Path) -> None:
    assert "'v9' is not a commit" in compare(history, "v9", fails=True)
    assert "'v1' is named twice" in compare(history, "v1", "v1", fails=True)
    run_command(tmp_path, "git", "init", "-q")
    assert "Traceback" not in compare(tmp_path, "HEAD", "main", fails=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_compare_rejects_repository_of_other_user(folder: Path) -> None:
    for path in (folder, folder / ".git"):
        os.chown(path, 65534, 65534)
    error = run_command(folder, sys.executable, "-m", "fedpipe", "compare", "v1", "v2", fails=True)
    assert re.fullmatch(r"fedpipe: 'v1' .* is not owned by current user.*\n", error)


def test_compare_counts_run_with_more_rounds_as_changed(study: Path) -> None:
    """The number of rounds is not part of the key, but it changes the table."""
    first_revision = lineage._read_revision("before", None)
    finish(studies.settings(("fedavg", "scaffold"), ROUNDS + 1, study={"seeds": [0, 1]}))
    after = lineage._read_revision("after", first_revision.plan)
    assert {key for run in first_revision.runs.values() for key, _ in run} == {
        key for run in after.runs.values() for key, _ in run
    }
    output = lineage._render_table([first_revision, after])
    baseline, changed, change = read_cells(output, "SCAFFOLD", "global-on-global")
    expected_change = float(changed.split()[0]) - float(baseline.split()[0])
    assert float(change.split()[0]) == pytest.approx(expected_change, abs=0.011)
    assert "same runs" not in output
    assert re.search(
        rf"\| federation\.rounds +\| all +\| {ROUNDS} +\| {ROUNDS + 1} +\|",
        lineage._render_setting_differences([first_revision, after]),
    )
    assert lineage._render_table([first_revision, first_revision]).count("same runs") == 2 * 2


def test_compare_lists_different_grid_as_setting(study: Path) -> None:
    """The revisions have no common grid point, so no setting of a run can be compared."""
    first_revision = lineage._read_revision("before", None)
    params = studies.settings(
        ("fedavg", "scaffold"), ROUNDS, study={"seeds": [0, 1], "grid": {"federation.learning_rate": [0.1, 0.2]}}
    )
    finish(params)
    after = lineage._read_revision("after", first_revision.plan)
    (line,) = lineage._render_setting_differences([first_revision, after]).splitlines()[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["study.grid", "all", lineage.DASH, "federation.learning_rate: [0.1, 0.2]"]
    table = lineage._render_table([first_revision, after], has_only_changes=True)
    assert table == lineage._render_table([first_revision, after])
    assert "learning_rate=0.2" in table
    others = first_revision._replace(settings={})
    assert lineage._render_setting_differences([first_revision, others]) == "No method is in all revisions."


def test_compare_shows_metrics_of_baselines_table(study: Path) -> None:
    """The workspace lists other metrics. It has the loss of the first one, and no AUC, which its runs do not record."""
    plan = dataclasses.replace(lineage._read_revision("before", None).plan, metrics=("nll", "auc"))
    baseline = lineage._read_revision("before", plan)._replace(plan=plan)
    after = lineage._read_revision("after", plan)._replace(runs={})
    assert {metric for _, _, metric in baseline.scores} == {"nll"}
    output = lineage._render_table([baseline, after])
    assert output.startswith("Test NLL (nats) and AUC (%) in the last")
    assert "A lower NLL is better." in output.splitlines()[0]
    losses = []
    for cell in (cell for cell in plan.cells if cell.algorithm == "scaffold"):
        rows = read_merged_frame(cell.merged_files.metrics)
        rows = rows.query(f"protocol == 'personal-on-local' and round == {ROUNDS} and total > 0")
        losses.append(np.average(rows["loss"], weights=rows["total"]))
    (line,) = [line for line in output.splitlines() if re.match(r"\| SCAFFOLD +\| Local test NLL ", line)]
    assert [" ".join(cell.split()) for cell in line.strip("|").split("|")][2:] == [
        *[f"{np.mean(losses):.2f} ± {np.std(losses, ddof=1):.2f}"] * 2,
        "+0.00 ± 0.00",
    ]
    assert "AUC (" not in output.split("\n\n")[1]


def test_compare_shows_clients_of_baselines_table(in_empty_folder: Path) -> None:
    """The other revision reports the new clients of the same runs, with their protocols."""
    params = studies.settings(rounds=2, study={"seeds": [0, 1]}, federation={"held_out": 0.2})
    params["evaluation"] = {"protocols": ["personal-on-local"]}
    tables = {}
    for clients in ("both", "new"):
        finish(params | {"report": {"clients": clients}})
        tables[clients] = lineage._read_revision(clients, None)
        if clients == "new":
            compared = lineage._read_revision(clients, tables["both"].plan)
    assert len(tables["new"].scores) < len(tables["both"].scores)
    assert compared.scores.keys() == tables["both"].scores.keys()
    output = lineage._render_table([tables["both"], compared])
    assert len(re.findall(r"\d \|    same runs \|", output)) == len(compared.scores)


def test_compare_shows_dashes_for_method_missing_from_revisions(study: Path) -> None:
    third = lineage._read_revision("third", None)
    without = {
        name: {key: value for key, value in part.items() if "scaffold" not in str(key)}
        for name, part in (("scores", third.scores), ("runs", third.runs))
    }
    first, second = (third._replace(name=name, **without) for name in ("first", "second"))
    row = read_cells(lineage._render_table([first, second, third]), "SCAFFOLD", "global-on-global")
    assert row[:2] == [lineage.DASH] * 2
    assert row[3:] == [lineage.DASH] * 2


@pytest.mark.parametrize("has_only_changes", [False, True])
def test_compare_without_accuracies_names_methods_and_protocols(study: Path, has_only_changes: bool) -> None:
    """For example, the methods have no global model."""
    first = lineage._read_revision("first", None)._replace(scores={})
    second = first._replace(name="second", runs={})
    text = lineage._render_table([first, second], has_only_changes)
    assert text == f"No revision has an accuracy of FedAvg, SCAFFOLD by {', '.join(first.plan.protocols)}."


def test_paired_difference_has_student_t_interval_and_needs_two_seeds() -> None:
    baseline, changed = (pd.Series(values, index=[0, 1, 2]) for values in ([1.0, 2.0, 3.0], [2.0, 4.0, 3.5]))
    difference = compute_paired_difference(baseline, changed)
    low, high = stats.ttest_rel(changed, baseline).confidence_interval(0.95)
    np.testing.assert_allclose(
        [difference.mean - difference.half_width, difference.mean + difference.half_width], [low, high]
    )
    assert not difference.is_significant
    assert compute_paired_difference(baseline, baseline + pd.Series([1.0, 1.1, 0.9])).is_significant
    assert not compute_paired_difference(baseline, baseline + 1).is_significant, (
        "without variance over seeds, significance is unknown"
    )
    assert not compute_paired_difference(baseline / 3, baseline / 3 + 0.1).is_significant, (
        "the differences of the seeds vary only by rounding"
    )
    assert not compute_paired_difference(baseline, baseline).is_significant
    single = compute_paired_difference(baseline.loc[[0]], changed)
    assert math.isnan(single.half_width)
    assert (single.mean, single.seeds, single.is_significant) == (1.0, 1, False)
    assert compute_paired_difference(baseline.loc[[0]], changed.loc[[1]]) is None
    assert lineage._format_difference(baseline, changed.iloc[:2]) == "+1.50 ± 6.35 (2 common seeds)"
    assert lineage._format_difference(baseline, changed).rstrip() == "+1.17 ± 1.90"
