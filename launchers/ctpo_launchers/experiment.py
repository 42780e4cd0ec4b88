"""A job as a NeMo Run experiment: one node program on every node, from a cluster file and a configuration."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctpo_launchers.clusters import Cluster
from ctpo_launchers.environment import ROOT
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.config import Config, dump
from ctpo_sandbox import temporary

TEMPLATES = Path(__file__).parent / "templates"
_CODE = "/nemo_run/code"
"""NeMo Run's placeholder for the folder with the code, which it replaces outside of containers."""
_LOOPBACK = "127.0.0.{}"


@dataclass(frozen=True)
class Launch:
    """A submission: `nodes` node programs for one configuration, started in `workdir`."""

    config: Config
    cluster: Cluster
    nodes: int
    workdir: Path

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def config_file(self) -> Path:
        """A copy of the resolved configuration, so that a job requeued days later reads what was submitted."""
        digest = hashlib.sha256(dump(self.config).encode()).hexdigest()[:8]
        return Path(self.cluster.job_dir) / "configs" / f"{self.name}-{digest}.yaml"

    def arguments(self, *of_node: str) -> list[str]:
        """Arguments of the node program."""
        cluster = self.cluster
        options = ["--workdir", str(self.workdir), "--start-timeout", f"{cluster.start_timeout_s:g}", *of_node]
        options += [] if cluster.interface is None else ["--interface", cluster.interface]
        return [*options, "--", str(self.config_file), "run.resume=auto"]

    def write_config(self) -> None:
        """Write `config_file`, for this user alone: it has the secrets that the job needs."""
        self.config_file.parent.mkdir(parents=True, exist_ok=True)
        self.config_file.unlink(missing_ok=True)
        opened = os.open(self.config_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(opened, "w", encoding="utf-8") as file:
            file.write(dump(self.config, whole=True))


def script(launch: Launch) -> str:
    """The batch script; writes only to a temporary folder."""
    with (
        temporary.folder("ctpo-launch-") as folder,
        _experiment(launch, str(folder), dry=True) as experiment,
    ):
        with contextlib.redirect_stdout(io.StringIO()):
            experiment.dryrun(log=False, delete_exp_dir=False)
        (written,) = folder.rglob("*_sbatch.sh")
        return written.read_text(encoding="utf-8")


def submit(launch: Launch) -> tuple[str, int]:
    """Submit to Slurm, or run here to the end; returns the experiment's id, and the worst exit status of the nodes.

    Raises LaunchError for uncommitted code.
    """
    launch.write_config()
    local = launch.cluster.executor == "local"
    folder = launch.workdir / RunPaths(launch.config.run.directory).nodes
    files = [folder / f"node{rank}" / "status" for rank in range(launch.nodes)] if local else []
    for file in files:
        file.unlink(missing_ok=True)
    with _experiment(launch, launch.cluster.job_dir, dry=False) as experiment:
        experiment.run(detach=not local, tail_logs=local)
    # NeMo Run waits at the end of the context, but does not return statuses; a node without a status was killed.
    statuses = [int(file.read_text()) if file.is_file() else 1 for file in files]
    return str(experiment._id), max(statuses, default=0)


@contextlib.contextmanager
def _experiment(launch: Launch, folder: str, *, dry: bool) -> Iterator[Any]:
    os.environ["NEMORUN_HOME"] = folder
    import nemo_run as run
    from nemo_run.core.execution import slurm

    os.chdir(ROOT)  # NeMo Run packages the repository of the current directory
    slurm.fill_template = _with_our_template
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
            experiment.add(_task(run, launch), executor=_slurm(run, launch, packager), name=launch.name)
        else:
            for rank in range(launch.nodes):
                task, name = _task(run, launch, *_of_local_node(launch.nodes, rank)), f"node{rank}"
                experiment.add(task, executor=run.LocalExecutor(), name=name)
        yield experiment


def _task(run: Any, launch: Launch, *of_node: str) -> Any:
    """Quotes the arguments: NeMo Run joins them without quoting if its launcher is not torchrun."""
    slurm = launch.cluster.executor == "slurm"
    arguments = launch.arguments(*of_node)
    return run.Script(
        path="ctpo_launchers.node",
        m=True,
        entrypoint=_interpreter(launch.cluster),
        args=[shlex.quote(text) for text in arguments] if slurm else arguments,
        env={} if slurm else launch.cluster.env | _paths(str(ROOT)),
    )


def _interpreter(cluster: Cluster) -> str:
    """The interpreter; on this machine, of the environment that called `ctpo launch`."""
    return os.environ.get("CTPO_PYTHON", cluster.python) if cluster.executor == "local" else cluster.python


def _of_local_node(nodes: int, rank: int) -> list[str]:
    """Arguments of a node on this machine; several nodes use loopback addresses."""
    if nodes == 1:
        return []
    return ["--nodes", str(nodes), "--node-rank", str(rank), "--head", _LOOPBACK.format(2), "--address",
            _LOOPBACK.format(2 + rank)]  # fmt: skip


def _paths(code: str) -> dict[str, str]:
    """PYTHONPATH of the job's code, since the working directory may be another checkout."""
    folders = [code, *(f"{code}/{folder}" for folder in ("kernels", "sandbox", "launchers"))]
    return {"PYTHONPATH": ":".join(folders), "PYTHONSAFEPATH": "1"}


def _slurm(run: Any, launch: Launch, packager: Any) -> Any:
    cluster = launch.cluster
    extra = {"requeue": True, "signal": f"TERM@{cluster.signal_s}", **cluster.sbatch}
    return run.SlurmExecutor(
        account=cluster.account,
        partition=cluster.partition,
        qos=cluster.qos,
        nodes=launch.nodes,
        ntasks_per_node=1,
        gpus_per_node=cluster.gpus_per_node,
        cpus_per_task=cluster.cpus_per_task,
        mem=cluster.mem,
        exclusive=cluster.exclusive,
        time=cluster.time,
        job_name_prefix="ctpo.",
        container_image=cluster.container_image,
        container_mounts=list(dict.fromkeys(f"{path}:{path}" for path in (cluster.job_dir, str(launch.workdir))))
        + list(cluster.container_mounts),
        container_env=[*_FOR_CONTAINERS, *cluster.container_env],
        additional_parameters=extra,
        env_vars={name: shlex.quote(value) for name, value in (cluster.env | _paths(_CODE)).items()},
        setup_lines="\n".join(cluster.setup) or None,
        retries=cluster.retries,
        tunnel=run.LocalTunnel(job_dir=f"{cluster.job_dir}/experiments"),
        packager=packager,
        poll_estimated_start_time=False,
    )


_FOR_CONTAINERS = ("CTPO_HOSTS", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED")


def _with_our_template(_name: str, variables: dict[str, Any], _folder: str | None = None) -> str:
    """NeMo Run has no setting for its template, which would requeue a job even if its configuration is invalid."""
    from nemo_run.core.execution.utils import fill_template

    quoted = [
        text.replace("${SLURM_RESTART_COUNT:-0}", '"${SLURM_RESTART_COUNT:-0}"') for text in variables["srun_commands"]
    ]
    return f"{fill_template('slurm.sh.j2', {**variables, 'srun_commands': quoted}, str(TEMPLATES))}\n"
