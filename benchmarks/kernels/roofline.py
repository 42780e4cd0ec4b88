"""A picture: what every side of the suites reached under the device's two ceilings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.kernels.measure import Session

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"


def draw(session: Session, file: Path, title: str) -> str:
    """Write a PNG; returns "" or the reason why there is none (vl-convert-python is not installed).

    Memory-bound suites (A, B) stand left as bandwidth, the head (C) right as matrix operations a second.
    """
    try:
        import vl_convert
    except ImportError as error:
        return str(error)
    panels = [
        _panel(
            "A, B: bandwidth", "GB/s", _rates(session, "bytes", ("A", "B")), session.ceilings["copy_bytes_per_s"], 1e9
        ),
        _panel(
            "C: matrix operations",
            "TFLOP/s",
            _rates(session, "flops", ("C",)),
            session.ceilings["matmul_flops_per_s"],
            1e12,
        ),
    ]
    specification = {"$schema": SCHEMA, "title": f"{title}; red: ceiling, same run", "hconcat": panels}
    file.write_bytes(vl_convert.vegalite_to_png(specification, ppi=120))
    return ""


def _panel(name: str, unit: str, found: list[tuple[str, float, bool]], ceiling: float, scale: float) -> dict[str, Any]:
    """Bars, in their order, and the ceiling."""
    rows = [{"side": label, "rate": rate / scale, "by": "ours" if ours else "other"} for label, rate, ours in found]
    colour = {"field": "by", "type": "nominal", "scale": {"domain": ["ours", "other"]}, "title": None}
    y = {"field": "side", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 600}}
    bar = {"mark": "bar", "encoding": {"y": y, "x": {"field": "rate", "type": "quantitative"}, "color": colour}}
    rule = {"mark": {"type": "rule", "color": "red"}, "encoding": {"x": {"datum": ceiling / scale, "title": unit}}}
    return {"title": name, "width": 420, "height": {"step": 14}, "data": {"values": rows}, "layer": [bar, rule]}


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
