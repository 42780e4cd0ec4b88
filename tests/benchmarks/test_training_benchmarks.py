"""What the benchmarks of whole training steps measure and say; the runs themselves take minutes and are not made."""

from __future__ import annotations

import ast
import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from benchmarks import long_groups, overlap, trl_text
from benchmarks.measured import Moment, Observed, between, part_of, quiet
from benchmarks.slow_tool import LONGEST_S, SHORTEST_S, latency_s
from benchmarks.trl_sizes import QUICKSTART, SIZES, Way, our_settings, trl_options
from ctpo_megatron.config import load_config
from ctpo_megatron.data.prompt import Prompt
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


def test_a_run_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    done = watch(tmp_path, "print('the reason'); raise SystemExit(3)")
    assert done.returncode == 1 and "exit status 3" in done.stderr and "the reason" in done.stderr


def test_a_process_belongs_to_the_part_that_it_names_or_to_that_of_its_parent() -> None:
    assert part_of("ray::RolloutEngine.run_group", "Ray") == "engine actor"
    assert part_of("python -m ctpo_sandbox.server --slots 2", "trainer") == "sandbox"
    assert part_of("python -c print(1)", "sandbox") == "sandbox"


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


def test_the_engine_may_have_threads_of_its_own(tmp_path: Path) -> None:
    way, start = Way.of("2:1"), (tmp_path / "model", tmp_path / "train.parquet")
    config = load_config(ROOT / "configs" / "quickstart.yaml", our_settings(QUICKSTART, start, way, 3, tmp_path))
    assert (config.policy.threads, config.rollout.engine.threads) == (2, 1) and str(way) == "2 threads, engine 1"
    assert Way.of("2") == Way(2) and str(Way.of("1")) == "1 thread"


def run(samples: float, cpu: float, wall: float = 10.0) -> dict[str, Any]:
    figures = {"samples": samples, "tokens": 40 * samples, "cpu_per_1000": cpu, "seconds": wall, "memory": 1000.0}
    totals = {"wall": wall, "cpu": 12.0, "steps": 4, "others_cpu": 0.1, "parts": {"trainer": 12.0}}
    return figures | totals | {"memory_of": {"trainer": 1000.0}, "rewards": [0.25]}


ENVIRONMENT = {"device": "a processor", "versions": {"torch": "2"}, "commit": "c" * 40, "date": "today"}


def test_the_table_beside_trl_pairs_the_rounds_and_judges_the_median() -> None:
    ours, theirs = [run(30, 0.9), run(40, 0.8), run(32, 0.8)], [run(20, 1.0), run(20, 1.0), run(40, 1.0)]
    result = {
        "size": "quickstart",
        "found": {trl_text.OURS: ours, trl_text.TRL: theirs},
        "tried": {trl_text.OURS: {}, trl_text.TRL: {"1 thread": 20.0}},
        "ways": {trl_text.OURS: "1 thread", trl_text.TRL: "1 thread"},
        "trl_packages": ["trl==1", "transformers==5", "torch==2", "accelerate==1"],
        "environment": ENVIRONMENT,
    }
    assert trl_text.ratios(result, "samples") == [1.5, 2.0, 0.8]
    text = trl_text.text(result)
    assert "1.50 (0.80 to 2.00)" in text and "at least 1.5: met" in text and "at most 0.8: met" in text
    assert "it was quiet" in text and "TRL: 1 thread 20.00" in text
    result["found"][trl_text.OURS] = [run(29, 0.9)] * 3
    assert "at least 1.5: missed" in trl_text.text(result)


def test_the_limit_of_overlap_is_the_cpu_time_over_all_cores() -> None:
    cores = os.cpu_count() or 1
    moments = [Moment(step, 4.0 * step, {"trainer": 3.0 * cores * step}, 3.0 * cores * step) for step in range(11)]
    lines = [{"step": step, "reward/mean": 0.5, "time/step": 4.0} for step in range(1, 11)]
    found = overlap.figures(Observed(moments, 0.0, {}, lines), 8)
    assert found["cpu_seconds"] == 3.0 * cores
    assert (found["seconds"], found["cpu_bound"], found["reached"]) == (4.0, 3.0, 0.75)
    slower = found | {"seconds": 6.0}
    result = {"latency": "none", "environment": ENVIRONMENT}
    text = overlap.text(result | {"found": {"synchronous": [slower], "asynchronous": [found]}})
    assert "75%, missed" in text and "1.50 (1.50 to 1.50)" in text


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


def test_both_sides_of_long_groups_make_the_same_turns() -> None:
    prompt = Prompt("7", "long", (), "2", (1, 2), {"usual": 9.0})
    longest, in_order = (long_groups.of_round(prompt, 3, side) for side in (long_groups.LONGEST, long_groups.IN_ORDER))
    assert longest.extra["turns"] == in_order.extra["turns"] and len(longest.extra["turns"]) == long_groups.SAMPLES
    assert longest.id == "7" != in_order.id
    assert longest.extra["turns"] != long_groups.of_round(prompt, 4, long_groups.LONGEST).extra["turns"]
