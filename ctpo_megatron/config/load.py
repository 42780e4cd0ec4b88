"""Loads a YAML file and dotted overrides into a validated, frozen Config, or raises one error with every mistake."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ctpo_megatron.base.text import concealed, secrets_in
from ctpo_megatron.config import peers, removed
from ctpo_megatron.config.data_schema import WEIGHTED
from ctpo_megatron.config.extension import Extension
from ctpo_megatron.config.keys import defaults, known_keys, known_paths, nearest
from ctpo_megatron.config.problems import NO_VALUE, ConfigError, Problem
from ctpo_megatron.config.schema import Config
from ctpo_megatron.config.sources import Keys, Layer, Sources, first_line, plain, read_files, read_overrides

_NOT_FOUND = re.compile(r"Interpolation key '(\S+)' not found|trying to access (\S+): node `\S+` is not a container")
"""OmegaConf's messages for an interpolation of a missing key or of a key below a scalar."""
_NUMBER = "constrained-int"
"""Pydantic's name of the number in `number | Literal["auto"]`."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read, merge and validate a configuration; raises ConfigError with all problems at once."""
    return load_with_sources(path, overrides)[0]


def load_with_sources(
    path: str | Path | None, overrides: Sequence[str] = (), unknown: list[Problem] | None = None
) -> tuple[Config, Sources]:
    """As `load_config`, with the location of each value for later messages. path: None: no file.

    unknown: gets the problems of unknown keys where nothing else is wrong; the configuration is then without these
    keys, for further checks. The caller raises them.
    """
    files = [] if path is None else read_files(path)
    for layer in files:
        if layer.file is not None:
            removed.pass_over(layer.values, layer.file)
    extra, problems = read_overrides(overrides)
    layers = [*files, *extra]
    sources = Sources(tuple(layers))
    values = _merge(layers, problems)
    if not _is_given(values, "extensions.path") and OmegaConf.is_dict(values.get("extensions")):
        file = files[-1].file if files else None  # the one that was found; those before it are its `defaults`
        values.extensions.path = [str(Path.cwd() if file is None else file.resolve().parent)]
    tree = _resolve(values, (), sources, problems)
    problems += _secrets(tree, sources)
    broken = {problem.key for problem in problems}
    config, details = _validated(tree)
    if strangers := [detail for detail in details if detail["type"] == "extra_forbidden"]:
        # Without these keys, for the checks that need a configuration.
        config, others = _validated(_without(tree, strangers))
        details += others
    by_key = {_dotted(d["loc"]): _problem(d, sources) for d in details if not _explained(_dotted(d["loc"]), broken)}
    if config is None or problems or (by_key and unknown is None):
        raise ConfigError([*problems, *by_key.values()])
    if unknown is not None:
        unknown += by_key.values()
    return config.read_from(sources.files), sources


def _validated(tree: Any) -> tuple[Config | None, list[ErrorDetails]]:
    """The configuration, or what is wrong with it."""
    try:
        # Strict, and from JSON: "3", 3.0 and true are not integers, but a list is accepted for a tuple.
        return Config.model_validate_json(json.dumps(tree, default=str), strict=True), []
    except ValidationError as error:
        found = error.errors()
        numbers = {detail["loc"][:-1] for detail in found if detail["loc"][-1] == _NUMBER}
        details = [_of_key(detail) for detail in found if not _is_word_of(numbers, detail)]
        return None, [detail for detail in details if not _is_for_its_items(detail, details)]


def _without(tree: Any, details: Sequence[ErrorDetails]) -> Any:
    """A copy of the tree without the keys of these details."""
    pruned = deepcopy(tree)
    for detail in details:
        *sections, last = detail["loc"]
        with suppress(KeyError, IndexError, TypeError):  # a key of a union may have another path in the tree
            del reduce(getitem, sections, pruned)[last]
    return pruned


def dump(config: Config, *, whole: bool = False) -> str:
    """The resolved configuration as YAML, without secrets; `load_config` of it gives the same but for these.

    whole: with secrets, for a file that no other user can read.
    """
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json") if whole else stored_settings(config)))


def stored_settings(config: Config) -> dict[str, Any]:
    """The resolved configuration as a run keeps it: plain, and without secrets."""
    settings: dict[str, Any] = concealed(config.model_dump(mode="json"))
    return settings


def dump_differences(config: Config) -> str:
    """As `dump`, without what has its default value; `load_config` of it gives the same but for secrets, too."""
    tree = stored_settings(config)
    return OmegaConf.to_yaml(OmegaConf.create(_unlike(tree, plain(OmegaConf.create(defaults(Config, tree))))))


def _unlike(values: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, given in values.items():
        value, usual = _short(given), base.get(name, NO_VALUE)
        if isinstance(value, dict) and isinstance(usual, dict):
            value = _unlike(value, usual)
            if value:
                found[name] = value
        elif value != usual:
            found[name] = value
    return found


def _short(value: Any) -> Any:
    """An `Extension` without arguments by its name alone, as people write it."""
    if isinstance(value, list):
        return [_short(item) for item in value]
    is_extension = isinstance(value, dict) and value.keys() == Extension.model_fields.keys()
    return value["name"] if is_extension and not value["arguments"] else value


def _secrets(tree: Any, sources: Sources) -> Iterator[Problem]:
    """Arguments that contain a secret: the configuration is written to the run directory and shown in reports."""
    for key in secrets_in(tree):
        if ".arguments." in key:
            message = "looks like a secret, and the configuration is written to the run directory"
            yield Problem(
                key, message, "give it in an environment variable", where=sources.where(tuple(key.split(".")))
            )


def _is_word_of(numbers: Collection[tuple[str | int, ...]], detail: ErrorDetails) -> bool:
    """Whether it says that no word is a number. numbers: keys of a number or a word, of which another one says more."""
    return detail["loc"][:-1] in numbers and str(detail["loc"][-1]).startswith("literal[")


def _of_key(detail: ErrorDetails) -> ErrorDetails:
    """Strip the type names that pydantic appends to the key of a union."""
    found = tuple(part for part in detail["loc"] if part != WEIGHTED)
    if found[-1] == _NUMBER:
        return {**detail, "loc": found[:-1], "msg": f"{detail['msg']}, or auto"}
    keys = tuple(part for part in found if part != "bool" and not str(part).startswith("literal["))
    detail = {**detail, "loc": found}
    if keys == found:
        return detail
    return {**detail, "loc": keys, "ctx": {"expected": f"true, false, {detail.get('ctx', {}).get('expected', '')}"}}


def _is_for_its_items(detail: ErrorDetails, details: Sequence[ErrorDetails]) -> bool:
    """Whether a list counts as too short only because its items are wrong, which have their own errors."""
    loc = detail["loc"]
    return detail["type"] == "too_short" and any(d["loc"][: len(loc)] == loc for d in details if d is not detail)


def _explained(key: str, broken: set[str]) -> bool:
    """Whether the key, or an item in it, has been reported: a message about its missing value would be redundant."""
    return any(known == key or known.startswith(f"{key}.") for known in broken)


def _merge(layers: Sequence[Layer], problems: list[Problem]) -> DictConfig:
    given = OmegaConf.create({})
    for layer in layers:
        try:
            given = _over(given, layer.values)
        except OmegaConfBaseException as error:
            keys = max(layer.places, key=len, default=())
            problems.append(Problem(".".join(keys), first_line(error), where=layer.places.get(keys, "")))
    # With the defaults below what is given, since interpolations may name keys that have a default.
    below = defaults(Config, plain(given))
    values = _over(OmegaConf.create(below), given)
    if not _is_given(given, "objective.anchor") and _is_stale(values):
        values.objective.anchor = "behaviour"
    return values


_PART = {"name", "arguments"}


def _over(below: DictConfig, above: DictConfig) -> DictConfig:
    """Both merged; `below` must not be used any more. A list and a mapping may replace each other, which OmegaConf
    refuses. Another part has arguments of its own."""
    for *sections, key in _replaced(plain(below), plain(above)):
        node: Any = below
        for section in sections:
            node = node[section]
        node[key] = None  # OmegaConf lets anything replace it
    return cast(DictConfig, OmegaConf.unsafe_merge(below, deepcopy(above)))  # `merge` copies the larger one, too


def _replaced(below: Any, above: Any, keys: Keys = ()) -> Iterator[Keys]:
    """Keys of mappings that `above` replaces by lists, of lists that it replaces by mappings, and of other parts."""
    if isinstance(below, dict) and isinstance(above, dict):
        if (
            _PART.issuperset(below)
            and _PART.issuperset(above)
            and below.get("name") != above.get("name", below.get("name"))
        ):
            yield keys
            return
        for key in below.keys() & above.keys():
            yield from _replaced(below[key], above[key], (*keys, key))
    elif {type(below), type(above)} == {dict, list}:
        yield keys


def _is_given(values: DictConfig, key: str) -> bool:
    """Whether the key has a value; a broken interpolation counts, and is reported when all values are resolved."""
    try:
        return OmegaConf.select(values, key) is not None
    except OmegaConfBaseException:
        return True


def _is_stale(values: DictConfig) -> bool:
    """Whether tokens sampled by earlier weights are trained on: only their own log-probs give them an exact weight."""
    given = (
        OmegaConf.select(values, f"rollout.{key}", throw_on_resolution_failure=False)
        for key in ("max_staleness", "lag")
    )
    return any(value not in (0, None) for value in given) and OmegaConf.is_dict(values.get("objective"))


def _resolve(node: Any, keys: Keys, sources: Sources, problems: list[Problem]) -> Any:
    """Plain containers with resolved interpolations; every broken one becomes a problem, not only the first."""
    if not isinstance(node, ListConfig | DictConfig):
        return node
    resolved = {}
    for key in range(len(node)) if isinstance(node, ListConfig) else node:
        # "???" in a mapping means required: the key is left out, and pydantic reports it.
        if isinstance(node, ListConfig) or not OmegaConf.is_missing(node, key):
            resolved[str(key)] = _resolve_item(node, key, (*keys, str(key)), sources, problems)
    return list(resolved.values()) if isinstance(node, ListConfig) else resolved


def _resolve_item(node: Any, key: Any, keys: Keys, sources: Sources, problems: list[Problem]) -> Any:
    try:
        value = node[key]
    except MissingMandatoryValue:
        return None
    except OmegaConfBaseException as error:
        raw = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index]
        message, fix = first_line(error), ""
        if found := _NOT_FOUND.search(message):
            name = found[1] or found[2]
            known = name in known_paths()
            fix = f"give the value itself, or {name}" if known else _did_you_mean(nearest(name))
            message = f"{name} has no value here" if known else f"there is no key {name}"
        problems.append(Problem(".".join(keys), message, fix, raw, sources.where(keys)))
        return None
    return _resolve(value, keys, sources, problems)


def _problem(detail: ErrorDetails, sources: Sources) -> Problem:
    """A pydantic error as a Problem."""
    key, keys = _dotted(detail["loc"]), tuple(str(part) for part in detail["loc"])
    where = sources.where(keys)
    kind, value = detail["type"], detail["input"]
    if kind == "literal_error" and isinstance(value, str) and (key, value) in removed.VALUES:
        return Problem(key, "removed", removed.VALUES[key, value], value, where)
    if kind == "extra_forbidden" and (instead := removed.key_advice(key)) is not None:
        return Problem(key, "removed", instead, where=where)
    if kind == "extra_forbidden":
        near = _did_you_mean(nearest(key)) or _siblings(key)
        return Problem(key, *(peers.advice(key, value) or ("unknown key", near)), value, where)
    if kind == "missing" and isinstance(detail["loc"][-1], str):
        return Problem(key, "required, but not given", f"add it: {_meaning(key)}", where=where)
    message, fix = _explain(detail)
    return Problem(key, message, fix, NO_VALUE if kind == "missing" else value, where)


def _explain(detail: ErrorDetails) -> tuple[str, str]:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "literal_error":
        options = [o for o in str(context["expected"]).replace(" or ", ", ").replace("'", "").split(", ") if o]
        close = difflib.get_close_matches(str(value), options, n=1, cutoff=0.5)
        return f"must be one of {', '.join(options)}", _did_you_mean(close)
    if kind == "model_type":
        return "a section must be a mapping", "write its keys below it, or remove it to take the defaults"
    if kind == "tuple_type":
        return "must be a list", f"write [{value}]" if isinstance(value, str) else ""
    if kind in ("missing", "too_long", "too_short"):
        least = context.get("min_length")
        return "wrong number of items", f"give at least {least}" if least else _wanted(_dotted(detail["loc"]))
    if kind == "string_pattern_mismatch":
        return "may hold only letters, digits, `.`, `_` and `-`, and no name is of dots alone", ""
    message = str(detail["msg"]).replace("Input should be", "must be").replace("valid ", "").replace("a i", "an i")
    return message, _type_hint(kind, value)


def _type_hint(kind: str, value: Any) -> str:
    if kind == "string_type" and isinstance(value, int | float):
        return f"quote it: \"'{value}'\" on the command line, '{value}' in YAML"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        return "remove the quotes if it is one" if _is_number(value) else ""
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.lower() in ("true", "false")
    return True


def _did_you_mean(names: Sequence[str]) -> str:
    return f"did you mean {' or '.join(names)}?" if names else ""


def _siblings(key: str) -> str:
    """The keys of the deepest known section around an unknown key."""
    parent = key.rpartition(".")[0]
    while parent and parent not in known_paths():
        parent = parent.rpartition(".")[0]
    depth = parent.count(".") + 1 if parent else 0
    names = [p for p in known_paths() if p.count(".") == depth and p.startswith(f"{parent}." if parent else "")]
    known = ", ".join(name.rpartition(".")[2] for name in names)
    return f"{parent or 'the top level'} has {known}" if names else f"{parent} has no keys below it"


def _wanted(key: str) -> str:
    """The expected content of a list with a missing or surplus item."""
    return next((f"give {k.type}" for k in known_keys() if key == k.path or key.startswith(f"{k.path}.")), "")


def _meaning(key: str) -> str:
    for known in known_keys():
        if known.path == key:
            return f"{known.meaning} ({known.type})"
    return f"a section with {', '.join(p.path for p in known_keys() if p.path.startswith(f'{key}.') and p.required)}"


def _dotted(parts: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in parts)
