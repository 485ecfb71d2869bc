from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlparse

import pytest

ROOT = Path(__file__).parents[2]
LEFT_BEHIND = "net::ERR_ABORTED"  # a request that was still on its way when the next page was opened
SUB_PATH = "some/where"  # the site must not depend on standing at a server's root


def build(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a strict build into folder, without touching the repository. A quiet one would not count its warnings."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *arguments]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The folder of the built site; its server's root is two levels above."""
    pytest.importorskip("mkdocs", reason="the site needs the extra `site`")
    folder = tmp_path_factory.mktemp("web") / SUB_PATH
    done = build(folder)
    assert done.returncode == 0, f"mkdocs build --strict failed:\n{done.stdout[-5000:]}{done.stderr[-5000:]}"
    return folder


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="session")
def url(site):
    """Where the site is served, with a slash at the end."""
    web = site.parents[SUB_PATH.count("/")]
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(web))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{SUB_PATH}/"
        server.shutdown()


@pytest.fixture
def visit(browser, url):
    """A function that opens a page of the site; at the end nothing may have gone wrong on any."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page.set_default_timeout(300_000)  # ms; on a busy machine a page takes its time, which is not what is tested
    problems: list[str] = []
    page.on("console", lambda m: problems.append(f"console: {m.text}") if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("requestfailed", lambda r: problems.append(f"failed: {r.url}") if r.failure != LEFT_BEHIND else None)
    page.on("response", lambda r: problems.append(f"{r.status}: {r.url}") if r.status >= 400 else None)
    page.on(
        "request",
        lambda r: (
            problems.append(f"leaves the site: {r.url}")
            if urlparse(r.url).scheme in ("http", "https") and not r.url.startswith(url)
            else None
        ),
    )

    def go(address: str):
        page.goto(url + address, wait_until="load")
        return page

    yield go
    page.close()
    assert not problems
