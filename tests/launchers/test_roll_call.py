"""Node 0 and the others, within one process: who is missing, who failed and why, who is lost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ctpo_launchers import LaunchError
from ctpo_launchers.job import free_ports
from ctpo_launchers.roll_call import RollCall, report
from tests.support.deadlines import scaled

HOST, FACTS = "127.0.0.2", {"ray": "here"}


def with_head(scene: Any, nodes: int = 3) -> Any:
    """Run `scene(roll call, port, what became of nodes)`."""

    async def run() -> Any:
        port = free_ports(HOST, 25000, 1)[0]
        over: list[tuple[str, int | None]] = []
        names = {rank: f"node {rank} (host{rank})" for rank in range(1, nodes)}
        calls = RollCall(names, "secret", FACTS, lambda name, status: over.append((name, status)))
        async with calls.open(HOST, port):
            return await scene(calls, port, over)

    return asyncio.run(asyncio.wait_for(run(), scaled(20)))


def test_a_silent_node_and_a_slow_one_are_told_apart() -> None:
    async def scene(calls: RollCall, port: int, _: Any) -> None:
        head, _ = await report(HOST, port, 1, "secret", 5)
        with pytest.raises(LaunchError, match=r"from node 2 \(host2\) at .*; node 1 \(host1\) has reported and is not"):
            await calls.all_in("ready", 0.3)
        head.close()

    with_head(scene)


def test_a_node_that_fails_gives_its_reason_at_once() -> None:
    async def scene(calls: RollCall, port: int, over: list[Any]) -> None:
        head, _ = await report(HOST, port, 2, "secret", 5)
        await head.send(state="failed", reason="no sandbox here")
        with pytest.raises(LaunchError, match=r"^node 2 \(host2\): no sandbox here$"):
            await calls.all_in("ready", 60)
        head.close()
        await asyncio.sleep(0.1)
        assert over == []

    with_head(scene)


def test_a_node_that_is_gone_is_told_at_once_and_its_end_is_none() -> None:
    async def scene(calls: RollCall, port: int, over: list[Any]) -> None:
        for rank, ended in ((1, False), (2, True)):
            head, _ = await report(HOST, port, rank, "secret", 5)
            if ended:
                await head.send(state="ended", status=0)
            head.close()
        with pytest.raises(LaunchError, match=r"^node 1 \(host1\): its node program is gone"):
            await calls.all_in("ready", 60)
        await asyncio.sleep(0.1)
        assert sorted(over) == [("node 1 (host1)", None), ("node 2 (host2)", 0)]

    with_head(scene)


@pytest.mark.parametrize(("rank", "token"), [(1, "another"), (7, "secret"), (0, "secret")])
def test_strangers_are_refused(rank: int, token: str) -> None:
    async def scene(_calls: RollCall, port: int, over: list[Any]) -> None:
        with pytest.raises(LaunchError, match="refused this node"):
            await report(HOST, port, rank, token, 5)
        assert over == []

    with_head(scene)


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.0",
        b"[1, 2]",
        b"[" * 50_000,
        *(f'{{"rank": {rank}, "token": "secret"}}'.encode() for rank in ("[1]", "{}", "true", "1.0")),
        '{"rank": 1, "token": "s\u00e9cret"}'.encode(),
        b'{"rank": 1, "token": "\\ud800"}',
        b'{"rank": 1, "token": 5}',
        b'{"rank": 1}',
        b'{"rank": 1, "token": "' + b"x" * 100_000 + b'"}',
    ],
)
def test_what_is_no_message_is_no_node(line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(calls: RollCall, port: int, over: list[Any]) -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(line + b"\r\n\r\n")
        assert json.loads(await reader.readline()) == {"state": "refused"}
        writer.close()
        assert over == []

    with_head(scene)
    assert caplog.text == ""  # asyncio logs what a task that served a connection has raised


@pytest.mark.parametrize(
    "line", [b"[]", b"7", b'{"state": "ended"}', b'{"state": "ended", "status": "0"}', b'{"rank": 2}']
)
def test_a_node_that_breaks_the_rules_is_lost(line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(calls: RollCall, port: int, over: list[Any]) -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b'{"rank": 1, "token": "secret"}\n' + line + b"\n")
        assert json.loads(await reader.readline())["state"] == "welcome"
        with pytest.raises(LaunchError, match=r"^node 1 \(host1\): its node program is gone"):
            await calls.all_in("ready", 5)
        writer.close()
        assert over == [("node 1 (host1)", None)]

    with_head(scene)
    assert caplog.text == ""


def test_a_head_that_comes_late_is_waited_for() -> None:
    async def late() -> None:
        port = free_ports(HOST, 25000, 1)[0]
        node = asyncio.create_task(report(HOST, port, 1, "secret", 10))
        await asyncio.sleep(0.3)
        async with RollCall({1: "node 1"}, "secret", FACTS, lambda *_: None).open(HOST, port):
            _, facts = await node
            assert facts["ray"] == "here"

    asyncio.run(late())
