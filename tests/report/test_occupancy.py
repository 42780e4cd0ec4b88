"""What engines had in flight: written when it changes, read as means over time, drawn in the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.engines.stats import Occupancy
from ctpo_megatron.report.panels import panels
from ctpo_megatron.report.run_data import RunData, engine_occupancy


def test_what_changes_soon_is_written_once_and_an_idle_engine_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    occupancy, before = Occupancy(tmp_path / "rows.csv"), 0
    for now, load in ((1000.0, 3), (1000.1, 4), (1000.2, 0), (1000.21, 0), (1001.0, 2), (1005.0, 2), (1012.0, 2)):  # noqa: B007
        occupancy.add(0, load - before)
        occupancy.note(1)
        before = load
    assert (tmp_path / "rows.csv").read_text().split() == ["1000.00,3", "1000.20,0", "1001.00,2", "1012.00,2"]


def write(run: Path, text: str) -> None:
    path = RunPaths(run).logs.occupancy
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def test_points_are_means_over_time(tmp_path: Path) -> None:
    assert engine_occupancy(tmp_path) == {}
    write(tmp_path, "50.00,9\n100.00,4,0\n110.00,0,2\n120.00,0,0\n1320.00,4,4\n1340.00,0,0\n1350")  # resumed, cut off
    found = engine_occupancy(tmp_path)
    assert found[0][0] == found[1][0] and found[0][0][0] > 0 and found[0][0][-1] < 1240 / 60
    width_s = 1240 / len(found[0][0])
    assert [sum(groups) * width_s for _, groups in found.values()] == pytest.approx([40 + 80, 20 + 80])
    assert max(found[0][1]) == pytest.approx(4) and min(found[0][1]) == 0
    write(tmp_path, "100.00,4\n2000.00,0\n")  # killed, and resumed later
    [(_, groups)] = engine_occupancy(tmp_path).values()
    assert sum(groups) * 1900 / len(groups) == pytest.approx(120)


@pytest.mark.filterwarnings("error")
def test_rows_of_one_moment_and_of_a_clock_that_was_set_back(tmp_path: Path) -> None:
    write(tmp_path, "100.00,4\n100.00,0\n")
    assert engine_occupancy(tmp_path) == {}
    write(tmp_path, "100.00,4\n140.00,2\n90.00,4\n150.00,0\n")
    [(minutes, groups)] = engine_occupancy(tmp_path).values()
    assert minutes == sorted(minutes) and sum(groups) * 50 / len(groups) == pytest.approx(4 * 30 + 4 * 10)


def test_the_report_draws_it(demo_run: Path, tmp_path: Path) -> None:
    run = RunData.load(demo_run)
    assert not [panel for panel in panels(run) if panel.name == "occupancy"]  # a synthetic run has no engines
    (tmp_path / "config.yaml").write_text("{}")
    write(tmp_path, "100.00,4,0\n110.00,0,2\n120.00,0,0\n")
    [panel] = [panel for panel in panels(RunData.load(tmp_path)) if panel.name == "occupancy"]
    assert [line.label for line in panel.lines] == ["engine 0", "engine 1"] and panel.has_data(RunData.load(tmp_path))


def test_rows_that_cannot_be_written_end_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "logs").touch()  # no folder
    occupancy = Occupancy(tmp_path / "logs" / "rows.csv")
    occupancy.add(0, 1)
    occupancy.note(1)
    occupancy.add(0, -1)
    occupancy.note(1)
    assert caplog.text.count("cannot be written, the report will lack it") == 1
