"""The JSON Schema of params.yaml, for editors."""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any, cast

from fedpipe.core.components import registry
from fedpipe.core.components.component import (
    ALGORITHM,
    DATASET,
    MODEL,
    PARTITION,
    ComponentKind,
    get_docstring_summary,
    get_type_adapter,
)
from fedpipe.settings.methods import MethodOptions
from fedpipe.settings.params import Params

DOTTED_PATH_SCHEMA = {"type": "string", "pattern": r"\."}  #: schema of a dotted path


def build_json_schema() -> dict[str, Any]:
    """Build the JSON Schema of params.yaml for editors. It lists components with their parameters."""
    schema = Params.model_json_schema(mode="validation")
    definitions = schema.setdefault("$defs", {})

    def build_component_schema(kind: ComponentKind) -> dict[str, Any]:
        choices, selector = [], kind.selector
        for name in registry.list_components(kind):
            component = registry.add_dw_parameter(kind, registry.find_component(kind, name))
            component_schema = get_type_adapter(cast(Hashable, component)).json_schema(ref_template="#/$defs/{model}")
            definitions.update(component_schema.pop("$defs", {}))
            component_schema["title"] = name
            component_schema["description"] = get_docstring_summary(component)
            component_schema["properties"] = {selector: {"const": name}, **component_schema.get("properties", {})}
            component_schema["required"] = [
                *component_schema.get("required", []),
                *([] if name == kind.default else [selector]),
            ]
            choices.append(component_schema)
        custom_class = {
            "title": "own",
            "type": "object",
            "properties": {selector: DOTTED_PATH_SCHEMA},
            "required": [selector],
        }
        return {"anyOf": [*choices, custom_class | {"description": "A custom class, such as my_module.MyClass."}]}

    properties = schema["properties"]
    properties["partition"] = build_component_schema(PARTITION)
    properties["model"] = build_component_schema(MODEL)
    method_properties = MethodOptions.model_json_schema(mode="validation")["properties"]
    properties["algorithms"] = {
        "type": "object",
        "properties": {
            choice["title"]: choice | {"required": [], "properties": choice["properties"] | method_properties}
            for choice in build_component_schema(ALGORITHM)["anyOf"]
            if choice["title"] != "own"
        },
        "additionalProperties": {"type": "object", "properties": method_properties},
    }
    dataset_keys = definitions.pop("Data")["properties"]
    properties["dataset"] = build_component_schema(DATASET)
    for choice in properties["dataset"]["anyOf"]:
        choice["properties"] = dataset_keys | choice["properties"]
    return json.loads(json.dumps(schema))
