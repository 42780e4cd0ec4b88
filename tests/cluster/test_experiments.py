"""Users' experiments with our tasks and executors, in NeMo Run's environment; what we use of its private parts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from ctpo_launchers import environment
from ctpo_megatron.config import load_config
from tests.end_to_end.small_run import SMALL, Ctpo, records
from tests.support import children
from tests.support.deadlines import scaled
from tests.support.prefork import PYTHONPATH, ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
EXAMPLE = ROOT / "examples" / "nemo_run" / "sweep_then_eval.py"
SURFACES = {
    "slurm.fill_template": "assert 'fill_template(\"slurm.sh.j2\", vars_to_fill)' in source(slurm.SlurmBatchRequest)",
    "utils.fill_template": "assert names(utils.fill_template) == ['template_name', 'variables', 'template_dir']",
    "variables of the template": (
        "for name in ('sbatch_command', 'sbatch_flags', 'max_retries', 'env_vars', 'setup_lines', 'srun_commands'):\n"
        "    assert f'\"{name}\"' in source(slurm.SlurmBatchRequest), name"
    ),
    "Experiment._id": "assert run.Experiment('x', id='x_1', base_dir=folder)._id == 'x_1'",
    "Job.state": "assert AppState.SUCCEEDED.name == 'SUCCEEDED' and 'state' in Job.__dataclass_fields__",
    "lines of .slurm_jobs": (
        "scheduler.SLURM_JOB_DIRS = folder + '/.slurm_jobs'\n"
        "scheduler._save_job_dir('12', '/jobs/x', run.LocalTunnel(job_dir='/jobs'), 'log*')\n"
        "assert launch._jobs(Path(folder)) == {'12': Path('/jobs/x')}"
    ),
    "/nemo_run": "assert RUNDIR_NAME == 'nemo_run' and jobs._CODE == '/nemo_run/code'",
    "GitArchivePackager.basepath": "assert 'basepath' in run.GitArchivePackager.__dataclass_fields__",
    "sbatch.sh of a dry run": "assert '_sbatch.sh' in source(scheduler.SlurmTunnelScheduler)",
}
"""What of NeMo Run's insides is used -> an assertion that says whether it is still there."""
_LOOK = """
import inspect, json, tempfile, traceback
from pathlib import Path
import nemo_run as run
from nemo_run.config import RUNDIR_NAME
from nemo_run.core.execution import slurm, utils
from nemo_run.run.job import Job
from nemo_run.run.torchx_backend.schedulers import slurm as scheduler
from torchx.specs import AppState
from ctpo_launchers import jobs, launch
source = inspect.getsource
names = lambda function: list(inspect.signature(function).parameters)
found = {}
for name, text in json.loads(TEXTS).items():
    folder = tempfile.mkdtemp()
    try:
        exec(text)
    except Exception:
        found[name] = traceback.format_exc()
print(json.dumps(found))
"""


def of_nemo_run(program: str, directory: Path, deadline_s: float, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program in the launcher's environment, which is made if it is missing."""
    python = environment._python()
    variables = {"PYTHONPATH": PYTHONPATH, "NEMORUN_HOME": str(directory / "nemo"), "COLUMNS": "120"} | more
    return children.run([str(python), "-c", program], directory=directory, environment=variables, deadline_s=deadline_s)


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    program = f"TEXTS = {json.dumps(SURFACES)!r}\n{_LOOK}"
    done = of_nemo_run(program, tmp_path_factory.mktemp("surfaces"), 300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("surface", SURFACES)
def test_what_we_use_of_nemo_runs_insides_is_there(surface: str, moved: dict[str, str]) -> None:
    assert moved.get(surface) is None, f"NeMo Run has moved {surface}:\n{moved[surface]}"


def test_the_example_trains_then_evaluates(tmp_path: Path) -> None:
    """With a stand-in for the interpreter, which notes what it was to run and in which folder."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$PWD $*" >>{tmp_path}/called\n')
    python.chmod(0o755)
    (tmp_path / "my_cluster.yaml").write_text(f"executor: local\njob_dir: {tmp_path}/jobs\npython: {python}\n")
    (tmp_path / "my.yaml").write_text((ROOT / "configs" / "quickstart.yaml").read_text())
    done = of_nemo_run(EXAMPLE.read_text(encoding="utf-8"), tmp_path, 400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    called = [line.partition(" ")[2] for line in (tmp_path / "called").read_text().splitlines()]
    trained = [line for line in called if line.startswith("-m ctpo_launchers.node ")]
    scored = [line for line in called if line.startswith("-m ctpo_launchers.command ")]
    assert len(trained) == len(scored) == 2 and set(called[:2]) == set(trained)  # all evaluations come after
    for lr in ("1e-6", "2e-6"):
        assert f"--workdir {tmp_path} -- eval runs/lr-{lr} --data heldout.parquet -k 8" in " ".join(scored)
        (config,) = (tmp_path / "jobs" / "configs").glob(f"lr-{lr}-*.yaml")
        assert sum(str(config) in line for line in trained) == 1 and config.stat().st_mode & 0o777 == 0o600


_THROUGH = """
import nemo_run as run
from ctpo_launchers import executor, task
tunnel = run.LocalTunnel(job_dir=JOBS)
cluster = "slurm.yaml"
done = task("train", "my.yaml", "run.name=there", cluster=cluster, nodes=2, tunnel=tunnel)
made = executor(cluster, nodes=2, tunnel=tunnel)
assert made.tunnel is tunnel and made.nodes == 2
words = task("eval", "runs/x $(id)", "--data", "a;b", cluster=cluster).args
print(done.args[-2], *words, sep=chr(10))
"""


def test_a_configuration_goes_through_the_tunnel_and_words_are_quoted(tmp_path: Path) -> None:
    """The tunnel is NeMo Run's local one, which has the calls of its SSH tunnel."""
    keys = f"executor: slurm\njob_dir: {tmp_path}/there\naccount: me\npython: /usr/bin/python3\n"
    (tmp_path / "slurm.yaml").write_text(keys)
    (tmp_path / "my.yaml").write_text((ROOT / "configs" / "quickstart.yaml").read_text())
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, timeout=scaled(60))
    done = of_nemo_run(f"JOBS = {str(tmp_path / 'tunnel')!r}{_THROUGH}", tmp_path, 300)
    assert done.returncode == 0, done.stderr[-4000:]
    said = done.stdout.splitlines()
    config = Path(said[-8])
    assert config.parent == tmp_path / "there" / "configs" and config.stat().st_mode & 0o777 == 0o600
    assert load_config(config).cluster.nodes == 2
    assert said[-4:] == ["eval", "'runs/x $(id)'", "--data", "'a;b'"]


@pytest.mark.slow
def test_a_users_experiment_trains_and_evaluates_for_real(ctpo: Ctpo) -> None:
    program = f"""
import sys
import nemo_run as run
from ctpo_launchers import executor, task
cluster = "here.yaml"
words = {[str(ROOT / "configs" / "quickstart.yaml"), *SMALL, "run.name=chained"]!r}
with run.Experiment("chained") as experiment:
    trained = experiment.add(task("train", *words, cluster=cluster), executor=executor(cluster), name="train")
    score = task("eval", "runs/chained", "-k", "1", "eval.prompts=4", cluster=cluster)
    experiment.add(score, executor=executor(cluster), name="eval", dependencies=[trained])
    experiment.run()
"""
    cluster = ctpo.directory / "here.yaml"
    cluster.write_text(f"executor: local\njob_dir: {ctpo.directory}/jobs\n")
    python = {"CTPO_PYTHON": str(ROOT / ".venv" / "bin" / "python")}
    done = of_nemo_run(program, ctpo.directory, 1200, **(ctpo.environment | python))
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert [record["step"] for record in records(ctpo.directory / "runs" / "chained")] == [0, 1, 2, 3]
    (results,) = (ctpo.directory / "evaluations").glob("*/results.json")
    assert json.loads(results.read_text())["samples_per_prompt"] == 1
