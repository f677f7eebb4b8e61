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

from fedpipe import artifacts, code, config, grid, pins, probing, registry
from fedpipe.artifacts import PAPER, PARAMS
from fedpipe.config import SPLITTING, Data, Evaluation, Federation, Params, Transforms
from fedpipe.data import store
from fedpipe.errors import ArtifactError, SettingsError
from fedpipe.planned import Cell, Jobs, Plan, PlannedRun, Reported
from fedpipe.registry import Component
from fedpipe.yaml_text import read_yaml

#: Stands among a plan's files where some are modules of the user's own, and counts as changed: another
#: module of that name may be found first by now, or one that was not there, which no file's hash tells.
SEARCHED = "modules of your own"
PINNED = {"dataset", "partition", "model"}  #: sections that may name files of the user's own, by their SHA-256
OBTAINING = {"mirror", "absent"}  #: keys of `dataset` that say where its samples come from, not which they are
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  #: a study may have a thousand runs


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
        dataset = section.model_dump(mode="json", include=set(Data.model_fields) - OBTAINING) | section.described
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
            partition=registry.described(registry.PARTITION, params.partition),
            model=registry.described(registry.MODEL, params.model),
            algorithm=registry.described(registry.ALGORITHM, params.algorithms[label]),
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
            settings = cls(**read_yaml(path.read_text(), path))
            key = settings.key
        except FileNotFoundError:
            raise ArtifactError(f"{path} is missing; run `fedpipe plan` to write it again.") from None
        except (SettingsError, TypeError) as error:
            raise ArtifactError(f"{path} is damaged ({error}); delete it and run `fedpipe plan`.") from None
        if key != path.parent.name:
            raise ArtifactError(f"{path} was edited: its key would be {key}; change params.yaml instead.")
        return settings

    def dump(self) -> str:
        """The text of ``run.yaml``."""
        head = "# All that this run's bits depend on; its key, the folder's name, is a hash of it.\n"
        held = {name: value for name, value in dataclasses.asdict(self).items() if name != "origin" or value}
        return head + dump(held)

    @property
    def key(self) -> str:
        """The run's key."""
        return digest({name: value for name, value in vars(self).items() if name != "origin"})

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
        component = registry.restored(kind, described)
        if (found := code.of(*component.made_of()).text) != described["code"]:
            raise ArtifactError(
                f"run {self.key} is of other code of {kind.name} '{described['name']}' ({described['code']}) than lies "
                f"here ({found}); type `fedpipe run`, which plans again, or restore that code."
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


def dump(value: Any) -> str:
    """YAML, with keys in their order."""
    return str(yaml.dump(value, Dumper=_DUMPER, sort_keys=False))


def digest(value: Any) -> str:
    """Twelve hexadecimal digits of the SHA-256 of the canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class NewPlan(Plan):
    """A plan that was just made, with what is written beside it."""

    settings: dict[str, Settings]  #: of each run, by its key
    texts: dict[str, str]  #: what jobs read, by path: ``run.yaml``, ``partition.yaml``, data sets' settings
    samples: dict[str, tuple[int, int]]  #: by partition, about how many are trained on, and how many there are
    sources: dict[str, str]  #: the files that the plan was made of, each with its SHA-256 or its stamp
    absent: dict[str, str]  #: by path, the runs that can't be made without a network, with what is not here


def make(path: Path = PARAMS, scale: str = PAPER) -> NewPlan:
    """The plan of the study in ``path``, at one of its scales; nothing is written.

    Raises
    ------
    SettingsError
        One sentence for each mistake in the settings.
    """
    sys.path.insert(0, str(Path.cwd()))  # own algorithms lie beside params.yaml
    download = config.download(path)
    raw, above = config.at_scale(config.read(path), scale, download)
    ours = any(key.partition(".")[0] in PINNED for key in above)  # files that the scale names, no command declares
    study = config.parse(raw, None if ours else download, obtain=download)
    draft = _Draft(study, grid.keys(raw, study, above))
    for point in grid.points(study):
        found = grid.settings(raw, study, point, above, download)
        draft.add(point, {label: (params, own) for params, labels, own in found for label in labels})
    from fedpipe.stages import partition  # which needs this module

    draft.warnings += partition.warnings(draft.partitions, draft.texts)
    probes = probing.planned(study, draft.cells.values())
    draft.texts |= {str(probe.files.settings): probing.text(study, probe) for probe in probes}
    return NewPlan(
        params=artifacts.study(path),
        scale=scale,
        algorithms=study.study.algorithms,
        seeds=study.study.seeds,
        grid={name: list(values) for name, values in study.study.grid.items()},
        protocols=study.evaluation.protocols,
        shown={label: shown for label in study.study.algorithms if (shown := config.method(raw, label).shown)},
        partitions=draft.partitions,
        runs=tuple(draft.runs.values()),
        cells=tuple(draft.cells.values()),
        warnings=tuple(dict.fromkeys(draft.warnings)),
        files=tuple(sorted(draft.texts)),
        shared=code.shared(),
        execution=Jobs(**study.execution.model_dump()),
        keep_models=study.artifacts.keep_models,
        report=Reported(**study.report.model_dump()),
        probes=probes,
        titles={label: title for label in study.study.algorithms if (title := config.method(raw, label).title)},
        settings=draft.settings,
        texts=draft.texts,
        samples=draft.samples,
        sources=_sources(path, draft.components) | draft.stamps,
        absent=draft.absent,
    )


@dataclass
class _Draft:
    """A plan in the making: what the points of a study's grid have brought so far; fields as those of `NewPlan`."""

    study: Params
    keys: dict[str, list[str]]  #: of each algorithm, the names of the grid that concern it
    runs: dict[tuple[str, str], PlannedRun] = field(default_factory=dict)
    cells: dict[str, Cell] = field(default_factory=dict)
    partitions: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: dict[str, Settings] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    samples: dict[str, tuple[int, int]] = field(default_factory=dict)
    components: list[Component] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    stamps: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, point: grid.Point, found: dict[str, tuple[Params, dict[str, Any]]]) -> None:
        """Add a point's cells, and runs if they are new.

        ``found`` has the settings of each algorithm there, and the keys that it sets for itself alone.
        """
        algorithms, seeds = self.study.study.algorithms, self.study.study.seeds
        told = {label: params for label, (params, _) in found.items()}
        for params in {id(params): params for params in told.values()}.values():  # those of many algorithms are one
            self.warnings += params.warnings
            self.stamps |= {str(pin.path): pins.stamp(pin.path) for pin in params.pins.values()}
            self.components += [params.partition, params.model, params.dataset.source]
            data = params.dataset.file.stem
            self.texts[str(store.settings_file(data))] = dump(params.dataset.origin)
        for label in algorithms:
            self.components.append(algorithm := told[label].algorithms[label])
            self.warnings += algorithm.warnings(told[label], f"algorithms.{label}")
        settings = {label: Settings.of(params, label, seeds[0]) for label, params in told.items()}
        for label, seed in itertools.product(algorithms, seeds):
            params = told[label]
            run = self._run(label, params, dataclasses.replace(settings[label], seed=seed))
            heard = {name: [key for key in own if key not in params.left_out] for name, own in self.keys.items()}
            mine = point.at(label, heard)
            own = found[label][1]
            cell = Cell(algorithm=label, seed=seed, key=run.key, rounds=run.rounds, grid=mine, own=own)
            self.cells[digest([label, seed, mine])] = cell

    def _run(self, label: str, params: Params, settings: Settings) -> PlannedRun:
        """Add a run, or its longer form where a shorter one is there, since rounds are no part of the key."""
        run = PlannedRun(
            algorithm=label,
            seed=settings.seed,
            key=settings.key,
            rounds=params.federation.rounds,
            partition=self._partition(params, settings),
            dataset=params.dataset.file.stem,
            participants=params.federation.participants,
        )
        self.settings[run.key] = settings
        if (written := str(run.files.settings)) not in self.texts:
            self.texts[written] = settings.dump()
        if lacking := _lacking(params):
            self.absent[str(run.path)] = lacking
        other = self.runs.get((label, run.key), run)
        self.runs[label, run.key] = run if run.rounds > other.rounds else other
        return run

    def _partition(self, params: Params, settings: Settings) -> str:
        """Add the partition that a run is of, which many share; its key."""
        key = digest(settings.partition_settings)
        if key not in self.partitions:
            self.partitions[key] = settings.partition_settings
            self.samples[key] = _samples(params)
            dealt = artifacts.assignment_file(key).with_name("partition.yaml")
            origin = {"origin": params.partition.origin} if params.partition.origin else {}
            self.texts[str(dealt)] = dump(settings.partition_settings | origin)
        return key


def scales(path: Path) -> list[str]:
    """All scales of a study, the whole one first."""
    return [PAPER, *config.parse(config.read(path), config.download(path)).scales]


def write(plan: NewPlan) -> None:
    """Write a study's plan, and what each job reads, where it is not there yet: ``run.yaml``, ``partition.yaml``.

    The files that it was made of are no part of ``plan.json`` itself: an edit that changes no key changes nothing that
    DVC records. The hash of ``plan.json`` stands beside theirs, since DVC may bring that of another commit.

    Raises
    ------
    SettingsError
        A study in that file has no place; nothing is written.
    """
    sources = plan.study.sources
    for name, text in plan.texts.items():
        if not Path(name).is_file() or Path(name).read_text() != text:
            artifacts.write_bytes(Path(name), text.encode())
    if plan.execution.clients_per_job:  # rules of single rounds watch the files that a segment's end has packed
        for run in plan.runs:
            artifacts.unpack(run.files.history)
    plan.write()
    package = Path(__file__).resolve().parent
    own = any(name.endswith(".py") and package not in Path(name).resolve().parents for name in plan.sources)
    marks = {str(plan.study.plan): artifacts.sha256_of(plan.study.plan)} | ({SEARCHED: ""} if own else {})
    artifacts.write_json(sources, plan.sources | marks)
    artifacts.write_json(plan.study.absent, plan.absent)


def _samples(params: Params) -> tuple[int, int]:
    """About how many samples are trained on, and how many there are."""
    data = params.dataset
    whole = data.subset or data.facts.size
    if params.partition.splits:
        return whole, whole
    return (data.dealt, whole) if data.split == "official" else (round(whole * (1 - data.test_share)), whole)


def _lacking(params: Params) -> str:
    """What would have to be fetched over the network; empty, where all is here."""
    if not (params.dataset.at_hand or params.dataset.source is not params.dataset.named):
        return "data not here"
    published = getattr(params.model, "weights", None) == "imagenet"
    return "weights not here" if published and not params.model.imagenet.is_file() else ""


def _sources(path: Path, components: list[Component]) -> dict[str, str]:
    """The files that the plan was made of, with their SHA-256; the Snakefile plans again when one has changed."""
    files = {path, *Path(__file__).parent.rglob("*.py")}
    files |= {file for component in components for file in code.of(*component.made_of()).files}
    here = Path.cwd().resolve()

    def relative(file: Path) -> str:
        resolved = file.resolve()
        return str(resolved.relative_to(here) if resolved.is_relative_to(here) else resolved)

    return {relative(file): artifacts.sha256_of(file) for file in sorted(files)}
