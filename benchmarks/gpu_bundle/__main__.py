"""`python -m benchmarks.gpu_bundle OUT --arch sm_90`: what a GPU machine without the internet lacks to train.

Takes the CUDA wheels of the lock, keeps one GPU architecture of their libraries, and leaves out what `contents.yaml`
names. OUT then holds the archives, `manifest.json` and `unpack.sh`. On the machine, with a checkout:

    sh OUT/unpack.sh TARGET && export PYTHONPATH=TARGET

Exit status 1 when an archive is above the limit, or pip fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.gpu_bundle.archive import MIB, Packed, pack, refuse_above
from benchmarks.gpu_bundle.contents import Contents, Selection, model_members
from benchmarks.gpu_bundle.wheels import Lock
from benchmarks.kernels.report import commit

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = _arguments(argv)
    contents = Contents.read(options.contents)
    if options.arch not in contents.architectures:
        known = ", ".join(contents.architectures)
        print(f"--arch {options.arch}: {options.contents} leaves out files for {known} alone", file=sys.stderr)
        return 2
    lock = Lock(ROOT / contents.lock)
    options.out.mkdir(parents=True, exist_ok=True)
    for stale in (*options.out.glob("*.tar.xz"), options.out / "manifest.json"):
        stale.unlink(missing_ok=True)
    try:
        wheels = lock.wheels(contents.packages, contents.from_source, contents.python, options.cache)
        selection = Selection.of(contents, wheels)
        packed = _pack(selection, options)
        refuse_above(options.limit_mib, packed)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    manifest = _manifest(selection, lock, packed, options)
    (options.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.copy(HERE / "unpack.sh", options.out)
    for archive in packed:
        print(
            f"{options.out / archive.name}: {archive.bytes / MIB:.1f} MiB, unpacked {archive.unpacked_bytes / MIB:.0f}"
        )
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_bundle", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the bundle")
    parser.add_argument("--arch", required=True, metavar="sm_90", help="architecture of the GPU")
    parser.add_argument(
        "--limit-mib", type=float, default=float("inf"), metavar="MIB", help="largest archive that may be carried; any"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="model to carry, as TARGET/models/NAME")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "gpu_bundle", metavar="DIR", help="for wheels")
    parser.add_argument("--contents", type=Path, default=HERE / "contents.yaml", metavar="FILE", help="what is carried")
    options = parser.parse_args(argv)
    if options.model is not None:
        options.model = options.model.resolve()
        if not (options.model / "config.json").is_file():
            parser.error(f"--model {options.model}: no model, it has no config.json")
    return options


def _pack(selection: Selection, options: argparse.Namespace) -> list[Packed]:
    """All archives at once: compression is what takes long, and it leaves the interpreter's lock."""

    architecture = int(options.arch.removeprefix("sm_"))

    def one(archive: str) -> Packed:
        carries_model = options.model is not None and archive == selection.contents.models
        model = model_members(options.model) if carries_model else ()
        return pack(options.out / f"{archive}.tar.xz", chain(selection.members(archive, architecture), model))

    with ThreadPoolExecutor() as pool:
        return list(pool.map(one, selection.contents.archives))


def _manifest(selection: Selection, lock: Lock, packed: list[Packed], options: argparse.Namespace) -> dict[str, Any]:
    contents = selection.contents
    archives = [{key: value for key, value in asdict(archive).items() if key != "added"} for archive in packed]
    return {
        "commit": commit(),
        "architecture": options.arch,
        "python": contents.python,
        "archives": archives,
        "models": [options.model.name] if options.model else [],
        "packages": {name: lock.versions[name] for name in sorted(contents.packages)},
        "machine": contents.machine,
        "left_out": {
            pattern: {"why": why, **selection.left_out[pattern]} for pattern, why in contents.left_out.items()
        },
        "not_needed": contents.not_needed,
        "pruned": dict(sorted(selection.pruned.items())),
    }


if __name__ == "__main__":
    sys.exit(main())
