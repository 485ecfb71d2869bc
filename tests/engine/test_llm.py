"""Text in, text out, on a tiny random model in a Hugging Face folder."""

from __future__ import annotations

import pytest

from minisgl import LLM, EngineConfig, SamplingParams
from minisgl.simple import naive_generate
from tests.helpers import check_whole

GREEDY = SamplingParams(max_tokens=12)
LONG = SamplingParams(max_tokens=20, ignore_eos=True)
E = 72  # the letter e


@pytest.fixture(scope="module")
def llm(tiny_folder):
    return new_llm(tiny_folder)


def new_llm(folder, **switches):
    return LLM(EngineConfig(model=str(folder), device="cpu", **({"kv_pages": 80} | switches)))


def test_pieces_of_a_stream_join_to_the_completions_text(llm):
    pieces, completions = zip(*llm.stream("Hello 👍", GREEDY), strict=True)

    assert "".join(pieces) == completions[-1].text
    assert completions[-1].text == llm.tokenizer.decode(completions[-1].token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("chapter", [1, 2, 3, 4, 5])
def test_every_chapters_engine_gives_the_tokens_of_the_bare_loop(llm, tiny_folder, chapter):
    prompts = ["Hello", "Hello there", "something else"]
    config = EngineConfig.chapter(chapter, model=str(tiny_folder), device="cpu", kv_pages=80)
    with LLM(config) as engine:
        answers = engine.generate(prompts, GREEDY)

    assert [a.token_ids for a in answers] == [list(naive_generate(llm.model, llm.encode(p), GREEDY)) for p in prompts]


# Many prompts


def test_completions_come_in_the_order_of_the_prompts(llm):
    prompts = ["a", "something longer", "b"]
    together = [c.token_ids for c in llm.generate(prompts, GREEDY)]

    assert together == [llm.generate([p], GREEDY)[0].token_ids for p in prompts]


def test_the_order_is_that_of_the_prompts_even_if_the_last_is_served_first(llm):
    each = [SamplingParams(max_tokens=n, priority=n, ignore_eos=True) for n in (2, 5, 9)]
    assert [len(c.token_ids) for c in llm.generate(["a", "b", "c"], each)] == [2, 5, 9]


@pytest.mark.parametrize("prompt", ["one", [5, 6, 7], [{"role": "user", "content": "hi"}]])
def test_a_single_prompt_is_taken_as_a_list_of_one(llm, prompt):
    [alone] = llm.generate(prompt, GREEDY)
    [in_a_list] = llm.generate([prompt], GREEDY)

    assert alone.token_ids == in_a_list.token_ids


def test_no_prompts_give_no_completions(llm):
    assert llm.generate([]) == []


def test_params_of_another_number_than_the_prompts_are_refused(llm):
    with pytest.raises(ValueError, match="2 prompts, but 1 params"):
        llm.generate(["a", "b"], [GREEDY])


def test_n_answers_stand_beside_each_other_and_take_the_seeds_that_follow(llm):
    sampled = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True}
    answers = llm.generate(["a", "b"], SamplingParams(n=3, seed=5, **sampled))
    alone = [llm.generate([p], SamplingParams(seed=s, **sampled))[0] for p in ("a", "b") for s in (5, 6, 7)]

    assert [a.index for a in answers] == [0, 1, 2, 0, 1, 2]
    assert [a.token_ids for a in answers] == [a.token_ids for a in alone]
    assert len({tuple(a.token_ids) for a in answers[:3]}) == 3


def test_without_a_seed_answers_differ(llm):
    params = SamplingParams(n=2, temperature=1.0, max_tokens=16, ignore_eos=True)
    one, other = llm.generate(["a"], params)

    assert one.token_ids != other.token_ids


@pytest.mark.parametrize(("progress", "shown"), [(True, True), (False, False), (None, False)])  # no terminal here
def test_a_progress_bar_counts_the_answers(llm, capsys, progress, shown):
    llm.generate(["a", "b"], GREEDY, progress=progress)
    assert ("2/2" in capsys.readouterr().err) == shown


def test_a_later_prompt_reports_what_it_found_in_the_cache(tiny_folder):
    with new_llm(tiny_folder, page_size=4) as llm:
        prompts = [[7] * 10, [7] * 9 + [8]]
        first, second = (llm.generate(p, GREEDY)[0] for p in prompts)

    assert (first.cached_tokens, second.cached_tokens) == (0, 8)


def test_logprobs_come_one_a_token(llm):
    plain, asked = llm.generate(["a", "a"], [GREEDY, SamplingParams(max_tokens=12, logprobs=2)])

    assert plain.logprobs == []
    assert [t.token_id for t in asked.logprobs] == asked.token_ids == plain.token_ids
    assert all(t.token_id == next(iter(t.top)) and len(t.top) == 2 for t in asked.logprobs)  # greedy: the first


def test_detokenize_off_leaves_the_text_empty(llm):
    [c] = llm.generate([[5, 6]], SamplingParams(max_tokens=4, detokenize=False))
    assert (c.text, len(c.token_ids)) == ("", 4)


# Streams


def test_streams_may_be_interleaved_and_share_steps(tiny_folder):
    with new_llm(tiny_folder) as llm:
        prompts = ["one", "another", "a third"]
        streams = [llm.stream(p, LONG) for p in prompts]
        last = {}
        while streams:
            for stream in list(streams):
                try:
                    _, last[stream] = next(stream)
                except StopIteration:
                    streams.remove(stream)
        steps = llm.work.steps
        alone = [c.text for c in llm.generate(prompts, LONG)]

    assert [c.text for c in last.values()] == alone
    assert steps < 2 * LONG.max_tokens


def test_a_stream_that_ends_while_another_is_read_still_says_how(llm):
    [eos] = llm.model.config.eos_token_ids
    says_one_letter = SamplingParams(min_tokens=1, logit_bias={eos: 100.0, E: 50.0})
    quiet = llm.stream("one", says_one_letter)
    next(quiet)
    list(llm.stream("two", LONG))

    assert [(piece, completion.finish_reason) for piece, completion in quiet] == [("", "stop")]


def test_closing_a_stream_aborts_its_request(tiny_folder):
    with new_llm(tiny_folder) as llm:
        stream = llm.stream("one", LONG)
        next(stream)
        stream.close()
        while llm.engine.has_work:
            llm.step()

        assert llm.stats()["output_tokens"] < LONG.max_tokens
        check_whole(llm.engine.scheduler)


def test_a_stream_carries_one_answer(llm):
    with pytest.raises(ValueError, match="n is 2, but a stream carries one answer"):
        next(llm.stream("a", SamplingParams(n=2)))


def test_an_aborted_request_ends_with_what_it_has(llm):
    completion = None
    for _, completion in llm.stream("one", LONG):
        llm.abort(completion.request_id)

    assert completion.finish_reason == "abort"
    assert 0 < len(completion.token_ids) < LONG.max_tokens
    assert completion.text == llm.tokenizer.decode(completion.token_ids)


def test_a_ctrl_c_in_generate_leaves_an_engine_that_goes_on(tiny_folder, monkeypatch):
    with new_llm(tiny_folder) as llm:
        launch, calls = llm.engine.launch, []

        def interrupted(batch):
            calls.append(batch)
            if len(calls) == 5:
                raise KeyboardInterrupt
            return launch(batch)

        monkeypatch.setattr(llm.engine, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["one", "two"], LONG)
        again = [c.text for c in llm.generate(["one", "two"], LONG)]
        assert llm.engine.scheduler.running == []
        check_whole(llm.engine.scheduler)
    assert again == [c.text for c in new_llm(tiny_folder).generate(["one", "two"], LONG)]


# What ends an answer


def test_a_chat_goes_through_the_template_once_and_is_left_open_for_the_answer(llm):
    ids = llm.encode([{"role": "user", "content": "hi"}])

    assert llm.tokenizer.decode(ids) == "<s><|user|>hi</s><|assistant|>"


def test_a_model_without_chat_template_refuses_a_chat_and_answers_the_others(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    chat, text = llm.generate([[{"role": "user", "content": "hi"}], "hi"], GREEDY)

    assert (chat.finish_reason, "no chat template" in chat.error) == ("error", True)
    assert text.finish_reason in ("length", "stop")


def test_max_tokens_ends_with_length_and_an_eos_token_with_stop(llm):
    [eos] = llm.model.config.eos_token_ids
    long, stopped = llm.generate(
        [[5], [5]], [SamplingParams(max_tokens=3, ignore_eos=True), SamplingParams(logit_bias={eos: 100.0})]
    )

    assert (long.finish_reason, len(long.token_ids)) == ("length", 3)
    assert (stopped.finish_reason, stopped.token_ids, stopped.text) == ("stop", [eos], "")


def test_min_tokens_puts_the_end_off(llm):
    [eos] = llm.model.config.eos_token_ids
    [c] = llm.generate([[5]], SamplingParams(min_tokens=4, logit_bias={eos: 100.0}))

    assert (len(c.token_ids), c.token_ids[-1]) == (5, eos)


def test_a_stop_token_ends_the_answer_and_is_part_of_it(llm):
    [c] = llm.generate([[5]], SamplingParams(stop_token_ids=[E], logit_bias={E: 100.0}, ignore_eos=True))
    assert (c.finish_reason, c.token_ids) == ("stop", [E])


# Errors and resources


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ("", "prompt is empty"),
        ([5] * 129, "129 tokens, but a sequence may have at most 128"),
        ([10**6], "outside 0"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_a_completion_that_says_why(llm, prompt, message):
    bad, good = llm.generate([prompt, "a"], GREEDY)

    assert (bad.finish_reason, bad.text, bad.token_ids) == ("error", "", [])
    assert message in bad.error
    assert good.error == ""
    [(piece, streamed)] = llm.stream(prompt, GREEDY)
    assert (piece, streamed.error) == ("", bad.error)


@pytest.mark.parametrize("field", ["min_tokens", "logprobs", "repetition_penalty", "logit_bias", "cache_salt"])
def test_the_first_chapters_engines_say_what_they_do_not_know(tiny_folder, field):
    value = {"min_tokens": 1, "logprobs": 1, "repetition_penalty": 2.0, "logit_bias": {1: 1.0}, "cache_salt": "a"}[
        field
    ]
    with new_llm(tiny_folder, kv_cache="contiguous") as llm:
        [c] = llm.generate(["a"], SamplingParams(**{field: value}))

    assert (c.finish_reason, f"has no {field}: choose kv_cache paged" in c.error) == ("error", True)


def test_a_context_manager_gives_the_memory_back_and_later_prompts_are_refused(tiny_folder, tmp_path):
    with new_llm(tiny_folder, trace=str(tmp_path / "trace")) as llm:
        stream = llm.stream("one", LONG)
        next(stream)
    llm.close()

    assert llm.stats()["kv_pool_bytes"] == 0
    assert [c.finish_reason for _, c in stream] == ["abort"]
    [c] = llm.generate(["a"])
    assert (c.finish_reason, c.error) == ("error", "this LLM is closed: make a new one")


def test_two_llms_in_one_process_do_not_meet(tiny_folder):
    with new_llm(tiny_folder) as one, new_llm(tiny_folder, page_size=4, batching="static") as two:
        streams = [one.stream("Hello", LONG), two.stream("Hello", LONG)]
        pieces = list(zip(*streams, strict=True))
        assert all(a[0] == b[0] for a, b in pieces)
        one.close()
        assert two.generate("Hello", LONG)[0].finish_reason == "length"


def test_random_weights_need_only_a_config_and_repeat_with_their_seed(tiny_folder, tmp_path):
    (tmp_path / "config.json").write_text((tiny_folder / "config.json").read_text())

    def first_tokens(seed):
        llm = LLM(EngineConfig(model=str(tmp_path), device="cpu", random_weights=True, weight_seed=seed))
        params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False)
        return llm.generate([[3, 4]], params)[0].token_ids

    assert first_tokens(1) == first_tokens(1)
    assert first_tokens(1) != first_tokens(2)


def test_a_device_that_is_not_there_is_a_clear_error(tiny_folder):
    with pytest.raises(ValueError, match="device 'cuda:99' cannot be used"):
        LLM(EngineConfig(model=str(tiny_folder), device="cuda:99"))


def test_stats_count_what_was_generated(tiny_folder):
    with new_llm(tiny_folder) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
        stats = llm.stats()

    assert (stats["steps"], stats["tokens_computed"], stats["output_tokens"]) == (4, 3 + 3, 4)
    assert stats["output_tokens_per_s"] > 0
    assert stats["weight_bytes"] == sum(p.nbytes for p in llm.model.parameters())
