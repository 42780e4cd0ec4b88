"""One recording under three layouts: the same weights give the same log-probs. Also what torchrun starts for it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import RECORDED
from tests.end_to_end.small_run import Ctpo
from tests.support import children

FOLDER = "CTPO_TEST_OLD_LOG_PROBS"
LAYOUTS = {
    "one": (),
    "data": ("policy.data_parallel_size=2",),
    "tensor": ("policy.tensor_model_parallel_size=2",),
}


def main() -> int:
    """`ctpo train`; every rank leaves the old log-probs of its rows, token by token, by place in the step."""
    from ctpo_megatron import cli
    from ctpo_megatron.policy import MiniBatch, Trainer

    distribute = Trainer.distribute

    def distributed(trainer: Trainer, *batch: Any, **options: Any) -> list[MiniBatch]:
        mini_batches = distribute(trainer, *batch, **options)
        trainer.compute_old_log_probs(mini_batches)  # in `train` those of the first update come with its gradient
        found = {
            f"{number} {key}": micro.old_log_probs[place].tolist()
            for number, mini_batch in enumerate(mini_batches)
            for micro in mini_batch.micro_batches
            for key, place in micro.places()
            if micro.old_log_probs is not None
        }
        Path(os.environ[FOLDER], f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
        return mini_batches

    Trainer.distribute = distributed  # type: ignore[method-assign]
    return cli.main(["train", *sys.argv[1:]])


def old_log_probs(ctpo: Ctpo, recorded: Path, layout: str) -> dict[str, list[float]]:
    """Of the first step, from all ranks, with the weights that the recording ended with."""
    folder = ctpo.directory / f"old_log_probs_{layout}"
    folder.mkdir()
    run = ("run.steps=1", "sft=null", f"model.path={recorded / 'model'}", f"run.name=layout_{layout}")
    settings = (*RECORDED, f"rollout.replay={recorded}", *run, *LAYOUTS[layout])
    command = ctpo.command(*settings, ranks=2 if LAYOUTS[layout] else 1)
    command[command.index("ctpo_megatron.train")] = "tests.cluster.test_first_step"
    done = children.run(
        command, directory=ctpo.directory, environment=ctpo.environment | {FOLDER: str(folder)}, deadline_s=200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {key: row for file in sorted(folder.iterdir()) for key, row in json.loads(file.read_text()).items()}


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_log_probs_of_the_first_step_are_those_of_one_rank(ctpo: Ctpo, recorded: Path) -> None:
    one = old_log_probs(ctpo, recorded, "one")
    assert len(one) == 16 and all(min(row) < -1e-3 for row in one.values())
    for layout in ("data", "tensor"):
        other = old_log_probs(ctpo, recorded, layout)
        assert other.keys() == one.keys()
        largest = max(abs(a - b) for key in one for a, b in zip(one[key], other[key], strict=True))
        print(f"{layout}: log-probs within {largest:.1e} nats of one rank's")
        assert largest <= 1e-5


if __name__ == "__main__":
    sys.exit(main())
