"""The settings of a run, its key, and its file ``run.yaml``."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedpipe.core.components import registry
from fedpipe.core.components.code_digest import compute_code_digest
from fedpipe.core.components.component import ALGORITHM, MODEL, PARTITION, Component, ComponentKind
from fedpipe.core.errors import ArtifactError
from fedpipe.core.hashing import compute_json_digest
from fedpipe.core.yaml_text import format_yaml, read_generated_yaml, read_verified_settings
from fedpipe.settings.dataset import SPLIT_KEYS, Data
from fedpipe.settings.evaluation import Evaluation
from fedpipe.settings.federation import Federation
from fedpipe.settings.loader import override_settings
from fedpipe.settings.params import Params
from fedpipe.settings.transforms import Transforms

DATA_SOURCE_KEYS = {"mirror", "on_missing"}  #: keys of `dataset` about the origin of samples, which no run's key has


@dataclass(frozen=True)
class RunSettings:
    """All settings that a run's bits depend on, as in ``run.yaml``."""

    dataset: dict[str, Any]
    transforms: dict[str, Any]
    partition: dict[str, Any]
    model: dict[str, Any]
    algorithm: dict[str, Any]
    federation: dict[str, Any]
    evaluation: dict[str, Any]
    seed: int
    origin: dict[str, Any] = field(default_factory=dict)  #: paths of files whose SHA-256 is in the key

    @classmethod
    def from_params(cls, params: Params, label: str, seed: int) -> RunSettings:
        """Make the settings of a run of a study."""
        section = params.dataset
        dataset = (
            section.model_dump(mode="json", include=set(Data.model_fields) - DATA_SOURCE_KEYS) | section.key_settings
        )
        if section.subset is None:
            del dataset["subset"]
        if not section.label_noise:
            dataset.pop("label_noise_kind", None)
        if params.partition.has_fixed_splits:
            dataset = {name: value for name, value in dataset.items() if name not in SPLIT_KEYS}
        elif section.split == "official":
            del dataset["test_fraction"]
            if not section.validation_fraction:
                del dataset["stratified"]
        return cls(
            dataset=dataset,
            transforms=_dump_transforms(params.transforms),
            partition=registry.get_component_key_settings(PARTITION, params.partition),
            model=registry.get_component_key_settings(MODEL, params.model),
            algorithm=registry.get_component_key_settings(ALGORITHM, params.algorithms[label].algorithm),
            federation=params.federation.model_dump(mode="json", exclude={"rounds"}),
            evaluation=dump_evaluation_settings(params.evaluation),
            seed=seed,
            origin={"model": params.model.path_parameters} if params.model.path_parameters else {},
        )

    @classmethod
    def read(cls, path: Path) -> RunSettings:
        """Read a ``run.yaml``. It must match the key in its folder's name."""
        return cls(**read_verified_settings(path, path.parent.name, lambda settings: cls(**settings).key))

    @classmethod
    def read_unchecked(cls, path: Path) -> RunSettings:
        """Read a ``run.yaml`` without checks, which is fast. Compute nothing with it."""
        try:
            return cls(**read_generated_yaml(path))
        except TypeError as error:  # written by another version of fedpipe
            raise ArtifactError(f"{path} is damaged ({error}). Delete it and run `fedpipe plan`.") from None

    def to_yaml(self) -> str:
        """Format the text of ``run.yaml``."""
        head = "# All settings that this run depends on. Its key, the folder's name, is their hash.\n"
        content = {name: value for name, value in dataclasses.asdict(self).items() if name != "origin" or value}
        return head + format_yaml(content)

    @property
    def key(self) -> str:
        """Key of the run."""
        return compute_json_digest({name: value for name, value in vars(self).items() if name != "origin"})

    @property
    def partition_settings(self) -> dict[str, Any]:
        """Settings of the run's partition, without a seed if the partition has fixed splits."""
        partition_seed = self.partition.get("seed")
        return {
            "dataset": self.dataset,
            "partition": {name: value for name, value in self.partition.items() if name != "seed"},
            "clients": self.federation["clients"],
            **({"seed": self.seed if partition_seed is None else partition_seed} if "split" in self.dataset else {}),
        }

    def build_algorithm(self) -> Component:
        """Build the algorithm with its hyperparameters. Its code must have the digest in the run's key."""
        return self._build_component(ALGORITHM, self.algorithm)

    def build_model(self) -> Component:
        """Build the model with its parameters."""
        return self._build_component(MODEL, self.model | self.origin.get("model", {}))

    def _build_component(self, kind: ComponentKind, run_settings: dict[str, Any]) -> Component:
        component = registry.build_component_from_run_settings(kind, run_settings)
        if (code_digest := compute_code_digest(*component.list_hashed_code()).text) != run_settings["code"]:
            raise ArtifactError(
                f"run {self.key} belongs to another version of {kind.name} '{run_settings['name']}' "
                f"({run_settings['code']}, now {code_digest}). Type `fedpipe run`, which plans again, or restore "
                "that version."
            )
        return component

    def is_valid_value(self, section: str, key: str, value: Any) -> bool:
        """Whether a section of these settings accepts another value of a key."""
        settings = override_settings(getattr(self, section), {key: value})
        try:
            match section:
                case "federation":
                    Federation(**settings)
                case "transforms":
                    Transforms(**settings)
                case "model":
                    registry.build_component_from_run_settings(MODEL, settings | self.origin.get("model", {}))
                case "algorithm":
                    registry.build_component_from_run_settings(ALGORITHM, settings)
        except ValueError:
            return False
        return True

    def build_federation_settings(self) -> Federation:
        """Build the settings of the federation."""
        return Federation(**self.federation)

    def build_transforms_settings(self) -> Transforms:
        """Build the settings of the transforms."""
        return Transforms(**{"fill": "mean"} | self.transforms)

    def build_evaluation_settings(self) -> Evaluation:
        """Build the settings of the evaluation."""
        return Evaluation(**self.evaluation)


def dump_evaluation_settings(section: Evaluation) -> dict[str, Any]:
    """Convert a section `evaluation` to the settings of a run, without keys that have no effect."""
    evaluation = section.model_dump(mode="json")
    evaluation["protocols"].sort()
    evaluation.pop("metrics", None)
    if section.recorded_metrics:
        evaluation["metrics"] = list(section.recorded_metrics)
    if not any(protocol.startswith("finetuned") for protocol in evaluation["protocols"]):
        del evaluation["finetune_epochs"]
    return evaluation


def _dump_transforms(transforms: Transforms) -> dict[str, Any]:
    """Dump the settings of transforms. The key omits the color ``mean``, and any color if nothing is padded."""
    settings = transforms.model_dump(mode="json")
    if transforms.fill == "mean" or not transforms.has_padding:
        del settings["fill"]
    return settings
