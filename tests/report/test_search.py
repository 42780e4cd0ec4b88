"""The search of `ctpo watch`: the results of a plain filter in Python, over files that grow, break and take long."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.data.verdict import NoVerdict
from ctpo_megatron.report.trajectories.heads import FOLDERS, Address, addresses
from ctpo_megatron.report.trajectories.library import Deadline, OutOfTimeError, TrajectoryLibrary
from ctpo_megatron.report.trajectories.query import TOOLS, Query, QueryError, snippet
from ctpo_megatron.tracking import read_heads, read_texts, read_trajectories, trajectory_files, write_trajectories
from ctpo_megatron.tracking.records import head_of, texts_in
from tests.tracking.synthetic_run import decode, make_groups, ratio_fields

TEXTS = ("", "722", "LCM", "boxed{30}", "Straße", "STRASSE", "<|im_end|>", "</TOOL", "nowhere")
SIZE = 7


def soon() -> Deadline:
    return Deadline(time.monotonic() + 30)


def write_dump(run_dir: Path, step: int, seed: int, source: str = "training", form: str = "parquet") -> None:
    rng = random.Random(seed)
    groups = make_groups(rng, 3, 3, 0.4)
    for trajectory in [t for group in groups for t in group.trajectories]:
        trajectory.reward = rng.choice([0.0, 1.0, 0.25, -1.0, None])
        if trajectory.reward is None:
            trajectory.no_verdict = NoVerdict(rng.choice(["timeout", "crash"]), "late")
        trajectory.finish_reason = rng.choice(["answer", "length"])
        for call in trajectory.tool_calls:
            call.status, call.output = rng.choice([("success", "Straße 2"), ("timeout", "lcm"), ("parse_error", "")])
    groups[2].trajectories[0].prompt_id = groups[0].prompt.id  # a step may draw a prompt twice
    extra = ratio_fields(rng, groups) if seed % 2 else None
    write_trajectories(run_dir, step, groups, decode, folder=FOLDERS[source], extra=extra, form=form)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run")
    for seed, (step, source, form) in enumerate(
        [(1, "training", "parquet"), (1, "evaluation", "parquet"), (2, "training", "jsonl"), (3, "training", "parquet")]
    ):
        write_dump(path, step, seed, source, form)
    return path


def plain(run_dir: Path, query: Query) -> list[str]:
    """All results in order, by reading every record and filtering in Python."""
    rows = []
    for source, folder in FOLDERS.items():
        for step, path in trajectory_files(run_dir, folder).items():
            records = read_trajectories(path)
            names = [*addresses(source, step, map(head_of, range(len(records)), records))]
            for place, (name, record) in enumerate(zip(names, records, strict=True)):
                if passes(query, source, step, record):
                    rows.append(((step, source == "evaluation"), place, record, str(name)))
    newest = query.order != "oldest"
    rows.sort(key=lambda row: row[1])
    rows.sort(key=lambda row: row[0], reverse=newest)
    sign = -1 if query.order.startswith("-") else 1
    if query.order.endswith("reward"):
        rows.sort(key=lambda row: math.inf if row[2]["reward"] is None else sign * row[2]["reward"])
    elif query.order.endswith("length"):
        rows.sort(key=lambda row: sign * sum(row[2]["response_mask"]))
    return [name for *_, name in rows]


def passes(query: Query, source: str, step: int, record: dict) -> bool:
    reward, statuses = record["reward"], {call["status"] for call in record["tool_calls"]}
    low, _, high = query.step.partition("-")
    return all(
        (
            query.source in ("", source),
            not query.step or int(low) <= step <= int(high or low),
            query.prompt in ("", record["prompt_id"]),
            query.finish in ("", record["finish_reason"]),
            query.verdict == "" or (reward is None) == (query.verdict == "no"),
            query.reward_min is None or (reward is not None and reward >= query.reward_min),
            query.reward_max is None or (reward is not None and reward <= query.reward_max),
            query.tool in ("", *statuses)
            or (query.tool == "none" and not statuses)
            or (query.tool == "failed" and bool(statuses) and "success" not in statuses),
            any(query.text.casefold() in text.casefold() for text in texts_in(record)),
        )
    )


QUERIES = st.fixed_dictionaries(
    {
        "text": st.sampled_from(TEXTS),
        "step": st.sampled_from(["", "", "1", "2-3", "4"]),
        "source": st.sampled_from(["", "", "training", "evaluation"]),
        "prompt": st.sampled_from(["", "", "rem-0"]),
        "reward_min": st.sampled_from(["", "", "0", "0.5"]),
        "reward_max": st.sampled_from(["", "", "0.25", "-2"]),
        "verdict": st.sampled_from(["", "", "yes", "no"]),
        "tool": st.sampled_from(["", "", *TOOLS]),
        "finish": st.sampled_from(["", "", "answer", "none"]),
        "order": st.sampled_from(["newest", "oldest", "reward", "-reward", "length", "-length"]),
    }
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(QUERIES)
def test_pages_together_are_what_a_plain_filter_finds(run_dir, fields):
    library, found, page = TrajectoryLibrary(run_dir), list[str](), 1
    while True:
        result = library.search(Query.parse({**fields, "page": str(page)}), SIZE, soon())
        assert not result.late and result.problems == []
        assert [hit.record["prompt_id"] for hit in result.hits] == [hit.address.prompt_id for hit in result.hits]
        found += [str(hit.address) for hit in result.hits]
        if not result.more:
            break
        assert len(result.hits) == SIZE
        page += 1
    expected = plain(run_dir, Query.parse(fields))
    assert found == expected
    assert result.total in (None, len(expected)) and (result.searched < result.dumps) == (result.total is None)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_heads_and_texts_are_those_of_the_records(tmp_path, form):
    write_dump(tmp_path, 1, 1, form=form)
    path = trajectory_files(tmp_path)[1]
    records = read_trajectories(path)
    assert [*read_heads(path)] == [head_of(place, record) for place, record in enumerate(records)]
    assert [*read_texts(path)] == [texts_in(record) for record in records]
    assert any(head.cause for head in read_heads(path)) and any(head.tools for head in read_heads(path))


def test_a_run_that_grows_is_found_without_a_new_start(tmp_path):
    library, query = TrajectoryLibrary(tmp_path), Query.parse({"text": "722"})
    assert library.search(query, SIZE, soon()).dumps == 0
    write_dump(tmp_path, 1, 1)
    assert library.search(query, 99, soon()).total == 9
    write_dump(tmp_path, 2, 2)
    assert library.search(query, 99, soon()).total == 18
    write_trajectories(tmp_path, 2, make_groups(random.Random(0), 1, 2, 0.5), decode)  # a resumed run writes it again
    assert library.search(query, 99, soon()).total == 11


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_damaged_dump_is_named_and_the_others_are_searched(tmp_path, form):
    write_dump(tmp_path, 1, 1)
    write_dump(tmp_path, 2, 2, form=form)
    broken = trajectory_files(tmp_path)[2]
    whole = broken.read_bytes()
    library = TrajectoryLibrary(tmp_path)
    for left in (whole[: len(whole) // 2], b"", b"\0" * 40, b"[3]\n", b'{"prompt_id": 3}\n'):
        broken.write_bytes(left)
        found = library.search(Query.parse({"text": "722"}), 99, soon())
        assert len(found.hits) >= 9 and all("step_000002" in problem for problem in found.problems)
        assert (left == b"" and form == "jsonl") or found.problems
    broken.write_bytes(whole)
    assert library.search(Query.parse({"text": "722"}), 99, soon()).total == 18
    address = next(iter(addresses("training", 2, read_heads(broken))))
    broken.write_bytes(whole[:-30])
    with pytest.raises(DamagedFileError, match="step_000002"):
        library.group(address, soon())


def test_a_search_ends_at_its_deadline_and_goes_further_when_asked_again(tmp_path):
    for step in range(1, 5):
        write_dump(tmp_path, step, step, form="jsonl" if step % 2 else "parquet")
    library, query = TrajectoryLibrary(tmp_path), Query.parse({"text": "722", "order": "length"})
    over = Deadline(time.monotonic() - 1)
    seen = []
    for _ in range(200):
        found = library.search(query, SIZE, over)
        seen.append(found.searched)
        if not found.late:
            break
    assert found.total == 36 and seen[0] == 0 and seen == sorted(seen) and set(seen) == {0, 1, 2, 3, 4}
    stopped = Deadline(time.monotonic() + 30, lambda: True)
    with pytest.raises(OutOfTimeError):
        TrajectoryLibrary(tmp_path).group(Address("training", 1, "rem-0", 0), stopped)


def test_a_group_has_all_samples_of_its_prompt_and_neighbours(run_dir):
    library = TrajectoryLibrary(run_dir)
    dump, group = library.group(Address("training", 3, "rem-1", 2), soon())
    assert [head.sample_index for _, head in group] == [0, 1, 2] and {head.prompt_id for _, head in group} == {"rem-1"}
    before, after = library.neighbours(dump, group, soon())
    assert (before.prompt_id, after.prompt_id) == ("rem-0", "rem-0")  # drawn twice
    _, twice = library.group(after, soon())
    assert len(twice) == 4 and len({str(address) for address, _ in twice}) == 4
    assert library.group(Address("training", 3, "rem-1", 7), soon()) is None
    assert library.group(Address("evaluation", 3, "rem-1", 0), soon()) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"step": "x"}, "step: give a step or a range"),
        ({"reward_min": "nan"}, "reward_min"),
        ({"reward_max": "much"}, "reward_max"),
        ({"order": "random"}, "order"),
        ({"tool": "hammer"}, "tool: 'hammer' is no status; give one of none, failed, success"),
        ({"page": "0"}, "page"),
        ({"pages": "2"}, "'pages' is no field; known: text, step"),
        ({"text": "x" * 501}, "text"),
    ],
)
def test_what_cannot_be_searched_for_is_said(fields, said):
    with pytest.raises(QueryError, match=said.replace(".", r"\.")):
        Query.parse(fields)
    assert Query.parse(dict.fromkeys(fields, " ")) == Query()


def test_a_snippet_shows_the_text_and_what_is_around_it():
    assert snippet(["none", "x" * 9 + "Needle" + "y" * 9], "nEEDLE", around=5) == ("…xxxxx", "Needle", "yyyyy…")
    assert snippet(["a.b"], "a.b") == ("", "a.b", "") and snippet(["axb"], "a.b") is None
