"""The server's process, from its start to its end.

The port is bound first, once, and answers while the model loads: 503, as those expect who watch /health. Ctrl-C or
SIGTERM lets open answers end within a grace time, a second one ends at once, and so does the end of the engine, with
exit status 1.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from minisgl.config import EngineConfig
from minisgl.core import SamplingParams
from minisgl.server.app import make_app
from minisgl.server.client import EngineClient, EngineDied
from minisgl.server.config import ServerConfig
from minisgl.server.http import HttpProtocol
from minisgl.server.service import STOPPING, Service
from minisgl.tokenizer.encode import Prompt

log = logging.getLogger("minisgl")
_TICK_S = 0.1
_LAST_WORDS_S = 0.5  # for errors to reach their clients when the engine has died


def serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Serve until a signal, or the engine's end; returns the exit status.

    Raises:
        OSError: the port is taken, or the file of prompts cannot be read.
        FetchError, ValueError: as LLM; or a line of that file is no prompt.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    log.setLevel(logging.INFO)
    prompts = read_prompts(config.preload) if config.preload else []
    with listen(config.host, config.port) as listener:
        try:
            from uvloop import run
        except ImportError:  # not on Windows
            from asyncio import run  # type: ignore[assignment]
        return run(_serve(engine_config, config, listener, prompts))


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        OSError: it cannot, and why.
    """
    try:
        [family, _, _, _, address], *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} of {host} is taken: choose another with --port, or end what listens there"
        else:
            text = f"cannot listen at port {port} of {host}: {error.strerror}"
        raise OSError(text) from None


def read_prompts(path: str) -> list[Prompt]:
    """The prompts of a file: a line is a text, or a JSON object with "prompt" or "messages".

    Raises:
        OSError: there is no such file.
        ValueError: a line begins like an object and is none of these.
    """
    prompts = list[Prompt]()
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("{"):
            prompts += [line] if line.strip() else []
            continue
        try:
            entry = json.loads(line)
            [name] = entry
            prompts.append({"prompt": str, "messages": list}[name](entry[name]))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f'{path}, line {number} is no JSON object with "prompt" or "messages"') from None
    return prompts


class _Http(uvicorn.Server):
    """Leaves signals to us."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(
    engine_config: EngineConfig, config: ServerConfig, listener: socket.socket, prompts: list[Prompt]
) -> int:
    service, told = Service(config, engine_config.model), asyncio.Event()

    def signalled() -> None:
        if told.is_set():
            os._exit(130)
        told.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    settings = uvicorn.Config(
        make_app(service),
        http=HttpProtocol,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    http = _Http(settings)
    serving = asyncio.ensure_future(http.serve([listener]))
    stop, life = asyncio.ensure_future(told.wait()), _Life(service, engine_config)
    living = asyncio.ensure_future(life.run(prompts, listener.getsockname()))
    try:
        await asyncio.wait((living, stop, serving), return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            log.info("stopping: %d answers are open, and have %g s", service.num_held, config.grace_s)
            service.closed = STOPPING
            return 0
        living.result()
        return 1
    except EngineDied as death:
        log.error("the engine is gone: %s", death)
        await asyncio.sleep(_LAST_WORDS_S)
        return 1
    finally:
        living.cancel()
        await asyncio.wait((living,))
        if life.engine:
            await life.engine.close(config.grace_s)
        http.should_exit = True
        await serving


class _Life:
    """The engine from its start to its end, and what is looked after meanwhile."""

    def __init__(self, service: Service, engine_config: EngineConfig) -> None:
        self.service, self.engine_config = service, engine_config
        self.engine: EngineClient | None = None

    async def run(self, prompts: list[Prompt], address: Any) -> None:
        """Raises EngineDied at its end, or what EngineClient.start raises."""
        service, begin = self.service, time.monotonic()
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        url = f"http://{host}:{address[1]}"
        log.info("listening at %s, loading %s", url, self.engine_config.model)

        def stage(doing: str) -> None:
            service.closed = f"the server is starting: {doing}"

        self.engine = engine = await EngineClient.start(self.engine_config, stage)
        stage("warming up")
        for params in (SamplingParams(max_tokens=2), SamplingParams(max_tokens=2, temperature=1, top_p=0.9)):
            await service.compute(engine, [0], params)
        if prompts:
            stage("computing the prompts of --preload")
            await self._preload(engine, prompts)
        service.open(engine)
        pages = f"{engine.gauges.pages:,} pages of {self.engine_config.page_size} tokens"
        log.info("ready after %.1f s on %s, with %s: %s", time.monotonic() - begin, engine.device, pages, url)
        await self._watch(engine)

    async def _preload(self, engine: EngineClient, prompts: list[Prompt]) -> None:
        """One after the other, so that they too share what they have in common."""
        num_tokens = shared = num = 0
        for i, prompt in enumerate(prompts, 1):
            try:
                done = await self.service.compute(engine, prompt, SamplingParams(max_tokens=1))
            except ValueError as error:
                log.warning("prompt %d of --preload was left out: %s", i, error)
                continue
            num, num_tokens, shared = num + 1, num_tokens + done.prompt_tokens, shared + done.cached_tokens
        cached = engine.gauges.pages_cached
        log.info("preloaded %d prompts: %d tokens, %d of them shared; %d pages cached", num, num_tokens, shared, cached)

    async def _watch(self, engine: EngineClient) -> None:
        """Until the engine is gone."""
        metrics, limit = self.service.metrics, self.service.config.memory_alarm
        then, before = time.monotonic(), metrics.generation_tokens
        while not engine.dead:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            if now - then >= 1:
                metrics.tokens_per_s = (metrics.generation_tokens - before) / (now - then)
                then, before = now, metrics.generation_tokens
            share = 1 - engine.gauges.pages_available / engine.gauges.pages
            if share > limit and not metrics.memory_alarm:
                metrics.memory_alarm = True
                log.warning("memory: %.0f %% of the pages are in use, --memory-alarm is %g", 100 * share, limit)
            elif share <= 0.9 * limit and metrics.memory_alarm:  # not at once, or it would come and go
                metrics.memory_alarm = False
                log.info("memory: %.0f %% of the pages are in use, the alarm is over", 100 * share)
        raise EngineDied(engine.dead)
