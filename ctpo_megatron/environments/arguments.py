"""Checks the arguments of a tool call against the tool's schema, with error messages written for the model."""

from __future__ import annotations

import json
from typing import Any

from ctpo_megatron.environments.protocol import ParseError, Schema

_A = {
    "string": "a string",
    "number": "a number",
    "integer": "an integer",
    "boolean": "a boolean",
    "array": "an array",
    "object": "an object",
}


def check_arguments(schema: Schema, arguments: Any) -> dict[str, Any]:
    """Return `arguments` if they are an object that fits `schema`; unknown properties are refused.

    Raises ParseError.
    """
    from jsonschema import Draft202012Validator

    parameters = schema["function"].get("parameters", {})
    required, known = set(parameters.get("required", ())), set(parameters.get("properties", ()))
    if not isinstance(arguments, dict) or not required <= arguments.keys() <= known:
        raise ParseError(f'"arguments" must be an object {_wanted(required, known - required)}')
    for error in Draft202012Validator(parameters).iter_errors(arguments):
        where = ".".join(str(part) for part in error.absolute_path)
        if error.validator == "type" and isinstance(error.validator_value, str):
            wanted = _A.get(error.validator_value, error.validator_value)
            raise ParseError(f'"{where}" must be {wanted}, found {type(error.instance).__name__}')
        raise ParseError(f'"{where}": {error.message}')
    for key, value in arguments.items():
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ParseError(f'"{key}" contains an unpaired surrogate and cannot be encoded') from None
    return arguments


def _wanted(required: set[str], optional: set[str]) -> str:
    """The keys of an object in words."""
    if not required:
        return f"with no other keys than {_quoted(optional)}" if optional else "without keys"
    also = f" and, if needed, {_quoted(optional)}" if optional else ""
    return f"with exactly the key{'s' * (len(required) > 1)} {_quoted(required)}{also}"


def _quoted(names: set[str]) -> str:
    return ", ".join(f'"{name}"' for name in sorted(names))
