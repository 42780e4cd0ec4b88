"""Everything that a run gives up before its first line, by level of isolation and in the required order."""

import os
import resource
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ctpo_sandbox.isolation import filters, landlock, libc, namespaces
from ctpo_sandbox.isolation.readable import readable_trees
from ctpo_sandbox.isolation.work import RunDirectory
from ctpo_sandbox.records import USERS_OF_RUNS, Limits

_MB = 1024 * 1024
_NOT_NEEDED = (
    *(resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_SIGPENDING),  # counted by user
    resource.RLIMIT_CORE,
)
WorkDirectory = RunDirectory | namespaces.RunMount


class Confinement:
    """Restrictions that a worker applies to itself and its children, at one level of isolation.

    Created in the template before it enters its box, because libseccomp is not visible inside; `open_files` is called
    inside. So everything a child needs is compiled and open before the first fork. `missing` maps each unavailable
    protection of this level to the reason. Raises OSError where this machine does not offer the level, saying what is
    missing.
    """

    def __init__(self, level: str, limits: Limits, user_ids: Sequence[int], binding: str | None = None) -> None:
        """user_ids: of the slots, in their order; empty: none that other runs do not have. binding: see `filters`."""
        self.level, self.limits, self._user_ids = level, limits, user_ids
        self.missing: dict[str, str] = {}
        self.boxed = level.startswith("namespaces")
        self._own_users = self._may_change_user()
        if level == "namespaces-root" and os.geteuid() == 0 and not self._own_users:
            raise OSError(f"it needs users of their own for runs: {self.missing['own user']}")
        self._filter: filters.ChildFilter | None = None
        self._worker_filter: filters.WorkerFilter | None = None
        if level != "none":
            self._filter, self._worker_filter = self._filters(binding)
        self._files: landlock.FileRules | None = None
        self._uid: int | None = None
        self._ruleset: int | None = None

    @property
    def own_user(self) -> bool:
        """Whether the calling worker's runs have their own user, so that the kernel can count their threads."""
        return self._uid is not None

    @property
    def filters_calls(self) -> bool:
        """Whether system calls are filtered: a child has no children then, and a SIGKILL of it came from outside."""
        return self._filter is not None

    @property
    def _shows_open_files(self) -> bool:
        """Whether processes of the same user may see what a run has open. Landlock keeps others out."""
        return self.level == "landlock"

    @property
    def file_attributes(self) -> bool:
        """Whether a child can change owners, modes and dates of files: not by Landlock if others have the same user."""
        return self.level != "landlock" or self._own_users

    def _filters(self, binding: str | None) -> tuple[filters.ChildFilter, filters.WorkerFilter]:
        try:
            return filters.compiled(file_attributes=self.file_attributes, binding=binding)
        except (RuntimeError, OSError) as error:
            raise OSError(f"seccomp: {error}; install libseccomp2 and pyseccomp") from error

    def open_files(self) -> None:
        """Find the files that snippets may read. Raises OSError where the level needs Landlock."""
        if not self.boxed and self.level != "landlock":
            return
        try:
            self._files = landlock.FileRules()
        except OSError as error:
            if not self.boxed:
                raise OSError(f"Landlock: {error}") from error
            self.missing["landlock"] = str(error)  # the box hides files too

    def _may_change_user(self) -> bool:
        if self.level not in USERS_OF_RUNS:
            self.missing["own user"] = "snippets run as the server's user"
            return False
        if os.geteuid() != 0:
            self.missing["own user"] = "the server is not root"
            return False
        if not self._user_ids:
            self.missing["own user"] = "no free user ids are mapped here (/proc/self/uid_map)"
            return False
        hidden = None if self.boxed else _hidden_from_others()
        if hidden is not None:
            self.missing["own user"] = f"other users may not read the interpreter ({hidden})"
        return hidden is None

    def enter_worker(self, slot: int, directory: str) -> WorkDirectory:
        """Confine the calling worker of `slot`, irreversibly; its runs' directories are created in `directory`."""
        self._uid = self._user_ids[slot] if self._own_users else None
        work: WorkDirectory
        if self.boxed:
            namespaces.own_mounts()
            limits = self.limits
            work = namespaces.RunMount(megabytes=limits.disk_mb, files=limits.disk_files, owner=self._uid)
            if self._files is not None:  # reopened: this worker's /proc is another file system
                self._ruleset = landlock.FileRules().ruleset(namespaces.WORK)
        else:
            work = RunDirectory(directory, self._uid, self.limits, sees_open_files=self._shows_open_files)
        for kind in _NOT_NEEDED:
            resource.setrlimit(kind, (0, 0))
        if self._own_users:
            os.setgroups(())
        if self._worker_filter is not None:
            self._worker_filter.load()
        return work

    def ruleset(self, directory: str) -> int | None:
        """Descriptor of the file rules for the calling worker's next run in the new `directory`, if any."""
        if not self.boxed and self._files is not None:
            if self._ruleset is not None:
                os.close(self._ruleset)
            self._ruleset = self._files.ruleset(directory)
        return self._ruleset

    def harmless_steps(self) -> list[libc.Step]:
        """Return the steps in Python code that do not change the calling process."""
        checking = partial(libc.check_parent, os.getppid())
        return [checking] if self._filter is None else [checking, partial(self._filter.allow_self)]

    def steps(self, cpu_limit_s: int, worker: int) -> list[libc.Step]:
        """Steps that confine a child forked by the calling process `worker`, after its rules are closed.

        If any step fails, the child is less confined than promised and must not run the snippet.
        """
        steps: list[libc.Step] = [partial(resource.setrlimit, *limit) for limit in self._limits_of_a_run(cpu_limit_s)]
        if self._uid is not None:
            steps += [partial(change, self._uid, self._uid, self._uid) for change in (os.setresgid, os.setresuid)]
        steps.append(libc.dropping_capabilities())
        steps.append(libc.setting_dumpable(self._shows_open_files))
        if not self.boxed:  # there a worker is process 1 of its namespace, and the kernel kills the others with it
            steps.append(libc.dying_with_parent(signal.SIGKILL))  # after the change of user, which would clear it
            steps.append(partial(libc.check_parent, worker))
        return steps if self._filter is None else [*steps, partial(self._filter.allow_self), self._filter.loading()]

    def _limits_of_a_run(self, cpu_limit_s: int) -> list[tuple[int, tuple[int, int]]]:
        limits = self.limits
        hard = {
            resource.RLIMIT_AS: limits.address_mb * _MB,
            resource.RLIMIT_FSIZE: limits.file_mb * _MB,
            resource.RLIMIT_NOFILE: limits.open_files,
        }
        if self._uid is not None:  # the limit counts all processes of a user
            hard[resource.RLIMIT_NPROC] = limits.threads
        # The soft limit raises SIGXCPU, which a snippet may ignore; the hard limit kills one second later.
        cpu = (resource.RLIMIT_CPU, (cpu_limit_s, cpu_limit_s + 1))
        return [*((kind, (value, value)) for kind, value in hard.items()), cpu]


def _hidden_from_others() -> str | None:
    """A directory on the way to the interpreter that only its owner may enter, if there is one."""
    for tree in readable_trees():
        for path in [Path(tree), *Path(tree).parents]:
            if not path.stat().st_mode & 0o001:
                return str(path)
    return None
