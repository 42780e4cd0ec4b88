"""What a layer launches and a batch copies on CUDA: the figures of docs/policy.md."""

from __future__ import annotations

from pathlib import Path

from tests.rehearsal import start
from tests.support import ranks

EXPECTED = {"forward": 20, "recompute": 20, "backward": 35, "copies": 1, "copies_of_pass": 3, "pageable": 0}


def test_launches_of_a_layer_and_copies_of_a_batch(tmp_path: Path) -> None:
    """Exactly: a change that needs more is a decision, one that needs fewer lowers the figures here and there."""
    (found,) = ranks.run(start.count_launches, "qwen3-tied", tmp_path, pretend_cuda=True)
    assert vars(found) == EXPECTED
