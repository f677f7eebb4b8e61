"""The section `study`: algorithms, seeds and the grid."""

from __future__ import annotations

import re
from typing import Annotated, Any, get_args

from pydantic import Discriminator, Field, Tag, field_validator

from fedpipe.settings.base import Label, Section, convert_to_number, require_unique_values
from fedpipe.settings.methods import reject_display_name_as_label
from fedpipe.settings.report import Statistic

#: Columns of a study's tables. An axis can't have these names.
TABLE_COLUMNS = (
    *("algorithm", "seed", "key", "protocol", "average", "round", "accuracy", "mean", "std", "seeds", "line"),
    *("metric", "score", "auc", "bin_samples", "bin_hits", "bin_confidences"),
    *("partition", "client", "class", "samples", "matrix", "row", "column", "value", "left_out", "diverged"),
    *("bytes_down", "bytes_up", "train", "aggregate", "evaluate", "epoch", "participants", "rounds", "source", "point"),
    *("correct", "total", "loss", "hits", "support", "predicted", "statistic", "half_width", *get_args(Statistic)),
    *("clients", "client_name", "worst", "bytes", "run", "dataset", "sha256", "draw", "rank", "selected"),
    *("executor", "device", "fedpipe", "shared", "torch", "numpy", "python", "clusters", "mean_norm", "max_norm"),
    *("distance_from_mean", "bytes down", "bytes up", "reported accuracy", "std of clients", "worst tenth"),
    *("lowest client", "macro F1", "balanced accuracy", "reported AUC", "reported ECE", "reported NLL", "server_rate"),
)
AxisValue = Annotated[str, Field(pattern=r"^[^|\s]([^|\x00-\x1f\u0085\u2028\u2029]*[^|\s])?$")]  # one line of a table
Axis = dict[AxisValue, dict[str, Any]]  #: keys that each named value sets
GridValues = Annotated[
    Annotated[tuple[Any, ...], Tag("list")] | Annotated[Axis, Tag("axis")],
    Discriminator(lambda values: "axis" if isinstance(values, dict) else "list"),
]


class Study(Section):
    """The runs: the product of algorithms, seeds and grid."""

    algorithms: tuple[Label, ...] = Field(
        ("fedavg",), min_length=1, description="Methods to run: names of algorithms, or of entries in `algorithms`."
    )
    seeds: tuple[int, ...] = Field((0,), min_length=1, description="Seeds of partition, initial model and training.")
    grid: dict[str, GridValues] = Field(
        default_factory=dict,
        description="A key with a list of values, such as `partition.alpha: [0.1, 0.5]`. Or an axis with a name that "
        "you choose: named values, each a mapping of keys that change together, such as "
        "`environment: {mild: {partition.alpha: 0.5}, harsh: {partition.alpha: 0.1, federation.participation: 0.5}}`.",
    )

    _require_unique_values = field_validator("algorithms", "seeds")(require_unique_values)

    @field_validator("algorithms", mode="before")
    @classmethod
    def _check_algorithm_names(cls, algorithms: Any) -> Any:
        for name in map(str, algorithms) if isinstance(algorithms, list) else ():
            if "." in name:
                entry = f"{name.rpartition('.')[2].lower()}: {{algorithm: {name}}}"
                raise ValueError(f"'{name}' needs a label. Add an entry such as `{entry}` to algorithms.")
            reject_display_name_as_label("study.algorithms", name)
        return algorithms

    @field_validator("seeds", mode="before")
    @classmethod
    def _require_list_of_seeds(cls, seeds: Any) -> Any:
        if isinstance(seeds, int) and not isinstance(seeds, bool):
            raise ValueError(f"{seeds} can't be used. Use a list: [{seeds}], or [0, 1, 2] for three seeds.")
        return seeds

    @field_validator("grid", mode="before")
    @classmethod
    def _reject_nested_keys(cls, grid: Any) -> Any:
        """Reject sections, which a preset or ``-S`` adds for a key such as `study.grid.partition.alpha`."""
        for name, values in grid.items() if isinstance(grid, dict) else ():
            if isinstance(values, dict) and any(isinstance(value, list) for value in values.values()):
                raise ValueError(
                    f"'{name}' is not a single key, such as '{name}.{next(iter(values))}'. A preset and -S can only "
                    "replace study.grid as a whole, such as `study.grid={partition.alpha: [0.1, 0.5]}`."
                )
        return grid

    @field_validator("grid")
    @classmethod
    def _check_grid(cls, grid: dict[str, GridValues]) -> dict[str, GridValues]:
        for name, values in grid.items():
            if not isinstance(values, dict):
                try:
                    require_unique_values(tuple(map(convert_to_number, values)))
                except ValueError as error:
                    raise ValueError(f"study.grid.{name}: {error}") from None
            elif "." in name:
                raise ValueError(
                    f"study.grid.{name}: a key can't have named values. Use a list of values, or a name without dots "
                    "for an axis."
                )
            elif name in TABLE_COLUMNS or not re.fullmatch(r"[A-Za-z][\w -]*", name):
                raise ValueError(
                    f"study.grid.{name}: an axis can't have this name. Use a word such as environment, which is not a "
                    "column of tables."
                )
        return grid
