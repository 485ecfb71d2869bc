"""Text in, text out, on a tiny random model in a Hugging Face folder."""

from __future__ import annotations

import pytest

from minisgl import LLM, EngineConfig, SamplingParams
from minisgl.simple import naive_generate

GREEDY = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def llm(tiny_folder):
    return LLM(EngineConfig(model=str(tiny_folder), device="cpu"))


def test_pieces_of_a_stream_join_to_the_completions_text(llm):
    pieces, completions = zip(*llm.stream("Hello 👍", GREEDY), strict=True)

    assert "".join(pieces) == completions[-1].text
    assert completions[-1].text == llm.tokenizer.decode(completions[-1].token_ids, skip_special_tokens=True)


def test_both_engines_give_the_tokens_of_the_bare_loop(llm, tiny_folder):
    naive = LLM(EngineConfig.chapter(1, model=str(tiny_folder), device="cpu"))
    expected = list(naive_generate(llm.model, llm.encode("Hello"), GREEDY))

    assert llm.generate(["Hello"], GREEDY)[0].token_ids == expected
    assert naive.generate(["Hello"], GREEDY)[0].token_ids == expected


def test_completions_come_in_the_order_of_the_prompts(llm):
    prompts = ["a", "something longer", "b"]
    together = [c.token_ids for c in llm.generate(prompts, GREEDY)]

    assert together == [llm.generate([p], GREEDY)[0].token_ids for p in prompts]


def test_a_chat_goes_through_the_template_once_and_is_left_open_for_the_answer(llm):
    ids = llm.encode([{"role": "user", "content": "hi"}])

    assert llm.tokenizer.decode(ids) == "<s><|user|>hi</s><|assistant|>"
    assert ids.count(llm.tokenizer.bos_token_id) == 1


def test_a_model_without_chat_template_refuses_a_chat(tiny_folder):
    llm = LLM(EngineConfig(model=str(tiny_folder), device="cpu"))
    llm.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        llm.encode([{"role": "user", "content": "hi"}])


def test_max_tokens_ends_with_length_and_an_eos_token_with_stop(llm):
    [long] = llm.generate(["Hello"], SamplingParams(max_tokens=3, ignore_eos=True))
    assert (long.finish_reason, len(long.token_ids)) == ("length", 3)

    eos = llm.model.config.eos_token_ids[0]
    ends_at_once = SamplingParams(temperature=1.0, top_k=1)
    head = llm.model.lm_head
    saved = head.weight.data.clone()
    head.weight.data[:] = 0
    head.weight.data[eos] = 0  # all logits equal: top-k 1 keeps the smallest id
    try:
        [stopped] = llm.generate([[5]], ends_at_once)
    finally:
        head.weight.data = saved
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", [eos])


@pytest.mark.parametrize("prompt", [[], ""])
def test_an_empty_prompt_is_refused(llm, prompt):
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.generate([prompt], GREEDY)


def test_a_prompt_longer_than_the_context_says_both_lengths(llm):
    context = llm.model.config.max_position_embeddings
    with pytest.raises(ValueError, match=f"{context + 1} tokens, but this model's context is {context}"):
        llm.generate([[5] * (context + 1)], GREEDY)


def test_ids_of_another_tokenizer_are_refused(llm):
    with pytest.raises(ValueError, match="outside 0"):
        llm.generate([[10**6]], GREEDY)


def test_random_weights_need_only_a_config_and_repeat_with_their_seed(tiny_folder, tmp_path):
    (tmp_path / "config.json").write_text((tiny_folder / "config.json").read_text())

    def first_tokens(seed):
        llm = LLM(EngineConfig(model=str(tmp_path), device="cpu", random_weights=True, weight_seed=seed))
        return list(naive_generate(llm.model, [3, 4], SamplingParams(max_tokens=8, ignore_eos=True)))

    assert first_tokens(1) == first_tokens(1)
    assert first_tokens(1) != first_tokens(2)


def test_a_device_that_is_not_there_is_a_clear_error(tiny_folder):
    with pytest.raises(ValueError, match="device 'cuda:99' cannot be used"):
        LLM(EngineConfig(model=str(tiny_folder), device="cuda:99"))


def test_stats_count_what_was_generated(tiny_folder):
    llm = LLM(EngineConfig(model=str(tiny_folder), device="cpu"))
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))

    stats = llm.stats()
    assert (stats["steps"], stats["tokens_computed"], stats["output_tokens"]) == (4, 3 + 3, 4)
    assert stats["output_tokens_per_s"] > 0
