"""`minisgl serve` as a process of its own, for as long as it is measured."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from http.client import HTTPException
from typing import Any
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from benchmarks.fresh import environment
from minisgl.cli import given_fields
from minisgl.config import EngineConfig

START_S, END_S = 900.0, 60.0  # a GPU captures its graphs before it is ready
_open = build_opener(ProxyHandler({})).open  # this machine's own port is behind no proxy


def engine_flags(args: Namespace) -> list[str]:
    """The engine's switches as they were given, for another command line."""
    flags = [] if args.chapter is None else ["--chapter", str(args.chapter)]
    given: dict[str, Any] = given_fields(EngineConfig, args)
    for name in (field.name for field in fields(EngineConfig) if field.name in given):
        flag, value = name.replace("_", "-"), given[name]
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


@contextmanager
def running(flags: Sequence[str]) -> Iterator[str]:
    """The address of a server that answers; it is ended, with all that it started, on the way out.

    Raises:
        ValueError: it does not start; with the last lines it wrote.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "minisgl", "serve", "--port", str(port), *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait(process, url + "/health", log)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], health: str, log: Any) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            log.seek(0)
            raise ValueError("`minisgl serve` does not start:\n" + "".join(log.readlines()[-20:]).strip())
        try:
            with _open(health, timeout=5):
                return
        except (URLError, HTTPException, OSError):  # not there yet, or 503: it loads
            time.sleep(0.1)
    raise ValueError(f"`minisgl serve` was not ready in {START_S:.0f} s")


def free_port() -> int:
    """One that nobody listens at just now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
