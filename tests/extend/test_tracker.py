"""examples/tracker: metrics of every step are posted to an address."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from ctpo_megatron.tracking import MetricsWriter, open_trackers, tracker_problem
from tests.extend.scripted import project


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


def test_the_example_gets_the_metrics(tmp_path, received, caplog):
    url, texts = received
    trackers = f"tracking.trackers=[tensorboard, {{name: 'post:Post', arguments: {{url: '{url}'}}}}]"
    config = project("tracker", "run.name=tried", f"run.root={tmp_path}", trackers)
    assert config.tracking.trackers[1].name == project("tracker").tracking.trackers[1].name
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
