"""The page of several runs: groups, one chart a metric, small enough to send around."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.cli import main
from ctpo_megatron.report import Comparison, write_comparison
from ctpo_megatron.run import open_run_directory
from ctpo_megatron.tracking import MetricsWriter
from tests.tracking.synthetic_run import make_config, step_metrics

PRESETS = ("ctpo", "grpo", "gspo")


def write_runs(root: Path, steps: int, seeds: int = 3, only: str = "") -> list[Path]:
    """Run directories of three objectives with some seeds each. only: how the names of their metrics begin."""
    found = []
    for number, preset in enumerate(PRESETS):
        for seed in range(seeds):
            config = make_config(root, f"{preset}-{seed}", run={"seed": seed}, objective={"preset": preset})
            run_dir, rng = open_run_directory(config), random.Random(10 * number + seed)
            with MetricsWriter(run_dir) as writer:
                for step in range(1, steps + 1):
                    metrics = step_metrics(rng, step, steps) | {"val/toolmath/acc/mean@1": rng.random()}
                    writer.log(step, {name: value for name, value in metrics.items() if name.startswith(only)})
            found.append(run_dir)
    return found


def data_of(page: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(re.search(r'id="chart-data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    return found["charts"]


@pytest.fixture(scope="module")
def nine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of nine runs of 300 steps."""
    folder = tmp_path_factory.mktemp("nine")
    return write_comparison(Comparison.load(write_runs(folder, steps=300)), folder / "page" / "comparison.html")


def test_groups_have_a_colour_and_each_metric_a_chart(nine: Path) -> None:
    page = nine.read_text(encoding="utf-8")
    assert nine.stat().st_size <= 2_000_000 and page.count('id="vega"') == 1
    charts = data_of(page)
    assert {"reward", "accuracy", "tool", "clip", "is_ratio", "time", "memory"} <= charts.keys()
    for chart in charts.values():
        assert chart["encoding"]["color"]["scale"]["domain"] == [*PRESETS]
    assert "objectives with different ratios" in charts["is_ratio"]["description"]
    assert charts["time"]["description"].endswith("Drawn: time/step.")
    assert "objective.preset" in page and 'id="trajectories"' not in page and 'id="health"' not in page


def test_a_chart_has_means_bands_and_each_run(tmp_path: Path) -> None:
    path = write_comparison(Comparison.load(write_runs(tmp_path, steps=4)), tmp_path / "comparison.html")
    found = data_of(path.read_text(encoding="utf-8"))["reward"]["data"]["values"]
    means, runs = ([each for each in found if bool(each["member"]) is of_run] for of_run in (False, True))
    assert [each["series"] for each in means] == [*PRESETS] and all(len(each["x"]) == 4 for each in found)
    for mean in means:
        assert all(low <= y <= high for low, y, high in zip(mean["low"], mean["y"], mean["high"], strict=True))
    assert [each["member"] for each in runs][:4] == ["ctpo-0", "ctpo-1", "ctpo-2", "grpo-0"] and len(runs) == 9


def test_one_run_has_the_page_of_its_report(tmp_path: Path) -> None:
    (run_dir, *_) = write_runs(tmp_path, steps=2, seeds=1)
    path = write_comparison(Comparison.load([run_dir, run_dir]), tmp_path / "comparison.html")
    page = path.read_text(encoding="utf-8")
    assert 'id="health"' in page and 'id="runs"' not in page


def test_the_verb_writes_page_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(path) for path in write_runs(tmp_path, steps=2, seeds=1, only="reward/")]
    out, figures = tmp_path / "new" / "page.html", tmp_path / "figures"
    assert main(["compare", *runs, "--out", str(out), "--figures", str(figures)]) == 0
    printed = capsys.readouterr().out
    assert f"\nThe page with curves and settings: {out}\n" in printed and "Only one seed" in printed
    assert out.stat().st_size > 100_000
    kinds = {path.suffix for path in figures.iterdir()}
    assert kinds == {".png", ".svg", ".pdf"} and (figures / "figure2_reward.pdf").is_file()
    assert f"{len(list(figures.iterdir()))} files in" in printed
