"""The path of docs/tutorials/small_model.md with a tiny random Llama in its place, and problems that are made here."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from tests.end_to_end.small_run import Ctpo, records, train_main
from tests.support import children, ranks
from tests.support.deadlines import scaled
from tests.support.prefork import ROOT

EXAMPLE = ROOT / "examples" / "smollm2"
FAMILIES: dict[str, dict[str, Any]] = {"chain_sum": {}, "count_bits": {}, "gcd": {}, "lcm": {}}
COUNTS = {"heldout": 8, "train": 16, "sft": 60}
TEMPLATE = """\
{% for message in messages %}\
{% if loop.first and message.role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}\
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""As SmolLM2's: turns alone, a system message of its own, no tools."""


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """examples/smollm2/tasks.py."""
    monkeypatch.syspath_prepend(EXAMPLE)
    yield importlib.import_module("tasks")
    for name in ("tasks", "programs"):
        sys.modules.pop(name, None)


def problems(family: str, parameters: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """Problems in the form of reasoning-gym, every fourth of them a repetition."""
    for number in count(20 + seed):
        a, b = number % 97 + 4, (number - number % 4 // 3) * 7 % 89 + 6
        found: dict[str, tuple[str, int, dict[str, Any]]] = {
            "chain_sum": (f"{a} + {b} - 3 =", a + b - 3, {"expression": f"{a} + {b} - 3"}),
            "count_bits": (f"How many 1 bits has {number}?", number.bit_count(), {"number": number}),
            "gcd": (f"GCD of {2 * a}, {2 * b}?", _gcd(2 * a, 2 * b), {"numbers": [2 * a, 2 * b]}),
            "lcm": (f"LCM of {a}, {b}?", a * b // _gcd(a, b), {"numbers": [a, b]}),
        }
        question, answer, metadata = found[family]
        yield {"question": question, "answer": str(answer), "metadata": metadata}
        if number % 4 == 0:
            yield {"question": f" {question}\n", "answer": str(answer), "metadata": metadata}


def _gcd(a: int, b: int) -> int:
    return _gcd(b, a % b) if b else a


def write(tasks: ModuleType, directory: Path, wrong: float) -> dict[str, int]:
    drawer = tasks.Drawer(FAMILIES, problems, 100, 0)
    found: dict[str, int] = tasks.write_tasks(directory, drawer, COUNTS, wrong, Random(0))
    return found


def conversations(directory: Path) -> list[list[dict[str, str]]]:
    found: list[list[dict[str, str]]] = pq.read_table(directory / "sft.parquet")["messages"].to_pylist()
    return found


def test_no_question_occurs_twice(tasks: ModuleType, tmp_path: Path) -> None:
    write(tasks, tmp_path / "task", 0.5)
    prompts = [
        row["prompt"][0]["content"]
        for split in ("heldout", "train")
        for row in pq.read_table(tmp_path / "task" / f"{split}.parquet").to_pylist()
    ]
    asked = [*prompts, *(messages[0]["content"] for messages in conversations(tmp_path / "task"))]
    assert len(asked) == sum(COUNTS.values()) == len(set(asked))
    table = pq.read_table(tmp_path / "task" / "heldout.parquet")
    pq.write_table(table, tmp_path / "task" / "train.parquet")
    with pytest.raises(ValueError, match="8 questions occur twice"):
        tasks.check_disjoint(tmp_path / "task")


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_share_of_wrong_programs(tasks: ModuleType, tmp_path: Path, share: float) -> None:
    """A conversation boxes what its program prints, and that is wrong in the given share of them."""
    mistakes = write(tasks, tmp_path / "task", share)
    answers = {
        problem["question"]: problem["answer"]
        for family in FAMILIES
        for problem, _ in zip(problems(family, {}, 0), range(400), strict=False)
    }
    wrong = 0
    for question, call, shown, final in conversations(tmp_path / "task"):
        program = call["content"].removeprefix("```python\n").removesuffix("\n```")
        printed = tasks.output(program)
        assert shown["content"] == f"The program printed:\n{printed}" and final["content"] == f"\\boxed{{{printed}}}"
        wrong += printed != answers[question["content"]]
    assert wrong == sum(mistakes.values())
    assert 0 <= share * COUNTS["sft"] - wrong < len(FAMILIES)


@pytest.mark.slow
def test_the_listed_packages_are_enough(tmp_path: Path) -> None:
    """requirements/examples.txt is installed without dependencies, so that it must name all that the lock lacks."""
    listed = ["--no-deps", "--target", str(tmp_path), "-r", str(ROOT / "requirements" / "examples.txt")]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *listed], check=True, timeout=scaled(280))
    imported = "import accelerate, gguf, reasoning_gym; print(reasoning_gym.__file__)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    python = [sys.executable, "-c", imported]
    done = subprocess.run(python, env=environment, capture_output=True, text=True, timeout=scaled(100))
    assert done.stdout.startswith(str(tmp_path)), done.stderr


def test_families_of_reasoning_gym(tasks: ModuleType) -> None:
    """Every family of families.yaml has problems that its programs solve, and mistakes for nearly all of them."""
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not in the lock: requirements/examples.txt")
    families = yaml.safe_load((EXAMPLE / "families.yaml").read_text())
    drawn = tasks.Drawer(families, tasks.reasoning_gym_problems, 280, 0).draw(20 * len(families))
    assert {family for family, _, _ in drawn} == set(families)
    spoiled = [tasks.wrong_program(problem, programs) is not None for _, problem, programs in drawn]
    assert sum(spoiled) > 0.8 * len(drawn)


@pytest.mark.parametrize(
    ("question", "solution", "answer", "program"),
    [
        ("7 bags of 6, 5 eaten?", "So 7*6=42 in all\n42 - 5 = 37 left\n#### 37", 37, "print(7 * 6 - 5)"),
        ("$3 for 4 plants?", "1. 4 plants × $3 per plant = $12\n#### 12", 12, "print(4 * 3)"),
        ("A year of 35 days?", "35 days/month * 12 months/year = 420 days", 420, "print(35 * 12)"),
        ("7 of 6, 5 eaten?", "42 - 5 = 37", 37, None),  # 42 comes from nowhere
        ("7 of 6, 5 eaten?", "7*6=42", 37, None),  # another value
        ("7 of 6?", "7 (6) + 1 = 42", 42, None),  # a call, no calculation
    ],
)
def test_a_worked_solution_as_a_program(
    tasks: ModuleType, question: str, solution: str, answer: int, program: str | None
) -> None:
    metadata = {"answer_cot": solution, "answer_value": answer}
    programs = sys.modules["programs"].gsm_symbolic(question, metadata)
    assert (programs.right if programs else None) == program


def tiny_model(directory: Path, texts: list[str]) -> None:
    """A random Llama of SmolLM2's shape: three query heads for each key and value head, tied embeddings."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from examples.toolmath.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(texts)
    tokenizer.chat_template = TEMPLATE
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@pytest.fixture
def small(tasks: ModuleType, tmp_path: Path) -> tuple[list[str], dict[str, Any]]:
    """The arguments of a small run of the configuration, and where it runs."""
    ctpo, task, model = Ctpo(tmp_path), tmp_path / "task", tmp_path / "model"
    write(tasks, task, 0.5)
    texts = [message["content"] for messages in conversations(task) for message in messages]
    tiny_model(model, texts)
    command = [str(ROOT / "configs" / "smollm2_tir.yaml"), f"model.path={model}"]
    command += [f"data.train=[{task}/train.parquet]", f"data.eval=[{task}/heldout.parquet]"]
    command += [f"sft.data=[{task}/sft.parquet]", "sft.steps=6", "run.steps=2", "rollout.prompts_per_step=4"]
    command += ["rollout.samples_per_prompt=4", "policy.mini_batch_prompts=2", "data.max_prompt_tokens=224"]
    command += ["rollout.engine.max_model_len=400", "rollout.engine.threads=1", "policy.threads=1"]
    command += ["tracking.live=plain", "policy.skip_zero_advantage=false", "export.enabled=false"]
    return command, {"directory": ctpo.directory, "environment": ctpo.environment}


def test_the_dry_run_of_the_configuration(small: tuple[list[str], dict[str, Any]]) -> None:
    command, how = small
    planned = ranks.prefork().run(train_main, [*command, "--dry-run"], **how, deadline_s=60)
    assert planned.returncode == 0, planned.stderr[-4000:]
    assert "[reward] 1.0 for the ground truth in a box, 0.0 for no answer" in planned.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_configuration_trains(small: tuple[list[str], dict[str, Any]], tmp_path: Path) -> None:
    command, how = small
    task = tmp_path / "task"
    done = ranks.prefork().run(train_main, command, **how, deadline_s=300)
    assert done.returncode == 0, done.stderr[-4000:]
    run = how["directory"] / "runs" / "smollm2_tir"
    metrics = records(run)
    assert [record["step"] for record in metrics] == [0, 1, 2]
    assert all(record["mismatch/log_prob_abs_max"] < 1e-3 for record in metrics[1:])
    assert all("reward/groups_mixed" in record for record in metrics[1:])
    assert metrics[0]["val/reasoning_gym/acc/mean@1"] == 0
    learned = children.run(
        [sys.executable, str(EXAMPLE / "learned.py"), str(run), str(task / "heldout.parquet")], deadline_s=60, **how
    )
    assert learned.returncode == 0, learned.stderr
    assert "step_000000.parquet -> " in learned.stdout and "step_000002.parquet" in learned.stdout
    mixed = metrics[1]["reward/groups_mixed"]
    assert "all 8" in learned.stdout and f"at the first step: {mixed:.3f}" in learned.stdout
