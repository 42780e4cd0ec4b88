"""Seeds are stable for all time, and metrics count what they say."""

from __future__ import annotations

import pytest

from ctpo_megatron.data.records import Prompt, ToolCall
from ctpo_megatron.data.trajectory import Group, Trajectory
from ctpo_megatron.environments import trajectory_seed, turn_seed
from ctpo_megatron.rollouts import rollout_metrics
from tests.support.recorded import through_a_file


def test_seed_values_never_change() -> None:
    assert trajectory_seed(0, 0, "p", 0) == trajectory_seed(0, 0, "p", 0, occurrence=0) == SEED_A
    assert turn_seed(SEED_A, 1) == SEED_B


SEED_A, SEED_B = 410233806287856, 8191741766354100


def test_seeds_differ_in_every_field_and_fit_json() -> None:
    seeds = {trajectory_seed(r, s, p, i) for r in (0, 1) for s in range(5) for p in ("a", "b", "a1") for i in range(5)}
    seeds |= {trajectory_seed(0, 0, "a", i, occurrence) for i in range(5) for occurrence in range(1, 5)}
    seeds |= {turn_seed(7, t) for t in range(5)}
    assert len(seeds) == 2 * 5 * 3 * 5 + 5 * 4 + 5
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert trajectory_seed(1, 11, "p", 0) != trajectory_seed(11, 1, "p", 0)


def trajectory(index: int, model: int, context: int, reason: str, calls: list[ToolCall]) -> Trajectory:
    made = Trajectory("p", index, 0)
    made.append_context([1] * 4, 0)
    made.append_model([2] * model, [-1.0] * model, [0] * model, 1)
    made.append_context([3] * context, 1)
    made.finish_reason, made.tool_calls = reason, calls  # type: ignore[assignment]
    return made


def test_metrics() -> None:
    calls = [ToolCall(1, "a", {"x": 1}, "success", "1", 0.2), ToolCall(2, "", {}, "parse_error", "e", 0.0)]
    group = Group(
        Prompt("p", "d", (), "", (1, 1, 1, 1)),
        [
            trajectory(0, 10, 6, "answer", calls),
            trajectory(1, 20, 0, "length", [ToolCall(1, "b", {}, "timeout", "", 0.4)]),
            trajectory(2, 2, 0, "max_turns", []),
            trajectory(3, 8, 2, "tool_budget", []),
        ],
    )
    metrics = rollout_metrics([group])
    assert metrics == {
        "rollout/tool_use": 0.25,
        "rollout/tool_calls": 0.75,
        "rollout/tool_error_rate": pytest.approx(2 / 3),
        "rollout/truncated": 0.25,
        "rollout/max_turns": 0.25,
        "rollout/tool_budget": 0.25,
        "rollout/turns_mean": 1.0,
        "rollout/response_length_mean": 12.0,
        "rollout/model_tokens_mean": 10.0,
        "tokens/model": 40.0,
        "tokens/total": 64.0,
        "sandbox/calls": 3.0,
        "sandbox/success": 1.0,
        "sandbox/runtime_error": 0.0,
        "sandbox/timeout": 1.0,
        "sandbox/parse_error": 1.0,
        "sandbox/infrastructure_error": 0.0,
        "sandbox/wall_mean_s": pytest.approx(0.3),
        "sandbox/called/rate": 0.5,
        "sandbox/success/among_called_rate": 0.5,
        "sandbox/call_count/mean": 0.75,
        "sandbox/call_count/min": 0.0,
        "sandbox/call_count/max": 2.0,
        "sandbox/success_count/mean": 0.25,
        "sandbox/success_count/min": 0.0,
        "sandbox/success_count/max": 1.0,
        "void_turn/rate": 0.0,
        "tool/a/calls": 1.0,
        "tool/a/success": 1.0,
        "tool/b/calls": 1.0,
        "tool/b/success": 0.0,
    }
    assert rollout_metrics([]) == {}


def test_programs_and_void_turns_are_counted() -> None:
    programs = [("print(1)", "success"), ("a = 1\nprint(a)\n", "success"), ("while True:\n    pass", "timeout")]
    calls = [ToolCall(1, "a", {"code": code}, status, "", 0.1) for code, status in programs]  # type: ignore[arg-type]
    said_nothing, answered = trajectory(1, 4, 0, "answer", []), trajectory(2, 4, 0, "answer", [])
    answered.final_text = "so \\boxed{4}"
    group = Group(Prompt("p", "d", (), "", (1,)), [trajectory(0, 4, 0, "answer", calls), said_nothing, answered])
    metrics = rollout_metrics([group])
    assert metrics["void_turn/rate"] == pytest.approx(1 / 3)
    assert [metrics[f"sandbox/code_lines/{of}"] for of in ("mean", "min", "max")] == [pytest.approx(5 / 3), 1.0, 2.0]
    assert [metrics[f"sandbox/code_lines_success/{of}"] for of in ("mean", "min", "max")] == [1.5, 1.0, 2.0]
    assert metrics["sandbox/called/rate"] == pytest.approx(1 / 3)
    assert metrics["sandbox/success/among_called_rate"] == 1.0


def test_waiting_and_running_of_tool_calls_are_told_apart_where_the_tool_knows() -> None:
    calls = [ToolCall(1, "a", {}, "success", "", wall, ran) for wall, ran in ((0.5, 0.2), (1.5, 1.4), (9.0, None))]
    metrics = rollout_metrics([Group(Prompt("p", "d", (), "", (1,)), [trajectory(0, 1, 0, "answer", calls)])])
    assert metrics["sandbox/wall_mean_s"] == pytest.approx(11 / 3)
    assert metrics["sandbox/queue_s"] == pytest.approx(0.2)
    assert metrics["sandbox/exec_s"] == pytest.approx(0.8)


def test_a_record_restores_exactly() -> None:
    made = trajectory(0, 3, 2, "answer", [ToolCall(1, "add", {"a": 1, "b": [2.5]}, "success", "3", 0.25, 0.125)])
    assert through_a_file([made]) == [made]
