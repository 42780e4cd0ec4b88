"""What can be said of a configuration on this machine, and what it wants of each: sizes, ports, servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ctpo_megatron.base.extensions import activate
from ctpo_megatron.config import (
    Config,
    ConfigError,
    GpuMemory,
    Job,
    Problem,
    Sources,
    Split,
    engine_count,
    model_parameters,
    passed,
    peak_memory,
    spec_for,
    tokenizer_problems,
    validate,
)
from ctpo_megatron.doctor.devices import Gpu
from ctpo_megatron.doctor.machine import GIB, Wanted
from ctpo_megatron.doctor.sandbox import NODE
from ctpo_megatron.environments.tokenizer import (
    TokenizerError,
    check_chat_template,
    read_tokenizer,
    use_chat_template,
)
from ctpo_megatron.models import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTES = {"float32": 4, "bfloat16": 2}


def diagnose_run(
    config: Config, sources: Sources, job: Job, gpus: list[Gpu], *, deep: bool = False
) -> tuple[list[Problem], Wanted]:
    """Findings on a configuration for ranks as in `job`, and what it wants of each machine. gpus: of this one."""
    activate(config.extensions.path or ())
    gpu_gib = min((gpu.gib for gpu in gpus), default=None)
    findings = [_under("config", p) for p in _problems(config, sources, job, gpu_gib)] or [
        passed("config", config.run.name)
    ]
    wanted = Wanted(
        disk=((str(config.run.directory), 0.0, GIB),),
        ports=tuple(_ports(config)),
        servers=tuple(_servers(config)),
        sandbox=_sandbox(config),
        deep=deep,
    )
    try:
        spec = spec_for(config)
    except ConfigError:
        return findings, wanted
    findings += [*_tokenizer(config, spec)]
    if gpu_gib is not None:
        fullest = GpuMemory.of(config, job, spec, gpu_gib).fullest
        text = f"{fullest.bytes / GIB:.1f} of {gpu_gib:.0f} GiB on {fullest.gpus}, {fullest.when}"
        findings.append(passed("GPU memory", text))  # what is too much is a problem above
    return findings, replace(wanted, **_sizes(config, spec, job, cuda=bool(gpus)))


def _problems(config: Config, sources: Sources, job: Job, gpu_gib: float | None) -> tuple[Problem, ...]:
    cuda = gpu_gib is not None
    try:
        return tuple(validate(config, world_size=job.world_size, cuda=cuda, sources=sources, job=job, gpu_gib=gpu_gib))
    except ConfigError as error:
        return error.problems


def _under(name: str, problem: Problem) -> Problem:
    """The problem with its key and place in the message, under a name of the doctor's."""
    return Problem(name, str(replace(problem, fix="")), problem.fix, severity=problem.severity)


def _sizes(config: Config, spec: ModelSpec, job: Job, *, cuda: bool) -> dict[str, Any]:
    """The fields of `Wanted` that follow from the model."""
    count, policy, kept = model_parameters(spec)[0], config.policy, config.checkpoint
    engine = spec.dtype if config.rollout.engine.dtype == "auto" else config.rollout.engine.dtype
    # Weights, and the optimizer's two moments and, below float32, its copy of the weights.
    one = count * (_BYTES[policy.dtype] + 8 + (4 if policy.dtype != "float32" else 0))
    saves = kept.keep_last + kept.keep_best + 1 if kept.every else 1
    folder, export = str(config.run.directory), count * _BYTES[policy.dtype]
    return {
        "weight_bytes": count * _BYTES[engine],
        "disk": ((folder, one if kept.every else 0.0, one * saves + export + GIB),),
        "host_bytes": 0.0 if cuda else _host_bytes(config, spec, job, count * _BYTES[engine]),
    }


def _host_bytes(config: Config, spec: ModelSpec, job: Job, weights: float) -> float:
    """What the trainer's ranks of a node and its engines hold between steps, on a CPU."""
    rank = peak_memory(spec, Split.of(config.policy, job.world_size)).while_sampling("none")
    engines = 0 if config.rollout.replay else engine_count(config)
    return rank * (job.node_ranks or job.world_size) + engines * (
        weights + (config.rollout.engine.kv_cache_mb or 0) * 2**20
    )


def _sandbox(config: Config) -> str:
    from ctpo_megatron.environments.factory import needs_sandbox

    if config.sandbox.url is not None or config.rollout.replay is not None or not needs_sandbox(config.rollout):
        return ""
    return NODE if config.cluster.nodes > 1 else config.sandbox.require


def _ports(config: Config) -> Iterator[tuple[str, int, str]]:
    for tracker in config.tracking.trackers:
        if tracker.name == "prometheus":
            from ctpo_megatron.tracking import PROMETHEUS_ADDRESS

            host, port = PROMETHEUS_ADDRESS
            given = tracker.arguments
            yield str(given.get("host", host)), int(given.get("port", port)), "the tracker prometheus"


def _servers(config: Config) -> Iterator[tuple[str, int, str]]:
    for url in (config.sandbox.url or "").split(","):
        if url.strip():
            parts = urlsplit(url.strip())
            yield parts.hostname or "", parts.port or 80, "sandbox.url"


def _tokenizer(config: Config, spec: ModelSpec) -> Iterator[Problem]:
    directory = Path(config.model.path)
    if not directory.is_dir() and config.prepare is not None:
        yield Problem("tokenizer", f"{directory} is made by the stage prepare", severity="warning")
        return
    if problems := tokenizer_problems(directory):
        yield from (_under("tokenizer", problem) for problem in problems)
        return
    try:
        tokenizer = read_tokenizer(directory)
    except TokenizerError as error:
        yield Problem("tokenizer", str(error), "copy the model anew")
        return
    if len(tokenizer) > spec.vocab_size:
        text = f"{len(tokenizer)} tokens, but the model's vocabulary has {spec.vocab_size}"
        yield Problem("tokenizer", text, "use the tokenizer that the model came with")
    elif tokenizer.eos_token_id is None:
        yield Problem("tokenizer", "has no token that ends a turn (eos_token)", "set it in tokenizer_config.json")
    else:
        yield passed("tokenizer", f"{len(tokenizer)} tokens, a turn ends with {tokenizer.eos_token}")
    yield _template(config, tokenizer)


def _template(config: Config, tokenizer: PreTrainedTokenizerBase) -> Problem:
    try:
        use_chat_template(tokenizer, config)
        check_chat_template(tokenizer, config)
    except (TokenizerError, OSError) as error:
        return Problem("chat template", str(error))
    return passed("chat template", f"of {config.model.chat_template or 'the tokenizer'}")
