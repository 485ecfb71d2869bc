"""Traps that other engines fell into, one test each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl import LLM, EngineConfig, SamplingParams
from minisgl.engine.engine import Engine
from minisgl.engine.runner import Flight
from minisgl.simple import naive_generate
from minisgl.tokenizer.detokenizer import IncrementalDetokenizer
from tests.helpers import check_pool, check_whole, fake_forward, request, scheduler_with, serve, tiny_model
from tests.tiny_tokenizer import byte_level_tokenizer

ROOT = Path(__file__).parents[2]
PROMPT = [3, 99, 14, 15, 92, 65, 35, 8, 9]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def engine(model):
    return Engine(model, EngineConfig(page_size=4, kv_pages=40))


@pytest.fixture(scope="module")
def llm(tiny_folder):
    with LLM(EngineConfig(model=str(tiny_folder), device="cpu", page_size=4, kv_pages=40)) as llm:
        yield llm


def greedy(model, prompt, n=8, **params):
    return list(naive_generate(model, prompt, SamplingParams(max_tokens=n, **({"ignore_eos": True} | params))))


def spell(llm, monkeypatch, text):
    """Let the model say this text, one byte a token, whatever it is asked."""
    ids = [*llm.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def say(batch):
        tokens = [ids[len(r.output) % len(ids)] if start + n == len(r.tokens) else -1 for r, start, n in batch]
        return Flight(batch, lambda: tokens)

    monkeypatch.setattr(llm.engine, "launch", say)


# Pages and prefixes


@pytest.mark.parametrize("copies", [2, 3])
def test_equal_prompts_in_one_batch_end_on_the_same_pages_and_the_duplicates_are_free(model, engine, copies):
    requests = [request(i, PROMPT, max_tokens=8) for i in range(copies)]
    for r in requests:
        engine.add(r)
    engine.step()

    check_pool(engine.scheduler, requests)
    assert {tuple(r.pages[:2]) for r in requests} == {tuple(requests[0].pages[:2])}
    engine.pool.kv[:, :, engine.pages._free] = float("nan")  # where the duplicates were
    serve(engine)
    assert [r.output for r in requests] == [greedy(model, PROMPT)] * copies


def test_an_abort_while_the_prefill_is_in_flight_frees_its_pages_once():
    scheduler = scheduler_with(pages=8, page_size=4, max_batch_tokens=4)
    scheduler.add(r := request(0, PROMPT))
    for _ in range(2):  # the second chunk, too, has pages of the first behind it
        batch = scheduler.plan()
        if r.num_computed > 4:
            scheduler.abort(0)
        scheduler.retire(batch, fake_forward(batch))
        check_pool(scheduler, [r])

    check_whole(scheduler)


def test_two_aborts_of_one_request_in_flight_free_its_pages_once():
    scheduler = scheduler_with(pages=8, page_size=4)
    scheduler.add(request(0, PROMPT))
    batch = scheduler.plan()
    scheduler.abort(0)
    scheduler.abort(0)
    scheduler.retire(batch, [1])

    check_whole(scheduler)


@pytest.mark.parametrize("page_size", [3, 16])
def test_a_pool_that_is_full_in_pages_but_not_in_tokens_stalls_nobody(page_size):
    scheduler = scheduler_with(pages=4, page_size=page_size, output_reserve=0.0)
    requests = [request(i, [i] * (page_size + 1), max_tokens=page_size) for i in range(4)]  # 2 pages each, hardly used
    for r in requests:
        scheduler.add(r)
    while scheduler.has_work:
        batch = scheduler.plan()
        scheduler.retire(batch, fake_forward(batch))

    assert {r.finish_reason for r in requests} == {"length"}


@pytest.mark.parametrize("length", [4, 8])
def test_a_fully_cached_prompt_of_whole_pages_still_computes_its_last_token(model, engine, length):
    [_] = serve(engine, request(0, PROMPT, max_tokens=1))
    [r] = serve(engine, request(1, PROMPT[:length], max_tokens=8))

    assert r.num_cached == length - 4
    assert r.output == greedy(model, PROMPT[:length])


def test_a_prefix_cannot_be_found_before_its_forward_pass_is_over():
    scheduler = scheduler_with(pages=100, page_size=4)
    scheduler.add(request(0, PROMPT))
    first = scheduler.plan()
    scheduler.add(early := request(1, PROMPT))
    second = scheduler.plan()
    assert (second.requests[-1], second.starts[-1], early.num_cached) == (early, 0, 0)

    scheduler.retire(first, fake_forward(first))
    scheduler.add(late := request(2, PROMPT))
    scheduler.plan()
    assert late.num_cached == 8


def test_a_preempted_request_resumes_as_a_prefill_of_prompt_and_answer(model):
    engine = Engine(model, EngineConfig(page_size=1, kv_pages=24, output_reserve=0.0, prefix_cache="none"))
    first, second = serve(engine, request(0, PROMPT, max_tokens=8), request(1, PROMPT[::-1], max_tokens=8))

    assert (first.preemptions, second.preemptions > 0) == (0, True)
    assert (first.output, second.output) == (greedy(model, PROMPT), greedy(model, PROMPT[::-1]))


def test_salts_keep_equal_prompts_apart(model, engine):
    serve(engine, request(0, PROMPT, cache_salt="a", max_tokens=2))
    [other] = serve(engine, request(1, PROMPT, cache_salt="b", max_tokens=8))

    assert other.num_cached == 0
    assert other.output == greedy(model, PROMPT)


# Order


TRAFFIC = """
from random import Random
from minisgl.config import EngineConfig
from minisgl.core import Request, SamplingParams
from minisgl.kvcache.cache_manager import CacheManager
from minisgl.kvcache.pages import PageAllocator
from minisgl.kvcache.radix_cache import RadixCache
from minisgl.scheduler.scheduler import Scheduler

for policy in ("fcfs", "lpm"):
    random, pages = Random(0), PageAllocator(31)
    cache = CacheManager(pages, 2, RadixCache(pages, 2))
    config = EngineConfig(max_batch_tokens=16, max_running_requests=5, policy=policy, output_reserve=0.0)
    scheduler = Scheduler(config, cache, 60)
    for i in range(40):
        tokens = [7, 7, 7, 7, 8, 8][: random.randint(0, 6)] + [random.randrange(50) for _ in range(5)]
        salt = random.choice(("", "a", "b"))
        scheduler.add(Request(i, tokens, SamplingParams(max_tokens=9, priority=i % 2, cache_salt=salt)))
    while batch := scheduler.plan():
        print([(r.id, start, r.pages) for r, start in zip(batch.requests, batch.starts)])
        scheduler.retire(batch, [i % 50 for i in range(len(batch.requests))])
    print(scheduler.work.preemptions)
"""


def test_batches_and_pages_are_the_same_in_every_process():
    def steps(hash_seed):
        env = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", TRAFFIC], capture_output=True, text=True, env=env, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = steps("1")
    assert first == steps("2")
    assert int(first.splitlines()[-1]) > 0  # somebody was preempted


# Limits


@pytest.mark.parametrize("kv_cache", ["none", "contiguous", "paged"])
def test_a_prompt_at_the_context_or_beyond_or_empty_is_answered_at_once(tiny_folder, kv_cache):
    lengths = [0, 127, 128, 129, 5000]
    with LLM(EngineConfig(model=str(tiny_folder), device="cpu", kv_cache=kv_cache, kv_pages=20)) as llm:
        answers = llm.generate([[5] * length for length in lengths], SamplingParams(max_tokens=4, ignore_eos=True))
    empty, last_place, *beyond = answers

    assert (last_place.finish_reason, len(last_place.token_ids)) == ("length", 1)
    assert (empty.finish_reason, empty.token_ids) == ("error", [])
    assert "empty" in empty.error
    for length, completion in zip(lengths[2:], beyond, strict=True):
        assert (completion.finish_reason, completion.token_ids) == ("error", [])
        assert f"{length:,} tokens" in completion.error


def test_a_prompt_larger_than_the_pool_is_refused_and_one_that_just_fits_is_served(model):
    engine = Engine(model, EngineConfig(page_size=4, kv_pages=4))
    too_large, fits = serve(engine, request(0, [5] * 13), request(1, [5] * 12, max_tokens=9))

    assert (too_large.finish_reason, "--kv-pages" in too_large.error) == ("error", True)
    assert fits.output == greedy(model, [5] * 12, 1)


def test_shared_params_are_not_cut_down_for_all_by_one_long_prompt(llm):
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    long, short = llm.generate([[5] * 125, [6]], params)

    assert (len(long.token_ids), len(short.token_ids)) == (3, 10)
    assert params == SamplingParams(max_tokens=10, ignore_eos=True)


def test_max_tokens_0_is_refused_where_the_params_are_made():
    with pytest.raises(ValueError, match="max_tokens is 0, but must be at least 1"):
        SamplingParams(max_tokens=0)


def test_temperature_0_is_greedy_and_divides_by_nothing(model, engine):
    [r] = serve(engine, request(0, PROMPT, temperature=0.0, top_p=0.5, max_tokens=8))
    assert r.output == greedy(model, PROMPT)


def test_top_k_beyond_the_vocabulary_keeps_all(engine):
    one, other = serve(
        engine,
        request(0, PROMPT, temperature=1.0, top_k=10**6, max_tokens=8),
        request(1, PROMPT, temperature=1.0, max_tokens=8),
    )
    assert one.output == other.output


# Ends


def test_no_token_follows_the_end_of_sequence(model, engine):
    answer = greedy(model, PROMPT)
    stop = next(token for i, token in enumerate(answer) if i >= 2 and token not in answer[:i])
    [r] = serve(engine, request(0, PROMPT, stop_ids=[stop], max_tokens=8))

    assert r.output == answer[: answer.index(stop) + 1]
    assert r.finish_reason == "stop"


def test_a_token_that_arrives_after_the_end_is_dropped():
    scheduler = scheduler_with(pages=8)
    scheduler.add(r := request(0, PROMPT, stop_ids=[7]))
    batch = scheduler.plan()
    scheduler.abort(0, "stop")

    assert scheduler.retire(batch, [5]) == []
    assert (r.output, r.finish_reason) == ([], "stop")


@pytest.mark.parametrize("eos", [0, 1])
def test_each_of_several_eos_ids_ends_an_answer(llm, monkeypatch, eos):
    monkeypatch.setattr(
        llm.model, "config", llm.model.config.__class__(**{**vars(llm.model.config), "eos_token_ids": (0, 1)})
    )
    [completion] = llm.generate([[5]], SamplingParams(logit_bias={eos: 100.0}))

    assert (completion.token_ids, completion.finish_reason) == ([eos], "stop")


def test_nan_logits_end_the_request_with_an_error_instead_of_token_0_for_ever(model, monkeypatch):
    engine = Engine(model, EngineConfig(kv_pages=40))
    whole = engine.runner.model

    def half_nan(batch):
        logits = whole(batch)
        logits[0] = float("nan")
        return logits

    engine.add(bad := request(0, PROMPT))
    engine.add(good := request(1, PROMPT[::-1], max_tokens=2))
    monkeypatch.setattr(engine.runner, "model", half_nan)
    engine.step()
    monkeypatch.setattr(engine.runner, "model", whole)
    serve(engine)

    assert (bad.finish_reason, bad.output) == ("error", [])
    assert "NaN" in bad.error
    assert good.output == greedy(model, PROMPT[::-1], 2)


# Text


def test_an_emoji_cut_over_tokens_is_held_back_until_it_is_whole(llm, monkeypatch):
    spell(llm, monkeypatch, "a👍b")
    pieces = [piece for piece, _ in llm.stream([5], SamplingParams(max_tokens=6))]

    assert pieces == ["a", "👍", "b"]


def test_a_cut_emoji_at_the_end_is_flushed_so_that_the_stream_equals_the_full_decode(llm, monkeypatch):
    spell(llm, monkeypatch, "a👍")
    *_, (_, completion) = stream = list(llm.stream([5], SamplingParams(max_tokens=3)))

    assert "".join(piece for piece, _ in stream) == completion.text == llm.tokenizer.decode(completion.token_ids)
    assert completion.text.startswith("a\ufffd")


def test_a_chats_bos_is_written_once(llm):
    ids = llm.encode([{"role": "user", "content": "hi"}])
    assert ids.count(llm.tokenizer.bos_token_id) == 1


def test_a_chat_that_the_template_refuses_is_an_error_result(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    [completion] = llm.generate([[{"role": "user", "content": "hi"}]])

    assert completion.finish_reason == "error"
    assert "roles must alternate" in completion.error


def test_a_stop_string_split_over_tokens_is_not_sent_in_part(llm, monkeypatch):
    spell(llm, monkeypatch, "one END two")
    stream = list(llm.stream([5], SamplingParams(max_tokens=11, stop=["END"])))

    assert "".join(piece for piece, _ in stream) == "one "
    assert stream[-1][1].text == "one "
    assert stream[-1][1].finish_reason == "stop"


def test_a_stop_string_ends_the_request_and_not_only_its_text(llm, monkeypatch):
    spell(llm, monkeypatch, "one END two")
    before = llm.stats()["output_tokens"]
    list(llm.stream([5], SamplingParams(max_tokens=100, stop=["END"])))
    llm.step()

    assert llm.stats()["output_tokens"] - before == len("one END")
    assert not llm.engine.has_work


def test_what_may_begin_a_stop_string_is_flushed_when_the_answer_ends(llm, monkeypatch):
    spell(llm, monkeypatch, "one EN")
    [completion] = llm.generate([[5]], SamplingParams(max_tokens=6, stop=["END"]))

    assert (completion.text, completion.finish_reason) == ("one EN", "length")


def test_a_stop_string_may_end_within_an_emojis_flush():
    detokenizer = IncrementalDetokenizer(byte_level_tokenizer())
    [first, *_] = byte_level_tokenizer()("👍", add_special_tokens=False)["input_ids"]

    assert detokenizer.push([first]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("params", [{}, {"stop": ["zzz"]}, {"max_tokens": 3}, {"stop_token_ids": [97 - 4]}])
def test_the_last_piece_of_a_stream_always_comes_with_a_finish_reason(llm, params):
    *_, (_, completion) = llm.stream("Hello", SamplingParams(**({"max_tokens": 20} | params)))
    assert completion.finish_reason in ("stop", "length")
