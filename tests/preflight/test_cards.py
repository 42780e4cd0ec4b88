"""The card that a dry run plans with."""

from __future__ import annotations

import pytest

from ctpo_megatron import cli
from tests.support.prefork import ROOT


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkout as current folder, and no ranks."""
    monkeypatch.chdir(ROOT)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("words", [["--gpu", "l4"], ["--gpu-gib", "90"], ["--cuda"]])
def test_a_named_card_is_planned_as_cuda(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "configs/qwen3_0_6b_one_gpu.yaml", "--dry-run"]
    assert cli.main([*arguments, "--shapes", "configs/models/qwen3_0_6b.json", *words]) == 0
    out = capsys.readouterr().out
    assert "Memory of each GPU on CUDA" in out and "on a CPU" not in out


@pytest.mark.parametrize(("card", "size"), [(["--gpu", "l4"], "22.5"), (["--gpu", "h200", "--gpu-gib", "20"], "20")])
def test_memory_is_that_of_the_card(card: list[str], size: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "configs/qwen3_1_7b_one_gpu.yaml", "--dry-run", *card]
    assert cli.main([*arguments, "--shapes", "configs/models/qwen3_1_7b.json"]) == 2
    assert f" of {size} GiB " in capsys.readouterr().err
