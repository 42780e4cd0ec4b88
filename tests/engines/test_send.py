"""Weights of which nothing is kept are sent once more to engines that were replaced meanwhile; then the run ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ctpo_megatron.base.stop import BEGUN, TRY_AGAIN
from ctpo_megatron.cli.errors import report_error
from ctpo_megatron.engines import EngineError, EnginePool


@dataclass
class Pool:
    """`finish_update` and `update` of a pool without engines. reached: whether each update reached all, in order."""

    reached: list[bool]
    kept: bool = False
    calls: list[str] = field(default_factory=list)

    def send(self, version: int) -> None:
        self.calls.clear()
        trainer = SimpleNamespace(
            offer=lambda version: SimpleNamespace(kept=self.kept), transfer=lambda: self.calls.append("transfer")
        )
        EnginePool.send(cast(EnginePool, self), cast(Any, trainer), version)

    def update(self, offer: Any) -> None:
        self.calls.append("update")

    def finish_update(self) -> bool:
        return bool(self.calls) and self.reached.pop(0)


def test_an_offer_that_is_kept_is_sent_once() -> None:
    pool = Pool([], kept=True)
    pool.send(3)
    assert pool.calls == ["update", "transfer"]


def test_engines_that_were_replaced_get_it_again() -> None:
    pool = Pool([False, True])
    pool.send(3)
    assert pool.calls == ["update", "transfer"] * 2


def test_a_run_whose_engines_never_get_it_may_be_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        EngineError, match="weights 3 did not reach all engines in 2 attempts; see their logs"
    ) as failed:
        Pool([False, False]).send(3)
    failed.value.add_note(f"{BEGUN} 2")
    assert report_error(failed.value, "train") == TRY_AGAIN
    assert capsys.readouterr().err.splitlines()[0] == f"ctpo: {failed.value}"
