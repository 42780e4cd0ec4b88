"""Trajectories of the report: which are shown and which are named as left out, addresses, captions, hostile text."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser

import pytest

from ctpo_megatron.config import PRESETS, ObjectiveConfig, objective_from_config, resolved_objective
from ctpo_megatron.report import write_report
from ctpo_megatron.report.trajectories.ratio import RatioQuantity, ratio_points, ratio_spec
from ctpo_megatron.report.trajectories.selection import sample_of_run
from ctpo_megatron.tracking import read_heads, read_trajectories, trajectory_files, write_trajectories
from tests.tracking.synthetic_run import HOSTILE, decode, make_groups, write_run


class Elements(HTMLParser):
    """Attributes of all elements, in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append({"": tag, **dict(attrs)})


def test_model_text_cannot_become_markup(page):
    assert HOSTILE not in page
    assert re.findall(r"<script[^>]*>", page) == [
        '<script type="application/json" id="chart-data">', '<script type="text/plain" id="vega">', "<script>",
    ]  # fmt: skip
    assert "&lt;" in page


def test_hostile_names_stay_within_their_attributes(tmp_path):
    run_dir = write_run(tmp_path, steps=2)
    groups = make_groups(random.Random(0), 2, 2, 0.5)
    evil = f"\"'><img src=x onerror=alert(1)>{HOSTILE}'\"/../ \n"
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.prompt_id = trajectory.finish_reason = evil
            for call in trajectory.tool_calls:
                call.name = call.status = call.output = evil
                call.arguments = {evil: evil}
    write_trajectories(run_dir, 2, groups, decode)
    elements = Elements(write_report(run_dir).read_text(encoding="utf-8")).found
    assert not [each for each in elements if each[""] == "img" or any(name.startswith("on") for name in each)]
    assert any(f"of {evil}, step 2" in (each.get("aria-label") or "") for each in elements)


def test_trajectories_can_be_filtered(page):
    assert 'data-tool="success"' in page and 'data-reward="0"' in page
    assert {'data-source="training"', 'data-source="evaluation"'} <= set(re.findall(r'data-source="\w+"', page))
    assert 'data-t="probability' in page and "cumulative log-ratio +" in page


def test_best_and_worst_stand_side_by_side_with_all_rewards_of_their_group(demo_run):
    records = {step: read_trajectories(path) for step, path in trajectory_files(demo_run).items()}
    groups = [group for group in sample_of_run(demo_run).groups if group.first.source == "training"]
    assert {group.first.step for group in groups} == {1, 20}
    for group in groups:
        whole = [r for r in records[group.first.step] if r["prompt_id"] == group.first.record["prompt_id"]]
        assert [head.reward for head in group.heads] == [record["reward"] for record in whole]
        shown = [view.record["reward"] for view in group.views]
        assert {max(shown), min(shown)} == {max(r["reward"] for r in whole), min(r["reward"] for r in whole)}
        assert len(shown) <= 2 and {view.record["prompt_id"] for view in group.views} == {whole[0]["prompt_id"]}
    assert any([view.record["reward"] for view in group.views] == [1.0, 0.0] for group in groups)  # the best first


def test_every_dump_has_its_share_of_single_tokens_and_the_page_says_what_has_none(tmp_path, monkeypatch):
    run_dir = write_run(tmp_path, steps=3)
    monkeypatch.setattr("ctpo_megatron.report.trajectories.selection.REPORT_TOKENS", 4 * 200)
    views = sample_of_run(run_dir).views
    apart = {(view.source, view.step): 0 for view in views}
    for view in views:
        tokens = [token for block in view.blocks for _, run in block.runs for token in run]
        apart[view.source, view.step] += sum(token.level >= 0 for token in tokens)
        said = [segment["text"] for segment in view.record["segments"] if segment["kind"] == "model"]
        assert "".join(token.text for token in tokens) == "".join(said)
    assert apart == dict.fromkeys([("training", 1), ("training", 3), ("evaluation", 0), ("evaluation", 3)], 200)
    plain = sum(not view.coloured for view in views)
    assert 0 < plain < len(views)
    assert f"{plain} of {len(views)} trajectories are plain text" in write_report(run_dir).read_text(encoding="utf-8")


def test_a_view_keeps_no_tokens_but_those_it_shows(demo_run):
    view = sample_of_run(demo_run).views[0]
    assert not {"token_ids", "log_ratio", "rollout_log_probs"} & view.record.keys()
    assert 0 < view.model_tokens < view.tokens


def test_what_is_left_out_is_counted_and_named(tmp_path):
    groups = make_groups(random.Random(0), 10, 3, 0.5)
    for step in (1, 2, 3, 5, 8):
        write_trajectories(tmp_path, step, groups, decode)
    for step in (0, 4, 8):
        write_trajectories(tmp_path, step, make_groups(random.Random(1), 3, 1, 0.5), decode, folder="evaluation")
    sample = sample_of_run(tmp_path)
    assert {(view.source, view.step) for view in sample.views} == {
        ("training", 1), ("training", 8), ("evaluation", 0), ("evaluation", 8),
    }  # fmt: skip
    shown = sum(view.step == 8 and view.source == "training" for view in sample.views)
    assert sample.left_out == [
        "4 other dumps",
        f"{30 - shown} of 30 of step 1",
        f"{30 - shown} of 30 of step 8",
    ]  # an evaluation of three is shown whole
    assert 8 <= shown <= 16


def test_the_page_says_how_to_see_what_is_left_out(page):
    assert re.search(r"Not in this file: .*<code>ctpo report .*demo --steps N</code>", page)


def test_addresses_of_a_page_are_unique_and_places_of_the_dump(demo_run, page):
    ids = [each["id"] for each in Elements(page).found if each.get("class") == "episode"]
    assert len(ids) == len(set(ids)) > 10
    files = trajectory_files(demo_run)
    known = {f"step-{step}-{head.place}" for step in files for head in read_heads(files[step])}
    assert {name for name in ids if name.startswith("step-")} <= known


# --- the ratio ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_the_caption_names_the_quantity_of_the_objective(preset):
    mode = objective_from_config(ObjectiveConfig(preset=preset)).ratio_mode
    quantity = RatioQuantity.of({"preset": preset, "ratio_mode": None})
    assert ("cumulative" in quantity.name) is (mode == "cumprod")
    assert (quantity.name == "token log-ratio") is (mode == "token")
    assert quantity.name.startswith("sequence") is mode.startswith("sequence")
    assert RatioQuantity.of({"preset": preset, "ratio_mode": "token"}).name == "token log-ratio"


@pytest.mark.parametrize("objective", [None, "ctpo", {}, {"preset": "mine"}])
def test_without_a_known_objective_nothing_is_claimed(objective):
    assert RatioQuantity.of(objective).name == "log-ratio"


def test_the_page_of_another_objective_has_another_caption(tmp_path):
    run_dir = write_run(tmp_path, steps=2)
    config = (run_dir / "config.yaml").read_text(encoding="utf-8")
    (run_dir / "config.yaml").write_text(config.replace("preset: ctpo", "preset: gspo"), encoding="utf-8")
    facts = json.loads((run_dir / "environment.json").read_text(encoding="utf-8"))
    facts["objective"] = resolved_objective(ObjectiveConfig(preset="gspo"))
    (run_dir / "environment.json").write_text(json.dumps(facts), encoding="utf-8")
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "Log-ratio of the whole sequence divided by its length" in page
    assert "umulative" not in page.split("</style>")[1].split("<script>")[0]


def record_of(log_ratio, low, high, by_model):
    ratios = {"log_ratio": log_ratio, "clip_low": low, "clip_high": high}
    return {"token_ids": [0] * len(log_ratio), "response_mask": by_model} | ratios


def test_points_are_of_model_tokens_and_an_absent_bound_is_none():
    record = record_of([0.0, 0.1, -0.2, 0.0, 0.3], [-math.inf] * 5, [0.2] * 5, [0, 1, 1, 0, 1])
    assert ratio_points(record) == [(1, 0.1, None, 0.2), (2, -0.2, None, 0.2), (3, 0.3, None, 0.2)]
    assert ratio_points(record | {"log_ratio": [0.0, math.nan, 0.0, 0.0, 0.0]}) is None
    assert ratio_points(record | {"clip_low": None}) is None


def test_points_and_chart_of_the_page_are_read_by_its_script(page):
    (section,) = [each for each in Elements(page).found if each.get("id") == "ratio-spec"]
    spec = json.loads(section["data-ratio-spec"])
    assert spec == json.loads(json.dumps(ratio_spec(RatioQuantity.of({"preset": "ctpo"}))))
    assert spec["data"] == {"values": []}
    charts = [json.loads(each["data-ratio"]) for each in Elements(page).found if "data-ratio" in each]
    assert len(charts) > 4 and all(len(point) == 4 for points in charts for point in points)
