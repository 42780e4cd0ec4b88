"""The objective with its preset's numbers filled in, for people who ask later what a run has optimised. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ctpo_megatron.config.objective import PolicyObjective, advantage_from_config, objective_from_config
from ctpo_megatron.config.objective_schema import STD_EPSILON, CorrectionConfig, ObjectiveConfig, PrefixBudget

_RATIOS = {
    "cumprod": "cumulative ratio",
    "geomean": "geometric mean ratio of the prefix",
    "token": "token ratio",
    "sequence": "sequence ratio",
    "sequence-geomean": "geometric mean ratio of the sequence",
}


def resolved_objective(config: ObjectiveConfig) -> dict[str, Any]:
    """Return what a run with this configuration optimises, as names and plain numbers. Raises ConfigError.

    summary: the same on one line; without what is as for CTPO's default: anchor, advantage, no correction. window: what
    it bounds depends on `clip_mode`, with t from 1:

        log_power               log r_t, nats: low t^power + drift t; so with high and with `dual`, the dual bound
        ratio, detached_ratio   r_t: low, high; `dual`
        token_log               each d_t, nats: low, high
        sigmoid                 nothing; the steepness by the sign of A
        binary_*, prefix_tv     a divergence: low is its limit where A < 0, high where A > 0. The budget of prefix_tv
                                is a number, or {quantile, min}
        sequence_k3             k3: high is the limit of the mean of a sequence, largest that of a token

    None stands for what this objective does not have. With a user's `function` ratio, window and dual are its own.
    """
    objective, own = objective_from_config(config), config.function is not None
    advantage = advantage_from_config(config)
    window, bounds = _window(objective)
    divided = advantage.kind == "group" and bool(advantage.normalize_std)
    summed, per_sequence = objective.loss_agg_mode == "seq-mean-token-sum", objective.loss_agg_mode != "token-mean"
    resolved: dict[str, Any] = {
        "preset": config.preset,
        "function": str(config.function) if own else None,
        "ratio_mode": None if own else objective.ratio_mode,
        "clip_mode": None if own else objective.clip_mode,
        "window": None if own else window,
        "dual": None if own or objective.clip_mode not in ("log_power", "ratio") else objective.clip_c,
        "loss_agg_mode": objective.loss_agg_mode,
        "loss_scale_factor": objective.loss_scale_factor if summed else None,
        "count_masked_sequences": objective.count_masked_sequences if per_sequence else None,
        "entropy_coef": 0.0 if own else objective.entropy_coef,
        "advantage": {
            "kind": advantage.kind,
            "normalize_std": divided,
            "epsilon": advantage.epsilon if divided else None,
        },
        "credit": config.credit,
        "turn_ratio": objective.turn_ratio if config.by_turn and not own else None,
        "anchor": config.anchor,
        "correction": _correction(config.correction),
    }
    ended = " to the end of a turn" if resolved["turn_ratio"] == "turn-end" else ""
    loss = [] if own else [_RATIOS[objective.ratio_mode] + ended, *bounds]
    name = resolved["function"] or config.preset
    return {"summary": f"Objective: {name}: {', '.join([*loss, *_parts(resolved)])}", **resolved}


def _window(objective: PolicyObjective) -> tuple[dict[str, Any], list[str]]:
    """What the clip mode bounds, and the dual bound, in numbers and in words."""
    low, high, largest = objective.clip_low, objective.clip_high, objective.clip_c
    around_zero = f"({_figure(0.0 - low, '+')}, {_figure(high, '+')})"
    dual = "no dual bound" if largest is None else f"dual {_figure(largest)}"
    same = _figure(low) == _figure(high)
    limits = _figure(high) if same else f"{_figure(low)} (A < 0), {_figure(high)} (A > 0)"
    window: dict[str, Any]
    match objective.clip_mode:
        case "log_power":
            power, drift = objective.clip_power, 0.0 - objective.clip_drift / 2
            growth = {0.0: "", 0.5: " sqrt(t)", 1.0: " t"}.get(power, f" t^{_figure(power)}")
            moved = f" - {_figure(-drift)} t" if drift else ""
            window = {"low": 0.0 - low, "high": high, "power": power, "drift": drift}
            return window, [f"window {around_zero}{growth}{moved}", dual]
        case "ratio" | "detached_ratio" as mode:
            window = {"low": 1 - low, "high": 1 + high}
            bounds = f"window ({_figure(window['low'])}, {_figure(window['high'])}) of r"
            return window, [bounds, dual] if mode == "ratio" else [f"{bounds} without its gradient"]
        case "token_log":
            return {"low": 0.0 - low, "high": high}, [f"window {around_zero} of each token's log-ratio"]
        case "sigmoid":
            positive, negative = objective.tau_positive, objective.tau_negative
            words = f"sigmoid of r, tau {_figure(positive)} (A > 0), {_figure(negative)} (A < 0)"
            return {"tau_positive": positive, "tau_negative": negative}, [words]
        case "binary_tv" | "binary_kl" as mode:
            bounds = f"{'KL' if mode == 'binary_kl' else 'total variation'} of a token at most {limits}"
            capped = [] if largest is None else [f"r at most {_figure(largest)}"]
            return {"low": low, "high": high, "largest_ratio": largest}, [bounds, *capped]
        case "prefix_tv":
            weight, budget = objective.prefix_weight, objective.prefix_budget
            plain = budget.plain() if isinstance(budget, PrefixBudget) else budget
            words = f"{_budget(plain)} a token over the prefix, weights 1 to {_figure(weight)}"
            window = {"low": low, "high": high, "weight": weight, "budget": plain}
            return window, [f"total variation of a token at most {limits}", words]
        case "sequence_k3":
            capped = [] if largest is None else [f"largest at most {_figure(largest)}"]
            return {"high": high, "largest": largest}, [f"mean k3 of a sequence at most {_figure(high)}", *capped]


def _correction(correction: CorrectionConfig) -> dict[str, Any]:
    weighted = correction.level != "none"
    return {
        "level": correction.level,
        "cap": correction.cap if weighted else None,
        "normalize": correction.normalize if weighted else None,
        "reject": [reject.model_dump() for reject in correction.reject],
        "veto": correction.veto,
    }


def _parts(resolved: Mapping[str, Any]) -> Iterator[str]:
    """What follows the loss itself."""
    if resolved["loss_scale_factor"] is not None:
        yield f"sum per sequence / {_figure(resolved['loss_scale_factor'])}"
    else:
        yield "mean over tokens" if resolved["loss_agg_mode"] == "token-mean" else "mean per sequence"
    if resolved["count_masked_sequences"] is False:
        yield "masked sequences not counted"
    if resolved["entropy_coef"]:
        yield f"entropy bonus {_figure(resolved['entropy_coef'])}"
    kind, epsilon = resolved["advantage"]["kind"], resolved["advantage"]["epsilon"]
    if kind != "group":
        yield f"{kind} advantages"
    elif epsilon is None:
        yield "advantages not divided by their standard deviation"
    elif epsilon != STD_EPSILON:
        yield f"advantages over std + {_figure(epsilon)}"
    if resolved["credit"] == "turn":
        yield "credit by turn"
    if resolved["anchor"] != "proximal":
        yield f"{resolved['anchor']} anchor"
    yield from _corrected(**resolved["correction"])


def _budget(budget: float | Mapping[str, float]) -> str:
    if not isinstance(budget, Mapping):
        return _figure(budget)
    return f"the sequence's {_figure(budget['quantile'])} quantile (at least {_figure(budget['min'])})"


def _corrected(
    level: str, cap: float | None, normalize: bool | None, reject: list[Mapping[str, Any]], veto: float | None
) -> Iterator[str]:
    if level != "none":
        yield f"{level} weights up to {_figure(cap)}{', normalized' if normalize else ''}"
    for rule in reject:
        low = -math.inf if rule["low"] is None else rule["low"]
        high = math.inf if rule["high"] is None else rule["high"]
        yield f"rejects {rule['over']} outside {rule['stat']} ({_figure(low)}, {_figure(high)})"
    if veto is not None:
        yield f"veto below {_figure(veto)}"


def _figure(value: float | None, sign: str = "") -> str:
    """A number as people write it: no rounding noise, no more digits than it has."""
    return f"{value or 0.0:{sign}.10g}"
