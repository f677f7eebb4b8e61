"""From settings to runs, keys and jobs: what ``results/plan.json`` holds, which the Snakefile reads.

A run's key is a hash of the canonical JSON of everything that can change its bits. The number of rounds is not part of
it, so that a longer run continues a shorter one; nor are `execution`, `artifacts` and `report`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedpipe import artifacts, config, registry
from fedpipe.artifacts import RunFiles
from fedpipe.config import Evaluation, Federation, Params
from fedpipe.errors import ArtifactError, SettingsError
from fedpipe.registry import Component

PARAMS = Path("params.yaml")
PLAN = artifacts.RESULTS / "plan.json"
FIXED = ("study", "execution", "artifacts", "report", "federation.rounds")  #: what a grid can't vary


@dataclass(frozen=True)
class Settings:
    """All that a run's bits depend on, as ``run.yaml`` holds it in full."""

    dataset: dict[str, Any]
    partition: dict[str, Any]
    model: dict[str, Any]
    algorithm: dict[str, Any]
    federation: dict[str, Any]
    evaluation: dict[str, Any]
    seed: int

    @classmethod
    def of(cls, params: Params, label: str, seed: int) -> Settings:
        """The settings of one run of a study."""
        source: Any = registry.find(registry.DATASET, params.dataset.name)
        algorithm = params.algorithm(label)
        dataset = params.dataset.model_dump(mode="json") | {"sha256": source.sha256}
        if params.dataset.split == "official":
            del dataset["test_share"]
        return cls(
            dataset=dataset,
            partition=_plain(params.model_dump(mode="json")["partition"]),
            model=_plain(params.model_dump(mode="json")["model"]),
            algorithm={
                "name": registry.name_of(registry.ALGORITHM, type(algorithm)),
                "version": type(algorithm).version,  # type: ignore[attr-defined]
                **_plain(dataclasses.asdict(algorithm)),
            },
            federation=params.federation.model_dump(mode="json", exclude={"rounds"}),
            evaluation=params.evaluation.model_dump(mode="json"),
            seed=seed,
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
        except FileNotFoundError:
            raise ArtifactError(f"{path} is missing; run `fedpipe plan` to write it again.") from None
        except (yaml.YAMLError, TypeError) as error:
            raise ArtifactError(f"{path} is damaged ({error}); delete it and run `fedpipe plan`.") from None
        if settings.key != path.parent.name:
            raise ArtifactError(
                f"{path} was edited: its settings have the key {settings.key}; change params.yaml instead."
            )
        return settings

    def dump(self) -> str:
        """The text of ``run.yaml``."""
        head = "# All that this run's bits depend on; its key, the folder's name, is a hash of it.\n"
        return head + yaml.safe_dump(dataclasses.asdict(self), sort_keys=False)

    @property
    def key(self) -> str:
        """The run's key."""
        return digest(dataclasses.asdict(self))

    @property
    def partition_settings(self) -> dict[str, Any]:
        """All that the run's partition depends on."""
        fixed = self.partition.get("seed")
        return {
            "dataset": self.dataset,
            "partition": {name: value for name, value in self.partition.items() if name != "seed"},
            "clients": self.federation["clients"],
            "seed": self.seed if fixed is None else fixed,
        }

    def build_algorithm(self) -> Component:
        """The algorithm with its hyper-parameters."""
        parameters = {name: value for name, value in self.algorithm.items() if name not in {"name", "version"}}
        return registry.build(registry.ALGORITHM, self.algorithm["name"], parameters)

    def build_model(self) -> Component:
        """The model family with its parameters."""
        parameters = {name: value for name, value in self.model.items() if name != "name"}
        return registry.build(registry.MODEL, self.model["name"], parameters)

    def build_federation(self) -> Federation:
        """The federation's settings."""
        return Federation(**self.federation)

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
    sys.path.insert(0, str(path.parent.resolve()))  # own algorithms lie beside params.yaml
    raw = config.read(path)
    study = config.parse(raw)
    runs: dict[tuple[str, str], dict[str, Any]] = {}
    partitions: dict[str, Any] = {}
    files: dict[str, str] = {}
    for point in _points(study):
        params = _at(raw, point) if point else study
        for label, seed in itertools.product(study.study.algorithms, study.study.seeds):
            run = Settings.of(params, label, seed)
            partition = digest(run.partition_settings)
            partitions[partition] = run.partition_settings
            dealt = artifacts.assignment_file(partition).with_name("partition.yaml")
            files[str(dealt)] = yaml.safe_dump(run.partition_settings, sort_keys=False)
            place = RunFiles.of(label, run.key)
            files[str(place.settings)] = run.dump()
            runs.setdefault(
                (label, run.key),
                {
                    "algorithm": label,
                    "seed": seed,
                    "grid": {name: value for name, value in point.items() if _concerns(name, label)},
                    "key": run.key,
                    "path": str(place.path),
                    "partition": partition,
                    "dataset": run.dataset["name"],
                    "participants": params.federation.participants,
                },
            )
    return {
        "sources": _sources(path, study),
        "params": str(path),
        "algorithms": list(study.study.algorithms),
        "seeds": list(study.study.seeds),
        "grid": {name: list(values) for name, values in study.study.grid.items()},
        "rounds": study.federation.rounds,
        "protocols": list(study.evaluation.protocols),
        "partitions": partitions,
        "runs": list(runs.values()),
        "files": files,
        "execution": study.execution.model_dump(mode="json"),
        "artifacts": study.artifacts.model_dump(mode="json"),
        "report": study.report.model_dump(mode="json"),
    }


def write(plan: dict[str, Any], path: Path = PLAN) -> None:
    """Write a plan, and beside it what each job reads, where it is not there yet: ``run.yaml``, ``partition.yaml``."""
    for name, text in plan["files"].items():
        if not Path(name).is_file() or Path(name).read_text() != text:
            artifacts.write_bytes(Path(name), text.encode())
    artifacts.write_json(path, plan | {"files": sorted(plan["files"])})


def _plain(value: Any) -> Any:
    """As JSON would give it back: lists for tuples."""
    return json.loads(json.dumps(value))


def _points(study: Params) -> list[dict[str, Any]]:
    for name in study.study.grid:
        fixed = next((each for each in FIXED if f"{name}.".startswith(f"{each}.")), None)
        if fixed:
            raise SettingsError(f"study.grid: '{name}' can't be varied, since {fixed} is one for the whole study.")
        if not study.study.grid[name]:
            raise SettingsError(f"study.grid.{name}: its list is empty; it should hold at least one value.")
    names, values = list(study.study.grid), list(study.study.grid.values())
    return [dict(zip(names, point, strict=True)) for point in itertools.product(*values)]


def _at(raw: dict[str, Any], point: dict[str, Any]) -> Params:
    try:
        return config.parse(config.override(raw, point))
    except SettingsError as error:
        where = ", ".join(f"{name}: {value}" for name, value in point.items())
        raise SettingsError(f"{error} (at the point {where} of study.grid)") from None


def _concerns(name: str, label: str) -> bool:
    return not name.startswith("algorithms.") or name.startswith(f"algorithms.{label}.")


def _sources(path: Path, study: Params) -> dict[str, str]:
    """The files that the plan was made of, with their SHA-256; the Snakefile plans again when one has changed."""
    package = Path(__file__).parent
    files = {path, *package.rglob("*.py")}
    for label in study.study.algorithms:
        module = sys.modules[type(study.algorithm(label)).__module__]
        if module.__file__:
            files.add(Path(module.__file__))
    here = Path.cwd().resolve()

    def relative(file: Path) -> str:
        resolved = file.resolve()
        return str(resolved.relative_to(here) if resolved.is_relative_to(here) else resolved)

    return {relative(file): artifacts.sha256_of(file) for file in sorted(files)}
