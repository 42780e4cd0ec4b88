"""README's two configurations are complete, and fit on the GPUs that it names. It stays one screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ctpo_megatron.cli import main

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize(
    ("block", "gib", "shapes", "ranks", "gpus"),
    [(0, 24, "qwen3_0_6b", 1, 1), (1, 80, "qwen3_4b", 4, 8)],
    ids=["one GPU", "one node"],
)
def test_a_configuration_of_the_page_fits(
    block: int,
    gib: int,
    shapes: str,
    ranks: int,
    gpus: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "my.yaml").write_text(BLOCKS[block], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(ranks))
    sizes = str(ROOT / "configs" / "models" / f"{shapes}.json")
    words = ["train", "my.yaml", "--dry-run", "-v", "--cuda", "--gpu-gib", str(gib), "--shapes", sizes]
    assert main(words) == 0
    shown = capsys.readouterr().out
    named = re.findall(r"^  GPUs? (\d+)(?: to (\d+))?", shown, re.MULTILINE)
    assert named and {int(number) for row in named for number in row if number} <= set(range(gpus))


def test_it_is_one_screen() -> None:
    assert len(TEXT.split()) <= 700
    assert not re.search(r"^\|(?:[^|\n]*\|){4,}$", TEXT, re.MULTILINE)  # wide tables do not fit a phone
    status = TEXT[: TEXT.index("## Try it")]
    assert "Parts of it have been run on an H200 and an H100" in status
    assert "several GPUs were compiled and rehearsed, never executed" in status
