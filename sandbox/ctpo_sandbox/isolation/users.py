"""User ids for runs that no other server of the machine has, and no account.

The kernel counts threads, signals and pages of pipes by user: runs of one id share those limits.
"""

import errno
import grp
import pwd
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

FREE = (range(0x78000000, 0x7FFE0000), range(60706, 61184))
"""Ids that are given to nothing else (https://systemd.io/UIDS-GIDS); the latter for containers of 65,536 ids."""


class UserIds:
    """Ids that this process holds until `close`, or until it ends, however it does.

    An id is held by a socket with its name, which the kernel removes with the process. Servers in different network
    namespaces do not see each other's names: there the random choice among 134 million ids keeps them apart.
    """

    def __init__(self, count: int) -> None:
        """Choose `count` ids; none where this user namespace maps no free ones. Raises OSError if too few are left."""
        self._names: list[socket.socket] = []
        self.ids: tuple[int, ...] = ()
        usable = next((ids for ids in FREE if _is_mapped(ids)), None)
        if usable is not None:
            self.ids = self._chosen(usable, count)

    def close(self) -> None:
        """Give them back."""
        for name in self._names:
            name.close()
        self._names.clear()

    def _chosen(self, ids: range, count: int) -> tuple[int, ...]:
        first, chosen = secrets.randbelow(len(ids)), list[int]()
        for offset in range(len(ids)):
            uid = ids[(first + offset) % len(ids)]
            if not _is_account(uid) and self._hold(uid):
                chosen.append(uid)
            if len(chosen) == count:
                return tuple(chosen)
        self.close()
        raise OSError(
            errno.EUSERS,
            f"{count} user ids are needed, one for each slot and one for the self-test, and only {len(chosen)} of "
            f"{ids[0]} to {ids[-1]} are left by other servers and accounts; lower --slots, or end another server",
        )

    def _hold(self, uid: int) -> bool:
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0ctpo-sandbox-user-{uid}")
        except OSError as error:
            name.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        self._names.append(name)
        return True


def _is_mapped(ids: range) -> bool:
    """Whether a process here may have them all, as user and as group."""
    return all(
        any(
            int(first) <= ids[0] and ids[-1] < int(first) + int(count)
            for first, _, count in map(str.split, Path(f"/proc/self/{kind}_map").read_text().splitlines())
        )
        for kind in ("uid", "gid")
    )


def _is_account(uid: int) -> bool:
    lookups: tuple[Callable[[int], Any], ...] = (pwd.getpwuid, grp.getgrgid)
    for look_up in lookups:
        try:
            look_up(uid)
            return True
        except KeyError:
            pass
    return False
