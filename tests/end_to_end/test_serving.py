"""docs/serving.md as a reader follows it: an export behind vLLM's OpenAI server, and the client of the page."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.end_to_end.small_run import Ctpo
from tests.support.deadlines import scaled
from tests.support.prefork import ROOT

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
ENOUGH = ("sft.steps=450", "prepare.sft_conversations=7200", "prepare.tokenizer_conversations=4000")
"""Of SFT, for a model that calls the tool and answers; with the right numbers or not."""


def documented(pattern: str) -> str:
    found = re.search(pattern, PAGE, re.DOTALL)
    assert found
    return found[1]


@contextmanager
def served(model: Path, port: int, folder: Path) -> Iterator[None]:
    """The server of the page, on another model and port."""
    text = documented(r"(python -m vllm\.entrypoints.*?)\n\n").replace("\\\n", " ")
    command = shlex.split(text.replace("runs/quickstart/model", str(model)).replace("8000", str(port)))
    environment = Ctpo(folder).environment | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen([sys.executable, *command[1:]], stdout=log, stderr=log, env=environment, cwd=folder)
    try:
        deadline = time.monotonic() + scaled(200)
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None and time.monotonic() < deadline, (folder / "server.log").read_text()[-4000:]
            time.sleep(0.5)
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
def test_a_client_has_its_call_run_and_gets_an_answer(tmp_path: Path) -> None:
    done = Ctpo(tmp_path).launch(*ENOUGH, "run.steps=0", "data.eval=[]", "eval.every=0", "tracking.report=false")
    assert done.returncode == 0, done.stderr[-4000:]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "client.py").write_text(documented(r"```python\n(# client\.py\n.*?)```").replace("8000", str(port)))
    with served(tmp_path / "runs" / "quickstart" / "model", port, tmp_path):
        command = [sys.executable, "client.py", "What is the sum of 34 and 70?"]
        client = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120), cwd=tmp_path)
    assert client.returncode == 0, client.stderr
    *before, answer = map(json.loads, client.stdout.splitlines())
    assert len(before) >= 2
    for call, output in zip(before[::2], before[1::2], strict=True):
        (made,) = call["tool_calls"]
        assert made["function"]["name"] == "code_interpreter" and "code" in json.loads(made["function"]["arguments"])
        assert (output["role"], output["tool_call_id"]) == ("tool", made["id"])
    assert answer["content"].startswith("The answer is ") and "tool_calls" not in answer
