"""Memory arithmetic: parameter counts of published models, what each dimension divides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.plan import (
    Split,
    in_flight,
    layer_activations,
    memory_table,
    model_parameters,
    peak_memory,
    repeated_token_share,
    stage_memory,
    stage_parameters,
)
from docs.site.sizing import MODELS, SIZINGS

ROW = Split(micro_batch_tokens=16384)


@pytest.mark.parametrize(
    ("model", "whole", "active"),
    [
        ("Qwen3-4B", 4.022e9, 4.022e9),
        ("Qwen3-14B", 14.768e9, 14.768e9),
        ("Qwen3-32B", 32.762e9, 32.762e9),
        ("Qwen3-30B-A3B", 30.532e9, 3.353e9),
    ],
)
def test_parameter_counts_are_those_of_the_model_cards(model: str, whole: float, active: float) -> None:
    assert model_parameters(MODELS[model]) == pytest.approx((whole, active), abs=1e6)


@pytest.mark.parametrize("row", SIZINGS, ids=lambda row: f"{row.model}-{row.gpus}")
def test_recommended_splits_are_possible(row: object) -> None:
    spec, s = MODELS[row.model], row.split  # type: ignore[attr-defined]
    assert s.ranks == row.gpus  # type: ignore[attr-defined]
    width = spec.moe_intermediate_size or spec.intermediate_size
    assert [n % s.tensor for n in (spec.num_attention_heads, spec.num_key_value_heads, width)] == [0, 0, 0]
    assert spec.num_layers % s.pipeline == 0
    assert not spec.num_experts or (spec.num_experts % s.expert == 0 and s.data * s.context % s.expert == 0)


@pytest.mark.parametrize("model", MODELS)
def test_shards_add_up_to_the_model(model: str) -> None:
    """All ranks of one replica hold the model once, but for norms and routers, padding, and a tied output layer."""
    spec = MODELS[model]
    split = Split(tensor=4, pipeline=2, expert=4 if spec.num_experts else 1)
    dense, experts = map(sum, zip(*(stage_parameters(spec, split, stage) for stage in range(2)), strict=True))
    whole, _ = model_parameters(spec)
    found = 4 * dense + 4 * split.expert * experts
    copied = 3 * spec.num_layers * (2 * spec.hidden_size + 2 * spec.head_dim + spec.num_experts * spec.hidden_size)
    copied += 3 * spec.hidden_size
    copied += spec.vocab_size * spec.hidden_size if spec.tie_word_embeddings else 0
    padding = (152064 - 151936) * spec.hidden_size * 2  # to a multiple of 4 x 128 rows
    assert found == whole + copied + padding


def test_bytes_of_a_parameter() -> None:
    spec, count = MODELS["Qwen3-14B"], 14768307200
    plain = stage_memory(spec, ROW, 0)
    assert (plain.weights, plain.gradients, plain.optimizer) == (2 * count, 4 * count, 12 * count)
    exact = stage_memory(spec, replace(ROW, dtype="float32"), 0)
    assert (exact.weights, exact.gradients, exact.optimizer) == (4 * count, 4 * count, 8 * count)
    split = stage_memory(spec, replace(ROW, data=4, context=2, distributed_optimizer=True), 0)
    assert (split.gradients, split.optimizer) == (4 * count, 12 * count // 8)
    assert stage_memory(spec, replace(ROW, data=8), 0).optimizer == 12 * count
    assert [plain.while_sampling(kind) // count for kind in ("none", "optimizer", "all")] == [18, 2, 0]


def test_expert_state_is_split_over_the_ranks_that_hold_the_same_experts() -> None:
    spec = MODELS["Qwen3-30B-A3B"]
    split = replace(ROW, data=16, expert=8, distributed_optimizer=True)
    dense, experts = stage_parameters(spec, split, 0)
    assert experts == 16 * 48 * 3 * 2048 * 768
    assert stage_memory(spec, split, 0).optimizer == 12 * (dense // 16 + experts // 2)


def test_activations_of_a_layer_follow_the_papers_terms() -> None:
    """Korthikanti et al. (arXiv 2205.05198): without dropout, with h = heads x head_dim, all heads keyed.

    The layer of the paper keeps 10 h + 24 h / t bytes a token besides the scores; of them 2 h are dropout masks. Ours
    has 8 h of those 10 (two norms in, two norms out), and per t: q, k, v and the attention's output 8 h, and 12 h in
    the three tensors of a gated MLP of ffn = 2 h in place of 16 h in two; 4 bytes a head are the log-sum-exp.
    """
    spec = replace(MODELS["Qwen3-32B"], num_attention_heads=40, num_key_value_heads=40, intermediate_size=2 * 5120)
    spec = replace(spec, qk_norm=False)
    h = 5120
    for t in (1, 2, 4):
        found = sum(layer_activations(spec, Split(tensor=t)).values())
        assert found == 8 * h + (8 * h + 12 * h + 4 * 40) // t
        spread = sum(layer_activations(spec, Split(tensor=t, sequence_parallel=True)).values())
        assert spread == (8 * h + 8 * h + 12 * h + 4 * 40) // t


def test_micro_batches_in_flight() -> None:
    assert [in_flight(Split(pipeline=4), stage) for stage in range(4)] == [4, 3, 2, 1]
    # L (1 + (p - 1) / (p v)) layers of activations on the first stage, section 4.2.3 of the paper
    assert in_flight(Split(pipeline=4, chunks=2), 0) == pytest.approx(4 * (1 + 3 / 8))
    assert in_flight(Split(pipeline=4, chunks=2), 3) == 2.5
    assert in_flight(Split(), 0) == 1


def test_recomputation_gives_memory_back() -> None:
    spec = MODELS["Qwen3-14B"]
    none, mlp, full = (peak_memory(spec, replace(ROW, recompute=r)).activations for r in ((), ("mlp",), ("full",)))
    assert full < mlp < none
    per_token = layer_activations(spec, ROW)
    assert none == 16384 * sum(per_token.values()) * 41
    assert full == 16384 * (40 * per_token["input"] + 2 * sum(per_token.values()) - per_token["input"])


def test_streaming_head_does_not_grow_with_the_vocabulary() -> None:
    spec = MODELS["Qwen3-14B"]
    streaming, logits = (stage_memory(spec, replace(ROW, streaming_head=s), 0).head for s in (True, False))
    assert streaming < 2.1 * 2**30 < logits == 2 * 16384 * 5120 * 2 + 16384 * 151936 * 8


def test_local_layers_keep_copies() -> None:
    """Of Qwen3-4B: attention's output in order; with norms of q and k also q and v, of which rows are gathered."""
    spec = MODELS["Qwen3-4B"]
    for tensor in (1, 2):
        te, local = (layer_activations(spec, Split(tensor=tensor, local_layers=local)) for local in (False, True))
        assert local["attention"] - te["attention"] == 2 * (32 + 32 + 8) * 128 // tensor
    bare = replace(spec, qk_norm=False)
    te, local = (layer_activations(bare, Split(local_layers=local)) for local in (False, True))
    assert local["attention"] - te["attention"] == 2 * 32 * 128


def test_attention_of_whole_sequences_keeps_tokens_of_one_row() -> None:
    """Of Qwen3-4B: 32 heads of queries and of the output, 8 of keys and of values; 4 bytes a log-sum-exp."""
    spec, shared = MODELS["Qwen3-4B"], replace(ROW, shared_prefixes=True)
    row, alone = (layer_activations(spec, split) for split in (shared, ROW))
    assert row["attention"] - alone["attention"] == 2 * (32 + 8) * 128  # the output of rows, and gathered values
    token, gradients = 2 * (2 * 32 + 2 * 8) * 128 + 4 * 32, 4 * 8 * 128
    size = sum(row.values())
    assert repeated_token_share(spec, shared) == (36 * token + token + gradients) / (36 * size + size)
    again = replace(shared, recompute=("full",))
    assert repeated_token_share(spec, again) == (2 * token + gradients) / (35 * row["input"] + 2 * size)
    stages = repeated_token_share(spec, replace(shared, pipeline=2))
    # The last stage has one micro-batch in flight, so that what backward adds weighs more there.
    assert stages == repeated_token_share(replace(spec, num_layers=18), shared) > repeated_token_share(spec, shared)


def test_repeated_keys_of_float32_are_counted() -> None:
    """Qwen3-4B: 32 heads of queries and 8 of keys and values, each of 128 numbers; 4 bytes a log-sum-exp."""
    spec, wide = MODELS["Qwen3-4B"], replace(ROW, tensor=2, dtype="float32")
    narrow, both = (layer_activations(spec, split)["attention"] for split in (replace(wide, dtype="bfloat16"), wide))
    assert both == 2 * (narrow - 4 * 32 // 2) + 4 * 32 // 2 + 2 * (32 - 8) * 128 * 4 // 2


def test_only_the_last_stage_has_the_head_and_the_peak_is_one_of_the_stages() -> None:
    split = replace(ROW, pipeline=4, tensor=4)
    stages = [stage_memory(MODELS["Qwen3-32B"], split, stage) for stage in range(4)]
    assert [bool(stage.head) for stage in stages] == [False, False, False, True]
    assert peak_memory(MODELS["Qwen3-32B"], split) in stages


def test_split_of_a_configuration() -> None:
    policy = PolicyConfig(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=3,
        context_parallel_size=2,
        expert_model_parallel_size=4,
        sequence_parallel=True,
        use_distributed_optimizer=True,
        offload="optimizer",
        dtype="bfloat16",
        recompute="selective",
        recompute_modules=("mlp", "core_attn"),
        micro_batch_tokens=100,
    )
    assert Split.of(policy, 32) == Split(
        2, 2, 3, 2, 4, 4, True, True, "optimizer", "bfloat16", ("mlp", "core_attn"), True, 100, None, True
    )


def test_table_rows_add_up() -> None:
    rows = memory_table(MODELS["Qwen3-4B"], replace(ROW, data=8, distributed_optimizer=True))
    sizes = [float(size.removesuffix(" GiB")) for _, size, _ in rows]
    assert rows[0][2] == "4,022,468,096 parameters x 2 B"
    assert sizes[6] == pytest.approx(sum(sizes[:6]), abs=0.3)
    assert sizes[7] == pytest.approx(sum(sizes[:3]), abs=0.2)
