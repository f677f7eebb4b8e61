"""From settings to runs, keys and jobs: what a study's ``plan.json`` holds, which the Snakefile reads.

A run's key is a hash of the canonical JSON of everything that can change its bits, the code of its algorithm, model,
partition scheme and data set included. The number of rounds is not part of it, so that a longer run continues a shorter
one; nor are `execution`, `artifacts` and `report`, nor the code that all runs share (see `fedpipe.engine.redo`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fedpipe import artifacts, code, config, pins, registry
from fedpipe.artifacts import PARAMS, RunFiles, StudyFiles
from fedpipe.config import SPLITTING, Data, Evaluation, Federation, Params, Transforms
from fedpipe.data import store
from fedpipe.errors import ArtifactError, SettingsError
from fedpipe.registry import Component

FIXED = ("study", "execution", "artifacts", "report", "federation.rounds")  #: what a grid can't vary


@dataclass(frozen=True)
class Settings:
    """All that a run's bits depend on, as ``run.yaml`` holds it in full."""

    dataset: dict[str, Any]
    transforms: dict[str, Any]
    partition: dict[str, Any]
    model: dict[str, Any]
    algorithm: dict[str, Any]
    federation: dict[str, Any]
    evaluation: dict[str, Any]
    seed: int
    origin: dict[str, Any] = field(default_factory=dict)  #: where files lie of which the key holds the SHA-256

    @classmethod
    def of(cls, params: Params, label: str, seed: int) -> Settings:
        """The settings of one run of a study."""
        section = params.dataset
        dataset = (
            section.model_dump(mode="json", include=set(Data.model_fields) - {"mirror"}) | section.source.described()
        )
        if section.subset is None:
            del dataset["subset"]
        if params.partition.splits:
            dataset = {name: value for name, value in dataset.items() if name not in SPLITTING}
        elif section.split == "official":
            del dataset["test_share"]
            if not section.validation_share:
                del dataset["stratified"]
        evaluation = params.evaluation.model_dump(mode="json")
        evaluation["protocols"].sort()
        if not any(protocol.startswith("finetuned") for protocol in evaluation["protocols"]):
            del evaluation["finetune_epochs"]
        return cls(
            dataset=dataset,
            transforms=params.transforms.model_dump(mode="json"),
            partition=_described(registry.PARTITION, "scheme", params.partition),
            model=_described(registry.MODEL, "name", params.model),
            algorithm=_described(registry.ALGORITHM, "name", params.algorithm(label)),
            federation=params.federation.model_dump(mode="json", exclude={"rounds"}),
            evaluation=evaluation,
            seed=seed,
            origin={"model": params.model.origin} if params.model.origin else {},
        )

    @classmethod
    def read(cls, path: Path) -> Settings:
        """The settings in a ``run.yaml``.

        Raises
        ------
        ArtifactError
            The file is missing, or is not the one that its folder's name is the key of.
        """
        try:
            settings = cls(**yaml.safe_load(path.read_text()))
            key = settings.key
        except FileNotFoundError:
            raise ArtifactError(f"{path} is missing; run `fedpipe plan` to write it again.") from None
        except (yaml.YAMLError, TypeError) as error:
            raise ArtifactError(f"{path} is damaged ({error}); delete it and run `fedpipe plan`.") from None
        if key != path.parent.name:
            raise ArtifactError(f"{path} was edited: its key would be {key}; change params.yaml instead.")
        return settings

    def dump(self) -> str:
        """The text of ``run.yaml``."""
        head = "# All that this run's bits depend on; its key, the folder's name, is a hash of it.\n"
        held = {name: value for name, value in dataclasses.asdict(self).items() if name != "origin" or value}
        return head + yaml.safe_dump(held, sort_keys=False)

    @property
    def key(self) -> str:
        """The run's key."""
        return digest({name: value for name, value in dataclasses.asdict(self).items() if name != "origin"})

    @property
    def partition_settings(self) -> dict[str, Any]:
        """All that the run's partition depends on; no seed, where the partition itself says how samples are split."""
        fixed = self.partition.get("seed")
        return {
            "dataset": self.dataset,
            "partition": {name: value for name, value in self.partition.items() if name != "seed"},
            "clients": self.federation["clients"],
            **({"seed": self.seed if fixed is None else fixed} if "split" in self.dataset else {}),
        }

    def build_algorithm(self) -> Component:
        """The algorithm with its hyper-parameters.

        Raises
        ------
        ArtifactError
            Its code is not that which the run's key is of; so for the model.
        """
        return self._built(registry.ALGORITHM, self.algorithm)

    def build_model(self) -> Component:
        """The model family with its parameters."""
        return self._built(registry.MODEL, self.model | self.origin.get("model", {}))

    def _built(self, kind: registry.Kind, described: dict[str, Any]) -> Component:
        component = built(kind, "name", described)
        if (found := code.of(*component.made_of()).text) != described["code"]:
            raise ArtifactError(
                f"run {self.key} is of other code of {kind.name} '{described['name']}' ({described['code']}) than lies "
                f"here ({found}); run `snakemake all`, which plans again, or restore that code."
            )
        return component

    def build_federation(self) -> Federation:
        """The federation's settings."""
        return Federation(**self.federation)

    def build_transforms(self) -> Transforms:
        """What is done to inputs."""
        return Transforms(**self.transforms)

    def build_evaluation(self) -> Evaluation:
        """The evaluation's settings."""
        return Evaluation(**self.evaluation)


def digest(value: Any) -> str:
    """Twelve hexadecimal digits of the SHA-256 of the canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def make(path: Path = PARAMS) -> dict[str, Any]:
    """The plan of the study in ``path``; nothing is written.

    Raises
    ------
    SettingsError
        One sentence for each mistake in the settings.
    """
    sys.path.insert(0, str(Path.cwd()))  # own algorithms lie beside params.yaml
    raw = config.read(path)
    study = config.parse(raw, config.download(path))
    runs: dict[tuple[str, str], dict[str, Any]] = {}
    cells: dict[str, dict[str, Any]] = {}
    partitions: dict[str, Any] = {}
    files: dict[str, str] = {}
    components: list[Component] = []
    warnings: list[str] = []
    stamps: dict[str, str] = {}
    for point in _points(study):
        params = _at(raw, point) if point else study
        stamps |= {str(pin.path): pins.stamp(pin.path) for pin in params.pins.values()}
        components += [params.partition, params.model, params.dataset.source]
        for label in study.study.algorithms:
            algorithm: Any = params.algorithm(label)
            components.append(algorithm)
            warnings += algorithm.warnings(params, f"algorithms.{label}")
        for label, seed in itertools.product(study.study.algorithms, study.study.seeds):
            run = Settings.of(params, label, seed)
            partition = digest(run.partition_settings)
            partitions[partition] = run.partition_settings
            dealt = artifacts.assignment_file(partition).with_name("partition.yaml")
            origin = {"origin": params.partition.origin} if params.partition.origin else {}
            files[str(dealt)] = yaml.safe_dump(run.partition_settings | origin, sort_keys=False)
            place = RunFiles.of(label, run.key)
            files[str(place.settings)] = run.dump()
            data = params.dataset.file.stem
            files[str(store.settings_file(data))] = yaml.safe_dump(params.dataset.origin, sort_keys=False)
            mine = {name: value for name, value in point.items() if _concerns(name, label)}
            cell = {"algorithm": label, "seed": seed, "grid": mine, "key": run.key, "rounds": params.federation.rounds}
            cells[digest([label, seed, mine])] = cell
            runs[label, run.key] = {
                "algorithm": label,
                "seed": seed,
                "key": run.key,
                "rounds": params.federation.rounds,
                "path": str(place.path),
                "partition": partition,
                "dataset": data,
                "participants": params.federation.participants,
            }
    return {
        "shared": code.shared(),
        "sources": _sources(path, components) | stamps,
        "params": str(artifacts.study(path)),
        "algorithms": list(study.study.algorithms),
        "seeds": list(study.study.seeds),
        "grid": {name: list(values) for name, values in study.study.grid.items()},
        "protocols": list(study.evaluation.protocols),
        "partitions": partitions,
        "warnings": list(dict.fromkeys(warnings)),
        "runs": list(runs.values()),  # each once, however many cells it serves
        "cells": list(cells.values()),  # what tables and figures show: a number of rounds of a run
        "files": files,
        "execution": study.execution.model_dump(mode="json"),
        "artifacts": study.artifacts.model_dump(mode="json"),
        "report": study.report.model_dump(mode="json"),
    }


def write(plan: dict[str, Any]) -> None:
    """Write a study's plan, and what each job reads, where it is not there yet: ``run.yaml``, ``partition.yaml``."""
    place = StudyFiles.of(Path(plan["params"]))
    for name, text in plan["files"].items():
        if not Path(name).is_file() or Path(name).read_text() != text:
            artifacts.write_bytes(Path(name), text.encode())
    if plan["execution"]["clients_per_job"]:  # rules of single rounds watch the files that a segment's end has packed
        for run in plan["runs"]:
            artifacts.unpack(RunFiles(Path(run["path"])).history)
    artifacts.write_json(place.plan, lasting(plan))
    artifacts.write_json(place.sources, plan["sources"])


def lasting(plan: dict[str, Any]) -> dict[str, Any]:
    """What ``plan.json`` holds of a plan.

    The files that it was made of are no part of that: an edit that changes no key changes nothing that DVC records.
    """
    return {name: value for name, value in plan.items() if name != "sources"} | {"files": sorted(plan["files"])}


def serves(run: dict[str, Any], cell: dict[str, Any]) -> bool:
    """Whether a cell's number is of this run."""
    return bool(run["algorithm"] == cell["algorithm"] and run["key"] == cell["key"])


def _described(kind: registry.Kind, selector: str, component: Component) -> dict[str, Any]:
    """A component's name, code and parameters, as JSON would give them back: lists for tuples."""
    head = {selector: registry.name_of(kind, type(component)), "code": code.of(*component.made_of()).text}
    described: dict[str, Any] = json.loads(json.dumps(head | component.keyed()))
    return described


def built(kind: registry.Kind, selector: str, described: dict[str, Any]) -> Component:
    """The component that a run's or partition's settings describe."""
    parameters = {name: value for name, value in described.items() if name not in {selector, "code"}}
    return registry.build(kind, described[selector], parameters)


def _points(study: Params) -> list[dict[str, Any]]:
    for name in study.study.grid:
        fixed = next((each for each in FIXED if _within(name, each) or _within(each, name)), None)
        if fixed:
            raise SettingsError(f"study.grid: '{name}' can't be varied, since {fixed} is one for the whole study.")
        if _within(name, "algorithms") and not any(_concerns(name, label) for label in study.study.algorithms):
            raise SettingsError(f"study.grid: '{name}' varies nothing, since its algorithm is not in study.algorithms.")
        if not study.study.grid[name]:
            raise SettingsError(f"study.grid.{name}: its list is empty; it should hold at least one value.")
    names, values = list(study.study.grid), list(study.study.grid.values())
    return [dict(zip(names, point, strict=True)) for point in itertools.product(*values)]


def _at(raw: dict[str, Any], point: dict[str, Any]) -> Params:
    try:
        return config.parse(config.override(raw, point), None)
    except SettingsError as error:
        where = ", ".join(f"{name}: {value}" for name, value in point.items())
        lines = (f"{line} (at the point {where} of study.grid)" for line in str(error).splitlines())
        raise SettingsError("\n".join(lines)) from None


def _within(name: str, section: str) -> bool:
    return f"{name}.".startswith(f"{section}.")


def _concerns(name: str, label: str) -> bool:
    """Whether a key of the grid makes a difference to an algorithm."""
    return not _within(name, "algorithms") or name == "algorithms" or _within(name, f"algorithms.{label}")


def _sources(path: Path, components: list[Component]) -> dict[str, str]:
    """The files that the plan was made of, with their SHA-256; the Snakefile plans again when one has changed."""
    files = {path, *Path(__file__).parent.rglob("*.py")}
    files |= {file for component in components for file in code.of(*component.made_of()).files}
    here = Path.cwd().resolve()

    def relative(file: Path) -> str:
        resolved = file.resolve()
        return str(resolved.relative_to(here) if resolved.is_relative_to(here) else resolved)

    return {relative(file): artifacts.sha256_of(file) for file in sorted(files)}
