"""params.yaml: defaults, the JSON Schema, and one message for each error, which begins with its key."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jsonschema
import numpy as np
import pytest
import yaml

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError, suggest_name
from fedpipe.core.storage import files, layout
from fedpipe.planning import download, planner
from fedpipe.settings import base, federation, loader, methods, parser
from fedpipe.settings.params import Params
from fedpipe.settings.schema import build_json_schema
from tests import small_studies as studies
from tests.docs.page_blocks import PAGES, blocks

pytestmark = pytest.mark.usefixtures("in_empty_folder")

ROOT = Path(__file__).parents[2]
SECTIONS = ", ".join(Params.model_fields)
ALGORITHMS = ", ".join(registry.list_components(component.ALGORITHM))
*FIRST, LAST = (f"'{name}'" for name in get_args(base.Protocol))
PROTOCOLS = f"{', '.join(FIRST)} or {LAST}"
JARGON = re.compile(r"Tuple|String|Keys|literal\[|constrained|\[key\]|\binstance\b|after validation|pydantic")


@dataclass(frozen=True, kw_only=True)
class Titled(FedAvg):
    """An algorithm with a parameter whose name is also an option of all methods."""

    title: str = ""


def study(**values: Any) -> dict[str, Any]:
    """Return the tests' study with other values at dotted keys. Two underscores mean a dot."""
    return loader.override_settings(
        studies.settings(), {key.replace("__", "."): value for key, value in values.items()}
    )


def list_errors(settings: dict[str, Any]) -> list[str]:
    """Return the error messages of `fedpipe plan` for these settings."""
    studies.write(settings, Path())
    with pytest.raises(SettingsError) as error:
        planner.make_plan(Path("params.yaml"))
    return str(error.value).split("\n")


def has_outline(message: str, outline: str) -> bool:
    """Return whether a message begins with the outline, in which ` ... ` matches any words."""
    return re.match(".*".join(map(re.escape, outline.split(" ... "))), message) is not None


FLOATS = "1.2e-38"  #: the smallest number that fits
#: Changes of the study, and the outline of the only message: the key, the value and what identifies the problem.
MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    # sections and keys
    ("unknown-section", {"datasett": {}}, "datasett: unknown key ... 'dataset'"),
    ("unknown-section-far", {"xyz": 1}, f"xyz: unknown key ... {SECTIONS}"),
    ("empty-section", {"federation": None}, "federation: empty. Use {}"),
    ("empty-method", {"algorithms__fedavg": None}, "algorithms.fedavg: empty. Use {}"),
    ("unknown-key", {"federation__client": 3}, "federation.client: unknown key ... 'clients'"),
    *[
        (f"{key}-of-another-library", {key: 1}, f"{key}: unknown key. Did you mean '{suggestion}'?")
        for key, suggestion in (
            ("federation.lr", "learning_rate"),
            ("federation.local_learning_rate", "learning_rate"),
            ("federation.epochs", "local_epochs"),
            ("federation.batch", "batch_size"),
            ("federation.global_rounds", "rounds"),
            ("federation.num_clients", "clients"),
            ("federation.join_ratio", "participation"),
            ("federation.sgd_momentum", "momentum"),
            ("federation.eval_gap", "evaluation.every"),
            ("federation.seed", "study.seeds"),
            ("algorithms.fedavg.lr", "federation.learning_rate"),
            ("lr", "federation.learning_rate"),
            ("dataset.fraction", "test_fraction"),
        )
    ],
    (
        "grid-of-a-key-of-another-library",
        {"study__grid": {"lr": [0.1]}},
        "study.grid: 'lr' ... 'federation.learning_rate'",
    ),
    ("unknown-partition-key", {"partition__alfa": 1}, "partition.alfa: unknown key ... 'alpha'"),
    ("unknown-model-key", {"model": {"name": "cnn", "chanels": [1, 2]}}, "model.chanels: unknown key ... 'channels'"),
    (
        "unknown-hyper-parameter",
        {"algorithms": {"fedavg": {}, "fedprox": {"muu": 1}}},
        "algorithms.fedprox.muu: unknown key ... 'mu'",
    ),
    (
        "hyper-parameter-of-none",
        {"algorithms": {"fedavg": {"mu": 1}}},
        "algorithms.fedavg.mu: unknown key ... overrides, protocol, title, dw",
    ),
    # types
    ("text-for-integer", {"federation__clients": "ten"}, "federation.clients: 'ten' ... integer"),
    *[
        (f"boolean-for-{key}", {key: value}, f"{key}{index}: {text} ... {kind}")
        for key, value, index, text, kind in (
            ("federation.learning_rate", True, "", "true", "number"),
            ("federation.weight_decay", False, "", "false", "number"),
            ("federation.clients", True, "", "true", "integer"),
            ("federation.batch_size", True, "", "true", "integer"),
            ("evaluation.every", True, "", "true", "integer"),
            ("study.seeds", [3, False], ".1", "false", "integer"),
            ("transforms.mean", [True], ".0", "true", "number"),
            ("dataset.subset", True, "", "true", "integer"),
            ("partition.alpha", True, "", "true", "number"),
            ("model.hidden", [True], ".0", "true", "integer"),
            ("algorithms.fedavg.dw", {"mu": True}, ".mu", "true", "number"),
            ("artifacts.keep_models", True, "", "true", "integer"),
            ("execution.stack", True, "", "true", "integer"),
            ("report.last_k", True, "", "true", "integer"),
        )
    ],
    (
        "truth-in-a-grid",
        {"study.grid": {"federation.learning_rate": [0.1, True]}},
        "federation.learning_rate: true ... number ... federation.learning_rate: True",
    ),
    (
        "truth-of-an-own-hyper-parameter",
        {"algorithms": {"fedavg": {}, "faulty": {"algorithm": "tests.runs.test_failed_updates.Faulty", "size": True}}},
        "algorithms.faulty.size: true ... integer",
    ),
    *[
        (f"too-large-{key}", {key: value}, f"{key}: {value} ... {bound}")
        for key, value, bound in (
            ("federation.learning_rate", 1e300, FLOATS),
            ("federation.server.tau", 1e-40, FLOATS),
            ("transforms.std", 1e-300, FLOATS),
            ("partition.alpha", 1e39, FLOATS),
            ("algorithms.fedprox.mu", 1e300, FLOATS),
            ("federation.batch_size", 2**63, "an integer of at most 64 bits"),
        )
    ],
    (
        "too-large-in-a-grid",
        {"study.grid": {"federation.learning_rate": [0.1, "1e300"]}},
        f"federation.learning_rate: '1e300' ... {FLOATS} ... federation.learning_rate: 1e300",
    ),
    ("fraction-for-integer", {"federation__clients": 2.5}, "federation.clients: 2.5 ... integer"),
    ("boolean-for-integer", {"federation__clients": True}, "federation.clients: true ... integer"),
    ("text-for-number", {"federation__learning_rate": "fast"}, "federation.learning_rate: 'fast' ... number"),
    ("value-for-section", {"partition": 3}, "partition: 3 ... 'scheme'"),
    ("number-for-name", {"partition": {"scheme": 3}}, "partition.scheme: 3 ... a name"),
    ("number-for-algorithm", {"algorithms": {"fedavg": {"algorithm": 3}}}, "algorithms.fedavg.algorithm: 3 ... a name"),
    (
        "text-for-list",
        {"study__algorithms": "fedavg"},
        "study.algorithms: 'fedavg' can't be used. Use a list, such as [fedavg].",
    ),
    ("number-for-list", {"study__seeds": 3}, "study.seeds: 3 ... list: [3], or [0, 1, 2] for three seeds."),
    ("number-for-list-of-a-model", {"model__hidden": 64}, "model.hidden: 64 ... list, such as [64]."),
    ("fraction-in-seeds", {"study__seeds": [0.5]}, "study.seeds.0: 0.5 ... integer"),
    # invalid values
    ("alpha-0", {"partition__alpha": 0}, "partition.alpha: 0 ... greater than 0"),
    ("alpha-negative", {"partition__alpha": -1.5}, "partition.alpha: -1.5 ... greater than 0"),
    ("participation-0", {"federation__participation": 0}, "federation.participation: 0 ... greater than 0"),
    (
        "participation-1.5",
        {"federation__participation": 1.5},
        "federation.participation: 1.5 ... less than or equal to 1",
    ),
    ("clients-0", {"federation__clients": 0}, "federation.clients: 0 ... greater than or equal to 1"),
    ("clients-5000", {"federation__clients": 5000}, "federation.clients: 5000 ... 1437"),
    ("rounds-0", {"federation__rounds": 0}, "federation.rounds: 0 ... greater than or equal to 1"),
    ("learning-rate-infinite", {"federation__learning_rate": float("inf")}, "federation.learning_rate: inf ... finite"),
    (
        "mu-infinite",
        {"algorithms": {"fedavg": {}, "fedprox": {"mu": float("inf")}}, "study__algorithms": ["fedprox"]},
        "algorithms.fedprox.mu: inf ... finite",
    ),
    (
        "eleven-classes-of-ten",
        {"partition": {"scheme": "pathological", "classes_per_client": 11}},
        "partition.classes_per_client: 11 ... at most 10",
    ),
    ("stack-0", {"execution__stack": 0}, "execution.stack: 0 ... at least 1"),
    ("stack-text", {"execution__stack": "wide"}, "execution.stack: 'wide' ... integer or 'auto'"),
    (
        "keep-models-0",
        {"artifacts__keep_models": 0},
        "artifacts.keep_models: 0 ... 'all' or 'last' or a value greater than or equal to 1",
    ),
    ("seeds-empty", {"study__seeds": []}, "study.seeds: [] ... at least 1 item"),
    ("protocols-empty", {"evaluation__protocols": []}, "evaluation.protocols: [] ... at least 1 item"),
    ("hidden-empty", {"model__hidden": []}, "model.hidden: [] ... at least 1 item"),
    ("model-too-large", {"model": {"name": "cnn4"}}, "model.name: 'cnn4' ... (1, 8, 8) ... 16x16 ... 'cnn'"),
    # names
    ("unknown-model", {"model__name": "mpl"}, "model.name: unknown model 'mpl' ... 'mlp'"),
    ("unknown-dataset", {"dataset__name": "digit"}, "dataset.name: unknown data set 'digit' ... 'digits'"),
    (
        "unknown-partition",
        {"partition__scheme": "dirichlett"},
        "partition.scheme: unknown partition scheme 'dirichlett' ... 'dirichlet'",
    ),
    (
        "unknown-protocol",
        {"evaluation__protocols": ["global-on-globel"]},
        f"evaluation.protocols.0: 'global-on-globel' ... {PROTOCOLS}",
    ),
    (
        "unknown-algorithm",
        {"study__algorithms": ["fedavgg"]},
        "study.algorithms: unknown algorithm 'fedavgg' ... 'fedavg'",
    ),
    (
        "unknown-algorithm-in-algorithms",
        {"algorithms": {"fedavg": {}, "fedproxx": {}}},
        "algorithms.fedproxx: unknown algorithm 'fedproxx' ... 'fedprox'",
    ),
    (
        "no-component",
        {"algorithms": {"fedavg": {}, "base": {}}},
        f"algorithms.base: unknown algorithm 'base' ... {ALGORITHMS}",
    ),
    (
        "no-import",
        {"algorithms": {"fedavg": {"algorithm": "no.such.Thing"}}},
        "algorithms.fedavg: 'no.such.Thing' can't be imported (No module named 'no') ... my_module.MyClass",
    ),
    (
        "no-module-name",
        {"algorithms": {"fedavg": {"algorithm": ".Thing"}}},
        "algorithms.fedavg: '.Thing' can't be imported (Empty module name) ... my_module.MyClass",
    ),
    (
        "no-algorithm",
        {"algorithms": {"fedavg": {"algorithm": "pathlib.Path"}}},
        "algorithms.fedavg: 'pathlib.Path' is not an algorithm",
    ),
    (
        "label-with-hyphen",
        {"algorithms": {"fedavg": {}, "Near-Prox": {"algorithm": "fedprox"}}},
        "algorithms.Near-Prox: 'Near-Prox' ... ^[a-z][a-z0-9_]*$",
    ),
    *[
        (f"display-name-{name}", changes, f"{key}: unknown algorithm '{name}' ... '{label}'")
        for name, label in (("FedProx", "fedprox"), ("FedDistill+", "feddistill_plus"), ("PFPS-LWC", "pfps_lwc"))
        for key, changes in (
            ("study.algorithms", {"study__algorithms": ["fedavg", name]}),
            (f"algorithms.{name}", {"algorithms": {"fedavg": {}, name: {"dw": None}}}),
        )
    ],
    # conflicting settings
    (
        "path-without-entry",
        {"study__algorithms": ["fedavg", "own.Prox"]},
        "study.algorithms: 'own.Prox' ... `prox: {algorithm: own.Prox}`",
    ),
    ("algorithm-twice", {"study__algorithms": ["fedavg", "fedavg"]}, "study.algorithms: 'fedavg' is listed twice"),
    ("seed-twice", {"study__seeds": [0, 1, 0]}, "study.seeds: '0' is listed twice"),
    (
        "momentum-with-adam",
        {"federation__optimizer": "adam", "federation__momentum": 0.9},
        "federation.momentum: 0.9 ... adam ... sgd",
    ),
    (
        "momentum-with-adamw",
        {"federation__optimizer": "adamw", "federation__momentum": 0.9},
        "federation.momentum: 0.9 ... adamw ... sgd",
    ),
    (
        "scaffold-with-adam",
        {"algorithms": {"scaffold": {}}, "study__algorithms": ["scaffold"], "federation__optimizer": "adam"},
        "federation.optimizer: adam ... scaffold ... sgd ... algorithms.scaffold.adam",
    ),
    ("every-3-of-4", {"evaluation__every": 3}, "evaluation.every: 3 does not divide federation.rounds (4)"),
    (
        "blocks-of-segments",
        {"execution__clients_per_job": 3, "execution__rounds_per_job": 2},
        "execution.clients_per_job: 3 ... execution.rounds_per_job: 2 ... 1",
    ),
    (
        "blocks-of-whole-runs",
        {"execution__clients_per_job": 3},
        "execution.clients_per_job: 3 ... execution.rounds_per_job: null ... 1",
    ),
    # the grid
    (
        "grid-bad-value",
        {"study__grid": {"partition.alpha": [0.1, -1]}},
        "partition.alpha: -1 ... greater than 0 ... partition.alpha: -1",
    ),
    (
        "grid-unknown-key",
        {"study__grid": {"partition.alfa": [0.1]}},
        "partition.alfa: unknown key ... 'alpha' ... partition.alfa: 0.1",
    ),
    (
        "grid-of-a-section-with-many-keys",
        {"study__grid": {"federation": [{"rounds": 3}, {"rounds": 5}]}},
        "study.grid: 'federation' ... whole ... federation.rounds",
    ),
    (
        "axis-of-a-section-with-many-keys",
        {"study__grid": {"length": {"short": {"federation": {"rounds": 3}}}}},
        "study.grid.length: 'federation' ... whole ... federation.rounds",
    ),
    (
        "axes-that-set-one-key",
        {
            "study__grid": {
                "environment": {"mild": {"partition.alpha": 0.5}, "harsh": {"partition.alpha": 0.1}},
                "data": {"A": {}, "B": {"partition.alpha": 1.0}},
            }
        },
        "study.grid: 'environment' and 'data' ... 'partition.alpha'",
    ),
    (
        "axis-and-list-that-set-one-key",
        {"study__grid": {"data": {"A": {"partition": {"scheme": "iid"}}}, "partition.alpha": [0.1, 0.5]}},
        "study.grid: 'data' and 'partition.alpha' ... 'partition'",
    ),
    (
        "axis-that-sets-a-section-and-its-key",
        {"study__grid": {"data": {"A": {"partition": {"scheme": "iid"}, "partition.alpha": 0.5}}}},
        "study.grid: 'data' ... 'partition' and 'partition.alpha'",
    ),
    (
        "axis-of-seeds",
        {"study__grid": {"lot": {"few": {"study.seeds": [1]}, "many": {}}}},
        "study.grid.lot: 'study.seeds' can't be ... study",
    ),
    ("axis-empty", {"study__grid": {"environment": {}}}, "study.grid.environment: ... no values"),
    (
        "axis-without-keys",
        {"study__grid": {"environment": {"mild": {}, "harsh": {}}}},
        "study.grid.environment: ... no keys",
    ),
    (
        "axis-of-a-key",
        {"study__grid": {"partition.alpha": {"mild": {}, "harsh": {"partition.alpha": 0.1}}}},
        "study.grid.partition.alpha: ... list ... without dots",
    ),
    (
        "axis-that-is-a-column",
        {"study__grid": {"round": {"early": {"federation.rounds": 2}}}},
        "study.grid.round: ... name ... column",
    ),
    (
        "axis-that-is-a-column-of-clients",
        {"study__grid": {"clients": {"few": {"federation.clients": 2}}}},
        "study.grid.clients: ... name ... column",
    ),
    (
        "axis-without-a-mapping",
        {"study__grid": {"environment": {"mild": 0.5}}},
        "study.grid.environment.mild: 0.5 ... mapping",
    ),
    (
        "axis-value-that-is-no-text",
        {"study__grid": {"alphas": {0.5: {"partition.alpha": 0.5}}}},
        "study.grid.alphas: 0.5 ... a name",
    ),
    # overrides of one method
    (
        "overrides-with-dataset",
        {"algorithms__fedavg": {"overrides": {"partition.alpha": 0.1}}},
        "algorithms.fedavg.overrides: 'partition.alpha' ... between methods ... federation",
    ),
    (
        "overrides-with-clients",
        {"algorithms__fedavg": {"overrides": {"federation.clients": 5}}},
        "algorithms.fedavg.overrides: 'federation.clients' ... between methods ... (except clients, held_out",
    ),
    (
        "overrides-with-complete-federation",
        {"algorithms__fedavg": {"overrides": {"federation": {"learning_rate": 0.1}}}},
        "algorithms.fedavg.overrides: 'federation' ... whole ... federation.learning_rate",
    ),
    (
        "overrides-with-invalid-value",
        {"algorithms__fedavg": {"overrides": {"federation.learning_rate": -1}}},
        "federation.learning_rate: -1 ... greater than or equal to 0 ... algorithms.fedavg.overrides",
    ),
    (
        "overrides-without-mapping",
        {"algorithms__fedavg": {"overrides": 0.1}},
        "algorithms.fedavg.overrides: 0.1 ... mapping",
    ),
    (
        "overrides-with-key-of-grid",
        {
            "algorithms__fedavg": {"overrides": {"federation.learning_rate": 0.1}},
            "study__grid": {"federation.learning_rate": [0.1, 0.2]},
        },
        "study.grid: 'federation.learning_rate' ... fedavg ... algorithms.fedavg.overrides",
    ),
    (
        "overrides-mistyped",
        {"algorithms__fedavg": {"overides": {"federation.learning_rate": 0.1}}},
        "algorithms.fedavg.overides: unknown key ... 'overrides'",
    ),
    # keys of version 0.1
    ("scales", {"scales": {}}, "scales: unknown key ... 'presets'"),
    ("probes", {"probes": {}}, "probes: unknown key ... 'diagnostics'"),
    ("test-share", {"dataset__test_share": 0.2}, "dataset.test_share: unknown key ... 'test_fraction'"),
    (
        "validation-share",
        {"dataset__validation_share": 0.2},
        "dataset.validation_share: unknown key ... 'validation_fraction'",
    ),
    ("absent", {"dataset__absent": "generate"}, "dataset.absent: unknown key ... 'on_missing'"),
    ("with", {"algorithms__fedavg": {"with": {}}}, "algorithms.fedavg.with: unknown key ... 'overrides'"),
    (
        "shown",
        {"algorithms__fedavg": {"shown": "global-on-global"}},
        "algorithms.fedavg.shown: unknown key ... 'protocol'",
    ),
    (
        "protocol-that-is-not-measured",
        {"algorithms__fedavg": {"protocol": "kept-on-local"}},
        "algorithms.fedavg.protocol: kept-on-local is not measured ... global-on-global, personal-on-local",
    ),
    (
        "protocol-in-grid",
        {"study__grid": {"algorithms.fedavg.protocol": ["global-on-global", "personal-on-local"]}},
        "study.grid: 'algorithms.fedavg.protocol' can't be",
    ),
    (
        "title-in-the-grid",
        {"study__grid": {"axis": {"a": {"algorithms.fedavg.title": "FedAvg"}}}},
        "study.grid.axis: 'algorithms.fedavg.title' can't be",
    ),
    *[
        (
            f"title-{number}",
            {"algorithms__fedavg": {"title": title}},
            f"algorithms.fedavg.title: {title!r} can't be used",
        )
        for number, title in enumerate(["", "a|b", "two\nlines", " FedAvg", "Fed  Avg", "_fedavg", "bell\a"])
    ],
    ("title-no-text", {"algorithms__fedavg": {"title": 10}}, "algorithms.fedavg.title: 10 ... a name"),
    (
        "title-twice",
        {
            "algorithms": {"fedavg": {"title": "A"}, "fedprox": {}, "moon": {"title": "A"}},
            "study__algorithms": ["fedavg", "fedprox", "moon"],
        },
        "algorithms.fedavg.title: 'A' ... moon in tables",
    ),
    (
        "title-as-a-label",
        {"algorithms": {"fedavg": {}, "fedprox": {"title": "fedavg"}}, "study__algorithms": ["fedavg", "fedprox"]},
        "algorithms.fedprox.title: 'fedavg' ... fedavg in tables",
    ),
    (
        "title-as-a-display-name",
        {"algorithms": {"fedavg": {}, "fedprox": {"title": "FedAvg"}}, "study__algorithms": ["fedavg", "fedprox"]},
        "algorithms.fedprox.title: 'FedAvg' ... fedavg in tables",
    ),
    (
        "title-of-an-own-hyper-parameter",
        {"algorithms": {"fedavg": {}, "titled": {"algorithm": "tests.settings.test_params.Titled", "title": "FedAvg"}}},
        "algorithms.titled.title: ... field of Titled",
    ),
    (
        "best-over-what-is-not-varied",
        {"report__best_over": ["federation.learning_rat"], "study__grid": {"federation.learning_rate": [0.1, 0.2]}},
        "report.best_over: 'federation.learning_rat' is not in study.grid ... 'federation.learning_rate'",
    ),
    (
        "figure-of-an-unknown-method",
        {"report__figure_algorithms": ["fedavgg"]},
        "report.figure_algorithms: 'fedavgg' is not in study.algorithms ... 'fedavg'",
    ),
    (
        "figure-of-an-unmeasured-protocol",
        {"evaluation__protocols": ["global-on-global"], "report__figure_protocols": ["personal-on-local"]},
        "report.figure_protocols: 'personal-on-local' is not in evaluation.protocols",
    ),
    (
        "figure-method-twice",
        {"report__figure_algorithms": ["fedavg", "fedavg"]},
        "report.figure_algorithms: ... fedavg",
    ),
    ("figure-width-unknown", {"report__figure_width": "iclm"}, "report.figure_width: 'iclm' ... icml"),
    # presets
    ("preset-with-name-full", {"presets": {"full": {"federation.rounds": 1}}}, "presets.full: ... another name"),
    (
        "preset-of-a-whole-federation",
        {"presets": {"smoke": {"federation": {"rounds": 1}}}},
        "presets.smoke: 'federation' can't be set as a whole ... federation.rounds",
    ),
    (
        "preset-with-presets",
        {"presets": {"smoke": {"presets.other": {}}}},
        "presets.smoke: 'presets.other' can't be set",
    ),
    (
        "preset-in-the-grid",
        {"study__grid": {"presets.smoke": [{}]}, "presets": {"smoke": {}}},
        "study.grid: 'presets.smoke' can't be ... presets",
    ),
    *[
        (
            f"{section}-in-the-grid",
            {"study__grid": {f"{section}.{key}": [1]}},
            f"study.grid: '{section}.{key}' can't be ... {section}",
        )
        for section, key in (
            ("execution", "stack"),
            ("artifacts", "keep_models"),
            ("report", "last_k"),
            ("diagnostics", "a"),
        )
    ],
    (
        "axis-bad-value",
        {"study__grid": {"environment": {"mild": {"partition.alpha": -1}}}},
        "partition.alpha: -1 ... greater than 0 ... environment: mild",
    ),
    ("grid-of-seeds", {"study__grid": {"study.seeds": [[1], [2]]}}, "study.grid: 'study.seeds' can't be ... study"),
    ("grid-empty", {"study__grid": {"partition.alpha": []}}, "study.grid.partition.alpha: ... empty"),
    (
        "grid-twice",
        {"study__grid": {"partition.alpha": [0.1, 0.1]}},
        "study.grid.partition.alpha: '0.1' is listed twice",
    ),
    (
        "protocols-twice",
        {"evaluation__protocols": ["global-on-global", "global-on-global"]},
        "evaluation.protocols: 'global-on-global' is listed twice",
    ),
    ("list-too-short", {"model": {"name": "cnn", "channels": [16]}}, "model.channels: [16] ... at least 2 items"),
    (
        "list-too-long",
        {"model": {"name": "cnn", "channels": [16, 32, 64]}},
        "model.channels: [16, 32, 64] ... at most 2 items",
    ),
    (
        "mean-of-other-channels",
        {"transforms": {"mean": [0.1, 0.2, 0.3]}},
        "transforms.mean: [0.1, 0.2, 0.3] ... one number",
    ),
    (
        "grid-no-list",
        {"study__grid": {"partition.alpha": 0.1}},
        "study.grid.partition.alpha: 0.1 ... list, such as [0.1].",
    ),
    (
        "grid-through-a-value",
        {"study__grid": {"partition.alpha.x": [1]}},
        "study.grid: 'partition.alpha.x' ... 'alpha' ... partition.alpha.x: 1",
    ),
]


@pytest.mark.parametrize(("changes", "outline"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES])
def test_invalid_params_give_one_message_that_begins_with_key(changes: dict[str, Any], outline: str) -> None:
    (message,) = list_errors(study(**changes))
    assert has_outline(message, outline), message


@pytest.mark.parametrize("section", ["dataset", "partition", "model", "federation", "study", "execution", "algorithms"])
def test_empty_section_error_is_in_plain_words(section: str) -> None:
    (message,) = list_errors(studies.settings() | {section: None})
    assert message.startswith(f"{section}: empty. Use ")
    assert not JARGON.search(message), message


def test_each_error_in_params_is_on_its_own_line() -> None:
    changes = {"federation__learning_rate": -1, "federation__client": 2, "datasett": {}}
    keys = [message.partition(" ")[0] for message in sorted(list_errors(study(**changes)))]
    assert keys == ["datasett:", "federation.client:", "federation.learning_rate:"]


def test_component_errors_do_not_hide_other_errors() -> None:
    changes = {
        "partition__alpha": -1,
        "model__name": "mpl",
        "dataset__name": "digit",
        "federation__clients": 0,
        "algorithms": {"fedavg": {}, "fedprox": {"muu": 1}},
    }
    keys = [line.partition(":")[0] for line in list_errors(study(**changes))]
    assert {"partition.alpha", "model.name", "dataset.name", "federation.clients"} <= set(keys)


def test_every_error_message_contains_grid_point() -> None:
    messages = list_errors(study(study__grid={"federation.clients": [0], "federation.participation": [2]}))
    assert len(messages) == 2
    assert all("federation.clients: 0, federation.participation: 2" in message for message in messages)


def test_grid_rejects_key_of_algorithm_that_is_not_in_study() -> None:
    """The value would have no effect, because fedprox is not in study.algorithms."""
    (message,) = list_errors(study(study__grid={"algorithms.fedprox.mu": [0.1, 1.0]}))
    assert message.startswith("study.grid: 'algorithms.fedprox.mu'")


# -- the file ----------------------------------------------------------------------------------------------------------


def read_error(text: str | None) -> str:
    """Return the error message of `fedpipe plan` for this text of params.yaml. None keeps the file."""
    if text is not None:
        Path("params.yaml").write_text(text)
    with pytest.raises(SettingsError) as error:
        planner.make_plan(Path("params.yaml"))
    return str(error.value)


def test_missing_params_file_is_rejected() -> None:
    assert read_error(None).startswith("params.yaml: the file does not exist")


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "- fedavg\n", "fedavg\n"])
def test_params_without_mapping_are_rejected(text: str) -> None:
    assert read_error(text).startswith("params.yaml: not a mapping")


def test_params_path_that_is_a_folder_is_rejected() -> None:
    Path("params.yaml").mkdir()
    assert read_error(None).startswith("params.yaml: can't be read (Is a directory)")


def test_invalid_yaml_error_shows_line_and_column() -> None:
    message = read_error("federation: {clients: 10\n")
    assert message.startswith("params.yaml: not valid YAML (line 2, column 1: expected ',' or '}'")


def test_deeply_nested_params_are_rejected() -> None:
    message = read_error(f"federation: {'[' * 5000}{']' * 5000}\n")
    assert has_outline(message, "params.yaml: ... nested too deeply ... 100 levels")


def test_params_that_are_not_utf8_are_rejected() -> None:
    Path("params.yaml").write_bytes(b"# caf\xe9\n")
    assert read_error(None).startswith("params.yaml: not UTF-8 text (invalid continuation byte at byte 5)")


def test_duplicate_key_is_rejected() -> None:
    """PyYAML would use the last section and ignore the first."""
    text = "federation:\n  clients: 5\nmodel: {name: mlp}\nfederation: {rounds: 2}\n"
    assert read_error(text).startswith("federation: duplicate key, lines 1 and 4")


def test_yaml_merge_key_merges_parameters() -> None:
    """With a merge key, two entries can share most of their parameters."""
    text = "algorithms:\n  feddw: &dw {mu: 1.0, mode: code}\n  other: {<<: *dw, algorithm: feddw, mu: 2.0}\n"
    Path("params.yaml").write_text(text)
    assert loader.read_params(Path("params.yaml"))["algorithms"]["other"] == {
        "algorithm": "feddw",
        "mu": 2.0,
        "mode": "code",
    }


def test_key_that_is_not_text_is_rejected() -> None:
    (message,) = list_errors({**studies.settings(), 3: {}})
    assert has_outline(message, f"3: unknown key ... {SECTIONS}")


# -- defaults ----------------------------------------------------------------------------------------------------------


def test_parser_fills_in_defaults() -> None:
    params = parser.parse_params({})
    assert params.federation == federation.Federation()
    assert (params.federation.clients, params.federation.rounds, params.federation.optimizer) == (10, 20, "sgd")
    assert params.dataset.name == "digits"
    assert params.model_dump(mode="json")["partition"] == {
        "scheme": "dirichlet",
        "alpha": 0.5,
        "minimum": 1,
        "seed": None,
    }
    assert params.model_dump(mode="json")["model"] == {
        "name": "cnn",
        "channels": [16, 32],
        "hidden": 64,
        "batch_norm": False,
        "bias": True,
        "weights": None,
        "sha256": None,
    }
    assert params.study.algorithms == ("fedavg",)
    assert params.study.seeds == (0,)
    assert params.artifacts.keep_models == "all"
    assert params.execution.stack == "auto"


def test_given_value_replaces_only_its_default() -> None:
    params = parser.parse_params(
        {"federation": {"clients": 7}, "algorithms": {"fedavg": {}, "feddw": {"mode": "code"}}}
    )
    assert params.federation == federation.Federation(clients=7)
    algorithm: Any = params.algorithms["feddw"].algorithm
    assert (algorithm.mu, algorithm.mode) == (0.1, "code")


def test_algorithm_entry_may_have_custom_name() -> None:
    params = parser.parse_params(
        {"algorithms": {"strong": {"algorithm": "fedprox", "mu": 5}}, "study": {"algorithms": ["strong"]}}
    )
    algorithm: Any = params.algorithms["strong"].algorithm
    assert type(algorithm).__name__ == "FedProx"
    assert algorithm.mu == 5.0


def test_exponents_without_a_dot_are_numbers() -> None:
    """YAML 1.1 reads 1e-3 as text."""
    assert parser.parse_params(yaml.safe_load("federation: {learning_rate: 1e-3}")).federation.learning_rate == 0.001


@pytest.mark.parametrize(("fraction", "clients", "count"), [(0.01, 10, 1), (0.5, 10, 5), (0.26, 10, 3), (1.0, 10, 10)])
def test_participants_equal_rounded_fraction_of_clients(fraction: float, clients: int, count: int) -> None:
    assert federation.Federation(clients=clients, participation=fraction).participants == count


# -- JSON Schema -------------------------------------------------------------------------------------------------------


def list_problems(settings: Any) -> list[Any]:
    schema = build_json_schema()
    return list(jsonschema.validators.validator_for(schema)(schema).iter_errors(settings))


def read_shipped_settings() -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text())
    return settings


def test_json_schema_is_valid() -> None:
    schema = build_json_schema()
    jsonschema.validators.validator_for(schema).check_schema(schema)


def test_shipped_study_matches_parser_and_schema() -> None:
    params = parser.parse_params(read_shipped_settings())
    assert len(params.study.algorithms) == 9
    assert params.study.seeds == (0, 1, 2)
    assert list_problems(read_shipped_settings()) == []


@pytest.mark.parametrize("path", sorted((ROOT / "studies").glob("*.yaml")), ids=lambda path: path.name)
def test_other_studies_match_parser_and_schema(path: Path) -> None:
    settings = yaml.safe_load(path.read_text())
    parser.parse_params(settings)
    assert list_problems(settings) == []


def test_paper_studies_and_docs_examples_match_schema() -> None:
    """Editors check them with the schema. Other tests plan these studies."""
    schema = build_json_schema()
    validator = jsonschema.validators.validator_for(schema)(schema)
    papers = [path for path in (ROOT / "studies/papers").rglob("*.yaml") if path.name != layout.DVC_YAML]
    examples = [block for page in PAGES for block in blocks(page) if block.language == "yaml"]
    assert len(papers) > 30
    assert len(examples) > 15
    for name, text in [
        *((path, path.read_text()) for path in papers),
        *((block.section, block.text) for block in examples),
    ]:
        assert not list(validator.iter_errors(yaml.safe_load(text))), name


@pytest.mark.parametrize(
    "changes",
    [
        {"datasett": {}},
        {"federation.client": 3},
        {"federation.clients": "ten"},
        {"federation.participation": 1.5},
        {"partition.alfa": 1},
        {"partition.alpha": -1},
        {"partition.scheme": "dirichlett"},
        {"model.name": "cnn6"},
        {"model.chanels": [1, 2]},
        {"dataset.name": "digit"},
        {"evaluation.protocols": ["global-on-globel"]},
        {"algorithms.fedprox.muu": 1},
        {"algorithms.fedprox.mu": "strong"},
        {"study.seeds": 3},
        {"study.seeds": []},
        {"artifacts.keep_models": 0},
    ],
    ids=str,
)
def test_schema_rejects_invalid_settings(changes: dict[str, Any]) -> None:
    assert list_problems(loader.override_settings(read_shipped_settings(), changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithms.half": {"algorithm": "own.Half", "share": 0.25}},
        {"partition": {"scheme": "own.Scheme"}},
        {"model": {"name": "own.Model"}},
        {"dataset.name": "own.Data"},
        {"partition": {"alpha": 0.3}},  # the scheme has a default
        {"partition": {}},
        {"execution.stack": 8},
        {"study.grid": {"partition.alpha": [0.1, 0.5]}},
    ],
    ids=str,
)
def test_schema_accepts_settings_that_parser_accepts(changes: dict[str, Any]) -> None:
    assert list_problems(loader.override_settings(read_shipped_settings(), changes)) == []


def test_schema_file_of_params_yaml_is_current() -> None:
    first = (ROOT / "params.yaml").read_text().split("\n", 1)[0]
    match = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert match
    path = ROOT / match[1]
    assert path.is_file(), f"editors can't find {match[1]}"
    assert json.loads(path.read_text()) == build_json_schema(), "run `fedpipe schema > params.schema.json`"


def test_text_model_needs_vocabulary_of_dataset() -> None:
    text = {"dataset": {"name": "imdb", "vocabulary": 10_000}, "study": {"algorithms": ["fedavg"]}}
    assert parser.parse_params(text | {"model": {"name": "bilstm", "vocabulary": 10_000}})
    with pytest.raises(SettingsError, match=r"^model\.vocabulary: 9999 .*at least 10000"):
        parser.parse_params(text | {"model": {"name": "bilstm", "vocabulary": 9_999}})


@pytest.mark.parametrize(("name", "other"), [("mlp", "bilstm, fasttext"), ("fasttext", "cnn, cnn4")])
def test_packaged_model_rejects_wrong_input_type(name: str, other: str, in_empty_folder: Path) -> None:
    np.savez("rows.npz", x=np.random.default_rng(0).random((20, 5)), y=np.arange(20) % 2)
    rows = {"name": "npz", "path": "rows.npz", "sha256": files.compute_file_sha256(Path("rows.npz")), "split": "pooled"}
    data = {"name": "imdb"} if name == "mlp" else rows
    download.load_and_save_dataset(parser.parse_dataset(rows).effective_dataset, parser.parse_dataset(rows).fetcher)
    kind = "token ids" if name == "mlp" else "numbers"
    with pytest.raises(SettingsError, match=rf"^model\.name: '{name}' .*{kind} .*{other}"):
        parser.parse_params({"dataset": data, "model": {"name": name}, "federation": {"clients": 2}})


def test_single_number_equals_list_of_one_number() -> None:
    """A number and a list of one number must have the same key."""
    one = parser.parse_params({"transforms": {"mean": 0.5, "std": "2e-1"}}).transforms
    assert (
        one.model_dump_json()
        == parser.parse_params({"transforms": {"mean": [0.5], "std": [0.2]}}).transforms.model_dump_json()
    )
    for value, text in ((True, "true"), ("grey", "'grey'"), ({}, "{}")):
        with pytest.raises(SettingsError, match=rf"^transforms\.mean: {text} .* list"):
            parser.parse_params({"transforms": {"mean": value}})
    with pytest.raises(SettingsError, match=r"^transforms\.std: 0 .* greater than 0"):
        parser.parse_params({"transforms": {"std": 0}})


def test_transforms_need_images() -> None:
    text = {"dataset": {"name": "imdb"}, "model": {"name": "bilstm", "vocabulary": 10_000}}
    with pytest.raises(SettingsError, match=r"^transforms\.flip: True is for images, .*\(200,\)"):
        parser.parse_params(text | {"transforms": {"flip": True}})
    with pytest.raises(SettingsError, match=r"^transforms\.mean: \[0\.5\] .*Remove it\.$"):
        parser.parse_params(text | {"transforms": {"mean": 0.5}})
    color = {"dataset": {"name": "cifar10"}, "model": {"name": "cnn4"}}
    assert parser.parse_params(color | {"transforms": {"mean": [0.5], "std": [0.2, 0.2, 0.3]}})
    with pytest.raises(SettingsError, match=r"^transforms\.std: \[0\.2, 0\.3\] .*one number, or 3"):
        parser.parse_params(color | {"transforms": {"std": [0.2, 0.3]}})


def test_scaffold_accepts_dw() -> None:
    parsed = parser.parse_params(
        {"algorithms": {"scaffold": {"dw": {"mu": 2.0}}}, "study": {"algorithms": ["scaffold"]}}
    )
    assert parsed.algorithms["scaffold"].algorithm.dw.mu == 2.0
    with pytest.raises(SettingsError, match=r"^algorithms\.scaffold\.dw\.mu: -1"):
        parser.parse_params({"algorithms": {"scaffold": {"dw": {"mu": -1}}}, "study": {"algorithms": ["scaffold"]}})


@pytest.mark.parametrize("label", ["scaffold", "fednova", "feddyn", "fedpvr"])
def test_adamw_is_rejected_for_algorithms_that_need_sgd(label: str) -> None:
    settings = {"federation": {"optimizer": "adamw"}, "study": {"algorithms": [label]}}
    for entry in ({}, {"adam": True}):
        with pytest.raises(SettingsError, match=rf"^federation\.optimizer: adamw .*{label}.*sgd, or adam"):
            parser.parse_params(settings | {"algorithms": {label: entry}})


@pytest.mark.parametrize("label", ["perfedavg", "pfedme"])
def test_adamw_is_rejected_for_plain_gradient_steps(label: str) -> None:
    settings = {"federation": {"optimizer": "adamw"}, "study": {"algorithms": [label]}}
    with pytest.raises(SettingsError, match=rf"^federation\.optimizer: adamw .*{label}"):
        parser.parse_params(settings)


def test_fednova_with_adam_needs_explicit_setting() -> None:
    settings = {"federation": {"optimizer": "adam"}, "study": {"algorithms": ["fednova"]}}
    with pytest.raises(SettingsError, match=r"^federation\.optimizer: adam .*fednova"):
        parser.parse_params(settings | {"algorithms": {"fednova": {}}})
    assert parser.parse_params(settings | {"algorithms": {"fednova": {"adam": True}}})


def test_suggest_name_finds_algorithm_by_display_name() -> None:
    names = registry.list_components(component.ALGORITHM)
    for name in names:
        algorithm = registry.parse_component(component.ALGORITHM, {}, name)
        assert suggest_name(methods.get_algorithm_display_name(algorithm), names) == f"Did you mean '{name}'?"


def test_suggest_name_lists_all_near_names() -> None:
    names = registry.list_components(component.ALGORITHM)
    assert suggest_name("fedpr", names) == "Did you mean 'fedpvr', 'fedper' or 'fedprox'?"
    assert suggest_name("fedavgg", names) == "Did you mean 'fedavg'?"
    assert suggest_name("xyz", ["a", "b"]) == "Use one of: a, b."


def test_transforms_error_for_numeric_table_advises_standardization() -> None:
    np.savez("own.npz", x=np.ones((10, 4)), y=np.arange(10) % 2)
    dataset = {"name": "npz", "path": "own.npz", "split": "pooled"}
    studies.write(study(dataset=dataset, federation__clients=2, transforms__mean=0.5), Path())
    download.write_dataset_facts_into_study(None, Path("params.yaml"))
    with pytest.raises(SettingsError, match=r"^transforms\.mean: \[0\.5\] .*\(4,\)\. Remove it\. .*standardize them"):
        planner.make_plan(Path("params.yaml"))
