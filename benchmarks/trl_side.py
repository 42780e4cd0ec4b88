"""TRL's side of `benchmarks.trl`: GRPOTrainer with a tool, in TRL's own environment; one line of JSON for each RL step.

All of it is TRL's documented way: an async function as tool, a reward function, transformers' generation. Of ours it
imports nothing but the client of the sandbox. The only argument is a JSON object: `benchmarks.trl_sizes.trl_options`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPTIONS: dict[str, Any] = json.loads(sys.argv[1])
os.environ |= {"OMP_NUM_THREADS": str(OPTIONS["threads"]), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

import pyarrow.parquet  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from math_verify import parse, verify  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.chat_template_utils import qwen3_template  # noqa: E402

from ctpo_sandbox.client import SandboxClient  # noqa: E402

_BOX = "\\boxed{"
step: dict[str, float] = {}
"""Figures of the RL step under way."""


def last_text(completion: list[dict[str, Any]]) -> str:
    """What the model said in its last turn; nothing if that was a call, or a tool had the last word."""
    last = completion[-1]
    return "" if last["role"] != "assistant" or last.get("tool_calls") else last.get("content") or ""


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """As the quickstart's `math_verify`: the last box of the last turn."""
    return [score(last_text(said), truth) for said, truth in zip(completions, answer, strict=True)]


def score(text: str, truth: str) -> float:
    """1 if the last box equals the truth. The task's answers are plain numbers: no braces inside."""
    said = text.rpartition(_BOX)[2].partition("}")[0] if _BOX in text else ""
    if not said.strip():
        return 0.0
    gold, answer = (parse(f"{_BOX}{each}}}", parsing_timeout=None) for each in (truth, said))
    return float(verify(gold, answer, timeout_seconds=None))


def coin(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """As `benchmarks.coin`."""
    return [float(len(ids) % 2) for ids in completion_ids]


def code_interpreter_of(url: str, limit_s: float) -> Callable[..., Any]:
    """The tool: a program in our sandbox, shown to the model as ours is."""
    client = SandboxClient(url, max_concurrency=8, request_timeout_s=60.0)

    async def code_interpreter(code: str) -> str:
        """
        Run a Python program and return what it prints.

        Args:
            code: Python source; print() what you need to see.
        """
        began = time.perf_counter()
        found = await client.run(code, run_timeout_s=limit_s)
        step["tool_s"] = step.get("tool_s", 0.0) + time.perf_counter() - began
        step["tool_calls"] = step.get("tool_calls", 0) + 1
        shown = found.stdout.rstrip("\n")
        return shown if found.status == "success" else f"[{found.status}]\n{found.stderr[-2000:]}"

    return code_interpreter


class Trainer(GRPOTrainer):
    """TRL's, counting what it samples."""

    def _generate(self, prompts: list[Any]) -> Any:
        began = time.perf_counter()
        found = super()._generate(prompts)
        step["rollout_s"] = time.perf_counter() - began
        return found

    def _calculate_rewards(self, *arguments: Any, **options: Any) -> Any:
        found = super()._calculate_rewards(*arguments, **options)
        step["reward"] = float(found.mean())
        return found

    def _generate_and_score_completions(self, inputs: list[Any]) -> Any:
        found = super()._generate_and_score_completions(inputs)
        mask = found["completion_mask"] * found.get("tool_mask", 1)
        tokens = found["completion_mask"].sum() + found["prompt_mask"].sum()
        step["trained_tokens"], step["tokens"] = int(mask.sum()), int(tokens)
        step["padded_tokens"] = found["completion_mask"].numel() + found["prompt_mask"].numel()
        step["lengths"] = mask.sum(dim=1).tolist()
        return found


def write_line(number: int) -> None:
    """Say that an RL step is over, or with 0 that training begins."""
    with Path(OPTIONS["marks"]).open("a") as file:
        file.write(json.dumps({"step": number, **step}) + "\n")


class Marks(TrainerCallback):
    """Writes a line before the first RL step and at the end of every one."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        write_line(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % OPTIONS["updates"] == 0:
            write_line(state.global_step // OPTIONS["updates"])
            step.clear()


def settings() -> GRPOConfig:
    """The same work as ours; see `benchmarks/README.md` for every difference that is left."""
    rows, updates, pieces = OPTIONS["samples"], OPTIONS["updates"], OPTIONS["pieces"]
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        per_device_train_batch_size=rows // updates // pieces,
        gradient_accumulation_steps=pieces,
        steps_per_generation=updates * pieces,
        num_generations=OPTIONS["samples_per_prompt"],
        max_completion_length=OPTIONS["max_response_tokens"],
        max_tool_calling_iterations=OPTIONS["max_turns"] - 1,
        generation_kwargs={
            "max_new_tokens": OPTIONS["max_turn_tokens"]
        },  # of a turn; TRL has no limit of its own for it
        temperature=1.0,
        learning_rate=OPTIONS["lr"],
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=updates * OPTIONS["steps"],
        logging_steps=updates,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
        **OPTIONS["config"],
    )


def main() -> None:
    """Train; leaves without Python's tidying up, which would count as a step's time."""
    torch.set_num_threads(OPTIONS["threads"])
    tokenizer = AutoTokenizer.from_pretrained(OPTIONS["model"])
    tokenizer.response_template = qwen3_template
    rows = [
        {"prompt": [dict(m) for m in row["prompt"]], "answer": row["reward_model"]["ground_truth"]}
        for row in pyarrow.parquet.read_table(OPTIONS["data"]).to_pylist()
    ]
    Trainer(
        model=AutoModelForCausalLM.from_pretrained(OPTIONS["model"], dtype=torch.float32),
        reward_funcs=coin if OPTIONS["coin"] else right,
        args=settings(),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        tools=[code_interpreter_of(OPTIONS["sandbox"], OPTIONS["run_timeout_s"])],
        callbacks=[Marks()],
    ).train()
    os._exit(0)


if __name__ == "__main__":
    main()
