"""`fedpipe verify` of runs: hashes of all files, and recomputed rounds."""

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from fedpipe.analysis import verify
from fedpipe.cli.app import app
from fedpipe.core.components import code_digest
from fedpipe.core.errors import ArtifactError
from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.storage import archive, layout, packing
from fedpipe.core.storage.files import (
    compute_file_sha256,
    encode_parquet,
    read_json,
    read_parquet,
    read_pt,
    write_json,
    write_parquet,
    write_pt,
)
from fedpipe.core.storage.layout import RunFiles
from fedpipe.engine import collect
from fedpipe.engine.pruning import prune_states
from fedpipe.planning import partition
from fedpipe.planning.run_settings import RunSettings
from tests import small_studies as studies


def list_runs(label: str) -> list[Path]:
    return sorted(Path(f"results/runs/{label}").iterdir())


def test_verify_runs_accepts_intact_study(study: Path) -> None:
    verdicts = list(verify.verify_runs([*list_runs("fedavg"), *list_runs("scaffold")], 2, random.Random(0)))
    assert len(verdicts) == 4 + 2 + 2
    assert all(verdict.is_ok for verdict in verdicts)
    assert all("of 4 rounds are as recorded" in verdict.message for verdict in verdicts[:4])
    assert all("the same samples" in verdict.message for verdict in verdicts[4:6]), "of two seeds"
    assert all("all bits agree" in verdict.message for verdict in verdicts[6:])


def test_finished_run_has_at_most_12_files_besides_tensors(study: Path) -> None:
    """The limit applies to any number of rounds, because file systems of clusters limit the number of files."""
    for run in (*list_runs("fedavg"), *list_runs("scaffold")):
        files = [path for path in run.rglob("*") if path.is_file()]
        assert len([path for path in files if path.suffix != ".pt"]) <= 12
        assert {path.name for path in files if path.suffix == ".pt"} <= {"server.pt", "clients.pt"}


@pytest.mark.parametrize(
    "name", ["rounds/0002/server.pt", "rounds/0001/metrics.parquet", "joined/0003/metrics.parquet"]
)
def test_verify_hashes_reports_path_of_damaged_file(study: Path, name: str) -> None:
    path = list_runs("fedavg")[0] / name
    packing.unpack_folder(list_runs("fedavg")[0] / "rounds")
    path.write_bytes(path.read_bytes() + b"\0")
    verdict = verify.verify_run_files(RunFiles(path.relative_to(".").parents[len(Path(name).parts) - 1]))
    assert not verdict.is_ok
    assert str(path) in verdict.message


def test_verify_hashes_covers_heterogeneity_of_partition(study: Path) -> None:
    files = RunFiles(list_runs("fedavg")[0])
    key = compute_json_digest(RunSettings.read(files.settings).partition_settings)
    assignment_path, path = layout.get_assignment_path(key), layout.get_heterogeneity_path(key)
    path.write_bytes(path.read_bytes() + b"\0")
    verdict = verify.verify_run_files(files)
    assert re.search(
        rf": {path}\. Delete {assignment_path}\. Then `fedpipe run` .* or `dvc checkout PATH`", verdict.message
    )


def test_verify_hashes_counts_pruned_states_and_names_lost_ones(study: Path) -> None:
    files = RunFiles(list_runs("scaffold")[0])
    files.get_round_files(1).server_state.unlink()
    verdict = verify.verify_run_files(files)
    assert (verdict.is_ok, verdict.note) == (True, "")
    assert re.search(r"\b1 \(artifacts.keep_models\)$", verdict.message)
    for keep_models, lost_rounds, pruned_count in (("all", "1 (and 1 more)", 0), (1, "1 (and 1 more)", 0), (2, "2", 1)):
        files.get_round_files(2).client_states.unlink(missing_ok=True)
        verdict = verify.verify_run_files(files, keep_models)
        assert (verdict.is_ok, bool(verdict.note)) == (True, True)
        assert f" keeps the states of round {lost_rounds}, " in verdict.message
        assert verdict.message.endswith(f" delete {files.path} and run its study (`fedpipe run`)")
        assert verdict.message.count(f", pruned states: {pruned_count} ") == bool(pruned_count)


def test_verify_hashes_compares_merged_tables_with_rounds(study: Path) -> None:
    files = RunFiles(list_runs("fedavg")[0])
    joined = files.get_merged_files(3)
    table, times = read_parquet(joined.metrics), read_json(joined.times)
    changed = table.set_column(3, "correct", [np.asarray(table["correct"]) + 1])
    times["rounds"][0]["train"] += 1
    hashes = {
        joined.metrics.name: write_parquet(joined.metrics, changed),
        joined.times.name: write_json(joined.times, times),
    }
    problem = f": {joined.metrics}, {joined.times}. Delete {joined.path}."
    assert problem in verify.verify_run_files(files).message
    write_json(joined.marker, read_json(joined.marker) | hashes)
    verdict = verify.verify_run_files(files)
    assert not verdict.is_ok
    assert problem in verdict.message, "the record matches, but the rounds differ"


def test_is_same_table_compares_values_of_large_tables() -> None:
    """A merged table in memory has one chunk per round. Its file has one chunk, and other pages for long lists."""
    counts = np.random.default_rng(0).integers(0, 300, (3000, 500), dtype=np.int32)
    table = pa.table({"support": pa.array(list(counts), pa.list_(pa.int32())), "loss": [float("nan")] * 3000})
    chunks = pa.concat_tables([table.slice(start, 1000) for start in (0, 1000, 2000)])
    assert encode_parquet(table) != encode_parquet(chunks)
    assert verify.is_same_table(table, chunks)
    counts[2999, 499] += 1
    changed = table.set_column(0, "support", pa.array(list(counts), pa.list_(pa.int32())))
    assert not verify.is_same_table(changed, chunks)


def test_verify_hashes_rejects_wrong_or_incomplete_segment_manifest(study: Path) -> None:
    files = RunFiles(list_runs("fedavg")[0])
    recorded = read_json(files.get_segment_manifest_path(3))
    write_json(files.get_segment_manifest_path(3), {"rounds": recorded["rounds"] | {"2": "0" * 64}})
    problem = f": {files.get_segment_manifest_path(3)}. Delete {files.get_segment_manifest_path(3)}."
    assert problem in verify.verify_run_files(files).message
    write_json(files.get_segment_manifest_path(3), {"rounds": {"0": recorded["rounds"]["0"]}})
    assert problem in verify.verify_run_files(files).message


@pytest.mark.parametrize("damage", [lambda data: data[:200], lambda data: data[:60] + b"\1" + data[61:]])
def test_verify_runs_reports_path_of_damaged_pack(study: Path, damage: Callable[[bytes], bytes]) -> None:
    path = list_runs("fedavg")[0]
    archive = path / "rounds.zip"
    archive.write_bytes(damage(archive.read_bytes()))
    (verdict,) = verify.verify_runs([path], 0, random.Random(0))
    assert not verdict.is_ok
    assert re.match(rf"{path}: (differs from the record: )?{archive}\b.*[Dd]elete ", verdict.message)


def test_recompute_random_round_reports_different_bits(study: Path) -> None:
    """The rounds come from other code, but their manifests match."""
    files = RunFiles(list_runs("scaffold")[0])
    for number in range(1, 4):
        folder = files.get_round_files(number)
        tree = read_pt(folder.server_state)
        tree["model"] = {name: value + 1e-3 for name, value in tree["model"].items()}
        sha256 = write_pt(folder.server_state, tree)
        for path in (folder.complete_states_marker, folder.marker):
            manifest = read_json(path)
            manifest["sha256"]["server.pt"] = sha256
            if path == folder.complete_states_marker:
                manifest["made_by"][0]["torch"] = "1.0"
            else:
                manifest["sha256"]["state.json"] = compute_file_sha256(folder.complete_states_marker)
            write_json(path, manifest)
    markers = {str(number): compute_file_sha256(files.get_round_files(number).marker) for number in range(4)}
    write_json(files.get_segment_manifest_path(3), {"rounds": markers})
    collect.collect_rounds(files, 3, "all")
    assert verify.verify_run_files(files).is_ok
    verdict = verify.replay_random_round(files, random.Random(1))
    assert not verdict.is_ok
    assert "bits differ in " in verdict.message
    assert "server.pt" in verdict.message
    assert "torch 1.0 " in verdict.message


def test_verify_accepts_pruned_states(study: Path) -> None:
    files = RunFiles(list_runs("scaffold")[0])
    Path("results/plan.json").unlink()  # the plan keeps all states
    prune_states(files, 3, "last")
    assert not files.get_round_files(1).server_state.exists()
    assert verify.verify_run_files(files).is_ok
    verdict = verify.replay_random_round(files, random.Random(0))
    assert "round 1 repeated: all bits agree" in verdict.message, "only the state before round 1 is stored"


def test_recompute_random_round_of_stack_uses_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    new_plan = studies.prepare(studies.settings(("scaffold",), 2))
    (run,) = studies.open_runs(new_plan, stack=4)
    list(run.run_segment(2))
    verdict = verify.replay_random_round(run.files, random.Random(0))
    assert "all bits agree" in verdict.message, "bits of the loop would differ"


def test_verify_rejects_run_without_complete_round(study: Path) -> None:
    run = RunFiles(next(Path("results/runs/fedavg").iterdir()))
    shutil.rmtree(run.rounds_folder)
    archive.get_pack_path(run.rounds_folder).unlink(missing_ok=True)
    for path in (*run.path.glob("segments"), *run.path.glob("joined")):
        shutil.rmtree(path)
    result = verify.verify_run_files(run)
    assert not result.is_ok
    assert result.message.startswith(f"{run.path} has no complete round. ")


def test_verify_command_exits_with_1_if_file_is_missing(study: Path) -> None:
    runner = CliRunner()
    result = runner.invoke(app, ["verify", str(list_runs("fedavg")[0])])
    assert (result.exit_code, len(result.stdout.splitlines())) == (0, 4)
    assert result.stdout.splitlines()[-1] == "All verified: 1 run, 1 partition, 1 repeated round"
    (list_runs("fedavg")[0] / "rounds/0001/server.pt").unlink()
    summary = runner.invoke(app, ["verify", "--rerun", "0"]).stdout.splitlines()[-1]
    assert re.fullmatch(r"All verified: 4 runs, .* files\. States are missing.*", summary)
    packing.unpack_folder(list_runs("fedavg")[0] / "rounds")
    (list_runs("fedavg")[0] / "rounds/0002/participants.parquet").unlink()
    result = runner.invoke(app, ["verify", "--rerun", "0"])
    assert result.exit_code == 1
    assert "verified" not in result.stdout.splitlines()[-1]
    assert "participants.parquet" in result.stdout
    assert result.stdout.count("are as recorded") == 3


def test_verify_does_not_compare_partition_of_other_version_of_scheme(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code may draw other clients, so a difference would mean nothing."""
    monkeypatch.setattr(code_digest, "compute_code_digest", lambda *_: code_digest.Digest("0" * 12, {}))
    verdicts = list(verify.verify_runs(list_runs("fedavg"), 0, random.Random(0)))
    pattern = r"can't be recomputed\. it comes from another version of partition scheme 'dirichlet' \(.*, now 0{12}\)"
    assert [bool(re.search(pattern, verdict.message)) for verdict in verdicts] == [False, False, True, True]


def test_verify_runs_reports_unreadable_partition_and_verifies_rounds(
    study: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error(key: str) -> bool:
        raise ArtifactError("own.csv can't be read.")

    monkeypatch.setattr(partition, "is_partition_reproducible", raise_error)
    verdicts = list(verify.verify_runs(list_runs("fedavg"), 1, random.Random(0)))
    assert all("own.csv can't be read." in verdict.message for verdict in verdicts[2:4])
    assert "all bits agree" in verdicts[4].message
    assert all(verdict.is_ok for verdict in verdicts)
