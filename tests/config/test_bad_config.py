"""Wrong configurations: each has one clear message that names the key, its value and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctpo_megatron.config import ConfigError, Job, load_with_sources
from ctpo_megatron.preflight import check_extensions, validate

# Overrides, and the beginning of what is said of them.
WRONG = [
    ("run.stepz=3", "run.stepz = 3: unknown key; did you mean run.steps?"),
    ("run.steps=three", 'run.steps = "three": must be an integer'),
    ("run.steps=-1", "run.steps = -1: must be greater than or equal to 0"),
    ("run.steps=1.5", "run.steps = 1.5: must be an integer"),
    ("run.steps=true", "run.steps = true: must be an integer"),
    ("run.name=a/b", 'run.name = "a/b": may hold only letters, digits, `.`, `_` and `-`'),
    *((f"run.name='{name}'", f'run.name = "{name}": may hold only letters') for name in (".", "..", "...")),
    ("run.name=3", "run.name = 3: must be a string; quote it: \"'3'\" on the command line, '3' in YAML"),
    ("run.seed=-1", "run.seed = -1: must be greater than or equal to 0"),
    ("run.resume=yes_please", 'run.resume = "yes_please": must be one of true, false, auto'),
    (
        "run.resume=true run.overwrite=true",
        "run.resume = true: contradicts run.overwrite: true; switch one of them off",
    ),
    (
        "run.deadline=1",
        "run.deadline = 1.0: is in the past; give seconds since the epoch, such as $(date -d +4hours +%s)",
    ),
    ("data.train=[]", "data.train = []: wrong number of items; give at least 1"),
    ("data.train=train.parquet", 'data.train = "train.parquet": must be a list; write [train.parquet]'),
    ("data.train=null", "data.train = null: must be a list"),
    (
        "data.train=[missing.parquet]",
        'data.train = "missing.parquet": no such file; give the path of a data file, or of a folder of them (',
    ),
    (
        "data.train=[openai/gsm8k]",
        'data.train = "openai/gsm8k": no such file; a data set of the Hub first: hf download openai/gsm8k --r',
    ),
    ("data.overlong=skip", 'data.overlong = "skip": must be one of refuse, drop'),
    ("data.unverifiable=ignore", 'data.unverifiable = "ignore": must be one of refuse, drop'),
    ("data.max_prompt_tokens=0", "data.max_prompt_tokens = 0: must be greater than 0"),
    ("eval.every=5", "eval.every = 5: there is nothing to evaluate on; give data.eval, or set it to 0"),
    (
        "model.path=Qwen/Qwen3-4B",
        'model.path = "Qwen/Qwen3-4B": no such directory; give a directory in Hugging Face format, or runs/ta',
    ),
    (
        "model.path=missing",
        'model.path = "missing": no such directory; give a directory in Hugging Face format, or runs/task/mod',
    ),
    (
        "model=null",
        "model = null: a section must be a mapping; write its keys below it, or remove it to take the default",
    ),
    ("model.chat_template_kwargs=3", "model.chat_template_kwargs = 3: must be an object"),
    (
        "policy.tensor_model_parallel_size=2",
        "policy.tensor_model_parallel_size = 2: x pipeline_model_parallel_size 1 = 2 does not divide the worl",
    ),
    (
        "policy.mini_batch_prompts=5",
        "policy.mini_batch_prompts = 5: does not divide the batch; choose a divisor of rollout.prompts_per_st",
    ),
    (
        "policy.micro_batch_tokens=100",
        "policy.micro_batch_tokens = 100: cannot hold the longest sequence, data.max_prompt_tokens (64) + rol",
    ),
    ("policy.optimizer.lr=0", "policy.optimizer.lr = 0: must be greater than 0"),
    ("policy.optimizer.lr=fast", 'policy.optimizer.lr = "fast": must be a number'),
    ("policy.optimizer.min_lr=1", "policy.optimizer.min_lr = 1.0: is above lr (1e-06); lower it"),
    ("policy.optimizer.betas=[0.9]", "policy.optimizer.betas.1: wrong number of items; give 2 numbers"),
    ("policy.optimizer.betas=[0.9,1.5]", "policy.optimizer.betas = [0.9, 1.5]: item 1 must be in [0, 1)"),
    ("policy.optimizer.warmup_steps=-2", "policy.optimizer.warmup_steps = -2: must be greater than or equal to 0"),
    ("policy.dtype=fp16", 'policy.dtype = "fp16": must be one of float32, bfloat16, float16; did you mean float16?'),
    ("policy.dtype=int8", 'policy.dtype = "int8": must be one of float32, bfloat16, float16'),
    ("policy.head=softmax", 'policy.head = "softmax": must be one of streaming, logits'),
    ("rollout.samples_per_prompt=0", "rollout.samples_per_prompt = 0: must be greater than 0"),
    (
        "rollout.samples_per_prompt=1",
        "rollout.samples_per_prompt = 1: gives no advantage 'group': a trajectory would be compared with itse",
    ),
    ("rollout.group_timeout_s=1e12", "rollout.group_timeout_s = 1000000000000.0: must be less than or equal to 10000"),
    ("run.stall_timeout_s=1e12", "run.stall_timeout_s = 1000000000000.0: must be less than or equal to 1000000000"),
    ("run.deadline=1", "run.deadline = 1.0: is in the past; give seconds since the epoch, such as $(date -d +4hours"),
    (
        "run.deadline=1795438000123",
        "run.deadline = 1795438000123.0: is decades ahead; give seconds since the epoch, s",
    ),
    ("run.seed=4294967296", "run.seed = 4294967296: must be less than or equal to 4294967295"),
    ("rollout.temperature=0", "rollout.temperature = 0: must be greater than or equal to 0.01"),
    ("rollout.temperature=2.5", "rollout.temperature = 2.5: must be less than or equal to 2"),
    ("eval.temperature=3", "eval.temperature = 3: must be less than or equal to 2"),
    (
        "eval.temperature=0.001",
        "eval.temperature = 0.001: the engine would sample at 0.01 instead; set 0 for greedy decoding, or at ",
    ),
    ("rollout.top_p=2", "rollout.top_p = 2: must be less than or equal to 1"),
    (
        "rollout.max_response_tokens=5000",
        "rollout.engine.max_model_len = 256: is less than data.max_prompt_tokens (64) + rollout.max_response_",
    ),
    (
        "rollout.engine.max_model_len=10",
        "rollout.engine.max_model_len = 10: is less than data.max_prompt_tokens (64) + rollout.max_response_t",
    ),
    ("rollout.engine.kv_cache_mb=-3", "rollout.engine.kv_cache_mb = -3: must be greater than 0"),
    ("rollout.uniform_groups=maybe", 'rollout.uniform_groups = "maybe": must be one of keep, drop, refill'),
    (
        "rollout.replay=nowhere",
        'rollout.replay = "nowhere": is no run directory (no config.yaml in it); give one, e.g. runs/first',
    ),
    (
        "objective.preset=ppo",
        'objective.preset = "ppo": must be one of ctpo, ctpo-paper, ctpo-uniform, ctpo-fixed, ctpo-drift, ct',
    ),
    (
        "objective.preset=ctp",
        'objective.preset = "ctp": must be one of ctpo, ctpo-paper, ctpo-uniform, ctpo-fixed, ctpo-drift, ct',
    ),
    ("objective.clip_low=-1", "objective.clip_low = -1: must be greater than or equal to 0"),
    (
        "objective.kl_coef=0.1",
        "objective.kl_coef = 0.1: there is no KL term: the published objective has none, its clip window boun",
    ),
    ("objective.advantage.kind=gae", 'objective.advantage.kind = "gae": must be one of group, rloo, mean_baseline'),
    ("reward.timeout_s=0", "reward.timeout_s = 0: must be greater than 0"),
    ("reward.workers=0", "reward.workers = 0: must be greater than 0"),
    ("eval.samples=0", "eval.samples = 0: must be greater than 0"),
    (
        "checkpoint.load=nowhere",
        'checkpoint.load = "nowhere": is no complete checkpoint (no COMPLETE.json in it); give a folder such ',
    ),
    (
        "checkpoint.best_metrik=x",
        'checkpoint.best_metrik = "x": unknown key; did you mean checkpoint.best_metric or checkpoint.sft_eve',
    ),
    ("export.directory=../x", 'export.directory = "../x": may hold only letters, digits, `.`, `_` and `-`'),
    (
        "sandbox.request_timeout_s=1",
        "sandbox.request_timeout_s = 1.0: must exceed sandbox.run_timeout_s (4); queueing and start-up come o",
    ),
    ("+run.seed=3", '+run.seed = "3": no `+` here; every known key can be set: run.seed=3'),
    ("~prepare", "~prepare: no `~` here; an optional section or value is switched off with prepare=null"),
    ("--run.seed=3", '--run.seed = "3": no dashes here; write run.seed=3'),
    ("run.root=caf\udce9", 'run.root = "caf\udce9": is not UTF-8; rename'),
    ("run.seed", "run.seed: no `=` in this override; write run.seed=VALUE"),
    (
        "data.train.0=x",
        'data.train.0 = "x": an item of a list cannot be set alone; give the whole list: data.train=[first,se',
    ),
    ("run..seed=1", 'run..seed = "1": an empty name in the path; write section.key=VALUE'),
    ("run.name=${nothing}", 'run.name = "${nothing}": there is no key nothing'),
    (
        "sft.steps=4",
        "sft.data: required, but not given; add it: files with a column `messages` (docs/data.md) (list of te",
    ),
    ("extra.section=1", 'extra = {"section": 1}: unknown key; did you mean rollout.engine.extra?'),
]
# Parts that are named by a word.
PARTS = [
    ("rollout.tool_parser=xml", '= "xml": write hermes or fenced, or package.module:Name'),
    (
        "rollout.tools=[calculator]",
        'command line: rollout.tools.0 = "calculator": write python, or package.module:Name',
    ),
    ("rollout.filters=[sometimes]", "sometimes"),
    ("reward.function=exact", "no such part; write math_verify or package.module:Name"),
    ("reward.function=nowhere:Score", "there is no module 'nowhere'"),
    ("tracking.trackers=[wanddb]", "wanddb"),
]


@pytest.mark.parametrize(("overrides", "message"), WRONG)
def test_values(base: Path, overrides: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config, sources = load_with_sources(base, overrides.split())
        validate(config, Job(1), cuda=False, sources=sources)
    assert message in str(caught.value)


@pytest.mark.parametrize(("override", "message"), PARTS)
def test_parts(base: Path, override: str, message: str) -> None:
    config, sources = load_with_sources(base, [override])
    with pytest.raises(ConfigError) as caught:
        check_extensions(config, sources)
    assert message in str(caught.value)
    assert str(caught.value).count(override.partition("=")[0]) == 1


# What a file itself may have wrong.
FILES = {
    "run: {name: a\n": "not valid YAML",
    "run:\n\tname: a\n": "not valid YAML",
    "- run\n": "the file must be a mapping of sections",
    "defaults: base.yaml\n": "the files include each other in a circle",
    "defaults: [base]\n": "not a file name",
    "defaults: nowhere.yaml\n": "no such file",
    "": "run: required, but not given",
    "run: {name: a, steps: 4}\n": "model: required, but not given",
}


@pytest.mark.parametrize("text", FILES)
def test_files(base: Path, text: str) -> None:
    base.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_with_sources(base, [])
    assert FILES[text] in str(caught.value)
