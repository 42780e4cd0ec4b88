"""What the benchmarks of whole training steps measure; the runs themselves take minutes and are not made."""

from __future__ import annotations

import ast
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from benchmarks import overlap
from benchmarks.measured import Moment, Observed, between, quiet
from benchmarks.slow_tool import LONGEST_S, SHORTEST_S, latency_s
from benchmarks.trl_sizes import SIZES, Way, our_settings, trl_options
from ctpo_megatron.config import load_config
from tests.support import children
from tests.support.prefork import ROOT

pytestmark = pytest.mark.slow  # benchmarks are run by hand: weekly is often enough
CLIENT = "import sys, ctpo_sandbox.client; print(*[m.__file__ for n, m in sys.modules.items() if 'ctpo_sandbox' in n])"
WATCHING = """
import json, sys
from pathlib import Path
from benchmarks import measured
measured.adopt_orphans()
folder = Path(sys.argv[1])
try:
    seen = measured.watch(
        [sys.executable, "-c", sys.argv[2], str(folder / "marks")],
        folder / "marks", folder / "log", environment={"WHO": "me"}, deadline_s=60,
    )
except RuntimeError as error:
    sys.exit(str(error))
measured.end_all()
print(json.dumps([[[moment.step, sum(moment.cpu.values())] for moment in seen.moments], seen.peak_mib, seen.lines]))
"""
TRAINING = """
import json, os, subprocess, sys, time
def work(seconds):
    while time.process_time() < seconds: pass
def mark(step):
    with open(sys.argv[1], "a") as file: file.write(json.dumps({"step": step, "who": os.environ["WHO"]}) + chr(10))
burn = "import time" + chr(10) + "while time.process_time() < 0.4: pass"
mark(0)
time.sleep(0.2)
subprocess.run([sys.executable, "-c", burn + chr(10) + "import sys; 'ctpo_sandbox'"])
if not os.fork():  # its parent ends at once: an orphan
    if not os.fork():
        work(0.4); open(sys.argv[1] + ".done", "w"); time.sleep(0.3)
    os._exit(0)
os.wait()
work(time.process_time() + 0.2)
while not os.path.exists(sys.argv[1] + ".done"): time.sleep(0.02)
mark(1)
"""


def watch(folder: Path, program: str) -> Any:
    command = [sys.executable, "-c", WATCHING, str(folder), textwrap.dedent(program)]
    return children.run(command, directory=ROOT, environment={"PYTHONPATH": str(ROOT)}, deadline_s=60)


def test_cpu_of_children_and_of_orphans_counts(tmp_path: Path) -> None:
    done = watch(tmp_path, TRAINING)
    assert done.returncode == 0, done.stderr
    moments, peak, lines = json.loads(done.stdout)
    assert [line["step"] for line in lines] == [0, 1] and lines[0]["who"] == "me"
    step, used = moments[-1]
    assert step == 1, "the step whose line is the command's last act counts"
    assert used > 0.95, "0.4 of a child that has ended, 0.4 of an orphan, 0.2 of its own"
    assert 5 < peak < 500


def test_figures_are_those_between_two_steps() -> None:
    moments = [Moment(step, 10.0 * step, {"trainer": 4.0 * step, "Ray": 1.0 * step}, 7.0 * step) for step in range(4)]
    found = between(Observed(moments, 0.0, {}, []), 1, 2)
    assert found == {"steps": 1, "wall": 10.0, "cpu": 5.0, "parts": {"trainer": 4.0, "Ray": 1.0}, "others_cpu": 2.0}
    assert "not quiet" in quiet([found | {"wall": 1.0}])


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_both_sides_are_told_the_same_work(tmp_path: Path, size: Any) -> None:
    start, way = (tmp_path / "model", tmp_path / "train.parquet"), Way(2, {"cache_implementation": "static"})
    config = load_config(ROOT / "configs" / "quickstart.yaml", our_settings(size, start, way, 3, tmp_path))
    told = trl_options(size, start, way, 3, "http://sandbox", tmp_path / "marks")
    rollout, policy = config.rollout, config.policy
    assert rollout.prompts_per_step * rollout.samples_per_prompt == told["samples"]
    assert told["samples"] // told["updates"] == policy.mini_batch_prompts * told["samples_per_prompt"]
    for key in ("max_turns", "max_turn_tokens", "max_response_tokens"):
        assert getattr(rollout, key) == told[key]
    assert policy.optimizer.lr == told["lr"] and policy.threads == rollout.engine.threads == told["threads"] == 2
    assert config.model.path == told["model"] and list(config.data.train) == [told["data"]] and not config.data.shuffle
    assert config.sandbox.run_timeout_s == told["run_timeout_s"] and told["config"] == way.config


def test_the_limit_of_overlap_is_the_cpu_time_over_all_cores() -> None:
    cores = os.cpu_count() or 1
    moments = [Moment(step, 4.0 * step, {"trainer": 3.0 * cores * step}, 3.0 * cores * step) for step in range(11)]
    lines = [{"step": step, "reward/mean": 0.5, "time/step": 4.0} for step in range(1, 11)]
    found = overlap.figures(Observed(moments, 0.0, {}, lines), 8)
    assert found["cpu_seconds"] == 3.0 * cores
    assert (found["seconds"], found["cpu_bound"], found["reached"]) == (4.0, 3.0, 0.75)


def test_latencies_are_log_normal_within_their_bounds_and_the_same_in_every_run() -> None:
    drawn = [latency_s("print(1)", number) for number in range(400)]
    assert min(drawn) >= SHORTEST_S and max(drawn) <= LONGEST_S and drawn[7] == latency_s("print(1)", 7)
    assert 1.4 < sorted(drawn)[200] < 1.8 and sum(d in (SHORTEST_S, LONGEST_S) for d in drawn) < 40


def test_trls_environment_has_what_the_client_of_the_sandbox_imports() -> None:
    found = children.run([sys.executable, "-c", CLIENT], directory=ROOT, deadline_s=60).stdout.split()
    wanted: set[str] = set()
    for file in [*map(Path, found), ROOT / "benchmarks" / "trl_side.py"]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            wanted |= {name.partition(".")[0].replace("_", "-") for name in names}
    wanted -= {name.replace("_", "-") for name in sys.stdlib_module_names} | {"ctpo-sandbox"}
    lines = (ROOT / "benchmarks" / "trl_requirements.txt").read_text(encoding="utf-8").splitlines()
    assert wanted and wanted <= {line.partition("==")[0] for line in lines}
