"""The first file system of a guest: busybox, a few modules, and the script that goes on to the host's files."""

from __future__ import annotations

import lzma
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

_FOLDERS = ("bin", "modules", "proc", "sys", "dev", "host", "changes", "merged")
_SCRIPT = """#!/bin/busybox sh
set -e
/bin/busybox --install -s /bin
export PATH=/bin:/usr/sbin:/usr/bin:/sbin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
for module in /modules/*; do insmod $module; done
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro host /host
mount -t tmpfs none /changes
mkdir /changes/files /changes/work
mount -t overlay -o lowerdir=/host,upperdir=/changes/files,workdir=/changes/work none /merged
mount -t 9p -o trans=virtio,version=9p2000.L results /merged{results}
for folder in proc sys dev; do mount -o move /$folder /merged/$folder; done
mkdir -p /merged/dev/pts /merged/dev/shm
mount -t devpts none /merged/dev/pts
mount -t tmpfs -o mode=1777 none /merged/dev/shm
ip link set lo up
exec switch_root /merged /bin/sh {command}
"""


def initramfs(busybox: Path, modules: Sequence[Path], results: Path, command: str) -> bytes:
    """command: of a shell, in the host's files under whatever the guest changes, but for `results`, which both see."""
    folders = [(name, stat.S_IFDIR | 0o755, b"") for name in _FOLDERS]
    script = _SCRIPT.format(results=results, command=command).encode()
    programs = [("bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes()), ("init", stat.S_IFREG | 0o755, script)]
    loaded = [
        (f"modules/{number:02d}-{name}", stat.S_IFREG | 0o644, content)
        for number, (name, content) in enumerate(_in_order(modules))
    ]
    return b"".join(_archive([*folders, *programs, *loaded]))


def _in_order(modules: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """What a module needs goes before it, where it is not part of the kernel itself."""
    contents = {path.name.split(".")[0]: _content(path) for path in modules}
    needs = {}
    for name, content in contents.items():
        named = re.search(rb"\0depends=([^\0]*)\0", content)
        needs[name] = set(named[1].decode().replace("-", "_").split(",")) & contents.keys() if named else set()
    while needs:
        name = next(name for name, needed in needs.items() if not needed & needs.keys())
        yield name, contents[name]
        del needs[name]


def _content(module: Path) -> bytes:
    content = module.read_bytes()
    return lzma.decompress(content) if module.suffix == ".xz" else content


def _archive(files: Sequence[tuple[str, int, bytes]]) -> Iterator[bytes]:
    """cpio's format `newc`."""
    for number, (name, mode, content) in enumerate([*files, ("TRAILER!!!", 0, b"")], 1):
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        for part in (head, content):
            yield part + bytes(-len(part) % 4)
