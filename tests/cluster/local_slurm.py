"""A Slurm of two nodes on this machine: its own munge, controller and two `slurmd`, on loopback, ended afterwards.

Debian's slurmctld, slurmd, slurm-client and munge, as root, without systemd; nothing of a system service is touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ctpo_launchers.job import free_ports
from tests.cluster.packages import PATH
from tests.support.deadlines import awaited, scaled

NODES = {"n0": "127.0.0.2", "n1": "127.0.0.3"}
_CONFIGURATION = """
ClusterName=ctpo
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
KillWait={kill_wait}
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SlurmctldTimeout=60
SlurmdTimeout=60
"""
# slurmd 22.05 starts a cgroup plugin even for proctrack/linuxproc.
_CGROUP = """
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
ConstrainCores=no
ConstrainRAMSpace=no
ConstrainDevices=no
"""


class Slurm:
    """The running daemons; `environment` lets Slurm's commands find them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}

    def ask(self, *command: str) -> str:
        """The output of a command of Slurm."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=scaled(60), cwd=self.folder
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, script: Path, *options: str) -> str:
        """The number of the job."""
        return self.ask("sbatch", "--parsable", *options, str(script))

    def shown(self, job: str, field: str) -> str:
        """A field of `scontrol show job`."""
        found = re.search(rf"\b{field}=(\S*)", self.ask("scontrol", "show", "job", job))
        assert found is not None
        return found[1]

    def until(self, job: str, *states: str, seconds: float) -> str:
        """Wait until a job is in one of these states."""
        found = awaited(lambda: {self.shown(job, "JobState")}.intersection(states), seconds, every=0.5)
        assert found, f"job {job} is {self.shown(job, 'JobState')} ({self.shown(job, 'Reason')}), not {states}"
        return found.pop()

    def requeue(self, job: str) -> None:
        """Let the job be preempted, and begin again at once: Slurm would hold it back for two minutes."""
        self.ask("scontrol", "requeue", job)
        self.until(job, "PENDING", "COMPLETED", seconds=120)
        with contextlib.suppress(AssertionError):  # it may run again already
            self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")


@contextlib.contextmanager
def local_slurm(kill_wait: int = 30) -> Iterator[Slurm]:
    """Start it in a folder of its own, and end what was started."""
    folder = Path(tempfile.mkdtemp(prefix="ctpo-slurm-", dir="/tmp"))
    folder.chmod(0o755)
    slurm = Slurm(folder)
    try:
        _write(folder, kill_wait)
        _start(slurm)
        yield slurm
    finally:
        _cancel_all(slurm)
        for name in ("slurmd.n0", "slurmd.n1", "slurmctld", "munged"):
            _end(folder / f"{name}.pid")
        shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path, kill_wait: int) -> None:
    host = os.uname().nodename.partition(".")[0]
    ports = free_ports("127.0.0.1", 16800 + os.getpid() % 500 * 4, 3)
    text = _CONFIGURATION.format(host=host, folder=folder, ports=ports, kill_wait=kill_wait)
    cores = os.cpu_count() or 1
    for index, (name, address) in enumerate(NODES.items()):
        (folder / f"spool.{name}").mkdir()
        text += f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={ports[1 + index]} CPUs={cores}"
        text += " RealMemory=4000 State=UNKNOWN\n"
    text += "PartitionName=main Nodes=n[0-1] Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES\n"
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text(_CGROUP)
    key = folder / "munge.key"
    key.touch(0o400)
    key.write_bytes(secrets.token_bytes(1024))


def _start(slurm: Slurm) -> None:
    folder = slurm.folder
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
    options = [f"--{name}={folder / file}" for name, file in (files | {"seed-file": "munge.seed"}).items()]
    slurm.ask("munged", "--force", *options)
    slurm.ask("slurmctld", "-f", str(folder / "slurm.conf"), "-c")
    for name in NODES:
        slurm.ask("slurmd", "-N", name, "-f", str(folder / "slurm.conf"))
    idle = ("sinfo", "--noheader", "--format=%D", "--states=idle")
    if not awaited(lambda: slurm.ask(*idle) == str(len(NODES)), 60, every=0.5):
        logs = "".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
        raise AssertionError(f"{slurm.ask(*idle) or 0} of {len(NODES)} nodes are idle\n{logs}")


def _cancel_all(slurm: Slurm) -> None:
    """End what runs, by force after a minute: the steps of a job outlive the daemons."""
    for options in ((), ("--signal=KILL", "--full")):
        with contextlib.suppress(subprocess.TimeoutExpired, AssertionError):  # the controller did not come up
            slurm.ask("scancel", "--user=root", *options)
            awaited(lambda: not slurm.ask("squeue", "--noheader"), 60, every=0.5)


def _end(pid_file: Path) -> None:
    """End the daemon that wrote this file, and wait for it."""
    if not pid_file.exists():
        return
    pid = int(pid_file.read_text())
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        deadline = time.monotonic() + scaled(20)
        while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        else:
            return
