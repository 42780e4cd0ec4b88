"""The map of ratios: cells are settings of runs, the laboratory has the gradients of the loss, the page is computed."""

from __future__ import annotations

import html
import json
import re
import shlex
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.ratio_map import archive, lab, page, picture, runs
from benchmarks.ratio_map.__main__ import main
from benchmarks.ratio_map.cells import OBJECTIVES, RATES, REGIMES, SEEDS, STEPS, TASKS, Cell, cells
from ctpo_megatron.config import ObjectiveConfig, load_config, objective_from_config
from ctpo_megatron.objective import policy_loss
from tests.support.prefork import ROOT

PRESETS = ("ctpo-paper", "ctpo-geomean", "gspo")
NUMBERS = [
    *((each.name, each.numbers) for each in OBJECTIVES),
    *((name, objective_from_config(ObjectiveConfig(preset=name))) for name in PRESETS),
]


@pytest.mark.parametrize(("name", "numbers"), NUMBERS, ids=[name for name, _ in NUMBERS])
def test_the_laboratory_has_the_gradient_of_the_loss(name: str, numbers) -> None:
    """Of 64 sequences with log-ratios inside and beyond all bounds, some far beyond the cap."""
    rng = np.random.default_rng(2)
    d = rng.normal(0, 1, (64, 12)) * rng.choice([1e-4, 0.03, 0.5, 3.0], (64, 1))
    advantages = rng.choice([-1.5, 0.0, 0.7], 64)
    log_probs = torch.from_numpy(d).requires_grad_()
    mask = torch.ones(64, 12, dtype=torch.bool)
    loss = policy_loss(log_probs, torch.zeros(64, 12, dtype=torch.float64), torch.from_numpy(advantages), mask, numbers)
    loss.loss.backward()
    factors, acts = lab.token_weights(numbers, d, advantages)
    assert log_probs.grad is not None
    np.testing.assert_allclose(factors / (64 * 12), -log_probs.grad.numpy(), rtol=1e-9, atol=1e-15)
    assert 0 < acts.mean() < 1


def test_the_laboratory_starts_where_sft_ends_and_values_are_means_of_rewards() -> None:
    for task, expected in zip(TASKS, (0.22, 0.19), strict=True):
        made = lab.LabTask(task, 0)
        rng = np.random.default_rng(0)
        families = np.arange(40_000) % lab.FAMILIES
        tokens = (made.logits[families] + rng.gumbel(size=(len(families), lab.LENGTH, lab.VALUES))).argmax(2)
        assert made.value(made.logits) == pytest.approx(made.reward(tokens).mean(), abs=0.01)
        assert made.value(made.logits) == pytest.approx(expected, abs=0.02)


def test_stored_predictions_are_the_laboratory_s_and_take_a_second_a_cell() -> None:
    stored = json.loads((runs.RESULTS / runs.PREDICTIONS_FILE).read_text(encoding="utf-8"))
    assert stored["cells"].keys() == {cell.name for cell in cells()}
    (cell,) = cells(["early-choice/frozen/prefix-weight"])
    started = time.process_time()
    found = lab.predict(cell)
    assert time.process_time() - started < 10
    assert found["rate"] == stored["cells"][cell.name]["rate"]
    assert found["values"] == pytest.approx(stored["cells"][cell.name]["values"], abs=0.01)  # sums in another order


def test_the_page_is_made_of_what_is_stored() -> None:
    assert (ROOT / "docs" / "map.md").read_text(encoding="utf-8") == page.text(runs.RESULTS)


def test_the_picture_has_what_is_stored() -> None:
    stored = page.Stored.load(runs.RESULTS)
    drawn = picture.FILE.read_text(encoding="utf-8").replace("−", "-") if stored.results else ""
    numbers = {
        float(n) for text in re.findall(r'aria-label="([^"]*)"', drawn) for n in re.findall(r": (-?[\d.]+)", text)
    }
    expected = {row[name] for row in picture.rows(stored) for name in ("difference", "low", "high") if name in row}
    assert expected <= numbers


RUN = """\
# Stands for a run: notes its name, and writes metrics with a reward that grows with its rate.
import json, sys
from pathlib import Path

settings = dict(text.split("=", 1) for text in sys.argv[1:] if "=" in text)
folder = Path(settings["run.root"]) / settings["run.name"]
with open(Path(__file__).with_name("events.txt"), "a") as file:
    file.write(f"{folder.parent.name}/{folder.name}\\n")
if Path(__file__).with_name("broken").exists() and settings.get("run.seed") == "1":
    sys.exit(3)
folder.mkdir(parents=True, exist_ok=True)
steps = int(settings["run.steps"])
(folder / "config.yaml").write_text(json.dumps({"run": {"steps": steps, "name": folder.name}}))
if steps == 0:
    (folder / "sft_model").mkdir()
rate, seed = float(settings["policy.optimizer.lr"]) if steps else 0, int(settings.get("run.seed", 0))
lines = [{"step": n, "reward/mean": n / 100 + 100 * rate + seed / 1000, "val/x/acc/mean@1": n / 10, "time/step": 2,
          "pg_update/clip/total/rate": 0.5} for n in range(1, steps + 1)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`RUN` in place of every training; the folder for its runs, with the tasks' data as if they were written."""
    program = tmp_path / "run.py"
    program.write_text(RUN)
    monkeypatch.setattr(runs, "train", lambda *settings: [sys.executable, str(program), *settings])
    monkeypatch.setattr(runs, "RESULTS", tmp_path / "none")  # no start is stored
    for task in TASKS:
        (tmp_path / "runs" / "data" / task.name).mkdir(parents=True)
    return tmp_path / "runs"


def events(folder: Path) -> list[str]:
    file = folder.parent / "events.txt"
    return file.read_text().splitlines() if file.exists() else []


def test_a_cell_goes_on_where_it_stopped_and_is_made_once(stand_in: Path, tmp_path: Path) -> None:
    command = [
        "--cells",
        "early-choice/frozen/cispo",
        "--folder",
        str(stand_in),
        "--results",
        str(tmp_path / "results"),
    ]
    (tmp_path / "broken").touch()
    assert main(command) == 1
    made = [f"toolmath/{name}" for name in ("sft", "recording-seed10", "frozen-cispo-lr3e-4-seed10")]
    assert events(stand_in)[:3] == made and events(stand_in)[-1] == "early-choice/recording-seed1"
    (tmp_path / "broken").unlink()
    before = len(events(stand_in))
    assert main(command) == 0
    assert events(stand_in)[before:] == [
        "early-choice/recording-seed1", "early-choice/frozen-cispo-lr3e-4-seed1",
        "early-choice/recording-seed2", "early-choice/frozen-cispo-lr3e-4-seed2",
    ]  # fmt: skip
    result = json.loads((tmp_path / "results" / "early-choice-frozen-cispo.json").read_text())
    assert result["rate"] == RATES[0] and result["tuned"].keys() == set(RATES)
    assert [run["value"] for run in result["seeds"].values()] == pytest.approx([0.55] * 3)
    assert result["seeds"]["0"]["cut"] == 0.5 and result["seeds"]["0"]["seconds"] == 20
    assert main(command) == 0 and len(events(stand_in)) == before + 4


def test_the_rate_with_the_higher_endpoint_is_taken_on_both_tasks(stand_in: Path, tmp_path: Path) -> None:
    measuring = runs.Measuring(stand_in, tmp_path)
    (cell,) = cells(["early-choice/lag/grpo"])
    result = measuring.measure(cell)
    assert result["rate"] == RATES[1] and result["tuned"][RATES[1]] > result["tuned"][RATES[0]]
    assert {name for name in events(stand_in) if "seed10" in name} == {f"toolmath/lag-grpo-lr{r}-seed10" for r in RATES}
    expected = np.mean(np.arange(1, STEPS + 1)) / 100 + 100 * float(RATES[1]) + np.arange(3) / 1000
    assert [run["value"] for run in result["seeds"].values()] == pytest.approx(expected)


def test_a_rate_that_is_stored_is_not_tuned_again(stand_in: Path, tmp_path: Path) -> None:
    command = ["--folder", str(stand_in), "--results", str(tmp_path / "results"), "--cells"]
    assert main([*command, "toolmath/lag/grpo"]) == 0
    before = len(events(stand_in))
    assert main([*command, "early-choice/lag/grpo"]) == 0
    added = events(stand_in)[before:]
    assert added == ["early-choice/sft", *(f"early-choice/lag-grpo-lr6e-4-seed{seed}" for seed in SEEDS)]
    stored = [json.loads((tmp_path / "results" / f"{task.name}-lag-grpo.json").read_text()) for task in TASKS]
    assert stored[0]["tuned"] == stored[1]["tuned"] and stored[0]["rate"] == stored[1]["rate"] == "6e-4"


def test_a_stored_start_is_the_same_on_another_machine(tmp_path: Path) -> None:
    made, task = tmp_path / "made" / "toolmath", TASKS[0]
    for file in (
        archive.MODEL / "model.safetensors",
        *(
            Path(f"recording-seed{n}", *parts)
            for n in (0, 10)
            for parts in (["trajectories", "a"], ["positions.jsonl"])
        ),
        *(Path(f"recording-seed{n}", name) for n in (0, 10) for name in archive.KEPT[:-1]),
        Path("recording-seed0.log"),
    ):
        (made / file).parent.mkdir(parents=True, exist_ok=True)
        (made / file).write_text(f"{tmp_path}/{file}")
    archive.pack(made, runs.archive_of(task, tmp_path), frozenset(SEEDS), tmp_path)
    measuring = runs.Measuring(tmp_path / "other", tmp_path, tmp_path)
    (tmp_path / "other" / "data" / task.name).mkdir(parents=True)
    assert measuring.start(task).joinpath("model.safetensors").read_text().endswith("/sft/sft_model/model.safetensors")
    other = tmp_path / "other" / "toolmath"
    assert (other / "recording-seed0" / "config.yaml").read_text() == "recording-seed0/config.yaml"
    names = {str(path.relative_to(other)) for path in other.rglob("*") if path.is_file()}
    kept = {f"recording-seed0/{name}" for name in (*archive.KEPT[:-1], "trajectories/a")}
    assert names == {"sft/sft_model/model.safetensors", *kept}


@pytest.mark.slow
@pytest.mark.parametrize("regime", REGIMES, ids=lambda regime: regime.name)
def test_settings_of_cells_are_known(regime, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of a cell is a configuration, and its objective is the one that the laboratory has."""
    commands: list[list[str]] = []
    program = shlex.quote(str(tmp_path / "run.py"))
    monkeypatch.setattr(
        runs,
        "train",
        lambda *settings: commands.append([*settings]) or [sys.executable, shlex.split(program)[0], *settings],
    )
    for objective in OBJECTIVES:
        runs.Measuring(stand_in, tmp_path, seeds=SEEDS[:1], rates=RATES[:1]).measure(Cell(TASKS[1], regime, objective))
        config = load_config(ROOT / "configs" / "quickstart.yaml", commands[-1])
        assert objective_from_config(config.objective) == objective.numbers
        assert config.run.steps == regime.steps and config.sft is None
        assert (config.policy.passes_per_batch, config.rollout.lag) == (regime.passes, regime.lag)
        assert config.objective.anchor == ("behaviour" if regime.frozen or regime.lag else "proximal")
        assert (config.rollout.replay is not None) == regime.frozen == bool(config.data.eval)
        assert config.reward.function.name == "route_reward:score"
        assert config.rollout.prompts_per_step == lab.PROMPTS and config.rollout.samples_per_prompt == lab.SAMPLES
        assert config.rollout.prompts_per_step // config.policy.mini_batch_prompts == lab.UPDATES


def result(cell: Cell, values: list[float]) -> dict[str, object]:
    seeds = {str(seed): {"value": value, "curve": {}, "cut": 0.1, "uncertain": 0.9, "seconds": 60.0}
             for seed, value in enumerate(values)}  # fmt: skip
    return {"cell": cell.name, "rate": "3e-4", "tuned": {}, "commit": "0" * 8, "machine": "M, 2 cores", "seeds": seeds}


def test_the_page_says_what_is_known_and_what_missed(tmp_path: Path) -> None:
    chosen = {cell.objective.name: cell for cell in cells(["toolmath/frozen"])}
    predictions = {cell.name: {"rate": "3e-4", "values": [0.5, 0.5], "cut": 0.2, "uncertain": None} for cell in cells()}
    for name, predicted in (("grpo", 0.4), ("cispo", 0.6), ("sequence", 0.6)):
        predictions[chosen[name].name]["values"] = [predicted, predicted]
    values = {
        "ctpo": [0.4, 0.5, 0.6],
        "grpo": [0.5, 0.61, 0.69],
        "cispo": [0.8, 0.91, 0.99],
        "sequence": [0.2, 0.5, 0.9],
    }
    for name, measured in values.items():
        runs.write(tmp_path / chosen[name].file, result(chosen[name], measured))
    runs.write(tmp_path / runs.PREDICTIONS_FILE, {"commit": "abc", "date": "2026-01-01", "cells": predictions})
    drawn = picture.draw(page.Stored.load(tmp_path))
    labels = [html.unescape(text) for text in re.findall(r'aria-label="([^"]*)"', drawn.replace("−", "-"))]
    assert any("CTPO's: 0.4; ratio: token; bound: limits the weight" in label for label in labels)
    assert any("CTPO's: -0.1; ratio: token; bound: cuts the gradient" in label for label in labels)  # predicted
    text = page.text(tmp_path)
    assert "48 cells, 4 of them measured" in text and "Predicted in commit abc, 2026-01-01." in text
    (row,) = re.findall(r"^\| `cispo` \| 3e-4 .*$", text, re.MULTILINE)
    cells_of_row = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells_of_row[2] == "0.900" and re.fullmatch(r"\*\*\+0\.400 \[\+0\.\d{3}, \+0\.\d{3}\]\*\*", cells_of_row[3])
    assert cells_of_row[5:] == ["+0.100 (0.000)", "10%, 90%", "20%, –", "3.0"]
    assert "Of 3 differences from `ctpo` the intervals of 2 exclude 0, and 1 of these have the predicted sign." in text
    assert re.search(r"^- toolmath/frozen/grpo: \*\*\+0\.100 \[.*\]\*\*, predicted -0\.100\.$", text, re.MULTILINE)
    assert "The compared runs took 0.2 hours on M, 2 cores" in text
