"""`fedpipe diff`: differences of two runs."""

from pathlib import Path

import pytest

from fedpipe.analysis import diff as module
from fedpipe.analysis.diff import diff_runs, find_run
from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import files, layout, packing
from tests.analysis.conftest import ROUNDS


def read_keys(label: str) -> list[str]:
    """Read the keys of an algorithm's runs, in the order of their seeds."""
    plan_content = files.read_json(Path("results/plan.json"))
    return [run["key"] for run in plan_content["runs"] if run["algorithm"] == label]


def test_diff_runs_lists_different_settings_and_first_different_round(study: Path) -> None:
    one, other = (find_run(read_keys(label)[0]) for label in ("fedavg", "scaffold"))
    lines = diff_runs(one, other).splitlines()
    assert lines[0].split() == [one.path.name, other.path.name]
    settings = {line.split()[0]: line.split()[1:] for line in lines[1 : lines.index("")]}
    assert settings["algorithm.name"] == ["fedavg", "scaffold"]
    assert all(name.startswith("algorithm.") for name in settings), "no other setting differs"
    assert "server state: differs from round 0 on" in lines, "SCAFFOLD's server state also contains a control variate"
    frames = [layout.read_merged_table(run.get_merged_files(ROUNDS).metrics).to_pandas() for run in (one, other)]
    accuracies = [
        frame[frame["protocol"] == "global-on-global"].set_index("round").eval("100 * correct / total")
        for frame in frames
    ]
    first_difference = next(number for number in (1, 2, 3) if accuracies[0][number] != accuracies[1][number])
    (line,) = (line for line in lines if line.startswith("global-on-global"))
    first, second = (values[first_difference] for values in accuracies)
    assert f"{first:.2f} % and {second:.2f} % in round {first_difference}" in line


def test_diff_runs_lists_no_setting_for_same_run_and_seed_for_two_seeds(study: Path) -> None:
    first, second = read_keys("fedavg")
    same_lines = diff_runs(find_run(first), find_run(first)).splitlines()
    assert "The settings are the same." in same_lines
    assert same_lines[0].split() == [first, first]
    assert any(line.startswith("server state: the same bits in all 4 rounds") for line in same_lines)
    assert any(line.startswith("global-on-global: the same in all 3 rounds") for line in same_lines)
    lines = diff_runs(find_run(first), find_run(second)).splitlines()
    assert lines[1].split() == ["seed", "0", "1"]
    assert lines[2] == ""


@pytest.mark.parametrize("record", ["{}", '{"sha256": {}}'])
def test_diff_runs_rejects_damaged_record_of_round(study: Path, record: str) -> None:
    run = find_run(read_keys("fedavg")[0])
    packing.unpack_folder(run.rounds_folder)
    marker = run.get_round_files(1).marker
    marker.write_text(record)
    with pytest.raises(ArtifactError, match=f"^{marker} can't be read"):
        diff_runs(run, run)


def test_find_run_accepts_unique_key_prefix(study: Path) -> None:
    first = read_keys("fedavg")[0]
    run = find_run(first)
    assert (
        find_run(first[:8])
        == find_run(f"fedavg/{first}")
        == find_run(f"{run.path}/")
        == find_run(str(study / run.path))
        == run
    )
    with pytest.raises(SettingsError, match=r"'' .* several keys: results/runs/fedavg/"):
        find_run("")
    with pytest.raises(SettingsError) as unknown:
        find_run("none")
    head, *lines = str(unknown.value).splitlines()
    assert head.startswith("'none' is not ")
    assert "params.yaml" in head
    assert lines[:2] == [f"  fedavg           seed {seed}  {key}" for seed, key in enumerate(read_keys("fedavg"))]
    assert len(lines) == len(read_keys("fedavg") + read_keys("scaffold"))


def test_find_run_error_shortens_long_list_of_runs(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LISTED_RUNS", 1)
    with pytest.raises(SettingsError) as unknown:
        find_run("none")
    (last_line,) = str(unknown.value).splitlines()[2:]
    assert last_line.startswith("  and 3 more")
    assert "`fedpipe plan --dry-run`" in last_line
    Path("results/plan.json").unlink()
    with pytest.raises(SettingsError, match=r"'none' is not .*`ls results/runs/\*`"):
        find_run("none")
