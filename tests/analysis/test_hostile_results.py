"""Results from other people. Every command prints one error if a pack or plan is damaged or hostile."""

import json
import zipfile
from pathlib import Path

import pytest
import yaml

from fedpipe.analysis import prune
from fedpipe.core.errors import ArtifactError
from fedpipe.core.storage import archive
from fedpipe.core.storage.layout import RunFiles
from tests.small_studies import RunFedpipe


def truncate(archive_path: Path) -> None:
    archive_path.write_bytes(archive_path.read_bytes()[:-30])


def add_parent_path(archive_path: Path) -> None:
    with zipfile.ZipFile(archive_path, "a") as zip_file:
        zip_file.writestr("../../../../../PWNED/round.json", "{}")


@pytest.mark.parametrize("damage", [truncate, add_parent_path])
def test_every_command_rejects_hostile_pack_and_writes_nothing(study: Path, damage, run_fedpipe: RunFedpipe) -> None:
    plan = json.loads(Path("results/plan.json").read_text())
    runs = [run["path"] for run in plan["runs"]]
    archive_path = archive.get_pack_path(RunFiles(Path(runs[0])).rounds_folder)
    damage(archive_path)
    settings = yaml.safe_load(Path("params.yaml").read_text())
    settings["execution"] = {"rounds_per_job": 1, "clients_per_job": 5}
    Path("studies").mkdir()
    Path("studies/blocks.yaml").write_text(yaml.safe_dump(settings))

    def read_study_files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in study.parent.rglob("*") if path.is_file()}

    before, keys = read_study_files(), [Path(run).name for run in runs]
    for arguments in (
        ["segment", runs[0], "--stop", "3"],
        ["segment", runs[0], "--stop", "4"],
        ["train", runs[0], "--round", "2", "--block", "0", "--size", "5"],
        ["collect", runs[0], "--rounds", "3"],
        ["plan", "--params", "studies/blocks.yaml"],
        ["verify", runs[0]],
        ["trace", "results/tables/results.md", "fedavg.global-on-global"],
        ["diff", keys[0], keys[1]],
        ["status"],
    ):
        status, *texts = run_fedpipe(*arguments)
        output = "".join(texts)
        assert status == (1 if arguments[0] == "verify" else 2), arguments
        (line,) = (line for line in output.splitlines() if str(archive_path) in line)
        assert f"{archive_path} is damaged" in line, arguments
        assert f"{archive_path.parent}/segments" in line
        assert "`fedpipe run` computes what is missing, or `dvc checkout PATH`" in line
        assert "Traceback" not in output
        assert read_study_files() == before, arguments
    archive_path.unlink()
    assert run_fedpipe("segment", runs[0], "--stop", "3")[0] == 0, "deleting the pack works, as the error describes"
    assert run_fedpipe("collect", runs[0], "--rounds", "3")[0] == 0
    assert run_fedpipe("verify", runs[0])[0] == 0


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
def test_every_command_rejects_hostile_plan(study: Path, change, run_fedpipe: RunFedpipe) -> None:
    plan_path = Path("results/plan.json")
    plan = json.loads(plan_path.read_text())
    change(plan)
    plan_path.write_text(json.dumps(plan))
    for arguments in (
        ["table"],
        ["figure", "curves"],
        ["show"],
        ["status"],
        ["record", "fedavg"],
        ["verify"],
        ["trace", "results/tables/results.md", "fedavg.global-on-global"],
    ):
        status, _, output = run_fedpipe(*arguments)
        assert status == 2, arguments
        assert output.startswith("fedpipe: results/plan.json is not the plan of the study"), arguments
        assert len(output.splitlines()) == 1


def replace_by_link(path: Path) -> tuple[Path, dict[Path, bytes]]:
    """Move a file or folder out of the study and link to it. Return the folder outside, and its files."""
    outside = Path("..", "outside").resolve()
    outside.mkdir()
    target = outside / path.name
    path.rename(target)
    path.symlink_to(target)
    return outside, read_files(outside)


def read_files(folder: Path) -> dict[Path, bytes]:
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
def test_no_command_writes_or_deletes_through_link_to_other_folder(
    study: Path, link: str, arguments: str, run_fedpipe: RunFedpipe
) -> None:
    run = RunFiles(sorted(Path("results/runs/fedavg").iterdir())[0])
    for plan_path in Path("results").glob("**/plan.json"):
        plan_path.write_text(plan_path.read_text().replace('"keep_models": "all"', '"keep_models": "last"'))
    path = Path("results", link.format(key=run.path.name))
    if not path.exists():
        path.mkdir()
    (path / ".state.json.0.tmp").write_text("half written")
    outside, before = replace_by_link(path)
    status, _, output = run_fedpipe(*arguments.format(run=run.path).split())
    assert read_files(outside) == before
    assert status == 2
    (line,) = output.splitlines()[-1:]
    assert "link" in line
    assert str(outside / path.name) in line


@pytest.mark.parametrize(
    "link", ["plan.json", "runs/fedavg/{key}/rounds.zip", "runs/fedavg/{key}/joined/0003/metrics.parquet"]
)
def test_commands_replace_linked_file_and_keep_its_target(study: Path, link: str, run_fedpipe: RunFedpipe) -> None:
    run = RunFiles(sorted(Path("results/runs/fedavg").iterdir())[0])
    path = Path("results", link.format(key=run.path.name))
    outside, before = replace_by_link(path)
    for arguments in ("plan", f"segment {run.path} --stop 4 --collect", f"collect {run.path} --rounds 3"):
        assert run_fedpipe(*arguments.split())[0] == 0
    assert read_files(outside) == before
    assert not path.is_symlink()


def test_prune_deletes_links_but_not_their_targets(study: Path) -> None:
    run = sorted(Path("results/runs/fedavg").iterdir())[0]
    outside, before = replace_by_link(run)
    prune.remove_files([prune.UnneededFiles((run,), 0, 0)])
    assert read_files(outside) == before
    assert not run.is_symlink()
    label = Path("results/runs/scaffold")
    runs = sorted(label.iterdir())
    label.rename(outside / "scaffold")
    label.symlink_to(outside / "scaffold")
    before = read_files(outside)
    with pytest.raises(ArtifactError, match=rf"^{label} .*link.* {outside}/scaffold"):
        prune.remove_files([prune.UnneededFiles((runs[0],), 0, 0)])
    assert read_files(outside) == before
