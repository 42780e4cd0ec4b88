"""Walks the schema: all known keys, the type of each, and the closest matches of a misspelt key."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from ctpo_megatron.config.extension import Extension
from ctpo_megatron.config.objective_schema import PrefixBudget
from ctpo_megatron.config.schema import Config
from ctpo_megatron.config.section import Section

_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_EXTENSION = frozenset(Extension.model_fields)
_NAMES = {bool: "true/false", int: "integer", float: "number", str: "text"}


@dataclass(frozen=True)
class Key:
    """One leaf of the schema."""

    path: str
    type: str
    default: Any
    required: bool
    meaning: str


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section class of a field (even if it may be null); None for a leaf, such as a list of sections."""
    if get_origin(field.annotation) is tuple:
        return None
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _defaults(section: type[Section], given: Mapping[str, Any], base: Section | None = None) -> dict[str, Any]:
    """Defaults of a section as a plain tree, for interpolations and for sections that are given in part.

    Optional sections that are not given, and keys whose value is not a mapping, are omitted. base: the default instance
    at this place of the schema, if it differs from the class's own defaults.
    """
    tree: dict[str, Any] = {}
    for name, field, value in _fields(section, base):
        inner = section_of(field)
        if inner is None:
            if base is not None or not field.is_required():
                tree[name] = _plain(value)
        elif isinstance(given.get(name), Mapping) or (name not in given and isinstance(value, Section)):
            tree[name] = _defaults(inner, given.get(name, {}), value if isinstance(value, Section) else None)
    return tree


def with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as config.yaml has it, with the schema's defaults where it lacks a key; unknown
    keys stay.
    """
    return merged(_defaults(Config, given), given)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values with the values of `above` over them; a list or another extension replaces what was there."""
    both = dict(below)
    for name, value in above.items():
        usual = both.get(name)
        if isinstance(usual, Mapping) and isinstance(value, Mapping):
            same = not usual.keys() <= _EXTENSION or value.get("name", usual.get("name")) == usual.get("name")
            value = merged(usual, value) if same else value
        both[name] = value
    return both


def _fields(section: type[Section], base: Section | None) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Key, field and default of each key of a section."""
    for name, field in section.model_fields.items():
        yield name, field, getattr(base, name) if base is not None else field.get_default(call_default_factory=True)


@cache
def known_keys() -> tuple[Key, ...]:
    """Return every leaf of the schema in the order of declaration."""
    return tuple(_walk(Config, "", None))


@cache
def known_paths() -> tuple[str, ...]:
    """Dotted paths of all leaves and all sections."""
    paths: dict[str, None] = {}
    for key in known_keys():
        parts = key.path.split(".")
        paths.update((".".join(parts[: end + 1]), None) for end in range(len(parts)))
    return tuple(paths)


def nearest(path: str) -> list[str]:
    """At most three close matches of an unknown path among the known ones, best first."""
    section, _, leaf = path.rpartition(".")
    leaves = {known: known.rpartition(".")[2] for known in known_paths()}
    near = difflib.get_close_matches(path, leaves, n=3, cutoff=0.75)
    same = [known for known in leaves if leaves[known] == leaf]
    if not same and not near:
        close = difflib.get_close_matches(leaf, leaves.values(), n=1, cutoff=0.75)
        same = [known for known in leaves if leaves[known] in close]
    same.sort(key=lambda known: -difflib.SequenceMatcher(None, path, known).ratio())
    siblings = [known for known in near if known.rpartition(".")[0] == section]
    around = [known for known in near if not path.startswith(f"{known}.")]
    # A sibling of nearly this name first, then the same name in another section.
    return list(dict.fromkeys([*siblings, *same, *around]))[:3]


def _plain(value: Any) -> Any:
    """A default as a YAML value."""
    if isinstance(value, Extension):
        return value.model_dump() if value.arguments else value.name
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def flattened(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of every leaf of nested mappings; an empty mapping is a leaf."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _walk(section: type[Section], prefix: str, base: Section | None) -> Iterator[Key]:
    for name, field, value in _fields(section, base):
        inner = section_of(field)
        if inner is not None:
            yield from _walk(inner, f"{prefix}{name}.", value if isinstance(value, Section) else None)
        else:
            required = base is None and field.is_required()
            type_text = _describe(field.annotation, tuple(field.metadata))
            yield Key(prefix + name, type_text, None if required else value, required, field.description or "")


def _describe(annotation: Any, constraints: tuple[Any, ...] = ()) -> str:
    """A type in words: `integer > 0 or null`, `"a" | "b"`, `list of text`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe(arguments[0], (*arguments[1:], *constraints))
    if origin in (Union, types.UnionType):
        inner = [_describe(a, constraints) for a in arguments if a is not type(None)]
        return " or ".join([*inner, "null"] if type(None) in arguments else inner)
    if origin is Literal:
        return " | ".join(f'"{a}"' for a in arguments)
    if origin is tuple:
        return f"list of {_describe(arguments[0])}" if Ellipsis in arguments else f"{len(arguments)} numbers"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"mappings of {', '.join(annotation.model_fields)}"
    if annotation is Extension:
        return "name or {name, arguments}"
    if annotation is PrefixBudget:
        return "number >= 0 or {quantile, min}"
    return " ".join([_NAMES[annotation], ", ".join(_bounds(constraints))]).strip()


def _bounds(constraints: tuple[Any, ...]) -> Iterator[str]:
    parts: list[Any] = []
    for constraint in constraints:
        parts += getattr(constraint, "metadata", (constraint,))  # pydantic groups the constraints of a Field
    for name, sign in _BOUNDS.items():
        for part in parts:
            if (bound := getattr(part, name, None)) is not None:
                yield f"{sign} {bound}" if isinstance(bound, int) else f"{sign} {bound:g}"


def short_names(keys: Iterable[str], among: Iterable[str]) -> dict[str, str]:
    """Return each key by as few of its last parts as no other key of `among` ends in."""
    others = [f".{key}" for key in among]
    names = {}
    for key in keys:
        parts = key.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        unique = (end for end in ends if not any(o.endswith(f".{end}") for o in others if o != f".{key}"))
        names[key] = next(unique, key)
    return names
