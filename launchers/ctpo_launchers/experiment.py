"""One job as a NeMo Run experiment: `ctpo launch`."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Iterator
from typing import Any

from ctpo_launchers.environment import ROOT
from ctpo_launchers.jobs import Launch, VerbJob, script_of, slurm_executor
from ctpo_sandbox import temporary

_LOOPBACK = "127.0.0.{}"
_SUCCEEDED = "SUCCEEDED"


def script(launch: Launch | VerbJob) -> str:
    """Return the batch script; writes only to a temporary folder."""
    with (
        temporary.folder("ctpo-launch-") as folder,
        _experiment(launch, str(folder), dry=True) as experiment,
    ):
        with contextlib.redirect_stdout(io.StringIO()):
            experiment.dryrun(log=False, delete_exp_dir=False)
        (written,) = folder.rglob("*_sbatch.sh")
        return written.read_text(encoding="utf-8")


def submit(launch: Launch | VerbJob) -> tuple[str, int]:
    """Submit to Slurm, or run here to the end; returns the experiment's id, and the worst exit status of the nodes.

    Raises LaunchError for uncommitted code.
    """
    local = launch.cluster.executor == "local"
    files = launch.status_files
    if isinstance(launch, Launch):
        launch.write_config()
    for file in files if local or launch.check else ():
        file.unlink(missing_ok=True)
    with _experiment(launch, launch.cluster.job_dir, dry=False) as experiment:
        experiment.run(detach=not local, tail_logs=local)
    if not local:
        return str(experiment._id), 0
    # NeMo Run waits at the end of the context, but does not return statuses; a node without a status was killed.
    statuses = [int(file.read_text()) if file.is_file() else 1 for file in files]
    statuses += [] if files else [int(job.state.name != _SUCCEEDED) for job in experiment.jobs]
    return str(experiment._id), max(statuses)


@contextlib.contextmanager
def _experiment(launch: Launch | VerbJob, folder: str, *, dry: bool) -> Iterator[Any]:
    os.environ["NEMORUN_HOME"] = folder
    import nemo_run as run

    os.chdir(ROOT)  # NeMo Run packages the repository of the current directory
    identity = f"{launch.name}_{'dry-run' if dry else time.strftime('%Y%m%d-%H%M%S')}"
    with run.Experiment(
        launch.name,
        id=identity,
        base_dir=folder,
        log_level="WARNING",
        clean_mode=dry,
        skip_status_at_exit=True,
        enable_goodbye_message=False,
    ) as experiment:
        if launch.cluster.executor == "slurm":
            packager = run.Packager() if dry else run.GitArchivePackager(check_uncommitted_changes=True)
            executor = slurm_executor(launch.cluster, launch.nodes, packager, launch.workdir)
            experiment.add(script_of(launch), executor=executor, name=launch.name)
        else:
            for rank in range(launch.nodes):
                task = script_of(launch, *_of_local_node(launch.nodes, rank))
                name = f"node{rank}" if isinstance(launch, Launch) else launch.name
                experiment.add(task, executor=run.LocalExecutor(), name=name)
        yield experiment


def _of_local_node(nodes: int, rank: int) -> list[str]:
    """Arguments of a node on this machine; several nodes use loopback addresses."""
    if nodes == 1:
        return []
    return ["--nodes", str(nodes), "--node-rank", str(rank), "--head", _LOOPBACK.format(2), "--address",
            _LOOPBACK.format(2 + rank)]  # fmt: skip
