"""A picture: what every side of the suites reached under the device's two ceilings."""

from __future__ import annotations

from pathlib import Path

from benchmarks.kernels.measure import Session


def draw(session: Session, file: Path, title: str) -> str:
    """Write a PNG; returns "" or the reason why there is none (matplotlib is not installed).

    Memory-bound suites (A, B) stand left as bandwidth, the head (C) right as matrix operations a second.
    """
    try:
        import matplotlib
    except ImportError as error:
        return str(error)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = (
        ("A, B: bandwidth", "GB/s", "bytes", "copy_bytes_per_s", 1e9, ("A", "B")),
        ("C: matrix operations", "TFLOP/s", "flops", "matmul_flops_per_s", 1e12, ("C",)),
    )
    rows = {suites: _rates(session, quantity, suites) for _, _, quantity, _, _, suites in groups}
    tallest = max(1, *(len(found) for found in rows.values()))
    figure, axes = pyplot.subplots(1, 2, figsize=(18, 1.5 + 0.2 * tallest))
    for axis, (name, unit, _, ceiling, scale, suites) in zip(axes, groups, strict=True):
        found = rows[suites]
        colours = ["tab:blue" if ours else "tab:gray" for _, _, ours in found]
        axis.barh([label for label, _, _ in found], [rate / scale for _, rate, _ in found], color=colours)
        axis.axvline(session.ceilings[ceiling] / scale, color="tab:red", label="ceiling, same run")
        axis.invert_yaxis()
        axis.tick_params(axis="y", labelsize=7)
        axis.set(title=name, xlabel=unit)
        axis.legend(loc="lower right")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return ""


def _rates(session: Session, quantity: str, suites: tuple[str, ...]) -> list[tuple[str, float, bool]]:
    return [
        (
            f"{record['case']}: {record['side']}",
            record[quantity] / record.get("graph_s", record["seconds"]),
            record["ours"],
        )
        for record in session.records
        if record["suite"] in suites and record.get(quantity) and record.get("seconds")
    ]
