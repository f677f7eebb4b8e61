"""A complete params.yaml, and the checks that concern several sections."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, PrivateAttr, ValidationInfo, model_validator

from fedpipe.core import callbacks
from fedpipe.core.components import registry
from fedpipe.core.components.component import ALGORITHM, MODEL
from fedpipe.core.components.pinned_files import PinnedFile
from fedpipe.core.errors import SettingsError, suggest_name
from fedpipe.core.storage.layout import FULL_PRESET
from fedpipe.data.partitions.base import ColumnScheme
from fedpipe.settings.base import Label, Section, convert_to_validation_protocol
from fedpipe.settings.dataset import DOWNLOAD_COMMAND, Data
from fedpipe.settings.diagnostics import DiagnosticSections
from fedpipe.settings.evaluation import Evaluation
from fedpipe.settings.execution import Artifacts, Execution
from fedpipe.settings.federation import Federation
from fedpipe.settings.methods import AlgorithmSections, ModelSection, PartitionSection, get_method_title, parse_method
from fedpipe.settings.report import Report
from fedpipe.settings.study import Study
from fedpipe.settings.transforms import Transforms
from fedpipe.settings.tune import Tune

#: Sections that you can't set as a whole, because missing keys would get their defaults.
KEYWISE_SECTIONS = ("federation",)
#: Sections that are the same for the whole study.
STUDY_WIDE_SECTIONS = ("study", "execution", "artifacts", "report", "presets", "diagnostics", "tune")


def _check_presets(presets: dict[str, Any]) -> dict[str, Any]:
    for name, changes in presets.items():
        if name == FULL_PRESET:
            raise ValueError(f"presets.{name}: this name means the unchanged study. Use another name.")
        for key in changes:
            if key.partition(".")[0] == "presets":
                raise ValueError(f"presets.{name}: '{key}' can't be set by a preset. Remove it.")
            if key in KEYWISE_SECTIONS:
                raise ValueError(
                    f"presets.{name}: '{key}' can't be set as a whole. Set single keys, such as {key}.rounds."
                )
    return presets


def _check_callbacks(execution: Execution) -> Execution:
    for name in execution.callbacks:
        callbacks.check_callback(name)
    return execution


class Params(Section):
    """A complete params.yaml."""

    dataset: Data = Data()
    transforms: Transforms = Transforms()
    partition: PartitionSection
    model: ModelSection
    federation: Federation = Federation()
    evaluation: Evaluation = Evaluation()
    algorithms: AlgorithmSections
    study: Study = Study()
    execution: Annotated[Execution, AfterValidator(_check_callbacks)] = Execution()
    artifacts: Artifacts = Artifacts()
    report: Report = Report()
    presets: Annotated[dict[Label, dict[str, Any]], AfterValidator(_check_presets)] = Field(
        default_factory=dict,
        description="Variants of the study by name, such as `smoke: {federation.rounds: 2, study.seeds: [0]}`. "
        "`--preset NAME` sets these keys, which override all others.",
    )
    diagnostics: DiagnosticSections
    tune: Tune | None = None

    _ignored_parameters: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def ignored_parameters(self) -> dict[str, str]:
        """Ignored parameters by key, each with a warning (:func:`find_ignored_partition_parameters`)."""
        return self._ignored_parameters

    @property
    def warnings(self) -> list[str]:
        """Warnings about ignored parameters and unusual settings."""
        warnings = [*self.ignored_parameters.values()]
        stack, model = self.execution.stack, registry.get_component_name(MODEL, type(self.model))
        if stack not in ("auto", 1) and not self.model.is_stackable:
            warnings.append(
                f"execution.stack: {stack} has no effect with model.name {model}, because PyTorch can't vectorize its "
                "layers over clients. Clients train one by one."
            )
        if (num_new_clients := self.federation.num_held_out_clients) and self.report.clients == "seen":
            warnings.append(
                f"federation.held_out: tables and curves omit {num_new_clients} of {self.federation.clients} clients, "
                "which never participate. Set report.clients to both or new to see them."
            )
        schedule, rounds = self.federation.schedule, self.federation.rounds
        minimum_round = schedule.warmup + (schedule.period or rounds) + 1
        if schedule.name == "cosine" and minimum_round < rounds:
            warnings.append(
                f"federation.schedule.period: {schedule.period} means that the learning rate rises again after its "
                f"minimum in round {minimum_round} of {rounds}, as in CosineAnnealingLR."
            )
        return warnings

    @property
    def warnings_about_disabled_settings(self) -> list[str]:
        """Warnings about settings that another one disables. A study may vary the other one."""
        is_official = self.dataset.split == "official"
        ranking_protocols = [self.tune.by] if self.tune else []
        has_finetuned_model = any("finetuned" in name for name in (*self.evaluation.protocols, *ranking_protocols))
        reasons_by_key = {
            ("dataset", "test_fraction"): is_official and "dataset.split is official",
            ("dataset", "stratified"): is_official and not self.dataset.validation_fraction and "no samples are split",
            ("dataset", "label_noise_kind"): not self.dataset.label_noise and "there is no dataset.label_noise",
            ("evaluation", "finetune_epochs"): not has_finetuned_model
            and "no model of evaluation.protocols is finetuned",
            ("transforms", "fill"): not self.transforms.has_padding and "there is no crop or rotation",
            ("transforms", "on_test"): not self.transforms.is_random and "there is no augmentation",
            ("report", "best_on"): not self.report.best_over and "there is no report.best_over",
        }
        warnings = []
        for (section, key), reason in reasons_by_key.items():
            fields = getattr(self, section)
            if reason and key in fields.model_fields_set and getattr(fields, key):
                warnings.append(f"{section}.{key}: {getattr(fields, key)} has no effect, because {reason}.")
        return warnings

    @property
    def pinned_files(self) -> dict[str, PinnedFile]:
        """User files of the study, by section."""
        components = {"dataset": self.dataset.effective_dataset, "partition": self.partition, "model": self.model}
        return {section: component.pinned_file for section, component in components.items() if component.pinned_file}

    def _check_names_in_report(self) -> None:
        """Check that the section report refers to names of the study."""
        report = self.report
        references: list[tuple[str, Iterable[str], str, Sequence[str]]] = [
            ("baseline", filter(None, [report.baseline]), "study.algorithms", self.study.algorithms),
            ("best_over", report.best_over, "study.grid", list(self.study.grid)),
            ("figure_protocols", report.figure_protocols, "evaluation.protocols", self.evaluation.protocols),
            ("figure_algorithms", report.figure_algorithms, "study.algorithms", self.study.algorithms),
        ]
        for key, names, source, known_names in references:
            for name in names:
                if name not in known_names:
                    raise SettingsError(
                        f"report.{key}: '{name}' is not in {source}. {suggest_name(name, list(known_names))}"
                    )

    def _check_validation_samples(self) -> None:
        """Require validation samples if a protocol needs them."""
        keys = {name: "evaluation.protocols" for name in self.evaluation.protocols if name.endswith("-on-validation")}
        keys |= {self.tune.by: "tune.by"} if self.tune else {}
        for protocol, key in keys.items():
            if not (self.dataset.validation_fraction or self.partition.has_validation):
                raise SettingsError(
                    f"{key}: {protocol} can't be measured, because no client has validation samples. Set "
                    "dataset.validation_fraction to more than 0, such as 0.2."
                )

    def _check_dataset_noise(self) -> None:
        """Require that the clients' samples can have the noise of section dataset."""
        data, rates, clients = self.dataset, self.dataset.label_noise, self.federation.clients
        if isinstance(rates, tuple) and len(rates) != clients:
            raise SettingsError(
                f"dataset.label_noise: it has {len(rates)} rates, but federation.clients is {clients}. Use one rate "
                f"for all clients, or {clients}."
            )
        if data.feature_noise and data.has_tokens:
            raise SettingsError(f"dataset.feature_noise: {data.feature_noise} can't be used with token ids. Use 0.")
        if (name := data.noise_setting_name) and self.model.has_frozen_base:
            raise SettingsError(
                f"dataset.{name}: {getattr(data, name)} can't be used with model.frozen: true, because the "
                "features are computed once for all runs. Use 0, or set model.frozen to false."
            )

    def _check_drift(self) -> None:
        """Require that the clients' samples can have the concept drift, and that every model is measured after it."""
        drift, federation = self.federation.drift, self.federation
        if drift is None:
            return
        drift.check_rounds_and_samples(
            federation.rounds, self.dataset.dataset_info.shape, self.dataset.dataset_info.classes
        )
        if drift.angle and self.model.has_frozen_base:
            raise SettingsError(
                "federation.drift.kind: rotation can't be used with model.frozen: true, because the features of the "
                "images are computed once, before they rotate. Use labels, or set model.frozen to false."
            )
        keys: dict[str, str] = dict.fromkeys(self.evaluation.protocols, "evaluation.protocols")
        keys |= {self.tune.by: "tune.by"} if self.tune else {}
        kept_protocols = {"kept-on-local", "kept-on-validation"} & keys.keys()
        if kept_protocols and federation.participants < federation.clients - federation.num_held_out_clients:
            protocol = min(kept_protocols)
            raise SettingsError(
                f"{keys[protocol]}: {protocol} can't be used with federation.drift and "
                f"federation.participation {federation.participation}, because a kept model is measured only after "
                "its client trains. Use a personal, trained or global protocol, or federation.participation 1."
            )

    def _check_declared_files(self, download_command: str | None, obtain_command: str) -> None:
        """Report all files that are not declared, not stored, or different from their SHA-256."""
        mistakes = {
            section: pin.explain_mismatch(section, download_command) for section, pin in self.pinned_files.items()
        }
        if mistakes.get("dataset") is None:
            mistakes["dataset"] = self.dataset.explain_missing_data(obtain_command)
        if messages := [message for message in mistakes.values() if message]:
            raise SettingsError("\n".join(messages))

    def _check_titles(self) -> None:
        """Require different names of methods in tables."""
        titles = {label: get_method_title(label, self.algorithms[label]) for label in self.study.algorithms}
        for (label, title), (other, other_title) in itertools.product(titles.items(), titles.items()):
            if other != label and title in (other, other_title) and self.algorithms[label].options.title:
                raise SettingsError(
                    f"algorithms.{label}.title: {title!r} is also the name of {other} in tables. Use another title."
                )

    def _check_protocols_of_methods(self) -> None:
        """Require that the protocols are measured that report a method or select its best value."""
        for label in self.study.algorithms:
            method_protocol = self.algorithms[label].options.protocol
            selection_protocol = convert_to_validation_protocol(method_protocol or self.evaluation.protocols[0])
            if self.report.best_on == "validation" and selection_protocol not in self.evaluation.protocols:
                raise SettingsError(
                    f"report.best_on: validation selects {label}'s best value by {selection_protocol}, which is "
                    "not measured. Add it to evaluation.protocols."
                )
            if method_protocol and method_protocol not in self.evaluation.protocols:
                raise SettingsError(
                    f"algorithms.{label}.protocol: {method_protocol} is not measured. Use one of "
                    f"evaluation.protocols: {', '.join(self.evaluation.protocols)}."
                )

    def _check_method(self, label: str) -> None:
        """Require settings of the federation that a method supports."""
        algorithm = self.algorithms[label].algorithm
        optimizer, has_adam_variant = self.federation.optimizer, hasattr(algorithm, "adam")
        if optimizer != "sgd" and (algorithm.needs_sgd or (has_adam_variant and optimizer != "adam")):
            variant = f", or adam with algorithms.{label}.adam: true" if has_adam_variant else ""
            raise SettingsError(
                f"federation.optimizer: {optimizer} can't be used with {label}, whose theory needs sgd. Use "
                f"sgd{variant}."
            )
        for key in algorithm.unsupported_settings:
            if key not in Federation.model_fields:  # a warning of the plan names the key
                continue
            value, default = getattr(self.federation, key), Federation.model_fields[key].default
            if value != default:
                raise SettingsError(
                    f"federation.{key}: {value} can't be used with {label}. Use "
                    f"{'null' if default is None else default}."
                )
        if self.federation.local_steps is not None and (reason := algorithm.local_steps_conflict):
            raise SettingsError(
                f"federation.local_steps: {self.federation.local_steps} can't be used with {label}, {reason}. "
                f"Use null, or remove {label} from study.algorithms."
            )
        if algorithm.server_optimizer_part is None and not self.federation.server.is_plain_averaging:
            raise SettingsError(
                f"federation.server: {label} has no averaged model that {self.federation.server.optimizer} could "
                f"update. Remove federation.server, or remove {label} from study.algorithms."
            )

    def _check_partition(self) -> None:
        """Require that the partition can assign the samples of the data set."""
        dataset, partition, facts = self.dataset, self.partition, self.dataset.dataset_info
        if dataset.subset and partition.is_index_based:
            raise SettingsError(
                f"dataset.subset: {dataset.subset} can't be used with a partition from a file, which assigns "
                f"the samples of the complete data set. Remove it."
            )
        if (dataset.subset or 0) > facts.size:
            raise SettingsError(
                f"dataset.subset: {dataset.subset} is more than the data set's samples. Use at most {facts.size}."
            )
        num_partitioned_samples = facts.size if partition.has_fixed_splits else dataset.num_partitioned_samples
        partition.check(self.federation.clients, facts.classes, num_partitioned_samples)
        if isinstance(partition, ColumnScheme):
            partition.find_column(dataset.extra_columns, dataset.omitted_columns)
        if partition.has_overlap and dataset.split == "pooled":
            raise SettingsError(
                "dataset.split: 'pooled' can't be used with a partition in which clients share samples, because a "
                "client would train on test samples of another client. Use 'official'."
            )
        if partition.has_overlap and dataset.validation_fraction:
            raise SettingsError(
                f"dataset.validation_fraction: {dataset.validation_fraction} can't be used with a partition in "
                f"which clients share samples, because a client would train on validation samples of another client. "
                "Use 0."
            )

    def _check_model(self) -> None:
        """Require that the model can take the transformed samples of the data set."""
        dataset, model, facts = self.dataset, self.model, self.dataset.dataset_info
        self.transforms.check_input_shape(facts.shape, facts.vocabulary is not None)
        if model.has_frozen_base and self.transforms.is_random:
            key = next(name for name in ("crop", "flip", "rotation") if getattr(self.transforms, name))
            raise SettingsError(
                f"transforms.{key}: {getattr(self.transforms, key)} can't be used with model.frozen: true, "
                "because the features are computed once. Remove it, or set model.frozen to false."
            )
        has_tokens = dataset.has_tokens
        try:
            model.check(facts.shape, facts.classes)
        except SettingsError:
            if type(model).check.__module__ == MODEL.function_module:  # this check does not know the dtype of inputs
                self._require_pure_network(has_tokens)
            raise
        if not type(model).__module__.startswith("fedpipe."):  # tests check the built-in models
            self._require_pure_network(has_tokens)
        elif has_tokens is not None and has_tokens != hasattr(model, "vocabulary"):
            families = {name: registry.find_component(MODEL, name) for name in registry.list_components(MODEL)}
            default = [name for name, family in families.items() if hasattr(family, "vocabulary") == has_tokens]
            raise SettingsError(
                f"model.name: '{registry.get_component_name(MODEL, type(model))}' can't take the "
                f"{'token ids' if has_tokens else 'numbers'} of the data set. Use one of: "
                f"{', '.join(default)}."
            )
        model.check_weights_file(facts.shape, facts.classes)
        vocabulary = getattr(model, "vocabulary", None)
        if vocabulary is not None and facts.vocabulary is not None and vocabulary < facts.vocabulary:
            raise SettingsError(
                f"model.vocabulary: {vocabulary} is less than the {facts.vocabulary} token ids of the data set. "
                f"Use at least {facts.vocabulary}."
            )

    def _require_pure_network(self, has_tokens: bool | None) -> None:
        from fedpipe.models.purity import require_pure_network

        require_pure_network(self.model, self.dataset.dataset_info.shape, self.dataset.dataset_info.classes, has_tokens)

    def _check_last_round(self) -> None:
        """Require that models change when they are finetuned, and that the last round is evaluated."""
        federation, every = self.federation, self.evaluation.every
        if any(protocol.startswith("finetuned") for protocol in self.evaluation.protocols):
            federation.require_rate_of_finetuning(federation.rounds)
        if federation.rounds % every:
            raise SettingsError(
                f"evaluation.every: {every} does not divide federation.rounds ({federation.rounds}), so the last round "
                f"would not be evaluated. Use a divisor of {federation.rounds}."
            )

    @model_validator(mode="after")
    def _check_settings_across_sections(self, info: ValidationInfo) -> Params:
        context = info.context or {}
        for label in self.study.algorithms:
            if label not in self.algorithms:  # a built-in algorithm needs no entry
                known_names = sorted({*self.algorithms, *registry.list_components(ALGORITHM)})
                if label not in known_names:
                    raise SettingsError(
                        f"study.algorithms: unknown algorithm '{label}'. {suggest_name(label, known_names)}"
                    )
                self.algorithms[label] = parse_method({}, label)
        labels = context.get("labels")
        if labels is None:
            labels = [label for label in self.study.algorithms if not self.algorithms[label].options.overrides]
        self._check_names_in_report()
        self._check_validation_samples()
        self._check_titles()
        self._check_protocols_of_methods()
        for label in labels:
            self._check_method(label)
        self._check_declared_files(context.get("download"), context.get("obtain", DOWNLOAD_COMMAND))
        for label in labels if self.model.has_full_weights else ():
            if self.algorithms[label].algorithm.needs_several_models:
                raise make_single_initial_model_error(label)
        self._check_dataset_noise()
        self._check_drift()
        self._check_partition()
        self._check_model()
        self._check_last_round()
        return self


def make_single_initial_model_error(algorithm: str) -> SettingsError:
    """Error about an algorithm with several initial models if a file contains only one."""
    return SettingsError(
        f"model.weights: the file contains one initial model, but {algorithm} needs several. Use null, or "
        f"remove {algorithm} from study.algorithms."
    )
