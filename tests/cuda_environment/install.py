"""The environment of docs/install_cuda.md, by its commands: `python -m tests.cuda_environment.install FOLDER PYTHON`.

Steps 1 and 2 of the page are typed as they stand there, with the folder of this machine. A last step
makes a driver library that shows no GPU, so that everything can be imported without one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "install_cuda.md"
DISK_GB = 20
STEPS = {"lock": "## 1. ", "transformer-engine": "## 2. "}
"""Step -> how its heading begins."""

NOT_HERE = ("sudo ", "ctpo doctor", "python3.12 -m venv", 'python -c "import torch, transformer_engine')
"""How lines begin that need root, a GPU, or make the environment, which is there by then."""


def commands(page: str, step: str) -> list[str]:
    """The shell lines of a step. Raises LookupError when the page has no such step, or no block."""
    section = next((part for part in re.split(r"(?m)^(?=## )", page) if part.startswith(STEPS[step])), None)
    if section is None:
        raise LookupError(f"{PAGE.name} has no section that begins with {STEPS[step]!r}")
    block = re.search(r"(?:^    \S.*\n)+", section, re.MULTILINE)
    if block is None:
        raise LookupError(f"{PAGE.name}: the section {STEPS[step]!r} has no block of commands")
    lines = [re.split(r"\s{2,}# ", line.strip())[0] for line in block[0].splitlines()]
    kept = [line for line in lines if not line.startswith(NOT_HERE)]
    return [re.sub(r"MAX_JOBS=\d+", f"MAX_JOBS={os.cpu_count() or 1}", line) for line in kept]  # 1.8 GB of memory each


def run(lines: list[str], folder: Path, log: Path) -> None:
    """One shell for all lines, in the environment. Raises RuntimeError that names the log when one of them fails."""
    script = "\n".join(["set -eu", f". {folder / 'bin' / 'activate'}", "set -x", *lines])
    with log.open("w") as file:
        done = subprocess.run(["bash", "-c", script], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"a command of {PAGE.name} failed with status {done.returncode}; all of {log}:\n{tail}")


def build_driver(folder: Path, site: Path) -> None:
    """`folder/libcuda.so.1`: every function of the driver that installed libraries link; all say "no device".

    site: site-packages. Needs gcc and nm.
    """
    names = set(re.findall(r"\bcu[A-Z]\w*", (site / "nvidia/cu13/include/cuda.h").read_text(errors="replace")))
    patterns = ("vllm/**/*.so", "torch/lib/*.so", "transformer_engine/**/*.so", "nvidia/*/lib/*.so*")
    for library in [path for pattern in patterns for path in site.glob(pattern)]:
        listed = subprocess.run(["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=False)
        names |= set(re.findall(r"\b(cu[A-Z]\w*)", listed.stdout))
    others = re.compile(r"cu(blas|dnn|sparse|solver|fft|rand|file|da)", re.IGNORECASE)
    source = folder / "driver.c"
    folder.mkdir(parents=True, exist_ok=True)
    source.write_text("\n".join(map(_function, sorted(name for name in names if not others.match(name)))))
    gcc = ["gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1", source]
    subprocess.run(gcc, check=True)


def _function(name: str) -> str:
    """C of one function of the driver: CUDA_ERROR_NO_DEVICE (100), but for what is asked before any device."""
    if name in ("cuGetErrorString", "cuGetErrorName"):
        return f'int {name}(int e, const char **s) {{ *s = "no device"; return 0; }}'
    if name == "cuDriverGetVersion":
        return f"int {name}(int *v) {{ *v = 13000; return 0; }}"
    if name.startswith("cuGetProcAddress"):
        return f"int {name}(const char *s, void **p) {{ if (p) *p = 0; return 500; }}"
    return f"int {name}() {{ return 100; }}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("python")
    given = parser.parse_args(arguments)
    folder: Path = given.folder.resolve()
    if (free := shutil.disk_usage(folder.parent).free / 1e9) < DISK_GB and not folder.exists():
        print(f"{folder.parent} has {free:.0f} GB free; this environment takes up to {DISK_GB}", file=sys.stderr)
        return 2
    asked = "import sys; print('%d.%d' % sys.version_info[:2])"
    python = subprocess.run([given.python, "-c", asked], check=True, capture_output=True, text=True).stdout.strip()
    if not (folder / "bin" / "python").exists():
        subprocess.run([given.python, "-m", "venv", folder], check=True)
    page = PAGE.read_text()
    for step in STEPS:
        if (done := folder / f".{step}").exists():
            continue
        print(f"{step}: {PAGE.name}, {STEPS[step].strip('# ')}", flush=True)
        began = time.monotonic()
        run(commands(page, step), folder, folder / f"{step}.log")
        done.touch()
        print(f"  {time.monotonic() - began:.0f} s", flush=True)
    if not (folder / "driver" / "libcuda.so.1").exists():
        build_driver(folder / "driver", folder / "lib" / f"python{python}" / "site-packages")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
