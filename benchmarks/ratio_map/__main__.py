"""`python -m benchmarks.ratio_map`: measures the cells of the map that have no result yet, and writes docs/map.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from benchmarks.ratio_map import archive, lab, page, picture, runs
from benchmarks.ratio_map.cells import RATES, SEEDS, TASKS, Cell, cells


def main(argv: Sequence[str] | None = None) -> int:
    """Do what is asked for; returns 1 where a run failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ratio_map", description=__doc__)
    parser.add_argument("--cells", nargs="+", default=[], metavar="PART", help="part of TASK/REGIME/OBJECTIVE")
    parser.add_argument("--folder", type=Path, default=runs.ROOT / "runs" / "ratio_map", help="of all runs")
    parser.add_argument("--results", type=Path, default=runs.RESULTS, help="where results are stored")
    parser.add_argument("--set", nargs="+", default=[], metavar="a.b=c", help="settings of all runs, for a try")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="N", help="for a try")
    parser.add_argument("--rates", nargs="+", default=RATES, metavar="LR", help="for a try; one alone is not tuned")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--estimate", action="store_true", help="print runs and hours, start nothing")
    what.add_argument("--predict", action="store_true", help="store the laboratory's predictions of all cells")
    what.add_argument("--page", action="store_true", help="write docs/map.md and its picture from what is stored")
    what.add_argument("--store-start", action="store_true", help="store start models and recordings beside the results")
    options = parser.parse_args(argv)
    tried = options.set or tuple(options.seeds) != SEEDS or tuple(options.rates) != RATES
    if tried and options.results == runs.RESULTS:
        parser.error("--set, --seeds and --rates change what a cell is: store its results elsewhere, by --results")
    try:
        chosen = [*cells(options.cells)]
    except ValueError as error:
        parser.error(str(error))
    if options.estimate:
        count, hours = runs.cost(chosen, options.results)
        print(f"{len(chosen)} cells: {count} runs to make, about {hours:.1f} hours on two cores")
        return 0
    if options.store_start:
        for task in TASKS:
            if (options.folder / task.name / archive.MODEL).exists():
                recordings = frozenset(SEEDS if task is TASKS[0] else ())  # those of one task suffice to measure again
                archive.pack(options.folder / task.name, runs.archive_of(task), recordings, runs.ROOT)
        return 0
    if options.predict:
        predict(options.results)
    elif not options.page:
        starts = None if options.set else runs.RESULTS
        where = options.folder.resolve(), options.results.resolve(), starts
        measuring = runs.Measuring(*where, tuple(options.set), options.seeds, options.rates)
        if failed := runs.measure_missing(measuring, chosen):
            print(f"{len(failed)} cells failed; the same command tries them again", file=sys.stderr)
            return 1
    if options.results == runs.RESULTS:
        page.FILE.write_text(page.text(options.results), encoding="utf-8")
        stored = page.Stored.load(options.results)
        if stored.results:
            picture.FILE.write_text(picture.draw(stored), encoding="utf-8")
    return 0


def predict(results: Path) -> None:
    """Store what the laboratory predicts of each cell."""
    results.mkdir(parents=True, exist_ok=True)
    predictions = {cell.name: _predicted(cell) for cell in cells()}
    runs.write(
        results / runs.PREDICTIONS_FILE,
        {"commit": runs.commit(), "date": str(date.today()), "cells": predictions},
    )


def _predicted(cell: Cell) -> dict[str, object]:
    found = lab.predict(cell)
    print(f"{cell.name}: {found['values']} at {found['rate']}", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
