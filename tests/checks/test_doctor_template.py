"""`ctpo doctor CONFIG --template`: an episode's tokens against those of the chat template."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ctpo_megatron import cli
from tests.checks.test_doctor_config import TOOLS, folder  # noqa: F401 - a fixture
from tests.engines.tiny_model import CHATML, tiny_tokenizer
from tests.support.deadlines import scaled

FORGETS = TOOLS.replace(
    "m.content + '<|im_end|>", "(m.content if loop.last or m.role != 'user' else 'earlier') + '<|im_end|>"
)
DROPS = TOOLS.replace("m.role == 'tool'", "m.role == 'none'").replace("{%- else %}", "{%- elif m.role != 'tool' %}")
STRIPS = TOOLS.replace("m.content + '<|im_end|>", "m.content | replace('6 * 7', '42') + '<|im_end|>")


def result(capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, str, dict[str, str]]:
    status = cli.main(["doctor", "first.yaml", *overrides, "--template", "--json"])
    answer = json.loads(capsys.readouterr().out)
    ((finding,),) = answer["findings"].values()
    return status, finding["detail"], answer["sample"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "<tool_call>"),
        (["model.chat_template=qwen2.5"], "<tool_call>"),
        (["model.chat_template=qwen3"], "<think>\n\n</think>\n\n<tool_call>"),
        (["model.chat_template=qwen3", "model.chat_template_kwargs.enable_thinking=false"], "<tool_call>"),
        (["rollout.tool_parser=fenced"], "```python"),
        (["rollout.tool_parser=fenced", "model.chat_template=qwen2.5"], "```python"),
    ],
)
def test_templates_that_keep_the_history(overrides: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, detail, sample = result(capsys, *overrides)
    assert (status, sample["call"].partition("\n{")[0].partition("\nprint")[0]) == (0, said)
    assert "as an episode builds them and as the template writes them" in detail
    assert "42" in sample["answer"] and sample["answer"].startswith("<|im_end|>")
    assert ("code_interpreter" in sample["prompt"]) == ("rollout.tool_parser=fenced" not in overrides)


@pytest.mark.parametrize(
    ("template", "difference"),
    [
        (FORGETS, "an episode has 'What is 6 times 7?"),
        (STRIPS, "an episode has '6 * 7)\"}}"),
        (CHATML, "does not show the model its tools"),
        (DROPS, "does not show a message of role"),
    ],
)
def test_a_difference_is_shown_and_fails(
    folder: Path,  # noqa: F811
    template: str,
    difference: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny_tokenizer(template).save_pretrained(folder / "model")
    status, detail, _ = result(capsys)
    assert status == 1
    assert difference in detail


@pytest.mark.parametrize("wrong", ["    parse = lambda self, text: []", "    example = '<tool_call>{</tool_call>'"])
def test_a_parser_that_cannot_read_its_own_example_is_named(
    folder: Path,  # noqa: F811
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = "from ctpo_megatron.environments.parsers.hermes import HermesParser\n"
    (folder / "unreadable_parser.py").write_text(f"{base}class Mine(HermesParser):\n{wrong}\n")
    monkeypatch.delitem(sys.modules, "unreadable_parser", raising=False)
    overrides = ("extensions.path=[.]", "rollout.tool_parser=unreadable_parser:Mine")
    assert "Mine.parse finds no call in" in result(capsys, *overrides)[1]


def test_it_needs_a_configuration_and_no_torch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert cli.main(["doctor", "--template"]) == 2
    assert "ctpo doctor CONFIG --template" in capsys.readouterr().err
    assert result(capsys, "model.chat_template=qwen9")[1].startswith('model.chat_template = "qwen9": cannot be read')
    assert "has no tokenizer" in result(capsys, "model.path=elsewhere")[1]
    code = (
        "import sys; from ctpo_megatron import cli\n"
        "status = cli.main(['doctor', 'first.yaml', '--template'])\n"
        "sys.exit(', '.join(sorted({'torch', 'vllm', 'ray'} & set(sys.modules))) or status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled(60), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "--- prompt\n" in done.stdout and done.stdout.endswith("ready\n")
