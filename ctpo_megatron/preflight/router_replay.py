"""Checks of `policy.router_replay`: whether the engines can report experts, and what a mixture risks without it."""

from __future__ import annotations

from collections.abc import Iterator

from ctpo_megatron.config import Problem
from ctpo_megatron.preflight.check import RunContext

KEY = "policy.router_replay"


def check_router_replay(context: RunContext) -> Iterator[Problem]:
    """`check_parallel` has the demands on the model."""
    spec, config = context.spec, context.config
    if spec is None or spec.num_experts_per_token < 2:  # of one expert a token nothing can be recorded
        return
    if not config.policy.router_replay:
        message = (
            "is off, and the model is a mixture of experts: sampler and trainer choose differently where two experts "
            "are nearly level, and their log-probs are then of different experts (docs/moe.md)"
        )
        yield context.warning(
            KEY, message, f"set true{', and rollout.engine.model_runner: v2' if context.cuda else ''}"
        )
    elif config.rollout.replay is None:
        yield from _engines(context)


def _engines(context: RunContext) -> Iterator[Problem]:
    engine = context.config.rollout.engine
    if not context.cuda:
        if engine.tensor_parallel_size > 1:
            message = "needs engines of one worker on a CPU: the experts of several cannot be read"
            yield context.error(KEY, message, "set rollout.engine.tensor_parallel_size: 1")
        return
    if engine.model_runner != "v2":
        message = f"reports no experts, which {KEY} needs"
        yield context.error("rollout.engine.model_runner", message, "set v2, or policy.router_replay: false")
    if engine.extra.get("enable_prefix_caching") is False:
        message = f"must stay on with {KEY}: vLLM keeps the experts of tokens with its cache"
        yield Problem("rollout.engine.extra.enable_prefix_caching", message, "remove it", False)
