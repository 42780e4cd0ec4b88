"""A chat template that loops ends at its deadline, wherever and in whichever thread it is rendered."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ctpo_megatron.base import chat_template
from ctpo_megatron.base.chat_template import TemplateTimeout, apply_chat_template
from ctpo_megatron.cli.errors import report_error
from ctpo_megatron.data.rows import render
from ctpo_megatron.environments import Message, MessageTemplate, TokenizerError, template_problem
from tests.engines.tiny_model import tiny_tokenizer
from tests.support.deadlines import scaled

NESTED = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
WHERE_ASKED = "{% if messages[0].content == 'loop' %}" + NESTED + "{% endif %}{{ messages[0].content }}"
TALK = [{"role": "user", "content": "Q"}]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_S", 0.3)


def looping(template: str = NESTED) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def in_a_thread(call: Callable[[], Any]) -> Any:
    """As engines do: signals would not reach it."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result(timeout=scaled(30))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("run", [lambda call: call(), in_a_thread], ids=["main thread", "another"])
def test_a_template_that_loops_is_ended(run: Callable[[Callable[[], Any]], Any]) -> None:
    began = time.monotonic()
    with pytest.raises(TemplateTimeout, match=r"has not ended after 0\.3 s, does it loop\? Take the"):
        run(lambda: apply_chat_template(looping(), TALK))
    assert time.monotonic() - began < scaled(10)


@pytest.mark.timeout(60)
def test_what_renders_in_time_is_not_disturbed() -> None:
    tokenizer = looping(WHERE_ASKED)
    for _ in range(200):
        assert apply_chat_template(tokenizer, TALK) == "Q"
    assert apply_chat_template(tokenizer, [TALK] * 3) == ["Q"] * 3
    time.sleep(0.5)  # past the deadline: nothing is raised here any more
    assert not [thread for thread in threading.enumerate() if thread.name == "chat template"]


PROFILED = """
import sys
from ctpo_megatron.base.chat_template import apply_chat_template
class Tokenizer:
    def apply_chat_template(self, conversations, **options): return "Q"
def called(): print("called")
apply_chat_template(Tokenizer(), [])
sys.setprofile(lambda *_: None)
called()
"""


def test_a_program_that_rendered_can_be_profiled() -> None:
    """Python 3.11 never leaves a profiled function's first instruction once a pending exception was withdrawn."""
    run = subprocess.run([sys.executable, "-c", PROFILED], capture_output=True, text=True, timeout=scaled(20))
    assert run.stdout == "called\n", run.stderr


@pytest.mark.timeout(60)
def test_every_place_that_renders_names_the_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert "has not ended after" in template_problem(looping())
    with pytest.raises(TokenizerError, match="has not ended after"):
        MessageTemplate(looping()).frame([Message("user", "")])
    with pytest.raises(TemplateTimeout) as caught:  # not once for each row
        render([TALK, [{"role": "user", "content": "loop"}], *[TALK] * 2], [None] * 4, looping(WHERE_ASKED), {})
    assert report_error(caught.value, "train") == 2
    assert capsys.readouterr().err.startswith("ctpo: the chat template has not ended after 0.45 s")
