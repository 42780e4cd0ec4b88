"""The tracker of docs/howto/tracker.md, as a reader would save it."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from ctpo_megatron.base.extensions import activate
from ctpo_megatron.config import load_config
from ctpo_megatron.tracking import MetricsWriter, open_trackers, tracker_problem
from tests.extend.document_examples import example

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def received():
    """A server's address, and the texts that were posted to it."""
    texts: list[str] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            texts.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", texts
        server.shutdown()


def test_the_example_gets_the_metrics(tmp_path, received, caplog, monkeypatch):
    url, texts = received
    _, yaml = example("tracker", tmp_path)
    base = f"defaults: {ROOT / 'configs' / 'quickstart.yaml'}\nrun: {{name: tried, root: {tmp_path}}}\n"
    (tmp_path / "run.yaml").write_text(base + yaml.replace("http://localhost:8080/", url))
    config = load_config(tmp_path / "run.yaml")
    assert config.extensions.path == (str(tmp_path),)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    activate(config.extensions.path)
    assert [tracker_problem(extension) for extension in config.tracking.trackers] == [None, None]
    run_dir = tmp_path / "tried"
    run_dir.mkdir()
    for steps in ([1, 2], [3]):
        with open_trackers(config, run_dir) as trackers, MetricsWriter(run_dir, trackers) as writer:
            for step in steps:
                writer.log(step, {"reward/mean": step / 4, "actor/lr": 1e-6})
    assert texts == [f"tried {step} reward/mean {step / 4}" for step in (1, 2, 3)]
    assert not caplog.records
    assert list((run_dir / "tensorboard").iterdir())
