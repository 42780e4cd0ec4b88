"""A disk that is full while a run writes: each file is written once there is room, or the error names it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ctpo_megatron.base import files
from ctpo_megatron.tracking import DumpWriter, MetricsWriter, PositionsWriter, TrainLog
from tests.support.deadlines import scaled
from tests.support.small_disk import SmallDisk, small_disk

LONG = {f"group/name_{number}": float(number) for number in range(200)}


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    monkeypatch.setattr(files, "FULL_PAUSE_S", 0.05)
    with small_disk(tmp_path / "disk") as disk:
        yield disk


def metrics(folder: Path) -> Callable[[int], None]:
    writer = MetricsWriter(folder)
    return lambda step: writer.log(step, LONG)


def same_line(folder: Path) -> Callable[[int], None]:
    writer = MetricsWriter(folder)
    writer.log(0, LONG)
    return lambda step: writer.log(0, LONG | {f"more/name_{number}": float(step) for number in range(200)})


def positions(folder: Path) -> Callable[[int], None]:
    writer = PositionsWriter(folder)
    return lambda step: writer.log(step, {"all": LONG})


def settings(folder: Path) -> Callable[[int], None]:
    return lambda step: files.write_json(folder / "environment.json", {"step": step, **LONG}) and None


WRITES = {
    "metrics.jsonl": metrics,
    "the same line": same_line,
    "positions.jsonl": positions,
    "environment.json": settings,
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_waits_for_room_and_says_so_once(name: str, disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    write = WRITES[name](disk.path)
    if name != "the same line":
        write(1)
    disk.fill()
    waiting = threading.Thread(target=write, args=(2,))
    waiting.start()
    time.sleep(0.5)
    assert waiting.is_alive()
    disk.free()
    waiting.join(scaled(30))
    assert not waiting.is_alive()
    [said] = [record.getMessage() for record in caplog.records]
    assert "No space left on device" in said and "it is tried again for 300 s; free space there" in said
    [file] = disk.path.iterdir()
    assert file.name == (name if "." in name else "metrics.jsonl") and str(file) in said
    if file.suffix == ".jsonl":
        steps = [json.loads(line)["step"] for line in file.read_text().splitlines()]
        assert steps == ([0] if name == "the same line" else [1, 2])
    else:
        assert json.loads(file.read_text())["step"] == 2


@pytest.mark.parametrize("name", WRITES)
def test_a_disk_that_stays_full_is_an_error_that_names_the_file(
    name: str, disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FULL_S", 0.3)
    write = WRITES[name](disk.path)
    if name != "the same line":
        write(1)
    disk.fill()
    with pytest.raises(OSError, match=r"No space left on device: '\S+\.jsonl?'"):
        write(2)
    for file in disk.path.glob("*.jsonl"):
        assert [json.loads(line)["step"] for line in file.read_text().splitlines()] in ([1], [])  # whole lines


def test_a_dump_waits_in_its_thread(disk: SmallDisk) -> None:
    def write() -> Path:
        with files.aside(disk.path / "step_000001.parquet") as written:
            written.write_bytes(bytes(100_000))
        return disk.path

    disk.fill()
    dumps = DumpWriter()
    dumps.put("the dump of step 1", write)
    time.sleep(0.3)
    disk.free()
    dumps.flush()
    assert dumps.take_failures() == 0 and (disk.path / "step_000001.parquet").stat().st_size == 100_000


def test_a_log_that_cannot_be_written_says_so_once(disk: SmallDisk, capfd: pytest.CaptureFixture[str]) -> None:
    screen = logging.StreamHandler()
    logging.getLogger("ctpo_megatron").addHandler(screen)
    try:
        with TrainLog(disk.path) as log:
            disk.fill()
            for number in range(200):
                log.shown(f"[rl] step {number}" + "." * 200)
    finally:
        logging.getLogger("ctpo_megatron").removeHandler(screen)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("warning: lines of ") and said[0].endswith("No space left on device")


def test_the_first_error_is_not_hidden_by_files_that_are_closed(
    disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FULL_S", 0.0)
    with pytest.raises(ValueError, match="the first"), MetricsWriter(disk.path) as writer, TrainLog(disk.path):
        disk.fill()
        writer._file.write("x" * 100)
        raise ValueError("the first")
