"""Metrics that an algorithm records."""

from dataclasses import dataclass

from torch import Tensor

from fedpipe.algorithms.batch import State
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.algorithms.uploads import Uploads
from fedpipe.core.storage import layout
from tests import small_studies as studies


@dataclass(frozen=True, kw_only=True)
class LateMetrics(FedAvg):
    """FedAvg that counts rounds, with a metric from the second round on."""

    def init(self, initial_model):
        return super().init(initial_model) | {"rounds": initial_model(0)["head.bias"].sum() * 0}

    def aggregate(self, server: State, uploads: Uploads) -> State:
        return super().aggregate(server, uploads) | {"rounds": server["rounds"] + 1}

    def metrics(self, server: State) -> dict[str, Tensor]:
        return {"late": server["rounds"]} if server["rounds"] > 1 else {}


def test_run_records_algorithm_metric_that_begins_in_round_2() -> None:
    entries = {"late": {"algorithm": "tests.runs.test_algorithm_metrics.LateMetrics"}}
    plan = studies.prepare(studies.settings(("late",), 3, algorithms=entries))
    (run,) = studies.open_runs(plan)
    studies.finish_run(run, 3, plan.keep_models)
    assert layout.read_merged_table(run.files.get_merged_files(3).rounds)["late"].to_pylist() == [None, 2.0, 3.0]
