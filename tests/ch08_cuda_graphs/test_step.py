"""Task 08.9: the loop that plans and launches a step while the one before runs. The last tests need all tasks."""

from __future__ import annotations

import pytest

from minisgl.engine.runner import Flight
from minisgl.simple import naive_generate
from tests.ch08_cuda_graphs.loop import Log, device, new_engine, new_request, run
from tests.helpers import check_whole, tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model().to(device())


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read(model):
    log = Log(engine := new_engine(model))
    run(engine, new_request(0, prompt=5, max_tokens=4))
    expected = ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "launch 3", "read 2", "read 3"]
    assert log.events == expected, "launch step k + 1, then read k; the last one is read when nothing is planned"


def test_without_overlap_each_step_is_over_when_the_next_is_planned(model):
    log = Log(engine := new_engine(model, overlap="off"))
    run(engine, new_request(0, prompt=5, max_tokens=3))
    assert log.events == ["launch 0", "read 0", "launch 1", "read 1", "launch 2", "read 2"]


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_step_returns_each_request_that_got_a_token_or_ended_once(model, overlap):
    engine = new_engine(model, overlap=overlap)
    a, b = new_request(0, prompt=5, max_tokens=2), new_request(1, prompt=5, max_tokens=3)
    engine.add(a)
    engine.add(b)

    returned = []
    while engine.has_work:
        returned.append([request.id for request in engine.step()])

    assert [ids for ids in returned if ids] == [[0, 1], [0, 1], [1]], "who got its last token also ended"


def test_a_request_that_ended_is_returned_once(model):
    engine = new_engine(model)
    a = new_request(0, prompt=5, max_tokens=8)
    engine.add(a)
    for _ in range(3):
        engine.step()
    engine.abort(0)

    returned = [engine.step() for _ in range(3)]

    assert returned == [[a], [], []]


def test_who_cannot_be_served_comes_out_of_the_next_step(model):
    engine = new_engine(model)
    engine.add(bad := new_request(0, prompt=80))
    assert engine.step() == [bad]
    assert (bad.finish_reason, engine.has_work) == ("error", False)


def test_when_nobody_is_left_nothing_stays_in_flight(model):
    """What the last step brings behind an end of sequence, nobody wants."""
    [answer] = run(new_engine(model), new_request(0, prompt=5, max_tokens=8))
    engine = new_engine(model)
    request = new_request(0, prompt=5, max_tokens=8, stop_ids=frozenset({answer[2]}))
    engine.add(request)
    while request.finish_reason is None:
        engine.step()

    why = "the scheduler has no work left, and a step is in flight: take it in"
    assert (len(engine.flights), engine.has_work) == (0, False), why
    check_whole(engine.scheduler)


def test_a_token_behind_the_end_is_computed_and_not_answered(model):
    [answer] = run(new_engine(model, overlap="off"), new_request(0, prompt=5, max_tokens=8))
    end = answer.index(answer[3])
    runs = []
    for overlap in ("off", "on"):
        engine = new_engine(model, overlap=overlap)
        request = new_request(0, prompt=5, max_tokens=8, stop_ids=frozenset({answer[end]}))
        runs.append((run(engine, request)[0], request.finish_reason, engine.work.steps))

    assert runs[0] == (answer[: end + 1], "stop", end + 1)
    assert runs[1] == (answer[: end + 1], "stop", end + 2), "one step more was under way"


BY_HOST = {"frequency_penalty": 1.5, "repetition_penalty": 1.4, "max_tokens": 7}


def test_who_needs_the_hosts_knowledge_gets_the_same_tokens(model):
    """A penalty counts the tokens of the answer, so it must know them all, the last one too."""
    runs = [
        run(
            new_engine(model, overlap=overlap),
            new_request(0, prompt=5, **BY_HOST),
            new_request(1, prompt=6, max_tokens=9),
        )
        for overlap in ("off", "on")
    ]
    assert runs[1] == runs[0]
    assert runs[1][0] != run(new_engine(model), new_request(0, prompt=5, max_tokens=7))[0], "the penalties do nothing"


def test_a_step_that_needs_the_host_is_launched_when_all_before_it_are_read(model):
    log = Log(engine := new_engine(model))
    engine.add(new_request(0, prompt=5, max_tokens=6))
    engine.step()
    engine.step()
    assert log.events == ["launch 0", "launch 1", "read 0"]

    engine.add(penalised := new_request(1, prompt=5, **BY_HOST))
    grown = engine.step()

    why = "before it and behind it: its tokens are read before anything else is planned"
    assert log.events[3:] == ["read 1", "launch 2", "read 2"], why
    assert [request.id for request in grown] == [0, 1], "tokens of both steps came in, and each request comes out once"
    assert len(penalised.output) == 1


def test_who_got_a_token_while_a_step_waited_is_returned_even_if_that_step_is_not_its_own(model):
    engine = new_engine(model, batching="prefill_first")
    engine.add(a := new_request(0, prompt=5, max_tokens=6))
    engine.step()
    engine.step()
    engine.add(penalised := new_request(1, prompt=5, **BY_HOST))

    assert engine.step() == [a, penalised], "the prompt has a step of its own, and the one before brought a token"


def test_overlap_begins_again_when_they_have_left(model):
    log = Log(engine := new_engine(model))
    engine.add(new_request(0, prompt=5, max_tokens=1, frequency_penalty=1.0))
    engine.add(new_request(1, prompt=5, max_tokens=4))
    for _ in range(3):
        engine.step()
    assert log.events == ["launch 0", "read 0", "launch 1", "launch 2", "read 1"]


def fail_the_next_launch(engine, problem=MemoryError):
    launch = engine.launch

    def fail(batch):
        engine.launch = launch
        raise problem

    engine.launch = fail


@pytest.mark.parametrize("problem", [MemoryError, KeyboardInterrupt])
def test_a_launch_that_fails_loses_nothing(model, problem):
    expected = run(new_engine(model), new_request(0, prompt=5, max_tokens=6), new_request(1, prompt=7, max_tokens=5))
    engine = new_engine(model)
    requests = [new_request(0, prompt=5, max_tokens=6), new_request(1, prompt=7, max_tokens=5)]
    for request in requests:
        engine.add(request)
    engine.step()
    fail_the_next_launch(engine, problem)
    with pytest.raises(problem):
        engine.step()
    assert len(engine.flights) == len(engine.scheduler.in_flight) == 1, "only the step before is under way"

    while engine.has_work:
        engine.step()
    assert [request.output for request in requests] == expected
    check_whole(engine.scheduler)


def test_pages_that_a_step_in_flight_reads_are_not_free_when_its_prompt_moves_to_others(model):
    """Two equal prompts in one step: when it is taken in, the second moves over to the pages of the first."""
    log = Log(engine := new_engine(model))
    a, b = new_request(0, prompt=9), new_request(1, prompt=9)
    b.tokens[:] = a.tokens
    engine.add(a)
    engine.add(b)
    engine.step()
    before = list(b.pages)

    engine.step()

    assert b.pages != before, "the test means to see them move"
    log.check_pages()
    assert run(engine) == []
    assert a.output == b.output


def test_what_a_failed_launch_did_not_send_is_sent_by_the_next(model, monkeypatch):
    expected = run(new_engine(model), new_request(0, prompt=5, max_tokens=9), new_request(1, prompt=7, max_tokens=5))
    engine = new_engine(model)
    requests = [new_request(0, prompt=5, max_tokens=9), new_request(1, prompt=7, max_tokens=5)]
    engine.add(requests[0])
    engine.step()
    engine.step()
    engine.add(requests[1])

    def fail(parts, to=None):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.rows._changes, "send", fail)
        with pytest.raises(MemoryError):
            engine.step()
    assert run(engine) == []
    why = "what was to be sent did not arrive: tell the runner's rows to forget(batch)"
    assert [request.output for request in requests] == expected, why


def test_overlap_begins_again_after_a_failure(model):
    log = Log(engine := new_engine(model))
    engine.add(new_request(0, prompt=5, max_tokens=9))
    engine.step()
    fail_the_next_launch(engine)
    with pytest.raises(MemoryError):
        engine.step()
    del log.events[:]
    for _ in range(3):
        engine.step()

    assert log.events == ["read 0", "launch 1", "launch 2", "read 1", "launch 3", "read 2"]


# The whole engine.

PROMPTS = [9, 17, 5, 1, 22, 12, 3, 30]


def answers(model, shared=10, **switches):
    """Eight requests, half with a common beginning, three of them late; pages of steps in flight are watched."""
    engine = new_engine(model, **switches)
    Log(engine)
    ends = frozenset(model.config.eos_token_ids)
    requests = [new_request(i, prompt=n, max_tokens=6 + i % 3, stop_ids=ends) for i, n in enumerate(PROMPTS)]
    for request in requests:
        if request.prompt_len > shared:
            request.tokens[:shared] = range(60, 60 + shared)
    coming = list(requests)
    steps = 0
    while coming or engine.has_work:
        while coming and (len(coming) > 3 or steps >= 4):
            engine.add(coming.pop(0))
        engine.step()
        steps += 1
        assert steps < 500
    check_whole(engine.scheduler)
    return requests, engine


@pytest.fixture(scope="module")
def expected(model):
    requests, _ = answers(model, overlap="off")
    for request in requests[:3]:
        prompt = request.tokens[: request.prompt_len]
        assert request.output == list(naive_generate(model, prompt, request.params)), "chapter 1 says otherwise"
    return [request.output for request in requests]


@pytest.mark.parametrize(
    "switches",
    [
        {"graphs": "lazy", "overlap": "off"},
        {"graphs": "lazy", "overlap": "on"},
        {"graphs": "on", "overlap": "on", "max_running_requests": 3},
        {"graphs": "off", "overlap": "on"},
        {"graphs": "lazy", "overlap": "on", "max_batch_tokens": 7},
        {"graphs": "lazy", "overlap": "on", "kv_pages": 14, "output_reserve": 0.0},
        {"graphs": "off", "overlap": "on", "kv_pages": 18, "output_reserve": 0.0, "prefix_cache": "none"},
        {"graphs": "lazy", "overlap": "on", "batching": "prefill_first"},
    ],
    ids=lambda switches: " ".join(f"{name}={value}" for name, value in switches.items()),
)
def test_graphs_and_overlap_change_no_token(model, expected, switches):
    requests, engine = answers(model, **switches)

    assert [request.output for request in requests] == expected
    assert (engine.work.graph_steps > 0) == (switches["graphs"] != "off")
    if "kv_pages" in switches:
        assert engine.work.preemptions > 0, "the test means to run out of pages"


def test_what_no_graph_holds_runs_eagerly_and_says_why(model):
    engine = new_engine(model, graphs="lazy")
    run(engine, new_request(0, prompt=5, max_tokens=4, frequency_penalty=1.0))
    run(engine, new_request(1, prompt=5, max_tokens=4))

    stats = engine.stats()
    assert (stats["eager_steps_penalties"], stats["eager_steps_size"], stats["graph_steps"]) == (4, 1, 3)


# What goes wrong once, and must not cost an answer.


BY_HOST = {"frequency_penalty": 1.5, "repetition_penalty": 1.4, "max_tokens": 7}


def interrupt_the_next_wait(engine):
    """Ctrl-C while the tokens of the next step that is launched are waited for, once."""
    launch, left = engine.launch, [KeyboardInterrupt]

    def interrupted(batch):
        flight = launch(batch)

        def tokens():
            if left:
                raise left.pop()
            return flight.tokens()

        return Flight(batch, tokens)

    engine.launch = interrupted


def finish(engine):
    for _ in range(60):
        if not engine.has_work:
            return
        engine.step()
    pytest.fail("no end in sight")


def test_an_interrupted_wait_for_what_the_host_must_know_loses_no_plan(model):
    """The plan was made before that wait: it is taken back too, or tokens that nobody computed count as computed."""

    def requests():
        return new_request(0, prompt=5, max_tokens=6), new_request(1, prompt=5, **BY_HOST)

    expected = run(new_engine(model), *requests())
    engine, (first, second) = new_engine(model), requests()
    engine.add(first)
    interrupt_the_next_wait(engine)
    engine.step()
    engine.add(second)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    finish(engine)

    assert [first.output, second.output] == expected
    check_whole(engine.scheduler)


def test_after_an_interrupted_wait_no_third_step_takes_off(model):
    """There are two buffers for tokens: the third would overwrite those of the first."""
    expected = run(new_engine(model), new_request(0, prompt=5, max_tokens=8))
    engine, request = new_engine(model), new_request(0, prompt=5, max_tokens=8)
    engine.add(request)
    interrupt_the_next_wait(engine)
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert len(engine.flights) == 2
    finish(engine)

    assert [request.output] == expected


def test_a_failed_launch_is_remembered_until_the_steps_before_are_taken_in(model):
    """`_failed` stays True while `_retire(0)` is interrupted: the next step must still take all of them in."""

    def requests():
        return new_request(0, prompt=5, max_tokens=8), new_request(1, prompt=7, max_tokens=6)

    expected = run(new_engine(model), *requests())
    engine, asked = new_engine(model), requests()
    for request in asked:
        engine.add(request)
    interrupt_the_next_wait(engine)
    engine.step()
    fail_the_next_launch(engine)
    with pytest.raises(MemoryError):
        engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    finish(engine)

    assert [request.output for request in asked] == expected


def test_a_failed_launch_is_tried_again_without_a_runner_too(model):
    engine, request = new_engine(model, overlap="off"), new_request(0, prompt=5, max_tokens=3)
    engine.add(request)
    fail_the_next_launch(engine)
    with pytest.raises(MemoryError):
        engine.step()
    finish(engine)

    assert len(request.output) == 3


def test_every_step_is_traced(model, tmp_path):
    engine = new_engine(model, trace=str(tmp_path / "trace"))
    run(engine, new_request(0, prompt=5, max_tokens=3))
    engine.close()

    assert len((tmp_path / "trace").read_text().splitlines()) > 3  # a header, and three tokens
