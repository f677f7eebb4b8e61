"""The section `evaluation`: which model is tested on which samples, and when."""

from __future__ import annotations

from pydantic import Field, field_validator

from fedpipe.settings.base import Metric, Protocol, Section, make_field_omitted_at_default, require_unique_values

#: Metrics that runs record only if a study lists them, so that they are in the run's key. The others need no recording.
RECORDED_METRICS: tuple[Metric, ...] = ("auc", "ece")


class Evaluation(Section):
    """Models, test sets and rounds of the evaluation (see docs/protocols.md)."""

    protocols: tuple[Protocol, ...] = Field(
        ("global-on-global", "personal-on-local"),
        min_length=1,
        description="MODEL-on-TEST. global: the server's model. personal: all clients, after they received the new "
        "server state and before they train. trained: this round's participants, after training. kept: all clients, "
        "each as last trained, or initial. finetuned: all clients, a copy after finetune_epochs of training. "
        "prototype: the personal model with the nearest class prototype. on-train: on the client's training samples "
        "without augmentation, for its training loss.",
    )
    metrics: tuple[Metric, ...] = make_field_omitted_at_default(
        ("accuracy",),
        min_length=1,
        description="Metrics of tables and curves. `report.baseline`, `report.best_over` and `dvc exp show` use the "
        "first. auc: area under the ROC curve, the mean over classes of one class against the rest. ece: expected "
        "calibration error, with 15 bins. nll: negative log-likelihood, the test loss.",
    )
    every: int = Field(1, ge=1, description="Evaluate after every k-th round. It divides `federation.rounds`.")
    finetune_epochs: int = Field(
        1, ge=1, description="Epochs of the finetuned protocols, with the learning rate of the next round."
    )

    _require_unique_values = field_validator("protocols", "metrics")(require_unique_values)

    @property
    def recorded_metrics(self) -> tuple[Metric, ...]:
        """Metrics that a run records in addition to accuracy and loss."""
        return tuple(metric for metric in RECORDED_METRICS if metric in self.metrics)
