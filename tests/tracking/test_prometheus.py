"""The endpoint for Prometheus, scraped for real while its process runs."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ctpo_megatron.config.extension import Extension
from ctpo_megatron.tracking import Heartbeat, open_trackers, tracker_problem
from tests.support.deadlines import scaled
from tests.tracking.synthetic_run import make_config

PROMETHEUS = {"name": "prometheus", "arguments": {"port": 0}}


def address(run_dir: Path) -> str:
    """Where the endpoint of a run answers, once it does."""
    noted, until = run_dir / "trackers" / "prometheus.json", time.monotonic() + scaled(60)
    while not noted.exists():
        assert time.monotonic() < until, "no endpoint"
        time.sleep(0.05)
    found: str = json.loads(noted.read_text())["identity"]
    return found


def scrape(run_dir: Path, wanted: str) -> dict[tuple[str, str], float]:
    """Value by sample and its label, once `wanted` is among the samples."""
    until = time.monotonic() + scaled(60)
    while True:
        assert time.monotonic() < until, f"no {wanted} at the endpoint"
        time.sleep(0.05)
        with urllib.request.urlopen(address(run_dir), timeout=scaled(10)) as reply:
            families = list(text_string_to_metric_families(reply.read().decode()))
        samples = [sample for family in families for sample in family.samples]
        found = {(sample.name, next(iter(sample.labels.values()), "")): sample.value for sample in samples}
        if any(name == wanted for name, _ in found):
            return found


def test_a_scrape_has_figures_faults_and_whether_the_run_moves(tmp_path: Path) -> None:
    assert tracker_problem(Extension.model_validate(PROMETHEUS)) is None
    now = time.time()
    with open_trackers(make_config(tmp_path, tracking={"trackers": [PROMETHEUS]}), tmp_path) as trackers:
        figures = {"reward/mean": 0.25, "tokens/per_second": 1e4, "time/update": 2.0, "time/update_cpu": 9.0}
        trackers.log(1, {"sft/loss": 0.5})
        trackers.log(6, figures | {"rollout/engine_restarts": 1.0, "reward/mean": 0.125})
        trackers.log(7, figures | {"rollout/engine_restarts": 2.0})
        Heartbeat("running", 7, "rl/step/rollout", now - 3, now - 100, 2, 77, "host").write(tmp_path)
        found = scrape(tmp_path, "ctpo_phase_seconds_total")
        assert trackers.take_failures() == 0
    assert found["ctpo_step", "rl"] == 7 and found["ctpo_step", "sft"] == 1
    assert found["ctpo_metric", "reward/mean"] == 0.25 and found["ctpo_metric", "tokens/per_second"] == 1e4
    phases = {label: value for (name, label), value in found.items() if name == "ctpo_phase_seconds_total"}
    assert phases == {"update": 4.0}
    assert found["ctpo_faults_total", "rollout/engine_restarts"] == 3
    assert found["ctpo_faults_total", "rollout/quarantined"] == 0
    assert 100 <= found["ctpo_stall_seconds", ""] < 100 + scaled(60)
    assert 3 <= found["ctpo_heartbeat_age_seconds", ""] < 3 + scaled(60)
    assert ("ctpo_phase_info", "rl/step/rollout") in found
    assert found["ctpo_run_info", "demo"] == 1


def test_off_loopback_it_answers_to_any_name_and_to_no_web_page(tmp_path: Path) -> None:
    anywhere = {"name": "prometheus", "arguments": {"host": "0.0.0.0", "port": 0}}
    with open_trackers(make_config(tmp_path, tracking={"trackers": [anywhere]}), tmp_path):
        url = address(tmp_path).replace("0.0.0.0", "127.0.0.1")
        for headers, status in (({}, 200), ({"origin": "http://evil.example"}, 403)):
            answer = httpx.get(url, headers={"host": "trainer-0.cluster:9464", **headers}, trust_env=False)
            assert (answer.status_code, "ctpo_run_info" in answer.text) == (status, status == 200)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_a_port_in_use_is_a_message_and_not_the_end_of_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        tracker = {"name": "prometheus", "arguments": {"port": port}}
        with open_trackers(make_config(tmp_path, tracking={"trackers": [tracker]}), tmp_path) as trackers:
            trackers.log(1, {"reward/mean": 0.5})
        assert trackers.take_failures() == 1
    (message,) = (record.getMessage() for record in caplog.records)
    off = "tracker prometheus is switched off, and the run continues without it"
    assert message.startswith(f"{off}: ValueError: no metrics")
    assert f"at 127.0.0.1:{port}: Address already in use. Is that another run's?" in message
