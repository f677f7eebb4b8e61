"""Two runs side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedpipe.analysis import diff as module
from fedpipe.analysis.diff import diff_runs, find_run
from fedpipe.core.errors import SettingsError
from fedpipe.core.storage import files, layout
from tests.analysis.conftest import ROUNDS


def keys(label: str) -> list[str]:
    """Keys of an algorithm's runs in the order of their seeds."""
    made = files.read_json(Path("results/plan.json"))
    return [run["key"] for run in made["runs"] if run["algorithm"] == label]


def test_settings_that_differ_and_where_numbers_part(study: Path) -> None:
    one, other = (find_run(keys(label)[0]) for label in ("fedavg", "scaffold"))
    lines = diff_runs(one, other).splitlines()
    assert lines[0].split() == [one.path.name, other.path.name]
    told = {line.split()[0]: line.split()[1:] for line in lines[1 : lines.index("")]}
    assert told["algorithm.name"] == ["fedavg", "scaffold"]
    assert all(name.startswith("algorithm.") for name in told), "nothing else differs"
    assert "server's state: differs from round 0 on" in lines, "SCAFFOLD's server has a control variate too"
    frames = [layout.read_merged_table(run.merged_files(ROUNDS).metrics).to_pandas() for run in (one, other)]
    shares = [
        frame[frame["protocol"] == "global-on-global"].set_index("round").eval("100 * correct / total")
        for frame in frames
    ]
    apart = next(number for number in (1, 2, 3) if shares[0][number] != shares[1][number])
    (line,) = (line for line in lines if line.startswith("global-on-global"))
    expected = f"first apart with {shares[0][apart]:.2f} % and {shares[1][apart]:.2f} % in round {apart}"
    assert expected in line


def test_a_run_is_itself_and_seeds_differ_in_the_seed(study: Path) -> None:
    first, second = keys("fedavg")
    same = diff_runs(find_run(first), find_run(first)).splitlines()
    assert "The settings are the same." in same
    assert "server's state: the same bits in all 4 rounds that both have, round 0 included" in same
    assert "global-on-global: the same in all 3 rounds that both measured" in same
    lines = diff_runs(find_run(first), find_run(second)).splitlines()
    assert lines[1].split() == ["seed", "0", "1"]
    assert lines[2] == ""


def test_a_key_may_be_shortened_but_must_be_of_one_run(study: Path) -> None:
    first = keys("fedavg")[0]
    assert find_run(first[:8]) == find_run(first) == find_run(f"fedavg/{first}")
    with pytest.raises(SettingsError, match="'' should begin the key of one run; several do"):
        find_run("")
    with pytest.raises(SettingsError) as unknown:
        find_run("none")
    head, *lines = str(unknown.value).splitlines()
    assert head == "'none' should begin the key of one run; those of params.yaml are"
    assert lines[:2] == [f"  fedavg           seed {seed}  {key}" for seed, key in enumerate(keys("fedavg"))]
    assert len(lines) == len(keys("fedavg") + keys("scaffold"))


def test_of_many_runs_not_all_are_listed(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LISTED_RUNS", 1)
    with pytest.raises(SettingsError) as unknown:
        find_run("none")
    assert str(unknown.value).splitlines()[2:] == ["  and 3 more, which `fedpipe plan --dry-run` lists"]
    Path("results/plan.json").unlink()
    with pytest.raises(SettingsError, match=r"'none' should begin the key of one run; `ls results/runs/\*` lists the"):
        find_run("none")
