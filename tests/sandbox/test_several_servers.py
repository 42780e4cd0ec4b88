"""One client over several servers: bursts are balanced, and a server that goes dark costs a request seconds at most."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from ctpo_sandbox import ClientStats, SandboxClient, SandboxServer, SandboxUnavailable
from tests.sandbox.conftest import client_of, small_server
from tests.sandbox.sandbox_http import health
from tests.support.deadlines import scaled

Pair = tuple[SandboxServer, SandboxServer]
BURST = 32


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with small_server(tmp_path_factory.mktemp("one")) as one, small_server(tmp_path_factory.mktemp("two")) as two:
        yield one, two


def _executions(pair: Pair) -> list[int]:
    return [health(server.url)["executions"] for server in pair]


def _burst(urls: list[str], count: int = BURST) -> tuple[ClientStats, float]:
    """`count` runs asked for at once, each answered rightly; the seconds that the slowest took."""

    async def all_of_them() -> tuple[ClientStats, float]:
        began = time.monotonic()

        async def one(client: SandboxClient, number: int) -> float:
            result = await client.run(f"import time; time.sleep(0.02); print({number})", run_timeout_s=4)
            assert result.stdout == f"{number}\n"
            return time.monotonic() - began

        async with client_of(*urls, concurrency=count) as client:
            seconds = await asyncio.gather(*(one(client, number) for number in range(count)))
            assert client.stats.unavailable == 0
            return client.stats, max(seconds)

    return asyncio.run(all_of_them())


def test_a_burst_is_balanced(pair: Pair) -> None:
    before = _executions(pair)
    stats, _ = _burst([server.url for server in pair])
    assert [now - then for now, then in zip(_executions(pair), before, strict=True)] == [BURST // 2, BURST // 2]
    assert stats.retries == 0


def test_a_server_that_is_not_there_is_left_out(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead = f"http://127.0.0.1:{taken.getsockname()[1]}"
    before = _executions(pair)
    stats, _ = _burst([dead, *(server.url for server in pair)])
    assert sum(_executions(pair)) == sum(before) + BURST
    assert stats.retries > 0


@contextlib.contextmanager
def _black_hole(*, connects: bool) -> Iterator[str]:
    """Takes connections and says nothing, or does not even take them."""
    with contextlib.ExitStack() as held:
        hole = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=512 if connects else 0))
        for _ in range(0 if connects else 4):
            filler = held.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(hole.getsockname())
        yield f"http://127.0.0.1:{hole.getsockname()[1]}"


@pytest.mark.parametrize("connects", [True, False])
def test_a_black_hole_costs_seconds_at_most(pair: Pair, connects: bool) -> None:
    with _black_hole(connects=connects) as dark:
        stats, slowest_s = _burst([dark, pair[0].url], count=12)
    assert stats.retries > 0
    assert slowest_s < scaled(10)


def test_a_server_that_answers_again_gets_its_share_again(pair: Pair) -> None:
    one, two = pair

    async def on_and_off() -> None:
        async def some() -> None:
            await asyncio.gather(*(client.run("print(1)", run_timeout_s=4) for _ in range(8)))

        async with client_of(one.url, two.url) as client:
            two.process.send_signal(signal.SIGSTOP)
            try:
                await some()
            finally:
                two.process.send_signal(signal.SIGCONT)
            before = (await asyncio.to_thread(_executions, pair))[1]
            async with asyncio.timeout(scaled(20)):
                while (await asyncio.to_thread(_executions, pair))[1] < before + 8:
                    await some()
                    await asyncio.sleep(0.1)
            assert client.stats.unavailable == 0

    asyncio.run(on_and_off())


def test_a_login_in_an_address_is_in_no_message() -> None:
    async def run() -> None:
        urls = ["http://user:PASSWORD@127.0.0.1:9", "http://:PASSWORD@127.0.0.1:1"]
        async with client_of(*urls, deadline_s=0.5) as client:
            await client.run("print(1)", run_timeout_s=1)

    with pytest.raises(SandboxUnavailable) as raised:
        asyncio.run(run())
    assert "PASSWORD" not in str(raised.value) and "127.0.0.1:9" in str(raised.value)
