"""Loads YAML files and dotted overrides into a validated, frozen Config, or raises one error with every mistake."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ctpo_megatron.base.text import concealed, secrets_in
from ctpo_megatron.config.explain import did_you_mean, explain_interpolation, explain_values
from ctpo_megatron.config.keys import merged, with_defaults
from ctpo_megatron.config.objective_schema import BY_LONGEST_RESPONSE
from ctpo_megatron.config.problems import NO_VALUE, ConfigError, Problem, first_line
from ctpo_megatron.config.removed import without_removed
from ctpo_megatron.config.schema import Config

Keys = tuple[str, ...]
COMMAND_LINE = "command line"


@dataclass
class Sources:
    """Where a configuration was given. places: `file:line` or the command line, by key; files: in the order read."""

    places: dict[Keys, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    def where(self, keys: Keys) -> str:
        """Place of a key's value: where the key was given last, else its closest section."""
        return next((self.places[keys[:end]] for end in range(len(keys), -1, -1) if keys[:end] in self.places), "")

    def has(self, keys: Keys) -> bool:
        """Return whether the key itself was given (false: its value is a default)."""
        return keys in self.places

    def placed(self, problem: Problem) -> Problem:
        """Return the problem with the file and line that its key was written at."""
        if problem.where or not problem.key:
            return problem
        keys = _parts(problem.key)
        whole = tuple(key for key in keys if not key.isdigit())  # a list on the command line has no places of its items
        return replace(problem, where=self.where(keys) if self.has(keys) or self.has(whole) else "default")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read, merge and validate a configuration; raises ConfigError with all problems at once."""
    return load_with_sources(path, overrides)[0]


def load_with_sources(
    path: str | Path | None, overrides: Sequence[str] = (), unknown: list[Problem] | None = None
) -> tuple[Config, Sources]:
    """As `load_config`, with the place of each value for later messages. path: None: no file.

    unknown: gets the problems of unknown keys where nothing else is wrong; the configuration is then without these
    keys, for further checks. The caller raises them.
    """
    sources = Sources()
    given = {} if path is None else _read_files(locate(path), sources)
    own_folder = sources.files[-1].resolve().parent if sources.files else Path.cwd()
    given, problems = _with_overrides(given, overrides, sources)
    # Defaults lie below what is given, since interpolations may name keys that have a default.
    tree = OmegaConf.create(with_defaults(given))
    resolved = _resolved(tree, (), sources, problems)
    _fill_in(resolved, given, own_folder)
    problems += _secrets(resolved, sources)
    config, details = _validated(resolved)
    strangers = [detail for detail in details if detail["type"] == "extra_forbidden"]
    if strangers:  # without these keys, for the checks that need a configuration
        config, others = _validated(_without(resolved, strangers))
        details = [*strangers, *others]
    broken = {problem.key for problem in problems}
    wrong = [problem for problem in explain_values(details, sources.where) if not _is_explained(problem.key, broken)]
    if config is None or problems or (wrong and unknown is None):
        raise ConfigError([*problems, *wrong])
    if unknown is not None:
        unknown += wrong
    return config.read_from(sources.files), sources


def _fill_in(tree: dict[str, Any], given: Mapping[str, Any], own_folder: Path) -> None:
    """Fill in, in place, the defaults that depend on other keys."""
    objective, rollout, extensions = (tree.get(name) for name in ("objective", "rollout", "extensions"))
    own = given.get("objective")  # an interpolation gives no anchor of its own
    chosen = isinstance(own, Mapping) and own.get("anchor") is not None
    if isinstance(objective, dict) and isinstance(rollout, dict) and not chosen:
        # Only the log-probs of the weights that sampled it give a stale token an exact weight.
        stale = any(rollout.get(key) not in (0, None) for key in ("max_staleness", "lag"))
        objective["anchor"] = "behaviour" if stale else "proximal"
    if isinstance(objective, dict) and objective.get("preset") in BY_LONGEST_RESPONSE and isinstance(rollout, dict):
        longest = rollout.get("max_response_tokens")
        if objective.get("loss_scale_factor") is None and type(longest) is int and longest > 0:
            objective["loss_scale_factor"] = longest
    if isinstance(extensions, dict) and extensions.get("path") is None:
        extensions["path"] = [str(own_folder)]


def _validated(tree: Any) -> tuple[Config | None, list[ErrorDetails]]:
    """The configuration, or what is wrong with it."""
    try:
        # Strict, and from JSON: "3", 3.0 and true are not integers, but a list is accepted for a tuple.
        return Config.model_validate_json(json.dumps(tree, default=str), strict=True), []
    except ValidationError as error:
        return None, error.errors()


def _without(tree: Any, details: Sequence[ErrorDetails]) -> Any:
    """A copy of the tree without the keys of these details."""
    pruned = deepcopy(tree)
    for detail in details:
        *sections, last = detail["loc"]
        with suppress(KeyError, IndexError, TypeError):  # a key of a union may have another path in the tree
            del reduce(getitem, sections, pruned)[last]
    return pruned


def _is_explained(key: str, broken: set[str]) -> bool:
    """Whether the key, or an item in it, has been reported: a message about its missing value would be redundant."""
    return any(known == key or known.startswith(f"{key}.") for known in broken)


def _secrets(tree: Any, sources: Sources) -> Iterator[Problem]:
    """Arguments that contain a secret: the configuration is written to the run directory and shown in reports."""
    message = "looks like a secret, and the configuration is written to the run directory"
    for key in secrets_in(tree):
        if ".arguments." in key:
            yield Problem(key, message, "give it in an environment variable", where=sources.where(_parts(key)))


def _resolved(node: Any, keys: Keys, sources: Sources, problems: list[Problem]) -> Any:
    """Plain containers with resolved interpolations; every broken one becomes a problem, and its value None."""
    if not isinstance(node, DictConfig | ListConfig):
        return node
    raw, plain = OmegaConf.to_container(node, resolve=False), dict[Any, Any]()
    for key in range(len(node)) if isinstance(node, ListConfig) else list(node):
        inner = (*keys, str(key))
        try:
            plain[key] = _resolved(node[key], inner, sources, problems)
        except OmegaConfBaseException as error:
            plain[key] = None
            advice, value = explain_interpolation(first_line(error)), raw[key]  # type: ignore[index]
            problems.append(Problem(".".join(inner), *advice, value, sources.where(inner)))
    return list(plain.values()) if isinstance(node, ListConfig) else plain


def _read_files(file: Path, sources: Sources, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Values of the file over the values of the one that its `defaults` names. Raises ConfigError."""
    name, real = _display(file), file.resolve()
    if real in seen:
        chain = " -> ".join(_display(path) for path in (*seen[seen.index(real) :], real))
        raise ConfigError([Problem("defaults", f"the files include each other: {chain}", "remove one", where=name)])
    values, places = _read_file(file, name)
    base, below = values.pop("defaults", None), {}
    if base is not None:
        parent = file.parent / str(base)
        if not isinstance(base, str) or not parent.is_file():
            near = ", ".join(sorted(path.name for path in file.parent.glob("*.yaml")))
            fix = f"write the name of one file, such as those next to it: {near}"
            raise ConfigError([Problem("defaults", "no such file", fix, base, places[("defaults",)])])
        below = _read_files(parent, sources, (*seen, real))
    sources.places.update(places)
    sources.files = (*sources.files, file)
    return merged(below, without_removed(values, file))


def _read_file(file: Path, name: str) -> tuple[dict[str, Any], dict[Keys, str]]:
    """Values of one YAML file, and the place of each key. Raises ConfigError."""
    places: dict[Keys, str] = {(): name}
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if not (root is None or isinstance(root, yaml.MappingNode)):
            raise ConfigError(
                [Problem("", "the file must be a mapping of sections", "e.g. `run: {name: first}`", where=name)]
            )
        places |= _lines(root, (), name)
        values = OmegaConf.load(file)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        reason = getattr(error, "problem", None) or "an alias (*) inside of what it names (&), or too many levels"
        fix = "check indentation, quotes and brackets here and above"
        where = f"{name}:{mark.line + 1}" if mark is not None else name
        raise ConfigError([Problem("", f"not valid YAML: {reason}", fix, where=where)]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("", f"cannot be read: {error}", where=name)]) from error
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or ""
        message = f"broken interpolation: {first_line(error)}"
        raise ConfigError([Problem(key, message, where=places.get(_parts(key), name))]) from error
    return {} if root is None else OmegaConf.to_container(values, resolve=False), places  # type: ignore[return-value]


def _lines(node: yaml.Node | None, keys: Keys, name: str) -> dict[Keys, str]:
    """`file:line` of every key and item below a node."""
    pairs: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        pairs = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        pairs = [(str(index), item, item) for index, item in enumerate(node.value)]
    places: dict[Keys, str] = {}
    for key, start, value in pairs:
        inner = (*keys, key)
        places |= {inner: f"{name}:{start.start_mark.line + 1}"} | _lines(value, inner, name)
    return places


def _with_overrides(
    given: dict[str, Any], overrides: Sequence[str], sources: Sources
) -> tuple[dict[str, Any], list[Problem]]:
    """The values with each `a.b=c` and each further file over them; the unreadable ones are returned as problems."""
    problems: list[Problem] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        try:
            if not equals and text.endswith((".yaml", ".yml")):
                given = merged(given, _read_files(locate(text), sources))
                continue
            if problem := check_override(text):
                raise ConfigError([problem])
            values: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"{key.strip()}={value}"]), resolve=False)
        except ConfigError as unreadable:
            problems += unreadable.problems
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            reason = f"not a YAML value: {getattr(error, 'problem', None) or first_line(error)}"
            problems.append(Problem(key, reason, "quote it twice: a.b='\"text: {1}\"'", value, COMMAND_LINE))
        else:
            given, keys = merged(given, values), _parts(key.strip())
            sources.places.update({keys[:end]: COMMAND_LINE for end in range(1, len(keys) + 1)})
    return given, problems


def check_override(text: str) -> Problem | None:
    """Return the problem with the spelling of an override, such as another tool's; None without one."""
    key, equals, value = text.partition("=")
    bare = key.strip().lstrip("+~-")
    if any("\udc80" <= character <= "\udcff" for character in text):  # Python's encoding of an undecodable byte
        message, fix = "is not UTF-8", "rename the file or folder; where the name is UTF-8, type export LC_ALL=C.UTF-8"
    elif "[" in bare or any(part.isdigit() for part in bare.split(".")):
        whole = bare.split("[")[0].rstrip("0123456789.")
        message, fix = "an item of a list cannot be set alone", f"give the whole list: {whole}=[first,second]"
    elif bare != key.strip():
        message = f"no `{key.strip()[0]}` here"
        fix = f"write {bare}={value or 'VALUE'}; {bare}=null switches an optional section or value off"
    elif not equals or not all(part.strip() for part in bare.split(".")):
        message, fix = "is no override", "write section.key=VALUE"
    else:
        return None
    return Problem(key, message, fix, value if equals else NO_VALUE, COMMAND_LINE)


def _parts(key: str) -> Keys:
    return tuple(key.split("."))


def _display(file: Path) -> str:
    """A path relative to the current directory if that is shorter."""
    relative = os.path.relpath(file)
    return str(file) if relative.startswith("..") else relative


def config_folders() -> list[Path]:
    """Folders searched after the path as given; the packaged one exists only in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    return [folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir()]


def locate(path: str | Path, suffix: str = ".yaml", folder: str = "") -> Path:
    """Return the file that a user's path refers to. Raises ConfigError listing the searched locations and close
    matches.

    suffix: which a path may leave out. folder: of configs/, where a name is looked for, too.
    """
    wanted = Path(os.path.expanduser(path))  # unlike Path, it does not fail for an unknown user
    names = [wanted] if wanted.suffix or not wanted.name else [wanted, wanted.with_suffix(suffix)]
    candidates = list(names)
    for configs in () if wanted.is_absolute() else config_folders():
        for name in names:
            inside = name.relative_to("configs") if name.parts[:1] == ("configs",) else name
            candidates += [configs / inside, configs / folder / inside]
    for candidate in candidates:
        if os.path.isfile(candidate):  # also False for a name that is too long
            return candidate
    files = [path for shipped in config_folders() for path in sorted(shipped.rglob(f"*{suffix}"))]
    files += wanted.parent.glob(f"*{suffix}")
    by_stem = {file.stem: file for file in files}
    near = [str(by_stem[stem]) for stem in difflib.get_close_matches(wanted.stem, by_stem, n=3, cutoff=0.5)]
    looked = ", ".join(str(c) for c in dict.fromkeys(candidates) if c.suffix or not c.name)
    fix = did_you_mean(near) or f"give the path of a {suffix} file"
    what = "configuration" if suffix == ".yaml" else f"{suffix} file"
    raise ConfigError([Problem("", f"no such {what} (looked for {looked})", fix, where=str(path))])


def dump(config: Config, *, whole: bool = False) -> str:
    """Return the resolved configuration as YAML, without secrets; `load_config` of it gives the same but for these.

    whole: with secrets, for a file that no other user can read.
    """
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json") if whole else stored_settings(config)))


def stored_settings(config: Config) -> dict[str, Any]:
    """Return the resolved configuration as a run keeps it: plain, and without secrets."""
    settings: dict[str, Any] = concealed(config.model_dump(mode="json"))
    return settings
