"""All runs of a plan in tidy frames: accuracy by run, protocol and round; bytes; seconds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd

from fedpipe import artifacts
from fedpipe.artifacts import RunFiles
from fedpipe.config import Protocol

Plan = dict[str, Any]  #: as results/plan.json holds it
Round = Literal["last", "best", "mean-last"]

AVERAGES = ("sample", "client", "worst")  #: over test samples; over clients; over the worst tenth of the clients
ROUNDS: tuple[Round, ...] = ("last", "best", "mean-last")
SECONDS = ("train", "aggregate", "evaluate")


def runs(plan: Plan) -> list[dict[str, Any]]:
    """The plan's runs by algorithm, then by grid point and seed, each in the order of params.yaml."""
    return sorted(plan["runs"], key=lambda run: plan["algorithms"].index(run["algorithm"]))


def point(plan: Plan, run: dict[str, Any]) -> dict[str, str]:
    """A run's grid point as text, one entry a name of the grid: empty where it does not concern the algorithm."""
    return {name: _text(run["grid"][name]) if name in run["grid"] else "" for name in plan["grid"]}


def short(names: Iterable[str]) -> list[str]:
    """The last part of each dotted key, or the whole key where that would be ambiguous."""
    names = list(names)
    last = [name.rpartition(".")[2] for name in names]
    return [part if last.count(part) == 1 else name for part, name in zip(last, names, strict=True)]


def label(point: Mapping[str, str]) -> str:
    """A grid point in words, as ``alpha=0.1, mu=1``, without what does not concern the algorithm."""
    return ", ".join(f"{name}={value}" for name, value in zip(short(point), point.values(), strict=True) if value)


def load(plan: Plan) -> pd.DataFrame:
    """Accuracies of all runs.

    Returns
    -------
    pandas.DataFrame
        One row a run, protocol, round and average: ``algorithm``, a column a name of the grid (text), ``seed``,
        ``key``, ``protocol``, ``round``, ``average`` and ``accuracy`` in [0, 1]. Average ``sample`` is over all test
        samples; ``client`` is the mean of the clients' accuracies, ``worst`` that of the lowest tenth of them (at
        least one client); clients without test samples are left out. Rounds ascend within a run.

    Raises
    ------
    ArtifactError
        A run is not complete.
    """
    frames = [_labelled(plan, run, accuracies(_read(files(run).metrics))) for run in runs(plan)]
    return pd.concat(frames, ignore_index=True)


def protocols(plan: Plan, frame: pd.DataFrame) -> list[str]:
    """The study's protocols, then those that only points of its grid have or that methods have measured beside them."""
    return list(dict.fromkeys([*plan["protocols"], *frame["protocol"]]))


def asked(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of protocols that a study can ask for, without what methods have measured beside them."""
    found: pd.DataFrame = frame[frame["protocol"].isin(get_args(Protocol))]
    return found


def reported(frame: pd.DataFrame, round: Round = "last", last_k: int = 5) -> pd.DataFrame:
    """One accuracy for each run, protocol and average of :func:`load`: a row each, without the column ``round``.

    Parameters
    ----------
    frame
        What :func:`load` returned.
    round
        ``last``: of the last round measured; ``best``: the highest of all rounds; ``mean-last``: the mean of the
        last ``last_k`` rounds measured.
    last_k
        Number of rounds in the mean.
    """
    keys = [name for name in frame.columns if name not in {"round", "accuracy"}]
    by_run = frame.groupby(keys, sort=False)["accuracy"]  # rounds ascend within a run
    found = {
        "last": by_run.last,
        "best": by_run.max,
        "mean-last": lambda: by_run.apply(lambda each: each.tail(last_k).mean()),
    }[round]()
    return found.reset_index()


def over_seeds(frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Mean, standard deviation (over n - 1; NaN for one seed) and number of seeds of the accuracies, in percent."""
    found = (100 * frame.set_index(list(keys))["accuracy"]).groupby(level=list(range(len(keys))), sort=False)
    return found.agg(["mean", "std", "count"]).rename(columns={"count": "seeds"}).reset_index()


def traffic(plan: Plan) -> pd.DataFrame:
    """Bytes that a participant receives and sends in a round: the mean over rounds, one row a run."""
    names = ["bytes_down", "bytes_up"]
    means = [_read(files(run).rounds)[names].mean().to_frame().T for run in runs(plan)]
    frames = [_labelled(plan, run, mean) for run, mean in zip(runs(plan), means, strict=True)]
    return pd.concat(frames, ignore_index=True)


def left_out(plan: Plan) -> pd.DataFrame:
    """Updates that were not finite, one row a run.

    Returns
    -------
    pandas.DataFrame
        ``left_out``: how many updates were left out of their rounds; ``diverged``: the first round in which no
        participant's update was left, 0 if there was none.
    """
    frames = []
    for run in runs(plan):
        rounds = _read(files(run).rounds)
        alone = rounds[rounds["left_out"] == rounds["participants"]]["round"]
        found = {"left_out": [int(rounds["left_out"].sum())], "diverged": [int(alone.min()) if len(alone) else 0]}
        frames.append(_labelled(plan, run, pd.DataFrame(found)))
    return pd.concat(frames, ignore_index=True)


def times(plan: Plan) -> pd.DataFrame:
    """Seconds of training, aggregation and evaluation: the sum over rounds, one row a run."""
    frames = []
    for run in runs(plan):
        rounds = artifacts.read_json(files(run).times)["rounds"]
        sums = {name: [sum(float(each[name]) for each in rounds)] for name in SECONDS}
        frames.append(_labelled(plan, run, pd.DataFrame(sums)))
    return pd.concat(frames, ignore_index=True)


def provenance(plan: Plan) -> list[dict[str, str]]:
    """What the runs were made by (executor, device, versions), each once; `fedpipe trace` tells the code's hash too."""
    made_by = [each for run in runs(plan) for each in artifacts.read_json(files(run).times)["made_by"]]
    made = [{name: value for name, value in each.items() if name != "code"} for each in made_by]
    return [each for index, each in enumerate(made) if each not in made[:index]]


def files(run: dict[str, Any]) -> RunFiles:
    """Where the files of a run of the plan lie."""
    return RunFiles(Path(run["path"]))


def accuracies(metrics: pd.DataFrame) -> pd.DataFrame:
    """A run's accuracies by ``average``, ``protocol`` and ``round``, of the rows of its ``metrics.parquet``."""
    tested = metrics[metrics["total"] > 0]
    by_round = tested.assign(accuracy=tested["correct"] / tested["total"]).groupby(["protocol", "round"])
    sums = by_round[["correct", "total"]].sum()
    averages = {
        "sample": sums["correct"] / sums["total"],
        "client": by_round["accuracy"].mean(),
        "worst": by_round["accuracy"].apply(lambda each: each.nsmallest(max(1, len(each) // 10)).mean()),
    }
    return pd.concat(averages, names=["average"]).rename("accuracy").reset_index()


def _labelled(plan: Plan, run: dict[str, Any], frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with columns before it that tell the run."""
    columns = {"algorithm": run["algorithm"], **point(plan, run), "seed": run["seed"], "key": run["key"]}
    for place, (name, value) in enumerate(columns.items()):
        frame.insert(place, name, value)
    return frame


def _read(path: Path) -> pd.DataFrame:
    frame: pd.DataFrame = artifacts.read_joined(path).to_pandas()
    return frame


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
