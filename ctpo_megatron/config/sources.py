"""Finds YAML files, and reads them and command-line overrides into layers with the location of each value."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ctpo_megatron.config.problems import NO_VALUE, ConfigError, Problem

COMMAND_LINE = "command line"
Keys = tuple[str, ...]


@dataclass(frozen=True)
class Layer:
    """One file or one override: its values, and the location of each key."""

    values: DictConfig
    places: dict[Keys, str] = field(default_factory=dict)
    file: Path | None = None


@dataclass(frozen=True)
class Sources:
    """All layers, later ones win."""

    layers: tuple[Layer, ...]

    def where(self, keys: Keys) -> str:
        """Location of a key's value: in the last layer with this key, else in the last with its parent."""
        for end in range(len(keys), -1, -1):
            for layer in reversed(self.layers):
                if keys[:end] in layer.places:
                    return layer.places[keys[:end]]
        return ""

    @property
    def files(self) -> Iterator[Path]:
        """The files of the layers."""
        return (layer.file for layer in self.layers if layer.file is not None)

    def has(self, keys: Keys) -> bool:
        """Whether the key itself was given (false: its value is a default)."""
        return any(keys in layer.places for layer in self.layers)


def read_files(path: str | Path) -> list[Layer]:
    """The file and, before it, the files its `defaults` key names. Raises ConfigError."""
    return _read_chain(locate(path), ())


def _read_chain(file: Path, seen: tuple[Path, ...]) -> list[Layer]:
    name, real = _display(file), file.resolve()
    if real in seen:
        chain = " -> ".join(_display(p) for p in (*seen[seen.index(real) :], real))
        message = f"the files include each other in a circle: {chain}"
        raise ConfigError([Problem("defaults", message, "remove one of these defaults", where=name)])
    layer = _read_file(file, name)
    where = layer.places.get(("defaults",))
    if where is None:
        return [layer]
    base = plain(layer.values)["defaults"]
    del layer.values["defaults"]
    if base is None:
        return [layer]
    if not isinstance(base, str):
        fix = "write one file name, e.g. `defaults: base.yaml` (Hydra's lists of groups are not supported)"
        raise ConfigError([Problem("defaults", "not a file name", fix, base, where)])
    parent = file.parent / base
    if not parent.is_file():
        here = sorted(p.name for p in file.parent.glob("*.yaml"))
        raise ConfigError([Problem("defaults", "no such file", f"next to it are {', '.join(here)}", base, where)])
    return [*_read_chain(parent, (*seen, real)), layer]


def _read_file(file: Path, name: str) -> Layer:
    try:
        text = file.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        places = {(): name, **dict(_places(root, (), name))}
    except yaml.YAMLError as error:
        raise ConfigError([_syntax_problem(error, name)]) from error
    except RecursionError as error:
        message = "not readable: an alias (*) inside of what it names (&), or too many levels"
        raise ConfigError([Problem("", message, where=name)]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("", f"cannot be read: {error}", where=name)]) from error
    if root is None:
        return Layer(OmegaConf.create({}), {(): name}, file)
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            [Problem("", "the file must be a mapping of sections, e.g. `run: {name: first}`", where=name)]
        )
    try:
        return Layer(cast(DictConfig, OmegaConf.load(file)), places, file)  # checked above: the root is a mapping
    except yaml.YAMLError as error:
        raise ConfigError([_syntax_problem(error, name)]) from error
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or ""
        where = places.get(tuple(key.split(".")), name)
        raise ConfigError([Problem(key, f"broken interpolation: {first_line(error)}", where=where)]) from error


def _places(node: yaml.Node | None, keys: Keys, name: str) -> Iterator[tuple[Keys, str]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*keys, str(key.value))
            yield inner, f"{name}:{key.start_mark.line + 1}"
            yield from _places(value, inner, name)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            inner = (*keys, str(index))
            yield inner, f"{name}:{value.start_mark.line + 1}"
            yield from _places(value, inner, name)


def _syntax_problem(error: yaml.YAMLError, name: str) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = f"{name}:{mark.line + 1}" if mark is not None else name
    reason = getattr(error, "problem", None) or first_line(error)
    return Problem(
        "", f"not valid YAML: {reason}", "check indentation, quotes and brackets here and above", where=where
    )


def read_overrides(overrides: Sequence[str]) -> tuple[list[Layer], list[Problem]]:
    """One layer per `a.b=c`, and the layers of each further file; unreadable ones are returned as problems."""
    layers: list[Layer] = []
    problems: list[Problem] = []
    for text in overrides:
        if "=" not in text and text.endswith((".yaml", ".yml")):
            try:
                layers += read_files(text)
            except ConfigError as unreadable:
                problems += unreadable.problems
            continue
        problem = _refuse(text)
        if problem is None:
            key, _, value = text.partition("=")
            keys = tuple(key.strip().split("."))
            try:
                values = OmegaConf.from_dotlist([f"{key.strip()}={value}"])
                layers.append(Layer(values, {keys[:end]: COMMAND_LINE for end in range(1, len(keys) + 1)}))
            except (yaml.YAMLError, OmegaConfBaseException) as error:
                reason = f"not a YAML value: {getattr(error, 'problem', None) or first_line(error)}"
                fix = "quote it twice, once for the shell: a.b='\"text: {1}\"'"
                problem = Problem(key, reason, fix, value, COMMAND_LINE)
        if problem is not None:
            problems.append(problem)
    return layers, problems


def _refuse(text: str) -> Problem | None:
    """Spellings from other tools that would not do what was meant."""
    key, equals, value = text.partition("=")
    bare = key.strip().lstrip("+~-")
    if any("\udc80" <= character <= "\udcff" for character in text):  # Python's encoding of an undecodable byte
        message, fix = "is not UTF-8", "rename the file or folder; where the name is UTF-8, type export LC_ALL=C.UTF-8"
    elif key.startswith("+"):
        message, fix = "no `+` here", f"every known key can be set: {bare}={value}"
    elif key.startswith("~"):
        message, fix = "no `~` here", f"an optional section or value is switched off with {bare}=null"
    elif key.startswith("-"):
        message, fix = "no dashes here", f"write {bare}={value or 'VALUE'}"
    elif not equals:
        message, fix = "no `=` in this override", f"write {bare}=VALUE"
    elif "[" in bare or any(part.isdigit() for part in bare.split(".")):
        whole = bare.split("[")[0].rstrip("0123456789.")
        message, fix = "an item of a list cannot be set alone", f"give the whole list: {whole}=[first,second]"
    elif not all(part.strip() for part in bare.split(".")):
        message, fix = "an empty name in the path", "write section.key=VALUE"
    else:
        return None
    return Problem(key, message, fix, value if equals else NO_VALUE, COMMAND_LINE)


def first_line(error: Exception) -> str:
    """The first line of an error's text (OmegaConf appends internals below it)."""
    return str(error).strip().split("\n")[0]


def _display(file: Path) -> str:
    """A path relative to the current directory if that is shorter."""
    relative = os.path.relpath(file)
    return str(file) if relative.startswith("..") else relative


def plain(values: DictConfig) -> dict[str, Any]:
    """A layer's values as plain containers, without resolving interpolations."""
    return OmegaConf.to_container(values, resolve=False)  # type: ignore[return-value]


def config_folders() -> list[Path]:
    """Folders searched after the path as given; the packaged one exists only in an installed wheel."""
    package = Path(__file__).resolve().parents[1]
    return [folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir()]


def locate(path: str | Path, suffix: str = ".yaml", folder: str = "") -> Path:
    """The file that a user's path refers to. Raises ConfigError listing the searched locations and close matches.

    suffix: which a path may leave out. folder: of configs/, where a name is looked for, too.
    """
    wanted = Path(os.path.expanduser(path))  # unlike Path, it does not fail for an unknown user
    candidates = list(_candidates(wanted, suffix, folder))
    for candidate in candidates:
        if os.path.isfile(candidate):  # also False for a name that is too long
            return candidate
    looked = ", ".join(str(c) for c in candidates if c.suffix or not c.name)
    near = _near(wanted, suffix)
    known = f"did you mean {', '.join(near)}?" if near else f"give the path of a {suffix} file"
    what = "configuration" if suffix == ".yaml" else f"{suffix} file"
    raise ConfigError([Problem("", f"no such {what} (looked for {looked})", known, where=str(path))])


def _candidates(wanted: Path, suffix: str, folder: str) -> Iterator[Path]:
    names = [wanted] if wanted.suffix or not wanted.name else [wanted, wanted.with_suffix(suffix)]
    yield from names
    if wanted.is_absolute():
        return
    for configs in config_folders():
        for name in names:
            inside = Path(*name.parts[1:]) if name.parts[:1] == ("configs",) and len(name.parts) > 1 else name
            yield from dict.fromkeys((configs / inside, configs / folder / inside))


def _near(wanted: Path, suffix: str) -> list[str]:
    """Existing files of this suffix with a similar name."""
    parent = wanted.parent
    files = [*parent.glob(f"*{suffix}")] if parent.is_dir() else []
    for folder in config_folders():
        files += sorted(folder.rglob(f"*{suffix}"))
    by_stem = {file.stem: file for file in reversed(files)}
    return [str(by_stem[stem]) for stem in difflib.get_close_matches(wanted.stem, by_stem, n=3, cutoff=0.5)]
