"""Results that come from elsewhere: a harmed or hostile pack or plan ends every command in one sentence."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from fedpipe.analysis import prune
from fedpipe.cli import app
from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import archive
from fedpipe.core.storage.layout import RunFiles


def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The status with which `fedpipe` ends, and all it says."""
    monkeypatch.setattr(sys, "argv", ["fedpipe", *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        app.main()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def cut(zipped: Path) -> None:
    zipped.write_bytes(zipped.read_bytes()[:-30])


def upwards(zipped: Path) -> None:
    with zipfile.ZipFile(zipped, "a") as opened:
        opened.writestr("../../../../../PWNED/round.json", "{}")


@pytest.mark.parametrize("harm", [cut, upwards])
def test_every_command_names_a_hostile_pack_and_writes_nothing(
    study: Path, harm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = json.loads(Path("results/plan.json").read_text())
    runs = [run["path"] for run in plan["runs"]]
    zipped = archive.pack_path(RunFiles(Path(runs[0])).rounds_folder)
    harm(zipped)
    settings = yaml.safe_load(Path("params.yaml").read_text())
    settings["execution"] = {"rounds_per_job": 1, "clients_per_job": 5}
    Path("blocks.yaml").write_text(yaml.safe_dump(settings))

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in study.parent.rglob("*") if path.is_file()}

    before, keys = files(), [Path(run).name for run in runs]
    for arguments in (
        ["segment", runs[0], "--stop", "3"],
        ["segment", runs[0], "--stop", "4"],
        ["train", runs[0], "--round", "2", "--block", "0", "--size", "5"],
        ["collect", runs[0], "--rounds", "3"],
        ["plan", "--params", "blocks.yaml"],
        ["verify", runs[0]],
        ["trace", "results/tables/results.md", "fedavg.global-on-global"],
        ["diff", keys[0], keys[1]],
        ["status"],
    ):
        status, said = typed(monkeypatch, capsys, *arguments)
        assert status == (1 if arguments[0] == "verify" else 2), arguments
        (line,) = (line for line in said.splitlines() if str(zipped) in line)
        assert f"{zipped} is damaged (" in line, arguments
        assert f"; delete it and {zipped.parent}/segments, then `dvc checkout` brings back" in line
        assert "Traceback" not in said
        assert files() == before, arguments
    zipped.unlink()
    assert typed(monkeypatch, capsys, "segment", runs[0], "--stop", "3")[0] == 0, "as the sentence says"
    assert typed(monkeypatch, capsys, "collect", runs[0], "--rounds", "3")[0] == 0
    assert typed(monkeypatch, capsys, "verify", runs[0])[0] == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan["runs"][0].update(path="results/runs/../../../secret"),
        lambda plan: plan["runs"][0].update(path="/etc"),
        lambda plan: plan["runs"][0].update(dataset="../../secret"),
        lambda plan: plan["runs"][0].update(partition=".."),
        lambda plan: plan["runs"][0].pop("path"),
        lambda plan: plan["runs"][0].update(path=plan["runs"][1]["path"]),
        lambda plan: plan["runs"][0].update(rounds="3"),
        lambda plan: plan["runs"][0].update(seed=True),
        lambda plan: plan["runs"][0].update(algorithm="local"),
        lambda plan: plan["runs"][0].update(partition="0" * 12),
        lambda plan: plan["cells"][0].update(key="0" * 12),
        lambda plan: plan["cells"][0].update(rounds=None),
        lambda plan: plan["cells"][0].update(grid={"partition.alpha": 1}),
        lambda plan: plan.update(protocols=[]),
        lambda plan: plan.update(grid=[]),
        lambda plan: plan["report"].update(round="first"),
        lambda plan: plan["report"].update(last_k="five"),
        lambda plan: plan["artifacts"].update(keep_models=0),
        lambda plan: plan["execution"].update(device="/dev/sda"),
        lambda plan: plan["partitions"].update({"../../secret": {}}),
        lambda plan: plan["algorithms"].append("../../secret"),
        lambda plan: plan.update(runs="results"),
        lambda plan: plan.pop("runs"),
        lambda plan: plan.update(params="studies/other.yaml"),
    ],
)
def test_a_plan_that_leads_out_of_the_folder_is_refused(
    study: Path, change, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = Path("results/plan.json")
    plan = json.loads(place.read_text())
    change(plan)
    place.write_text(json.dumps(plan))
    for arguments in (
        ["table"],
        ["figure", "curves"],
        ["show"],
        ["status"],
        ["record", "fedavg"],
        ["verify"],
        ["trace", "results/tables/results.md", "fedavg.global-on-global"],
    ):
        said = "fedpipe: results/plan.json is not the plan of the study that belongs there; delete it and run again.\n"
        assert typed(monkeypatch, capsys, *arguments) == (2, said), arguments


def away(path: Path) -> tuple[Path, dict[Path, bytes]]:
    """Put a link in the place of a file or folder, to where it is now; that place, with all that is there."""
    outside = Path("..", "outside").resolve()
    outside.mkdir()
    target = outside / path.name
    path.rename(target)
    path.symlink_to(target)
    return outside, contents(outside)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("link", "arguments"),
    [
        ("runs/fedavg", "segment {run} --stop 4 --keep-models last"),
        ("runs/fedavg/{key}", "segment {run} --stop 4 --keep-models last"),
        ("runs/fedavg/{key}/rounds", "segment {run} --stop 4 --keep-models last"),
        ("runs/fedavg/{key}/rounds/0001", "collect {run} --rounds 3 --keep-models last"),
        ("runs/fedavg/{key}", "collect {run} --rounds 3 --keep-models last"),
        ("runs/fedavg/{key}/joined", "collect {run} --rounds 3"),
        ("runs/fedavg/{key}/joined/0003", "collect {run} --rounds 3"),
        ("keys", "table"),
        ("tables", "table"),
        ("plots", "table"),
        ("figures", "figure curves"),
    ],
)
def test_no_command_writes_or_deletes_through_a_link_that_leads_out(
    study: Path, link: str, arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFiles(sorted(Path("results/runs/fedavg").iterdir())[0])
    for place in Path("results").glob("**/plan.json"):
        place.write_text(place.read_text().replace('"keep_models": "all"', '"keep_models": "last"'))
    path = Path("results", link.format(key=run.path.name))
    if not path.exists():
        path.mkdir()
    (path / ".state.json.0.tmp").write_text("half written")
    outside, before = away(path)
    status, said = typed(monkeypatch, capsys, *arguments.format(run=run.path).split())
    assert contents(outside) == before
    assert status == 2
    (line,) = said.splitlines()[-1:]
    assert " leads out of results through a link, to " in line
    assert str(outside / path.name) in line


@pytest.mark.parametrize(
    "link", ["plan.json", "runs/fedavg/{key}/rounds.zip", "runs/fedavg/{key}/joined/0003/metrics.parquet"]
)
def test_a_link_in_the_place_of_a_file_is_replaced(
    study: Path, link: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFiles(sorted(Path("results/runs/fedavg").iterdir())[0])
    path = Path("results", link.format(key=run.path.name))
    outside, before = away(path)
    for arguments in ("plan", f"segment {run.path} --stop 4 --collect", f"collect {run.path} --rounds 3"):
        assert typed(monkeypatch, capsys, *arguments.split())[0] == 0
    assert contents(outside) == before
    assert not path.is_symlink()


def test_prune_deletes_links_and_not_what_they_lead_to(study: Path) -> None:
    run = sorted(Path("results/runs/fedavg").iterdir())[0]
    outside, before = away(run)
    prune.remove_files([prune.UnneededFiles((run,), 0, 0)])
    assert contents(outside) == before
    assert not run.is_symlink()
    label = Path("results/runs/scaffold")
    runs = sorted(label.iterdir())
    label.rename(outside / "scaffold")
    label.symlink_to(outside / "scaffold")
    before = contents(outside)
    with pytest.raises(ArtifactError, match=rf"^{label} leads out of results through a link, to {outside}/scaffold;"):
        prune.remove_files([prune.UnneededFiles((runs[0],), 0, 0)])
    assert contents(outside) == before
