"""Coordination of the nodes by node 0: which are ready, which failed and why, common start and end.

A message is one line of JSON. Every node keeps its connection open, so a dead node is noticed when its connection
breaks, and an unreachable one after `SILENCE_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from ctpo_launchers import LaunchError
from ctpo_launchers.timeouts import HELLO_TIMEOUT_S, RETRY_S, SILENCE_S

log = logging.getLogger(__name__)

NodeMessage = dict[str, Any]


class Connection:
    """One end of a connection between two node programs."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        _watch(writer.get_extra_info("socket"))

    async def send(self, **message: Any) -> None:
        """Send a message; only the reader notices a broken connection."""
        with contextlib.suppress(OSError):
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()

    async def receive(self, timeout_s: float | None = None) -> NodeMessage | None:
        """Return the next message; None when the other end is gone or sends an invalid message. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            try:
                line = await self._reader.readline()
            except (OSError, ValueError):
                return None
        try:
            message = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        self._writer.close()


class RollCall:
    """Node 0's view of the other nodes. `facts`: sent to each when it reports; `over`: called with the name of a node
    whose trainer has ended and its status, None when the node itself is lost."""

    def __init__(
        self, names: dict[int, str], token: str, facts: NodeMessage, over: Callable[[str, int | None], None]
    ) -> None:
        self._names, self._token, self._facts, self._over = names, token, facts, over
        self._connections: dict[int, Connection] = {}
        self._reported: dict[int, NodeMessage] = {}
        self._changed = asyncio.Event()
        self._served: set[asyncio.Task[None]] = set()
        self._where = ""

    @contextlib.asynccontextmanager
    async def open(self, address: str, port: int) -> AsyncIterator[None]:
        """Listen at one address. Raises OSError."""
        self._where = f"{address} port {port}"
        server = await asyncio.start_server(self._serve, address, port)
        try:
            yield
        finally:
            server.close()
            for connection in self._connections.values():
                connection.close()
            if self._served:
                await asyncio.wait(self._served, timeout=HELLO_TIMEOUT_S)

    async def all_in(self, state: str, timeout_s: float) -> None:
        """Wait until every node has reported `state`. Raises LaunchError naming those that did not, and why."""
        deadline = time.monotonic() + timeout_s
        while missing := [rank for rank in self._names if self._reported.get(rank, {}).get("state") != state]:
            failures = [m for m in self._reported.values() if m["state"] in ("failed", "lost")]
            if failures:
                raise LaunchError("; ".join(f"{self._names[m['rank']]}: {m['reason']}" for m in failures))
            self._changed.clear()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                raise LaunchError(self._late(state, missing, timeout_s)) from None

    async def broadcast(self, **message: Any) -> None:
        """Send a message to all connected nodes."""
        for connection in self._connections.values():
            await connection.send(**message)

    def _late(self, state: str, missing: list[int], timeout_s: float) -> str:
        silent = ", ".join(self._names[rank] for rank in missing if rank not in self._connections)
        slow = ", ".join(self._names[rank] for rank in missing if rank in self._connections)
        texts = []
        if silent:
            texts.append(
                f"nothing has been heard from {silent} at {self._where}: does the node program run there with the same "
                "token, and can it reach that address (firewall, --interface)?"
            )
        if slow:
            texts.append(f"{slow} has reported and is not {state} yet: see its logs")
        return f"not all nodes are {state} after {timeout_s:g} s; {'; '.join(texts)}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        if (task := asyncio.current_task()) is not None:
            self._served.add(task)
            task.add_done_callback(self._served.discard)
        try:
            hello = await connection.receive(HELLO_TIMEOUT_S) or {}
        except TimeoutError:
            hello = {}
        rank = hello.get("rank")
        if type(rank) is not int or rank not in self._names or not _same(hello.get("token"), self._token):
            await connection.send(state="refused")
            return connection.close()
        self._connections[rank] = connection
        self._note({"rank": rank, "state": "reported"})
        log.info("%s has reported", self._names[rank])
        await connection.send(state="welcome", **self._facts)
        while (message := await connection.receive()) is not None and _is_report(message):
            self._note({**message, "rank": rank})
            if message["state"] == "ended":
                self._over(self._names[rank], message["status"])
        if self._reported[rank]["state"] not in ("failed", "ended"):
            self._note({"rank": rank, "state": "lost", "reason": "its node program is gone, or the network to it"})
            self._over(self._names[rank], None)

    def _note(self, message: NodeMessage) -> None:
        self._reported[message["rank"]] = message
        self._changed.set()


def _same(token: object, secret: str) -> bool:
    """Constant-time comparison of a token with the secret."""
    # JSON can contain lone surrogates, which UTF-8 cannot encode.
    return isinstance(token, str) and hmac.compare_digest(token.encode(errors="surrogatepass"), secret.encode())


def _is_report(message: NodeMessage) -> bool:
    """Whether a message is valid: a node is ready, failed for a reason, or its trainer has ended with a status."""
    state, reason, status = (message.get(name) for name in ("state", "reason", "status"))
    return (
        state == "ready"
        or (state == "failed" and isinstance(reason, str))
        or (state == "ended" and type(status) is int)
    )


async def report(head: str, port: int, rank: int, token: str, timeout_s: float) -> tuple[Connection, NodeMessage]:
    """Connect a node to node 0, waiting for it if needed; returns its welcome. Raises LaunchError."""
    deadline, reason = time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                connection = Connection(*await asyncio.open_connection(head, port))
                await connection.send(rank=rank, token=token)
                welcome = await connection.receive()
        except (OSError, TimeoutError) as error:
            reason = str(error) or "no answer"
            await asyncio.sleep(RETRY_S)
            continue
        if welcome is not None and welcome.get("state") == "welcome":
            return connection, welcome
        connection.close()
        if welcome is not None:
            raise LaunchError(
                f"the head at {head} port {port} refused this node's token or rank {rank}: is it of this job?"
            )
        reason = "the connection was closed"
        await asyncio.sleep(RETRY_S)
    raise LaunchError(f"the head at {head} port {port} did not answer within {timeout_s:g} s: {reason}")


def _watch(connection: socket.socket) -> None:
    """Let the kernel notice within `SILENCE_S` that the other host is gone, and tolerate shorter outages."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SILENCE_S // 6)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
