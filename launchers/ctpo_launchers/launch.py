"""`ctpo launch` within the launcher's environment: submits a job, and reports on jobs."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ctpo_launchers import LaunchError
from ctpo_launchers.clusters import Cluster, is_word, load_cluster
from ctpo_launchers.environment import ROOT
from ctpo_launchers.timeouts import SUBMIT_COMMAND_TIMEOUT_S
from ctpo_megatron.base.printable import say
from ctpo_megatron.config import ConfigError, load_config
from ctpo_megatron.preflight import LAUNCH_CHECKS, LaunchContext, failed, run_checks

FOLDER = ROOT / "configs" / "clusters"
DEFAULTS = {"local": "local", "slurm": "slurm_example"}
ASKING = ("status", "logs", "cancel")
_SQUEUE = ("squeue", "--noheader", "--format", "%T", "--jobs")
_SACCT = ("sacct", "--noheader", "--parsable2", "--allocations", "--format", "State", "--jobs")


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="ctpo launch")
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        cluster = cluster_of(args)
        if args.config in ASKING:
            return _ask(args.config, cluster, args.overrides)
        return _launch(args, cluster)
    except (ConfigError, LaunchError) as error:
        say(f"ctpo launch: {error}", error=True)
        return 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `ctpo launch`."""
    parser.description = "Submit a job to a cluster, and query it."
    parser.add_argument("config", metavar="CONFIG", help=f"configuration file; or {', '.join(ASKING)}")
    parser.add_argument("overrides", metavar="a.b=c", nargs="*", help="override a key; after logs and cancel: the job")
    parser.add_argument("--executor", choices=list(DEFAULTS), default="slurm", help="who starts it (%(default)s)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes of the job (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print the batch script, submit nothing")
    parser.add_argument("--cluster", metavar="FILE", help="cluster file, or the name of one in configs/clusters")


def as_words(args: argparse.Namespace) -> list[str]:
    """The command line for these arguments."""
    words = [args.config, *args.overrides, *args.unknown, "--executor", args.executor, "--nodes", str(args.nodes)]
    words += ["--dry-run"] if args.dry_run else []
    return words if args.cluster is None else [*words, "--cluster", args.cluster]


def cluster_of(args: argparse.Namespace) -> Cluster:
    """The cluster that the arguments name. Raises LaunchError, also where it is of another executor."""
    if args.nodes < 1:
        raise LaunchError(f"--nodes {args.nodes}: at least one node")
    cluster = load_cluster(_cluster_file(args.cluster or DEFAULTS[args.executor]))
    if args.config not in ASKING and cluster.executor != args.executor:
        raise LaunchError(f"{args.cluster} is a file for --executor {cluster.executor}, not {args.executor}")
    return cluster


def _cluster_file(text: str) -> Path:
    for path in (Path(text), FOLDER / f"{text}.yaml"):
        if path.is_file():
            return path
    names = ", ".join(sorted(path.stem for path in FOLDER.glob("*.yaml")))
    raise LaunchError(f"--cluster {text}: no such file; there are {names} in {FOLDER}")


def _launch(args: argparse.Namespace, cluster: Cluster) -> int:
    from ctpo_launchers.experiment import Launch, script, submit

    workdir = Path.cwd()
    config = load_config(args.config, [*args.overrides, *of_the_launch(args.nodes)])
    launch = Launch(config, cluster, args.nodes, workdir)
    slurm = cluster.executor == "slurm"
    if slurm and not is_word(str(workdir)):
        raise LaunchError(
            f"{workdir}: the batch script names this folder unquoted; start it in one without blanks or $"
        )
    code = ROOT if slurm and not args.dry_run else None
    context = LaunchContext(config.checkpoint.grace_s, cluster.signal_s if slurm else None, code)
    if problems := failed(run_checks(LAUNCH_CHECKS, context)):
        raise LaunchError("\n".join(map(str, problems)))
    if args.dry_run and slurm:
        print(script(launch), end="")
        return 0
    if args.dry_run:
        raise LaunchError("--dry-run prints a batch script, and --executor local has none")
    identity, status = submit(launch)
    print(f"{identity}: folder {cluster.job_dir}, run {config.run.directory}")
    return status


def of_the_launch(nodes: int) -> list[str]:
    """Overrides that say how many nodes there are."""
    return [f"cluster.nodes={nodes}"] if nodes > 1 else []


def _ask(what: str, cluster: Cluster, words: Sequence[str]) -> int:
    """Show the status of all jobs, or show logs of or cancel one; straight from Slurm, since accounting may be off."""
    jobs = _jobs(Path(cluster.job_dir))
    if what == "status":
        for job, folder in jobs.items():
            print(f"{job}  {_state(job):<12} {folder}")
        return 0
    if len(words) != 1 or words[0] not in jobs:
        raise LaunchError(f"ctpo launch {what} JOB: the jobs of {cluster.job_dir} are {', '.join(jobs) or 'none'}")
    job = words[0]
    if what == "cancel":
        return subprocess.run(["scancel", job], timeout=SUBMIT_COMMAND_TIMEOUT_S).returncode
    for file in sorted(jobs[job].glob("log-*.out")) or sorted(jobs[job].glob("sbatch_*.out")):
        say(f"==> {file} <==", file.read_text(errors="replace").rstrip("\n"))
    return 0


def _jobs(folder: Path) -> dict[str, Path]:
    """Job number -> folder of all jobs submitted from here, as recorded by NeMo Run."""
    notes = folder / ".slurm_jobs"
    if not notes.is_file():
        return {}
    found = re.findall(r"^(\d+) = [^,]*,([^,]+),", notes.read_text(encoding="utf-8"), re.MULTILINE)
    return {job: Path(path) for job, path in found}


def _state(job: str) -> str:
    for command in (_SQUEUE, _SACCT):
        try:
            answer = subprocess.run(
                [*command, job], capture_output=True, text=True, timeout=SUBMIT_COMMAND_TIMEOUT_S
            ).stdout.split()
        except (OSError, subprocess.TimeoutExpired):
            continue
        if answer:
            return answer[0]
    return "not known"


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "120")
    sys.exit(main(sys.argv[1:]))
