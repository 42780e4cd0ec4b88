"""What the machine does to a run is never a verdict about its snippet."""

from __future__ import annotations

import threading
import time

import httpx
import psutil

from ctpo_sandbox import SandboxServer
from tests.sandbox.conftest import wait_until
from tests.sandbox.sandbox_http import health, post
from tests.support.deadlines import scaled


class _Request(threading.Thread):
    """One request in flight; `reply` is there once it is joined."""

    reply: httpx.Response

    def __init__(self, server: SandboxServer, code: str, run_timeout_s: float) -> None:
        super().__init__()
        self._arguments = server, {"code": code, "run_timeout": run_timeout_s}
        self.start()

    def run(self) -> None:
        self.reply = post(*self._arguments)

    def finish(self) -> httpx.Response:
        self.join(scaled(40))
        return self.reply


def _snippet(server: SandboxServer, not_one_of: set[int] = frozenset()) -> psutil.Process:
    """The process of a run that goes on, once its first line has run: it burns CPU time."""

    def look() -> psutil.Process | None:
        workers = [psutil.Process(worker) for worker in filter(None, health(server.url)["workers"])]
        children = [child for worker in workers for child in worker.children() if child.pid not in not_one_of]
        return next((child for child in children if child.cpu_times().user >= 0.03), None)

    return wait_until(look, "a snippet to start")


BUSY = "import time\nwhile time.process_time() < {seconds}: pass\nprint('done')"


def test_a_run_that_was_killed_from_outside_is_repeated(sandbox_server: SandboxServer) -> None:
    before = health(sandbox_server.url)["restarts"]
    request = _Request(sandbox_server, BUSY.format(seconds=1.0), scaled(8))
    _snippet(sandbox_server).kill()
    reply = request.finish().json()
    assert "run_result" in reply, reply
    assert (reply["status"], reply["run_result"]["stdout"]) == ("success", "done\n")
    assert health(sandbox_server.url)["restarts"] == before  # its worker is well


def test_a_run_that_is_killed_again_and_again_gets_no_verdict(sandbox_server: SandboxServer) -> None:
    request = _Request(sandbox_server, BUSY.format(seconds=5), scaled(8))
    killed: set[int] = set()
    for _ in range(2):
        snippet = _snippet(sandbox_server, killed)
        killed.add(snippet.pid)
        snippet.kill()
    reply = request.finish()
    assert reply.status_code == 503
    assert "out of memory" in reply.json()["detail"]


def _stopped_for(server: SandboxServer, code: str, limit_s: float, stop_s: float) -> str:
    request = _Request(server, code, limit_s)
    snippet = _snippet(server)
    snippet.suspend()
    time.sleep(stop_s)
    snippet.resume()
    return request.finish().json()["status"]


# A snippet that ends as soon as it has been stopped for {stopped_s} seconds: it leaves nothing to do after that.
UNTIL_STOPPED = """
import time
last = time.monotonic()
while (now := time.monotonic()) - last < {stopped_s}:
    last = now
    if time.process_time() > 0.1:
        time.sleep(0.01)
"""


def test_waiting_for_the_processor_is_not_the_time_of_a_run(sandbox_server: SandboxServer) -> None:
    limit_s = scaled(8.0)  # the run ends after twice that in any case
    code = UNTIL_STOPPED.format(stopped_s=0.8 * limit_s)
    assert _stopped_for(sandbox_server, code, limit_s, 1.02 * limit_s) == "success"


def test_time_on_the_processor_is(sandbox_server: SandboxServer) -> None:
    reply = post(sandbox_server, {"code": BUSY.format(seconds=5), "run_timeout": 0.5}).json()
    result = reply["run_result"]
    assert reply["status"] == "timeout"
    assert result["cpu_s"] < 1.0 and (result["cpu_s"] >= 0.5 or result["wall_s"] >= 1.0)  # on a busy machine


def test_a_run_never_takes_more_than_twice_its_time(sandbox_server: SandboxServer) -> None:
    reply = post(sandbox_server, {"code": "import time; time.sleep(60)", "run_timeout": 0.3}).json()
    assert reply["status"] == "timeout"
    assert 0.6 <= reply["run_result"]["wall_s"] < 0.6 + scaled(1.0)
