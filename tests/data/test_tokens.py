"""Tokens as typed columns: what users see of them, and that any further column gets from an engine to the packing."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from ctpo_megatron.data import PackingRules, Trajectory, pack, token_sequences
from ctpo_megatron.data.tokens import ROUTER_CHOICES, TOKEN, common_type, recorded

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


def test_a_pickle_is_restored_exactly() -> None:
    trajectory = made()
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(trajectory, protocol=5, buffer_callback=buffers.append)
    assert pickle.loads(pickled, buffers=buffers) == trajectory
    assert [buffer.raw().nbytes for buffer in buffers] == [trajectory.tokens.nbytes]  # no copy in the pickle
    other = made()
    other.tokens["turn"][0] = 1
    assert other != trajectory and trajectory != made(scores=np.ones(3, np.float16))


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


def test_a_token_without_a_record_is_none_of_its_experts() -> None:
    choices = np.array([[[3, 1], [0, 2]], [[0, 0], [0, 0]], [[0, 5], [5, 0]]], np.uint8)
    assert recorded(choices).tolist() == [True, False, True]


def test_router_choices_take_a_byte_each_and_stay_in_host_memory() -> None:
    trajectory = made()
    trajectory.fill(0, {ROUTER_CHOICES: np.arange(5 * 2 * 8, dtype=np.uint8).reshape(5, 2, 8)})
    assert (TOKEN.itemsize, made().tokens.nbytes, trajectory.tokens.itemsize) == (16, 6 * 16, 16 + 2 * 8)
    [packed] = pack(token_sequences([trajectory]), None, PackingRules(max_tokens=64))
    [scored] = pack(token_sequences([made(scores=np.array([1, 2, 3], np.float16))]), None, PackingRules(max_tokens=64))
    meta = torch.device("meta")
    assert packed.to(meta).more[ROUTER_CHOICES] is packed.more[ROUTER_CHOICES]
    assert packed.to(meta).token_ids.device == scored.to(meta).more["scores"].device == meta
