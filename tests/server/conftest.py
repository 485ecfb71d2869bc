"""A real server in a process of its own, on a tiny model, shared by all tests of a worker; and its twin, an LLM."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.helpers import hf_twin, tiny_model
from tests.tiny_tokenizer import byte_level_tokenizer

ROOT = Path(__file__).parents[2]
ENGINE = {"kv_pages": 257, "max_running_requests": 8}
FLAGS = ["--kv-pages", "257", "--max-running-requests", "8", "--max-queue", "24"]
PATIENCE_S = 120.0  # of whoever waits for something that must come; no test measures time by it


@dataclass
class Answered:
    """A response."""

    status: int
    headers: dict[str, str]  # names in small letters, as the server writes them
    text: str

    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> dict[str, Any]:
        """What an error body says; its form is checked."""
        body = self.json()
        assert list(body) == ["error"]
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return body["error"]


@dataclass
class Served:
    """A running server."""

    url: str
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)  # of its log, as they come

    def ask(self, path: str, body: object = None, method: str = "", **headers: str) -> Answered:
        """One request; a body that is not bytes goes as JSON."""
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {} if content is None else {"content-type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=PATIENCE_S)
        try:
            connection.request(method or ("GET" if content is None else "POST"), path, content, sent)
            response = connection.getresponse()
            return Answered(response.status, dict(response.getheaders()), response.read().decode())
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels; 0 if it has never been counted."""
        found = re.findall(rf"^minisgl:{name}(?:{{.*}})? (\S+)$", self.ask("/metrics").text, re.MULTILINE)
        return sum(map(float, found))

    def engine_pid(self) -> int:
        """The engine's process: the child that runs Python's spawn."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())


def wait_until(holds) -> None:
    """Until `holds()`, or a failure."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "what was waited for did not come"
        time.sleep(0.02)


@contextmanager
def launched(model: object, *flags: str, ready: bool = True) -> Iterator[Served]:
    """`minisgl serve` at a free port; with ready=False from the moment it listens."""
    command = [sys.executable, "-m", "minisgl", "serve", "--model", str(model), "--port", "0", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    served = Served("", process)

    reader = threading.Thread(target=_follow, args=(process, served.lines), daemon=True)
    reader.start()
    try:
        wait_until(lambda: process.poll() is not None or any("listening at" in line for line in served.lines))
        if found := re.search(r"listening at (http://\S+),", "".join(served.lines)):
            served.url = found[1]
        if ready:
            wait_until(lambda: process.poll() is not None or served.ask("/health").status == 200)
            assert process.poll() is None, "".join(served.lines)
        yield served
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
        process.wait()
        reader.join()


def _follow(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stderr
    for line in process.stderr:
        lines.append(line)


def write_tiny_model(folder: Path, **config: object) -> Path:
    """A Hugging Face folder: random weights, a byte-level tokenizer and a chat template."""
    sizes = {"vocab_size": 300, "max_position_embeddings": 1024, "eos_token_ids": (0,)} | config
    hf_twin(tiny_model(tie_word_embeddings=False, **sizes)).save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """The tiny model's folder."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def server(tiny_folder):
    """A server on the tiny model, which it calls "tiny"."""
    with launched(tiny_folder, "--served-model-name", "tiny", *FLAGS) as served:
        yield served


@pytest.fixture(scope="session")
def base_url(server):
    """Where OpenAI's clients find it."""
    return server.url + "/v1"


@pytest.fixture
def client(base_url):
    """OpenAI's own client. It does not try again: each error is seen."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="session")
def llm(tiny_folder):
    """The same engine in this process, to compare with."""
    from minisgl import LLM, EngineConfig

    with LLM(EngineConfig(model=str(tiny_folder), **ENGINE)) as llm:
        yield llm


def events(text: str) -> Sequence[str]:
    """The data of a body of server-sent events."""
    frames = text.split("\n\n")
    assert frames.pop() == "", "the last event is not complete"
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [frame.removeprefix("data: ") for frame in frames]
