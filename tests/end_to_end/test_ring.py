"""The whole ring on CPU with the real parts: what a run writes, that it can be resumed, cut over ranks and exported."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ctpo_megatron.checks import count_rows
from ctpo_megatron.config import load_config, spec_for
from ctpo_megatron.plan import (
    disk_use,
)
from ctpo_megatron.tracking import KNOWN_METRICS
from tests.end_to_end.small_run import Ctpo, records, repeatable
from tests.support import children

COMPILER = ("torch._dynamo", "torch._inductor")
"""Two CPU-seconds and 80 MiB in each rank on CPUs, which compile nothing."""


def test_a_run_writes_what_it_promises(finished: Path) -> None:
    metrics = records(finished)
    assert [record["step"] for record in metrics] == [0, 1, 2, 3]
    assert "val/toolmath/acc/mean@1" in metrics[0] and "val/toolmath/acc/mean@1" in metrics[-1]
    supervised = records(finished, "sft.jsonl")
    assert len(supervised) == 40 and supervised[-1]["sft/epoch"] == 40 * supervised[0]["sft/epoch"] > 0
    assert "[sft] conversations: " in (finished / "output.txt").read_text()
    for path in ("config.yaml", "report.html", "figures/reward.png", "model/config.json", "model/tokenizer.json"):
        assert (finished / path).stat().st_size > 0, path
    assert list((finished / "tensorboard").glob("events.*"))
    heartbeat = json.loads((finished / "heartbeat.json").read_text())
    assert [heartbeat[name] for name in ("state", "step", "ranks")] == ["ended", 3, 1]
    assert not (finished / "stalls").exists()
    output = (finished / "output.txt").read_text()
    assert output.count("[eval] step 0 toolmath mean@1 ") == output.count("[eval] step 3 toolmath mean@1 ") == 1
    assert "sampled reward" in output and "report.html" in output and "accuracy, toolmath" in output


@pytest.mark.parametrize(
    ("log", "needed", "never"),
    [
        pytest.param("imports.txt", "megatron.core", (*COMPILER, "wandb.sdk", "vllm.config"), id="trainer"),
        pytest.param(
            "logs/rewards.log", "sympy.combinatorics", ("torch.nn", "transformers.utils", "ray.util"), id="scorers"
        ),
        pytest.param(
            "logs/rollout_engine_0.log", "vllm", ("megatron.core", "wandb.sdk", "tensorboard.summary"), id="engine"
        ),
        pytest.param("logs/sandbox.log", "fastapi", ("torch.nn", "transformers.utils", "ray.util"), id="sandbox"),
    ],
)
def test_what_processes_of_a_run_do_not_import(finished: Path, log: str, needed: str, never: tuple[str, ...]) -> None:
    """By a module inside each package: an import that failed is listed, too."""
    imported = imports(finished / log)
    assert needed in imported
    assert {*never} & {*imported} == set()


def test_ray_begins_before_the_trainer_imports_its_libraries(finished: Path) -> None:
    order = imports(finished / "imports.txt")
    assert order.index("ray") < order.index("torch") < order.index("megatron.core")


def imports(log: Path) -> list[str]:
    """The modules that `PYTHONPROFILEIMPORTTIME` lists in a log, as they were done."""
    lines = log.read_text().splitlines()
    return [line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")]


def test_every_metric_of_a_run_is_documented(finished: Path) -> None:
    rows = [re.escape(name) for row in KNOWN_METRICS for name in row.names]
    rows.remove(re.escape("reward/<name>"))  # what users' functions add: ours are documented one by one
    known = re.compile("|".join(re.sub(r"<\w+>", "[^/]+?", row) for row in rows))
    written = {name for file in ("metrics.jsonl", "sft.jsonl") for record in records(finished, file) for name in record}
    assert {"throughput/update_tokens_per_s", "memory/rank_0_peak_mib", "sft/tokens_per_s"} <= written
    # `time/<phase>_cpu` is said once for all phases.
    names = {name.removesuffix("_cpu") for name in written - {"step"}}
    assert sorted(name for name in names if not known.fullmatch(name)) == []


def test_packing_wastes_little(finished: Path) -> None:
    for record in records(finished)[1:]:
        assert 0.95 <= record["packing/useful_token_fraction"] <= 1
        assert record["packing/imbalance"] == 1


def test_anchor_and_training_pass_agree_and_sampler_agrees_with_trainer(finished: Path) -> None:
    for record in records(finished)[1:]:
        assert record["pg_update/first_log_ratio_abs_max"] <= 1e-5
        assert record["mismatch/log_prob_abs_max"] <= 1e-3
        assert record["weights/version"] == record["step"] + 1
        assert 0 < record["mismatch/sigma"] <= record["mismatch/log_prob_abs_max"]
        assert record["rollout_corr/kl"] == pytest.approx(-record["mismatch/bias"])


def test_trajectories_are_whole_and_dumped_with_masks_and_ratios(finished: Path) -> None:
    lines = records(finished, "trajectories/step_000002.parquet")
    assert len(lines) == 16
    traced = 0
    for line in lines:
        length = len(line["token_ids"])
        for name in ("response_mask", "loss_mask", "rollout_log_probs", "weight_version", "turn"):
            assert len(line[name]) == length
        versions = {v for v, m in zip(line["weight_version"], line["response_mask"], strict=True) if m}
        assert versions == {2}
        if "log_ratio" in line:
            traced += 1
            assert len(line["log_ratio"]) == len(line["clip_low"]) == length
    assert traced == 8  # the last mini-batch


def test_as_much_is_written_as_the_dry_run_expects(ctpo: Ctpo, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints and export within a tenth: they follow from the model.

    Dumps within a factor of 3: an answer may be as long as the limit, twice what is expected, or a few words.
    """
    monkeypatch.chdir(ctpo.directory)
    config = load_config(finished / "config.yaml")
    expected = {use.what: use.total for use in disk_use(config, spec_for(config), count_rows(config.data.eval))}
    expected["checkpoints"] *= config.checkpoint.keep_last / (config.checkpoint.keep_last + 1)  # none is being written
    for what, files, factor in (
        ("trajectories", "trajectories/*", 3.0),
        ("held-out answers", "evaluation/*", 3.0),
        ("checkpoints", "checkpoints/**/*", 1.1),
    ):
        written = sum(path.stat().st_size for path in finished.glob(files) if path.is_file())
        assert written / factor <= expected[what] <= written * factor, (what, written, expected[what])
    (weights,) = (finished / "model").glob("*.safetensors")
    with weights.open("rb") as file:  # its header has room for a large model's
        header = 8 + int.from_bytes(file.read(8), "little")
    assert weights.stat().st_size - header == expected["export"]


def test_exported_model_gives_the_same_greedy_answers(finished: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    model = AutoModelForCausalLM.from_pretrained(finished / "model", dtype=torch.float32).eval()
    for line in records(finished, "evaluation/step_000003.parquet")[::3]:
        ids, mask = line["token_ids"], line["response_mask"]
        start, end = mask.index(1), next((i for i in range(mask.index(1), len(mask)) if not mask[i]), len(mask))
        prompt = torch.tensor([ids[:start]])
        with torch.no_grad():
            found = model.generate(
                prompt, max_new_tokens=end - start, do_sample=False, eos_token_id=tokenizer.eos_token_id
            )
        assert found[0, start:].tolist() == ids[start:end]


def is_sandbox_server(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):  # it may be ending
        return process.cmdline()[1:3] == ["-m", "ctpo_sandbox.server"]
    return False


def kill_sandbox(run: int) -> None:
    """Kill the server of a running training job and everything it started."""
    (server,) = filter(is_sandbox_server, psutil.Process(run).children(recursive=True))
    for process in [server, *server.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.slow
def test_a_killed_sandbox_is_started_again_and_the_run_goes_on(ctpo: Ctpo) -> None:
    longer = ("sft.steps=500", "run.steps=6")  # so that the model has learnt to call the tool
    status, output = ctpo.train_disturbed("[rl] step 1/6", kill_sandbox, "run.name=disturbed", *longer)
    assert status == 0, output[-4000:]
    assert "the sandbox server ended with status -9; starting it again" in output
    for record in records(ctpo.directory / "runs" / "disturbed")[1:]:
        assert record["sandbox/calls"] > 0
        assert record["rollout/lost_timeout"] == record["rollout/lost_runtime_error"] == 0


def assert_same_course(run: Path, other: Path) -> None:
    """Equal metrics, and equal tokens from equal seeds."""
    assert [repeatable(r) for r in records(run)] == [repeatable(r) for r in records(other)]
    for step in (1, 2, 3):
        name = f"trajectories/step_{step:06d}.parquet"
        ours = [(t["prompt_id"], t["sample_index"], t["seed"], t["token_ids"]) for t in records(run, name)]
        theirs = [(t["prompt_id"], t["sample_index"], t["seed"], t["token_ids"]) for t in records(other, name)]
        assert ours == theirs


@pytest.mark.slow
def test_resume_after_kill_ends_like_the_uninterrupted_run(ctpo: Ctpo, finished: Path) -> None:
    output = ctpo.train_until("step 2/3", "run.name=killed")
    assert "step 2/3" in output, output[-4000:]
    run = ctpo.directory / "runs" / "killed"
    done = ctpo.train("run.name=killed", "run.resume=true")
    assert done.returncode == 0, done.stderr[-4000:]
    assert [record["step"] for record in records(run)] == [0, 1, 2, 3]
    assert_same_course(run, finished)
    drawn = [t["prompt_id"] for n in (1, 2, 3) for t in records(run, f"trajectories/step_{n:06d}.parquet")]
    prompts = [prompt for prompt, sample in itertools.groupby(drawn)]
    assert len(prompts) == len(set(prompts)) == 12  # every prompt is consumed once
    marker = json.loads((run / "checkpoints" / "step_000003" / "COMPLETE.json").read_text())
    assert marker["run"]["rollouts"]["prompts"]["consumed"] == prompts


@pytest.mark.slow  # of the driver alone: test_kill_resume.py
def test_a_replay_repeats_the_run_without_engines_ray_and_vllm(ctpo: Ctpo, finished: Path, tmp_path: Path) -> None:
    for name in ("ray", "vllm"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name}', name='{name}')\n")
    environment = ctpo.environment | {"PYTHONPATH": os.pathsep.join([str(tmp_path), ctpo.environment["PYTHONPATH"]])}
    command = ctpo.command("run.name=replayed", "rollout.replay=runs/whole", "eval.every=0")
    done = children.run(command, directory=ctpo.directory, environment=environment, deadline_s=280)
    assert done.returncode == 0, done.stderr[-4000:]
    run = ctpo.directory / "runs" / "replayed"
    live = [{k: v for k, v in repeatable(r).items() if not k.startswith("val/")} for r in records(finished)]
    assert [repeatable(r) for r in records(run)] == live
    assert {file.name for file in (run / "logs").iterdir()} == {"train.log", "rewards.log"}
    assert not (run / "evaluation").exists()


@pytest.mark.slow
def test_objectives_that_replay_one_recording_are_evaluated_and_compared(ctpo: Ctpo, finished: Path) -> None:
    """The first weights give the answers of the recorded run, so the engines have those of the trainer."""
    shared = ("rollout.replay=runs/whole", "objective.anchor=behaviour", "policy.optimizer.lr=1e-3", "eval.every=2")
    runs = []
    for preset in ("grpo", "cispo"):
        done = ctpo.train(f"run.name=on-{preset}", *shared, f"objective.preset={preset}")
        assert done.returncode == 0, done.stderr[-4000:]
        runs.append(ctpo.directory / "runs" / f"on-{preset}")
        lines = records(runs[-1])
        assert not any(name.startswith("mismatch/") for line in lines for name in line)
        assert [line["step"] for line in lines if "val/toolmath/acc/mean@1" in line] == [0, 2, 3]
        first, recorded = (records(at, "evaluation/step_000000.parquet") for at in (runs[-1], finished))
        assert [line["token_ids"] for line in first] == [line["token_ids"] for line in recorded]
        assert records(runs[-1], "evaluation/step_000003.parquet") != first
    command = [sys.executable, "-m", "ctpo_megatron.cli", "compare", *map(str, runs)]
    compared = children.run(command, directory=ctpo.directory, environment=ctpo.environment, deadline_s=120)
    assert compared.returncode == 0 and "no evaluation" not in compared.stdout, compared.stdout + compared.stderr


@pytest.mark.slow  # without engines: test_kill_resume.py
@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)],
)
def test_a_signal_to_the_whole_job_checkpoints_the_step_at_hand(
    ctpo: Ctpo, number: signal.Signals, status: int
) -> None:
    """As schedulers and terminals do: every process of the job gets it, the engines and the sandbox included."""
    name = f"preempted-{number.name}"
    settings = (f"run.name={name}", "run.steps=5", "checkpoint.every=0", "checkpoint.asynchronous=true")
    ended, output = ctpo.train_disturbed("[rl] step 1/5", lambda run: os.killpg(run, number), *settings)
    run = ctpo.directory / "runs" / name
    assert ended == status, output[-4000:]
    assert ": a checkpoint follows, within" in output
    assert "***" not in output and "PC: @" not in output  # no native trace, as of a crash
    done = records(run)[-1]["step"]
    assert 1 <= done < 5 and (run / "checkpoints" / f"step_{done:06d}" / "COMPLETE.json").exists()
    continued = ctpo.train(*settings, "run.resume=auto")
    assert continued.returncode == 0, continued.stderr[-4000:]
    assert [record["step"] for record in records(run)] == list(range(6))


@pytest.mark.slow
def test_an_evaluation_only_run_that_is_cut_short_says_so_and_can_be_resumed(ctpo: Ctpo) -> None:
    settings = ("run.name=evaluated", "run.steps=0", "sft=null", "checkpoint.every=0", "export.enabled=false")
    ended, output = ctpo.train_disturbed("[rl] started", lambda run: os.killpg(run, signal.SIGTERM), *settings)
    run = ctpo.directory / "runs" / "evaluated"
    assert ended == 143 and "[eval] step 0: MISSING" in output, output[-4000:]
    assert not any(name.startswith("val/") for record in records(run) for name in record)
    continued = ctpo.train(*settings, "run.resume=auto")
    assert continued.returncode == 0, continued.stderr[-4000:]
    assert "[eval] step 0 toolmath mean@1 0." in continued.stdout
    assert "val/toolmath/acc/mean@1" in records(run)[0]


@pytest.mark.slow  # of tensor parallelism, without engines: test_kill_resume.py
def test_two_stages_run_the_same_driver(ctpo: Ctpo, finished: Path) -> None:
    settings = ("run.name=pipeline", "policy.pipeline_model_parallel_size=2", "run.steps=1", "checkpoint.every=0")
    done = ctpo.launch(*settings, ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    ours, theirs = records(ctpo.directory / "runs" / "pipeline"), records(finished)
    assert [record["step"] for record in ours] == [0, 1]
    # The sft runs under the other layout too, so the weights differ by rounding when RL begins.
    sft = [records(ctpo.directory / "runs" / run, "sft.jsonl")[-1]["sft/loss"] for run in ("pipeline", "whole")]
    assert sft[0] == pytest.approx(sft[1], rel=1e-2)
    assert ours[1]["mismatch/log_prob_abs_max"] <= 1e-3
    assert ours[1]["pg_update/first_log_ratio_abs_max"] <= 1e-5
    assert theirs[1]["weights/version"] == ours[1]["weights/version"]
