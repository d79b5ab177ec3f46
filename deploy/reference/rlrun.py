"""Writes the structural schema of RLRun objects, derived from the JSON schema of a specification."""

import json
from collections.abc import Mapping
from typing import Any

import yaml

from services.common.runspec.run import RunSpec
from services.controller.schemas import RunPatch

_HEAD = "# Schema of RLRun's spec: the keys of a run specification. Written by `make docs`.\n"
_COPIED = (
    *("type", "enum", "pattern", "minLength", "maxLength", "minItems", "maxItems"),
    *("minimum", "maximum", "required"),
)
_EXCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_FREE = "x-kubernetes-preserve-unknown-fields"
# Keys of the API's requests that are not part of a specification.
_OWN: dict[str, dict[str, Any]] = {
    "suspend": {
        "type": "boolean",
        "description": "True pauses the run after its step, with a checkpoint, and ends its workers; a new "
        "run is not submitted. False or no value resumes it.",
    },
    "priority": {
        "type": "integer",
        "minimum": -1000,
        "maximum": 1000,
        "description": "Runs of the project with a higher priority start first. Default: 0.",
    },
    "ttlSecondsAfterFinished": {
        "type": "integer",
        "format": "int64",
        "minimum": 0,
        "description": "Seconds after the end of the run at which the object is deleted; the run stays in "
        "the controller's database. No value keeps the object.",
    },
    "labels": {
        "type": "object",
        "maxProperties": 31,
        "additionalProperties": {"type": "string", "maxLength": 63},
        "description": "Labels of the run in the API.",
    },
}


def chart() -> str:
    """Returns the chart's files/rlrun-spec.yaml."""
    return _HEAD + yaml.safe_dump(schema(), sort_keys=False, width=120)


def schema() -> dict[str, Any]:
    """Returns the structural schema of ``spec``, as CustomResourceDefinitions require it.

    It has no references, defaults or unions. A value with several types, and arguments of the
    user's code, are accepted in any form; the controller checks them.
    """
    whole = RunSpec.model_json_schema()
    result = _converted(whole, whole["$defs"])
    # The object's name is the default.
    result["required"].remove("name")
    assert not _OWN.keys() & result["properties"].keys()
    assert _OWN.keys() - {"suspend", "ttlSecondsAfterFinished"} <= RunPatch.model_fields.keys()
    result["properties"] = {**_OWN, **result["properties"]}
    result["description"] = "The run specification."
    return result


def _converted(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    node = _resolved(node, definitions)
    forms = [
        _resolved(form, definitions) for form in (*node.get("anyOf", ()), *node.get("oneOf", ()))
    ]
    values = [form for form in forms if form.get("type") != "null"]
    result: dict[str, Any] = {}
    if text := _description(node):
        result["description"] = text
    if len(values) == 1:
        result |= _converted({**values[0], "description": text}, definitions)
    elif values:
        result |= {_FREE: True}
        if all(form.get("type") == "object" for form in values):
            result["type"] = "object"
    else:
        result |= _converted_value(node, definitions)
    if len(values) < len(forms):
        result["nullable"] = True
    return result


def _converted_value(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {key: node[key] for key in _COPIED if key in node}
    for exclusive, limit in _EXCLUSIVE.items():
        if exclusive in node:
            result |= {limit: node[exclusive], exclusive: True}
    if "const" in node:
        result["enum"] = [node["const"]]
    if node.get("type") == "integer":
        result["format"] = "int64"
    if items := node.get("items") or (node.get("prefixItems") or [None])[0]:
        result["items"] = _converted(items, definitions)
    if "properties" in node:
        result["properties"] = {
            name: _converted(below, definitions) for name, below in node["properties"].items()
        }
    elif isinstance(below := node.get("additionalProperties"), Mapping):
        result["additionalProperties"] = _converted(below, definitions)
    elif node.get("type") == "object" or "type" not in node:
        result[_FREE] = True
    return result


def _resolved(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    if "$ref" not in node:
        return dict(node)
    found = definitions[node["$ref"].rpartition("/")[2]]
    return {**found, **{key: value for key, value in node.items() if key != "$ref"}}


def _description(node: Mapping[str, Any]) -> str:
    text = " ".join(node.get("description", "").split())
    default = node.get("default")
    if text and default is not None and not isinstance(default, (dict, list)):
        text += f" Default: {json.dumps(default)}."
    return text
