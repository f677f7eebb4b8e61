"""What can be measured for new clients (`federation.held_out`), and the checks of a study that has some."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from fedpipe.core.errors import SettingsError
from fedpipe.settings.base import Protocol, convert_to_new_clients_protocol
from fedpipe.settings.report import ReportedClients

if TYPE_CHECKING:  # commands for tables import no torch
    from torch import Tensor

    from fedpipe.algorithms.base import Algorithm
    from fedpipe.algorithms.batch import State
    from fedpipe.core.tensors import Tensors
    from fedpipe.settings.params import Params


def list_new_clients_protocols(protocols: Iterable[Protocol], has_personal_model: bool = True) -> list[Protocol]:
    """List the protocols that are defined for new clients.

    They have no model after training, and share the global test set with all clients. ``has_personal_model`` is
    true if the algorithm's personal models depend on what new clients receive.
    """
    models = {"global", "finetuned"} | ({"personal", "prototype"} if has_personal_model else set())
    return [name for name in protocols if name.partition("-on-")[0] in models and name != "global-on-global"]


def list_reported_protocols(protocols: Iterable[Protocol], clients: ReportedClients) -> list[str]:
    """List the protocols of tables and curves: of seen clients, new clients, or both next to each other."""
    reported_protocols: list[str] = []
    for protocol in protocols:
        reported_protocols += [protocol] if clients != "new" else []
        if clients != "seen":
            reported_protocols += map(convert_to_new_clients_protocol, list_new_clients_protocols([protocol]))
    return reported_protocols


def check_new_clients(params: Params, labels: Iterable[str]) -> None:
    """Require that the new clients of a point of the grid can be measured with each of its methods."""
    held_out, protocols = params.federation.held_out, params.evaluation.protocols
    if not held_out:
        return
    value, names = list(held_out) if isinstance(held_out, tuple) else held_out, ", ".join(protocols)
    models = {name.partition("-on-")[0] for name in list_new_clients_protocols(protocols)}
    if not models:
        raise SettingsError(
            f"evaluation.protocols: {names} can't be measured for the new clients of federation.held_out: {value}. "
            "Add finetuned-on-local, or use federation.held_out 0."
        )
    if "finetuned" in models:
        return
    from fedpipe.planning.study_facts import has_model

    has_only_global = models == {"global"}
    for label in labels:
        if "global" in models and has_model(params.algorithms[label].algorithm, params, "global-on-local"):
            continue
        if has_only_global or not _is_new_client_model_from_download(params, label):
            no_model = f"{label} has no global model"
            cause = no_model if has_only_global else "the personal model of a new client is an initial model"
            raise SettingsError(
                f"federation.held_out: {value} can't be used with {label} and evaluation.protocols {names}, because "
                f"{cause}. Add finetuned-on-local to evaluation.protocols, or remove {label} from study.algorithms."
            )


def check_reported_clients(params: Params, has_new_clients: bool) -> None:
    """Require that the clients of `report.clients` exist. ``has_new_clients`` is about all points of the grid."""
    clients, defined_protocols = params.report.clients, list_new_clients_protocols(params.evaluation.protocols)
    if clients == "seen":
        return
    if not has_new_clients:
        raise SettingsError(
            f"report.clients: {clients} can't be used, because federation.held_out is 0, so there are no new clients. "
            "Set federation.held_out, such as 0.2, or use seen."
        )
    methods = {label: params.algorithms[label].options.protocol for label in params.study.algorithms}
    shown_protocols = [(f"algorithms.{label}.protocol", protocol) for label, protocol in methods.items() if protocol]
    shown_protocols += [("report.figure_protocols", protocol) for protocol in params.report.figure_protocols]
    for key, protocol in shown_protocols if clients == "new" else ():
        if protocol not in defined_protocols:
            raise SettingsError(
                f"{key}: {protocol} is not defined for the new clients of report.clients: new. Use one of "
                f"{', '.join(defined_protocols)}, or report.clients both."
            )


def _is_new_client_model_from_download(params: Params, label: str) -> bool:
    """Whether a new client's personal model depends on what it receives. True if it can't be computed here."""
    import torch

    from fedpipe.models.base import FunctionalNetwork

    facts, model, federation = params.dataset.dataset_info, params.model, params.federation
    algorithm = params.algorithms[label].algorithm
    try:
        net = FunctionalNetwork(
            lambda: algorithm.adapt(model.build_without_weights(facts.shape, facts.classes)),
            buffers=federation.buffers,
        )
        x = torch.zeros(1, *facts.shape, dtype=torch.int64 if params.dataset.has_tokens else None)
        bound_algorithm = algorithm.bind(net, federation.exclude_held_out_clients(extra=1))
        return is_personal_model_from_download(bound_algorithm, net.make_initial_model, x, facts.classes)
    except Exception:  # custom code that can't run here: its jobs report why
        return True


def is_personal_model_from_download(
    algorithm: Algorithm, initial_model: Callable[[int], Tensors], x: Tensor, num_classes: int
) -> bool:
    """Whether a new client's personal model depends on what it receives. Otherwise it is an initial model.

    Compares the model's logits after two downloads. The second has NaN instead of numbers, and integers that are larger
    by 1.

    Parameters
    ----------
    algorithm
        Algorithm that is bound to its network and one client more than the seen ones.
    initial_model
        Makes the initial models by number.
    x
        One input, shape (1, *shape).
    num_classes
        Number of classes C.
    """
    import torch

    from fedpipe.algorithms.batch import ClientInfo
    from fedpipe.core.tensors import Tensors

    if algorithm.personal_passes():
        return True  # passes before the evaluation read the download

    def map_state(function: Callable[[Tensor], Tensor], state: State) -> State:
        return {
            part: value.map(function) if isinstance(value, Tensors) else function(value)
            for part, value in state.items()
        }

    def change_numbers(value: Tensor) -> Tensor:
        return torch.full_like(value, torch.nan) if value.is_floating_point() else (value + 1).to(value.dtype)

    with torch.no_grad():
        algorithm = algorithm.bind_round(0, 0)
        server = algorithm.init(initial_model)
        common, own = algorithm.send(server, [algorithm.federation.clients - 1])
        download = map_state(lambda value: value.to(x.device), common | map_state(lambda value: value[0], own))
        state = map_state(lambda value: value.to(x.device), algorithm.init_client(server, initial_model))
        one = torch.ones((), dtype=algorithm.net.dtype, device=x.device)
        info = ClientInfo(one, one.expand(num_classes), one, one, torch.zeros_like(one, dtype=torch.int64))
        buffers = algorithm.net.client_buffers.map(lambda value: value.to(x.device))
        with algorithm.net.mode.activate(False, None, None, buffers):
            logits, changed_logits = (
                algorithm.predict(algorithm.start(state, received_state, info), x)
                for received_state in (download, map_state(change_numbers, download))
            )
            return not torch.equal(logits, changed_logits)
