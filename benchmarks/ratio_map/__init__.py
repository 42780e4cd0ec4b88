"""Which ratio wins where: six objectives in four regimes on two tasks, predicted by a laboratory and measured.

    python -m benchmarks.ratio_map --estimate              # runs and hours of all cells
    python -m benchmarks.ratio_map                         # measures what is missing; the same command continues
    python -m benchmarks.ratio_map --cells toolmath/frozen # some cells: parts of TASK/REGIME/OBJECTIVE
    python -m benchmarks.ratio_map --predict               # the laboratory alone, a second a cell
    python -m benchmarks.ratio_map --store-start           # what the runs of a task begin with, for other machines
    python -m benchmarks.ratio_map --page                  # docs/map.md and its picture from what is stored

`cells.py` says what a cell is, `lab.py` predicts it, `runs.py` measures it, `page.py` and `picture.py` show it.
Results, start models and recordings are in benchmarks/results/ratio_map; `archive.py` packs the last two.
"""
