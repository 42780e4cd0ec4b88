"""The examples read the dumps of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.data import Group, Prompt, Trajectory
from ctpo_megatron.tracking import read_trajectories, write_trajectories
from tests.objective.test_position_law import authors_fit
from tests.support.deadlines import scaled

EXAMPLES = Path(__file__).parents[2] / "examples"
GROUPS, SAMPLES, MINI_BATCH = 18, 4, 12


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two optimizer steps in a dump, of 12 and 4 groups; two groups were dropped, one trajectory was in no pass."""
    folder = tmp_path_factory.mktemp("run")
    sections = {"policy": {"mini_batch_prompts": MINI_BATCH}, "rollout": {"samples_per_prompt": SAMPLES}}
    (folder / "config.yaml").write_text(yaml.safe_dump(sections))
    rng = np.random.default_rng(0)
    groups, extra = [], {}
    for number in range(GROUPS):
        made = []
        for sample in range(SAMPLES):
            trajectory = Trajectory(f"p{number}", sample, seed=0, reward=1.0)
            trajectory.append_context([1, 2, 3], 0)
            for turn in (1, 2):
                length = int(rng.integers(60, 120))
                trajectory.append_model([4] * length, [-0.5] * length, [1] * length, turn)
                trajectory.append_context([5, 6], turn)
            steps = rng.normal(0, 0.04, len(trajectory)) * trajectory.tokens["response_mask"]
            if number < 2:
                extra[number * SAMPLES + sample] = {"dropped": True}
            elif (number, sample) != (17, 3):
                curve = np.cumsum(steps).astype(np.float32)
                traces = {"log_ratio": curve, "clip_low": curve - 1, "clip_high": curve + 1}
                extra[number * SAMPLES + sample] = traces | {"advantage": 0.5 - sample}
            made.append(trajectory)
        groups.append(Group(Prompt(f"p{number}", "test", (), "4", ()), made))
    write_trajectories(folder, 7, groups, lambda ids: "x" * len(ids), extra=extra)
    return folder


def example(name: str, *arguments: object) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=scaled(60)).stdout


@pytest.mark.parametrize(("options", "trajectories"), [([], 15), (["--all"], 63)])
def test_the_authors_files(run: Path, tmp_path: Path, options: list[str], trajectories: int) -> None:
    example("authors_npz.py", run, tmp_path, *options)
    (path,) = (tmp_path / "importance_weights").iterdir()
    assert path.name == "step_0000007_rank_0000.npz"
    found = np.load(path)
    weights, mask, advantages = (found[name] for name in ("pg_update_is_weights", "response_mask", "advantages"))
    assert weights.shape == mask.shape == advantages.shape == found["log_ratio"].shape
    assert len(weights) == trajectories
    assert (weights.dtype, mask.dtype, advantages.dtype) == (np.float32, np.int8, np.float32)
    assert found["global_step"].tolist() == [7] and found["rank"].tolist() == [0]
    assert not weights[mask == 0].any() and set(np.unique(advantages)) <= {0.5, -0.5, -1.5, -2.5, 0.0}
    # As the authors' script reads them, from the ratios alone.
    rows = [np.log(np.maximum(row[here == 1], 1e-30)) for row, here in zip(weights, mask, strict=True)]
    dumped = read_trajectories(run / "trajectories" / "step_000007.parquet")
    exact = [np.compress(record["response_mask"], record["log_ratio"]) for record in dumped if record.get("log_ratio")]
    assert authors_fit(rows, least=10) == pytest.approx(authors_fit(exact[-trajectories:], least=10), rel=1e-3)
    assert authors_fit(rows, least=10) == pytest.approx(0.04, rel=0.3)


def notebook(name: str, monkeypatch: pytest.MonkeyPatch, run: Path) -> tuple[dict[str, Any], int]:
    """The names that its cells leave, and how many lines of code they have."""
    monkeypatch.setenv("RUN", str(run))
    cells = [
        cell["source"] for cell in json.loads((EXAMPLES / name).read_text())["cells"] if cell["cell_type"] == "code"
    ]
    found: dict[str, Any] = {}
    for cell in cells:
        exec("".join(cell), found)
    lines = [line for cell in cells for line in cell if line.strip() and not line.startswith(("import ", "from "))]
    return found, len(lines)


@pytest.mark.parametrize("ratio", ["cumulative", "token"])
def test_the_notebook_has_the_spread_by_position(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ratio: str
) -> None:
    """S_t, whatever the objective's ratio is."""
    trained = run / "trajectories" / "step_000007.parquet"
    records = [r for r in read_trajectories(trained) if r.get("log_ratio")]
    curves = [np.compress(record["response_mask"], record["log_ratio"]) for record in records]
    if ratio == "token":
        dump, run = RunPaths(tmp_path).dump(7), tmp_path
        dump.parent.mkdir()
        table = pq.read_table(trained)
        rows = [row for row in table.to_pylist() if row["log_ratio"]]
        nothing = [{"log_ratio": [0.0] * len(r["log_ratio"]), "prefix_log_ratio": r["log_ratio"]} for r in rows]
        rows = [row | other for row, other in zip(rows, nothing, strict=True)]
        pq.write_table(pa.Table.from_pylist(rows, table.schema), dump)
    found, lines = notebook("ratios.ipynb", monkeypatch, run)
    assert lines <= 10
    table = found["table"]
    for position in (1, 100, 200):
        values = [curve[position - 1] for curve in curves if len(curve) >= position]
        assert table.loc[position].tolist() == pytest.approx([len(values), np.std(values, ddof=1)])
    assert found["sigma"] == pytest.approx(0.04, rel=0.3)
