"""`ctpo verify`: one optimizer step under many layouts against a float64 oracle, one line per layout."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ctpo_megatron.cli.errors import UsageError
from ctpo_megatron.config import Extension, load_family
from ctpo_megatron.models import ModelFamily
from ctpo_megatron.plan import ELEMENT_BYTES
from ctpo_sandbox.arguments import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run one optimizer step under many layouts and compare loss, log-probs and the full gradient."
    parser.add_argument("--model", type=Path, help="Hugging Face directory, small; default: a tiny random model")
    parser.add_argument("--family", metavar="MODULE:NAME", help="model family of your own, found from this folder")
    parser.add_argument("--layouts", nargs="+", metavar="NAME", help="default: all that --max-ranks allows")
    parser.add_argument("--objective", nargs="+", default=["ctpo"], metavar="NAME", help="presets, or: all")
    parser.add_argument(
        "--max-ranks", type=positive(int), metavar="N", help="default: GPU count; without GPUs max(4, cores)"
    )
    parser.add_argument(
        "--dtype", choices=ELEMENT_BYTES, default="float32", help="policy.dtype; the oracle has the weights as stored"
    )
    parser.add_argument(
        "--tolerance", type=positive(float), help="of loss, log-probs (nats) and gradient; default: of the dtype"
    )


def run(args: argparse.Namespace) -> int:
    """Check every layout and objective, and an engine's weights; returns 1 if one failed or exceeds the tolerance."""
    from ctpo_megatron.verify import OBJECTIVES, TOLERANCE, read_back, verify

    objectives = list(OBJECTIVES) if args.objective == ["all"] else args.objective
    _refuse_unknown("preset", objectives, OBJECTIVES)
    family = load_family(Extension(name=args.family), [str(Path.cwd())]) if args.family else None
    layouts, skipped = _choose_layouts(args.model, family, args.layouts, args.max_ranks)
    for reason in dict.fromkeys(skipped.values()):
        print(f"skipped: {', '.join(name for name in skipped if skipped[name] == reason)}: {reason}")
    print(f"{'layout':<25}{'objective':<21}{'ranks':>5}{'loss':>10}{'log_probs':>10}{'gradient':>10}  worst tensor")
    failed = total = 0
    tolerance = TOLERANCE[args.dtype] if args.tolerance is None else args.tolerance
    for check in verify(args.model, layouts, objectives, family, args.dtype):
        good = check.passed(tolerance)
        failed, total = failed + (not good), total + 1
        print(check.row() + ("" if good else "  FAILED"), *check.problem.splitlines(), sep="\n    ", flush=True)
    print(f"{total - failed} of {total} within {tolerance:g} of the float64 oracle")
    for what, problem in () if args.layouts or args.model else read_back():
        print(f"{what}: {problem or 'read back as they were sent'}" + ("  FAILED" if problem else ""), flush=True)
        failed += bool(problem)
    return 1 if failed else 0


def _choose_layouts(
    model: Path | None, family: ModelFamily | None, named: Sequence[str] | None, limit: int | None
) -> tuple[list[str], dict[str, str]]:
    """Layouts to check, and skipped ones with the reason. Named layouts must all fit the model."""
    from ctpo_megatron.policy import max_ranks
    from ctpo_megatron.verify import LAYOUTS, unsupported_layouts

    _refuse_unknown("layout", named or (), LAYOUTS)
    unfit = unsupported_layouts(model, family)
    if named:
        if wrong := [f"{name} cannot run {model}: {unfit[name]}" for name in named if name in unfit]:
            raise UsageError("\nctpo verify: ".join(wrong))
        return list(named), {}
    limit = max_ranks() if limit is None else limit
    skipped = {name: f"more than {limit} ranks" for name, layout in LAYOUTS.items() if layout.ranks > limit} | unfit
    layouts = [name for name in LAYOUTS if name not in skipped]
    if not layouts:
        raise UsageError(f"--max-ranks {limit} leaves nothing to check; raise it")
    return layouts, skipped


def _refuse_unknown(kind: str, names: Collection[str], known: Mapping[str, object]) -> None:
    if unknown := sorted(set(names) - known.keys()):
        raise UsageError(f"unknown {kind} {', '.join(unknown)}; known: {', '.join(known)}")
