"""The arithmetic of `minisgl bench serve`: what is asked, what is read of an answer, what is made of the times."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from operator import sub
from statistics import mean
from time import perf_counter

import pytest

from benchmarks import offline
from benchmarks.serving import load, options, report
from benchmarks.serving.client import Sample, Server, read
from benchmarks.serving.load import Load, Pass
from benchmarks.serving.workloads import Turn, arrivals, as_text, draw

TEXT = {"choices": [{"text": "a", "finish_reason": None}]}
LAST = {"choices": [{"text": "", "finish_reason": "length"}]}
USAGE = {"prompt_tokens": 7, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}


def parsed(*given):
    args = options.parser("").parse_args([*given, "--vocabulary", "300", "--url", "http://127.0.0.1:1"])
    options.check(args)
    return args


def conversations(*given, seed=0):
    return draw(parsed(*given), seed)


def stream(*events, start=1.0):
    """The bytes of a stream, one event each tenth of a second."""
    frames = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return [(start + i / 10, f"data: {frame}\n\n".encode()) for i, frame in enumerate(frames)]


def answered(*events, **fields):
    return read(Sample(4, planned=0.5, ended=9.0, arrived=stream(*events), **fields), stream=True)


def sample(times, tokens, counts=None, planned=0.0, **fields):
    """A request that was answered at these times."""
    counts = counts or [0] * len(times)
    end = times[-1] if times else planned
    return Sample(tokens, planned, planned, ended=end, output_tokens=tokens, times=times, counts=counts, **fields)


# what is asked


def test_the_offline_workload_is_the_projects_own():
    turns = [turn for [turn] in conversations("--requests", "5", "--scale", "0.1", seed=3)]
    prompts, outputs = offline.workload(3, 5, 0.1)
    assert [turn.tokens for turn in turns] == [[token % 300 for token in prompt] for prompt in prompts]
    assert [turn.max_tokens for turn in turns] == outputs


@pytest.mark.parametrize("workload", options.SHAPES)
def test_a_seed_gives_the_same_requests_and_another_seed_others(workload):
    given = ("--workload", workload, "--requests", "6")
    assert conversations(*given) == conversations(*given)
    beginnings = {tuple(turns[0].tokens[:8]) for seed in (0, 1) for turns in conversations(*given, seed=seed)}
    assert len(beginnings) == 2 * 6


def test_lengths_lie_in_their_ranges_and_reach_both_ends():
    given = ("--workload", "random", "--requests", "200", "--input", "3", "5", "--output", "1", "2")
    turns = [turn for [turn] in conversations(*given)]
    assert {len(turn.tokens) for turn in turns} == {3, 4, 5}
    assert {turn.max_tokens for turn in turns} == {1, 2}


def test_requests_of_a_group_share_its_beginning_and_nothing_more():
    given = ("--workload", "shared-prefix", "--requests", "9", "--groups", "3", "--shared", "40", "--input", "10", "10")
    prompts = [turn.tokens for [turn] in conversations(*given)]
    assert {len(prompt) for prompt in prompts} == {50}
    assert len({tuple(prompt[:40]) for prompt in prompts}) == 3
    assert len({tuple(prompt[40:]) for prompt in prompts}) == 9


def test_a_conversation_has_several_turns_and_its_user_thinks_before_all_but_the_first():
    given = ("--workload", "multi-turn", "--requests", "50", "--turns", "2", "4", "--think-s", "3")
    found = conversations(*given)
    assert {len(turns) for turns in found} == {2, 3, 4}
    assert all(turns[0].think_s == 0 for turns in found)
    assert mean(turn.think_s for turns in found for turn in turns[1:]) == pytest.approx(3, rel=0.3)


def test_poisson_arrivals_have_the_rate_and_no_rhythm():
    times = arrivals(4000, rate=5.0, seed=0)
    gaps = [later - sooner for sooner, later in pairwise(times)]
    assert times == sorted(times)
    assert times[-1] / 4000 == pytest.approx(1 / 5, rel=0.05)
    assert sum(gap > 1 / 5 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # e⁻¹ of an exponential


def test_text_in_place_of_token_ids_has_a_word_for_each():
    assert len(as_text(range(250)).split()) == 250


def test_a_next_turn_holds_what_was_said_and_answered():
    turns = [Turn([0, 1], 4), Turn([2], 4)]
    assert load._prompt(Server("u"), turns, [" yes"]) == " the of yes and"
    said = load._prompt(Server("u", chat=True), turns, [" yes"])
    assert [(message["role"], message["content"]) for message in said] == [
        ("user", " the of"),
        ("assistant", " yes"),
        ("user", " and"),
    ]


# what is read of an answer


def test_tokens_are_the_servers_count_and_not_that_of_the_pieces():
    found = answered(TEXT, TEXT, LAST, {"choices": [], "usage": USAGE}, "[DONE]")
    assert (found.error, found.text, found.finish_reason) == ("", "aa", "length")
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (7, 2, 4)


def test_the_first_token_is_the_first_piece_with_text_and_the_last_comes_with_the_reason():
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    word, end = {"choices": [{"delta": {"content": "a"}}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    found = answered(role, word, word, end, {"choices": [], "usage": USAGE}, "[DONE]")
    assert found.times == pytest.approx([1.1, 1.3])


def test_an_answer_without_text_came_with_its_finish_reason():
    assert answered(LAST, {"choices": [], "usage": USAGE}, "[DONE]").times == pytest.approx([1.0])


@pytest.mark.parametrize("cut", [1, 7, 30, 1000])
def test_events_may_come_in_any_pieces(cut):
    data = b"".join(piece for _, piece in stream(TEXT, TEXT, LAST, {"choices": [], "usage": USAGE}, "[DONE]"))
    data = b": a comment\n\n" + data.replace(b"\n", b"\r\n")
    pieces = [(float(i), data[i : i + cut]) for i in range(0, len(data), cut)]
    found = read(Sample(4, 0.0, arrived=pieces), stream=True)
    assert (found.error, found.text, found.output_tokens) == ("", "aa", 4)


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([TEXT], "cut off"),
        ([TEXT, LAST, {"choices": [], "usage": USAGE}], "cut off"),
        ([TEXT, {"error": {"message": "the engine died"}}], "error in the stream"),
        ([TEXT, {"choices": [{"text": "", "finish_reason": "abort"}]}, "[DONE]"], "aborted"),
        ([TEXT, LAST, "[DONE]"], "no usage"),
        ([TEXT, "{", LAST], "not understood"),
    ],
)
def test_what_went_wrong_has_a_name(events, kind):
    assert answered(*events).error == kind


def test_an_answer_in_one_piece_is_read_too():
    body = {"choices": [{"text": "abc", "finish_reason": "stop"}], "usage": USAGE}
    found = read(Sample(4, 0.0, ended=2.0, arrived=[(1.0, json.dumps(body).encode())]), stream=False)
    assert (found.error, found.text, found.output_tokens, found.times) == ("", "abc", 4, [])


# what is made of the times


def summary(*samples, slo=(), start=0.0):
    return report.summary(Pass(list(samples), start, lags_s=[0.001], busy=0.1), dict(slo))


def test_latencies_are_those_of_their_definitions():
    found = summary(sample([1.5, 2.0, 2.5, 3.0], tokens=4, planned=1.0))
    assert found["first_token_ms"]["p50"] == pytest.approx(500)
    assert found["per_token_ms"]["p50"] == pytest.approx(500)
    assert found["end_to_end_ms"]["p50"] == pytest.approx(2000)
    assert (found["tokens_per_s"], found["requests_per_s"]) == pytest.approx((4 / 3, 1 / 3))


def test_a_request_that_the_client_sends_late_counts_from_its_plan():
    late = sample([3.0], tokens=1, planned=1.0)
    late.started = 2.5
    found = summary(late)
    assert found["first_token_ms"]["p50"] == pytest.approx(2000)
    assert found["client"]["latest_start_ms"] == pytest.approx(1500)


def test_a_piece_of_several_tokens_counts_as_often_as_it_has_tokens():
    found = summary(sample([0.0, 0.3, 0.4], tokens=5, counts=[1, 4, 5]))
    assert found["between_tokens_ms"]["mean"] == pytest.approx(100)
    assert found["between_pieces_ms"]["p99"] == pytest.approx(300)
    assert found["between_pieces_ms"]["mean"] == pytest.approx(200)


def test_where_the_server_counts_no_pieces_they_share_the_tokens():
    found = summary(sample([0.0, 0.3, 0.5], tokens=5))
    assert found["between_tokens_ms"]["p50"] == pytest.approx(100)
    assert found["between_tokens_ms"]["p99"] == pytest.approx(150)


def test_a_percentile_is_a_value_that_occurred_and_minds_the_weights():
    assert report.percentiles([4, 1, 3, 2]) == {"mean": 2.5, "p50": 2, "p90": 4, "p99": 4}
    assert report.percentiles([1, 10], [9, 1]) == {"mean": 1.9, "p50": 1, "p90": 1, "p99": 10}
    assert report.percentiles([]) is None


def test_goodput_counts_requests_that_met_every_target():
    quick, slow, steady = ([0.1, 0.2], 2), ([0.1, 0.9], 2), ([0.7, 0.8], 2)
    slo = report.targets("ttft=500ms,tpot=0.2s")
    found = summary(*(sample(*own) for own in (quick, slow, steady)), slo=slo.items())
    assert found["slo_met"] == 1
    assert found["goodput_per_s"] == pytest.approx(1 / 0.9)


def test_an_answer_of_one_token_has_no_time_per_token_to_miss():
    assert summary(sample([0.1], tokens=1), slo={"per_token_ms": 1}.items())["slo_met"] == 1


def test_failures_are_counted_by_kind_and_stand_in_no_other_figure():
    failed = [Sample(4, 0.0, 0.0, ended=50.0, error=kind) for kind in ("HTTP 429", "HTTP 429", "timeout")]
    found = summary(sample([1.0], tokens=1), *failed)
    assert found["errors"] == {"HTTP 429": 2, "timeout": 1}
    assert (found["requests"], found["completed"]) == (4, 1)
    assert found["end_to_end_ms"]["p99"] == pytest.approx(1000)
    assert "failed: 2 HTTP 429, 1 timeout" in "\n".join(report.lines("x", found))


def test_a_lagging_client_says_so():
    done = Pass([sample([1.0], tokens=1)], 0.0, lags_s=[0.001] * 50 + [0.5], busy=0.2)
    assert "the client itself lags" in "\n".join(report.lines("x", report.summary(done, {})))
    assert "the client itself lags" not in "\n".join(report.lines("x", summary(sample([1.0], tokens=1))))


def test_nothing_completed_is_still_a_report():
    found = summary(Sample(4, 0.0, 0.0, ended=1.0, error="no connection"))
    assert found["first_token_ms"] is None
    assert "0 of 1 requests" in report.lines("x", found)[0]


@pytest.mark.parametrize("text", ["ttft", "ttft=5", "ttft=-1ms", "speed=1ms", "ttft=xs"])
def test_a_target_that_is_none_is_named(text):
    with pytest.raises(ValueError, match="is no target: write ttft, tpot, e2e"):
        report.targets(text)


# when requests are sent


class Clock:
    """Conversations that take so many seconds each; notes when they begin and how many run."""

    def __init__(self, seconds):
        self.seconds, self.begun, self.running, self.most = seconds, [], 0, 0

    async def talk(self, i, planned):
        self.begun.append(planned)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1


def sent(clock, number, kind):
    clock.start = perf_counter()
    asyncio.run(load._all(clock.talk, number, kind, clock.start, seed=0))
    return clock


def test_the_closed_loop_never_has_more_requests_than_clients():
    clock = sent(Clock(0.01), 12, Load(concurrency=3))
    assert (len(clock.begun), clock.most) == (12, 3)


def test_the_open_loop_does_not_wait_for_answers():
    clock = sent(Clock(0.5), 12, Load(rate=200.0))
    assert (len(clock.begun), clock.most) == (12, 12)
    assert list(map(sub, clock.begun, arrivals(12, 200.0, 0))) == pytest.approx([clock.start] * 12)


def test_without_either_all_begin_at_once():
    clock = sent(Clock(0.01), 5, Load())
    assert clock.most == 5
    assert len(set(clock.begun)) == 1


# the command line


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["--kv-pages", "9"], "--kv-pages is for a server that is started here"),
        (["--compare-llm"], "--compare-llm is for a server that is started here"),
        (["--no-stream", "--slo", "ttft=1s"], "there is no time but e2e"),
        (["--input", "1", "2"], "--input has no meaning for --workload offline"),
        (["--workload", "random", "--turns", "1", "2"], "--turns has no meaning for --workload random"),
        (["--workload", "random", "--input", "5", "2"], "--input is 5 2"),
        (["--requests", "0"], "--requests is 0"),
        (["--rate", "0"], "must be above 0"),
    ],
)
def test_what_would_be_ignored_or_cannot_be_is_refused(given, problem):
    with pytest.raises(ValueError, match=problem):
        parsed(*given)


def test_the_servers_address_may_be_pasted_with_its_path():
    args = options.parser("").parse_args(["--url", "http://host:1/v1/", "--vocabulary", "9"])
    options.check(args)
    assert args.url == "http://host:1"
