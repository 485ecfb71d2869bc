"""What the front and the engine process say to each other arrives as it was sent."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest

from minisgl.core import Request, SamplingParams, TokenLogprobs
from minisgl.message import messages as m

PARAMS = SamplingParams(
    max_tokens=7,
    temperature=0.5,
    logit_bias={3: -1.5},
    seed=2**63 - 1,
    stop=("👍", "END"),
    stop_token_ids=[4],
    logprobs=2,
)
IMPROBABLE = TokenLogprobs(5, float("-inf"), {6: -0.25, 5: float("-inf")})


@pytest.mark.parametrize(
    "message",
    [
        m.Submit(1, [5, 6], PARAMS, 2**63 - 1, [0]),
        m.Abort(1, "stop"),
        m.AskStats(2),
        m.Watch(3, True),
        m.Stop(),
    ],
)
def test_what_goes_to_the_engine_arrives(message):
    assert m.decode_to_engine(m.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        m.StepDone([m.Output(1, [5], None, "", 16, [IMPROBABLE]), m.Output(2, [], "error", "why")], m.Gauges(1, 2, 3)),
        m.Stats(2, {"steps": 4.0}),
        m.Event(3, '{"step": 0}'),
        m.Ready("cuda:0", 8192, 49152, [2], m.Gauges()),
        m.Refused("why"),
        m.Stage("loading the model"),
    ],
)
def test_what_comes_from_the_engine_arrives(message):
    assert m.decode_from_engine(m.encode(message)) == message


def test_top_logprobs_arrive_in_their_order():
    [output] = m.decode_from_engine(m.encode(m.StepDone([m.Output(1, [5], logprobs=[IMPROBABLE])], m.Gauges()))).outputs
    assert list(output.logprobs[0].top) == [6, 5]


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", m.encode(m.Ready("cpu", 1, 1, [], m.Gauges())), m.encode(["Submit", 1])]
)
def test_what_is_no_message_to_the_engine_is_an_error(data):
    with pytest.raises(msgspec.DecodeError):
        m.decode_to_engine(data)


def test_the_requests_of_a_prompt_have_ids_and_seeds_that_follow_each_other():
    first, second = m.submissions(count(7), [5, 6], SamplingParams(n=2, seed=2**63 - 1), [0])

    assert (first.id, second.id) == (7, 8)
    assert (first.seed, second.seed) == (2**63 - 1, 0)


def test_without_a_seed_each_prompt_gets_another():
    one, other = (next(m.submissions(count(), [5], SamplingParams(), [])).seed for _ in range(2))
    assert one != other


@pytest.mark.parametrize(("ignore_eos", "stop_ids"), [(False, {4, 0, 2}), (True, {4})])
def test_an_answer_ends_at_the_models_tokens_and_at_those_asked_for(ignore_eos, stop_ids):
    [submit] = m.submissions(count(), [5], SamplingParams(stop_token_ids=[4], ignore_eos=ignore_eos), [0, 2])
    assert submit.request().stop_ids == stop_ids


def test_each_request_of_a_prompt_has_tokens_of_its_own():
    prompt = [5, 6]
    first, second = (submit.request() for submit in m.submissions(count(), prompt, SamplingParams(n=2), []))
    first.tokens.append(9)

    assert (second.tokens, prompt) == ([5, 6], [5, 6])


def test_news_are_what_came_after_the_tokens_that_are_known():
    request = Request(3, [5, 6], PARAMS)
    request.tokens += [7, 8]
    request.logprobs += [TokenLogprobs(7, -1.0, {}), TokenLogprobs(8, -2.0, {})]
    request.num_cached = 1

    assert m.news(request, 1) == m.Output(3, [8], None, "", 1, [TokenLogprobs(8, -2.0, {})])


def test_news_of_a_request_that_only_ended_hold_its_reason():
    request = Request(3, [5, 6], PARAMS, finish_reason="error", error="why")
    assert m.news(request, 0) == m.Output(3, [], "error", "why")
