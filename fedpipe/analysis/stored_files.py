"""Plans, stored states and class names of a study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedpipe.core.errors import ArtifactError, SettingsError
from fedpipe.core.storage import layout
from fedpipe.core.storage.files import make_unreadable_file_error, read_json
from fedpipe.core.storage.layout import RunFiles
from fedpipe.planning import freshness
from fedpipe.planning.plan import Plan


def get_class_names(dataset: str) -> tuple[str, ...]:
    """Names of the classes of a stored data set."""
    from fedpipe.data import class_names, store

    return class_names.read_class_names_or_numbers(
        dataset, store.read_dataset_info(layout.get_dataset_path(dataset)).classes
    )


def require_stored_state(files: RunFiles, round_number: int, client: int | None = None) -> None:
    """Raise an error if the server's state after a round, or a client's, is not stored."""

    def is_stored(round_number: int) -> bool:
        if client is None:
            return files.get_round_files(round_number).server_state.is_file()
        marker = files.get_round_files(round_number).complete_states_marker
        try:
            last_trained_round = int(read_json(marker)["last"][client])  # it stores the client's state
        except (LookupError, TypeError, ValueError):
            raise make_unreadable_file_error(marker, "its field last is missing or damaged") from None
        last_trained_files = files.get_round_files(last_trained_round)
        return (
            last_trained_round < 0
            or last_trained_files.client_states.is_file()
            or last_trained_files.client_states.name
            not in layout.read_round_hashes(last_trained_files, last_trained_files.complete_states_marker)
        )

    complete_rounds = files.list_complete_rounds()
    if round_number not in complete_rounds:
        raise ArtifactError(
            f"{files.path}: round {round_number} is not complete. Run its study (`fedpipe run`), or type `dvc pull` if "
            "DVC has recorded it."
        )
    if is_stored(round_number):
        return
    stored_rounds = [str(round_number) for round_number in complete_rounds if is_stored(round_number)]
    state_name = "the server state" if client is None else f"the state of client {client}"
    round_list = f", or use one of these rounds: {', '.join(stored_rounds)}" if stored_rounds else ""
    raise ArtifactError(
        f"{files.path}: {state_name} after round {round_number} is not stored (artifacts.keep_models). Type `dvc pull`"
        f"{round_list}. To compute it again, set `artifacts.keep_models: all`, delete {files.path} and run its study "
        "(`fedpipe run`)."
    )


def get_client_number(client: int | str, names: Sequence[str]) -> int:
    """Get the number of a client of a run, given its number or its name in the partition's column."""
    if isinstance(client, str):
        if client in names:
            return names.index(client)
    elif client in range(len(names)):
        return int(client)
    value = repr(client) if isinstance(client, str) else client
    raise SettingsError(
        f"client: {value} is not a client of this run. Use a number from 0 to {len(names) - 1}, or a name in the "
        "column client_name of `Results.clients`."
    )


def read_current_plan(params: Path) -> Plan:
    """Read the plan of a study, which must be that of the current file and code."""
    if not params.is_file():
        raise SettingsError(f"{params}: the file does not exist. Use a study file, or a folder of results.")
    plan = Plan.read_study(params, layout.FULL_PRESET)
    current = freshness.compare_plan_with_files(plan)
    if current.error:
        raise current.error
    if current.state == "stale":
        files = plan.study_files
        raise ArtifactError(
            f"{files.plan} is outdated, because {params} or code has changed. Type "
            f"`{layout.format_command('run', params)}`, or load the folder {files.path} for the earlier results."
        )
    return plan
