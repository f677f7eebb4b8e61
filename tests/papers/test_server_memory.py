"""What the server holds, without a run: as many elements as the real state of each method; and Table 7 of cwFedAvg."""

from __future__ import annotations

import pytest
from torch.utils import _pytree as pytree

from fedpipe.algorithms.cwfedavg import CwFedAvg
from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.components import component, registry
from fedpipe.models.resnet18 import ResNet18
from fedpipe.papers import published
from fedpipe.papers.published import CellId
from fedpipe.papers.server_memory import count_server_elements
from fedpipe.settings.federation import Federation
from fedpipe.testing import trial

TABLE = {"FedAvg": FedAvg(), "cwFedAvg (All)": CwFedAvg(class_wise="all"), "cwFedAvg (Output)": CwFedAvg()}


@pytest.mark.parametrize("buffers", ["average", "keep"])
@pytest.mark.parametrize("label", registry.list_components(component.ALGORITHM))
def test_it_is_what_the_real_state_holds(make_trial, label, buffers):
    real = make_trial(label, "norm", buffers=buffers)
    family, shape = trial.MODELS["norm"]
    bare = registry.build_component(component.ALGORITHM, label, {})
    found = count_server_elements(bare, family, shape, trial.CLASSES, real.algorithm.federation)
    assert found == {part: sum(x.numel() for x in pytree.tree_leaves(value)) for part, value in real.server.items()}
    real.run()
    assert sum(found.values()) == sum(value.numel() for value in pytree.tree_leaves(real.server))


@pytest.mark.parametrize("classes", [10, 100, 1000])
@pytest.mark.parametrize("row", TABLE)
def test_cwfedavgs_table_7_follows_from_shapes(row, classes):
    """Exactly what is to be held: by hand from the number of the network's parameters and of its head's."""
    federation = Federation(clients=20, buffers="keep")
    found = count_server_elements(TABLE[row], ResNet18(), (3, 64, 64), classes, federation)
    body, head = 11_176_512, 513 * classes
    beside = classes + 20 * classes  #: which classes are owned, and the clients' distributions
    wanted = {
        "FedAvg": {"model": body + head},
        "cwFedAvg (All)": {"base": 0, "classes": classes * (body + head), "owned": classes},
        "cwFedAvg (Output)": {"base": body, "classes": classes * head, "owned": classes},
    }[row]
    assert found == wanted | ({} if row == "FedAvg" else {"distributions": 20 * classes})
    place = CellId("cwFedAvg", "Table 7", row, str(classes), "server_memory_million_parameters")
    printed = published.load_published()[place].mean
    # Print counts the averaged head as well, which nothing reads here, and not what tells the mixtures.
    extra = head - beside if row == "cwFedAvg (Output)" else -beside if row != "FedAvg" else 0
    assert (sum(found.values()) + extra) / 1e6 == pytest.approx(printed, rel=2e-4, abs=0.005)
