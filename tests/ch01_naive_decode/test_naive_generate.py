"""01.5 naive_generate, on a model whose words are a script: nothing here runs a decoder."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import minisgl.simple as engine
from minisgl.core import ForwardBatch, SamplingParams, WorkCounts

VOCAB, CONTEXT, EOS, OTHER_EOS = 20, 12, 2, 3


class ScriptedModel:
    """After n tokens its best next token is script[n % len(script)]; with no script all tokens are equally likely."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, script: list[int]) -> None:
        self.config = SimpleNamespace(max_position_embeddings=CONTEXT, vocab_size=VOCAB, eos_token_ids=(EOS, OTHER_EOS))
        self.script = script
        self.batches: list[ForwardBatch] = []

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        self.batches.append(batch)
        logits = torch.zeros(len(batch.input_ids), VOCAB)
        if self.script:
            for row, position in enumerate(batch.positions.tolist()):
                logits[row, self.script[(position + 1) % len(self.script)]] = 9.0
        return logits if batch.output_rows is None else logits[batch.output_rows]

    @property
    def inputs(self) -> list[list[int]]:
        return [batch.input_ids.tolist() for batch in self.batches]


def generate(
    model: ScriptedModel, prompt: list[int], params: SamplingParams, work: WorkCounts | None = None
) -> list[int]:
    return list(engine.naive_generate(model, prompt, params, work))  # type: ignore[arg-type]


SCRIPT = [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]  # no EOS among them


def test_each_token_is_the_models_choice_after_all_tokens_so_far():
    answer = generate(ScriptedModel(SCRIPT), [1, 1, 1], SamplingParams(max_tokens=4))

    assert answer == [7, 8, 9, 10], f"behind 3 tokens the script says 7, 8, 9, 10: got {answer}"


def test_every_step_runs_the_whole_sequence():
    model = ScriptedModel(SCRIPT)

    generate(model, [1, 16, 1], SamplingParams(max_tokens=3))

    assert model.inputs == [[1, 16, 1], [1, 16, 1, 7], [1, 16, 1, 7, 8]], (
        "each step takes the prompt and all new tokens"
    )


def test_the_first_token_of_every_step_stands_at_position_0():
    model = ScriptedModel(SCRIPT)

    generate(model, [1, 1], SamplingParams(max_tokens=3))

    positions = [batch.positions.tolist() for batch in model.batches]
    assert positions == [[0, 1], [0, 1, 2], [0, 1, 2, 3]], f"every step starts at position 0: got {positions}"


def test_a_token_is_handed_out_before_the_next_one_is_computed():
    model = ScriptedModel(SCRIPT)
    stream = engine.naive_generate(model, [1], SamplingParams(max_tokens=5))  # type: ignore[arg-type]

    next(stream)

    assert len(model.batches) == 1, f"{len(model.batches)} steps ran for one token: yield inside the loop"


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_any_end_of_sequence_token_is_handed_out_once_and_ends_the_answer(eos: int):
    model = ScriptedModel([4, 5, 6, eos, 8, 9])

    answer = generate(model, [1], SamplingParams(max_tokens=9))

    assert answer == [5, 6, eos], f"5, 6 and the end-of-sequence token {eos}, yielded once, then nothing: got {answer}"
    assert len(model.batches) == 3, "a step ran after the end of the sequence"


def test_an_end_of_sequence_token_in_the_prompt_ends_nothing():
    assert generate(ScriptedModel(SCRIPT), [EOS, 1], SamplingParams(max_tokens=2)) == [6, 7]


def test_ignore_eos_goes_on_past_it():
    model = ScriptedModel([4, 5, EOS, 7, 8])

    assert generate(model, [1], SamplingParams(max_tokens=4, ignore_eos=True)) == [5, EOS, 7, 8]


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_it_stops_after_max_tokens(max_tokens: int):
    model = ScriptedModel(SCRIPT)

    assert len(generate(model, [1, 1], SamplingParams(max_tokens=max_tokens))) == max_tokens
    assert len(model.batches) == max_tokens, "one step a token"


@pytest.mark.parametrize("prompt_length", [1, 7, CONTEXT - 1])
def test_it_stops_when_the_context_is_full(prompt_length: int):
    answer = generate(ScriptedModel(SCRIPT), [1] * prompt_length, SamplingParams(max_tokens=1000))

    assert prompt_length + len(answer) == CONTEXT


@pytest.mark.parametrize(
    ("prompt", "says"), [([], "empty"), ([1] * CONTEXT, "12"), ([1, VOCAB], "outside"), ([1, -1], "outside")]
)
def test_a_prompt_that_cannot_be_continued_is_refused_with_the_reason(prompt: list[int], says: str):
    model = ScriptedModel(SCRIPT)

    with pytest.raises(ValueError, match=says):
        generate(model, prompt, SamplingParams())

    assert not model.batches, "the model ran before the prompt was checked"


def test_the_callers_prompt_is_left_alone():
    prompt = [1, 1]

    generate(ScriptedModel(SCRIPT), prompt, SamplingParams(max_tokens=3))

    assert prompt == [1, 1], "the answer was appended to the caller's own list"


def test_the_work_is_counted():
    work = WorkCounts()

    generate(ScriptedModel(SCRIPT), [1, 1, 1], SamplingParams(max_tokens=4), work)

    assert (work.steps, work.tokens_computed) == (4, 3 + 4 + 5 + 6)


def test_the_same_seed_gives_the_same_tokens():
    def answer(seed: int) -> list[int]:
        return generate(ScriptedModel([]), [1], SamplingParams(temperature=1.0, seed=seed, ignore_eos=True))

    assert answer(7) == answer(7)
    assert answer(7) != answer(8)


def test_each_step_draws_anew():
    answer = generate(ScriptedModel([]), [1], SamplingParams(temperature=1.0, seed=7, ignore_eos=True))

    assert len(set(answer)) > 1, f"all equally likely, yet always {answer[0]}: make the generator once, before the loop"
