from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUB_PATH = "some/where"  # the site must not depend on standing at a server's root


def build(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a strict build into folder, without touching the repository."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder), *arguments]
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
