"""Fleets that start badly, hang or lose their driver: every wait ends, says why, and leaves nothing running."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ctpo_megatron.base.event_loop import EventLoop
from ctpo_megatron.base.processes import wait_for
from ctpo_megatron.config.schema import Config
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.engines import EngineError, EnginePool
from ctpo_megatron.rollouts import GroupSampler
from tests.engines.pool_helpers import make_config, sampled
from tests.engines.tiny_model import CALL, build_tiny_model
from tests.support.deadlines import scaled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@contextlib.contextmanager
def pool(config: Config) -> Iterator[EnginePool]:
    with EventLoop() as loop, EnginePool(config, "unused", loop) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lifecycle") / "model"
    build_tiny_model(path, favour={CALL: 9.0, "<|im_end|>": 7.0})
    return path


def test_failed_and_late_starts_name_engine_and_log(model_path: Path, tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing")
    with pool(make_config(Path(missing), tmp_path)) as fleet:
        fleet.start()
        deadline = time.monotonic() + scaled(120)
        with pytest.raises(EngineError, match=r"rollout engine 0 did not start: .*log: .*rollout_engine_0\.log"):
            while time.monotonic() < deadline:  # as during the supervised stage
                fleet.check_start()
                time.sleep(0.2)
    small = {"max_model_len": 320, "max_num_seqs": 64, "dtype": "float32", "kv_cache_mb": 32}
    odd = make_config(model_path, tmp_path, engine=small | {"extra": {"max_num_batched_tokens": 63}})
    refused = r"did not start: ValueError: SchedulerConfig: Value error, max_num_batched_tokens \(63\) is .*; log: "
    with pool(odd) as fleet:
        fleet.start()
        with pytest.raises(EngineError, match=refused):
            fleet.wait_ready()
    late = make_config(model_path, tmp_path, start_timeout_s=7)
    with pool(late) as fleet:
        fleet.start()
        with pytest.raises(EngineError, match=r"within 7 s \(rollout\.start_timeout_s\); log: |Ray is not up in time"):
            fleet.wait_ready()


def test_an_engine_that_dies_while_it_loads_is_begun_again(
    model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pool(make_config(model_path, tmp_path)) as fleet:
        earlier = set(engines())
        fleet.start()
        kill_engine(earlier)
        fleet.wait_ready()
        prompt = Prompt("p", "test", (), "", tuple(range(40)))
        assert len(fleet.loop.call(sampled(GroupSampler(fleet, fleet.settings), [prompt], 0, 4))) == 1
    assert caplog.text.count("it is begun again") == 1


def engines() -> Iterator[psutil.Process]:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "RolloutEngine" in " ".join(process.cmdline()):
                yield process


def kill_engine(earlier: set[psutil.Process]) -> None:
    """As soon as there is one that is not of an earlier test's fleet, whose processes may still be ending."""
    deadline = time.monotonic() + scaled(120)
    while time.monotonic() < deadline:
        for process in engines():
            if process not in earlier:
                return process.kill()
        time.sleep(0.05)
    raise AssertionError("no engine process was begun")


def test_group_past_its_deadline_is_retried_then_quarantined(model_path: Path, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    limit = scaled(5)
    config = make_config(model_path, tmp_path, group_timeout_s=limit, max_group_retries=1)
    prompts = [Prompt(f"p{i}", "test", (), "", tuple(range(i, i + 40))) for i in range(4)]
    with pool(config) as fleet:
        fleet.start()
        fleet.wait_ready()
        flag.write_text("hang")
        sampler = GroupSampler(fleet, config.rollout)
        assert fleet.loop.call(sampled(sampler, prompts, 0, 4)) == []
        assert {record.prompt_id for record in sampler.quarantined} == {prompt.id for prompt in prompts}
        for record in sampler.quarantined:
            assert f"failed 2 times, the last: no result from rollout engine 0 within {limit:g} s" in record.cause
        assert "engine_restarts" not in fleet.stats()  # the engine itself answers
        flag.unlink()
        assert len(fleet.loop.call(sampled(GroupSampler(fleet, config.rollout), prompts, 0, 4))) == 4


DRIVER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from tests.engines.pool_helpers import make_config
from ctpo_megatron.base.event_loop import EventLoop
from ctpo_megatron.engines import EnginePool
path, root = Path(sys.argv[1]), Path(sys.argv[2])
fleet = EnginePool(make_config(path, root), "unused", EventLoop())
fleet.start()
fleet.wait_ready()
print("ready", flush=True)
if sys.argv[4] == "return":
    sys.exit(0)
time.sleep(300)
"""


@pytest.mark.parametrize("end", ["return", "SIGTERM", "SIGKILL"])
def test_nothing_outlives_the_driver(model_path: Path, tmp_path: Path, end: str) -> None:
    command = [sys.executable, "-c", DRIVER, str(model_path), str(tmp_path), str(Path(__file__).parents[2]), end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "ready\n"
            children = psutil.Process(driver.pid).children(recursive=True)
            names = {child.pid: " ".join(child.cmdline()) for child in children}
            if end != "return":
                driver.send_signal(getattr(signal, end))
            driver.wait(scaled(60))
        finally:
            driver.kill()
    engines = [child for child in children if "RolloutEngine" in names[child.pid]]
    if end != "return":
        assert len(engines) == 1, names
    assert not wait_for(engines, scaled(20))
    # Ray's own agents notice only after their calls to the dead raylet time out.
    assert not [names[child.pid] for child in wait_for(children, scaled(150))]
