"""Tokens as typed columns: what users see of them, and that any further column gets from an engine to the packing."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ctpo_megatron.base.run_paths import AHEAD, AHEAD_JSON
from ctpo_megatron.data import PackingRules, Trajectory, pack, token_sequences
from ctpo_megatron.data.tokens import ROUTER_CHOICES, TOKEN, common_type, recorded
from ctpo_megatron.rollouts import encode_ahead, read_ahead

COLUMNS = {
    "token_ids": [1, 2, 3, 4, 5, 6],
    "response_mask": [0, 0, 1, 1, 0, 1],
    "loss_mask": [0, 0, 1, 1, 0, 1],
    "rollout_log_probs": [0.0, 0.0, -0.5, -0.25, 0.0, -1.5],
    "weight_version": [-1, -1, 7, 8, -1, 8],
    "turn": [0, 0, 1, 1, 1, 2],
}


def made(**more: Any) -> Trajectory:
    trajectory = Trajectory("p", 0, 1)
    trajectory.append_context([1, 2], 0)
    trajectory.append_model([3, 4], [-0.5, -0.25], [7, 8], 1, {name: values[:2] for name, values in more.items()})
    trajectory.append_context([5], 1)
    trajectory.append_model([6], [-1.5], [8], 2, {name: values[2:] for name, values in more.items()})
    return trajectory


def test_a_token_is_a_record_of_16_bytes() -> None:
    assert TOKEN.itemsize == 16 and made().tokens.nbytes == 6 * 16


@pytest.mark.parametrize("name", COLUMNS)
def test_users_read_a_column_like_a_list(name: str) -> None:
    column, expected = getattr(made(), name), COLUMNS[name]
    assert column == expected and expected == column and column != expected[1:] and column == tuple(expected)
    assert list(column) == expected and [type(value) for value in column] == [type(value) for value in expected]
    assert column[1:4] == expected[1:4] and type(column[1:4]) is list and column[-1] == expected[-1]
    assert sum(column) == sum(expected) and max(column) == max(expected) and len(column) == 6
    assert column.index(expected[3]) == expected.index(expected[3]) and column.count(0) == expected.count(0)
    nine = [9]
    assert column + nine == expected + nine and nine + column == nine + expected and column.copy() == expected
    assert list(zip(column, expected, strict=True)) == list(zip(expected, expected, strict=True))
    assert repr(column) == repr(expected) and expected[2] in column and list(reversed(column)) == expected[::-1]
    assert np.array_equal(np.array(column), np.array(expected))
    assert column < [*expected, 9] and column <= expected and column > expected[:-1] and sorted([column, []])[0] == []
    with pytest.raises(TypeError, match="does not support item assignment"):
        column[0] = 1
    with pytest.raises(IndexError):
        column[6]


def test_only_the_loss_mask_is_given_anew() -> None:
    trajectory = made()
    before = trajectory.tokens
    before.flags.writeable = False  # as memory of Ray's object store
    trajectory.loss_mask = [0, 0, 1, 0, 0, 1]
    assert trajectory.loss_mask == [0, 0, 1, 0, 0, 1] and before["loss_mask"].tolist() == COLUMNS["loss_mask"]
    with pytest.raises(AttributeError):
        trajectory.token_ids = [1]  # type: ignore[misc]


def test_every_form_is_restored_exactly() -> None:
    trajectory = made()
    assert {name: trajectory.to_json()[name] for name in COLUMNS} == COLUMNS
    assert Trajectory.from_json(json.loads(json.dumps(trajectory.to_json()))) == trajectory
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(trajectory, protocol=5, buffer_callback=buffers.append)
    assert pickle.loads(pickled, buffers=buffers) == trajectory
    assert [buffer.raw().nbytes for buffer in buffers] == [trajectory.tokens.nbytes]  # no copy in the pickle
    other = made()
    other.tokens["turn"][0] = 1
    assert other != trajectory and trajectory != made(scores=np.ones(3, np.float16))


@pytest.mark.parametrize(("name", "values"), [("token_ids", [1, 2**31]), ("turn", [0, 2**15]), ("loss_mask", [0, -1])])
def test_numbers_that_a_column_cannot_hold_are_refused(name: str, values: list[int]) -> None:
    record = {**made().to_json(), **{each: [0, 0] for each in COLUMNS}, name: values}
    with pytest.raises(ValueError, match=f"{name} holds {values[1]}"):
        Trajectory.from_json(record)


def test_a_log_prob_beyond_float32_is_refused() -> None:
    record = made().to_json()
    record["rollout_log_probs"][3] = -1e39
    with pytest.raises(ValueError, match=r"rollout_log_probs holds -1e\+39"):
        Trajectory.from_json(record)


@pytest.mark.parametrize("name", ["turn", "current"])
def test_a_further_column_needs_a_name_of_its_own(name: str) -> None:
    with pytest.raises(ValueError, match=f"a further column of tokens is named {name}"):
        made(**{name: np.ones(3, np.int8)})


def experts() -> np.ndarray[Any, Any]:
    """Choices of three sampled tokens in two layers, eight experts each."""
    return np.arange(3 * 2 * 8, dtype=np.uint8).reshape(3, 2, 8)


def test_a_further_column_gets_from_an_engines_answer_to_the_micro_batch() -> None:
    trajectories = [made(), made(experts=experts(), scores=np.array([1, 2, 3], np.float16))]
    [packed] = pack(token_sequences(trajectories), None, PackingRules(max_tokens=64, sequence_multiple=8))
    assert packed.more["experts"].shape == (16, 2, 8) and str(packed.more["experts"].dtype) == "torch.uint8"
    found = {place: packed.more["experts"][tokens].numpy() for place, tokens in packed.places()}
    assert not found[0].any()
    assert np.array_equal(found[1][[2, 3, 5]], experts()) and not found[1][[0, 1, 4]].any()
    scores = {place: packed.more["scores"][tokens].tolist() for place, tokens in packed.places()}
    assert scores == {0: [0.0] * 6, 1: [0.0, 0.0, 1.0, 2.0, 0.0, 3.0]}
    assert packed.more["scores"].sum() == 6  # nothing at alignment


def test_columns_of_one_name_are_of_one_type() -> None:
    trajectory = made(experts=experts())
    with pytest.raises(ValueError, match="the column experts is"):
        trajectory.append_model([7], [0.0], [8], 3, {"experts": np.zeros((1, 2, 4), np.uint8)})
    with pytest.raises(ValueError, match=r"1 tokens with 1 log-probs and 1 weight versions, 2 of experts"):
        trajectory.append_model([7], [0.0], [8], 3, {"experts": np.zeros((2, 2, 8), np.uint8)})
    assert common_type([TOKEN, trajectory.tokens.dtype]) == trajectory.tokens.dtype


def test_columns_of_tokens_that_the_engine_read_are_filled_in() -> None:
    trajectory = made()
    alone = trajectory.tokens
    trajectory.fill(0, {"experts": experts()})
    trajectory.fill(4, {"experts": experts()[:1]})
    found = trajectory.tokens["experts"]
    assert np.array_equal(found[:3], experts()) and np.array_equal(found[4], experts()[0])
    assert not found[[3, 5]].any() and trajectory.token_ids == COLUMNS["token_ids"]
    trajectory.fill(0, {})
    assert trajectory.tokens["experts"] is not found and alone.dtype == TOKEN  # never changed in place
    with pytest.raises(ValueError, match="3 of experts from token 4 on, of 6 tokens"):
        trajectory.fill(4, {"experts": experts()})
    with pytest.raises(ValueError, match="the column experts is"):
        trajectory.fill(0, {"experts": experts().astype(np.uint16)})


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_further_columns_are_in_the_json_form(kind: Any) -> None:
    trajectory = made(experts=experts().astype(kind), scores=np.array([1, 2, 3], np.float16))
    record = json.loads(json.dumps(trajectory.to_json()))
    assert Trajectory.from_json(record) == trajectory
    record["more"]["experts"]["shape"] = [2, 4]
    with pytest.raises(ValueError, match="cannot reshape"):
        Trajectory.from_json(record)
    assert "more" not in made().to_json()


def test_a_token_without_a_record_is_none_of_its_experts() -> None:
    choices = np.array([[[3, 1], [0, 2]], [[0, 0], [0, 0]], [[0, 5], [5, 0]]], np.uint8)
    assert recorded(choices).tolist() == [True, False, True]


def test_router_choices_take_a_byte_each_and_stay_in_host_memory() -> None:
    trajectory = made()
    trajectory.fill(0, {ROUTER_CHOICES: np.arange(5 * 2 * 8, dtype=np.uint8).reshape(5, 2, 8)})
    assert trajectory.tokens.itemsize == 16 + 2 * 8
    [packed] = pack(token_sequences([trajectory]), None, PackingRules(max_tokens=64))
    [scored] = pack(token_sequences([made(scores=np.array([1, 2, 3], np.float16))]), None, PackingRules(max_tokens=64))
    meta = torch.device("meta")
    assert packed.to(meta).more[ROUTER_CHOICES] is packed.more[ROUTER_CHOICES]
    assert packed.to(meta).token_ids.device == scored.to(meta).more["scores"].device == meta


def ahead(*trajectories: Trajectory) -> dict[str, Any]:
    waiting = {"prompt": "q", "occurrence": 1}
    group = {"prompt": "p", "trajectories": list(trajectories), "report": {"seconds": 0.5}}
    return {"shape": [1, 2], "settled": {"trained": 3}, "batches": [{"step": 4, "groups": [waiting, group]}]}


@pytest.mark.parametrize("more", [{}, {"experts": experts(), "scores": np.array([1, 2, 3], np.float16)}])
def test_what_is_sampled_ahead_survives_a_checkpoint(tmp_path: Path, more: dict[str, Any]) -> None:
    first, second = made(**more), made()
    second.tokens["token_ids"] += 10
    second.final_text, second.reward, second.reward_components = "\\boxed{2}", 0.1, {"a": 1.0}
    second.turn_rewards = [0.1, 1e-17]
    (tmp_path / AHEAD).write_bytes(encode_ahead(ahead(first, second)))
    found = read_ahead(tmp_path)
    assert found is not None
    [kept, restored] = found["batches"][0]["groups"][1].pop("trajectories")
    assert found == {**ahead(), "batches": [{"step": 4, "groups": [{"prompt": "q", "occurrence": 1}, {
        "prompt": "p", "report": {"seconds": 0.5}}]}]}  # fmt: skip
    assert kept == first
    assert restored.to_json() | {"more": {}} == second.to_json() | {"more": {}}  # a column that one lacks is 0


def test_nothing_is_sampled_ahead(tmp_path: Path) -> None:
    assert read_ahead(tmp_path) is None
    empty = {**ahead(), "batches": []}
    (tmp_path / AHEAD).write_bytes(encode_ahead(empty))
    assert read_ahead(tmp_path) == empty


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / AHEAD).write_bytes(encode_ahead(ahead(made()))[:-30])
    with pytest.raises(ValueError, match=r"ahead\.parquet does not hold what was sampled ahead"):
        read_ahead(tmp_path)


HOSTILE: dict[str, dict[str, Any]] = {
    "objects": {"type": '[["token_ids", "|O"]]'},
    "a type that is none": {"type": '[["token_ids", "import os"]]'},
    "deep": {"state": "[" * 100_000},
    "a list": {"state": "[]"},
    "huge": {"length": [2**31 - 1] * 3000},
    "negative": {"length": [-5]},
    "fewer": {"length": [], "facts": []},
    "facts that are none": {"facts": ["[]"]},
    "no column": {"drop": "token_ids"},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / AHEAD).write_bytes(encode_ahead(ahead(made())))
    table = pq.read_table(tmp_path / AHEAD)
    metadata = table.schema.metadata | {key.encode(): change[key] for key in ("type", "state") if key in change}
    columns = {name: table[name] for name in table.column_names if name != change.get("drop")}
    lengths = pa.array(change.get("length", [6]), pa.int32())
    columns = {name: pa.concat_arrays(columns[name].chunks * len(lengths)) for name in columns if len(lengths)} or {
        name: column.slice(0, 0).combine_chunks() for name, column in columns.items()
    }
    columns |= {"length": lengths} | {key: pa.array(change[key], pa.string()) for key in ("facts",) if key in change}
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), tmp_path / AHEAD)
    with pytest.raises(ValueError, match=r"ahead\.parquet does not hold what was sampled ahead"):
        read_ahead(tmp_path)


def test_a_machine_without_memory_is_not_called_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise MemoryError

    (tmp_path / AHEAD).write_bytes(encode_ahead(ahead(made())))
    monkeypatch.setattr("ctpo_megatron.rollouts.ahead.pq.read_table", full)
    with pytest.raises(MemoryError):
        read_ahead(tmp_path)


def test_a_checkpoint_of_before_is_read(tmp_path: Path) -> None:
    import gzip

    trajectory = made()
    older = ahead()
    older["batches"][0]["groups"][1]["trajectories"] = [trajectory.to_json()]
    (tmp_path / AHEAD_JSON).write_bytes(gzip.compress(json.dumps(older).encode()))
    assert read_ahead(tmp_path) == ahead(trajectory)
