"""The guide's attention backend beside the engine's simplest one, and beside the loop without memory."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from chapters.reference.examples import add_backend
from minisgl.attention import BACKENDS
from minisgl.config import EngineConfig
from minisgl.core import SamplingParams
from minisgl.engine.engine import Engine
from minisgl.simple import naive_generate
from tests.helpers import check_whole, request, serve, tiny_model

PROMPTS = [[3, 99, 14, 15, 92, 65, 35], [3, 99, 14, 15, 92, 65, 36, 1], [5] * 33, [120]]


@pytest.fixture(autouse=True)
def registered():
    with patch.dict(BACKENDS):
        add_backend.register()
        yield


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_greedy_tokens_are_those_of_the_loop_without_memory(model, page_size):
    switches = {"page_size": page_size, "kv_pages": 1 + 4 * -(-64 // page_size), "max_batch_tokens": 10}
    engine = Engine(model, EngineConfig(attention="sdpa", kernels="torch", **switches))
    requests = serve(engine, *(request(i, p, max_tokens=8) for i, p in enumerate(PROMPTS)))

    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert [r.output for r in requests] == [list(naive_generate(model, p, params)) for p in PROMPTS]
    check_whole(engine.scheduler)


def test_the_bytes_read_are_those_of_the_live_tokens_and_no_more(model):
    engine = Engine(model, EngineConfig(attention="sdpa", kernels="torch", kv_pages=20))
    serve(engine, request(0, [9] * 10, max_tokens=3))

    token_bytes = engine.pool.kv[:, :, 0, 0].nbytes  # K and V of a token in all layers
    assert engine.work.kv_bytes_read == (10 + 11 + 12) * token_bytes


def test_a_graph_is_refused_with_the_reason(model):
    with pytest.raises(ValueError, match="is a stand-in"):
        Engine(model, EngineConfig(attention="sdpa", kernels="torch", kv_pages=20, graphs="on"))
