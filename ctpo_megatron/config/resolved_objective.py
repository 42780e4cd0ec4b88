"""The objective with its preset's numbers filled in, for people who ask later what a run has optimised. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ctpo_megatron.config.objective import PolicyObjective, advantage_from_config, objective_from_config
from ctpo_megatron.config.objective_schema import CorrectionConfig, ObjectiveConfig, PrefixBudget

_RATIOS = {
    "cumprod": "cumulative ratio",
    "geomean": "geometric mean ratio of the prefix",
    "token": "token ratio",
    "sequence": "sequence ratio",
    "sequence-geomean": "geometric mean ratio of the sequence",
}
_DIVERGENCES = {
    "binary_tv": "total variation of a token",
    "binary_kl": "KL of a token",
    "prefix_tv": "total variation of a token",
}


def resolved_objective(config: ObjectiveConfig) -> dict[str, Any]:
    """What a run with this configuration optimises, as names and plain numbers. Raises ConfigError.

    summary: the same on one line (`objective_line`). window: what it bounds depends on `clip_mode`, with t from 1:

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
    summed, per_sequence = objective.loss_agg_mode == "seq-mean-token-sum", objective.loss_agg_mode != "token-mean"
    resolved: dict[str, Any] = {
        "preset": config.preset,
        "function": str(config.function) if own else None,
        "ratio_mode": None if own else objective.ratio_mode,
        "clip_mode": None if own else objective.clip_mode,
        "window": None if own else _window(objective),
        "dual": None if own or objective.clip_mode not in ("log_power", "ratio") else objective.clip_c,
        "loss_agg_mode": objective.loss_agg_mode,
        "loss_scale_factor": objective.loss_scale_factor if summed else None,
        "count_masked_sequences": objective.count_masked_sequences if per_sequence else None,
        "entropy_coef": 0.0 if own else objective.entropy_coef,
        "advantage": {
            "kind": advantage.kind,
            "normalize_std": bool(advantage.normalize_std) if advantage.kind == "group" else False,
        },
        "credit": config.credit,
        "turn_ratio": objective.turn_ratio if config.by_turn and not own else None,
        "anchor": config.anchor,
        "correction": _correction(config.correction),
    }
    return {"summary": objective_line(resolved), **resolved}


def objective_line(resolved: Mapping[str, Any]) -> str:
    """One line of a `resolved_objective`; without what is as for CTPO's default: anchor, advantage, no correction."""
    name = resolved["function"] or resolved["preset"]
    return f"Objective: {name}: {', '.join(_parts(resolved))}"


def _window(objective: PolicyObjective) -> dict[str, Any]:
    low, high = objective.clip_low, objective.clip_high
    match objective.clip_mode:
        case "log_power":
            drift = 0.0 - objective.clip_drift / 2
            return {"low": 0.0 - low, "high": high, "power": objective.clip_power, "drift": drift}
        case "ratio" | "detached_ratio":
            return {"low": 1 - low, "high": 1 + high}
        case "token_log":
            return {"low": 0.0 - low, "high": high}
        case "sigmoid":
            return {"tau_positive": objective.tau_positive, "tau_negative": objective.tau_negative}
        case "binary_tv" | "binary_kl":
            return {"low": low, "high": high, "largest_ratio": objective.clip_c}
        case "prefix_tv":
            budget = objective.prefix_budget
            plain = budget.plain() if isinstance(budget, PrefixBudget) else budget
            return {"low": low, "high": high, "weight": objective.prefix_weight, "budget": plain}
        case "sequence_k3":
            return {"high": high, "largest": objective.clip_c}


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
    if resolved["function"] is None:
        yield _RATIOS[resolved["ratio_mode"]] + (
            " to the end of a turn" if resolved["turn_ratio"] == "turn-end" else ""
        )
        yield from _bounds(resolved["clip_mode"], resolved["window"])
        if resolved["clip_mode"] in ("log_power", "ratio"):
            yield "no dual bound" if resolved["dual"] is None else f"dual {_figure(resolved['dual'])}"
    yield _aggregation(resolved)
    if resolved["count_masked_sequences"] is False:
        yield "masked sequences not counted"
    if resolved["entropy_coef"]:
        yield f"entropy bonus {_figure(resolved['entropy_coef'])}"
    yield from _advantage(**resolved["advantage"])
    if resolved["credit"] == "turn":
        yield "credit by turn"
    if resolved["anchor"] != "proximal":
        yield f"{resolved['anchor']} anchor"
    yield from _corrected(**resolved["correction"])


def _bounds(mode: str, window: Mapping[str, Any]) -> Iterator[str]:
    match mode:
        case "log_power":
            yield _growing(**{name: float(value or 0.0) for name, value in window.items()})
        case "ratio":
            yield f"window ({_figure(window['low'])}, {_figure(window['high'])}) of r"
        case "detached_ratio":
            yield f"window ({_figure(window['low'])}, {_figure(window['high'])}) of r without its gradient"
        case "token_log":
            yield f"window {_around_zero(window)} of each token's log-ratio"
        case "sigmoid":
            positive, negative = _figure(window["tau_positive"]), _figure(window["tau_negative"])
            yield f"sigmoid of r, tau {positive} (A > 0), {negative} (A < 0)"
        case "sequence_k3":
            yield f"mean k3 of a sequence at most {_figure(window['high'])}"
            if window["largest"] is not None:
                yield f"largest at most {_figure(window['largest'])}"
        case _:
            yield from _divergence(mode, window)


def _growing(low: float, high: float, power: float, drift: float) -> str:
    growth = {0.0: "", 0.5: " sqrt(t)", 1.0: " t"}.get(power, f" t^{_figure(power)}")
    moved = f" - {_figure(-drift)} t" if drift else ""
    return f"window {_around_zero({'low': low, 'high': high})}{growth}{moved}"


def _divergence(mode: str, window: Mapping[str, Any]) -> Iterator[str]:
    low, high = _figure(window["low"]), _figure(window["high"])
    yield f"{_DIVERGENCES[mode]} at most {high if low == high else f'{low} (A < 0), {high} (A > 0)'}"
    if mode == "prefix_tv":
        yield f"{_budget(window['budget'])} a token over the prefix, weights 1 to {_figure(window['weight'])}"
    elif window["largest_ratio"] is not None:
        yield f"r at most {_figure(window['largest_ratio'])}"


def _budget(budget: float | Mapping[str, float]) -> str:
    if not isinstance(budget, Mapping):
        return _figure(budget)
    return f"the sequence's {_figure(budget['quantile'])} quantile (at least {_figure(budget['min'])})"


def _aggregation(resolved: Mapping[str, Any]) -> str:
    if resolved["loss_agg_mode"] == "token-mean":
        return "mean over tokens"
    if resolved["loss_agg_mode"] == "seq-mean-token-mean":
        return "mean per sequence"
    return f"sum per sequence / {_figure(resolved['loss_scale_factor'])}"


def _advantage(kind: str, normalize_std: bool) -> Iterator[str]:
    if kind != "group":
        yield f"{kind} advantages"
    elif not normalize_std:
        yield "advantages not divided by their standard deviation"


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


def _around_zero(window: Mapping[str, float | None]) -> str:
    return f"({_figure(window['low'], '+')}, {_figure(window['high'], '+')})"


def _figure(value: float | None, sign: str = "") -> str:
    """A number as people write it: no rounding noise, no more digits than it has."""
    return f"{value or 0.0:{sign}.10g}"
