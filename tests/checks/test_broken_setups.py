"""Set-ups that cannot work, each found by the dry run alone, with its remedy: "every mistake at once" of the README.

A set-up is the folder of `own`, with a change to its files, or overrides. What is refused has status 2, a warning 0.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.data.conftest import sandbox_url, toolmath
from tests.data.test_data_check import TOOLS, dry_run, own, row, write

__all__ = ["own", "sandbox_url", "toolmath"]

Change = Callable[[Path], object]
USER, SAID = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
SFT = "sft.data=[sft.jsonl] sft.steps=1 sft.conversations_per_step=2"


def edit(name: str, **changes: Any) -> Change:
    """Keys of a JSON file of the model; None removes one."""

    def change(folder: Path) -> None:
        file = folder / "model" / name
        kept = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))

    return change


def template(change: Callable[[str], str]) -> Change:
    def write_changed(folder: Path) -> None:
        file = folder / "model" / "chat_template.jinja"
        file.write_text(change(file.read_text()))

    return write_changed


def train(*rows: Any) -> Change:
    """Rows behind the twenty of `own`."""

    def change(folder: Path) -> None:
        write(folder / "train.jsonl", *(row(str(number)) for number in range(20)), *rows)

    return change


def sft(*conversations: list[dict[str, Any]]) -> Change:
    usual = [[{"role": "user", "content": str(number)}, SAID] for number in range(4)]
    return lambda folder: write(folder / "sft.jsonl", *({"messages": each} for each in [*usual, *conversations]))


def parts(code: str) -> Change:
    def change(folder: Path) -> None:
        (folder / "broken_parts.py").write_text(code)
        sys.modules.pop("broken_parts", None)

    return change


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def gone(pattern: str) -> Change:
    """Files of the model."""
    return lambda folder: [file.unlink() for file in (folder / "model").glob(pattern)]


COPY_AGAIN = "download or copy the model again"
WINDOW = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}


def without_tool_messages(kept: str) -> str:
    return "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools today') }}{% endif %}" + kept


@dataclass(frozen=True)
class Broken:
    """found: what it is; remedy: what to do; both as the dry run says them. name: of the setup; the overrides' else."""

    found: str
    remedy: str
    overrides: str = ""
    change: Change | None = None
    name: str = ""


PARTS = "extensions.path=[.] reward.function=broken_parts:f"


def overrides(*rows: tuple[str, str, str]) -> list[Broken]:
    return [Broken(found, remedy, given) for given, found, remedy in rows]


def model(*rows: tuple[str, Change, str, str]) -> list[Broken]:
    return [Broken(found, remedy, "", change, name) for name, change, found, remedy in rows]


def rewards(*rows: tuple[str, str, str, str]) -> list[Broken]:
    return [Broken(found, remedy, PARTS, parts(code), name) for name, code, found, remedy in rows]


REFUSED = [
    *overrides(
        ("run.stepz=3", "run.stepz = 3: unknown key", "did you mean run.steps?"),
        ("policy.dtype=fp16", 'policy.dtype = "fp16"', "did you mean float16?"),
        ("policy.mini_batch_prompts=5", "policy.mini_batch_prompts = 5", "a divisor of rollout.prompts_per_step"),
        ("policy.micro_batch_tokens=100", "= 100: cannot hold the longest sequence", "set at least 500"),
        ("rollout.engine.max_model_len=256", "max_model_len = 256: is less than", "set at least 500"),
        ("policy.tensor_model_parallel_size=2", "tensor_model_parallel_size = 2", "torchrun --nproc-per-node N"),
        ("rollout.samples_per_prompt=1", "samples_per_prompt = 1: gives no advantage", "sample at least 2"),
        ("run.deadline=1", "run.deadline = 1.0: is in the past", "$(date -d +4hours"),
        ("eval.every=5 data.eval=[]", "eval.every = 5: there is nothing to evaluate on", "give data.eval"),
        ("rollout.weights.transport=nccl_m2n", 'transport = "nccl_m2n"', "removed; give nccl or auto"),
        ("rollout.replay=nowhere", 'rollout.replay = "nowhere": is no run directory (no config.yaml', "give one, e.g."),
        ("rollout.tool_parser=xml", '= "xml"', "write hermes or fenced, or package.module:Name"),
        ("data.train=[x.jsonl]", 'data.train = "x.jsonl": no such file', "give"),
        ("data.train=[openai/a.parquet]", 'data.train = "openai/a.parquet": no such file; ', "give the path"),
        ("sandbox.request_timeout_s=1", "= 1.0: must exceed sandbox.run_timeout_s (4)", "set 40 or more"),
    ),
    *rewards(
        ("no such function", "def ff(): ...\n", "broken_parts has no 'f'", "did you mean 'ff'?"),
        ("no Python", "def f(:\n", "failed: SyntaxError: invalid syntax (broken_parts.py, line 1)", "correct it"),
    ),
    Broken(
        "the example call of rollout.tool_parser ends with runtime_error: '[runtime_error]",
        "ZeroDivisionError: division by zero'; repair the example",
        "extensions.path=[.] rollout.tool_parser=broken_parts:Bad "
        "rollout.max_response_tokens=262 data.max_prompt_tokens=250",
        parts(
            "from ctpo_megatron.environments.parsers.hermes import HermesParser\n"
            "class Bad(HermesParser):\n    example = HermesParser.example.replace('6 * 7', '6 / 0')\n"
        ),
        "example fails",
    ),
    *model(
        ("no config.json", gone("config.json"), "cannot read model/config.json", "a directory in Hugging Face format"),
        ("config.json cut", text("model/config.json", '{"a": '), "config.json:1: not valid JSON", COPY_AGAIN),
        ("GPT-2", edit("config.json", architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel", "Qwen3ForCausalLM"),
        ("logit_scale", edit("config.json", logit_scale=0.5), "logit_scale 0.5 is not supported", "without it"),
        ("window", edit("config.json", **WINDOW), "sliding-window attention is not supp", "set sliding_window null"),
        ("no weights", gone("*.safetensors"), "model", "safetensors"),
        ("tokenizer cut", text("model/tokenizer.json", '{"a": '), "the tokenizer cannot be read", COPY_AGAIN),
        ("loses calls", edit("tokenizer.json", decoder=None), "turns a tool call into", "repair tokenizer.json"),
        ("small vocabulary", edit("config.json", vocab_size=20), "holds the token id", "(vocab_size)"),
        ("no template", gone("chat_template.jinja"), "the tokenizer has no chat template", "model.chat_template"),
        ("template cut", template(lambda _: "{% for m in messages %}"), "not valid Jinja: line 1", "to one of ours"),
        ("no tools", template(lambda kept: kept.removeprefix(TOOLS)), "does not show the model its tools", "fenced"),
        ("refuses tools", template(without_tool_messages), "the first trajectory cannot be played", "no tools today"),
        (
            "columns of another trainer",
            lambda folder: write(folder / "train.jsonl", {"problem": "1+1?", "answer": "2"}),
            "train.jsonl: no columns 'data_source', 'prompt', 'reward_model'",
            "these lines of Python write train_prompts.parquet",
        ),
    ),
    Broken("train.jsonl row 20", "is no answer", "", train(row("x", "unknown")), "no answer"),
    Broken("must end with an assistant message", "remove what comes after the last one", SFT, sft([USER]), "no end"),
    Broken(
        "sft.conversations_per_step = 16: 4 conversations cannot fill a batch",
        "lower it to at most 4",
        f"{SFT} sft.conversations_per_step=16",
        sft(),
    ),
]
WARNED = [
    *overrides(
        ("rollout.engine.dtype=bfloat16 policy.dtype=float32", "rollout.engine.dtype", "policy.dtype"),
        (
            "rollout.prompts_per_step=32",
            "= 32: is more than the 20 prompts of data.train: a prompt is in a batch up to 2 times, each a group of",
            "its own with other seeds; lower it, or give more data",
        ),
        ("sandbox.url=http://127.0.0.1:9", "the first call was not tried", "start it before the run"),
        ("rollout.max_response_tokens=20", "already end with 'length'", "raise max_response_tokens"),
        ("rollout.max_turns=1", "the tools (python) are offered and can never", "raise it, or set rollout.tools: []"),
    ),
    *model(
        (
            "another call form",
            template(lambda kept: kept.replace("<tool_call>, and", "Action:, and", 1)),
            "does not show how to call a tool as rollout.tool_parser: hermes reads it",
            "set rollout.tool_parser: fenced",
        ),
        (
            "no box",
            template(lambda kept: kept.replace(", and answer in \\boxed{}", "", 1)),
            "never names a box",
            "say so in data.system_prompt",
        ),
        (
            "images",
            train(row(images=["x.png"])),
            "train.jsonl has the columns images: images, videos and sounds are not read",
            "leave",
        ),
    ),
]


@pytest.mark.parametrize("broken", [*REFUSED, *WARNED], ids=lambda broken: broken.name or broken.overrides)
def test_the_dry_run_finds_it(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, broken: Broken
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("ctpo_megatron.checks.first_trajectory.FIRST_CALL_TIMEOUT_S", 2.0)
    if broken.change:
        broken.change(own)
    status, _, err = dry_run(capsys, *shlex.split(broken.overrides))
    assert status == (0 if broken in WARNED else 2)
    assert broken.found in err and broken.remedy in err and '\n  File "' not in err, err


def test_the_folder_itself_is_clean(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for overrides in ("", SFT):
        sft()(own)
        status, _, err = dry_run(capsys, *shlex.split(overrides))
        assert (status, err) == (0, "")
