"""What a run keeps of its rows: a later start has the same tokens, or says what changed."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.checks import DataValidation
from ctpo_megatron.config import Config, load_config
from ctpo_megatron.data import PromptSampler, RowSet, batch_order
from tests.data.rows import row, write

CLOCK = "{% if '+' in messages[0].content %}{{ strftime_now('%d %B %Y %H:%M:%S') }}\n{% endif %}{{ shown }}"
KINDS = ("train", "eval", "sft")


def talk(question: str = "1+1?", *rest: str) -> dict[str, Any]:
    said = [
        {"role": "user" if n % 2 == 0 else "assistant", "content": text} for n, text in enumerate([question, *rest])
    ]
    return {"messages": said}


@pytest.fixture
def own(toolmath: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(toolmath / "model", tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(CLOCK + template.read_text())
    write(tmp_path / "train.jsonl", *(row(f"{number}+1?", str(number + 1)) for number in range(12)))
    write(tmp_path / "eval.jsonl", row("2+2?", "4"), row("2+3?", r"\frac{10}{2}"))
    write(tmp_path / "sft.jsonl", *(talk(f"{number}+1?", "one", "and?", str(number)) for number in range(6)))
    return tmp_path


def config(own: Path, *overrides: str) -> Config:
    file = own / "own.yaml"
    file.write_text(
        "run: {name: own, steps: 1}\nmodel: {path: model}\n"
        "data: {train: [train.jsonl], eval: [eval.jsonl], max_prompt_tokens: 400, tool_in_prompt: false}\n"
        "sft: {data: [sft.jsonl], steps: 1, conversations_per_step: 2}\n"
        "policy: {micro_batch_tokens: 1024}\n"
        "rollout: {prompts_per_step: 4, max_response_tokens: 100, engine: {max_model_len: 512, kv_cache_mb: 64}}\n"
    )
    return load_config(file, list(overrides))


def admitted(own: Path, kind: str, *overrides: str, run: str = "run") -> RowSet:
    """What a start of the run makes of the files of one kind."""
    validation = DataValidation.of(config(own, *overrides), own / run)
    return {"train": validation.training, "eval": validation.held_out, "sft": validation.conversations}[kind]()


def tokens(found: RowSet) -> list[list[int]]:
    found.problems.raise_if_any()
    return [list(found.tokens(index)) for index in range(len(found.places))]


def date_back(own: Path, run: str = "run") -> None:
    """The run was begun on another day."""
    file = RunPaths(own / run).rendering
    kept = json.loads(file.read_text())
    assert abs(datetime.fromisoformat(kept["began"]) - datetime.now()).total_seconds() < 60
    file.write_text(json.dumps({**kept, "began": "2020-02-29T12:00:00"}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_on_another_day_has_the_date_of_the_first(own: Path, kind: str) -> None:
    now = admitted(own, kind)
    date_back(own)
    first, second = admitted(own, kind), admitted(own, kind)
    assert "29 February 2020 12:00:00" in first.texts[0]
    assert tokens(first) == tokens(second) != tokens(now)
    again = admitted(own, kind, "data.rerender=true")
    assert "2020" not in again.texts[0] and tokens(again) == tokens(admitted(own, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["a row", "a row less", "a row more"])
def test_a_changed_file_is_refused_by_its_name(own: Path, kind: str, change: str) -> None:
    admitted(own, kind)
    kept = RunPaths(own / "run").rendering.read_bytes()
    lines = (own / f"{kind}.jsonl").read_text().splitlines()
    more = lines[1].replace("?", "??")
    changed = {"a row": [lines[0], more, *lines[2:]], "a row less": lines[:-1], "a row more": [*lines, more]}[change]
    (own / f"{kind}.jsonl").write_text("\n".join(changed))
    (problem,) = admitted(own, kind).problems.lines
    assert problem.startswith(f"changed since {own / 'run'} was begun: {kind}.jsonl. Restore")
    assert "run.name=other" in problem and RunPaths(own / "run").rendering.read_bytes() == kept
    assert tokens(admitted(own, kind, "data.rerender=true")) == tokens(admitted(own, kind))


def test_another_format_of_the_same_rows_is_no_change(own: Path) -> None:
    rows = [json.loads(line) for line in (own / "train.jsonl").read_text().splitlines()]
    first = admitted(own, "train")
    found = [admitted(own, "train", f"data.train=[{write(own / name, *rows)}]") for name in ("a.jsonl", "a.parquet")]
    assert tokens(first) == tokens(found[0]) == tokens(found[1])
    assert [*found[0].digests().values()] == [*found[1].digests().values()]


def test_other_evaluation_files_and_a_higher_limit_are_no_change(own: Path) -> None:
    admitted(own, "eval")
    write(own / "other.jsonl", row("3+3?", "6"))
    assert len(tokens(admitted(own, "eval", "data.eval=[other.jsonl]"))) == 1
    write(own / "train.jsonl", row("a"), row("7 " * 100))
    assert len(tokens(admitted(own, "train", "data.overlong=drop", "data.max_prompt_tokens=100"))) == 1
    assert len(tokens(admitted(own, "train"))) == 2


def test_conversations_are_the_same_trajectories(own: Path) -> None:
    write(own / "sft.jsonl", talk("a", "b"), talk("a", "b", "c", "d", "e", "f"), talk("", " "))
    first, again = (admitted(own, "sft").conversations for _ in range(2))
    assert first == again and batch_order(first, 2, 0) == batch_order(again, 2, 0)


def edit_template(own: Path) -> None:
    template = own / "model" / "chat_template.jinja"
    template.write_text("other " + template.read_text())


def edit_tokenizer(own: Path) -> None:
    file = own / "model" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"] = content["model"]["merges"][:10]
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("changed", "edit", "override"),
    [
        ("chat template", edit_template, ()),
        ("tokenizer", edit_tokenizer, ()),
        ("data.system_prompt", lambda own: None, ("data.system_prompt=Think.",)),
        ("model.chat_template_kwargs", lambda own: None, ("model.chat_template_kwargs={shown: a}",)),
    ],
)
def test_rows_that_would_be_rendered_otherwise_are_refused(
    own: Path, changed: str, edit: Any, override: tuple[str, ...]
) -> None:
    admitted(own, "train")
    edit(own)
    (problem,) = admitted(own, "train", *override).problems.lines
    assert problem.startswith(f"changed since {own / 'run'} was begun: {changed}. ") and "data.rerender=true" in problem
    assert tokens(admitted(own, "train", *override, "data.rerender=true"))
    assert not admitted(own, "train", *override).problems.lines


def test_a_sampler_continues_over_rerendered_prompts(own: Path) -> None:
    admitted(own, "train")
    date_back(own)
    first, second = (admitted(own, "train", *text).prompts for text in ((), ("data.rerender=true",)))
    before = PromptSampler(first, 0)
    before.take(5)
    with pytest.raises(ValueError, match=r"data\.rerender=true"):
        PromptSampler(second, 0).load_state_dict(before.state_dict())
    after = PromptSampler(second, 0, rerendered=True)
    after.load_state_dict(before.state_dict())
    assert [p.id for p in after.take(7)] == [p.id for p in before.take(7)]


@pytest.mark.parametrize(
    "named",
    ["checkpoint.load=run/checkpoints/sft/step_000001", "rollout.replay=run", "rollout.replay=run/trajectories"],
)
def test_a_run_that_follows_another_has_its_date(own: Path, named: str) -> None:
    admitted(own, "train")
    date_back(own)
    load = named.replace("=run", f"={own / 'run'}")
    assert tokens(admitted(own, "train", load, run="second")) == tokens(admitted(own, "train"))
    assert tokens(admitted(own, "train", load, "data.system_prompt=Think.", run="third"))


@pytest.mark.parametrize("content", ["{", "[]", '{"began": 1, "rows": {}}', '{"began": "2020-02-29T12:00:00"}'])
def test_a_damaged_file_is_one_message(own: Path, content: str) -> None:
    admitted(own, "train")
    RunPaths(own / "run").rendering.write_text(content)
    with pytest.raises(DamagedFileError, match=r"rendering\.json does not hold what .* data\.rerender=true"):
        admitted(own, "train")
    assert tokens(admitted(own, "train", "data.rerender=true"))


def test_a_run_before_this_version_is_continued(own: Path) -> None:
    """It has rendered rows, and no digests: the digest of the prompts in its checkpoint decides."""
    (own / "run" / "checkpoints").mkdir(parents=True)
    (own / "run" / "rendered").mkdir()
    assert tokens(admitted(own, "train")) and RunPaths(own / "run").rendering.exists()
