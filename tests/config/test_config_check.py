"""Cross-field, model, machine and file checks: each mistake has one message, and a good configuration has none."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ctpo_megatron.checks import check_extensions, validate
from ctpo_megatron.config import Config, ConfigError, Job, load_with_sources
from ctpo_megatron.config.keys import known_paths
from ctpo_megatron.plan import evaluations
from tests.config.model import SPEC, found

Make = Callable[..., Config]


def test_good_configuration_has_no_problem(config_with: Make) -> None:
    config = config_with()
    assert validate(config, Job(1)) == []
    assert found(config, world_size=4) == []
    assert found(config_with("policy.tensor_model_parallel_size=2", "policy.sequence_parallel=true"), 2) == []


ERRORS = {
    "policy.tensor_model_parallel_size=2": ": x pipeline_model_parallel_size 1 = 2 does not divide the world size 3",
    "policy.sequence_parallel=true": ": needs tensor parallelism",
    "rollout.tool_parser=fenced rollout.tools=[python,my:Tool]": ": runs programs with one tool, and rollout.tools",
    "rollout.max_tool_s=2.0 rollout.tools=[]": ": limits calls, and rollout.tools is",
    "rollout.tool_parser=fenced rollout.tools=[]": "rollout.tools has 0 (none)",
    "data.tool_in_prompt=true rollout.tool_parser=fenced": ": shows the model a way to call tools that",
    "data.system_prompt=none.txt": ": is the name of a file that cannot be read",
    "policy.layer_spec=transformer_engine": "Transformer Engine needs CUDA and policy.dtype: bfloat16 or",
    "policy.pipeline_model_parallel_size=3": "does not divide the model's 2 layers",
    "policy.context_parallel_size=2": "x context_parallel_size 2 = 2 does not divide the world size 3",
    "policy.data_parallel_size=2": ": but 3 ranks make 3 replicas; start 2 ranks",
    "policy.virtual_pipeline_model_parallel_size=2": "needs pipeline stages; leave it null, or raise",
    "policy.virtual_pipeline_model_parallel_size=1 policy.pipeline_model_parallel_size=3": "plain pipeline",
    "policy.expert_model_parallel_size=3": ": the model has no experts",
    "policy.offload=all": "needs CUDA and policy.use_distributed_optimizer and policy.dtype: bfloat16 or",
    "policy.initial_loss_scale=1000.0": ": is no power of two; set 1024",
    "policy.initial_loss_scale=1024": "= 1024.0: has no effect in float32; set policy.dtype: float16",
    "policy.recompute_modules=[mlp]": "has no effect; set policy.recompute: selective",
    "policy.recompute=selective policy.recompute_modules=[layernorm,moe_act]": (
        "layernorm and moe_act need Transformer Engine"
    ),
    "policy.recompute=selective policy.recompute_modules=[moe_act,moe,core_attn]": (
        "moe and moe_act: not in the layers of a dense model; remove it from the list"
    ),
    "policy.overlap_param_gather=true": "needs policy.use_distributed_optimizer and policy.overlap_grad_reduce",
    "cluster.node_address=node7": ": is no IP address; give the address that Ray",
    "policy.pad_to_multiple=250 policy.micro_batch_tokens=249": "set at least 250",
    "policy.context_parallel_size=3 policy.micro_batch_tokens=79": "cannot hold the longest sequence on 3",
    "policy.mini_batch_prompts=4": "= 32 sequences cannot be shared evenly; make it divisible by the 3",
    "sft.data=[base.yaml] sft.steps=1": "sft.conversations_per_step = 32: cannot be shared evenly",
    "rollout.engine.max_model_len=600": "exceeds the model's max_position_embeddings (512)",
    "rollout.engine.kv_cache_mb=null rollout.engine.max_model_len=2000000000": (
        "kv_cache_mb = null: one sequence of 2,000,000,000 tokens needs"
    ),
    "rollout.engine.model_runner=v2": 'model_runner = "v2": needs CUDA and Triton; set v1',
    "rollout.weights.transport=nccl": 'transport = "nccl": needs CUDA; set auto or tcp',
    "rollout.engine.block_size=16": "must be a multiple of 32 without CUDA",
    "'rollout.engine.extra={dtype: half}'": 'extra.dtype = "half": is set elsewhere; use rollout.engine.dtype',
    "'rollout.engine.extra={seed: 1}'": "extra.seed = 1: is set elsewhere; use run.seed",
    "'rollout.engine.extra={logprobs_mode: raw}'": "the trainer needs the log-probs of the distribution sampled",
    "rollout.engine.tensor_parallel_size=3": ": does not divide",
    "rollout.samples_per_prompt=1 rollout.prompts_per_step=1 objective.advantage.kind=mean_baseline": (
        "prompts_per_step = 1: a batch of one trajectory has nothing to be compared with"
    ),
    "objective.function=soft_clip": ": is no import path",
    "objective.entropy_coef=0.01 objective.function=my:f": ": is of our own objectives; objective.function decides",
    "objective.tau_positive=2.0": ": has no effect with clip_mode: log_power",
    "objective.clip_mode=ratio": "objective.clip_c = 0.05: with clip_mode: ratio it bounds the ratio itself",
    "objective.clip_low=3.0 objective.preset=grpo": ": with clip_mode: ratio the lower",
    "objective.clip_c=0.1 objective.preset=gspo": ": with clip_mode: ratio it",
    "rollout.top_p=0.9 objective.anchor=behaviour": ": the sampler's log-probs",
    "rollout.top_k=5 objective.anchor=behaviour": ": the sampler's log-probs are of",
    "rollout.top_p=0.9 objective.correction.veto=0.1": ": the sampler's log-probs are of the filtered distribution",
    "objective.anchor=decoupled": "is the proximal ratio times a weight, and objective.correction.level is none",
    "objective.correction.level=sequence": ": multiplies the proximal ratio by a weight; set objective.anchor",
    "objective.correction.level=token objective.anchor=behaviour": '"token": would count twice: with anchor',
    "objective.turn_ratio=prefix": ": has no effect with objective.credit: outcome",
    "objective.credit=turn objective.preset=gmpo": ": gives the turns of a sequence advantages of both signs, and",
    "objective.turn_ratio=turn-end objective.credit=turn objective.preset=gspo": (
        ": is the product of ratios up to the end of a turn, and ratio_mode is"
    ),
    "objective.turn_ratio=turn-end objective.credit=turn objective.anchor=decoupled": (
        ": takes ratios to the end of a turn, and the weights of anchor"
    ),
    "objective.credit=turn objective.turn_ratio=turn-end objective.function=mine:loss": (
        "objective.function decides all of its loss; remove it; inputs.turn has the turns"
    ),
    "'objective.correction.reject=[{stat: k1, over: token, low: 0.5, high: 2.0}]'": (
        "objective.correction.reject.0: the bounds (low 0.5, high 2.0) of k1 are nats, not ratios"
    ),
    "'objective.correction.reject=[{stat: k2, over: token}]'": "reject.0: has no bound, so nothing leaves",
    "'objective.correction.reject=[{stat: k3, over: token, low: 0.1}]'": "reject.0.low = 0.1: k3 is never negative",
    "'objective.correction.reject=[{stat: k3, over: token, high: 0}]'": "reject.0.high = 0.0: must be positive",
    "'objective.correction.reject=[{stat: k1, over: sequence_max, high: 1}]'": (
        'reject.0.over = "sequence_max": k1 has a sign'
    ),
    "'objective.correction.reject=[{stat: k2, over: token, high: 1}, {stat: k2, over: token, high: 2}]'": (
        "objective.correction.reject: k2 over token is there twice"
    ),
    "rollout.max_staleness=1 placement.mode=colocated": ": needs engines that sample",
    "rollout.lag=1 placement.mode=colocated": ": needs engines that sample",
    "rollout.max_staleness=1 rollout.lag=1": ": samples ahead whatever",
    "rollout.oversample=2 rollout.lag=1": ": keeps the groups that are complete first",
    "rollout.lag=1 rollout.replay=runs/x": ": is for engines; what rollout.replay ha",
    "rollout.max_staleness=1 rollout.replay=runs/x": "is for engines; what rollout.replay has recorded has",
    "rollout.top_p=0.9 rollout.max_staleness=1": ": the sampler's log-probs are of the",
    "policy.optimizer.min_lr=1.0": ": is above lr (1e-06); lower it",
    "policy.optimizer.betas=[0.9,1.0]": ": item 1 must be in [0, 1)",
    "run.resume=auto run.overwrite=true": ": contradicts run.overwrite: true",
    "sandbox.request_timeout_s=4.0": ": must exceed sandbox.run_timeout_s (4); queueing and start-up come on",
    "export.directory=..": ": is not a name; choose another, e.g. model",
    "export.directory=checkpoints": "is what the run writes something else to",
    "export.directory=stalls": "is what the run writes something else to",
    "export.directory=heartbeat.json": "is what the run writes something else to",
    "model.path=runs/first/model": "in runs/first would be replaced, but holds model.path (runs/first/model);",
    "'rollout.filters=[truncated, {name: mine:truncated}]'": '["truncated", "mine:truncated"]: holds 2 filters named',
    "rollout.uniform_groups=drop rollout.samples_per_prompt=1 objective.advantage.kind=mean_baseline": (
        ": would drop everything: the rewards of a group of one are always"
    ),
    "rollout.uniform_groups=refill objective.advantage.kind=mean_baseline": ": would drop groups that teach:",
    "rollout.oversample=4 rollout.uniform_groups=refill": ": draws further prompts before it is known how many are",
    "rollout.oversample=4 rollout.replay=runs/other": ": is for engines; what was not waited for is not in",
    "'reward.overlong_penalty={buffer: 177}'": "reward.overlong_penalty.buffer = 177: is more than the budget itself",
    "run.deadline=1795438000123.0": ": is decades ahead; give seconds since the epoch, s",
    "eval.temperature=0.001": ": the engine would sample at 0.01 instead; set 0 for greedy decoding, or at ",
    "checkpoint.load=nowhere": ": is no complete checkpoint (no COMPLETE.json in it); give a folder such ",
}
"""Overrides -> what is said of them; from a colon on where it is said of the first of them."""


def said_of(overrides: str, expected: str) -> str:
    key, _, value = shlex.split(overrides)[0].partition("=")
    return f"{key} = {json.dumps(yaml.safe_load(value))}{expected}" if expected.startswith(":") else expected


@pytest.mark.parametrize("overrides", ERRORS)
def test_errors(config_with: Make, overrides: str) -> None:
    texts = found(config_with(*shlex.split(overrides)), world_size=3)
    expected = said_of(overrides, ERRORS[overrides])
    assert any(text.startswith("error: ") and expected in text for text in texts), texts


def test_files_that_are_not_there(config_with: Make) -> None:
    config = config_with("data.train=[none.parquet]", "data.eval=[toolmath/x.parquet]")
    none = "no such file; give the path of a data file, or of a folder of them (docs/data.md)"
    assert found(config, spec=None) == [
        f'error: data.train = "none.parquet": {none}',
        'error: data.eval = "toolmath/x.parquet": no such file; python -m examples.toolmath toolmath writes it',
    ]


WARNINGS = {
    "'rollout.engine.extra={trust_remote_code: true}'": "extra.trust_remote_code = true: runs code: Python files in",
    "policy.mini_batch_prompts=32": "exactly one update per batch: the ratio is identically 1",
    "objective.preset=dr-grpo": "set it to rollout.max_response_tokens (176)",
    "policy.mini_batch_prompts=32 objective.anchor=decoupled objective.correction.level=prefix": (
        "exactly one update per batch"
    ),
    "rollout.top_p=0.9": ": the sampler's log-probs are of the filtered distribution",
    "policy.dtype=bfloat16": ": but the engine runs in float32",
    "rollout.engine.dtype=bfloat16": "(rollout.engine.dtype): their log-probs will differ by rounding; set roll",
    "rollout.mismatch_limit=0.001 policy.dtype=bfloat16": "is within the rounding of bfloat16",
    "rollout.mismatch_limit=0.001 policy.dtype=float16": "is within the rounding of float16",
    "policy.dtype=float16 rollout.engine.dtype=bfloat16": "but the engine runs in bfloat16",
    "eval.samples=4": "greedy decoding gives the same answer every time",
    "eval.prompts=4": ": has no effect without data.eval",
    "policy.optimizer.warmup_steps=32": "never reaches the full lr: there are 32 optimizer steps",
    "policy.optimizer.warmup_steps=96 policy.passes_per_batch=3": "there are 96 optimizer steps",
    "rollout.max_turns=1": ": is the last turn, which may not call: the tools (python)",
    "rollout.max_turn_tokens=500": "never acts: rollout.max_response_tokens (176) is smaller",
    "rollout.group_timeout_s=60": "one slow tool call (60 s allowed) makes the whole group time out, and it is",
    "run.profile_steps=[1,99]": "names steps that are never made: 99 of 4 (run.steps); remove them",
    "run.resume=true checkpoint.every=0": "there is no checkpoint before the last step, and a crash loses all steps;",
    "rollout.partial=finish": ": has no effect: with rollout.max_staleness: 0",
    "objective.anchor=proximal rollout.max_staleness=2": ": is biased for stale data (rollout.max_staleness)",
    "objective.preset=cppo": 'objective.anchor = "proximal": makes clip_mode: prefix_tv measure from',
}


@pytest.mark.parametrize("overrides", WARNINGS)
def test_warnings(config_with: Make, overrides: str) -> None:
    texts = found(config_with(*shlex.split(overrides)))
    assert all(text.startswith("warning: ") for text in texts), texts
    assert any(said_of(overrides, WARNINGS[overrides]) in text for text in texts), texts


PARTS = {
    "rollout.tools=[calculator]": 'line: rollout.tools.0 = "calculator": write python, or package.module:Name',
    "rollout.filters=[sometimes]": "sometimes",
    "tracking.trackers=[wanddb]": "wanddb",
}
"""Parts that are named by a word."""


@pytest.mark.parametrize("override", PARTS)
def test_parts_that_are_not_there(base: Path, override: str) -> None:
    config, sources = load_with_sources(base, [override])
    with pytest.raises(ConfigError) as caught:
        check_extensions(config, sources)
    assert PARTS[override] in str(caught.value)
    assert str(caught.value).count(override.partition("=")[0]) == 1


FINE = [
    "policy.mini_batch_prompts=32 objective.anchor=behaviour",
    "policy.mini_batch_prompts=32 policy.passes_per_batch=2",
    "policy.optimizer.warmup_steps=32 policy.passes_per_batch=2",
    "rollout.samples_per_prompt=1 objective.advantage.kind=mean_baseline",
    "'rollout.engine.extra={max_num_batched_tokens: 512}'",
    "objective.clip_mode=ratio objective.clip_c=-1",
    "objective.anchor=decoupled objective.correction.level=sequence",
    "objective.anchor=behaviour objective.correction.veto=1e-4",
    *(f"objective.credit=turn objective.{more}" for more in ("preset=gspo", "preset=sequence", "turn_ratio=turn-end")),
    "objective.preset=cppo objective.anchor=behaviour",
    "objective.preset=cppo-base objective.anchor=behaviour objective.prefix_budget=0.02",
    "objective.preset=cppo objective.anchor=behaviour 'objective.prefix_budget={quantile: 0.8, min: 0.01}'",
    "'objective.correction.reject=[{stat: k1, over: token, low: -1, high: 1}, {stat: k2, over: token, high: 1}]'",
    "rollout.max_staleness=1 rollout.partial=finish",
    "rollout.max_turns=1 rollout.tools=[]",
    "rollout.tools=[]",
    "'reward.overlong_penalty={buffer: 176}' rollout.uniform_groups=refill",
    "rollout.filters=[void_turn,truncated,failed_tool]",
]


@pytest.mark.parametrize("overrides", FINE)
def test_no_false_alarms(config_with: Make, overrides: str) -> None:
    assert found(config_with(*shlex.split(overrides))) == []


def test_no_false_alarms_of_several_ranks_or_of_a_gpu(config_with: Make) -> None:
    for preset in ("cispo", "gmpo"):
        assert found(config_with(f"objective.preset={preset}", "policy.context_parallel_size=2"), world_size=2) == []
    assert found(config_with("rollout.engine.kv_cache_mb=null", "rollout.engine.block_size=16"), cuda=True) == []


def test_the_anchor_follows_the_staleness_unless_it_is_given(config_with: Make) -> None:
    assert config_with().objective.anchor == config_with("rollout.max_staleness=0").objective.anchor == "proximal"
    stale = config_with("rollout.max_staleness=2")
    assert stale.objective.anchor == "behaviour" and stale.objective.preset == config_with().objective.preset
    assert config_with("rollout.max_staleness=2", "objective.anchor=proximal").objective.anchor == "proximal"
    assert config_with("rollout.lag=2").objective.anchor == "behaviour"
    interpolated = config_with("rollout.max_staleness=${run.steps}")
    assert interpolated.rollout.max_staleness == 4 and interpolated.objective.anchor == "behaviour"


def test_cache_must_hold_one_sequence(config_with: Make) -> None:
    wide = replace(SPEC, num_layers=36, num_key_value_heads=8, head_dim=128)
    (text,) = found(config_with(), spec=wide)
    assert "rollout.engine.kv_cache_mb = 64: cannot hold one sequence of 256 tokens (294912 bytes each)" in text
    assert text.endswith("set at least 72")


@pytest.mark.parametrize(
    ("trainer", "chosen", "each"),
    [("float32", "auto", 4), ("bfloat16", "auto", 2), ("float16", "auto", 2), ("float32", "bfloat16", 2)],
)
def test_sizes_are_planned_for_the_precision_that_the_engine_gets(
    config_with: Make, trainer: str, chosen: str, each: int
) -> None:
    keys = [f"policy.dtype={trainer}", f"rollout.engine.dtype={chosen}", "rollout.engine.kv_cache_mb=1"]
    config = config_with(*keys, "rollout.mismatch_limit=null")
    for stored in ("float32", "bfloat16"):
        wide = replace(SPEC, num_layers=36, num_key_value_heads=8, head_dim=128, dtype=stored)
        texts = found(config, spec=wide)
        assert any(f"tokens ({2 * 36 * 8 * 128 * each} bytes each)" in text for text in texts)
        assert [text for text in texts if "policy.dtype" in text and chosen == "auto"] == []


def test_head_size_that_the_cpu_engine_lacks(config_with: Make) -> None:
    odd = replace(SPEC, head_dim=24)
    (text,) = found(config_with(), spec=odd)
    assert "model.path" in text and "head_dim 24" in text and "32, 64" in text
    assert found(config_with(), spec=odd, cuda=True) == []


def test_settings_that_train_wrongly_are_not_offered() -> None:
    refused = ("p2p_comm", "deallocate_pipeline", "perform_initialization", "expert_tensor")
    assert [path for path in known_paths() for word in refused if word in path] == []


def test_an_export_replaces_a_model_directory_only(config_with: Make) -> None:
    target = Path("runs/first/model")
    target.mkdir(parents=True)
    (target / "config.json").touch()
    assert found(config_with()) == []
    (target / "config.json").rename(target / "notes.json")
    (text,) = found(config_with())
    assert 'export.directory = "model": exists in runs/first, and is no model directory' in text
    assert found(config_with("export.enabled=false")) == []
    assert found(config_with("run.overwrite=true")) == []


@pytest.mark.parametrize("trainer", ["float32", "bfloat16", "float16"])
def test_every_precision_of_trainer_and_engines_is_taken(config_with: Make, trainer: str) -> None:
    """Two precisions with a warning; what needs 16 bits on a GPU takes either kind."""
    keys = [f"policy.dtype={trainer}", "rollout.mismatch_limit=null"]
    keys += ["policy.offload=all", "policy.use_distributed_optimizer=true"] if trainer != "float32" else []
    config = config_with(*keys)
    for sampler in ("auto", "float32", "bfloat16", "float16"):
        engine = config.rollout.engine.model_copy(update={"dtype": sampler})
        rollout = config.rollout.model_copy(update={"engine": engine})
        texts = found(config.model_copy(update={"rollout": rollout}), cuda=True)
        differ = sampler not in ("auto", trainer)
        assert [text.split(":")[0] for text in texts] == ["warning"] * differ
        assert all("rounding" in text for text in texts)


def test_evaluations(config_with: Make) -> None:
    config = config_with("data.eval=[x]")
    for every, expected in ((0, 2), (1, 5), (2, 3), (4, 2), (9, 2)):
        settings = config.eval.model_copy(update={"every": every})
        assert evaluations(config.model_copy(update={"eval": settings})) == expected
