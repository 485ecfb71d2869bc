"""Some seconds of `benchmarks.serve_load`: many clients, many of whom hang up, and nothing that is kept."""

from __future__ import annotations

import asyncio
import os

import pytest

from benchmarks.serve_load import ANSWERED, GAVE_UP, REFUSED, faults, measure
from tests.server.conftest import launched

pytestmark = [
    pytest.mark.xdist_group("servers"),
    pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="looks at processes through /proc"),
]


def test_under_load_every_request_ends_and_nothing_is_kept(tiny_folder):
    flags = ["--served-model-name", "tiny", "--kv-pages", "65", "--max-running-requests", "16"]
    with launched(tiny_folder, *flags) as served:
        pids = {"front": served.process.pid, "engine": served.engine_pid()}
        found = asyncio.run(measure(served.url, pids, "tiny", clients=48, seconds=8, patience_s=0.5))

    assert faults(found) == [], found
    assert {ANSWERED, GAVE_UP, REFUSED} <= found["ended"].keys()
    assert {"stop", "length"} <= found["finish_reasons"].keys()
    assert found["counted_by_server"]["request_aborts"] > 0
    assert found["rests"][1]["stats"]["preemptions"] > 0, "the pool was never short"
