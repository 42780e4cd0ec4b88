"""Our jobs as NeMo Run has them, a `run.Script` and an executor each: for `ctpo launch`, and for users' experiments."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ctpo_launchers import LaunchError
from ctpo_launchers.clusters import Cluster, is_word, load_cluster
from ctpo_launchers.command import COMMANDS
from ctpo_launchers.environment import ROOT
from ctpo_launchers.timeouts import SUBMIT_COMMAND_TIMEOUT_S
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.config import Config, dump, load_config

ClusterFile = Cluster | Path | str
"""A cluster file, or what was read of it."""
_CODE = "/nemo_run/code"
"""NeMo Run's placeholder for the folder with the code, which it replaces outside of containers."""
TEMPLATES = Path(__file__).parent / "templates"
"""Our batch script in place of NeMo Run's, which has no setting for it and would requeue a job that is refused."""
_FOR_CONTAINERS = ("CTPO_HOSTS", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED")


@dataclass(frozen=True)
class Launch:
    """`nodes` node programs for one configuration, started in `workdir`. check: they look at the nodes, and do not
    train."""

    config: Config
    cluster: Cluster
    nodes: int
    workdir: Path
    check: bool = False

    module = "ctpo_launchers.node"

    @property
    def name(self) -> str:
        return f"{self.config.run.name}-check" if self.check else self.config.run.name

    @property
    def config_file(self) -> Path:
        """A copy of the resolved configuration, so that a job requeued days later reads what was submitted."""
        digest = hashlib.sha256(dump(self.config).encode()).hexdigest()[:8]
        return Path(self.cluster.job_dir) / "configs" / f"{self.config.run.name}-{digest}.yaml"

    @property
    def status_files(self) -> Sequence[Path]:
        """Of its nodes, with their exit statuses once they have ended."""
        paths = RunPaths(self.config.run.directory)
        folder = self.workdir / (paths.checked_nodes if self.check else paths.nodes)
        return [folder / f"node{rank}" / "status" for rank in range(self.nodes)]

    def arguments(self, *of_node: str) -> list[str]:
        """Arguments of the node program."""
        cluster = self.cluster
        options = ["--workdir", str(self.workdir), "--start-timeout", f"{cluster.start_timeout_s:g}", *of_node]
        options += ["--check"] if self.check else []
        options += [] if cluster.interface is None else ["--interface", cluster.interface]
        return [*options, "--", str(self.config_file), "run.resume=auto"]

    @property
    def grace_s(self) -> float:
        """What a checkpoint takes between the signal and the end; a check writes none."""
        return 0.0 if self.check else self.config.checkpoint.grace_s

    @property
    def what(self) -> str:
        """Where its results are."""
        return f"run {self.config.run.directory}"

    def write_config(self) -> None:
        """Write `config_file`, for this user alone: it has the secrets that the job needs."""
        self.config_file.parent.mkdir(parents=True, exist_ok=True)
        self.config_file.unlink(missing_ok=True)
        opened = os.open(self.config_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(opened, "w", encoding="utf-8") as file:
            file.write(dump(self.config, whole=True))

    def send_config(self, tunnel: Any) -> None:
        """Write `config_file` on the host of a tunnel, for this user alone there, too."""
        there = shlex.quote(str(self.config_file))
        folder = shlex.quote(str(self.config_file.parent))
        tunnel.run(f"umask 077 && mkdir -p {folder} && rm -f {there} && : > {there}", hide=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".yaml") as file:  # of mode 0600
            file.write(dump(self.config, whole=True))
            file.flush()
            tunnel.put(file.name, str(self.config_file))


@dataclass(frozen=True)
class VerbJob:
    """Another command of `ctpo`, on one node, started in `workdir`."""

    words: tuple[str, ...]
    cluster: Cluster
    workdir: Path

    module = "ctpo_launchers.command"
    nodes, check, grace_s, what = 1, False, 0.0, "its output is in the log"
    status_files: ClassVar[Sequence[Path]] = ()

    @property
    def name(self) -> str:
        return self.words[0]

    def arguments(self, *_of_node: str) -> list[str]:
        """Arguments of `ctpo_launchers.command`."""
        return ["--workdir", str(self.workdir), "--", *self.words]


def task(
    verb: str,
    *words: str,
    cluster: ClusterFile,
    nodes: int = 1,
    workdir: Path | str | None = None,
    tunnel: Any = None,
) -> Any:
    """Return a `run.Script` of `ctpo VERB WORDS`: of a training on `nodes` nodes, or of another command of `COMMANDS`.

    words: as typed; a training's configuration first. cluster: a cluster file, the same as of its `executor`. workdir:
    where relative paths start; default: here. tunnel: of the executor, if any. The resolved configuration of a training
    is written to the cluster's job_dir, through the tunnel. Raises LaunchError, and ConfigError for a configuration.
    """
    cluster, folder = _loaded(cluster), Path(workdir or Path.cwd()).absolute()
    check_folder(folder, cluster)
    if verb == "train":
        if not words:
            raise LaunchError("task('train'): the configuration file comes next, then a.b=c")
        if nodes > 1 and cluster.executor == "local":
            raise LaunchError(f"nodes = {nodes}: a task of the local executor is one node program; use ctpo launch")
        config = load_config(words[0], [*words[1:], *of_the_launch(nodes)])
        launch = Launch(config, cluster, nodes, folder)
        if tunnel is None:
            launch.write_config()
        else:
            launch.send_config(tunnel)
        return script_of(launch)
    if verb not in COMMANDS or not words:
        raise LaunchError(f"task({verb!r}, ...): known are train, {', '.join(COMMANDS)}, each with its arguments")
    if nodes != 1:
        raise LaunchError(f"nodes = {nodes}: ctpo {verb} runs on one node")
    return script_of(VerbJob((verb, *words), cluster, folder))


def executor(cluster: ClusterFile, nodes: int = 1, workdir: Path | str | None = None, tunnel: Any = None) -> Any:
    """Return the executor of a cluster file, for tasks on `nodes` nodes: a `run.LocalExecutor` or a
    `run.SlurmExecutor`.

    workdir: as of the tasks. tunnel: a `run.SSHTunnel` to a login node; default: this machine submits. Jobs in Slurm
    get the code of the last commit of this checkout. Raises LaunchError.
    """
    cluster = _loaded(cluster)
    import nemo_run as run

    if cluster.executor == "local":
        return run.LocalExecutor()
    _in_a_repository()
    packager = run.GitArchivePackager(basepath=str(ROOT), check_uncommitted_changes=True)
    made = slurm_executor(cluster, nodes, packager, Path(workdir or Path.cwd()).absolute())
    made.tunnel = tunnel or made.tunnel
    return made


def script_of(launch: Launch | VerbJob, *of_node: str) -> Any:
    """Quotes the arguments: NeMo Run joins them without quoting if its launcher is not torchrun."""
    import nemo_run as run

    slurm = launch.cluster.executor == "slurm"
    arguments = launch.arguments(*of_node)
    return run.Script(
        path=launch.module,
        m=True,
        entrypoint=_interpreter(launch.cluster),
        args=[shlex.quote(text) for text in arguments] if slurm else arguments,
        env={} if slurm else launch.cluster.env | _paths(str(ROOT)),
    )


def slurm_executor(cluster: Cluster, nodes: int, packager: Any, workdir: Path) -> Any:
    """Return a `run.SlurmExecutor` whose batch script is of our template. workdir: mounted into containers."""
    import nemo_run as run
    from nemo_run.core.execution import slurm

    slurm.fill_template = _fill_template
    extra = {"requeue": True, "signal": f"TERM@{cluster.signal_s}", **cluster.sbatch}
    mounts = [f"{path}:{path}" for path in dict.fromkeys((cluster.job_dir, str(workdir)))]
    return run.SlurmExecutor(
        account=cluster.account,
        partition=cluster.partition,
        qos=cluster.qos,
        nodes=nodes,
        ntasks_per_node=1,
        gpus_per_node=cluster.gpus_per_node,
        cpus_per_task=cluster.cpus_per_task,
        mem=cluster.mem,
        exclusive=cluster.exclusive,
        time=cluster.time,
        job_name_prefix="ctpo.",
        container_image=cluster.container_image,
        container_mounts=[*mounts, *cluster.container_mounts],
        container_env=[*_FOR_CONTAINERS, *cluster.container_env],
        additional_parameters=extra,
        env_vars={name: shlex.quote(value) for name, value in (cluster.env | _paths(_CODE)).items()},
        setup_lines="\n".join(cluster.setup) or None,
        retries=cluster.retries,
        tunnel=run.LocalTunnel(job_dir=f"{cluster.job_dir}/experiments"),
        packager=packager,
        poll_estimated_start_time=False,
    )


def _fill_template(name: str, variables: dict[str, Any], *more: Any) -> str:
    """In place of NeMo Run's function: other jobs of an experiment keep its own template."""
    from nemo_run.core.execution.utils import fill_template

    commands = variables["srun_commands"]
    if not any(" -m ctpo_launchers." in text for text in commands):
        return str(fill_template(name, variables, *more))
    quoted = [text.replace("${SLURM_RESTART_COUNT:-0}", '"${SLURM_RESTART_COUNT:-0}"') for text in commands]
    return f"{fill_template('slurm.sh.j2', {**variables, 'srun_commands': quoted}, str(TEMPLATES))}\n"


def of_the_launch(nodes: int) -> list[str]:
    """Overrides that say how many nodes there are."""
    return [f"cluster.nodes={nodes}"] if nodes > 1 else []


def check_folder(folder: Path, cluster: Cluster) -> None:
    """Raises LaunchError for a folder that the batch script cannot name."""
    if cluster.executor == "slurm" and not is_word(str(folder)):
        raise LaunchError(f"{folder}: the batch script names this folder unquoted; start it in one without blanks or $")


def _loaded(cluster: ClusterFile) -> Cluster:
    return cluster if isinstance(cluster, Cluster) else load_cluster(Path(cluster))


def _in_a_repository() -> None:
    """NeMo Run asks git for the repository of the current directory, also where it packages another."""
    command = ["git", "rev-parse", "--show-toplevel"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SUBMIT_COMMAND_TIMEOUT_S, check=False)
    if done.returncode:
        raise LaunchError(f"{Path.cwd()} is in no git repository, in which NeMo Run starts: {done.stderr.strip()}")


def _interpreter(cluster: Cluster) -> str:
    """The interpreter; on this machine, of the environment that called `ctpo launch`."""
    return os.environ.get("CTPO_PYTHON", cluster.python) if cluster.executor == "local" else cluster.python


def _paths(code: str) -> dict[str, str]:
    """PYTHONPATH of the job's code, since the working directory may be another checkout."""
    folders = [code, *(f"{code}/{folder}" for folder in ("answers", "kernels", "sandbox", "launchers"))]
    return {"PYTHONPATH": ":".join(folders), "PYTHONSAFEPATH": "1"}
