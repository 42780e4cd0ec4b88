"""`kill -9`, a signal or Ctrl-C at points inside a step, then a restart: the metrics of the uninterrupted run."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ctpo_megatron import cli
from ctpo_megatron.config import Config, load_config
from ctpo_megatron.data import (
    Group,
    Prompt,
    PromptRules,
    PromptSampler,
    PromptStream,
    Trajectory,
)
from ctpo_megatron.rollouts.rollouts import OpenBatch
from ctpo_megatron.run import open_run_directory
from ctpo_megatron.tracking import write_trajectories
from tests.end_to_end import killed_train
from tests.end_to_end.small_run import ROOT, Ctpo, records, repeatable
from tests.support import ranks
from tests.support.prompts import load_prompts
from tests.support.task import SMALL_TASK, task_files, task_folder

STEPS = 3
TASK = task_folder(*SMALL_TASK)
SETTINGS = (
    f"run.steps={STEPS}",
    *task_files(TASK),
    "sft=null",
    "data.eval=[]",
    "eval.every=0",
    "rollout.prompts_per_step=4",
    "policy.mini_batch_prompts=2",
    "rollout.samples_per_prompt=4",
    "rollout.mismatch_limit=null",
    "checkpoint.every=1",
    "tracking.live=plain",
    "tracking.trackers=[]",
    "tracking.report=false",
    "export.enabled=false",
)
REPLAY = ("rollout.replay=runs/recorded",)


def drawn_by(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptStream:
    """The prompts in the order in which a run of this configuration draws them."""
    rules = PromptRules(config.data.max_prompt_tokens)
    prompts = load_prompts(config.data.train_files, tokenizer, rules)
    return PromptSampler(prompts, config.run.seed, config.data.shuffle)


def record(folder: Path, *overrides: str, chance: float = 0.5) -> None:
    """Make the run directory of a recording. chance: of a right answer."""
    with contextlib.chdir(folder):
        config = load_config(ROOT / "configs" / "quickstart.yaml", [*SETTINGS, *overrides])
        write_answers(config, open_run_directory(config), chance)


def write_answers(config: Config, directory: Path, chance: float) -> None:
    """Write made-up answers to the prompts that a run of this configuration draws, some right."""
    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    sampler = drawn_by(config, tokenizer)

    def answer(prompt: Prompt, sample: int) -> Trajectory:
        trajectory = Trajectory(prompt.id, sample, seed=sample)
        trajectory.append_context(prompt.token_ids, turn=0)
        trajectory.reward = float(rng.random() < chance)
        number = prompt.answer if trajectory.reward else "-1"
        trajectory.final_text = f"{rng.choice(['So', 'It is', 'Hence'])} \\boxed{{{number}}}"
        ids = tokenizer(trajectory.final_text, add_special_tokens=False)["input_ids"]
        trajectory.append_model(ids, [-5 * rng.random() for _ in ids], [step] * len(ids), turn=1)
        trajectory.finish_reason = "answer"
        return trajectory

    for step in range(1, config.run.steps + 1):
        drawn, groups = sampler.take(config.rollout.prompts_per_step), []
        choice = OpenBatch(step, config.rollout, config.policy.mini_batch_prompts)
        while drawn:
            groups += [Group(p, [answer(p, n) for n in range(config.rollout.samples_per_prompt)]) for p in drawn]
            drawn = sampler.take(choice.missing(groups))
        write_trajectories(directory, step, groups, tokenizer.decode)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of all runs, with the task and the recording in it."""
    root = tmp_path_factory.mktemp("kill_resume")
    record(root, "run.name=recorded")
    return root


def command(*overrides: str) -> list[str]:
    return ["train", str(ROOT / "configs" / "quickstart.yaml"), *SETTINGS, *REPLAY, *overrides]


def train(
    folder: Path,
    *overrides: str,
    kill_at: tuple[str, int] | None = None,
    by: str = "SIGKILL",
) -> subprocess.CompletedProcess[str]:
    arguments = command(*overrides), kill_at, by
    how = {"directory": folder, "environment": Ctpo(folder).environment, "deadline_s": 120}
    return ranks.prefork().run(killed_train.main, *arguments, **how)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    done = train(folder, "run.name=whole")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "runs" / "whole"


def test_a_replay_trains_on_the_recording(folder: Path, whole: Path) -> None:
    metrics = records(whole)
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert all(line["actor/grad_norm"] > 0 and 0 < line["reward/mean"] < 1 for line in metrics[1:])
    for step in range(1, STEPS + 1):
        name = f"trajectories/step_{step:06d}.parquet"
        replayed = [(t["prompt_id"], t["token_ids"], t["rollout_log_probs"]) for t in records(whole, name)]
        assert replayed == [
            (t["prompt_id"], t["token_ids"], t["rollout_log_probs"])
            for t in records(folder / "runs" / "recorded", name)
        ]  # fmt: skip
    assert all("throughput/update_tokens_per_s" in line for line in metrics[1:])
    assert not any(name.startswith("throughput/rollout") for line in metrics for name in line)  # a file was read
    # Neither of a sandbox nor of engines.
    assert {file.name for file in (whole / "logs").iterdir()} == {"train.log", "rewards.log"}


def test_a_recording_of_another_policy_trains_any_objective_against_its_sampler(folder: Path) -> None:
    """Its log-probs are made up, and its weight versions those of this run."""
    settings = ("checkpoint.every=0", "rollout.mismatch_limit=0.001")
    refused = train(folder, "run.name=own", *settings)
    assert refused.returncode == 2 and "more than rollout.mismatch_limit=0.001" in refused.stderr
    done = train(folder, "run.name=others", *settings, "objective.anchor=behaviour", "objective.preset=cispo")
    assert done.returncode == 0, done.stderr[-4000:]
    lines = records(folder / "runs" / "others")
    assert len(lines) == STEPS + 1 and all(line["actor/grad_norm"] > 0 for line in lines[1:])
    assert not any(name.startswith("mismatch/") for line in lines for name in line)
    ages = [line["ages"] for line in records(folder / "runs" / "others", "positions.jsonl")]
    assert ages and all(len(each["n"]) == 1 for each in ages)  # all tokens have age 0


def test_two_ranks_run_the_same_driver(folder: Path, whole: Path) -> None:
    settings = ("run.name=two", "run.steps=1", "checkpoint.every=0", "policy.tensor_model_parallel_size=2")
    assert ranks.run(train_on_a_rank, folder, command(*settings), ranks=2) == [0, 0]
    two, one = records(folder / "runs" / "two")[1], records(whole)[1]
    assert two["pg_update/first_log_ratio_abs_max"] <= 1e-5
    assert repeatable(two).keys() == repeatable(one).keys()
    for name in ("actor/grad_norm", "actor/pg_loss", "mismatch/log_prob_abs_max", "actor/pg_clipfrac"):
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name


def train_on_a_rank(directory: Path, arguments: list[str]) -> int:
    os.chdir(directory)
    return cli.main(arguments)


@pytest.mark.slow
def test_a_course_that_was_discarded_does_not_come_back(folder: Path, whole: Path) -> None:
    run = folder / "runs" / "discarded"
    shutil.copytree(whole, run)
    load = "checkpoint.load=runs/discarded/checkpoints/step_000002"
    killed = train(folder, "run.name=discarded", "run.resume=true", load, kill_at=("score", 1))
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-4000:]
    assert "discards later checkpoints of this run, now named discarded_step_000003." in killed.stderr
    assert [path.name for path in sorted((run / "trajectories").glob("step_*"))] == [
        "step_000001.parquet",
        "step_000002.parquet",
    ]
    resumed = train(folder, "run.name=discarded", "run.resume=true")
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert "continuing after step 2" in resumed.stdout
    assert [repeatable(line) for line in records(run)] == [repeatable(line) for line in records(whole)]
    assert records(run, "positions.jsonl") == records(whole, "positions.jsonl")


def test_a_refused_resume_leaves_the_record_of_the_data(folder: Path, whole: Path) -> None:
    run = folder / "runs" / "refused"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / f"step_{STEPS:06d}")
    before = (run / "data.json").read_bytes()
    load = "checkpoint.load=runs/refused/checkpoints/step_000002"
    refused = train(folder, "run.name=refused", "run.resume=true", load, f"data.train=[{TASK / 'heldout.parquet'}]")
    assert refused.returncode == 2 and "does not fit this run" in refused.stderr, refused.stderr[-4000:]
    assert (run / "data.json").read_bytes() == before


# Every step scores four groups, updates twice, and saves once. Before the first: one more save, and two log lines.
# A save is two writes with megatron-core 0.16 and one with 0.19, so the third is one of the second or third save.
@pytest.mark.parametrize(
    ("point", "count", "overrides"),
    [
        pytest.param("score", 6, (), marks=pytest.mark.slow),
        pytest.param("update", 4, (), marks=pytest.mark.slow),
        ("write", 3, ("checkpoint.asynchronous=true",)),
        pytest.param("update", 1, (), marks=pytest.mark.slow),
        pytest.param("publish", 3, (), marks=pytest.mark.slow),
        pytest.param("publish", 3, ("checkpoint.asynchronous=true",), marks=pytest.mark.slow),
        pytest.param("log", 6, (), marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_bit_for_bit(
    folder: Path, whole: Path, point: str, count: int, overrides: tuple[str, ...]
) -> None:
    name = "-".join([f"run.name={point}", str(count), *("asynchronous" for _ in overrides)])
    killed = train(folder, name, *overrides, kill_at=(point, count))
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-4000:]
    resumed = train(folder, name, *overrides, "run.resume=true")
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert "continuing after step" in resumed.stdout
    run = folder / "runs" / name.removeprefix("run.name=")
    assert [repeatable(line) for line in records(run)] == [repeatable(line) for line in records(whole)]
    assert records(run, "positions.jsonl") == records(whole, "positions.jsonl") != []
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000002", "step_000003"]


def both_courses(
    folder: Path, name: str, settings: Sequence[str], kill_at: tuple[str, int], after: str = ""
) -> tuple[Path, Path]:
    """Return the directories of a run and of the same run, killed after a step and resumed."""
    done = train(folder, *settings, f"run.name={name}")
    assert done.returncode == 0, done.stderr[-4000:]
    killed = train(folder, *settings, f"run.name={name}-killed", kill_at=kill_at)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-4000:]
    resumed = train(folder, *settings, f"run.name={name}-killed", "run.resume=true")
    assert resumed.returncode == 0 and f"continuing after step {after}" in resumed.stdout, resumed.stderr[-4000:]
    return folder / "runs" / name, folder / "runs" / f"{name}-killed"


@pytest.mark.slow  # of the source alone: tests/rollouts/test_uniform_groups.py
@pytest.mark.parametrize("mode", ["drop", "refill"])
def test_a_killed_run_without_uniform_groups_goes_on_bit_for_bit(folder: Path, mode: str) -> None:
    """The schedule of the learning rate is not constant, and optimizer steps are missing."""
    settings = [f"rollout.uniform_groups={mode}", "rollout.max_refills=2", "policy.mini_batch_prompts=1"]
    settings += ["policy.optimizer.schedule=linear", "reward.overlong_penalty={buffer: 10}"]
    settings.append("rollout.filters=[{name: void_turn, arguments: {answer: ^So}}]")
    record(folder, *settings, f"run.name=recorded-{mode}", chance=0.9)
    settings.append(f"rollout.replay=runs/recorded-{mode}")
    whole, again = map(records, both_courses(folder, mode, settings, ("score", 10 if mode == "drop" else 14)))
    assert [repeatable(line) for line in again] == [repeatable(line) for line in whole]
    assert sum(line["rollout/groups_dropped"] for line in whole[1:]) > 0
    assert all(0 < line["rollout/masked_tokens"] < 1 for line in whole[1:])
    assert not any(
        "tracking/nonfinite" in line for line in whole
    )  # though some optimizer step has no token in its loss
    assert [line["actor/lr"] for line in whole[1:]] == sorted((line["actor/lr"] for line in whole[1:]), reverse=True)


@pytest.mark.parametrize(
    ("point", "count", "done"),
    [
        pytest.param("sample", 3, 2, marks=pytest.mark.slow),  # the step at hand is given up
        ("score", 10, 3),  # it is finished, and was the last
        pytest.param("update", 3, 2, marks=pytest.mark.slow),
        pytest.param("sample", 1, 0, marks=pytest.mark.slow),
    ],
)
def test_sigterm_to_the_whole_job_saves_what_is_done(
    folder: Path, whole: Path, point: str, count: int, done: int
) -> None:
    settings = (f"run.name=term-{point}-{count}", "checkpoint.every=0", "export.enabled=true")
    ended = train(folder, *settings, kill_at=(point, count), by="SIGTERM")
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr[-4000:]
    assert "SIGTERM: a checkpoint follows, within" in ended.stderr
    run = folder / "runs" / f"term-{point}-{count}"
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{done:06d}"]
    assert not (run / "model").exists()
    resumed = train(folder, *settings, "run.resume=true")
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert f"continuing after step {done}" in resumed.stdout
    assert [repeatable(line) for line in records(run)] == [repeatable(line) for line in records(whole)]
    assert (run / "model" / "config.json").exists()


@pytest.mark.parametrize(
    ("by", "name", "status"),
    [("SIGINT", "Ctrl-C", 130), pytest.param("SIGUSR1", "SIGUSR1", 143, marks=pytest.mark.slow)],
)
def test_one_command_starts_a_run_and_goes_on_with_it(
    folder: Path, whole: Path, by: str, name: str, status: int
) -> None:
    settings = (f"run.name=auto-{by}", "checkpoint.every=0", "run.resume=auto")
    ended = train(folder, *settings, kill_at=("sample", 2), by=by)
    assert ended.returncode == status, ended.stderr[-4000:]
    assert f"{name}: a checkpoint follows, within 120 s (checkpoint.grace_s)" in ended.stderr
    continued_with = ended.stderr.splitlines()[-1]
    assert continued_with.startswith("continue with: ctpo train ") and continued_with.endswith(" run.resume=auto")
    assert shlex.split(continued_with)[3:] == command(*settings)
    resumed = train(folder, *settings)
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert "continuing after step 1" in resumed.stdout
    run = folder / "runs" / f"auto-{by}"
    assert [repeatable(line) for line in records(run)] == [repeatable(line) for line in records(whole)]
    before = (run / "metrics.jsonl").read_bytes()
    again = train(folder, *settings)
    assert again.returncode == 0 and f"runs/auto-{by} has done its 3 steps (run.steps): nothing is left" in again.stderr
    assert (run / "metrics.jsonl").read_bytes() == before


SFT_MEASURED = ("sft/seconds", "sft/tokens_per_s", "sft/model_tflops_per_s", "sft/trainer_peak_mib")
SFT = (f"sft={{data: [{TASK / 'sft.parquet'}], steps: 6, conversations_per_step: 8}}", "run.steps=1")


@pytest.fixture(scope="module")
def tuned(folder: Path) -> Path:
    done = train(folder, *SFT, "run.name=tuned")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "runs" / "tuned"


@pytest.mark.slow
@pytest.mark.parametrize(("by", "count", "after"), [("SIGTERM", 3, 3), ("SIGKILL", 6, 4)])
def test_sft_goes_on_bit_for_bit(folder: Path, tuned: Path, by: str, count: int, after: int) -> None:
    settings = (*SFT, f"run.name=sft-{by}", "run.resume=auto", "checkpoint.sft_every=2")
    ended = train(folder, *settings, kill_at=("update", count), by=by)
    assert ended.returncode == {"SIGTERM": 143, "SIGKILL": -signal.SIGKILL}[by], ended.stderr[-4000:]
    run = folder / "runs" / f"sft-{by}"
    assert [path.name for path in sorted((run / "checkpoints" / "sft").glob("step_*"))][-1] == f"step_{after:06d}"
    resumed = train(folder, *settings)
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert f"continuing after SFT step {after}, from " in resumed.stdout
    for file in ("sft.jsonl", "metrics.jsonl"):
        found, expected = ([repeatable(line) for line in records(at, file)] for at in (run, tuned))
        assert [{k: v for k, v in line.items() if k not in SFT_MEASURED} for line in found] == [
            {k: v for k, v in line.items() if k not in SFT_MEASURED} for line in expected
        ]
    assert not (run / "checkpoints" / "sft").exists()  # RL has checkpoints of its own now


def same_lines(run: Path, expected: Path) -> bool:
    found, wanted = ([repeatable(line) for line in records(at)] for at in (run, expected))
    return found == wanted


@pytest.mark.slow
def test_a_run_without_a_checkpoint_starts_again_from_its_own_sft(folder: Path, tuned: Path) -> None:
    settings = (*SFT, "run.name=again", "run.resume=auto", "checkpoint.every=0")
    killed = train(folder, *settings, kill_at=("update", 7))  # the first of RL
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-4000:]
    resumed = train(folder, *settings)
    assert resumed.returncode == 0, resumed.stderr[-4000:]
    assert "RL starts from the SFT model in runs/again/sft_model" in resumed.stdout
    assert same_lines(folder / "runs" / "again", tuned)
