"""The batch engine on tiny models: the bare loop's tokens from every layout; what it refuses, counts and survives."""

from __future__ import annotations

import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.core import SamplingParams, WorkCounts
from minisgl.engine.engine import Engine
from minisgl.models.register import build_model
from minisgl.models.weight import load_weights
from minisgl.simple import cached_generate, naive_generate
from tests.helpers import check_pool, check_whole, hf_state, request, serve, tiny_model

PROMPTS = [[3, 99, 14, 15, 92, 65, 35], [3, 99, 14, 15, 92, 65, 36, 1], [5] * 33, [120]]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def greedy(model, prompt, n=8):
    return list(naive_generate(model, prompt, SamplingParams(max_tokens=n, ignore_eos=True)))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_batch_gets_the_bare_loops_greedy_tokens(architecture, tied):
    model = tiny_model(architecture, tie_word_embeddings=tied)
    engine = Engine(model, EngineConfig(kv_pages=50))
    requests = serve(engine, *(request(i, p, max_tokens=8) for i, p in enumerate(PROMPTS)))

    assert [r.output for r in requests] == [greedy(model, p) for p in PROMPTS]


@pytest.mark.parametrize("page_size", [1, 2, 16, 33, 512])
def test_the_page_size_does_not_change_the_tokens(model, page_size):
    engine = Engine(model, EngineConfig(page_size=page_size, kv_pages=1 + 4 * -(-64 // page_size)))
    requests = serve(engine, *(request(i, p, max_tokens=8) for i, p in enumerate(PROMPTS)))

    assert [r.output for r in requests] == [greedy(model, p) for p in PROMPTS]


def test_every_token_is_computed_once_and_a_cached_prefix_not_at_all(model):
    engine = Engine(model, EngineConfig(page_size=4, kv_pages=50))
    serve(engine, request(0, [9] * 10, max_tokens=3))
    assert (engine.work.steps, engine.work.tokens_computed, engine.work.tokens_reused) == (3, 10 + 2, 0)

    [r] = serve(engine, request(1, [9] * 10, max_tokens=3))
    assert r.num_cached == 8
    assert (engine.work.steps, engine.work.tokens_computed, engine.work.tokens_reused) == (6, 12 + 4, 8)


def test_the_bytes_written_are_those_of_the_contiguous_cache(model):
    engine = Engine(model, EngineConfig(kv_pages=50))
    serve(engine, request(0, PROMPTS[0], max_tokens=5))
    work = WorkCounts()
    list(cached_generate(model, PROMPTS[0], SamplingParams(max_tokens=5, ignore_eos=True), work))
    assert engine.work.kv_bytes_written == work.kv_bytes_written
    assert engine.work.kv_bytes_read == work.kv_bytes_read


def test_memory_beyond_the_pages_in_use_is_never_read(model):
    engine = Engine(model, EngineConfig(page_size=4, kv_pages=50, max_batch_tokens=6))
    engine.pool.kv[:, :, 1:] = float("nan")
    engine.pages._free.reverse()
    requests = serve(engine, *(request(i, p, max_tokens=8) for i, p in enumerate(PROMPTS)))

    assert [r.output for r in requests] == [greedy(model, p) for p in PROMPTS]


def test_a_step_returns_who_got_a_token_or_ended_each_once(model):
    engine = Engine(model, EngineConfig(kv_pages=50, max_batch_tokens=4))
    short, long, refused = request(0, [1, 2], max_tokens=1), request(1, [3] * 9), request(2, [])
    for r in (short, long, refused):
        engine.add(r)

    assert engine.step() == [short, refused]  # the long one's prompt is not through yet
    engine.abort(1)
    assert engine.step() == [long]
    assert not engine.has_work
    assert engine.step() == []


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1, 131], {}, "outside 0 … 130"),
        ([-1], {}, "outside 0 … 130"),
        ([1], {"logit_bias": {131: 1.0}}, "outside 0 … 130"),
        ([1] * 512, {}, "512 tokens, but a sequence may have at most 512"),
    ],
)
def test_a_request_that_cannot_be_served_is_a_result_with_the_reason(model, tokens, params, message):
    engine = Engine(model, EngineConfig(kv_pages=50))
    bad, good = serve(engine, request(0, tokens, **params), request(1, PROMPTS[0], max_tokens=8))

    assert (bad.finish_reason, bad.output) == ("error", [])
    assert message in bad.error
    assert good.output == greedy(model, PROMPTS[0])


def test_a_context_beyond_the_models_is_refused(model):
    with pytest.raises(ValueError, match="max_model_len is 513, but this model's context is 512"):
        Engine(model, EngineConfig(max_model_len=513))


def test_memory_for_no_page_at_all_says_what_to_change(model, monkeypatch):
    monkeypatch.setattr("minisgl.engine.engine.free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match=r"0 MB are free for K and V, and a page takes 0\.0 MB: lower --page-size"):
        Engine(model, EngineConfig())


def test_the_pool_takes_the_given_share_of_the_free_memory(model, monkeypatch):
    page_bytes = 16 * 2 * 2 * 2 * 10 * 4  # tokens, layers, K and V, heads, head_dim, bytes
    monkeypatch.setattr("minisgl.engine.engine.free_bytes", lambda device: 100 * page_bytes)

    assert Engine(model, EngineConfig(memory_fraction=0.5)).pages.capacity == 49
    assert Engine(model, EngineConfig()).pages.capacity == 24


def test_the_pool_is_no_larger_than_the_requests_can_use(model, monkeypatch):
    monkeypatch.setattr("minisgl.engine.engine.free_bytes", lambda device: 10**9)
    engine = Engine(model, EngineConfig(max_running_requests=3, max_model_len=50))

    assert engine.pages.capacity == 3 * 4


def test_nan_ends_a_request_with_an_error_and_no_token():
    model = tiny_model()
    engine = Engine(model, EngineConfig(kv_pages=50))
    model.lm_head.weight.data[5] = float("nan")
    [r] = serve(engine, request(0, [1, 2, 3], logprobs=1))

    assert (r.finish_reason, r.output, r.logprobs) == ("error", [], [])
    assert "NaN" in r.error
    check_whole(engine.scheduler)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_step_loses_nothing(model, error, monkeypatch):
    engine = Engine(model, EngineConfig(page_size=4, kv_pages=50, max_batch_tokens=6))
    kept, dropped = request(0, PROMPTS[0], max_tokens=8), request(1, PROMPTS[1], max_tokens=8)
    engine.add(kept)
    engine.add(dropped)

    def interrupted(batch):
        raise error

    for _ in range(6):
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "model", interrupted)
            with pytest.raises(error):
                engine.step()
        engine.pool.kv[:, :, engine.pages._free] = float("nan")
        engine.step()
    engine.abort(1)
    serve(engine)
    assert kept.output == greedy(model, PROMPTS[0])
    assert dropped.output == greedy(model, PROMPTS[1])[: len(dropped.output)]
    check_whole(engine.scheduler)


def test_an_abort_after_an_interrupted_step_gives_everything_back_and_caches_no_garbage(model, monkeypatch):
    engine = Engine(model, EngineConfig(page_size=4, kv_pages=50))
    engine.pool.kv[:, :, 1:] = float("nan")
    engine.add(r := request(0, PROMPTS[0]))
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "model", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    engine.abort(0)

    assert engine.step() == [r]
    assert engine.prefix.num_pages == 0
    check_whole(engine.scheduler)
    [again] = serve(engine, request(1, PROMPTS[0], max_tokens=8))
    assert again.output == greedy(model, PROMPTS[0])


def test_stats_tell_requests_and_pages_by_state(model):
    engine = Engine(model, EngineConfig(page_size=4, kv_pages=11, max_running_requests=1))
    engine.add(request(0, [1] * 9, max_tokens=2))
    engine.add(request(1, [2] * 3, max_tokens=1))
    engine.step()
    stats = engine.stats()

    assert (stats["requests_running"], stats["requests_waiting"]) == (1, 1)
    assert (stats["pages"], stats["pages_free"], stats["pages_cached"]) == (10, 7, 2)
    serve(engine)
    assert engine.stats()["requests_running"] == 0


def test_two_engines_on_one_model_do_not_meet(model):
    engines = [Engine(model, EngineConfig(kv_pages=50)) for _ in range(2)]
    requests = [request(0, p, max_tokens=8) for p in PROMPTS[:2]]
    for engine, r in zip(engines, requests, strict=True):
        engine.add(r)
    while any(engine.has_work for engine in engines):
        for engine, r in zip(engines, requests, strict=True):
            engine.step()
            check_pool(engine.scheduler, [r])

    assert [r.output for r in requests] == [greedy(model, p) for p in PROMPTS[:2]]


def test_a_closed_engine_gives_its_memory_back(model):
    engine = Engine(model, EngineConfig(kv_pages=50))
    serve(engine, request(0, [1, 2], max_tokens=2))
    engine.close()
    engine.close()

    assert engine.stats()["kv_pool_bytes"] == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_engines_run_and_stay_close_to_fp32s_first_choice(model, dtype):
    twin = build_model(model.config)
    load_weights(twin, hf_state(model).items(), torch.device("cpu"), dtype)
    engine = Engine(twin, EngineConfig(kv_pages=50))
    requests = serve(engine, *(request(i, p, max_tokens=4, logprobs=5) for i, p in enumerate(PROMPTS)))

    assert engine.pool.kv.dtype == dtype
    for r, prompt in zip(requests, PROMPTS, strict=True):
        assert greedy(model, prompt, 1)[0] in r.logprobs[0].top
