"""Cluster files: those that ship are right and explain themselves, and a wrong one is told everything at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from ctpo_launchers import LaunchError
from ctpo_launchers.clusters import Cluster, load_cluster
from ctpo_megatron.config import Config, Job, engine_count
from ctpo_megatron.config.rollout_rules import check_placement
from ctpo_megatron.plan import (
    check_gpu_memory,
    settled,
)
from docs.site.sizing import MODELS
from tests.config.test_placement import merged, readme

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SLURM = "executor: slurm\njob_dir: /jobs\naccount: me\npython: /usr/bin/python3\n"


@pytest.mark.parametrize("name", ["local", "slurm_example", "slurm_container"])
def test_a_shipped_file_is_right_and_explains_every_key(name: str) -> None:
    path = CONFIGS / "clusters" / f"{name}.yaml"
    assert load_cluster(path).executor == name.split("_")[0]
    lines = [line for line in path.read_text().splitlines() if re.match(r"[a-z_]+:", line)]
    assert [line for line in lines if "#" not in line] == []


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("executor: slurn\ntime: 04:00\nnode: 2\n", ["executor = 'slurn': must be", "job_dir: required", "time ="]),
        (SLURM + "partitions: gpu\n", ["partitions: unknown key; did you mean partition?"]),
        (SLURM + "time: 12:30:00\n", ["time = 45000", "quote it"]),
        (SLURM.replace("account: me\n", ""), ["account: required for Slurm"]),
        (SLURM.replace("/usr/bin/", ""), ["python: 'python3' must be an absolute path"]),
        (SLURM + "retries: -1\nsignal_s: 0\n", ["2 problem(s)", "retries = -1", "signal_s = 0"]),
        (SLURM + "start_timeout_s: .inf\n", ["start_timeout_s = inf", "finite"]),
        (SLURM + "env: {A B: x}\ncontainer_env: [A-B]\n", ["2 problem(s)", "env.A B", "container_env.0 = 'A-B'"]),
        (SLURM + "time: '00:03:00'\n", ["signal_s: SIGTERM 180 s before the end of a job of 00:03:00", "raise time"]),
        (SLURM.replace("python3", "perl"), ["python: '/usr/bin/perl' is no Python: give the interpreter"]),
        ("- a\n", ["must be a mapping"]),
        ("a: [\n", ["c.yaml"]),
        ("job_dir: \xff\xfe\n", ["c.yaml: 'utf-8' codec can't decode"]),
    ],
)
def test_all_that_is_wrong_with_a_file_is_said_at_once(tmp_path: Path, text: str, messages: list[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(LaunchError) as told:
        load_cluster(path)
    assert [message for message in messages if message not in str(told.value)] == []


HOSTILE = [
    "a b",
    "a;b",
    "a\nrm -rf y #",
    "$(id)",
    "`id`",
    "$HOME",
    "a&b",
    "a|b",
    "a>b",
    "'",
    '"',
    "a\tb",
    "",
    "-x",
    "#x",
]
HOSTILE += ["é\u2028"]
WORDS = ["job_dir", "account", "partition", "qos", "mem", "python", "container_image", "container_mounts", "interface"]


@pytest.mark.parametrize("value", HOSTILE)
def test_no_value_is_a_command_of_the_batch_script(tmp_path: Path, value: str) -> None:
    """NeMo Run writes most of them unquoted."""
    listed = {"container_mounts": [value]}
    for key in WORDS:
        values = yaml.safe_load(SLURM) | ({key: value} if key not in listed else listed)
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(values))
        with pytest.raises(LaunchError, match=rf"  {key}[.0-9]*: .*(may hold only|line ends)"):
            load_cluster(tmp_path / "c.yaml")


@pytest.mark.parametrize("key", ["sbatch", "env"])
@pytest.mark.parametrize("value", ["x\nrm -rf y #", "x\r", "x\x1b[2J", "\u2028"])
def test_no_value_is_a_line_of_the_batch_script(tmp_path: Path, key: str, value: str) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(yaml.safe_load(SLURM) | {key: {"comment": value}}))
    with pytest.raises(LaunchError, match=rf"  {key}\.comment[^:]*: .* has line ends or control characters"):
        load_cluster(tmp_path / "c.yaml")


@pytest.mark.parametrize("name", ["a b", "wrap=x #", "--wrap", "a\nb", ""])
def test_options_of_sbatch_have_names(tmp_path: Path, name: str) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(yaml.safe_load(SLURM) | {"sbatch": {name: "x"}}))
    with pytest.raises(LaunchError, match="sbatch"):
        load_cluster(tmp_path / "c.yaml")


def test_ordinary_values_are_taken(tmp_path: Path) -> None:
    values = {
        "partition": "gpu,gpu-long",
        "mem": "64G",
        "container_image": "nvcr.io#nvidia/pytorch:25.01-py3",
        "container_mounts": ["/shared:/shared:ro", "/a.b/c_d-e:/x"],
        "sbatch": {"comment": "it's a test, $5", "nice": 3, "no-kill": True},
        "env": {"A": "two words; $x"},
        "interface": "ib0",
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(yaml.safe_load(SLURM) | values))
    assert load_cluster(tmp_path / "c.yaml").container_image == values["container_image"]


def test_every_key_of_a_cluster_says_what_it_means() -> None:
    assert [name for name, field in Cluster.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(("nodes", "model", "engines"), [(2, "Qwen3-14B", 8), (8, "Qwen3-32B", 16)])
def test_the_overlays_fit_what_they_say(nodes: int, model: str, engines: int) -> None:
    overlay = yaml.safe_load((CONFIGS / f"nodes_{nodes}x8.yaml").read_text())
    config = TypeAdapter(Config).validate_python(merged(readme().model_dump(mode="json"), overlay))
    job = Job(4 * nodes, 4, 8, cuda=True)
    assert engine_count(config) == engines and config.cluster.nodes == nodes
    chosen = settled(config, job, MODELS[model], 80)
    problems = [*check_placement(chosen, None, job), *check_gpu_memory(chosen, MODELS[model], job, 80)]
    assert [str(problem) for problem in problems] == []
