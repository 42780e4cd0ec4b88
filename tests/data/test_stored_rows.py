"""What a run keeps of its rendered rows: a later start has the same tokens, and refuses rows that are not the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.config import Config, load_config
from ctpo_megatron.data import PromptSampler, RowSet, StoredRows, batch_order
from ctpo_megatron.preflight import Admission
from tests.data.test_data_check import row, write

CLOCK = "{% if '+' in messages[0].content %}{{ strftime_now('%H:%M:%S.%f') }}\n{% endif %}"
"""A template that begins so renders no prompt twice alike, as one with a date does on two days."""
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
    write(tmp_path / "sft.jsonl", *(talk(f"{number}?", "one", "and?", str(number)) for number in range(6)))
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


def admitted(own: Path, kind: str, *overrides: str) -> RowSet:
    """What a start of the run makes of the files of one kind."""
    admission = Admission.of(config(own, *overrides), own / "run")
    return {"train": admission.training, "eval": admission.held_out, "sft": admission.conversations}[kind]()


def tokens(found: RowSet) -> list[list[int]]:
    found.problems.raise_if_any()
    return [list(found.tokens(index)) for index in range(len(found.places))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_start_has_the_tokens_of_the_first(own: Path, kind: str) -> None:
    first = admitted(own, kind)
    template = own / "model" / "chat_template.jinja"
    template.write_text("x" + template.read_text())
    again = admitted(own, kind)
    assert tokens(first) == tokens(again) and any(first.texts) and not any(again.texts)
    shutil.rmtree(own / "run")
    assert tokens(admitted(own, kind)) != tokens(first)


def test_conversations_are_the_same_trajectories(own: Path) -> None:
    write(own / "sft.jsonl", talk("a", "b"), talk("a", "b", "c", "d", "e", "f"), talk("", " "))
    first, again = (admitted(own, "sft").conversations for _ in range(2))
    assert first == again
    assert batch_order(first, 2, 0) == batch_order(again, 2, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_row_is_refused_by_file_and_row(own: Path, kind: str) -> None:
    admitted(own, kind)
    kept = RunPaths(own / "run").rows_of(kind).read_bytes()
    lines = (own / f"{kind}.jsonl").read_text().splitlines()
    lines[1] = lines[1].replace("?", "??")
    (own / f"{kind}.jsonl").write_text("\n".join(lines))
    found = admitted(own, kind)
    assert [line for line in found.problems.lines if f"{kind}.jsonl row 1 has changed since " in line]
    assert "run.name=other" in found.problems.lines[0]
    assert RunPaths(own / "run").rows_of(kind).read_bytes() == kept
    again = admitted(own, kind, "data.rerender=true")
    assert [line for line in again.problems.lines if f"{kind}.jsonl row 1 has changed since " in line]


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_row_is_refused_by_file_and_row(own: Path, kind: str) -> None:
    admitted(own, kind)
    lines = (own / f"{kind}.jsonl").read_text().splitlines()
    (own / f"{kind}.jsonl").write_text("\n".join(lines[:-1]))
    (problem,) = admitted(own, kind).problems.lines
    assert problem.startswith(f"{kind}.jsonl row {len(lines) - 1} is missing since ")


def test_many_changed_rows_are_counted(own: Path) -> None:
    admitted(own, "train")
    write(own / "train.jsonl", *(row(f"{number}-1?", "0") for number in range(12)))
    problems = admitted(own, "train").problems.lines
    assert len(problems) == 6 and problems[-1] == "so have 7 more rows, 12 in all"


def test_another_format_of_the_same_rows_is_no_change(own: Path) -> None:
    first = admitted(own, "train")
    rows = [json.loads(line) for line in (own / "train.jsonl").read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), own / "train.parquet")
    again = admitted(own, "train", "data.train=[train.parquet]")
    assert tokens(first) == tokens(again)


def test_a_changed_template_is_reported_and_the_stored_tokens_are_used(own: Path) -> None:
    first = admitted(own, "train")
    template = own / "model" / "chat_template.jinja"
    template.write_text("other " + template.read_text())
    again = admitted(own, "train")
    assert tokens(again) == tokens(first)
    (doubt,) = again.doubts.lines
    assert "the stored tokens are used, although the chat template has changed; data.rerender=true" in doubt


def test_a_changed_tokenizer_is_reported(own: Path) -> None:
    first = admitted(own, "train")
    file = own / "model" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"] = content["model"]["merges"][:10]
    file.write_text(json.dumps(content))
    again = admitted(own, "train")
    assert tokens(again) == tokens(first)
    assert "although the tokenizer has changed" in again.doubts.lines[0]


def test_the_next_day_is_reported(own: Path) -> None:
    first = admitted(own, "train")
    file = RunPaths(own / "run").rows_of("train")
    stored = StoredRows.read(file)
    stored.made_of["date"] = "2020-02-29"
    stored.write(file)
    again = admitted(own, "train")
    assert tokens(again) == tokens(first)
    assert "although the chat template writes the date, which was 2020-02-29" in again.doubts.lines[0]


@pytest.mark.parametrize("override", ["data.system_prompt=Think.", "model.chat_template_kwargs={strftime_now: null}"])
def test_settings_of_the_user_that_render_otherwise_are_refused(own: Path, override: str) -> None:
    admitted(own, "train")
    if "kwargs" in override:
        template = own / "model" / "chat_template.jinja"
        template.write_text("{{ shown }}" + template.read_text())
        override = "model.chat_template_kwargs={shown: a}"
    (problem,) = admitted(own, "train", override).problems.lines
    assert problem.startswith(override.partition("=")[0]) and "data.rerender=true" in problem
    assert tokens(admitted(own, "train", override, "data.rerender=true"))
    assert not admitted(own, "train", override).problems.lines


def test_rerender_renders_again_and_keeps_that(own: Path) -> None:
    first = admitted(own, "train")
    second = admitted(own, "train", "data.rerender=true")
    assert tokens(first) != tokens(second) == tokens(admitted(own, "train"))


def test_a_sampler_goes_on_over_rerendered_prompts(own: Path) -> None:
    first, second = (admitted(own, "train", *text).prompts for text in ((), ("data.rerender=true",)))
    before = PromptSampler(first, 0)
    before.take(5)
    with pytest.raises(ValueError, match=r"data\.rerender=true"):
        PromptSampler(second, 0).load_state_dict(before.state_dict())
    after = PromptSampler(second, 0, rerendered=True)
    after.load_state_dict(before.state_dict())
    assert [p.id for p in after.take(7)] == [p.id for p in before.take(7)]


def test_verdicts_on_ground_truths_are_kept(own: Path) -> None:
    write(own / "train.jsonl", row("a", r"\frac{1}{2}"), row("b", "room 12"), row("c", "3"))
    drop = "data.unverifiable=drop"
    first, again = admitted(own, "train", drop), admitted(own, "train", drop)
    assert tokens(first) == tokens(again) and first.left_out == again.left_out
    assert [each.row for each in again.left_out] == [1]
    stored = StoredRows.read(RunPaths(own / "run").rows_of("train"))
    assert [each.verdict == "" for each in stored.rows.values()] == [True, False, True]
    assert [line for line in admitted(own, "train").problems.lines if "row 1 column 'reward_model'" in line]


def test_rows_that_were_too_long_can_come_back(own: Path) -> None:
    write(own / "train.jsonl", row("a"), row("7 " * 100))
    admitted(own, "train", "data.overlong=drop", "data.max_prompt_tokens=100")
    found = admitted(own, "train")
    assert len(tokens(found)) == 2 and found.made.keys() == set(found.keys)


def test_new_rows_are_rendered(own: Path) -> None:
    first = admitted(own, "eval")
    with (own / "eval.jsonl").open("a") as file:
        file.write(json.dumps(row("9+9?", "18")) + "\n")
    again = admitted(own, "eval")
    assert tokens(again)[:2] == tokens(first) and [bool(text) for text in again.texts] == [False, False, True]
    assert tokens(admitted(own, "eval")) == tokens(again)


def test_other_evaluation_files_are_no_missing_rows(own: Path) -> None:
    admitted(own, "eval")
    write(own / "other.jsonl", row("3+3?", "6"))
    assert len(tokens(admitted(own, "eval", "data.eval=[other.jsonl]"))) == 1


@pytest.mark.parametrize(
    "named",
    ["checkpoint.load=run/checkpoints/sft/step_000001", "rollout.replay=run", "rollout.replay=run/trajectories"],
)
def test_a_run_that_follows_another_has_its_tokens(own: Path, named: str) -> None:
    first = admitted(own, "train")
    load = named.replace("=run", f"={own / 'run'}")
    admission = Admission.of(config(own, load), own / "second")
    assert tokens(admission.training()) == tokens(first)
    other = Admission.of(config(own, load, "data.system_prompt=Think."), own / "third").training()
    assert tokens(other) != tokens(first)


def test_damaged_rows_are_one_message(own: Path) -> None:
    admitted(own, "train")
    file = RunPaths(own / "run").rows_of("train")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DamagedFileError, match=r"train\.parquet does not hold the rows .* data\.rerender=true"):
        admitted(own, "train")
    assert tokens(admitted(own, "train", "data.rerender=true"))


def test_a_run_without_stored_rows_gets_them(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (own / "run" / "checkpoints").mkdir(parents=True)
    admitted(own, "train")
    assert "has no stored rows of train: rendered now, and kept from now on" in caplog.text
    caplog.clear()
    admitted(own, "train")
    assert not caplog.records
