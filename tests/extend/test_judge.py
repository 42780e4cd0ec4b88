"""examples/judge: verdicts over HTTP, and none where the server is late, broken or undecided."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

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
    arguments = {"url": url, "deadline_s": deadline_s}
    config = project("judge", *(f"reward.function.arguments.{name}={value}" for name, value in arguments.items()))
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


def undecided(handler: BaseHTTPRequestHandler) -> None:
    body = b'{"choices": [{"message": {"content": "perhaps"}}]}'
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.mark.parametrize(
    ("reply", "deadline_s"),
    [(lambda handler: time.sleep(20), 0.5), (lambda handler: handler.send_error(503), 10), (undecided, 10)],
    ids=["hangs", "fails", "says neither yes nor no"],
)
def test_where_the_server_decides_nothing_there_is_no_verdict(
    reply: Callable[[BaseHTTPRequestHandler], None], deadline_s: float
) -> None:
    with serving(instead(reply)) as url:
        start = time.monotonic()
        rewards, report = judged(url, deadline_s)
    assert rewards == [None, None, None] and report.missing == {"none": 3}
    assert time.monotonic() - start < 15
