"""examples/prepare_data: what is planted in a collection is found, and nothing else goes."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from ctpo_megatron.data import PromptRules
from examples.prepare_data.__main__ import main
from examples.prepare_data.words import near_duplicates, overlaps, words_of
from tests.data.rows import write
from tests.support.prompts import load_prompts

THINGS = ("apples", "marbles", "tiles", "coins", "lamps", "boats", "cards", "stamps", "pages", "seats", "rods", "keys")
HELD_OUT = (
    "Every morning Aya goes for a walk of nine kilometres and stops at a coffee shop; when she walks at a constant "
    "speed of s kilometres per hour the walk takes her 4 hours. How many minutes does it take?"
)


def problem(number: int) -> dict[str, str]:
    """One of many that no two of are alike."""
    draw = Random(number)
    one, two, three = draw.sample(THINGS, 3)
    text = (
        f"In town {number} a shop sells {one} for {number + 3} euros and {two} for {number + 5} euros; a buyer of "
        f"{draw.randint(2, 99)} {three} pays for {draw.randint(2, 99)} {two} as well. What is the total?"
    )
    return {"problem": text, "answer": str(draw.randint(1, 999)), "solution": "..."}


@pytest.fixture
def collection(tmp_path: Path) -> list[str]:
    """32 problems, ten of them planted, and the arguments that name the files."""
    rows = [problem(number) for number in range(22)]
    first = rows[0]["problem"]
    planted = [
        {**rows[0], "problem": first.replace("euros", "EUROS").replace("; ", ";  $") + "$"},  # 22: exact, other layout
        {**rows[1], "problem": rows[1]["problem"].replace("What is", "Tell what is")},  # 23: near
        {"problem": rows[2]["problem"].replace("What is", "Tell what is"), "answer": "0.5"},  # another answer
        {**rows[3], "problem": rows[3]["problem"].replace(" 3 ", " 4 ").replace("town 3", "town 4")},  # other numbers
        {"problem": HELD_OUT, "answer": "204"},  # 26: the whole text
        {"problem": "As we know, " + HELD_OUT[:120] + " Find the time of her way home.", "answer": "24"},  # 27: a part
        {"problem": rows[4]["problem"], "answer": "-1"},  # 28: against 4, which goes too
        {"problem": "What is 1+1?", "answer": "2 #### two clips 2"},  # 29
        {"problem": "", "answer": "2"},  # 30
        {"problem": "How many? " + "7 " * 300, "answer": "2"},  # 31
    ]
    held_out = {"data_source": "aime", "prompt": [{"role": "user", "content": HELD_OUT}], "id": "II-1"}
    against = write(tmp_path / "aime.jsonl", {**held_out, "reward_model": {"ground_truth": "204"}})
    return [write(tmp_path / "deep.jsonl", *rows, *planted), "--against", against]


def test_what_is_planted_goes_and_nothing_else(tmp_path: Path, toolmath: Path, tokenizer, collection, capsys) -> None:
    output = tmp_path / "out" / "train.parquet"
    arguments = [*collection, "--output", str(output), "--source", "deepscaler"]
    assert main([*arguments, "--model", str(toolmath / "model"), "--max-tokens", "400"]) == 0
    said = capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "train.report.json").read_text())
    assert {row["id"]: row["reason"] for row in report["rows"]} == {
        "deep/4": "conflict",
        "deep/22": "duplicate",
        "deep/23": "near duplicate",
        "deep/26": "contaminated",
        "deep/27": "contaminated",
        "deep/28": "conflict",
        "deep/29": "unverifiable",
        "deep/30": "unreadable",
        "deep/31": "overlong",
    }
    details = {row["id"]: row["detail"] for row in report["rows"]}
    assert details["deep/22"] == "of deep/0" and details["deep/23"] == "of deep/1"
    assert details["deep/26"].endswith("aime/II-1: the whole text")
    assert "every morning aya goes for a walk of nine" in details["deep/27"]
    assert (sum(report["read"].values()), report["kept"], sum(report["dropped"].values())) == (32, 23, 9)
    assert "near duplicate" in said and "deep/23" in said and str(output) in said
    prompts = load_prompts([str(output)], tokenizer, PromptRules(400))
    assert len(prompts) == 23
    assert (prompts[0].id, prompts[0].data_source, prompts[0].answer) == ("deep/0", "deepscaler", problem(0)["answer"])
    # Done already: nothing is replaced unasked.
    assert main(arguments) == 2
    assert "add --overwrite" in capsys.readouterr().err


def test_columns_are_mapped_and_the_answer_is_cut_out(tmp_path: Path, tokenizer) -> None:
    source = write(tmp_path / "g.jsonl", {"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2", "uid": 7})
    mapping = tmp_path / "map.yaml"
    mapping.write_text("problem: question\nid: uid\n")
    for given in (["problem=question", "id=uid"], [str(mapping)]):
        output = tmp_path / "g.parquet"
        arguments = [source, "--output", str(output), "--overwrite", "--answer-after", "####", "--map"]
        assert main([*arguments, *given]) == 0
        (prompt,) = load_prompts([str(output)], tokenizer, PromptRules(64))
        assert (prompt.id, prompt.answer, prompt.data_source) == ("7", "2", "g")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--output out.txt", "must end with .parquet"),
        ("--max-tokens 9", "--max-tokens and --model belong together"),
        ("--map question=problem", "--map: unknown question; known are problem"),
        ("--map none.yaml", "neither NAME=COLUMN nor a YAML file"),
        ("--map no_text.yaml", "neither NAME=COLUMN nor a YAML file"),
        ("--near nan", "--near nan: give a share above 0"),
        ("--ngram 0", "--ngram 0: give at least 1"),
        ("--common -1", "--common -1: give at least 1"),
        ("--max-tokens 0 --model .", "--max-tokens 0: give at least 1"),
        ("--output folder.parquet --overwrite", "--output folder.parquet: is a folder; name a file"),
        ("--output a.jsonl/out.parquet", "--output a.jsonl/out.parquet: File exists: a.jsonl; name another file"),
        ("--report folder.parquet", "--report folder.parquet: is a folder"),
        ("--map problem=text", "no column 'text'; the columns are problem, answer"),
        ("--against none.parquet", "no such file: none.parquet"),
        ("--model . --max-tokens 9", "the tokenizer cannot be read"),
    ],
)
def test_a_wrong_request_is_one_message(tmp_path: Path, monkeypatch, capsys, arguments: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", {"problem": "1+1?", "answer": "2"})
    (tmp_path / "no_text.yaml").write_bytes(b"\xff\xfe")
    (tmp_path / "folder.parquet").mkdir()
    assert main(["a.jsonl", "--output", "out.parquet", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.parquet").exists()


def test_other_columns_are_refused_with_their_map(tmp_path: Path, capsys) -> None:
    source = write(tmp_path / "a.jsonl", {"question": "1+1?", "final_answer": "2"})
    assert main([source, "--output", str(tmp_path / "out.parquet")]) == 2
    error = capsys.readouterr().err
    assert "no columns 'problem', 'answer'; the columns are question, final_answer; add --map " in error
    words = error.strip().partition("; add ")[2].split()
    assert main([source, "--output", str(tmp_path / "out.parquet"), *words]) == 0


def test_answers_that_are_words_are_listed(tmp_path: Path, capsys) -> None:
    rows = [
        {"problem": f"Who was number {n} of the {n + 7}?", "answer": a}
        for n, a in enumerate(("Ann Lee", "ann lee", "7"))
    ]
    source = write(tmp_path / "raw.jsonl", *rows)
    assert main([source, "--output", str(tmp_path / "o.parquet")]) == 0
    assert "answers that are words: 'ann lee' 2;" in capsys.readouterr().out


def test_nothing_left_is_a_failure(tmp_path: Path, capsys) -> None:
    source = write(tmp_path / "a.jsonl", {"problem": "1+1?", "answer": ""})
    assert main([source, "--output", str(tmp_path / "o.parquet")]) == 1
    assert "nothing remains" in capsys.readouterr().out
    assert not (tmp_path / "o.parquet").exists()


def test_near_duplicates_are_those_of_all_pairs() -> None:
    """The index of rare words leaves out no pair that a comparison of all pairs finds."""
    draw = Random(0)
    base = [[draw.choice("abcdefgh") for _ in range(draw.randint(3, 30))] for _ in range(60)]
    texts = [tuple(w) for w in base]
    for words in base:
        changed = list(words)
        changed[draw.randrange(len(changed))] = draw.choice("abcdefgh")
        texts.append(tuple(changed))
    for threshold in (0.5, 0.8, 1.0):
        found = near_duplicates(texts, threshold, lambda i, j: True)
        expected: dict[int, int] = {}
        for i, words in enumerate(texts):
            ours = {words[k : k + 3] for k in range(len(words) - 2)}
            for j in (j for j in range(i) if j not in expected):
                theirs = {texts[j][k : k + 3] for k in range(len(texts[j]) - 2)}
                if len(ours & theirs) >= threshold * len(ours | theirs):
                    expected[i] = j
                    break
        assert found == expected
        assert found or threshold == 1.0


def test_layout_does_not_count_and_operators_do() -> None:
    assert words_of("Let $x=\\left(3\\right)\\times 2$.") == words_of("let x = (3) \\cdot  2")
    assert words_of("What is 2+3?") != words_of("What is 2-3?")
    assert words_of("\\tfrac{1}{2}") == words_of("\\frac{1}{2}")
    assert words_of("求 3 的平方") != words_of("求 3 的立方")


def test_a_phrase_that_many_problems_share_is_no_copy() -> None:
    phrase = "where m and n are relatively prime positive integers find the sum of m and n"
    texts = [words_of(f"case {number} {phrase}") for number in range(12)]
    held_out = {"aime": words_of(f"something else {phrase}")}
    assert overlaps(texts, held_out, 13, common=10)[0] == {}
    assert len(overlaps(texts, held_out, 13, common=10)[1]) == 4
    assert len(overlaps(texts[:10], held_out, 13, common=10)[0]) == 10
    assert overlaps([words_of("1+1?")], {"short": words_of("1 + 1 ?")}, 13, 10)[0] == {0: ("short", "the whole text")}
