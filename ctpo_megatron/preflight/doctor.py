"""The checks of `ctpo doctor`: of a machine, of a configuration on it, and what that needs of each machine."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ctpo_megatron.base.extensions import activate
from ctpo_megatron.base.installed import install_command
from ctpo_megatron.base.ray_environment import ADDRESS, AUTH_MODE, TOKEN_FILE
from ctpo_megatron.config import (
    ELEMENT_BYTES,
    GIB,
    Config,
    ConfigError,
    Job,
    Problem,
    SandboxConfig,
    Sources,
    TrackingConfig,
    model_parameters,
    needs_engines,
    passed,
    spec_for,
    tokenizer_problems,
)
from ctpo_megatron.environments import (
    TokenizerError,
    check_chat_template,
    names_a_server,
    needs_sandbox,
    offered_schemas,
    read_tokenizer,
    use_chat_template,
)
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.preflight.check import Check, DiskNeeds, Gpu, MachineContext, RunContext, Wanted, failed, run_checks
from ctpo_megatron.preflight.choice import settled
from ctpo_megatron.preflight.configuration import validate
from ctpo_megatron.preflight.cuda_runtime import check_builds, check_compiler, check_infiniband, check_nccl
from ctpo_megatron.preflight.devices import check_collectives, check_devices, gpus, torch_cuda
from ctpo_megatron.preflight.disk import disk_needs
from ctpo_megatron.preflight.host_memory import host_parts
from ctpo_megatron.preflight.machine import NODE, check_machine, check_sandbox
from ctpo_megatron.preflight.packages import check_imports, check_packages
from ctpo_megatron.preflight.placement import GpuMemory


def diagnose(wanted: Wanted) -> list[Problem]:
    """What the checks of this machine find, for a run that wants so much of it."""
    checks = (*MACHINE, *DEEP) if wanted.deep else MACHINE
    return run_checks(checks, MachineContext(wanted, gpus(), torch_cuda()))


def diagnose_run(
    config: Config,
    sources: Sources,
    job: Job,
    here: Sequence[Gpu],
    *,
    deep: bool = False,
    earlier: Sequence[Problem] = (),
) -> tuple[list[Problem], Wanted]:
    """Findings on a configuration for ranks as in `job`, and what it needs of each machine.

    here: GPUs of this one. earlier: problems of the configuration that are known.
    """
    activate(config.extensions.path or ())
    gpu_gib = min((gpu.gib for gpu in here), default=None)
    problems: Sequence[Problem]
    try:
        problems = validate(config, job, cuda=bool(here), sources=sources, gpu_gib=gpu_gib)
    except ConfigError as error:
        problems = error.problems
    findings = [_under("config", problem) for problem in (*earlier, *problems)] or [passed("config", config.run.name)]
    wanted = Wanted(
        disk=(DiskNeeds(str(config.run.directory), 0.0, GIB),),
        ports=tuple(_ports(config.tracking)),
        servers=tuple(_servers(config.sandbox)),
        sandbox=_sandbox(config),
        deep=deep,
    )
    try:
        spec = spec_for(config)
    except ConfigError:
        return findings, wanted
    context = RunContext(config, spec, job, bool(here), gpu_gib)
    findings += _tokenizer(context, spec)
    if gpu_gib is not None:
        fullest = GpuMemory(settled(config, job, spec, gpu_gib), job, spec, gpu_gib).fullest
        text = f"{fullest.bytes / GIB:.1f} of {gpu_gib:.0f} GiB on {fullest.gpus}, {fullest.when}"
        findings.append(passed("GPU memory", text))  # what is too much is a problem above
    return findings, replace(wanted, **_sizes(context, spec))


def diagnose_node(config: Config, sources: Sources, job: Job) -> list[Problem]:
    """All findings on a node of a job that runs: on its configuration, and, deep, on this machine."""
    seen = gpus()
    findings, wanted = diagnose_run(config, sources, job, [] if isinstance(seen, str) else seen, deep=True)
    if wanted.sandbox == NODE and not names_a_server():  # the node program starts one for the engines
        wanted = replace(wanted, sandbox=config.sandbox.require)
    return findings + diagnose(wanted)


def _under(name: str, problem: Problem) -> Problem:
    """The problem with its key and place in the message, under a name of the doctor's."""
    return Problem(name, str(replace(problem, fix="")), problem.fix, severity=problem.severity)


def _sizes(context: RunContext, spec: ModelSpec) -> dict[str, Any]:
    """The fields of `Wanted` that follow from the model."""
    weights = model_parameters(spec)[0] * ELEMENT_BYTES[context.config.engine_dtype]
    parts = host_parts(context.config, context.job, spec, cuda=context.cuda)
    return {
        "weight_bytes": weights,
        "disk": (disk_needs(context.config, spec),),
        "host_bytes": sum(part.count * part.model for part in parts),
        "expected_bytes": sum(part.whole for part in parts),
    }


def _sandbox(config: Config) -> str:
    if config.sandbox.url is not None or not needs_engines(config) or not needs_sandbox(config.rollout):
        return ""
    return NODE if config.cluster.nodes > 1 else config.sandbox.require


def _ports(tracking: TrackingConfig) -> Iterator[tuple[str, int, str]]:
    for tracker in tracking.trackers:
        if tracker.name == "prometheus":
            from ctpo_megatron.tracking import PROMETHEUS_ADDRESS

            host, port = PROMETHEUS_ADDRESS
            given = tracker.arguments
            yield str(given.get("host", host)), int(given.get("port", port)), "the tracker prometheus"


def _servers(sandbox: SandboxConfig) -> Iterator[tuple[str, int, str]]:
    for url in (sandbox.url or "").split(","):
        if url.strip():
            parts = urlsplit(url.strip())
            yield parts.hostname or "", parts.port or 80, "sandbox.url"


def _tokenizer(context: RunContext, spec: ModelSpec) -> Iterator[Problem]:
    config = context.config
    directory = Path(config.model.path)
    if problems := tokenizer_problems(directory):
        yield from (_under("tokenizer", problem) for problem in problems)
        return
    try:
        tokenizer = read_tokenizer(directory)
    except TokenizerError as error:
        yield Problem("tokenizer", str(error), "copy the model again")
        return
    if len(tokenizer) > spec.vocab_size:
        text = f"{len(tokenizer)} tokens, but the model's vocabulary has {spec.vocab_size}"
        yield Problem("tokenizer", text, "use the tokenizer that the model came with")
    elif tokenizer.eos_token_id is None:
        yield Problem("tokenizer", "has no token that ends a turn (eos_token)", "set it in tokenizer_config.json")
    else:
        yield passed("tokenizer", f"{len(tokenizer)} tokens, a turn ends with {tokenizer.eos_token}")
    try:
        use_chat_template(tokenizer, config.model)
        check_chat_template(tokenizer, config.model, offered_schemas(config.data, config.rollout))
    except (TokenizerError, OSError) as error:
        yield Problem("chat template", str(error))
    else:
        yield passed("chat template", f"of {config.model.chat_template or 'the tokenizer'}")


def check_python(_context: MachineContext) -> Iterator[Problem]:
    """Which Python this is."""
    yield passed("python", f"{platform.python_version()} ({sys.executable})")


def check_ray(_context: MachineContext) -> Iterator[Problem]:
    """The cluster to join, and its token."""
    address, token = os.environ.get(ADDRESS, ""), os.environ.get(TOKEN_FILE, "")
    if not address:
        yield passed("Ray", "a private one, on this node alone (RAY_ADDRESS is not set)")
    elif os.environ.get(AUTH_MODE, "") != "token":
        message = f"the cluster at {address}, without a token: anyone who reaches it runs code"
        fix = "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=... on every node"
        yield Problem("Ray", message, fix, severity="warning")
    elif token and not os.path.isfile(token):
        yield Problem("Ray", f"RAY_AUTH_TOKEN_PATH={token} is no file", "copy the cluster's token there")
    else:
        yield passed("Ray", f"the cluster at {address}, with a token")


MACHINE: tuple[Check[MachineContext], ...] = (
    check_python,
    check_packages,
    check_devices,
    check_builds,
    check_compiler,
    check_nccl,
    check_infiniband,
    check_machine,
    check_ray,
    check_sandbox,
)
DEEP: tuple[Check[MachineContext], ...] = (check_imports, check_collectives)


def verdict(problems: Sequence[Problem]) -> str:
    """One line."""
    bad, notes = failed(problems), sum(problem.severity == "warning" for problem in problems)
    if not bad:
        return f"ready ({notes} notes)" if notes else "ready"
    return f"not ready: {len(bad)} to mend: {', '.join(dict.fromkeys(problem.key for problem in bad))}"


def install_line(problems: Sequence[Problem]) -> str:
    """The pip line that brings what is missing; empty if nothing is."""
    extras = sorted({problem.extra for problem in failed(problems) if problem.extra})
    return install_command(*extras) if extras else ""
