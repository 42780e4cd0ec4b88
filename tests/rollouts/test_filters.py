"""Filters write `loss_mask` alone: which turns each takes, and that ratio and position of all other tokens stay."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ctpo_megatron.base.extensions import ExtensionError, activate
from ctpo_megatron.config import Extension
from ctpo_megatron.data import Group, PackingRules, Prompt, ToolCall, Trajectory, pack, token_sequences
from ctpo_megatron.data.records import NoVerdict
from ctpo_megatron.data.trajectory import FinishReason
from ctpo_megatron.objective import PRESETS, PolicyLossOutput, PolicyObjective, policy_loss
from ctpo_megatron.rollouts import Filters, filter_problem
from tests.extend.scripted import project

PROMPT = Prompt("p", "test", (), "4", (1, 2))
BOX = r"So \boxed{4}"


def episode(statuses: str, finish: FinishReason = "answer", text: str = BOX, answers: bool = True) -> Trajectory:
    """A turn of three tokens for each letter, then a last one. s: its call succeeds, f: fails, p: cannot be read.

    answers: whether the last turn is one without a record of a call.
    """
    names = {"s": "success", "f": "runtime_error", "p": "parse_error"}
    found = Trajectory("p", 0, seed=0, finish_reason=finish, final_text=text)
    found.append_context([1, 2], turn=0)
    for turn, letter in enumerate(statuses, start=1):
        found.append_model([3, 4, 5], [-1.0] * 3, [1] * 3, turn)
        found.tool_calls.append(ToolCall(turn, "python", {}, names[letter], "", 0.1))  # type: ignore[arg-type]
        if answers or turn < len(statuses):
            found.append_context([6], turn)
    if answers:
        found.append_model([3, 4, 5], [-1.0] * 3, [1] * 3, len(statuses) + 1)
    return found


def masked(found: Trajectory, *names: str | Extension) -> list[int]:
    """The turns that have left the loss."""
    parts = [Extension(name=name) if isinstance(name, str) else name for name in names]
    Filters(parts).apply([Group(PROMPT, [found])])
    turns = set(found.turn) - {0}
    return sorted(turns - {turn for turn, mask in zip(found.turn, found.loss_mask, strict=True) if mask})


@pytest.mark.parametrize(
    ("name", "found", "turns"),
    [
        ("void_turn", episode("sf"), []),
        ("void_turn", episode("sp"), [1, 2, 3]),
        ("void_turn", episode("s", text="4, I think"), [1, 2]),
        ("void_turn", episode("s", text=r"\boxed{4"), [1, 2]),
        ("void_turn", episode("s", "length", "so it"), [1, 2]),
        ("void_turn", episode("ss", "length", "", answers=False), []),  # its answer did not fit
        ("void_turn", episode("s", "max_turns", ""), []),
        ("void_turn", episode("p", "max_turns", ""), [1, 2]),
        ("void_turn", episode("s", "tool_budget", ""), []),
        ("void_trajectory", episode("p", text="4"), [1, 2]),
        ("void_trajectory", episode("pf", text="4"), []),
        ("void_trajectory", episode("p"), []),
        ("truncated", episode("s", "length", "so it"), [1, 2]),
        ("truncated", episode("s", "max_turns", ""), []),
        ("failed_tool", episode("sfp"), [2, 3]),
        ("failed_tool", episode("sf", "length", "", answers=False), [2]),
    ],
)
def test_what_a_filter_takes(name: str, found: Trajectory, turns: list[int]) -> None:
    assert masked(found, name) == turns
    assert [m for m, turn in zip(found.loss_mask, found.turn, strict=True) if turn not in turns] == [
        m for m, turn in zip(found.response_mask, found.turn, strict=True) if turn not in turns
    ]


def test_a_final_answer_can_be_something_else_than_a_box() -> None:
    part = Extension(name="void_turn", arguments={"answer": r"^Answer: \S"})
    assert masked(episode("s", text="Answer: 4"), part) == []
    assert masked(episode("s"), part) == [1, 2]


def batch() -> list[Group]:
    """Groups with every kind of episode; the last is taken as a whole by two filters."""
    kinds = [
        episode("sfs"),
        episode("ss"),
        episode("pf"),
        episode("sf", "length", "so it"),
        episode("", "length", "so"),
    ]
    return [Group(PROMPT, [found]) for found in kinds]


def loss(groups: list[Group], objective: PolicyObjective) -> tuple[PolicyLossOutput, torch.Tensor, torch.Tensor]:
    """The loss of one packed micro-batch whose policy has moved, its gradient, and its loss mask."""
    (packed,) = pack(token_sequences(t for group in groups for t in group.trajectories), None, PackingRules(1000))
    noise = torch.Generator().manual_seed(0)
    old = -torch.rand(packed.num_tokens, generator=noise)
    log_probs = (old + 0.1 * torch.randn(packed.num_tokens, generator=noise)).requires_grad_()
    advantages = torch.randn(len(packed.sequences), generator=noise)
    out = policy_loss(
        log_probs,
        old,
        advantages,
        packed.response_mask,
        objective,
        loss_mask=packed.loss_mask,
        cu_seqlens=packed.cu_seqlens,
    )
    out.loss.backward()
    assert log_probs.grad is not None
    return out, log_probs.grad, packed.loss_mask


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_tokens_that_stay_have_the_same_ratio_and_position_bit_for_bit(preset: str) -> None:
    # Divided by the number of sequences alone, so that a token's share does not depend on who else is in the loss.
    objective = PolicyObjective.preset(preset, loss_agg_mode="seq-mean-token-sum")
    whole, gradient, everything = loss(batch(), objective)
    filtered = batch()
    Filters([Extension(name="failed_tool"), Extension(name="truncated")]).apply(filtered)
    some, remaining, kept = loss(filtered, objective)
    assert 0 < kept.sum() < everything.sum() and not (kept & ~everything).any()
    assert torch.equal(some.per_token, torch.where(kept, whole.per_token, 0.0))
    assert torch.equal(remaining, torch.where(kept, gradient, 0.0))
    assert some.loss.item() == pytest.approx(
        some.per_token.double().sum().item() / len(filtered), rel=1e-6
    )  # float32 losses


def test_what_left_is_counted_by_filter() -> None:
    groups = batch()
    names = ("void_turn", "truncated", "failed_tool")
    metrics = Filters([Extension(name=name) for name in names]).apply(groups)
    assert metrics == {
        "rollout/masked_tokens": pytest.approx(1 - (9 + 9) / (12 + 9 + 9 + 9 + 3)),
        "rollout/masked_trajectories": 3 / 5,
        "filter/void_turn": 3.0,
        "filter/truncated": 2.0,
        "filter/failed_tool": 3.0,
    }
    assert Filters([]).apply(groups) == {}
    assert all(t.loss_mask == t.response_mask for group in groups for t in group.trajectories)  # of no filter


def test_the_filter_of_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    filters = project("filter").rollout.filters
    assert [filter_problem(part) for part in filters] == ["", ""]
    slow = episode("sss")
    slow.tool_calls[1].wall_s = 2.5
    assert masked(slow, *filters) == [2]


def test_a_filter_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_filters.py").write_text(
        "def late(trajectory, prompt, *, after): return [t for t in set(trajectory.turn) if t > after]\n"
        "def wrong(trajectory, prompt): return [0]\n"
        "def broken(trajectory, prompt): return prompt.nothing\n"
        "class Kept: ...\n"
    )
    activate([tmp_path])
    late = Extension(name="own_filters:late", arguments={"after": 1})
    assert masked(episode("ss"), late) == [2, 3]
    assert Filters([late]).apply(batch())["filter/late"] == 4.0
    for name, message in (("wrong", r"wrong, prompt 'p' sample 0: names turns \{0\}"), ("broken", "no attribute")):
        with pytest.raises(ValueError, match=message):
            masked(episode("s"), f"own_filters:{name}")
    assert filter_problem(late) == "" and filter_problem(Extension(name="void_turn")) == ""
    assert "no such filter; write void_turn, void_traj" in filter_problem(Extension(name="void"))
    assert "is not a function of" in filter_problem(Extension(name="own_filters:Kept"))
    assert "unexpected keyword" in filter_problem(Extension(name="truncated", arguments={"x": 1}))
    with pytest.raises(ExtensionError, match="has no 'no'"):
        filter_problem(Extension(name="own_filters:no"))


def test_no_filter_sees_what_nobody_judged() -> None:
    """It leaves the loss whole, counts in no figure, and comes back with a verdict, as in a replay."""
    lost, kept = episode("sf"), episode("sf")
    lost.no_verdict, kept.reward = NoVerdict("none", "the scorer returned None"), 1.0
    assert Filters([]).apply([Group(PROMPT, [lost, kept])]) == {}
    assert not any(lost.loss_mask) and kept.loss_mask == kept.response_mask
    metrics = Filters([Extension(name="failed_tool")]).apply([Group(PROMPT, [lost, kept])])
    assert metrics == {
        "rollout/masked_tokens": pytest.approx(1 / 3),
        "rollout/masked_trajectories": 0.0,
        "filter/failed_tool": 1.0,
    }
    assert Filters([Extension(name="failed_tool")]).apply([Group(PROMPT, [lost])]) == {}
    lost.no_verdict, lost.reward = None, 0.0
    Filters([]).apply([Group(PROMPT, [lost])])
    assert lost.loss_mask == lost.response_mask
