"""The overview table of the page of algorithms. All of its columns except the last are computed from the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from fedpipe.algorithms.base import Algorithm
from fedpipe.algorithms.batch import State
from fedpipe.core.components import registry
from fedpipe.core.components.component import ALGORITHM
from fedpipe.core.yaml_text import read_yaml
from fedpipe.engine.clients.executor import FIRST
from fedpipe.engine.clients.federated_data import FederatedData
from fedpipe.models.cnn import CNN
from fedpipe.settings.methods import get_algorithm_display_name
from fedpipe.testing import Trial, make_trial

PEERS_FILE = Path(__file__).with_name("peers.yaml")
SHAPE, CLASSES, CLIENTS = (1, 28, 28), 10, 10
#: A method that overrides one of these has a model for each client.
PERSONAL_HOOKS = ("predict", "personal_passes", "finetune_passes")


def render_methods_overview() -> str:
    """Render the table of all methods, and its explanation."""
    other_libraries = read_methods_of_other_libraries()
    links = ", ".join(
        f"[{name}](https://github.com/{library['repository']}/tree/{library['commit']}) ({library['commit'][:7]})"
        for name, library in other_libraries.items()
    )
    text = (
        "Down, up and stored are multiples of the model's size that a client receives, sends and stores. The model is "
        f"`cnn` with BatchNorm for images of {SHAPE[1]} x {SHAPE[2]} pixels and {CLASSES} classes, and there are "
        f"{CLIENTS} clients. Methods of kind *both* have a global model and a model for each client. BatchNorm's "
        "running statistics are *shared* (uploaded and averaged), or a client's *own*, or both. Other libraries that "
        f"have the method are {links}, which may differ in details."
    )
    head = "| method | kind | down | up | stored at the client | BatchNorm | also in |\n|---|---|---|---|---|---|---|"
    rows = [render_method_row(name, other_libraries) for name in registry.list_components(ALGORITHM)]
    return "\n".join([text, "", head, *rows])


def read_methods_of_other_libraries() -> dict[str, Any]:
    """The other libraries by name, each with its repository, commit and methods."""
    return read_yaml(PEERS_FILE.read_text(), PEERS_FILE)


def render_method_row(name: str, other_libraries: dict[str, Any]) -> str:
    """Render the row of a method."""
    trial = make_overview_trial(name)
    download, upload, kept = compute_exchanged_and_kept_states(trial)
    size = count_tensor_elements(trial.initial_model(0))
    down, up, stored = (format_ratio(count_tensor_elements(state) / size) for state in (download, upload, kept))
    parts = f"{stored} ({', '.join(kept)})" if kept else "–"
    owners = {"shared": upload, "own": kept}
    statistics = ", ".join(owner for owner, state in owners.items() if has_running_statistics(state))
    also_in = ", ".join(library for library, facts in other_libraries.items() if name in facts["methods"]) or "–"
    title = get_algorithm_display_name(trial.algorithm)
    cells = (f"[{title}](#{name})", get_model_kind(trial), down, up, parts, statistics, also_in)
    return f"| {' | '.join(cells)} |"


def make_overview_trial(name: str, batch_norm: bool = True, **parameters: Any) -> Trial:
    """Make a federation whose clients have one sample of each class."""
    x, y = torch.zeros(CLASSES, *SHAPE, dtype=torch.float64), torch.arange(CLASSES)
    indices = [np.arange(CLASSES)] * CLIENTS
    clients = FederatedData(x, y, indices, indices, np.arange(CLASSES), CLASSES, 0, torch.float64)
    algorithm: Any = registry.build_component(ALGORITHM, name, parameters)
    model = CNN(batch_norm=batch_norm)
    return make_trial(algorithm, lambda: model.build(SHAPE, CLASSES), clients, local_epochs=1, batch_size=CLASSES)


def compute_exchanged_and_kept_states(trial: Trial) -> tuple[State, State, State]:
    """What a client receives, uploads and stores in a round of one step in each pass."""
    common, per_client = trial.send([0])
    outcome = trial.train([0])[0]
    kept = {name: value for name, value in outcome.kept_state.items() if name != FIRST}
    return common | pytree.tree_map(lambda value: value[0], per_client), outcome.upload, kept


def get_model_kind(trial: Trial) -> str:
    """Whether there is a global model, a model for each client, or both."""
    if trial.algorithm.global_model(trial.server) is None:
        return "personal"
    cls = type(trial.algorithm)
    return "both" if any(getattr(cls, hook) is not getattr(Algorithm, hook) for hook in PERSONAL_HOOKS) else "global"


def count_tensor_elements(state: Any) -> int:
    """Count the numbers of a state."""
    return sum(value.numel() for value in pytree.tree_leaves(state))


def has_running_statistics(state: State) -> bool:
    """Whether a part of a state has running statistics."""
    return any(name.endswith("running_mean") for part in state.values() if isinstance(part, dict) for name in part)


def format_ratio(ratio: float) -> str:
    """Format a ratio with two decimals, and whole numbers without."""
    text = f"{ratio:.2f}"
    return "< 0.01" if text == "0.00" and ratio else text.removesuffix(".00")
