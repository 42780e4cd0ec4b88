"""Data sets of the Hugging Face Hub: the parquet files that a name stands for, as huggingface_hub keeps them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from glob import escape
from pathlib import Path, PurePosixPath

from ctpo_megatron.base.text import hidden
from ctpo_megatron.config import HubName

_CONVERTED = "refs/convert/parquet"
"""The branch where the Hub keeps a data set of another format as parquet: `<subset>/<split>/0000.parquet`."""
_NUMBERED = re.compile(r"\d{4}")
_SHARD = re.compile(r"-\d{5}-of-(\d{5})$")
_LOG_IN = "log in (`hf auth login`, or HF_TOKEN)"


@dataclass(frozen=True)
class HubFiles:
    """The local files of one split, in the order of their names.

    commit: of the repository, 40 hexadecimal digits. problem: why there are none; else "".
    """

    commit: str = ""
    files: tuple[Path, ...] = ()
    problem: str = ""


class HubError(ValueError):
    """A data set cannot be had; the message says what to do."""


@dataclass(frozen=True)
class _Part:
    """A parquet file of a repository, and which part of the data set it is of. subset: "": it has none."""

    subset: str
    split: str
    file: str


def hub_files(name: HubName, commit: str | None = None) -> HubFiles:
    """Download the parquet files of a name, unless the cache of huggingface_hub has them; raises HubError.

    commit: read this one, whatever the revision is now. Without a network, and with HF_HUB_OFFLINE, the cache alone is
    asked. A repository without parquet is read from the branch of its conversion, unless the name has a revision.
    """
    at = replace(name, revision=commit or name.revision)
    root, files = _listing(at)
    parts = [*_of_card(root, files)] or [*_of_names(files)]
    if not parts and at.revision is None:
        at = replace(name, revision=_CONVERTED)
        root, files = _listing(at)
        parts = [*_of_names(files)]
    if not parts:
        conversion = "leave out the revision, for the Hub's conversion to parquet, or " if name.revision else ""
        raise HubError(f"holds no parquet files; {conversion}download it, and convert it (docs/data.md)")
    chosen = _chosen(name, parts)
    if missing := _missing_shards(chosen):
        raise _uncached(at, f"{missing} files are missing")
    root = _snapshot(replace(at, revision=root.name), [escape(file) for file in chosen])
    return HubFiles(root.name, tuple(root / file for file in chosen))


def _listing(name: HubName) -> tuple[Path, list[str]]:
    """The folder of a commit, with its card if it has one, and the names of all files of the commit.

    Of a cache without a list of them: those that are there.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    root = _snapshot(name, ["README.md"])
    try:
        files = [each.path for each in get_cached_repo_tree(name.repo, repo_type="dataset", revision=root.name)]
    except CachedRepoTreeNotFoundError:
        files = [each.relative_to(root).as_posix() for each in root.rglob("*") if each.is_file()]
    return root, sorted(files)


def _snapshot(name: HubName, patterns: Sequence[str]) -> Path:
    """The folder `snapshots/<commit>` of the cache, with the files that match. Raises HubError."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        got = snapshot_download(name.repo, repo_type="dataset", revision=name.revision, allow_patterns=list(patterns))
    except GatedRepoError as error:
        url = f"https://huggingface.co/datasets/{name.repo}"
        raise HubError(f"is gated: the Hub asks who reads it; accept its terms at {url}, and {_LOG_IN}") from error
    except RepositoryNotFoundError as error:
        why = "there is no such file, and the Hub has no such data set, or a private one"
        raise HubError(f"{why}; correct the name or the path, or {_LOG_IN}") from error
    except RevisionNotFoundError as error:
        if name.revision == _CONVERTED:
            why = "holds no parquet files, and the Hub has not converted it"
            raise HubError(f"{why}; download it, and convert it (docs/data.md)") from error
        why = f"the data set has no revision {name.revision!r}"
        raise HubError(f"{why}; name a branch, a tag or a commit of it") from error
    except HFValidationError as error:
        raise HubError(f"there is no such file, and it is no name of a data set: {error}; correct it") from error
    except Exception as error:  # of the network, the server or the disk; not all of them are OSError
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise _uncached(name, "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else hidden(reason)) from error
    return Path(str(got))


def _uncached(name: HubName, reason: str) -> HubError:
    from huggingface_hub import constants

    at = "" if name.revision is None else f" --revision {name.revision}"
    fix = f"where there is a network: hf download {name.repo} --repo-type dataset{at}"
    if constants.HF_HUB_OFFLINE:
        fix = f"unset HF_HUB_OFFLINE, or {fix}"
    message = f"is no file here, nor complete in {constants.HF_HUB_CACHE}, and the Hub cannot be asked: {reason}"
    return HubError(f"{message}; {fix}")


def _of_card(root: Path, files: Iterable[str]) -> Iterator[_Part]:
    """The parts that `configs:` in the head of README.md names, whose patterns are as of a glob."""
    parquet = [file for file in files if file.endswith(".parquet")]
    for subset, split, patterns in _data_files(root / "README.md"):
        for file in parquet:
            # In `fnmatch`, `*` crosses folders.
            if any(fnmatch(file, each) and ("**" in each or file.count("/") == each.count("/")) for each in patterns):
                yield _Part(subset, split, file)


def _data_files(card: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Subset, split and patterns of files that a card names; none of one that cannot be read: strangers write them."""
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    try:
        known = metadata_load(card) if card.is_file() else None
    except (YAMLError, ValueError):
        return
    configs = (known or {}).get("configs")
    for config in filter(_is_record, configs if isinstance(configs, list) else ()):
        given = config.get("data_files")
        for entry in given if isinstance(given, list) else [given]:
            record = entry if _is_record(entry) else {"path": entry}
            paths = record.get("path")
            patterns = [str(each) for each in (paths if isinstance(paths, list) else [paths]) if each]
            yield str(config.get("config_name", "default")), str(record.get("split", "train")), patterns


def _is_record(value: object) -> bool:
    return isinstance(value, dict)


def _of_names(files: Iterable[str]) -> Iterator[_Part]:
    """The parts that names tell: `data/train-00000-of-00002.parquet`, `train.parquet`, `<subset>/<split>/0000.parquet`.

    A folder other than `data` is a subset.
    """
    for file in files:
        path = PurePosixPath(file)
        if path.suffix == ".parquet":
            split, folder = _SHARD.sub("", path.stem), path.parent
            if _NUMBERED.fullmatch(path.stem) and folder.name:
                split, folder = folder.name, folder.parent
            yield _Part("" if str(folder) in (".", "data") else folder.name, split, file)


def _chosen(name: HubName, parts: Sequence[_Part]) -> list[str]:
    """The files of the one split that is meant. Raises HubError, with the names that there are."""
    found = [part for part in parts if name.subset in (None, part.subset) and name.split in (None, part.split)]
    if name.subset is None and any(part.subset == "default" for part in found):
        found = [part for part in found if part.subset == "default"]
    kinds = list(dict.fromkeys((part.subset, part.split) for part in found or parts))
    if len(kinds) == 1 and found:
        return sorted({part.file for part in found})
    several = len({subset for subset, _ in kinds}) > 1
    names = ", ".join(
        str(replace(name, subset=subset if several or name.subset else None, split=split)) for subset, split in kinds
    )
    raise HubError(f"{'holds several splits' if found else 'the data set has no such split'}; name one: {names}")


def _missing_shards(files: Sequence[str]) -> int:
    """How many files are not there, where their names tell how many there are."""
    told = [found for file in files if (found := _SHARD.search(PurePosixPath(file).stem))]
    return max(0, int(told[0][1]) - len(told)) if told else 0
