"""A process of the server is killed in the middle of its work: who is told, what ends, and what is left behind.

What one client is told, and the end by a signal that lets answers end: test_lifecycle.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from tests.server.conftest import PATIENCE_S, ROOT, launched, wait_until, write_tiny_model

pytestmark = [
    pytest.mark.xdist_group("servers"),
    pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="looks at processes through /proc"),
]

ENDLESS = {"model": "tiny", "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}
FLAGS = ["--served-model-name", "tiny", "--max-running-requests", "12", "--kv-pages", "2600"]
CLIENTS = 24  # half of them wait
SOON_S = 10.0  # two seconds, where nothing else runs; on a busy machine still far below what an answer takes


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    """A model with room for long answers."""
    return write_tiny_model(tmp_path_factory.mktemp("patient"), max_position_embeddings=4096)


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where the server and its processes put temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def family(pid: int) -> list[int]:
    """A process and all that it started, directly or not."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(grandchild for child in children for grandchild in family(int(child)))]


def shared_memory(pids: list[int]) -> set[str]:
    """Files in /dev/shm that these processes have mapped, and that have a name."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return {
        name for name in re.findall(r"(/dev/shm/\S+)(?: \(deleted\))?$", maps, re.MULTILINE) if os.path.exists(name)
    }


def alive(pid: int) -> bool:
    """Whether it runs: one that has ended may wait for a parent that asks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def told(http: aiohttp.ClientSession, stream: bool) -> tuple[str, float]:
    """How a request ends that will not be answered, and when."""
    try:
        async with http.post("/v1/completions", json=ENDLESS | {"stream": stream}) as response:
            text = await response.text()
    except aiohttp.ClientError:
        return "connection lost", time.monotonic()
    now = time.monotonic()
    if not stream:
        return f"{response.status} {json.loads(text)['error']['code']}", now
    if response.status != 200:  # it had waited
        return f"{response.status} {json.loads(text)['error']['code']}", now
    return f"stream {json.loads(text.strip().split(chr(10) * 2)[-1].removeprefix('data: '))['error']['code']}", now


async def kill_under_load(served, victim: int) -> tuple[Counter[str], float]:
    """Kill a process while many clients are open; returns how they ended, and how long the last one waited for it."""
    timeout, connector = aiohttp.ClientTimeout(total=PATIENCE_S), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(served.url, timeout=timeout, connector=connector) as http:
        clients = [asyncio.ensure_future(told(http, stream=i % 2 == 0)) for i in range(CLIENTS)]
        while True:
            async with http.get("/stats") as response:
                stats = await response.json()
            if stats["running"] == 12 and stats["waiting"] == CLIENTS - 12:
                break
            assert not any(client.done() for client in clients)
            await asyncio.sleep(0.02)
        begin = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        ends = await asyncio.gather(*clients)
    return Counter(how for how, _ in ends), max(now for _, now in ends) - begin


def check_nothing_is_left(pids: list[int], shared: set[str], scratch: Path) -> None:
    """No process, no memory, no socket."""
    wait_until(lambda: not any(map(alive, pids)))
    assert not [name for name in shared if os.path.exists(name)]
    assert not list(scratch.glob("minisgl-*"))


def test_when_the_engine_is_killed_everybody_is_told_and_the_port_is_free_at_once(patient, scratch):
    with launched(patient, *FLAGS) as served:
        pids = family(served.process.pid)
        shared = shared_memory(pids)
        ends, late_s = asyncio.run(kill_under_load(served, served.engine_pid()))

        assert sum(ends.values()) == CLIENTS
        assert set(ends) <= {"stream engine_died", "503 engine_died"}, ends
        assert ends["503 engine_died"] >= CLIENTS // 2
        assert late_s < SOON_S
        assert served.process.wait(PATIENCE_S) == 1
        check_nothing_is_left(pids, shared, scratch)
        port = served.url.rpartition(":")[2]

    with launched(patient, *FLAGS, "--port", port) as again:
        answer = again.ask("/v1/completions", ENDLESS | {"max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3
        pids = family(again.process.pid)
        shared = shared_memory(pids)

        ends, late_s = asyncio.run(kill_under_load(again, again.process.pid))  # now the front

        assert ends == {"connection lost": CLIENTS}
        assert late_s < SOON_S
        check_nothing_is_left(pids, shared, scratch)
        assert again.process.wait() == -signal.SIGKILL


def test_when_a_rank_behind_the_engine_is_killed_everybody_is_told(patient, scratch):
    with launched(patient, *FLAGS, "--tp", "2", "--device", "cpu") as served:
        pids = family(served.process.pid)
        shared = shared_memory(pids)
        rank_1 = next(pid for pid in family(served.engine_pid())[1:] if b"spawn_main" in command(pid))
        ends, late_s = asyncio.run(kill_under_load(served, rank_1))

        assert set(ends) <= {"stream engine_died", "503 engine_died"}, ends
        assert late_s < SOON_S
        assert served.process.wait(PATIENCE_S) == 1
        assert "rank 1" in "".join(served.lines)
        check_nothing_is_left(pids, shared, scratch)


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_signal_under_load_lets_all_answers_end(patient, scratch):
    async def clients() -> list[str]:
        async with aiohttp.ClientSession(served.url) as http:
            body = ENDLESS | {"max_tokens": 200}
            asked = [
                asyncio.ensure_future(http.post("/v1/completions", json=body | {"stream": i % 2 == 0}))
                for i in range(CLIENTS)
            ]
            while True:
                async with http.get("/stats") as response:
                    if (await response.json())["held"] == CLIENTS:
                        break
                assert not any(response.done() and response.result().status != 200 for response in asked)
            served.process.send_signal(signal.SIGTERM)
            return [await (await response).text() for response in asked]

    with launched(patient, *FLAGS, "--grace-s", "100") as served:
        pids = family(served.process.pid)
        taken = served.url.rpartition(":")[2]
        other = [sys.executable, "-m", "minisgl", "serve", "--model", str(patient), "--port", taken]
        second = subprocess.run(other, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
        answers = asyncio.run(clients())
        assert served.process.wait(PATIENCE_S) == 0

    assert all('"finish_reason":"length"' in answer for answer in answers)
    assert all(answer.endswith("data: [DONE]\n\n") for answer in answers[::2])
    check_nothing_is_left(pids, set(), scratch)
    assert second.returncode == 1
    assert re.fullmatch(rf"minisgl: port {taken} of 127\.0\.0\.1 is taken: .*\n", second.stderr)
