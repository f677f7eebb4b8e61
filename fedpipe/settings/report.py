"""The section `report`: content of tables and figures."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from fedpipe.settings.base import Protocol, Section, make_field_omitted_at_default, require_unique_values

ReportedRound = Literal["last", "best", "mean-last"]
Average = Literal["sample", "client"]
ReportedClients = Literal["seen", "new", "both"]
FigureWidth = Literal["neurips", "icml", "column", "slides"]
RankTest = Literal["nemenyi", "holm"]
SIGNIFICANCE_LEVEL = 0.05  #: of rank tests
#: A new statistic needs its name here, its values in `report.statistics.build_statistics_table`, its head in
#: `report.tables._build_statistics_section`, its sentence in `report.tables._describe_statistics`, and its format in
#: `report.tables._format_statistic_cell`. If its head is a fixed text, add that to `settings.study.TABLE_COLUMNS`.
Statistic = Literal[
    "client_std",
    "worst_tenth",
    "lowest",
    "macro_f1",
    "balanced_accuracy",
    "rounds_to_target",
    "bytes_to_target",
    "difference",
]


class Report(Section):
    """Content of tables and figures. A change rebuilds them and recomputes no run."""

    round: ReportedRound = Field(
        "last",
        description="Round whose accuracy the table reports. last: the last one. best: the best of each run and column "
        "on the test samples, which is too optimistic. mean-last: the mean of the last `last_k` evaluated rounds.",
    )
    last_k: int = Field(5, ge=1, description="Rounds in the mean of `mean-last`.")
    average: Average = Field(
        "sample", description="Accuracy over all test samples, or the mean of the clients' accuracies."
    )
    clients: ReportedClients = make_field_omitted_at_default(
        "seen",
        description="Clients in tables and curves. seen: all except `federation.held_out`. new: those of "
        "`federation.held_out`. both: seen and new clients in columns next to each other. results.csv has both.",
    )
    best_over: tuple[str, ...] = Field(
        (),
        description="Names of the grid, such as `[federation.learning_rate]`, for which the table reports each "
        "method's best value. The best value has the best mean of the study's first metric by the method's first "
        "protocol.",
    )
    best_on: Literal["test", "validation"] = Field(
        "test",
        description="Samples with which `best_over` selects: test, or the clients' validation samples, which need "
        "MODEL-on-validation in `evaluation.protocols`. The table's caption names them.",
    )

    statistics: tuple[Statistic, ...] = Field(
        (),
        description="Statistics below the table, by the first protocol or a method's own one. statistics.csv has all "
        "of them. client_std, worst_tenth, lowest: of the clients' accuracies. macro_f1, balanced_accuracy: over "
        "classes. rounds_to_target, bytes_to_target: until `target`. difference: to `baseline`, paired by seed.",
    )
    target: float | None = Field(
        None, gt=0, le=1, description="Target accuracy over all test samples, such as 0.7 for 70 %."
    )
    baseline: str | None = Field(None, description="Method of study.algorithms with which others are compared.")
    rank_test: RankTest | None = Field(
        None,
        description="Friedman test over the columns of the table, by the first protocol or a method's own one, with "
        "mean ranks and a critical-difference diagram. nemenyi: pairs are compared by their mean ranks. holm: pairs "
        "are compared by Wilcoxon signed-rank tests with Holm's correction.",
    )

    figure_width: FigureWidth = Field(
        "neurips",
        description="Width of figures in print: neurips (text of NeurIPS and ICLR, 5.5 in), icml (both columns of "
        "ICML, 6.75 in), column (one column of ICML, 3.25 in) or slides (16:9, 10 in). Fonts are sized for this width.",
    )
    figure_protocols: tuple[Protocol, ...] = Field(
        (), description="Protocols of `evaluation.protocols` in the figure of curves. Empty: all."
    )
    figure_algorithms: tuple[str, ...] = Field(
        (),
        description="Methods of study.algorithms in the figure of curves. Empty: all. The figure of matrices shows the "
        "first two of them with a global model, by default beginning with fedavg and feddw.",
    )

    _require_unique_values = field_validator("best_over", "statistics", "figure_protocols", "figure_algorithms")(
        require_unique_values
    )

    @model_validator(mode="after")
    def _check_statistics_inputs(self) -> Report:
        needed_keys = {"rounds_to_target": "target", "bytes_to_target": "target", "difference": "baseline"}
        expected_values = {"target": "a fraction, such as 0.7 for 70 %", "baseline": "a method of study.algorithms"}
        for name in self.statistics:
            if name in needed_keys and getattr(self, needed_keys[name]) is None:
                key = needed_keys[name]
                raise ValueError(
                    f"report.{key}: it is missing, and report.statistics lists {name}. Use {expected_values[key]}."
                )
        return self
