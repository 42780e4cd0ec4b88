"""`ctpo launch` within the launcher's environment: submits a job, and reports on jobs."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ctpo_launchers import LaunchError
from ctpo_launchers.clusters import Cluster, for_check, load_cluster
from ctpo_launchers.command import COMMANDS
from ctpo_launchers.environment import ROOT
from ctpo_launchers.jobs import Launch, VerbJob, check_folder, of_the_launch
from ctpo_launchers.timeouts import CHECK_POLL_S, CHECK_WAIT_S, SUBMIT_COMMAND_TIMEOUT_S
from ctpo_megatron.base.text import say
from ctpo_megatron.config import ConfigError, Problem, load_config

FOLDER = ROOT / "configs" / "clusters"
DEFAULTS = {"local": "local", "slurm": "slurm_example"}
ASKING = ("status", "logs", "cancel")
_UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED")
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
    """Add the arguments of `ctpo launch`."""
    parser.description = "Submit a job to a cluster, and query it."
    others = ", ".join((*COMMANDS, *ASKING))
    parser.add_argument("config", metavar="CONFIG", help=f"configuration file; or {others}")
    parser.add_argument(
        "overrides",
        metavar="a.b=c",
        nargs="*",
        default=[],
        help=f"override a key; after logs and cancel: the job; after {' and '.join(COMMANDS)}: -- and their arguments",
    )
    parser.add_argument("--executor", choices=list(DEFAULTS), default="slurm", help="who starts it (%(default)s)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes of the job (%(default)s)")
    parser.add_argument(
        "--check", action="store_true", help="look at the nodes and the network between them in a short job, and wait"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the batch script, submit nothing")
    parser.add_argument("--cluster", metavar="FILE", help="cluster file, or the name of one in configs/clusters")


def as_words(args: argparse.Namespace) -> list[str]:
    """Return the command line for these arguments."""
    options = ["--executor", args.executor, "--nodes", str(args.nodes)]
    options += ["--dry-run"] if args.dry_run else []
    options += ["--check"] if args.check else []
    options += [] if args.cluster is None else ["--cluster", args.cluster]
    if args.config in COMMANDS:
        return [*options, args.config, "--", *args.overrides]
    return [args.config, *args.overrides, *args.unknown, *options]


def cluster_of(args: argparse.Namespace) -> Cluster:
    """Return the cluster that the arguments name. Raises LaunchError, also where it is of another executor."""
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
    from ctpo_launchers.experiment import script, submit

    launch = _request(args, cluster)
    slurm = cluster.executor == "slurm"
    check_folder(launch.workdir, cluster)
    code = ROOT if slurm and not args.dry_run else None
    if problems := [*job_problems(launch.grace_s, cluster.signal_s if slurm else None, code)]:
        raise LaunchError("\n".join(map(str, problems)))
    if args.dry_run and slurm:
        print(script(launch), end="")
        return 0
    if args.dry_run:
        raise LaunchError("--dry-run prints a batch script, and --executor local has none")
    identity, status = submit(launch)
    print(f"{identity}: folder {cluster.job_dir}, {launch.what}", flush=True)
    return _table(launch, identity) if isinstance(launch, Launch) and launch.check and slurm else status


def job_problems(grace_s: float, signal_s: float | None, code: Path | None) -> Iterator[Problem]:
    """Check whether a checkpoint fits between signal and end of a job, and whether the last commit has all that it
    runs.

    grace_s: `checkpoint.grace_s`. signal_s: seconds before its time limit at which the job gets SIGTERM; None: it has
    no limit. code: the checkout whose last commit the job runs; None: the files that are here.
    """
    if signal_s is not None and grace_s >= signal_s:
        message = (
            f"but the job gets its signal only {signal_s:g} s before its time limit (signal_s of the cluster file)"
        )
        yield Problem("checkpoint.grace_s", message, "raise signal_s, or lower checkpoint.grace_s", grace_s)
    if code is None:
        return
    command = ["git", "-C", str(code), "status", "--porcelain", "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SUBMIT_COMMAND_TIMEOUT_S, check=False)
        failure = done.stderr.strip() if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    if failure is not None:
        yield Problem("", f"{code} is not a git checkout, from which a job takes its code: {failure}")
    elif done.stdout:
        message = f"a job gets the code of the last commit; commit or put away first:\n{done.stdout.rstrip()}"
        yield Problem("", message)


def _request(args: argparse.Namespace, cluster: Cluster) -> Launch | VerbJob:
    """The requested job, started in this folder. Raises LaunchError and ConfigError."""
    if args.config in COMMANDS:
        if args.nodes != 1 or args.check:
            raise LaunchError(f"ctpo {args.config} runs on one node, without --nodes and --check")
        return VerbJob((args.config, *args.overrides), cluster, Path.cwd())
    config = load_config(args.config, [*args.overrides, *of_the_launch(args.nodes)])
    return Launch(config, for_check(cluster) if args.check else cluster, args.nodes, Path.cwd(), check=args.check)


def _table(launch: Launch, identity: str) -> int:
    """Wait for the check of a job in Slurm, show what its nodes said, and return 0 or 2."""
    folder = Path(launch.cluster.job_dir)
    job = next(job for job, where in _jobs(folder).items() if identity in where.parts)
    until, said = time.monotonic() + CHECK_WAIT_S, ""
    while (state := _state(job)) in _UNFINISHED:
        if state != said:
            print(f"job {job}: {state}", file=sys.stderr, flush=True)
            said = state
        if time.monotonic() > until:
            raise LaunchError(f"job {job} is {state} after {CHECK_WAIT_S:g} s; later: ctpo launch logs {job}")
        time.sleep(CHECK_POLL_S)
    _show_logs(_jobs(folder)[job])
    try:
        return int(launch.status_files[0].read_text())
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"job {job} is no longer in the queue as far as Slurm answers ({state}), and has left no status ({error}): "
            f"its output so far is above; later: ctpo launch logs {job}"
        ) from error


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
    _show_logs(jobs[job])
    return 0


def _show_logs(folder: Path) -> None:
    for file in sorted(folder.glob("log-*.out")) or sorted(folder.glob("sbatch_*.out")):
        say(f"==> {file} <==", file.read_text(errors="replace").rstrip("\n"))


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
