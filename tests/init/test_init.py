"""`ctpo init`: a configuration on stdout that a dry run accepts, for what users bring."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from ctpo_megatron import cli
from ctpo_megatron.config import Job, failed, load_config, resolved_objective
from ctpo_megatron.config.policy_rules import check_objective
from ctpo_megatron.data import Group, Prompt, Trajectory
from ctpo_megatron.rewards import RewardPool
from tests.data.rows import write
from tests.support.task import SMALL_TASK, task_folder

TRL = """
def accuracy(completions, solution, **kwargs):
    return [float(truth in text) for truth, text in zip(solution, completions)]

def hard(prompts, completions, level, trainer_state=None, **kwargs):
    return [None if "any" in asked else rated for asked, rated in zip(prompts, level)]
"""
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth in solution_str) + extra_info["level"], "acc": 1.0}
"""
OURS = """
async def score(trajectory, prompt):
    return float(prompt.answer in trajectory.final_text)
"""
ASKED = [{"role": "user", "content": "1 + 1?"}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a model; modules of other tests are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("ctpo_rewards", "rewards", "mine", "score"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "model").symlink_to(task_folder(*SMALL_TASK) / "model")
    return tmp_path


def made(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], str]:
    """The configuration, saved as mine.yaml, and what stderr says."""
    assert cli.main(["init", "--model", "model", *words]) == 0
    out, error = capsys.readouterr()
    Path("mine.yaml").write_text(out)
    return yaml.safe_load(out), error


def rows(file: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return found


def earned(text: str, **prompt: Any) -> tuple[float | None, dict[str, float]]:
    """The reward of an answer by the configuration, and its parts."""
    config = load_config("mine.yaml")
    asked = Prompt("p", "train", **{"messages": tuple(ASKED), "token_ids": (), "extra": {}, **prompt})
    group = Group(asked, [Trajectory("p", 0, 0, final_text=text)])
    with RewardPool(config.reward, [*(config.extensions.path or ("."))]) as pool:
        asyncio.run(pool.score([group]))
    (trajectory,) = group.trajectories
    return trajectory.reward, dict(trajectory.reward_components)


def test_a_job_of_trl(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts as prompts, two functions with weights, a column that one of them asks for; the dry run accepts it."""
    write(folder / "train.jsonl", *({"prompt": f"1 + {n}?", "solution": str(1 + n), "level": n / 2} for n in range(20)))
    (folder / "rewards.py").write_text(TRL)
    words = ["--data", "train.jsonl", "--reward", "rewards.py:accuracy", "--reward", "rewards.py:hard=0.5"]
    config, error = made(capsys, *words)
    assert config["data"]["train"] == ["data/train.parquet"] and config["reward"] == {"function": "ctpo_rewards:score"}
    assert "system_prompt" not in config["data"] and config["checkpoint"] == {"every": "auto", "keep_last": 2}
    assert rows("data/train.parquet")[2] == {
        "data_source": "train",
        "prompt": [{"role": "user", "content": "1 + 2?"}],
        "reward_model": {"ground_truth": "3"},
        "extra_info": {"level": 1.0},
    }
    for part in (
        "the prompt is prompt, the ground truth solution",
        "wrote data/train.parquet",
        "rewards:hard: TRL's form",
    ):
        assert part in error
    assert earned("it is 2", answer="2", extra={"level": 3.0}) == (1.0 + 0.5 * 3.0, {"accuracy": 1.0, "hard": 3.0})
    asked = ({"role": "user", "content": "in any form"},)
    assert earned("3", answer="2", extra={"level": 3.0}, messages=asked) == (0.0, {"accuracy": 0.0})
    assert cli.main(["train", "mine.yaml", "--dry-run"]) == 0
    capsys.readouterr()
    again, error = made(capsys, *words)
    assert again == config and "as before: data/train.parquet" in error


def test_a_file_of_prompts_and_answers_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A function of TRL's form may need no other column; then `extra_info` is not written."""
    prompts(folder)
    (folder / "rewards.py").write_text(TRL.replace("solution", "answer"))
    config, _ = made(capsys, "--data", "train.jsonl", "--reward", "rewards.py:accuracy")
    assert config["reward"] == {"function": "ctpo_rewards:score"}
    assert [*rows("data/train.parquet")[0]] == ["data_source", "prompt", "reward_model"]
    assert earned("it is 2", answer="2") == (1.0, {"accuracy": 1.0})
    assert cli.main(["train", "mine.yaml", "--dry-run"]) == 0


@pytest.mark.parametrize("level", [[{}, {}], [1, "hard"]])
def test_columns_that_parquet_cannot_hold_leave_no_file(
    level: list[Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "train.jsonl", *({"prompt": "1 + 1?", "solution": "2", "level": each} for each in level))
    (folder / "rewards.py").write_text(TRL)
    assert cli.main(["init", "--model", "model", "--data", "train.jsonl", "--reward", "rewards.py:hard"]) == 2
    out, error = capsys.readouterr()
    assert out == "" and "train.jsonl: cannot be written as parquet" in error and "Traceback" not in error
    assert not (folder / "data").exists()


def test_a_file_of_gsm8k_and_no_reward(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "gsm8k.jsonl", *({"question": f"1 + {n}?", "answer": f"so ...\n#### {1 + n}"} for n in range(4)))
    config, error = made(capsys, "--data", "gsm8k.jsonl")
    assert [row["reward_model"]["ground_truth"] for row in rows("data/gsm8k.parquet")] == ["1", "2", "3", "4"]
    assert config["reward"] == {"function": "math_verify"} and "\\boxed{}" in config["data"]["system_prompt"]
    assert "what follows #### in answer" in error and config["rollout"]["prompts_per_step"] == 4


def test_a_file_of_verl_is_used_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"data_source": "a", "prompt": ASKED, "reward_model": {"ground_truth": "2"}, "extra_info": {"level": 0.5}}
    pq.write_table(pa.Table.from_pylist([row] * 3), folder / "verl.parquet")
    (folder / "code").mkdir()
    (folder / "code" / "score.py").write_text(VERL)
    config, _ = made(capsys, "--data", "verl.parquet", "--reward", "code/score.py:compute_score")
    assert config["data"]["train"] == ["verl.parquet"] and not (folder / "data").exists()
    assert config["extensions"]["path"] == [".", "code"]
    assert earned("2", answer="2", extra={"level": 0.5}) == (1.5, {"compute_score": 1.5})


def test_one_function_of_our_form_is_named_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder / "a.jsonl", *[{"prompt": ASKED, "answer": number} for number in (2, 0.1, 1e-05)])
    (folder / "mine.py").write_text(OURS)
    config, _ = made(capsys, "--data", "a.jsonl", "--reward", "mine.py:score")
    assert config["reward"] == {"function": "mine:score"} and not (folder / "ctpo_rewards.py").exists()
    assert [row["reward_model"]["ground_truth"] for row in rows("data/a.parquet")] == ["2", "0.1", "0.00001"]
    assert earned("2", answer="2")[0] == 1.0
    made(capsys, "--data", "a.jsonl", "--reward", "mine.py:score=2")
    assert earned("2", answer="2") == (2.0, {"score": 1.0})


def test_lengths_are_those_of_the_data_within_the_models_positions(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["1 + 1?"] * 38 + ["1 + 1? " * 60] * 2
    write(folder / "a.jsonl", *({"prompt": text, "answer": "2"} for text in texts))
    config, error = made(capsys, "--data", "a.jsonl")
    positions = json.loads((folder / "model" / "config.json").read_text())["max_position_embeddings"]
    prompt, response = config["data"]["max_prompt_tokens"], config["rollout"]["max_response_tokens"]
    assert config["data"]["overlong"] == "drop" and "2 of 40 prompts measured are longer" in error
    assert prompt % 64 == 0 and prompt + response == min(positions, prompt + 2048)
    assert config["rollout"]["engine"] == {"max_model_len": prompt + response}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data none.jsonl", "no such file: none.jsonl"),
        ("--data other.jsonl", "no columns with a question and its answer among text, label; rename them to prompt"),
        ("--data a.jsonl --reward rewards.py", "write rewards.py:function, or rewards.py:function=weight"),
        ("--data a.jsonl --reward rewards.py:hard=x", "the weight 'x' is not a number"),
        ("--data a.jsonl --reward none.py:f", "there is no Python file none.py"),
        (
            "--data a.jsonl --reward rewards.py:acuracy",
            "has no function acuracy at its top level; did you mean accuracy?",
        ),
        (
            "--data a.jsonl --reward rewards.py:hard",
            "rewards:hard asks for a column 'level'; a.jsonl has solution",
        ),
        ("--data a.jsonl --reward rewards.py:other", "of no known form: TRL's have `completions`"),
        (
            "--data a.jsonl --reward rewards.py:accuracy --reward rewards.py:accuracy",
            "two functions are called accuracy",
        ),
        ("--data b.jsonl", "data/b.parquet is there, with other rows; move it away"),
    ],
)
def test_what_cannot_be_used_is_named(
    words: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is on stdout, and nothing is written."""
    write(folder / "a.jsonl", {"prompt": "1 + 1?", "solution": "2"})
    write(folder / "b.jsonl", {"prompt": "1 + 1?", "answer": "2"})
    write(folder / "other.jsonl", {"text": "1 + 1?", "label": "2"})
    (folder / "rewards.py").write_text(f"{TRL}\ndef other(answer):\n    return 1.0\n")
    (folder / "data").mkdir()
    pq.write_table(pa.Table.from_pylist([{"x": 1}]), folder / "data" / "b.parquet")
    assert cli.main(["init", "--model", "model", *words.split()]) == 2
    out, error = capsys.readouterr()
    assert out == "" and message in error and "Traceback" not in error
    assert [file.name for file in (folder / "data").iterdir()] == ["b.parquet"]
    assert not (folder / "ctpo_rewards.py").exists()


SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
RATE = 1e-5
raise SystemExit("nothing of a script is run")
args = GRPOConfig(
    output_dir="runs/mine", max_steps=200, learning_rate=RATE, weight_decay=0.1, num_generations=8, beta=0.04,
    per_device_train_batch_size=8, gradient_accumulation_steps=4, steps_per_generation=16, epsilon_high=0.28,
    max_completion_length=128, use_vllm=True, save_steps=50, report_to="tensorboard", scale_rewards="batch", foo=3,
)
"""


def test_a_script_of_trl(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers of the job and TRL's defaults; 16 micro-batches and accumulation 4 are 4 updates of 4 prompts."""
    write(folder / "train.jsonl", *({"prompt": f"1 + {n}?", "solution": str(1 + n)} for n in range(20)))
    (folder / "job.py").write_text(SCRIPT)
    _, error = made(capsys, "--data", "train.jsonl", "--from", "job.py")
    config = load_config("mine.yaml")
    assert resolved_objective(config.objective)["summary"] == (
        "Objective: dapo-trl: token ratio, window (0.8, 1.28) of r, no dual bound, mean over tokens, "
        "advantages over std + 0.0001, decoupled anchor, "
        "sequence weights up to 3, rejects sequence_sum outside k1 (-1.098612289, inf)"
    )
    sizes = (config.rollout.prompts_per_step, config.policy.mini_batch_prompts, config.rollout.samples_per_prompt)
    assert sizes == (16, 4, 8) and config.run.steps == 200 / 4 and config.checkpoint.every == int(50 / 4)
    optimizer = config.policy.optimizer
    assert (optimizer.lr, optimizer.schedule, optimizer.weight_decay) == (1e-6, "linear", 0.1)
    assert (config.policy.dtype, config.run.seed, config.rollout.max_response_tokens) == ("bfloat16", 42, 128)
    assert str(config.run.directory) == "runs/mine"
    assert cli.main(["train", "mine.yaml", "--dry-run"]) == 0
    rows = [line.split() for line in error.splitlines()]
    for wanted in (
        "# beta=0.04 not here: there is no KL",
        "# learning_rate policy.optimizer.lr is not a literal: set it by",
        "# weight_decay=0.1 policy.optimizer.weight_decay: 0.1 same",
        "# scale_rewards='batch' objective.advantage.normalize_std differs, set it by hand: there is no scaling",
        "# TRL's default objective.preset: dapo-trl same",
        "# loss_type='dapo' policy.mini_batch_prompts differs: TRL divides each of 4 updates by their mean number",
        "# vllm_importance_sampling_mode='sequence_mask' objective.correction.reject differs: TRL counts rejected",
        "# foo=3 not in the table: ignored",
    ):
        assert any(row[: len(wanted.split())] == wanted.split() for row in rows), wanted


@pytest.mark.parametrize(
    ("job", "summary"),
    [
        ({"num_generations": 8}, "dapo-trl: token ratio, window (0.8, 1.2) of r, no dual bound, mean over tokens"),
        ({"loss_type": "grpo", "delta": 4.0}, "grpo-trl: token ratio, window (0.8, 1.2) of r, dual 4, mean per"),
        ({"loss_type": "dr_grpo", "max_completion_length": 64}, "sum per sequence / 64, advantages over std + 0.0001"),
        ({"loss_type": "dr_grpo", "scale_rewards": False}, "sum per sequence / 32, advantages not divided by"),
        ({"loss_type": "cispo", "epsilon_high": 6.0}, "window (0, 6) of r without its gradient, mean over tokens, adv"),
        ({"loss_type": "sapo", "sapo_temperature_neg": 1.2}, "sigmoid of r, tau 1 (A > 0), 1.2 (A < 0)"),
    ],
)
def test_each_loss_of_trl(job: dict[str, Any], summary: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job as JSON. Without vLLM, TRL corrects nothing."""
    write(folder / "train.jsonl", *({"prompt": f"1 + {n}?", "solution": str(1 + n)} for n in range(20)))
    (folder / "job.json").write_text(json.dumps({"max_completion_length": 32, **job}))
    made(capsys, "--data", "train.jsonl", "--from", "job.json")
    config = load_config("mine.yaml")
    told = resolved_objective(config.objective)["summary"]
    assert summary in told and "weights" not in told
    assert failed(check_objective(config, None, Job(1))) == []
    assert config.rollout.prompts_per_step == config.policy.mini_batch_prompts == 1 and config.run.steps == 3 * 20


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"per_device_train_batch_size": 6}, "both have to be whole groups of num_generations=8"),
        ({"loss_type": "luspo"}, "loss_type='luspo' with epsilon_high=0.2 is not among the objectives here"),
        ({"max_completion_length": 4096}, "positions; give max_completion_length="),
        (
            {"trainer": {"speed": 3}},
            "is not a job of TRL or verl: it has neither GRPOConfig(...) nor their keys",
        ),
        ({"model": {"path": "x"}, "data": {"shuffle": True}}, "is not a job of TRL or verl"),
        ({"learning_rate": 1.0, "num_generations": "8"}, "a value has another type than TRL's"),
    ],
)
def test_a_job_that_cannot_be_the_same_is_refused(
    job: dict[str, Any], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "train.jsonl", {"prompt": "1 + 1?", "solution": "2"})
    (folder / "job.json").write_text(json.dumps(job))
    assert cli.main(["init", "--model", "model", "--data", "train.jsonl", "--from", "job.json"]) == 2
    out, error = capsys.readouterr()
    assert out == "" and message in error and not (folder / "data").exists()


def test_numbers_of_yaml_are_those_of_trl(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A number without a point is one, as for `transformers`; several iterations are passes over a batch."""
    prompts(folder)
    (folder / "job.yaml").write_text(
        "learning_rate: 2e-6\nmax_completion_length: 32\nnum_iterations: 2\nmax_steps: 8\n"
    )
    made(capsys, "--data", "train.jsonl", "--from", "job.yaml")
    config = load_config("mine.yaml")
    assert (config.policy.optimizer.lr, config.policy.passes_per_batch, config.run.steps) == (2e-6, 2, 4)


LAUNCH = """#!/bin/bash
set -x
BATCH=16
high=0.28   # of the clip
LONGEST=$((2*16))
if [ -n "$FAST" ]; then
    RATE=1e-4
fi
N=${N:-4}
python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer' \\
    algorithm.adv_estimator=grpo data.train_batch_size=$BATCH \\
    actor_rollout_ref.actor.ppo_mini_batch_size=4 "data.train_files=['a.parquet']" \\
    data.max_prompt_length=$((16 * 4)) data.max_response_length=${LONGEST} +data.foo=3 data.seed=null \\
    actor_rollout_ref.actor.clip_ratio_high=${high} actor_rollout_ref.actor.optim.lr=2e-6 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 actor_rollout_ref.actor.optim.weight_decay=$RATE \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.fsdp_config.param_offload=True \\
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.top_k=-1 trainer.n_gpus_per_node=$N \\
    algorithm.rollout_correction.rollout_rs=seq_mean_k1 \\
    actor_rollout_ref.actor.optim.betas=[0.9,0.95] \\
    trainer.logger='["console","swanlab"]' trainer.total_training_steps=20 trainer.experiment_name=mine $@
"""


def prompts(folder: Path, count: int = 20) -> None:
    write(folder / "train.jsonl", *({"prompt": f"1 + {n}?", "answer": str(1 + n)} for n in range(count)))


def test_a_launch_script_of_verl(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers of the job and verl's defaults; a variable with a default, or one set in a branch, is not known."""
    prompts(folder)
    (folder / "run.sh").write_text(LAUNCH)
    _, error = made(capsys, "--data", "train.jsonl", "--from", "run.sh")
    config = load_config("mine.yaml")
    assert resolved_objective(config.objective)["summary"] == (
        "Objective: grpo-verl: token ratio, window (0.8, 1.28) of r, dual 3, mean over tokens"
    )
    sizes = (config.rollout.prompts_per_step, config.policy.mini_batch_prompts, config.rollout.samples_per_prompt)
    assert sizes == (16, 4, 8) and (config.run.steps, config.run.name, config.run.resume) == (20, "mine", "auto")
    optimizer = config.policy.optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.warmup_steps) == (2e-6, 0.01, 0.1 * 20 * 16 / 4)
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (64, 32)
    assert config.rollout.engine.max_model_len == 96 and config.tracking.trackers == ()
    assert optimizer.betas == (0.9, 0.95)
    assert (config.policy.dtype, config.rollout.top_k, config.checkpoint.every) == ("bfloat16", 0, 0)
    assert cli.main(["train", "mine.yaml", "--dry-run"]) == 0
    rows = [line.split() for line in error.splitlines()]
    for wanted in (
        "# actor.use_kl_loss=True not here: there is no KL",
        "# actor.optim.weight_decay policy.optimizer.weight_decay is not a literal: set it by hand; it has verl's",
        "# actor.clip_ratio_high=0.28 objective.clip_high: 0.28 differs: the same width with",
        "# trainer.n_gpus_per_node placement.trainer_gpus is not a literal: set it by",
        "# verl's default objective.advantage.normalize_std: True same",
        "# algorithm.rollout_correction.rollout_rs='seq_mean_k1' objective.correction.reject differs, set it by",
        "# actor.fsdp_config.param_offload=True not here: Megatron-Core",
        "# data: foo, seed not in the table: ignored",
        "# the learning rate policy.optimizer differs: verl changes it once a",
        "# trainer.logger=['console', 'swanlab'] tracking.trackers: [] differs: tensorboard,",
    ):
        assert any(row[: len(wanted.split())] == wanted.split() for row in rows), wanted


GRPO = {"data.train_batch_size": 8, "actor.ppo_mini_batch_size": 8, "rollout.n": 4, "algorithm.adv_estimator": "grpo"}
CORRECTION = "algorithm__rollout_correction__rollout"
WEIGHTS = {f"{CORRECTION}_is": "token"}
REINFORCE = {"algorithm__rollout_correction__loss_type": "reinforce"}
SUMMED = "seq-mean-token-sum-norm"


def verl_job(file: Path, **settings: Any) -> None:
    """A job of verl as YAML; names as the pages have them, with two underscores for a dot."""
    sections: dict[str, Any] = {"data": {"max_prompt_length": 64, "max_response_length": 32}}
    given = {name.replace("__", "."): value for name, value in settings.items()}
    for name, value in {**GRPO, "trainer.logger": ["console"], **given}.items():
        below = "actor_rollout_ref." if name.startswith(("actor.", "rollout.")) else ""
        *above, last = f"{below}{name}".split(".")
        section = sections
        for part in above:
            section = section.setdefault(part, {})
        section[last] = value
    file.write_text(yaml.safe_dump(sections))


@pytest.mark.parametrize(
    ("job", "summary"),
    [
        ({}, "grpo-verl: token ratio, window (0.8, 1.2) of r, dual 3, mean over tokens"),
        ({"actor__clip_ratio": 0.3}, "window (0.8, 1.2) of r"),
        ({"actor__clip_ratio": 0.3, "actor__clip_ratio_low": None}, "window (0.7, 1.2) of r"),
        ({"actor__loss_agg_mode": SUMMED, "actor__loss_scale_factor": 32}, "dual 3, sum per sequence / 32"),
        ({"actor__loss_agg_mode": "seq-mean-token-mean"}, "dual 3, mean per sequence"),
        ({"algorithm__norm_adv_by_std_in_grpo": False}, "advantages not divided by"),
        ({"algorithm__adv_estimator": "rloo"}, "mean over tokens, rloo advantages"),
        ({"actor__policy_loss__loss_mode": "gspo"}, "gspo: geometric mean ratio of the sequence, window (0.8, 1.2)"),
        ({"actor__policy_loss__loss_mode": "cispo"}, "cispo: token ratio, window (0.8, 1.2) of r without its gradient"),
        ({"actor__policy_loss__loss_mode": "sapo", "actor__tau_neg": 1.2}, "tau 1 (A > 0), 1.2 (A < 0), mean per seq"),
        ({"actor__policy_loss__loss_mode": "dppo_tv"}, "total variation of a token at most 0.2, r at most 3"),
        (WEIGHTS, "decoupled anchor, token weights up to 2"),
        ({"algorithm__rollout_correction__bypass_mode": True}, "mean over tokens, behaviour anchor"),
    ],
)
def test_each_loss_of_verl(job: dict[str, Any], summary: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job as YAML; its steps are whole batches of the data, for 30 epochs."""
    prompts(folder)
    verl_job(folder / "job.yaml", **job)
    made(capsys, "--data", "train.jsonl", "--from", "job.yaml")
    config = load_config("mine.yaml")
    assert summary in resolved_objective(config.objective)["summary"]
    assert failed(check_objective(config, None, Job(1))) == []
    assert config.run.steps == 30 * (20 // 8) and config.rollout.prompts_per_step == 8


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"algorithm__adv_estimator": "gae"}, "--from: adv_estimator='gae' is not here; there are grpo and rloo"),
        ({"rollout__n": 1}, "rollout.n=1: a group of one has no advantage here"),
        ({"data__train_batch_size": 12}, "train_batch_size=12 is no multiple of ppo_mini_batch_size=8"),
        ({"data__train_batch_size": 64}, "20 rows are no whole batch of data.train_batch_size=64"),
        (
            {"actor__policy_loss__loss_mode": "kl_cov"},
            "loss_mode='kl_cov' with loss_agg_mode='token-mean' and",
        ),
        ({"actor__loss_agg_mode": SUMMED}, "and loss_scale_factor=None is not among the objectives here"),
        ({**WEIGHTS, "algorithm__rollout_correction__bypass_mode": True, **REINFORCE}, "loss_mode='reinforce' with"),
        ({"data__max_response_length": 4096}, "positions; give data.max_response_length="),
        ({"data__max_prompt_length": 3}, "tokens, and the job allows 3"),
        ({"actor__ppo_mini_batch_size": "8"}, "a value has another type than verl's"),
    ],
)
def test_a_job_of_verl_that_cannot_be_the_same_is_refused(
    job: dict[str, Any], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts(folder)
    verl_job(folder / "job.yaml", **job)
    assert cli.main(["init", "--model", "model", "--data", "train.jsonl", "--from", "job.yaml"]) == 2
    out, error = capsys.readouterr()
    assert out == "" and message in error and not (folder / "data").exists()


def test_held_out_files_of_verl_are_taken_if_they_are_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else the configuration has no evaluations, which would be refused."""
    prompts(folder)
    verl_job(folder / "job.yaml", trainer__test_freq=2, data__val_files=["held_out.parquet"])
    _, error = made(capsys, "--data", "train.jsonl", "--from", "job.yaml")
    assert "no evaluations without held-out prompts: give data.eval, and then eval.every: 2" in error
    assert load_config("mine.yaml").eval.every == 0 and cli.main(["train", "mine.yaml", "--dry-run"]) == 0
    capsys.readouterr()
    shutil.copy(folder / "data" / "train.parquet", folder / "held_out.parquet")
    made(capsys, "--data", "train.jsonl", "--from", "job.yaml")
    config = load_config("mine.yaml")
    assert (config.data.eval, config.eval.every) == (("held_out.parquet",), 2)


def test_a_resolved_file_of_verl(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Classes are no settings, interpolations no literals; a mapping stays whole, and unknown keys share a row."""
    prompts(folder)
    others = {"critic__optim__lr": 1e-5, "critic__optim__eps": 1e-8, "actor___target_": "verl.ActorConfig"}
    thinking = {"data__apply_chat_template_kwargs__enable_thinking": False}
    verl_job(folder / "job.yaml", trainer__experiment_name="${data.name}", actor__grad_clip=0.5, **others, **thinking)
    _, error = made(capsys, "--data", "train.jsonl", "--from", "job.yaml")
    config = load_config("mine.yaml")
    assert config.model.chat_template_kwargs == {"enable_thinking": False}
    assert (config.policy.optimizer.clip_grad, config.run.name) == (0.5, "gsm8k")
    assert "critic.optim: eps, lr" in error and "_target_" not in error
    assert "trainer.experiment_name  " in error and "run.name  " in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{LAUNCH}\npython3 -m verl.trainer.main_ppo trainer.save_freq=3", "the script starts verl again"),
        ("trainer.save_freq='3", "cannot be read: No closing quotation"),
        ("echo a.b=3", "is not a job of TRL or verl"),
        ("python3 other.py data.shuffle=True rollout.temperature=1", "is not a job of TRL or verl"),
    ],
)
def test_a_script_without_one_job_is_refused(
    text: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts(folder)
    (folder / "run.sh").write_text(text)
    assert cli.main(["init", "--model", "model", "--data", "train.jsonl", "--from", "run.sh"]) == 2
    assert message in capsys.readouterr().err
