"""Which GPUs trainer and engines have, and the sums that refuse what does not fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from ctpo_megatron.config import Config, Job, Placement, engine_count
from ctpo_megatron.config.rollout_rules import check_placement
from ctpo_megatron.plan import (
    GpuMemory,
    TransferMemory,
    check_gpu_memory,
    settled,
)
from ctpo_megatron.plan.memory import GIB
from docs.site.sizing import MODELS

ROOT = Path(__file__).resolve().parents[2]
FULL: dict[str, Any] = {"micro_batch_tokens": 16384, "recompute": "full"}
PAPER_14B = {
    "policy": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
    "rollout": {"engine": {"tensor_parallel_size": 2}},
}


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return base | {
        key: merged(base.get(key, {}), value) if isinstance(value, dict) else value for key, value in change.items()
    }


def readme(**change: Any) -> Config:
    """README's example, the one that docs/parallelism.md starts from."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"```yaml\n(run.*?)```", text, re.DOTALL)
    assert example is not None
    return TypeAdapter(Config).validate_python(merged(yaml.safe_load(example[1]), change))


def refused(config: Config, job: Job, model: str = "Qwen3-4B", gpu_gib: float = 80) -> str:
    chosen = settled(config, job, MODELS[model], gpu_gib)
    job = replace(job, cuda=True)
    problems = [*check_placement(chosen, None, job), *check_gpu_memory(chosen, MODELS[model], job, gpu_gib)]
    return "\n".join(f"{problem.severity}: {problem}" for problem in problems)


def colocated(**change: Any) -> dict[str, Any]:
    placed = {"mode": "colocated", "trainer_gpus": 8, "engine_gpus": 8}
    return merged({"placement": placed, "policy": {"offload": "all"}}, change)


@pytest.mark.parametrize(("model", "change"), [("Qwen3-4B", {}), ("Qwen3-14B", PAPER_14B)])  # 4B: as README says
@pytest.mark.parametrize("shared", [False, True])
def test_the_papers_models_fit_on_a_node_of_eight(model: str, change: dict[str, Any], shared: bool) -> None:
    job, config = (Job(8), readme(**colocated(**change))) if shared else (Job(4), readme(**change))
    assert Placement.of(config, job).gpus == 8
    assert refused(config, job, model) == ""


def test_sides_have_gpus_of_their_own_or_share_them() -> None:
    apart, shared = Placement.of(readme(), Job(4)), Placement.of(readme(**colocated()), Job(8))
    assert (apart.trainer, apart.engines) == (range(4), range(4, 8))
    assert (shared.trainer, shared.engines) == (range(8), range(8))
    assert apart.engine_devices(None) == "4,5,6,7"
    assert apart.engine_devices("7, 6,5,4,3,2,1,0") == "3,2,1,0"
    with pytest.raises(ValueError, match="the engines need GPU 7 of CUDA_VISIBLE_DEVICES=0,1,2,3"):
        apart.engine_devices("0,1,2,3")


def test_one_gpu_is_enough_by_turns() -> None:
    """As the first hour on a GPU runs the quickstart."""
    one = Job(1, None, 1, cuda=True)
    single: dict[str, Any] = {"placement": {"trainer_gpus": None, "engine_gpus": None}, "rollout": {"engines": 1}}
    assert "needs 2 GPUs" in str([str(p) for p in check_placement(readme(**single), None, one)])
    shared = merged(single, {"placement": {"mode": "colocated"}})
    assert list(check_placement(readme(**shared), None, one)) == []


def test_auto_is_one_engine_for_each_group_of_gpus() -> None:
    assert engine_count(readme()) == 4
    assert engine_count(readme(rollout={"engine": {"tensor_parallel_size": 2}})) == 2
    assert engine_count(readme(rollout={"engines": 3})) == 3
    assert engine_count(Config.model_validate({**readme().model_dump(), "placement": {}})) == 1


def test_gpus_of_engines_are_those_of_every_node() -> None:
    """Two nodes of 8 GPUs, the halves of each for trainer and engines."""
    nodes: dict[str, Any] = {"cluster": {"nodes": 2}}
    assert engine_count(readme(**nodes)) == 8
    assert engine_count(readme(**nodes, placement={"engine_gpus": None})) == 2  # a CPU engine a node
    assert Placement.of(readme(**nodes), Job(8, 4)).gpus == 8
    six = readme(**nodes, rollout={"engines": 6}, placement={"engine_gpus": None})
    assert Placement.of(six, Job(8, 4)).engines == range(4, 7)


TWO_NODES = {"cluster": {"nodes": 2}}
NO_ENGINE_GPUS = {"placement": {"engine_gpus": None}}


def engines(count: int) -> dict[str, Any]:
    return {"rollout": {"engines": count}}


CONTRADICTIONS: list[tuple[Job, dict[str, Any], str]] = [
    (Job(2), {}, "placement.trainer_gpus = 4: but 2 trainer ranks run here; start 4 ranks a node: torchrun"),
    (Job(16, 8), {}, "placement.trainer_gpus = 4: but 8 trainer ranks run here"),
    (Job(8), {}, "placement.trainer_gpus = 4: but 8 trainer ranks run here"),
    (
        Job(16, 4),
        TWO_NODES,
        "but 16 trainer ranks, 4 a node, run on other than 2 nodes; start torchrun with --nnodes 2",
    ),
    (Job(4), TWO_NODES, "placement.trainer_gpus = 4: but 4 trainer ranks run on 2 nodes (cluster.nodes)"),
    (Job(8, 8), TWO_NODES | {"placement": {"trainer_gpus": None}}, "cluster.nodes = 2: but 8 trainer ranks, 8 a node,"),
    (Job(4), NO_ENGINE_GPUS, 'rollout.engines = "auto": needs to know how many GPUs there are'),
    (Job(4), {"rollout": {"engine": {"tensor_parallel_size": 8}}}, "placement.engine_gpus = 4: cannot be distributed"),
    (Job(4), engines(5), "rollout.engines = 5: x 1 GPUs each do not fit into placement.engine_gpus"),
    (Job(4), engines(3), "warning: rollout.engines = 3: leaves 1 of placement.engine_gpus (4)"),
    (Job(8, 4), engines(9) | TWO_NODES, "do not fit into placement.engine_gpus (4) x cluster.nodes (2)"),
    (Job(8, 4), engines(7) | TWO_NODES, "leaves 1 of placement.engine_gpus (4) x cluster.nodes (2) without an engine"),
    (Job(8), colocated(placement={"engine_gpus": 16}), "engines need 16 GPUs, and the trainer has 8 to share"),
    (Job(4, 4, 4), {}, "needs 8 GPUs, 4 for the trainer and 4 for the engines, and this node shows 4; start fewer"),
]


@pytest.mark.parametrize(("job", "change", "expected"), CONTRADICTIONS)
def test_contradictions_are_named(job: Job, change: dict[str, Any], expected: str) -> None:
    found = [f"{p.severity}: {p}" for p in check_placement(readme(**change), None, replace(job, cuda=True))]
    assert any(expected in text for text in found), found


@pytest.mark.parametrize(
    ("world", "on_a_node", "nodes", "expected"),
    [("", "", 1, Job(4, 4)), ("", "", 2, Job(8, 4)), ("16", "8", 2, Job(16, 8)), ("4", "", 1, Job(4))],
)
def test_the_job_is_what_torchrun_says_or_what_is_configured(
    world: str, on_a_node: str, nodes: int, expected: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", on_a_node)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    config = readme(cluster={"nodes": nodes})
    assert Job.here(config, cuda=True) == replace(expected, cuda=True)
    assert Job.here(config, cuda=False) == (expected if world else Job(1))
    unset = Job.here(readme(placement={"trainer_gpus": None}), cuda=True)
    assert unset == replace(expected if world else Job(1), cuda=True)


def test_no_gpu_no_placement() -> None:
    assert list(check_placement(readme(placement={"trainer_gpus": 3}), None, Job(1))) == []
    (problem,) = check_placement(readme(**colocated()), None, Job(1))
    assert str(problem) == 'placement.mode = "colocated": engines sleep on CUDA only; set disaggregated'


def test_both_sides_are_added_up_on_a_shared_gpu() -> None:
    """91 of 80 GiB: what README's example would need on GPU 0 if engines neither slept nor had GPUs of their own.

    Weights, gradients and an eighth of the optimizer 7.5 + 15.0 + 5.6, activations 6.6, the output layer 2.7, of which
    2.3 are logits, and twice as much and a tenth of the activations that the allocator keeps.
    """
    shared = readme(**colocated(policy=FULL))
    moments = {m.when: m for m in GpuMemory(shared, Job(8), MODELS["Qwen3-4B"], 80).moments}
    assert moments["in an update"].parts["trainer"] / GIB == pytest.approx(28.1 + 6.6 + 2.7 + 2 * 2.3 + 0.7, abs=0.1)
    awake = moments["while sampling"].parts["engine"] / GIB
    assert awake == pytest.approx(48)
    assert 90 < moments["in an update"].parts["trainer"] / GIB + awake < 91
    assert moments["while sampling"].parts["trainer"] == 0
    sent = moments["while weights are sent"].parts
    embedding = 2 * 151936 * 2560 / GIB  # in the buffer, its clone, and the engine's new layer
    assert sent.pop("transfer") / GIB == pytest.approx(3 * embedding)
    assert sum(sent.values()) / GIB == pytest.approx(7.5 + 15 + 5.6 + 7.5 + 2, abs=0.2)


def test_buckets_of_nccl_are_on_both_sides() -> None:
    """Two of `rollout.weights.bucket_mib` under way, and the embedding, which is larger; the engine keeps more."""
    found = {
        bucket: {m.gpus: m for m in GpuMemory(config, Job(4), MODELS["Qwen3-4B"], 80).moments if "sent" in m.when}
        for bucket in (16, 512)
        for config in [readme(rollout={"weights": {"bucket_mib": bucket}})]
    }
    more = {gpus: found[512][gpus].bytes - moment.bytes for gpus, moment in found[16].items()}
    assert more == {"GPUs 0 to 3": 2 * 496 << 20, "GPUs 4 to 7": 4 * 496 << 20}
    embedding = 2 * 151936 * 2560
    assert found[16]["GPUs 0 to 3"].parts["transfer"] == embedding + (32 << 20)


def test_tensors_wait_in_an_engine_until_their_layer_is_complete() -> None:
    """All experts of a layer; and a vocabulary that vLLM pads, which is never complete before the end."""
    config, dense, mixture = readme(**colocated()), MODELS["Qwen3-4B"], MODELS["Qwen3-30B-A3B"]
    embedding, experts = 2 * 151936 * mixture.hidden_size, 2 * 128 * 3 * 768 * mixture.hidden_size
    assert TransferMemory.of(config, mixture) == TransferMemory(embedding, embedding + 2 * experts)
    padded = replace(dense, vocab_size=dense.vocab_size + 1)
    embedding = 2 * padded.vocab_size * padded.hidden_size
    assert TransferMemory.of(config, padded) == TransferMemory(embedding, 3 * embedding)


def test_tcp_gathers_whole_tensors() -> None:
    weights: dict[str, Any] = {"rollout": {"weights": {"transport": "tcp"}}}
    for ranks, gathered in ((1, 0), (2, 2 * 151936 * 2560 + 2 * 2 * 2560 * 9728)):
        config = readme(**weights, policy={"tensor_model_parallel_size": ranks})
        assert TransferMemory.of(config, MODELS["Qwen3-4B"]).trainer == gathered


def test_the_head_is_counted_with_as_many_rows_of_logits_as_the_trainer_takes() -> None:
    """Of Qwen3-4B: 1024 on GPUs of 43 GiB, 4096 on those of 80; `policy.head_chunk_tokens` is what it is. The
    allocator keeps two blocks of their size."""

    def in_an_update(gpu_gib: float, **policy: Any) -> float:
        config = readme(**colocated(policy=FULL | policy))
        moments = {m.when: m for m in GpuMemory(config, Job(8), MODELS["Qwen3-4B"], gpu_gib).moments}
        return moments["in an update"].parts["trainer"]

    row = 3 * 4 * 151936
    assert in_an_update(80) - in_an_update(43) == (4096 - 1024) * row
    assert in_an_update(80, head_chunk_tokens=512) == in_an_update(80) - (4096 - 512) * row
    assert in_an_update(43, head_chunk_tokens=512) == in_an_update(80, head_chunk_tokens=512)


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_a_trainer_that_stays_is_added_to_the_sampling_engine(offload: str) -> None:
    shared = colocated(policy={"offload": offload}, rollout={"engine": {"gpu_memory_utilization": 0.85}})
    text = refused(readme(**shared), Job(8))
    assert "GPUs 0 to 7: " in text and "of 80 GiB while sampling (trainer" in text and "+ engine 68.0 GiB)" in text


def test_the_three_cheapest_changes_are_named() -> None:
    text = refused(
        readme(**colocated(policy={"offload": "none"}, rollout={"engine": {"gpu_memory_utilization": 0.6}})), Job(8)
    )
    assert text.startswith('error: placement.mode = "colocated": GPUs 0 to 7: 76.1 GiB of 80 GiB while sampling')
    changes = re.findall(r"([a-z_.]+=[a-z0-9.]+) \((\d+\.\d) GiB\)", text)
    assert [change for change, _ in changes] == [
        "policy.offload=optimizer",
        "policy.offload=all",
        "rollout.engine.gpu_memory_utilization=0.5",
    ]
    assert all(float(size) <= 72 for _, size in changes)


def test_a_change_that_is_named_helps() -> None:
    config = readme(policy={"recompute": "none", "use_distributed_optimizer": False, "micro_batch_tokens": 32768})
    text = refused(config, Job(4))
    assert "GPUs 0 to 3: " in text and "in an update (trainer" in text
    assert "policy.recompute=full" in text
    assert refused(readme(), Job(4)) == ""


def test_a_model_that_is_too_large_is_told_so() -> None:
    wide = {"policy": {"tensor_model_parallel_size": 8, "sequence_parallel": True}}
    text = refused(readme(**colocated(**wide, rollout={"engine": {"tensor_parallel_size": 4}})), Job(8), "Qwen3-32B")
    assert "while weights are sent (trainer 68.7 GiB + engine's weights 17.3 GiB + transfer 5.2 GiB)" in text
    assert (
        "no single change is enough, use more GPUs; those that save most: rollout.engine.tensor_parallel_size=8" in text
    )


def test_an_engine_that_cannot_hold_its_model_is_refused() -> None:
    for share, model, gib, fix in (
        (0.1, "Qwen3-4B", 80, "set at least 0.14"),
        (0.9, "Qwen3-32B", 48, "raise rollout.engine.tensor_parallel_size"),
    ):
        text = refused(readme(rollout={"engine": {"gpu_memory_utilization": share}}), Job(4), model, gib)
        assert f"rollout.engine.gpu_memory_utilization = {share}: of" in text and fix in text, text
