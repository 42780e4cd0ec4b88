"""`ctpo watch`: a real server on loopback over a run with hostile text, asked as browsers and others ask."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import http.client
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, urlencode

import httpx
import pytest

from ctpo_megatron.cli import main
from ctpo_megatron.report import watch, watch_pages
from ctpo_megatron.report.trajectories.heads import addresses
from ctpo_megatron.report.watch import known_scripts
from ctpo_megatron.tracking import read_heads, trajectory_files, write_trajectories
from tests.support.deadlines import scaled
from tests.tracking.synthetic_run import HOSTILE, decode, make_groups, ratio_fields, write_run

EVIL = f"\"'><img src=x onerror=alert(1)>{HOSTILE}'\"/../"
START_S = scaled(60)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """Ends with a step whose every text is hostile."""
    path = write_run(tmp_path_factory.mktemp("runs"), steps=2)
    groups = make_groups(random.Random(0), 2, 4, 0.5, final=EVIL)
    for trajectory in [t for group in groups for t in group.trajectories]:
        trajectory.prompt_id = trajectory.finish_reason = EVIL
        for call in trajectory.tool_calls:
            call.name = call.status = call.output = EVIL
            call.arguments = {EVIL: EVIL}
    write_trajectories(path, 3, groups, decode, extra=ratio_fields(random.Random(1), groups))
    return path


@contextmanager
def served(run_dir: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command as users start it, and its address."""
    command = [sys.executable, "-m", "ctpo_megatron.cli", "watch", str(run_dir), "--port", "0", *options]
    path = os.pathsep.join([*sys.path, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    try:
        line = process.stderr.readline()
        found = re.match(r"http://\S+", line)
        assert found, line + process.stderr.read()
        yield process, found[0]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="module")
def address(run_dir) -> Iterator[str]:
    with served(run_dir) as (_, url):
        yield url


def get(url: str, path: str, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.get(url + path, headers=named, timeout=START_S, trust_env=False)


class Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def is_inert(page: str) -> bool:
    """Whether no element of a page can run what data say; its only scripts are files of the server."""
    for tag, attributes in Elements(page).found:
        if tag == "img" or any(name.startswith("on") for name in attributes):
            return False
        is_program = attributes.get("type") not in ("application/json", "text/plain")
        if tag == "script" and is_program and not (attributes.get("src") or "").startswith("/assets/"):
            return False
    return HOSTILE not in page


def names(run_dir: Path, step: int) -> list[str]:
    return [str(name) for name in addresses("training", step, read_heads(trajectory_files(run_dir)[step]))]


def test_a_search_leads_to_pages_of_groups_whatever_their_text(run_dir, address):
    found = get(address, "/trajectories?" + urlencode({"text": EVIL, "order": "-length"}))
    assert found.status_code == 200 and is_inert(found.text) and "8 trajectories in 5 dumps" in found.text
    links = [a["href"] for tag, a in Elements(found.text).found if tag == "a" and a.get("href", "").startswith("/traj")]
    groups = [link for link in links if link.startswith("/trajectory/")]
    assert len(groups) == 8 and {link.split("#")[1] for link in groups} == set(names(run_dir, 3))
    page = get(address, groups[0].split("#")[0])
    assert page.status_code == 200 and is_inert(page.text)
    ids = [attributes["id"] for tag, attributes in Elements(page.text).found if tag == "article"]
    assert sorted(ids) == sorted(names(run_dir, 3))  # one prompt: all eight stand side by side
    assert page.text.count("data-ratio=") == 8


def test_best_and_worst_come_first(run_dir, address):
    page = get(address, f"/trajectory/{names(run_dir, 2)[0]}").text
    rewards = [float(a["data-reward"]) for tag, a in Elements(page).found if tag == "article"]
    assert len(rewards) == 4 and rewards[0] == max(rewards) and rewards[1] == min(rewards)


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/trajectory/step-9-p-0", "/trajectory/" + quote(EVIL, safe=""), "/assets/../setup.py",
     "/assets/..%2f..%2f..%2fsetup.py", "/config.yaml", "/trajectory/..%2f..%2fconfig.yaml", "//config.yaml",
     "/assets/style.css.jinja", "/docs", "/openapi.json"],
)  # fmt: skip
def test_nothing_else_is_served(address, path):
    with connected(address) as connection:  # httpx would normalize paths
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 404 and is_inert(answer.read().decode())


@contextmanager
def connected(address: str) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=START_S)
    try:
        yield connection
    finally:
        connection.close()


def test_a_query_that_cannot_be_answered_is_explained(address):
    answer = get(address, "/trajectories?" + urlencode({"order": HOSTILE, HOSTILE: "1"}))
    assert answer.status_code == 400 and is_inert(answer.text) and "is no field; known: text, step" in answer.text


def test_the_report_may_run_its_own_scripts_alone(run_dir, address):
    answer = get(address, "/")
    assert answer.status_code == 200 and "<h2>Trajectories</h2>" in answer.text and HOSTILE not in answer.text
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    scripts = re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL)
    packed = re.search(r'id="vega">(.*?)</script>', answer.text, re.DOTALL)[1]
    programs = [*(text.encode() for text in scripts), gzip.decompress(base64.b64decode(packed))]
    hashes = [base64.b64encode(hashlib.sha256(program).digest()).decode() for program in programs]
    assert len(scripts) == 1 and policy["script-src"].split() == [f"'sha256-{each}'" for each in hashes]
    injected = answer.text.replace("<main>", f"<main>{HOSTILE}")
    assert known_scripts(injected) == policy["script-src"].split()


def test_the_report_is_made_again_when_the_run_has_written_but_not_at_once(tmp_path, monkeypatch):
    path = write_run(tmp_path, steps=2)
    pages = watch_pages.WatchPages(path)
    first = pages.report()
    write_trajectories(path, 3, make_groups(random.Random(0), 1, 2, 0.5), decode)
    assert pages.report() is first
    monkeypatch.setattr(watch_pages, "REPORT_S", 0.0)
    second = pages.report()
    assert 'id="step-3-' in second and 'id="step-3-' not in first
    assert pages.report() is second
    assert not (path / "report.html").exists() and not (path / "figures").exists()


@pytest.mark.parametrize("path", ["/trajectories", "/assets/page.js", "/nothing", "/trajectories?page=x"])
def test_every_answer_forbids_what_pages_do_not_need(address, path):
    headers = get(address, path).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["form-action"] == "'self'"
    assert headers["x-content-type-options"] == "nosniff"
    assert not [name for name in headers if name.startswith("access-control") or name in ("server", "set-cookie")]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "SAME"}, 200),
        ({"sec_fetch_site": "same-origin"}, 200),
        ({"sec_fetch_site": "none"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"host": "evil.example"}, 421),
        ({"host": "127.0.0.1"}, 421),
        ({"host": "127.0.0.1:1"}, 421),
        ({"host": "evil.example", "origin": "http://evil.example"}, 421),
    ],
)
def test_other_sites_and_names_are_refused(address, headers, status):
    headers = {name: address if value == "SAME" else value for name, value in headers.items()}
    for path in ("/trajectories", "/assets/page.js"):
        assert get(address, path, **headers).status_code == status


def test_localhost_is_a_name_of_this_machine(address):
    assert get(address, "/trajectories", host="localhost:" + address.rpartition(":")[2]).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_it_only_shows(run_dir, address, method):
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    answer = httpx.request(method, address + "/trajectories", timeout=START_S, trust_env=False)
    assert answer.status_code == 405 and answer.headers["allow"] == "GET, HEAD"
    assert httpx.head(address + "/trajectories", timeout=START_S, trust_env=False).content == b""
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_new_and_damaged_dumps_are_seen_without_a_new_start(tmp_path):
    path = write_run(tmp_path, steps=2)
    with served(path) as (_, url):
        assert "of 4 dumps" in get(url, "/trajectories").text or "in 4 dumps" in get(url, "/trajectories").text
        write_trajectories(path, 3, make_groups(random.Random(0), 1, 2, 0.5), decode)
        assert "2 trajectories in 1 dumps" in get(url, "/trajectories?step=3").text
        whole = trajectory_files(path)[3].read_bytes()
        (path / "trajectories" / "step_000004.parquet").write_bytes(whole[:200])
        page = get(url, "/trajectories?step=3-4").text
        assert "step_000004.parquet is damaged" in page and page.count('href="/trajectory/step-3-') == 2
        answer = get(url, "/trajectory/step-4-rem-0-0")
        assert answer.status_code == 500 and "is damaged" in answer.text


def test_a_busy_server_says_so(run_dir, monkeypatch):
    monkeypatch.setattr(watch_pages, "WAIT_S", 0.05)
    app, pages = watch.create_app(run_dir, frozenset({"x"}))

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.get("/trajectories")

    with pages._lock:
        answer = asyncio.run(ask())
    assert answer.status_code == 503 and "wait for them and reload" in answer.text
    assert asyncio.run(ask()).status_code == 200


def test_a_search_that_takes_long_says_how_far_it_came(run_dir, monkeypatch):
    monkeypatch.setattr(watch_pages, "SEARCH_S", -1.0)
    page = watch_pages.WatchPages(run_dir).results({"text": "722"})
    assert "with 0 of 5 dumps searched. Reload to continue" in page and "Nothing passes" not in page


def test_a_reader_that_stops_reading_is_given_up(monkeypatch):
    monkeypatch.setattr(watch, "SEND_S", 0.1)

    async def page(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 3 * watch.CHUNK})

    sent = []

    async def stuck(message):
        sent.append(message)
        if len(sent) == 3:
            await asyncio.sleep(3600)

    scope = {"type": "http", "method": "GET"}
    with pytest.raises(ConnectionError, match="64 KiB"):
        asyncio.run(watch.Careful(page)(scope, None, stuck))
    assert [len(message.get("body", b"")) for message in sent] == [0, watch.CHUNK, watch.CHUNK]
    assert sent[1]["more_body"] is True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_at_once_and_quietly(run_dir, number):
    with served(run_dir) as (process, url), socket.create_connection(url[7:].split(":"), timeout=START_S):
        get(url, "/trajectories")
        began = time.monotonic()
        process.send_signal(number)
        status = process.wait(START_S)
        assert time.monotonic() - began < scaled(5)
        assert process.stderr.read() == ""
        assert status in (130, 128 + number, -number)


def test_what_cannot_be_served_is_said(run_dir, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["watch", str(run_dir), "--port", str(port)]) == 2
    assert f"--port {port}: Address already in use; give another port, or 0" in capsys.readouterr().err
    for host, said in (("0.0.0.0", "everybody who reaches it"), ("::", "everybody"), ("example.org", "no IP address")):
        assert main(["watch", str(run_dir), "--host", host]) == 2
        assert said in capsys.readouterr().err
    assert main(["watch", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
