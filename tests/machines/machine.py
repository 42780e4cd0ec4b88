"""A guest: a kernel under QEMU, with the host's files to read, a memory file system over them, and no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.machines.initramfs import initramfs
from tests.machines.packages import EMULATOR, Kernel, busybox

_POLL_S = 0.2
_END_S = 30
_CONSOLE_CHARS = 3000
_VIRTUALISED = any(Path("/sys/module", name).exists() for name in ("kvm_intel", "kvm_amd"))
ACCELERATED = _VIRTUALISED and os.access("/dev/kvm", os.R_OK | os.W_OK)
"""By the processor; other kinds of KVM emulate kernels that are not made for them, and slower than QEMU does."""

SLOWNESS = 1 if ACCELERATED else 10
"""How much longer everything takes where the processor is emulated."""


class Machine:
    """Boots at entry; `command` is run by its shell, which sees the host's folder `results` and may write there."""

    def __init__(self, kernel: Kernel, results: Path, command: str) -> None:
        self.console = results.with_suffix(".console.log")
        self._results = results
        shutil.rmtree(results, ignore_errors=True)
        results.mkdir(parents=True)
        first = results.with_suffix(".initramfs")
        first.write_bytes(initramfs(busybox(), kernel.modules, results, command))
        machine = "-machine q35,accel=kvm -cpu host" if ACCELERATED else "-machine q35,accel=tcg -cpu max"
        self._command = [
            *f"{EMULATOR} {machine} -m 4G -smp 2 -nodefaults -no-reboot -display none -nic none".split(),
            *("-kernel", str(kernel.image), "-initrd", str(first), "-append", "console=ttyS0 panic=-1"),
            *("-serial", f"file:{self.console}"),
            *("-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"),
            *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
            *("-fsdev", f"local,id=results,path={results},security_model=none"),
            *("-device", "virtio-9p-pci,fsdev=results,mount_tag=results"),
        ]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            self._process.communicate(timeout=_END_S * SLOWNESS if kind is None else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            if kind is None:
                raise

    def wait_for(self, name: str, seconds: float) -> str:
        """What the guest writes into the file `name`. Raises TimeoutError, and ChildProcessError when it is gone."""
        deadline = time.monotonic() + seconds * SLOWNESS
        file = self._results / name
        while not file.exists():
            if self._process.poll() is not None:
                _, said = self._process.communicate()
                raise ChildProcessError(f"the guest ended before {name}: {said}{self._tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {seconds * SLOWNESS:.0f} s for the guest's {name}: {self._tail()}")
            time.sleep(_POLL_S)
        return file.read_text()

    def _tail(self) -> str:
        said = self.console.read_text(errors="replace") if self.console.exists() else ""
        return f"\n{said[-_CONSOLE_CHARS:]}\n(all of it: {self.console})"
