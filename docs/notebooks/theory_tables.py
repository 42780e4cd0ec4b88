"""Tables and figures of theory.ipynb, of what the other `theory_*` files compute."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ctpo_megatron.report.charts import DASHED, SOLID, Axis, Chart, Curve, Spec, curves, for_file
from theory_error import OBJECTIVES, GradientError, clipped_weights, normalized_reward
from theory_tree import (
    RATIOS,
    BoolArray,
    Counterexample,
    FloatArray,
    Tree,
    chi_squared,
    equal_factors,
    independent_variances,
    relative_bias,
    sampled_variances,
    second_moments,
    suffix_share,
    variances,
)
from theory_turns import BASELINES, WEIGHTS, TwoTurns
from theory_walk import (
    CURVE,
    DRIFT,
    NO_DRIFT,
    TOKENS,
    Autoregressive,
    UnequalTrajectories,
    Walks,
    clip_rate,
    clipped_share,
    drift,
    windows,
)

SHOWN = (100, 1_000, 8_000)
"""Positions of the tables of walks."""
ROUNDING = 1e-12
"""Below, a number is shown as 0: it is what float64 leaves of one, and differs between machines."""
BATCHES = (32, 1_024)
"""Trajectories of a gradient: a mini-batch of the quickstart, and one of a cluster."""
EQUAL_CHI2 = (0.1, 0.01, 0.0001)
COLOURS = {"token": "orange", "prefix": "blue", "CTPO, prefix": "blue", "GSPO": "purple", "sequence": "green"}
KINDS = {NO_DRIFT: "grey", DRIFT: "blue", TOKENS: "orange"}
Cell = str | int | float


@dataclass(frozen=True, repr=False)
class Table:
    """rows: one cell for each of `columns`. Jupyter shows it as Markdown."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @classmethod
    def of(cls, columns: Mapping[str, Iterable[Cell]]) -> Table:
        """From columns of equal length; numbers of numpy become plain ones."""
        plain = [np.asarray(column, object).tolist() for column in columns.values()]
        return cls(tuple(columns), tuple(zip(*plain, strict=True)))

    def column(self, name: str) -> list[Cell]:
        """Return all cells of a column. Raises ValueError for an unknown name."""
        index = self.columns.index(name)
        return [row[index] for row in self.rows]

    def only(self, name: str, values: Collection[Cell]) -> Table:
        """Rows whose cell in a column is one of `values`. Raises ValueError for an unknown name."""
        index = self.columns.index(name)
        return Table(self.columns, tuple(row for row in self.rows if row[index] in values))

    def __repr__(self) -> str:
        words = [all(isinstance(cell, str) for cell in column) for column in zip(*self.rows, strict=True)]
        lines = [self.columns, ["---" if text else "--:" for text in words]]
        lines += [[_shown(cell) for cell in row] for row in self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def _repr_markdown_(self) -> str:
        return repr(self)


def _shown(cell: Cell) -> str:
    """Four decimals, or two digits and a power of ten of a number that has too few in them."""
    if isinstance(cell, float):
        if abs(cell) < ROUNDING:
            return "0"
        return f"{cell:,.4f}" if 1e-3 <= abs(cell) < 1e5 else f"{cell:.1e}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def bias_table(tree: Tree, advantages: FloatArray) -> Table:
    """Relative bias of each term of the gradient; advantages: `[N, H]`."""
    biases = {name: tree.bias_by_position(ratio, advantages) for ratio, name in RATIOS.items()}
    return Table.of({"t": range(1, tree.horizon + 1), **biases})


def outcome_table(trees: Sequence[Tree], rng: np.random.Generator) -> Table:
    """Relative bias of the whole gradient with one outcome reward: on the first tree, and quantiles over the others."""
    rewarded = [(tree, tree.outcome_advantages(rng)) for tree in trees]
    bias = {ratio: np.array([tree.bias(ratio, reward) for tree, reward in rewarded]) for ratio in RATIOS}
    quantile = np.array([np.quantile(values[1:], (0.1, 0.5, 0.9)) for values in bias.values()])
    return Table.of(
        {
            "ratio": RATIOS.values(),
            "the tree above": [float(values[0]) for values in bias.values()],
            **{name: quantile[:, index] for index, name in enumerate(("10 %", "median", "90 %"))},
            "trees below token": [int((values[1:] < bias["token"][1:]).sum()) for values in bias.values()],
        }
    )


def variance_table(tree: Tree) -> Table:
    """Proposition 2 (i)."""
    prefix, sequence = variances(tree, "cumprod"), variances(tree, "sequence")
    return Table.of(
        {
            "t": range(1, tree.horizon + 1),
            "token": variances(tree, "token"),
            "prefix": prefix,
            "sequence": sequence,
            "sequence - prefix": sequence - prefix,
            "mean of the rest": suffix_share(tree),
        }
    )


def independent_table(tree: Tree, rng: np.random.Generator, samples: int) -> Table:
    """Proposition 2 (ii) of a tree whose positions are independent, by formula, by enumeration and from samples."""
    first = np.cumsum([0, *(tree.vocabulary**depth for depth in range(tree.horizon - 1))])
    chi2 = chi_squared(tree.behaviour[first], tree.target[first])
    sampled, error = sampled_variances(tree, tree.sample(rng, samples))
    return Table.of(
        {
            "t": range(1, tree.horizon + 1),
            "chi2_t": chi2,
            "formula": independent_variances(chi2),
            "enumerated": variances(tree, "cumprod"),
            "sampled": sampled,
            "its error": error,
        }
    )


def equal_table(vocabulary: int, horizon: int) -> Table:
    """Sequence ratio over prefix ratio where chi^2 is the same at all positions, down to small ones."""
    rows: list[tuple[Cell, ...]] = []
    for chi2 in EQUAL_CHI2:
        tree = equal_factors(vocabulary, horizon, chi2)
        moment, variance = second_moments(tree, "cumprod"), variances(tree, "cumprod")
        for t in sorted({1, horizon // 2, horizon - 1}):
            ratios = [float(values[-1] / values[t - 1]) for values in (moment, variance)]
            rows.append((chi2, t, (1 + chi2) ** (horizon - t), *ratios, horizon / t))
    return Table(("c", "t", "(1 + c)^(H - t)", "second moments", "variances", "H / t"), tuple(rows))


def counterexample_table(example: Counterexample) -> Table:
    """Gradients in the two logits."""
    formulas, enumerated = example.formulas(), example.enumerated()
    names = {"true": "true gradient", **RATIOS}
    return Table.of(
        {
            "ratio": names.values(),
            "first logit": [enumerated[name][0] for name in names],
            "by formula": [formulas[name][0] if name in formulas else "" for name in names],
            "second logit": [enumerated[name][1] for name in names],
        }
    )


def error_table(trees: Sequence[Tree], rng: np.random.Generator) -> Table:
    """Mean square error of the gradient by ratio, unclipped, medians over trees with an outcome reward each."""
    rewarded = [(tree, normalized_reward(tree, rng)) for tree in trees]
    rows: list[tuple[Cell, ...]] = []
    of_token: list[GradientError] = []
    for ratio, name in RATIOS.items():
        errors = [
            GradientError.of(tree, np.exp(tree.log_ratios(ratio)) * advantages, advantages)
            for tree, advantages in rewarded
        ]
        of_token = of_token or errors
        better = [error.better_from(token) for error, token in zip(errors, of_token, strict=True)]
        first = "" if errors is of_token else _trajectories(float(np.median(better)))
        rows.append((name, *_error_columns(errors), first))
    return Table(("ratio", *_ERROR_COLUMNS, "below token from"), tuple(rows))


def clipped_error_table(samples: Iterable[Sequence[Tree]], rng: np.random.Generator) -> Table:
    """Return the same of whole objectives, with their clips, for several samples of trees.

    rms d: root mean square of a token's log-ratio. cut: share of tokens that a bound acts on.
    """
    rows: list[tuple[Cell, ...]] = []
    for trees in samples:
        rewarded = [(tree, normalized_reward(tree, rng)) for tree in trees]
        squares = [(tree.probability @ tree.log_ratios("token") ** 2).mean() for tree in trees]
        spread = float(np.sqrt(np.median(squares)))
        for preset, name in OBJECTIVES.items():
            errors, shares = list[GradientError](), list[float]()
            for tree, advantages in rewarded:
                weights, cut = clipped_weights(tree, preset, advantages)
                errors.append(GradientError.of(tree, weights, advantages))
                shares.append(float((tree.probability @ cut).mean()))
            cosine = float(np.median([error.cosine for error in errors]))
            rows.append((spread, name, float(np.median(shares)), cosine, *_error_columns(errors)))
    return Table(("rms d", "objective", "cut", "cosine", *_ERROR_COLUMNS), tuple(rows))


_ERROR_COLUMNS = ("squared bias", "variance", *(f"error, {count:,} trajectories" for count in BATCHES))


def _error_columns(errors: Sequence[GradientError]) -> list[float]:
    columns = [(error.bias, error.variance, *(error.at(count) for count in BATCHES)) for error in errors]
    return [float(value) for value in np.median(columns, 0)]


def _trajectories(count: float) -> int | str:
    return math.ceil(count) if math.isfinite(count) else "never"


def turn_ratio_table(tasks: Sequence[TwoTurns]) -> Table:
    """Relative bias and trace variance by the ratio of a turn's reward, medians over the tasks."""

    def bias(weight: str, to_go: bool) -> float:
        return float(np.median([task.bias(weight, to_go=to_go) for task in tasks]))

    def variance(weight: str) -> float:
        return float(np.median([task.tree.trace_variance(task.weighted(weight, to_go=True)) for task in tasks]))

    return Table.of(
        {
            "ratio of a turn's reward": WEIGHTS.values(),
            "bias, own turn": [bias(weight, False) for weight in WEIGHTS],
            "bias, return to go": [bias(weight, True) for weight in WEIGHTS],
            "variance, return to go": [variance(weight) for weight in WEIGHTS],
        }
    )


def turn_baseline_table(tasks: Sequence[TwoTurns]) -> Table:
    """Bias, hidden bonus and trace variance by baseline, medians over the tasks; samples of the target policy."""
    rows = []
    for baseline, name in BASELINES.items():
        numbers = []
        for task in tasks:
            tree, advantages = task.tree, task.with_baseline(baseline)
            true = tree.true_gradient(task.of_tokens(task.returns))
            bias = relative_bias(tree.true_gradient(advantages), true)
            numbers.append((bias, task.bonus(advantages), tree.trace_variance(advantages, of_target=True)))
        rows.append((name, *np.median(numbers, 0).tolist()))
    return Table(("baseline", "bias", "bonus of a further turn", "variance"), tuple(rows))


def spread_table(walks: Walks, sigma: float) -> Table:
    """Return the sqrt(t) law, and the drift."""
    chosen = np.searchsorted(CURVE, SHOWN)
    t, normal, tokens = CURVE[chosen], walks[NO_DRIFT][0][:, chosen], walks[TOKENS][0][:, chosen]
    std = tokens.std(0, ddof=1)
    return Table.of(
        {
            "t": t,
            "sigma sqrt(t)": sigma * np.sqrt(t),
            "std, normal": normal.std(0, ddof=1),
            "std, tokens": std,
            "its error": std / np.sqrt(2 * len(tokens)),
            "-t sigma^2/2": drift(t, sigma),
            "mean, tokens": tokens.mean(0),
            "error of the mean": std / np.sqrt(len(tokens)),
        }
    )


def clip_table(walks: Walks, positive: BoolArray, sigma: float) -> Table:
    """Clip rates of both windows at the positions of `CURVE`. positive: whether A > 0, `[samples]`."""
    rows: list[tuple[Cell, ...]] = []
    for window in windows():
        for kind, (walk, mean) in walks.items():
            formula = clip_rate(window, CURVE, sigma * np.sqrt(CURVE), mean)
            columns = (CURVE, formula, *clipped_share(window, CURVE, walk, positive))
            rows += [(window.name, kind, *cells) for cells in zip(*(c.tolist() for c in columns), strict=True)]
    return Table(("window", "increments", "t", "formula", "simulated", "its error"), tuple(rows))


def reach_table(sigma: float) -> Table:
    """Return the position at which the drift alone is at the lower bound of each window."""
    reached = [round(window.reached_by_drift(sigma)) for window in windows()]
    return Table.of({"window": [window.name for window in windows()], "reached by the drift at token": reached})


def correlated_table(rng: np.random.Generator, samples: int, sigma: float) -> Table:
    """Increments that are not independent: what Var(S_t) = t sigma^2 leaves out."""
    t, (widening, _) = np.array(SHOWN), windows()
    positive = rng.random(samples) < 0.5
    rows: list[tuple[Cell, ...]] = []
    for name, increments in (("AR(1)", Autoregressive(sigma)), ("own sigma", UnequalTrajectories(sigma))):
        walk, alone = increments.sample(rng, samples, t), increments.variances(t)
        squares = (walk - walk.mean(0)) ** 2
        columns = [
            t,
            alone,
            increments.covariances(t),
            squares.mean(0) - alone,
            squares.std(0, ddof=1) / np.sqrt(samples),
            *clipped_share(widening, t, walk, positive),
        ]
        rows += [(name, *cells) for cells in zip(*(column.tolist() for column in columns), strict=True)]
    header = ("increments", "t", "sum Var(d)", "2 sum Cov", "simulated", "error", "clip rate", "error of the rate")
    return Table(header, tuple(rows))


@dataclass(frozen=True, repr=False)
class Figure:
    """A Vega-Lite specification with its data. Jupyter shows it as SVG; as text it is the caption and the points."""

    spec: Spec

    def __repr__(self) -> str:
        lines = [str(self.spec["description"])]
        series: dict[str, list[str]] = {}
        for row in self.spec["data"]["values"]:
            series.setdefault(row.get("member", row["series"]), []).append(f"{row['x']:g} {_shown(row['y'])}")
        lines += [f"{name}: {', '.join(pairs)}" for name, pairs in series.items()]
        return "\n".join(lines)

    def _repr_svg_(self) -> str:
        """Twice the size of a figure in a column of a paper."""
        import vl_convert

        svg = vl_convert.vegalite_to_svg(self.spec)
        return re.sub(r'(width|height)="(\d+)"', lambda size: f'{size[1]}="{2 * int(size[2])}"', svg, count=2)


def position_figure(table: Table, names: Sequence[str], y: str, caption: str, *, log: bool = False) -> Figure:
    """Columns of a table over its column t."""
    t = [float(cell) for cell in table.column("t")]
    series = [
        Curve(
            name,
            t,
            [float(cell) for cell in table.column(name)],
            COLOURS[name],
            DASHED if name == "sequence" else SOLID,
        )
        for name in names
    ]
    axis = Axis(y, log=log, low=None if log else 0)
    return Figure(for_file(Chart("", "", caption, curves(series, Axis("position t", whole=True), axis))))


def clip_figure(table: Table, window: str) -> Figure:
    """Formulas as lines, walks as points."""
    formulas, walks = [], []
    for kind, colour in KINDS.items():
        rows = table.only("window", [window]).only("increments", [kind])
        t, formula, simulated = (list(map(float, rows.column(name))) for name in ("t", "formula", "simulated"))
        walks.append(Curve(kind, t, simulated, colour))
        if kind != TOKENS:  # the line of the drift is theirs as well
            formulas.append(Curve(f"{kind}, line", t, formula, colour, of=kind))
    caption = f"Share of tokens that the {window} window cuts: lines by formula, points counted over simulated walks."
    spec = curves([*walks, *formulas], Axis("position t", log=True), Axis("clip rate", low=0), joined=False)
    return Figure(for_file(Chart("", "", caption, spec)))
