"""What attention costs where the layers are not Transformer Engine's."""

from __future__ import annotations

from collections.abc import Iterator

from ctpo_megatron.base.installed import TE, is_installed, te_trouble
from ctpo_megatron.config import ELEMENT_BYTES, Config, Problem, gib, sequence_multiple
from ctpo_megatron.preflight.check import RunContext


def check_attention(context: RunContext) -> Iterator[Problem]:
    """Context parallelism in local layers: whole keys and values on every rank, and a mask that is not in the plan."""
    policy, spec = context.config.policy, context.spec
    if not context.cuda or policy.context_parallel_size == 1 or not (why := _why_local(context.config)):
        return
    longest = context.config.data.max_prompt_tokens + context.config.rollout.max_response_tokens
    longest = -(-longest // sequence_multiple(policy)) * sequence_multiple(policy)
    element = ELEMENT_BYTES[policy.dtype]
    mask = longest // policy.context_parallel_size * longest * (1 + element)  # of booleans, and added to the scores
    held = f"a mask of {gib(mask)} for a sequence of {longest:,} tokens"
    if spec is not None:
        heads = spec.num_attention_heads if policy.dtype == "float32" else spec.num_key_value_heads
        kept = 2 * heads * spec.head_dim * element * longest // policy.tensor_model_parallel_size
        held += f", and in each layer all its keys and values, {gib(kept)}"
    message = f"without Transformer Engine's layers ({why}) every rank holds {held}: not in the memory plan"
    yield context.warning("policy.context_parallel_size", message, _remedy(context.config))


def _why_local(config: Config) -> str:
    """Why the layers are local; empty where they are Transformer Engine's, as far as this machine shows."""
    policy = config.policy
    if policy.layer_spec == "local" or policy.dtype == "float32":
        return "policy.layer_spec: local" if policy.layer_spec == "local" else "policy.dtype: float32"
    if policy.layer_spec == "auto" and (te_trouble() or not is_installed(TE)):
        return "it is not installed here"
    return ""


def _remedy(config: Config) -> str:
    policy = config.policy
    settings = ["policy.dtype: bfloat16"] if policy.dtype == "float32" else []
    settings += ["policy.layer_spec: auto"] if policy.layer_spec != "auto" else []
    return " and ".join(["install it (docs/install_cuda.md)", *settings]) + ", or split by tensor parallelism"
