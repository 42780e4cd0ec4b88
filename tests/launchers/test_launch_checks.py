"""`ctpo launch` refuses what the nodes would refuse, before it submits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ctpo_megatron import cli
from tests.support.prefork import ROOT
from tests.support.task import SMALL_TASK, sft_file, task_files, task_folder

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    """A file of a cluster with GPUs."""
    path = tmp_path / "cluster.yaml"
    keys = f"executor: slurm\njob_dir: {tmp_path}\naccount: mine\npython: /usr/bin/python3\n"
    path.write_text(f"{keys}gpus_per_node: 8\ngpu_gib: 80\n")
    return str(path)


RECIPE = [str(ROOT / "configs" / "qwen3_4b_tir.yaml"), str(ROOT / "configs" / "nodes_2x8.yaml"), "--nodes", "2"]


def test_all_that_a_dry_run_finds_is_said_and_nothing_submitted(
    launched: list[Sequence[str]], cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["policy.tensor_model_parallel_size=3", "data.train=[nowhere.parquet]"]
    assert cli.main(["launch", *RECIPE, *wrong, "--cluster", cluster]) == 2
    said = capsys.readouterr().err
    for problem in (
        'model.path = "models/Qwen3-4B": no such directory',
        "policy.tensor_model_parallel_size = 3: x pipeline_model_parallel_size 1 = 3 does not divide the world size 8",
        'data.train = "nowhere.parquet": no such file',
        "nothing was submitted; --no-check submits without these checks",
    ):
        assert problem in said
    assert launched == []


def test_it_submits_unchecked_where_asked_to(launched: list[Sequence[str]], cluster: str) -> None:
    assert cli.main(["launch", *RECIPE, "--cluster", cluster, "--no-check"]) == 0
    (words,) = launched
    assert "--no-check" not in words and list(words[:2]) == RECIPE[:2]


@pytest.mark.parametrize("words", [["status"], ["logs", "12"], ["cancel", "12"]])
def test_questions_check_no_configuration(launched: list[Sequence[str]], cluster: str, words: list[str]) -> None:
    assert cli.main(["launch", *words, "--cluster", cluster]) == 0
    assert list(launched[0][: len(words)]) == words


def test_gpus_of_a_node_are_those_of_the_cluster_file(
    launched: list[Sequence[str]], cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task = task_folder(*SMALL_TASK)
    files = [*task_files(task), sft_file(task)]
    of_gpus = ["placement={trainer_gpus: 6, engine_gpus: 4}", "rollout.engines=auto"]
    assert cli.main(["launch", QUICKSTART, *files, *of_gpus, "--cluster", cluster]) == 2
    assert "needs 10 GPUs, 6 for the trainer and 4 for the engines, and this node shows 8" in capsys.readouterr().err
    Path(cluster).write_text(Path(cluster).read_text().replace("gpus_per_node: 8\ngpu_gib: 80\n", ""))
    assert cli.main(["launch", QUICKSTART, *files, "--cluster", cluster]) == 0  # a cluster without GPUs
    assert len(launched) == 1


def test_a_bad_cluster_file_comes_first(launched: list[Sequence[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", QUICKSTART, "--cluster", "nowhere.yaml"]) == 2
    assert "--cluster nowhere.yaml: no such file" in capsys.readouterr().err
    assert cli.main(["launch", QUICKSTART, "--nodes", "0"]) == 2
    assert "--nodes 0: at least one node" in capsys.readouterr().err
    assert launched == []
