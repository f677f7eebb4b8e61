"""Random studies from the schema of params.yaml. Each is planned or rejected with messages. Planned studies run."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from fedpipe.core.components import component, registry
from fedpipe.core.errors import SettingsError
from fedpipe.planning import planner
from fedpipe.settings.parser import parse_params
from fedpipe.settings.schema import build_json_schema
from tests import small_studies as studies

STUDIES, ROUNDS = 200, 10
SCHEMA = build_json_schema()
EXTREME_VALUES = (None, True, -1, 0, 0.5, 1e-300, 1e300, 2**70, "", "x", "1e-3", [], [0], {}, {"a": 1}, float("nan"))
DATA = (
    {"name": "digits", "subset": 90},
    {"name": "digits", "subset": 90, "split": "pooled", "test_fraction": 0.2, "validation_fraction": 0.2},
    {"name": "generated", "like": "imdb", "samples": 60},
    {"name": "generated", "like": "mnist", "samples": 60},
    {"name": "generated", "like": "cifar10", "samples": 60},
)
SECTIONS = ("transforms", "federation", "evaluation", "partition", "model", "report", "artifacts")


class RandomStudy:
    """Draws random values of a JSON Schema, some of them invalid."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.definitions: dict[str, Any] = SCHEMA["$defs"]

    def draw_value(self, schema: dict[str, Any]) -> Any:
        """Return a value of a schema. One in fifty is invalid or extreme."""
        schema = self.definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        if self.random.random() < 0.02:
            return self.random.choice(EXTREME_VALUES)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.random.choice(schema["enum"])
        if choices := schema.get("anyOf") or schema.get("oneOf"):
            return self.draw_value(self.random.choice(choices))
        match schema.get("type"):
            case "integer":
                return self.random.randint(schema.get("minimum", 0), schema.get("minimum", 0) + 3)
            case "number":
                low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
                high = schema.get("maximum", schema.get("exclusiveMaximum", low + 2))
                return self.random.choice([low, high, round(self.random.uniform(low, high), 3), (low + high) / 2])
            case "boolean":
                return self.random.random() < 0.5
            case "array":
                count = self.random.randint(schema.get("minItems", 0), schema.get("minItems", 0) + 2)
                return [self.draw_value(schema.get("items", {})) for _ in range(count)]
            case "object" if "properties" in schema:
                return self.draw_section(schema, 0.3)
            case "object":
                return {}
            case "null":
                return None
        return "x"

    def draw_section(self, schema: dict[str, Any], fraction: float) -> dict[str, Any]:
        """Return some keys of a section, including the required ones."""
        required = schema.get("required", [])
        return {
            key: self.draw_value(part)
            for key, part in schema["properties"].items()
            if key in required or self.random.random() < fraction
        }

    def draw_study(self) -> dict[str, Any]:
        """Return a small study."""
        schema = SCHEMA
        params: dict[str, Any] = {"dataset": dict(self.random.choice(DATA))}
        for name in SECTIONS:
            if self.random.random() < 0.5:
                part = schema["properties"][name]
                part = self.random.choice(part["anyOf"]) if "anyOf" in part else part
                part = self.definitions[part["$ref"].rpartition("/")[2]] if "$ref" in part else part
                part = {
                    **part,
                    "properties": {key: field for key, field in part["properties"].items() if key != "sha256"},
                }
                params[name] = self.draw_section(part, 0.15)
        federation = {"clients": self.random.randint(1, 5), "rounds": 1} | params.get("federation", {})
        params["federation"] = federation
        label = self.random.choice(registry.list_components(component.ALGORITHM))
        entry = self.draw_section(schema["properties"]["algorithms"]["properties"][label], 0.2)
        params["algorithms"] = {label: {key: value for key, value in entry.items() if key != "algorithm"}}
        params["study"] = {"algorithms": [label], "seeds": [self.random.randint(0, 9)]}
        return params


@pytest.mark.slow
def test_random_study_is_rejected_with_messages_or_planned_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = []
    for seed in range(STUDIES):
        (folder := tmp_path / str(seed)).mkdir()
        monkeypatch.chdir(folder)
        studies.write(settings := RandomStudy(seed).draw_study(), Path())
        try:
            plan = planner.make_plan()
        except SettingsError as error:
            for line in str(error).splitlines():
                assert re.match(r"[a-z][\w.-]*: .", line), (seed, line)
        except Exception as error:
            raise AssertionError(f"study {seed}: {settings}") from error
        else:
            planned.append((seed, settings, plan))
    assert STUDIES / 10 < len(planned) < STUDIES, "some are planned and some are rejected"
    small = [
        (seed, settings)
        for seed, settings, plan in planned
        if plan.runs[0].rounds == 1 and not parse_params(settings).model.has_missing_weights  # no network
    ]
    for seed, settings in random.Random(0).sample(small, ROUNDS):
        monkeypatch.chdir(tmp_path / str(seed))
        try:
            (run,) = studies.open_runs(studies.prepare(settings))
            studies.finish_run(run, 1)
        except Exception as error:
            raise AssertionError(f"study {seed}: {settings}") from error
