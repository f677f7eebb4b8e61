"""Settings of params.yaml that a plan rejects, with one message each, which begins with the key."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from fedpipe.algorithms.fedavg import FedAvg
from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.data.datasets.digits import Digits
from fedpipe.planning import planner
from fedpipe.settings import base, loader
from fedpipe.settings.params import Params
from tests import small_studies as studies
from tests.errors import rejects

SECTIONS = ", ".join(Params.model_fields)
ALGORITHMS = ", ".join(registry.list_components(component.ALGORITHM))
*FIRST, LAST = (f"'{name}'" for name in get_args(base.Protocol))
PROTOCOLS = f"{', '.join(FIRST)} or {LAST}"
FLOATS = "1.2e-38"  #: the smallest number that fits
LR, OPTIMIZER = "federation.learning_rate", "federation.optimizer:"
JARGON = re.compile(r"Tuple|String|Keys|literal\[|constrained|\[key\]|\binstance\b|after validation|pydantic")


@dataclass(frozen=True, kw_only=True)
class Titled(FedAvg):
    """An algorithm with a parameter whose name is also an option of all methods."""

    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Cut(Digits):
    """A data set with a parameter whose name is also a key of the section."""

    subset: int | None = None


@dataclass(frozen=True)
class Part:
    """A section of a custom algorithm."""

    rate: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Parted(FedAvg):
    """An algorithm with a list of sections."""

    parts: tuple[Part, ...] = ()


#: Values of `study.grid`, and the part of the message after this key.
GRIDS: list[tuple[Any, str]] = [
    ({"lr": [0.1]}, ": 'lr' ... 'federation.learning_rate'"),
    ({"seed": [0, 1]}, ": 'seed' ... Did you mean 'study.seeds' or 'partition.seed'?"),
    ({"partition": {"alpha": [0.1]}}, ": 'partition' is not a single key, such as 'partition.alpha'. ... as a whole"),
    ({"algorithms.fedavg": [{"title": "X"}]}, ": 'algorithms.fedavg.title' can't be varied"),
    (
        {"view": {"a": {"algorithms.fedavg": {"protocol": "global-on-global"}}, "b": {}}},
        ".view: 'algorithms.fedavg.protocol' can't be varied",
    ),
    (
        {"evaluation.protocols": [["personal-on-local"], ["global-on-global"]]},
        ": 'evaluation.protocols' can't be varied ... whole study",
    ),
    ({"evaluation.metrics": [["auc"], ["nll"]]}, ": 'evaluation.metrics' can't be varied"),
    ({"rank": {"one": {"model.width": 1}}}, ".rank: ... column"),
    ({"federation": [{"rounds": 3}, {"rounds": 5}]}, ": 'federation' ... whole ... federation.rounds"),
    ({"length": {"short": {"federation": {"rounds": 3}}}}, ".length: 'federation' ... whole ... federation.rounds"),
    (
        {
            "environment": {"mild": {"partition.alpha": 0.5}, "harsh": {"partition.alpha": 0.1}},
            "data": {"A": {}, "B": {"partition.alpha": 1.0}},
        },
        ": 'environment' and 'data' ... 'partition.alpha'",
    ),
    (
        {"data": {"A": {"partition": {"scheme": "iid"}}}, "partition.alpha": [0.1, 0.5]},
        ": 'data' and 'partition.alpha' ... 'partition'",
    ),
    (
        {"data": {"A": {"partition": {"scheme": "iid"}, "partition.alpha": 0.5}}},
        ": 'data' ... 'partition' and 'partition.alpha'",
    ),
    ({"lot": {"few": {"study.seeds": [1]}, "many": {}}}, ".lot: 'study.seeds' can't be ... study"),
    ({"environment": {}}, ".environment: ... no values"),
    ({"environment": {"mild": {}, "harsh": {}}}, ".environment: ... no keys"),
    (
        {"partition.alpha": {"mild": {}, "harsh": {"partition.alpha": 0.1}}},
        ".partition.alpha: ... list ... without dots",
    ),
    ({"round": {"early": {"federation.rounds": 2}}}, ".round: ... name ... column"),
    ({"clients": {"few": {"federation.clients": 2}}}, ".clients: ... name ... column"),
    ({"environment": {"mild": 0.5}}, ".environment.mild: 0.5 ... mapping"),
    ({"alphas": {0.5: {"partition.alpha": 0.5}}}, ".alphas: 0.5 ... a name"),
    (
        {"algorithms.fedavg.protocol": ["global-on-global", "personal-on-local"]},
        ": 'algorithms.fedavg.protocol' can't be",
    ),
    ({"axis": {"a": {"algorithms.fedavg.title": "FedAvg"}}}, ".axis: 'algorithms.fedavg.title' can't be"),
    ({"study.seeds": [[1], [2]]}, ": 'study.seeds' can't be ... study"),
    ({"partition.alpha": []}, ".partition.alpha: ... empty"),
    ({"partition.alpha": [0.1, 0.1]}, ".partition.alpha: '0.1' is listed twice"),
    ({"partition.alpha": 0.1}, ".partition.alpha: 0.1 ... list, such as [0.1]."),
    ({"pull": {"weak": {"algorithms.fedprox.mu": 0.1}}}, ": 'pull' has no effect"),
    ({"algorithms.fedprox.mu": [0.1, 1.0]}, ": 'algorithms.fedprox.mu'"),
]
#: Settings of the method fedavg, and the part of the message after `algorithms.fedavg`.
SETTINGS_OF_FEDAVG: list[tuple[Any, str]] = [
    ({"mu": 1}, ".mu: unknown key ... overrides, protocol, title, dw"),
    ({"dw": {"muu": 1}}, ".dw.muu: unknown key ... 'mu'"),
    ({"algorithm": 3}, ".algorithm: 3 ... a name"),
    (
        {"algorithm": "no.such.Thing"},
        ": 'no.such.Thing' can't be imported (No module named 'no') ... my_module.MyClass",
    ),
    ({"algorithm": ".Thing"}, ": '.Thing' can't be imported (Empty module name) ... my_module.MyClass"),
    ({"algorithm": "pathlib.Path"}, ": 'pathlib.Path' is not an algorithm"),
    ({"overrides": {"partition.alpha": 0.1}}, ".overrides: 'partition.alpha' ... between methods ... federation"),
    (
        {"overrides": {"federation.clients": 5}},
        ".overrides: 'federation.clients' ... between methods ... (except clients, held_out",
    ),
    (
        {"overrides": {"federation": {"learning_rate": 0.1}}},
        ".overrides: 'federation' ... whole ... federation.learning_rate",
    ),
    ({"overrides": 0.1}, ".overrides: 0.1 ... mapping"),
    ({"overides": {"federation.learning_rate": 0.1}}, ".overides: unknown key ... 'overrides'"),
    ({"with": {}}, ".with: unknown key ... 'overrides'"),
    ({"shown": "global-on-global"}, ".shown: unknown key ... 'protocol'"),
    ({"protocol": "kept-on-local"}, ".protocol: kept-on-local is not measured ... global-on-global, personal-on-local"),
    ({"title": 10}, ".title: 10 ... a name"),
]
#: Labels of other entries of `algorithms`, their settings, and the part of the message after their keys.
ENTRIES: list[tuple[str, Any, str]] = [
    ("fedprox", {"muu": 1}, ".muu: unknown key ... 'mu'"),
    (
        "own",
        {"algorithm": f"{__name__}.Parted", "parts": [{"rat": 1}]},
        ".parts.0.rat: unknown key. Did you mean 'rate'?",
    ),
    ("faulty", {"algorithm": "tests.runs.test_failed_updates.Faulty", "size": True}, ".size: true ... integer"),
    ("fedproxx", {}, ": unknown algorithm 'fedproxx' ... 'fedprox'"),
    (
        "prox",
        {"mu": 0.1},
        ": unknown algorithm 'prox'. Did you mean 'fedprox'? Or add its algorithm, such as `algorithm:",
    ),
    ("base", {}, f": unknown algorithm 'base' ... {ALGORITHMS}"),
    ("Near-Prox", {"algorithm": "fedprox"}, ": 'Near-Prox' ... ^[a-z][a-z0-9_]{0,99}$"),
    (
        "titled",
        {"algorithm": f"{__name__}.Titled", "title": "FedAvg"},
        ".title: ... field of Titled",
    ),
]
#: Changes of the tests' study, and the outline of the only message, in which ` ... ` matches any words.
MISTAKES: list[tuple[dict[str, Any], str]] = [
    *[({"study.grid": grid}, f"study.grid{rest}") for grid, rest in GRIDS],
    *[({"algorithms.fedavg": settings}, f"algorithms.fedavg{rest}") for settings, rest in SETTINGS_OF_FEDAVG],
    *[({f"algorithms.{label}": entry}, f"algorithms.{label}{rest}") for label, entry, rest in ENTRIES],
    # sections and keys
    ({"datasett": {}}, "datasett: unknown key ... 'dataset'"),
    ({"xyz": 1}, f"xyz: unknown key ... {SECTIONS}"),
    *[
        ({section: None}, f"{section}: empty. Use {{}}")
        for section in ("dataset", "federation", "study", "execution", "algorithms")
    ],
    ({"partition": None}, "partition: empty. Use a mapping with 'scheme'"),
    ({"model": None}, "model: empty. Use a mapping with 'name'"),
    ({"algorithms.fedavg": None}, "algorithms.fedavg: empty. Use {}"),
    ({"federation.client": 3}, "federation.client: unknown key ... 'clients'"),
    *[
        ({key: 1}, f"{key}: unknown key. Did you mean '{suggestion}'?")
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
        {
            "federation.schedule": {"name": "cosine", "period": 4},
            "algorithms": {"fedavg": {}, "pfps_lwc": {}},
            "study.algorithms": ["fedavg", "pfps_lwc"],
            "evaluation.protocols": ["personal-on-local"],
        },
        "federation.schedule: after round 4 the learning rate is 0 ... personal models of pfps_lwc ... a minimum",
    ),
    *[
        (
            {
                "federation.schedule": {"name": "cosine", "period": 2},
                "algorithms": {name: {}},
                "study.algorithms": [name],
            },
            f"federation.schedule: ... round 3 is 0 ... {name} ... a minimum",
        )
        for name in ("scaffold", "fedpvr", "fedcm")
    ],
    ({"rounds": 1}, "rounds: unknown key. Did you mean 'federation.rounds'?"),
    ({"seeds": [0]}, "seeds: unknown key. Did you mean 'study.seeds'?"),
    ({"partition.alfa": 1}, "partition.alfa: unknown key ... 'alpha'"),
    ({"model": {"name": "cnn", "chanels": [1, 2]}}, "model.chanels: unknown key ... 'channels'"),
    # types
    ({"federation.clients": "ten"}, "federation.clients: 'ten' ... integer"),
    *[
        ({key: value}, f"{key}{index}: {text} ... {kind}")
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
        {"study.grid": {"federation.learning_rate": [0.1, True]}},
        "federation.learning_rate: true ... number ... federation.learning_rate: True",
    ),
    *[
        ({key: value}, f"{key}: {value} ... {bound}")
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
        {"study.grid": {"federation.learning_rate": [0.1, "1e300"]}},
        f"federation.learning_rate: '1e300' ... {FLOATS} ... federation.learning_rate: 1e300",
    ),
    ({"federation.clients": 2.5}, "federation.clients: 2.5 ... integer"),
    ({"federation.learning_rate": "fast"}, "federation.learning_rate: 'fast' ... number"),
    ({"partition": 3}, "partition: 3 ... 'scheme'"),
    ({"partition": {"scheme": 3}}, "partition.scheme: 3 ... a name"),
    ({"study.algorithms": "fedavg"}, "study.algorithms: 'fedavg' can't be used. Use a list, such as [fedavg]."),
    ({"study.seeds": 3}, "study.seeds: 3 ... list: [3], or [0, 1, 2] for three seeds."),
    ({"model.hidden": 64}, "model.hidden: 64 ... list, such as [64]."),
    ({"study.seeds": [0.5]}, "study.seeds.0: 0.5 ... integer"),
    # invalid values
    ({"partition.alpha": 0}, "partition.alpha: 0 ... greater than 0"),
    ({"partition.alpha": -1.5}, "partition.alpha: -1.5 ... greater than 0"),
    ({"federation.participation": 0}, "federation.participation: 0 ... greater than 0"),
    ({"federation.participation": 1.5}, "federation.participation: 1.5 ... less than or equal to 1"),
    ({"federation.clients": 0}, "federation.clients: 0 ... greater than or equal to 1"),
    ({"federation.clients": 5000}, "federation.clients: 5000 ... 1437"),
    ({"federation.rounds": 0}, "federation.rounds: 0 ... greater than or equal to 1"),
    ({"federation.learning_rate": float("inf")}, "federation.learning_rate: inf ... finite"),
    (
        {"algorithms": {"fedavg": {}, "fedprox": {"mu": float("inf")}}, "study.algorithms": ["fedprox"]},
        "algorithms.fedprox.mu: inf ... finite",
    ),
    (
        {"partition": {"scheme": "pathological", "classes_per_client": 11}},
        "partition.classes_per_client: 11 ... at most 10",
    ),
    ({"execution.stack": 0}, "execution.stack: 0 ... at least 1"),
    ({"execution.stack": "wide"}, "execution.stack: 'wide' ... integer or 'auto'"),
    (
        {"artifacts.keep_models": 0},
        "artifacts.keep_models: 0 ... 'all' or 'last' or a value greater than or equal to 1",
    ),
    ({"study.seeds": []}, "study.seeds: [] ... at least 1 item"),
    ({"evaluation.protocols": []}, "evaluation.protocols: [] ... at least 1 item"),
    ({"model.hidden": []}, "model.hidden: [] ... at least 1 item"),
    ({"model": {"name": "cnn4"}}, "model.name: 'cnn4' ... (1, 8, 8) ... 16x16 ... 'cnn'"),
    # names
    ({"model.name": "mpl"}, "model.name: unknown model 'mpl' ... 'mlp'"),
    ({"dataset.name": "digit"}, "dataset.name: unknown data set 'digit' ... 'digits'"),
    ({"partition.scheme": "dirichlett"}, "partition.scheme: unknown partition scheme 'dirichlett' ... 'dirichlet'"),
    ({"evaluation.protocols": ["server-on-all"]}, f"evaluation.protocols.0: 'server-on-all' ... {PROTOCOLS}"),
    (
        {"evaluation.protocols": ["finetune-on-local"]},
        "evaluation.protocols.0: 'finetune-on-local' can't be used. Did you mean 'finetuned-on-local'?",
    ),
    ({"study.algorithms": ["fedavgg"]}, "study.algorithms: unknown algorithm 'fedavgg' ... 'fedavg'"),
    *[
        (changes, f"{key}: unknown algorithm '{name}' ... '{label}'")
        for name, label in (("FedProx", "fedprox"), ("FedDistill+", "feddistill_plus"), ("PFPS-LWC", "pfps_lwc"))
        for key, changes in (
            ("study.algorithms", {"study.algorithms": ["fedavg", name]}),
            (f"algorithms.{name}", {"algorithms": {"fedavg": {}, name: {"dw": None}}}),
        )
    ],
    # conflicting settings
    ({"study.algorithms": ["fedavg", "own.Prox"]}, "study.algorithms: 'own.Prox' ... `prox: {algorithm: own.Prox}`"),
    ({"study.algorithms": ["fedavg", "fedavg"]}, "study.algorithms: 'fedavg' is listed twice"),
    ({"study.seeds": [0, 1, 0]}, "study.seeds: '0' is listed twice"),
    ({"federation.optimizer": "adam", "federation.momentum": 0.9}, "federation.momentum: 0.9 ... adam ... sgd"),
    ({"federation.optimizer": "adamw", "federation.momentum": 0.9}, "federation.momentum: 0.9 ... adamw ... sgd"),
    (
        {"algorithms": {"scaffold": {}}, "study.algorithms": ["scaffold"], "federation.optimizer": "adam"},
        "federation.optimizer: adam ... scaffold ... sgd ... algorithms.scaffold.adam",
    ),
    ({"evaluation.every": 3}, "evaluation.every: 3 does not divide federation.rounds (4)"),
    (
        {"execution.clients_per_job": 3, "execution.rounds_per_job": 2},
        "execution.clients_per_job: 3 ... execution.rounds_per_job: 2 ... 1",
    ),
    ({"execution.clients_per_job": 3}, "execution.clients_per_job: 3 ... execution.rounds_per_job: null ... 1"),
    # the grid
    ({"study.grid": {"partition.alpha": [0.1, -1]}}, "partition.alpha: -1 ... greater than 0 ... partition.alpha: -1"),
    ({"study.grid": {"partition.alfa": [0.1]}}, "partition.alfa: unknown key ... 'alpha' ... partition.alfa: 0.1"),
    # overrides of one method
    (
        {"algorithms.fedavg": {"overrides": {"federation.learning_rate": -1}}},
        "federation.learning_rate: -1 ... greater than or equal to 0 ... algorithms.fedavg.overrides",
    ),
    (
        {
            "algorithms.fedavg": {"overrides": {"federation.learning_rate": 0.1}},
            "study.grid": {"federation.learning_rate": [0.1, 0.2]},
        },
        "study.grid: 'federation.learning_rate' ... fedavg ... algorithms.fedavg.overrides",
    ),
    # keys of version 0.1
    ({"scales": {}}, "scales: unknown key ... 'presets'"),
    ({"probes": {}}, "probes: unknown key ... 'diagnostics'"),
    ({"dataset.test_share": 0.2}, "dataset.test_share: unknown key ... 'test_fraction'"),
    ({"dataset.validation_share": 0.2}, "dataset.validation_share: unknown key ... 'validation_fraction'"),
    ({"dataset.absent": "generate"}, "dataset.absent: unknown key ... 'on_missing'"),
    *[
        ({"algorithms.fedavg": {"title": title}}, f"algorithms.fedavg.title: {title!r} can't be used")
        for title in ("", "a|b", "two\nlines", " FedAvg", "Fed  Avg", "_fedavg", "bell\a")
    ],
    (
        {
            "algorithms": {"fedavg": {"title": "A"}, "fedprox": {}, "moon": {"title": "A"}},
            "study.algorithms": ["fedavg", "fedprox", "moon"],
        },
        "algorithms.fedavg.title: 'A' ... moon in tables",
    ),
    (
        {"algorithms": {"fedavg": {}, "fedprox": {"title": "fedavg"}}, "study.algorithms": ["fedavg", "fedprox"]},
        "algorithms.fedprox.title: 'fedavg' ... fedavg in tables",
    ),
    (
        {"algorithms": {"fedavg": {}, "fedprox": {"title": "FedAvg"}}, "study.algorithms": ["fedavg", "fedprox"]},
        "algorithms.fedprox.title: 'FedAvg' ... fedavg in tables",
    ),
    ({"dataset": {"name": f"{__name__}.Cut"}}, "dataset.subset: ... field of Cut"),
    (
        {"report.best_over": ["federation.learning_rat"], "study.grid": {"federation.learning_rate": [0.1, 0.2]}},
        "report.best_over: 'federation.learning_rat' is not in study.grid ... 'federation.learning_rate'",
    ),
    (
        {"report.figure_algorithms": ["fedavgg"]},
        "report.figure_algorithms: 'fedavgg' is not in study.algorithms ... 'fedavg'",
    ),
    (
        {"evaluation.protocols": ["global-on-global"], "report.figure_protocols": ["personal-on-local"]},
        "report.figure_protocols: 'personal-on-local' is not in evaluation.protocols",
    ),
    ({"report.figure_algorithms": ["fedavg", "fedavg"]}, "report.figure_algorithms: ... fedavg"),
    ({"report.figure_width": "iclm"}, "report.figure_width: 'iclm' ... icml"),
    # presets
    ({"presets": {"full": {"federation.rounds": 1}}}, "presets.full: ... another name"),
    (
        {"presets": {"smoke": {"federation": {"rounds": 1}}}},
        "presets.smoke: 'federation' can't be set as a whole ... federation.rounds",
    ),
    ({"presets": {"smoke": {"presets.other": {}}}}, "presets.smoke: 'presets.other' can't be set"),
    (
        {"study.grid": {"presets.smoke": [{}]}, "presets": {"smoke": {}}},
        "study.grid: 'presets.smoke' can't be ... presets",
    ),
    *[
        ({"study.grid": {f"{section}.{key}": [1]}}, f"study.grid: '{section}.{key}' can't be ... {section}")
        for section, key in (
            ("execution", "stack"),
            ("artifacts", "keep_models"),
            ("report", "last_k"),
            ("diagnostics", "a"),
        )
    ],
    (
        {"study.grid": {"environment": {"mild": {"partition.alpha": -1}}}},
        "partition.alpha: -1 ... greater than 0 ... environment: mild",
    ),
    (
        {"evaluation.protocols": ["global-on-global", "global-on-global"]},
        "evaluation.protocols: 'global-on-global' is listed twice",
    ),
    ({"model": {"name": "cnn", "channels": [16]}}, "model.channels: [16] ... at least 2 items"),
    ({"model": {"name": "cnn", "channels": [16, 32, 64]}}, "model.channels: [16, 32, 64] ... at most 2 items"),
    ({"transforms": {"mean": [0.1, 0.2, 0.3]}}, "transforms.mean: [0.1, 0.2, 0.3] ... one number"),
    (
        {"study.grid": {"partition.alpha.x": [1]}},
        "partition.alpha.x: ... 'alpha' is 0.3 ... Set 'alpha' itself. ... partition.alpha.x: 1 of study.grid",
    ),
    # training
    ({"federation.batch_size": "all"}, "federation.batch_size: 'all' "),
    ({"federation.local_steps": 5, "federation.local_epochs": 1}, "federation.local_steps: 5 ... local_epochs: 1"),
    ({"federation.local_epochs": None}, "federation.local_epochs: null ... local_steps"),
    ({"federation.clip_norm": 0}, "federation.clip_norm: 0 "),
    *[
        ({"federation.schedule": schedule}, f"federation.schedule.{outline}")
        for schedule, outline in (
            ({"name": "cosine"}, "period: ... missing ... cosine"),
            ({"name": "exponential"}, "gamma: ... missing ... exponential"),
            ({"name": "cosine", "period": 5, "gamma": 0.5}, "gamma: 0.5 ... cosine"),
            ({"name": "cosine", "period": 5, "minimum": 0.2}, f"minimum: 0.2 ... {LR}. Use at most 0.1"),
            ({"name": "cosin", "period": 5}, "name: 'cosin' ... 'cosine'"),
            ({"steps": 5}, "steps: unknown key ... 'step_size'"),
        )
    ],
    *[
        ({"study.algorithms": [label], f"federation.{key}": 5}, f"federation.{key}: 5 ... can't be used with {label}")
        for key, labels in (("local_steps", ("fedrep", "feddual")), ("clip_norm", ("pfedme", "perfedavg")))
        for label in labels
    ],
    *[
        (
            {"algorithms": {label: entry}, "study.algorithms": [label], "federation.optimizer": name},
            f"{OPTIMIZER} {name} ... {label}{end}",
        )
        for labels, entries, name, end in (
            (("scaffold", "fednova", "feddyn", "fedpvr"), ({}, {"adam": True}), "adamw", " ... sgd, or adam"),
            (("perfedavg", "pfedme"), ({},), "adamw", ""),
            (("fednova",), ({},), "adam", ""),
        )
        for label in labels
        for entry in entries
    ],
    # the server's optimizer
    *[
        ({"federation.server": server}, f"federation.server{outline}")
        for server, outline in (
            ({"optimizer": "adm"}, ".optimizer: 'adm' can't be used. Did you mean 'adam'?"),
            ({"optimizer": "lars"}, ".optimizer: 'lars' can't be used. Use 'sgd', 'momentum',"),
            ({"optimiser": "adam"}, ".optimiser: unknown key. Did you mean 'optimizer'?"),
            ({"optimizer": "adam", "beta3": 0.1}, ".beta3: unknown key. Did you mean 'beta2' or 'beta1'?"),
            ({"optimizer": "momentum", "tau": 0.1}, ".tau: 0.1 "),
            ({"beta1": 0.9}, ".beta1: 0.9 "),
            ({"optimizer": "adam", "tau": 0}, ".tau: 0 "),
            ({"optimizer": "adam", "beta2": 1.0}, ".beta2: 1.0 "),
            ({"learning_rate": -1}, ".learning_rate: -1 "),
            ({"learning_rate": True}, ".learning_rate: true "),
            ("adam", ": 'adam' "),
        )
    ],
    # clients that are held out, and concept drift
    *[
        ({"federation.held_out": held_out}, f"federation.held_out: {outline}")
        for held_out, outline in (
            ([], "[]"),
            ([3, 3], "'3'"),
            ([3, 10], "[3, 10] ... 0 to 9"),
            ([*range(10)], "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9] of 10 clients"),
            (0.04, "0.04 of 10 clients"),
            (0.96, "0.96 of 10 clients"),
            (1.0, "1.0"),
            (1, "1"),
            (-0.2, "-0.2"),
            (True, "true"),
        )
    ],
    (
        {"algorithms.fedavg.overrides": {"federation.held_out": 0.2}},
        "algorithms.fedavg.overrides: 'federation.held_out'",
    ),
    *[
        ({"federation.drift": {"round": 2} | drift}, f"federation.drift{outline}")
        for drift, outline in (
            ({"round": 0}, ".round: 0"),
            ({"round": 5}, ".round: 5 ... at most 4"),
            ({"round": 1.5}, ".round: 1.5"),
            ({"round": True}, ".round: true"),
            ({"clients": 0}, ".clients: 0"),
            ({"clients": 1.2}, ".clients: 1.2"),
            ({"clients": 0.04}, ".clients: 0.04 of 10 clients"),
            ({"clients": []}, ".clients: []"),
            ({"clients": [3, 3]}, ".clients: '3'"),
            ({"clients": [3, 10]}, ".clients: [3, 10] ... 0 to 9"),
            ({"kind": "noise"}, ".kind: 'noise'"),
            ({"angle": 90}, ".angle: 90 ... labels"),
            ({"kind": "rotation", "angle": 45}, ".angle: 45"),
            ({"kind": "rotation", "label_map": {1: 2, 2: 1}}, ".label_map: {1: 2, 2: 1}"),
            ({"label_map": {1: 2}}, ".label_map: {1: 2} ... permutation"),
            ({"label_map": {1: 2, 2: 2}}, ".label_map: {1: 2, 2: 2} ... permutation"),
            ({"label_map": {1: 1}}, ".label_map: {1: 1} ... no class"),
            ({"label_map": {}}, ".label_map: {} ... no class"),
            ({"label_map": {1: 10, 10: 1}}, ".label_map ... class 10 ... 0 to 9"),
            ({"turn": 90}, ".turn"),
        )
    ],
    ({"federation.drift": {}}, "federation.drift.round"),
    *[
        (
            {"federation.drift": {"round": 3}, "algorithms.fedavg.overrides": {key: value}},
            f"algorithms.fedavg.overrides: '{key}'",
        )
        for key, value in (("federation.drift", {"round": 2}), ("federation.drift.round", 2))
    ],
    # data and partitions
    ({"dataset": {"name": "npz"}}, "dataset.path: missing"),
    ({"dataset": {"name": "npz", "path": "own.npz"}}, "dataset.path: own.npz "),
    (
        {"dataset": {"name": "npz", "path": "own.npz", "sha256": "0" * 64}},
        f"dataset.sha256: the file with SHA-256 {'0' * 64} is not stored",
    ),
    ({"dataset": {"name": "imdb", "lenght": 3}}, "dataset.lenght: unknown key. Did you mean 'length'"),
    ({"dataset": {"name": "mnist", "splitt": 3}}, "dataset.splitt: unknown key. Did you mean 'split'"),
    ({"dataset": {"name": "digits", "path": "own.npz"}}, "dataset.path: unknown key"),
    ({"dataset": {"name": "imdb", "vocabulary": 4}}, "dataset.vocabulary: 4 can't be used"),
    ({"dataset": {"name": "mnist", "sha256": "abc"}}, "dataset.sha256: 'abc' can't be used"),
    ({"dataset.subset": 2000}, "dataset.subset: 2000 ... 1797"),
    ({"model.sha256": "0" * 64}, "model.sha256: model.weights is missing"),
    ({"partition": {"scheme": "iid", "alfa": 0.3}}, "partition.alfa: unknown key"),
    ({"partition.classes": 2}, "partition.classes: unknown key"),
    *[
        (
            {f"dataset.{key}": value, "partition": {"scheme": "dirichlet-overlap"}},
            f"dataset.{key}: {value!r} ... share samples",
        )
        for key, value in (("split", "pooled"), ("validation_fraction", 0.2))
    ],
    # the grid and the report
    *[
        (
            {"study.grid": {name: [0.1, 1.0]}, "study.algorithms": ["fedavg", "fedprox"]},
            f"study.grid: '{name}' is not a key ... '{key}'?",
        )
        for name, key in (
            ("mu", "algorithms.fedprox.mu"),
            ("alpha", "partition.alpha"),
            ("clients", "federation.clients"),
            ("partitoin.alpha", "partition"),
        )
    ],
    *[
        ({"study.grid": {"partition.alpha": values}}, "study.grid.partition.alpha: '10 ... is listed twice")
        for values in ([10, 10.0], [10, "10"], [10.0, "1e1"])
    ],
    (
        {"report.statistics": ["rounds_to_target"]},
        "report.target: it is missing ... report.statistics lists rounds_to_target.",
    ),
    ({"report.statistics": ["difference"]}, "report.baseline: it is missing ... report.statistics lists difference."),
    ({"report.statistics": ["f1"]}, "report.statistics.0: 'f1' can't be used. Use 'client_std', "),
    (
        {"report.statistics": ["diference"]},
        "report.statistics.0: 'diference' can't be used. Did you mean 'difference'?",
    ),
    ({"report.target": 70}, "report.target: 70 can't be used."),
    ({"report.baseline": "fedagv"}, "report.baseline: 'fedagv' is not in study.algorithms. Did you mean 'fedavg'?"),
    (
        {"report.baseline": "Ours (new)", "study.algorithms": ["fedavg", "fedprox"]},
        "report.baseline: 'Ours (new)' is not in study.algorithms. Use one of: fedavg, fedprox.",
    ),
    (
        {"evaluation.protocols": ["global-on-validation"]},
        "evaluation.protocols: global-on-validation ... no client has validation",
    ),
    (
        {
            "study.grid": {LR: [0.01, 0.1]},
            "report": {"best_over": [LR], "best_on": "validation"},
            "dataset.validation_fraction": 0.3,
            "evaluation.protocols": ["personal-on-local", "global-on-local", "global-on-validation"],
        },
        "report.best_on: validation ... fedavg ... personal-on-validation",
    ),
]


@pytest.mark.usefixtures("in_empty_folder")
@pytest.mark.parametrize(("changes", "outline"), MISTAKES, ids=[outline for _, outline in MISTAKES])
def test_invalid_setting_is_rejected_with_one_message_that_begins_with_its_key(
    changes: dict[str, Any], outline: str
) -> None:
    studies.write(loader.override_settings(studies.settings(), changes), Path())
    with rejects(outline) as error:
        planner.make_plan()
    assert not JARGON.search(str(error.value)), str(error.value)


@pytest.mark.parametrize(
    ("federation", "key"),
    [
        ({"held_out": [-1]}, "held_out.0"),
        ({"drift": {"round": 2, "clients": [-1]}}, "drift.clients.0"),
        ({"drift": {"round": 2, "label_map": {-1: 1, 1: -1}}}, "drift.label_map.1"),
    ],
)
def test_negative_client_or_class_is_rejected(federation: dict[str, Any], key: str) -> None:
    """The first part of the message is about the whole list or mapping."""
    with pytest.raises(SettingsError) as error:
        planner.make_plan(settings=studies.settings(federation=federation))
    assert any(line.startswith(f"federation.{key}: -1 ") for line in str(error.value).split("\n"))
