"""docs/evaluation.md as a reader follows it: an export behind vLLM's OpenAI server, and the client of examples/."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pyarrow.parquet as pq
import pytest

from ctpo_megatron.tracking import read_trajectories
from examples.toolmath.tokenizer import CHAT_TEMPLATE
from tests.end_to_end.small_run import Ctpo
from tests.support.deadlines import awaited, scaled
from tests.support.prefork import ROOT
from tests.support.task import SMALL_TASK, sft_file, task_files, task_folder

PAGE = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
QUESTIONS = 24
TASK = task_folder(SMALL_TASK[0], f"heldout_prompts={QUESTIONS}", "sft_conversations=7200")
ENOUGH = (*task_files(TASK), sft_file(TASK), "sft.steps=450")
"""Of SFT, for a model that calls the tool and answers; with the right numbers or not."""
THOUGHT = "('<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '')"
TEMPLATE = (
    CHAT_TEMPLATE.replace("turn('assistant', ", f"turn('assistant', {THOUGHT} + ")
    .replace(
        "turn(message.role, content)",
        f"turn(message.role, ({THOUGHT} if message.role == 'assistant' else '') + content)",
    )
    .replace("{{- '<|im_start|>assistant\\n' -}}", f"{{{{- '<|im_start|>assistant\\n' + {THOUGHT} -}}}}")
)
"""As Qwen3's: without its keyword the model is asked another prompt than it was trained on."""


def documented(pattern: str) -> str:
    found = re.search(pattern, PAGE, re.DOTALL)
    assert found
    return found[1]


@contextmanager
def served(model: Path, port: int, folder: Path) -> Iterator[None]:
    """The server of the page, on another model and port."""
    text = documented(r"(python -m vllm\.entrypoints.*?)\n    python ").replace("\\\n", " ")
    command = shlex.split(text.replace("runs/quickstart/model", str(model)).replace("8000", str(port)))
    environment = Ctpo(folder).environment | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen([sys.executable, *command[1:]], stdout=log, stderr=log, env=environment, cwd=folder)
    try:
        health = f"http://127.0.0.1:{port}/health"
        awaited(lambda: answers(health) or server.poll() is not None, 200, every=0.5)
        assert answers(health), (folder / "server.log").read_text()[-4000:]
        yield
    finally:
        server.terminate()
        server.wait(scaled(60))


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_served_model_calls_as_in_training_and_a_client_gets_an_answer(tmp_path: Path) -> None:
    (tmp_path / "keyword.jinja").write_text(TEMPLATE)
    keyword = ("model.chat_template=keyword.jinja", "model.chat_template_kwargs={enable_thinking: false}")
    ctpo = Ctpo(tmp_path)
    done = ctpo.launch(*ENOUGH, *keyword, "run.steps=0", "tracking.report=false")
    assert done.returncode == 0, done.stderr[-4000:]
    run = tmp_path / "runs" / "quickstart"
    (dump,) = (run / "evaluation").iterdir()
    in_training = {
        record["prompt_id"]: bool(record["tool_calls"]) and record["tool_calls"][0]["status"] != "parse_error"
        for record in read_trajectories(dump)
    }
    assert len(in_training) == QUESTIONS and sum(in_training.values()) >= QUESTIONS / 2
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    client = ROOT / documented(r"python (examples/\w+\.py) ")
    (tmp_path / "client.py").write_text(client.read_text(encoding="utf-8").replace("8000", str(port)))
    with served(run / "model", port, tmp_path):
        assert calls_of(port, TASK / "heldout.parquet") == sum(in_training.values())
        command = [sys.executable, "client.py", documented(r'python examples/\w+\.py "(.*?)"')]
        done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120), cwd=tmp_path)
    check_conversation(done)


def calls_of(port: int, questions: Path) -> int:
    """How many questions an OpenAI client gets a well-formed call for, greedily."""
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    model = client.models.list().data[0].id
    tool: dict[str, Any] = {"name": "code_interpreter", "parameters": {"properties": {"code": {"type": "string"}}}}
    found = 0
    for row in pq.read_table(questions).to_pylist():
        asked: Any = {"messages": row["prompt"], "tools": [{"type": "function", "function": tool}]}
        reply = client.chat.completions.create(model=model, **asked, temperature=0, max_tokens=64)
        calls = reply.choices[0].message.tool_calls or []
        found += [(call.function.name, [*json.loads(call.function.arguments)]) for call in calls] == [
            ("code_interpreter", ["code"])
        ]
    return found


def check_conversation(client: subprocess.CompletedProcess[str]) -> None:
    """Calls of the tool, each with its output, and an answer."""
    assert client.returncode == 0, client.stderr
    *before, answer = map(json.loads, client.stdout.splitlines())
    assert len(before) >= 2
    for call, output in zip(before[::2], before[1::2], strict=True):
        (made,) = call["tool_calls"]
        assert made["function"]["name"] == "code_interpreter" and "code" in json.loads(made["function"]["arguments"])
        assert (output["role"], output["tool_call_id"]) == ("tool", made["id"])
    assert answer["content"].startswith("The answer is ") and "tool_calls" not in answer
