"""The dry run of one's own data: every mistake of configuration, template and data in one list, without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ctpo_megatron import cli
from ctpo_megatron.checks import DataValidation
from ctpo_megatron.config import load_config
from tests.data.rows import row, write
from tests.support.deadlines import scaled

TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}Call one in <tool_call>, and answer in \\boxed{}.\n"


@pytest.fixture
def own(toolmath: Path, sandbox_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model of its own, which shows its tools, two data files and a configuration.

    Its programs run on a server that tests share; `sandbox.url=null` has a dry run start one.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ctpo_megatron.cli.train.has_cuda_device", lambda: False)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    shutil.copytree(toolmath / "model", tmp_path / "model")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(TOOLS + template.read_text())
    write(tmp_path / "train.jsonl", *(row(str(number)) for number in range(20)))
    write(tmp_path / "eval.jsonl", row("2+2?", "4"))
    (tmp_path / "own.yaml").write_text(
        "run: {name: own, steps: 1}\nmodel: {path: model}\n"
        "data: {train: [train.jsonl], eval: [eval.jsonl], max_prompt_tokens: 400}\n"
        "policy: {micro_batch_tokens: 1024}\n"
        "rollout:\n  prompts_per_step: 16\n  max_response_tokens: 100\n"
        "  engine: {max_model_len: 512, kv_cache_mb: 64, dtype: float32}\n"
        f"sandbox: {{url: '{sandbox_url}'}}\n"
    )
    return tmp_path


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["train", "own.yaml", "--dry-run", *arguments])
    return (status, *capsys.readouterr())


def test_a_mix_shows_the_share_of_each_file(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(own / "more.jsonl", *(row(f"{number}+1", str(number)) for number in range(5)))
    mix = "data.train=[{path: train.jsonl, weight: 1}, {path: more.jsonl, weight: 3}]"
    status, out, err = dry_run(capsys, mix)
    assert (status, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "data.train 25 rows 2 files" in lines
    assert "share 25.0% train.jsonl; 4.0 prompts a step" in lines
    assert "share 75.0% more.jsonl; 12.0 prompts a step" in lines
    (own / "more.jsonl").write_text("")
    status, _, err = dry_run(capsys, mix)
    assert status != 0 and "more.jsonl has weight 3, and no prompts; set it to 0, or give it some" in err


def test_what_it_shows(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(own / "train.jsonl", *(row(str(number)) for number in range(1100)), row("7 " * 400))
    shown = ["data.overlong=drop", "data.max_prompt_tokens=400"]
    status, out, err = dry_run(capsys, *shown)
    assert (status, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "data.train 1,101 rows 1 file; 1,000 prompts read" in lines
    assert "data.eval 1 rows 1 file" in lines
    assert any(line.startswith("tokens ") and line.endswith("data.max_prompt_tokens is 400") for line in lines)
    called = '<tool_call> {"name": "code_interpreter", "arguments": {"code": "print(6 * 7)"}} </tool_call><|im_end|>'
    prompt, *first = [line for line in lines if line.startswith("[")]
    assert prompt.startswith('[prompt] {"type": "function"') and prompt.endswith(" ...")
    assert first[0] == f"[model] {called}" and first[1].startswith("[output] ")
    assert first[2:] == [
        "[model] The answer is \\boxed{2}.<|im_end|>",
        "[reward] 1.0 for the ground truth in a box, 0.0 for no answer",
    ]
    whole = dry_run(capsys, *shown, "-v")[1].partition("\n[prompt] ")[2]
    assert whole.partition("[model]")[0].endswith("<|im_start|>user\n0<|im_end|>\n<|im_start|>assistant\n\n")
    status, out, _ = dry_run(capsys, *shown, "--full")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert status == 0
    assert "left out 1 rows data.overlong: drop; the first is train.jsonl row 1100" in lines


def test_ground_truths_that_are_words_are_shown(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truths = [*("Evelyn", "\\text{evelyn}", "yes"), *("7" for _ in range(17))]
    write(own / "train.jsonl", *(row(str(number), truth) for number, truth in enumerate(truths)))
    status, out, err = dry_run(capsys)
    assert (status, err) == (0, "")
    assert "words as ground truth 3 rows the most frequent of them: 'evelyn' 2, 'yes' 1" in " ".join(out.split())


def test_nothing_left_is_a_mistake(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = dry_run(capsys, "data.overlong=drop", "data.max_prompt_tokens=10", "data.eval=[]")
    assert status == 2
    assert "data.train: every prompt was left out; the first: " in err and "tokens, limit 10: raise" in err


def test_all_mistakes_come_in_one_list(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(own / "train.jsonl", row(data_source="", id=" "), row("x", "#### 72"), row("7 " * 400), {"data_source": "u"})
    write(own / "eval.jsonl", row(id="a"), row(id="a"))
    write(own / "sft.jsonl", {"messages": [{"role": "user", "content": "x"}]})
    status, out, err = dry_run(
        capsys, "run.steps=0", "policy.mini_batch_prompts=5", "sft={data: [sft.jsonl], steps: 1}"
    )
    assert (status, out) == (2, "")
    for problem in (
        "policy.mini_batch_prompts = 5: does not divide the batch",
        "own.yaml:3: data.train: train.jsonl row 0 column 'data_source': expected a non-empty text (value: '')",
        "data.train: train.jsonl row 0 column 'id': expected a text or an integer",
        "data.train: train.jsonl row 1 column 'reward_model': the ground truth holds a worked solution (GSM8K)",
        "here '72'; or set data.unverifiable: drop",
        "tokens, limit 400: raise data.max_prompt_tokens, and rollout.engine.max_model_len",
        "data.train: train.jsonl row 3 column 'prompt': expected a non-empty list",
        "data.eval: eval.jsonl row 1 column 'id': already used by eval.jsonl row 0",
        "sft.data: sft.jsonl row 0 column 'messages': must end with an assistant message",
    ):
        assert problem in err, problem


@pytest.mark.parametrize(
    ("template", "reason"), [("{{ raise_exception('never') }}", "never"), ("{{ 1 + messages }}", "unsupported operand")]
)
def test_a_template_that_renders_no_prompt_is_one_error(
    own: Path, capsys: pytest.CaptureFixture[str], template: str, reason: str
) -> None:
    (own / "model" / "chat_template.jinja").write_text(template)
    status, out, err = dry_run(capsys)
    assert (status, out) == (2, "") and len(err.splitlines()) == 2
    assert f"cannot render one user message: {reason}" in err and "model.chat_template" in err


def test_a_file_that_is_not_there_is_named_once(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = dry_run(capsys, "data.train=[trian.jsonl]")
    assert status == 2
    assert err.count("trian.jsonl") == 1


def test_held_out_rows_of_a_training_file_are_counted(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    apart = [row(str(number), id=f"e{number}", extra_info={"split": "test"}) for number in (3, 7)]
    write(own / "eval.jsonl", row("2+2?", "4"), *apart, row("8", "another truth"))
    status, _, err = dry_run(capsys)
    told = (
        "data.eval: eval.jsonl: 2 of 4 prompts are in train.jsonl too, with their ground truth; the first is row 1: "
        "the accuracy there says nothing about other problems; leave them out of data.train"
    )
    assert status == 0 and told in err and len(err.splitlines()) == 1
    validation = DataValidation.of(load_config("own.yaml"), own / "kept")
    assert validation.held_out(validation.training()).warnings.lines == [told.removeprefix("data.eval: ")]


def test_a_file_that_is_both_is_named_once(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own / "link.jsonl").symlink_to("train.jsonl")
    status, _, err = dry_run(capsys, "data.eval=[link.jsonl]")
    assert status == 0 and len(err.splitlines()) == 1 and "20 of 20 prompts are in train.jsonl too" in err


def test_torch_is_not_imported(own: Path) -> None:
    code = (
        "import sys\nfrom ctpo_megatron.cli import main\nstatus = main(['train', 'own.yaml', '--dry-run'])\n"
        "sys.exit(', '.join(sorted({'torch', 'ray', 'vllm', 'megatron'} & set(sys.modules))) or status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=scaled(100)
    )
    assert done.returncode == 0, done.stderr


def test_evaluation_prompts_are_never_left_out(own: Path, capsys: pytest.CaptureFixture[str], caplog) -> None:
    write(own / "eval.jsonl", row("2+2?", "4"), row("Which room?", "room 72"))
    status, _, err = dry_run(capsys)
    assert status == 2
    assert (
        "data.eval: eval.jsonl row 1 column 'reward_model': the ground truth has words or signs around a number" in err
    )
    status, out, _ = dry_run(capsys, "data.unverifiable=drop")
    assert status == 0
    assert "data.eval" in out and "2 rows" in out
    assert "1 of 2 evaluation prompts score 0 for any answer: eval/1" in caplog.text


def test_what_is_left_out_is_written_down(own: Path, caplog) -> None:
    from ctpo_megatron.config import load_config
    from ctpo_megatron.environments import chat_tokenizer, offered_schemas, training_prompts, usable, write_record

    write(own / "train.jsonl", row("a"), row("b", "#### 72"), row("7 " * 400), row("c", id="mine"))
    config = load_config(own / "own.yaml", ["data.overlong=drop", "data.unverifiable=drop"])
    found = training_prompts(config, chat_tokenizer(config.model, offered_schemas(config.data, config.rollout)))
    assert [prompt.id for prompt in usable(found)] == ["train/0", "mine"]
    write_record(found, own)
    record = json.loads((own / "data.json").read_text())
    assert record["files"] == {"train.jsonl": {"rows": 4, "used": 2}}
    assert [(each["row"], each["rule"]) for each in record["left_out"]] == [
        (2, "data.overlong"),
        (1, "data.unverifiable"),
    ]
    assert "data.overlong: drop left out 1 of 4 prompts, first train.jsonl row 2: " in caplog.text
    assert "data.unverifiable: drop left out 1 of 4 prompts, first train.jsonl row 1: the ground truth" in caplog.text


def test_patterns_and_folders_are_taken(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own / "folder").mkdir()
    shutil.copy(own / "train.jsonl", own / "folder" / "a.jsonl")
    status, out, err = dry_run(capsys, "data.train=[folder, 'tr*.jsonl']")
    assert (status, err) == (0, "")
    assert "40 rows" in out and "2 files" in out
    assert dry_run(capsys, "data.train=['no*.jsonl']")[0] == 2
