"""`ctpo eval` from the prompts to results.json, ended and begun again: the numbers of one that was not.

The fast tests have all of it but engines: what stands for them answers from the seed of a sample alone, as engines do.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ctpo_megatron import cli
from ctpo_megatron.config import Config
from ctpo_megatron.data import Prompt, Trajectory
from ctpo_megatron.engines import GroupLost, GroupTask
from ctpo_megatron.environments import held_out_prompts, trajectory_seed
from ctpo_megatron.evaluate import Outcome, answering, evaluate, find_target, read_config
from ctpo_megatron.tracking import Display
from tests.end_to_end.small_run import ROOT, Ctpo
from tests.support.deadlines import scaled
from tests.support.task import SMALL_TASK, task_folder

K = 4
SETTINGS = [
    "data.max_prompt_tokens=64",
    "data.tool_in_prompt=false",
    f"eval.samples={K}",
    "eval.temperature=0.7",
    "rollout.max_turns=3",
    "rollout.max_turn_tokens=24",
    "rollout.max_response_tokens=80",
    "rollout.engine.dtype=float32",
    "rollout.engine.max_model_len=160",
    "rollout.engine.kv_cache_mb=32",
    "reward.timeout_s=60",
    "tracking.live=plain",
]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with its tokenizer, and 28 held-out prompts."""
    return shutil.copytree(task_folder(*SMALL_TASK), tmp_path_factory.mktemp("evaluate") / "task")


class Ended(Exception):
    """The evaluation is ended from outside."""


class Scripted:
    """Answers instead of engines; ends the evaluation when it has answered `stop_after` samples."""

    name, index, live, failure = "scripted", 0, True, None

    def __init__(self, tokenizer: Any, stop_after: int | None = None, lost: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop_after, self.lost = tokenizer, stop_after, lost
        self.played: list[tuple[str, int]] = []
        self.engines, self.counts = [self], Counter[str]()
        self.observers: list[Callable[[], None]] = []

    def wait_ready(self) -> None:
        """There is nothing to wait for."""

    async def sample(self, _: Any, task: GroupTask) -> list[Trajectory]:
        if task.prompt.id in self.lost:
            raise GroupLost("it hung")
        if self.stop_after is not None and len(self.played) >= self.stop_after:
            await asyncio.sleep(scaled(2.0))  # what was begun is scored meanwhile
            raise Ended
        self.played += [(task.prompt.id, index) for index in task.samples]
        return [self.answer(task.prompt, n, trajectory_seed(0, task.step, task.prompt.id, n)) for n in task.samples]

    def answer(self, prompt: Prompt, index: int, seed: int) -> Trajectory:
        trajectory = Trajectory(prompt.id, index, seed)
        shown = prompt.answer if seed % 3 else str(seed % 2)
        trajectory.final_text = f"So \\boxed{{{shown}}}" if seed % 5 else f"So {shown}"
        ids = self.tokenizer(trajectory.final_text, add_special_tokens=False)["input_ids"]
        trajectory.append_context(prompt.token_ids, 0)
        trajectory.append_model(ids, [-0.5] * len(ids), [0] * len(ids), 1)
        trajectory.finish_reason = "answer"
        return trajectory


@pytest.fixture
def run(task: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Evaluates into a folder with scripted answers; `engines` are what answered last."""
    from transformers import AutoTokenizer

    def evaluated(output: Path, *overrides: str, reference: bool = False, **script: Any) -> Outcome:
        engines = Scripted(AutoTokenizer.from_pretrained(task / "model"), **script)
        evaluated.engines = engines  # type: ignore[attr-defined]

        @contextmanager
        def open_engines(config: Config, logs: Path, loop: Any, **_: Any) -> Iterator[Scripted]:
            yield engines

        monkeypatch.setattr(answering, "open_engines", open_engines)
        data = f'data.eval=["{task}/heldout.parquet"]'
        config, _ = read_config(find_target(task / "model", None), [*SETTINGS, data, *overrides], 0)
        with Display("plain", 0, Console(file=io.StringIO())) as display:
            prompts = held_out_prompts(config, engines.tokenizer).prompts
            return evaluate(config, prompts, engines.tokenizer, output, reference=reference, display=display)

    return evaluated


def lines(output: Path) -> dict[tuple[str, int], dict[str, Any]]:
    records = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    return {(record["prompt_id"], record["index"]): record for record in records}


def test_an_evaluation_that_was_ended_goes_on_with_the_same_numbers(run: Any, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "eval.prompts=6")
    assert whole.left_out == [] and len(run.engines.played) == 6 * K
    with pytest.raises(Ended):
        run(tmp_path / "twice", "eval.prompts=6", stop_after=9)
    assert len(lines(tmp_path / "twice")) >= 5 and not (tmp_path / "twice" / "results.json").exists()
    before = lines(tmp_path / "twice")
    again = run(tmp_path / "twice", "eval.prompts=6")
    assert sorted([*before, *run.engines.played]) == sorted(lines(tmp_path / "whole"))  # each was played once
    assert lines(tmp_path / "twice") == lines(tmp_path / "whole")
    assert again.results == whole.results
    assert (tmp_path / "twice" / "results.json").read_bytes() == (tmp_path / "whole" / "results.json").read_bytes()


def test_more_samples_and_the_other_scorer_take_what_is_there(run: Any, tmp_path: Path) -> None:
    first = run(tmp_path, "eval.prompts=3", "eval.samples=2")
    run(tmp_path, "eval.prompts=3")
    assert sorted(run.engines.played) == [(prompt, index) for prompt, index in sorted(lines(tmp_path)) if index >= 2]
    both = run(tmp_path, "eval.prompts=3", "eval.samples=2", reference=True)
    assert run.engines.played == []
    [source] = both.results["sources"].values()
    assert source["strict"] == first.results["sources"]["toolmath"]["strict"]
    assert source["reference"]["avg@2"]["value"] > source["strict"]["avg@2"]["value"]  # numbers without a box count


def test_a_prompt_that_was_given_up_is_left_out_and_named(run: Any, tmp_path: Path) -> None:
    run(tmp_path / "all", "eval.prompts=3")
    given_up = [next(iter(lines(tmp_path / "all")))[0]]
    outcome = run(tmp_path / "some", "eval.prompts=3", lost=given_up)
    assert outcome.left_out == given_up and outcome.results["overall"]["problems"] == 2
    assert run(tmp_path / "some", "eval.prompts=3").left_out == []
    assert lines(tmp_path / "some") == lines(tmp_path / "all")


def test_what_cannot_be_evaluated_is_said_before_anything_starts(task: Path, capsys: Any, tmp_path: Path) -> None:
    model, data, output = str(task / "model"), f"{task}/heldout.parquet", tmp_path / "out"
    cut, mute = (str(shutil.copytree(model, tmp_path / name)) for name in ("cut", "mute"))
    os.truncate(f"{cut}/model.safetensors", 5000)
    Path(mute, "tokenizer.json").unlink()
    for arguments, message in (
        ([cut, "--data", data, *SETTINGS], "model.safetensors has 5000 bytes, but its header asks for"),
        ([mute, "--data", data, *SETTINGS], "tokenizer"),
        ([str(tmp_path)], "is no model and no run"),
        ([model], "nothing to evaluate on: give --data FILE"),
        ([model, "--data", data], "rollout.engine.max_model_len"),
        ([model, "--data", data, "rollout.max_respons_tokens=80"], "did you mean rollout.max_response_tokens"),
        ([model, "--data", f"{tmp_path}/none.parquet", *SETTINGS], "no such file"),
    ):
        assert cli.main(["eval", *arguments, "--output", str(output)]) == 2
        assert message in capsys.readouterr().err, arguments
        assert not (output / "samples.jsonl").exists()


@pytest.mark.slow  # of the sources alone: tests/test_architecture.py
def test_nothing_of_an_evaluation_imports_megatron() -> None:
    code = (
        "import sys, ctpo_megatron.cli.eval, ctpo_megatron.evaluate.command, ctpo_megatron.engines.engine\n"
        "from ctpo_megatron.engines import EnginePool\n"
        "assert not [name for name in sys.modules if name.partition('.')[0] == 'megatron']"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=Ctpo(ROOT).environment, timeout=scaled(120))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_engines_that_are_ended_and_begun_again_give_the_same_numbers(
    task: Path, tmp_path: Path, number: signal.Signals
) -> None:
    data = ["--data", f"{task}/heldout.parquet"]
    command = [sys.executable, "-m", "ctpo_megatron.cli", "eval", f"{task}/model", *data, *SETTINGS]
    command += ["rollout.engine.max_num_seqs=4"]  # so that it takes a while
    how: dict[str, Any] = {"env": Ctpo(ROOT).environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ended, whole = tmp_path / "ended", task / "whole"
    with subprocess.Popen([*command, "--output", str(ended)], start_new_session=True, **how) as process:
        deadline = time.monotonic() + scaled(400)
        samples = ended / "samples.jsonl"
        while not (samples.exists() and samples.stat().st_size) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, number)
        output = process.communicate(timeout=scaled(60))[0].decode()
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number), output
    assert number == signal.SIGKILL or "the evaluation is MISSING" in output
    assert 0 < len(lines(ended)) < 28 * K, output
    for directory in (ended, whole):
        if not (directory / "results.json").exists():
            done = subprocess.run([*command, "--output", str(directory)], timeout=scaled(400), **how)
            assert done.returncode == 0, done.stdout.decode()
    assert lines(ended) == lines(whole)
    assert (ended / "results.json").read_bytes() == (whole / "results.json").read_bytes()


JUDGE = """
def half(trajectory, prompt, *, every):
    if trajectory.seed % every == 0 or prompt.id.endswith("/3"):
        raise RuntimeError("the judge is away")
    return float(prompt.answer in trajectory.final_text)
"""


def test_what_the_judge_did_not_judge_is_neither_right_nor_wrong(
    run: Callable[..., Outcome], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "absent_judge.py").write_text(JUDGE)
    path = f'extensions.path=["{tmp_path}"]'
    function = "reward.function={name: 'absent_judge:half', arguments: {every: 3}}"
    outcome = run(tmp_path / "out", path, function)
    samples = [json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text().splitlines()]
    by_prompt: dict[str, list[float]] = {}
    for each in samples:
        by_prompt.setdefault(each["prompt_id"], []).extend([each["score"]] if each["score"] is not None else [])
    lost = {name for name, scores in by_prompt.items() if not scores}
    judged = [sum(scores) / len(scores) for scores in by_prompt.values() if scores]
    assert set(outcome.left_out) == lost and any(name.endswith("/3") for name in lost)
    assert outcome.no_verdict == sum(K - len(scores) for scores in by_prompt.values() if scores) > 0
    overall = outcome.results["overall"]
    assert overall["reward"][f"avg@{K}"]["value"] == pytest.approx(sum(judged) / len(judged))
    assert (overall["no_verdict"], overall["problems"]) == (outcome.no_verdict, len(judged))
    assert json.loads(outcome.file.read_text()) == outcome.results and "the judge is away" in caplog.text
    again = run(tmp_path / "out", path, function)  # the same judge: all that has no verdict is asked for once more
    assert sorted(run.engines.played) == sorted(  # type: ignore[attr-defined]
        (each["prompt_id"], each["index"]) for each in samples if each["score"] is None
    )
    assert again.results == outcome.results


def test_an_evaluation_without_any_verdict_says_so(run: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "gone_judge.py").write_text(JUDGE)
    function = "reward.function={name: 'gone_judge:half', arguments: {every: 1}}"
    with pytest.raises(RuntimeError, match="no prompt has a sample with a verdict"):
        run(tmp_path / "out", f'extensions.path=["{tmp_path}"]', function)
