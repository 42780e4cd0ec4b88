"""examples/judge: verdicts over HTTP, and none where the server is late, broken or undecided."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ctpo_megatron.base.extensions import load
from ctpo_megatron.data import Group, Prompt, Trajectory
from ctpo_megatron.rewards import RewardPool, ScoreReport
from tests.extend.scripted import project

ANSWERS = ("It is 4.", "It is 5.", "It is 5.\nNo: 4.")


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server of these answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def instead(reply: Callable[[BaseHTTPRequestHandler], None]) -> type[BaseHTTPRequestHandler]:
    """The example's server with another reply."""
    project("judge")
    return type("Handler", (load("judge_server:Handler"),), {"do_POST": reply, "log_message": lambda *_: None})


def judged(url: str, deadline_s: float) -> tuple[list[float | None], ScoreReport]:
    config = project(
        "judge", f"reward.function.arguments.url={url}", f"reward.function.arguments.deadline_s={deadline_s}"
    )
    prompt = Prompt("p", "source", ({"role": "user", "content": "2 + 2?"},), "4", ())
    group = Group(prompt, [Trajectory("p", number, 0, final_text=text) for number, text in enumerate(ANSWERS)])
    with RewardPool(config.reward, config.extensions.path or ()) as pool:
        report = asyncio.run(pool.score([group]))
    return [trajectory.reward for trajectory in group.trajectories], report


def test_the_servers_word_is_the_reward() -> None:
    project("judge")
    with serving(load("judge_server:Handler")) as url:
        rewards, report = judged(url, 10)
    assert rewards == [1.0, 0.0, 1.0]
    assert report.scored == 3


def test_a_server_that_hangs_is_no_verdict_after_the_deadline() -> None:
    with serving(instead(lambda handler: time.sleep(20))) as url:
        start = time.monotonic()
        rewards, report = judged(url, 0.5)
    assert rewards == [None, None, None]
    assert report.missing == {"none": 3}
    assert time.monotonic() - start < 15


def test_a_server_that_fails_is_no_verdict() -> None:
    with serving(instead(lambda handler: handler.send_error(503))) as url:
        assert judged(url, 10)[0] == [None, None, None]


def test_a_judge_that_says_neither_yes_nor_no_is_no_verdict() -> None:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        body = b'{"choices": [{"message": {"content": "perhaps"}}]}'
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    with serving(instead(reply)) as url:
        assert judged(url, 10)[0] == [None, None, None]
