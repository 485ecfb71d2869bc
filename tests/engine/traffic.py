"""A scenario served by the real engine, and what must come of it: the tokens of the bare loop, and all pages back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import torch

from minisgl.config import EngineConfig
from minisgl.core import Batch, Request, SamplingParams, WorkCounts
from minisgl.engine.engine import Engine
from minisgl.engine.runner import Flight
from minisgl.models.llama import LlamaForCausalLM
from minisgl.simple import Recompute, naive_generate, step
from tests.engine.scenarios import Scenario, expected
from tests.helpers import check_pool, check_whole, request, sample_rows, tiny_model

LONGEST = 12
CLEAR = 1e-3  # fp32 sums in another order move the tiny model's logits by 2e-5
SAMPLED = [  # by the seed: the last one's next token needs the host
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.02),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.02, repetition_penalty=1.1),
]


@dataclass(frozen=True)
class Family:
    """A model, its prompts, and what the bare loop answers to each."""

    model: LlamaForCausalLM
    prompts: list[list[int]]
    answers: list[list[int]]
    seeds: list[int | None]  # None where the answer is greedy


@cache
def family(**shape: int) -> Family:
    """Prompts that share beginnings, follow each other's answers, and leave the model no close choices."""
    model = tiny_model(max_position_embeddings=128, **shape)
    bases = [[(11 * i + 5 * j * j + 3) % 131 for j in range(40)] for i in range(2)]
    wanted = [[*base[:n], *tail] for base in bases for n in (0, 2, 15, 16, 17, 31) for tail in ([9], [4, 4, 70])]
    prompts, answers, seeds = list[list[int]](), list[list[int]](), list[int | None]()

    def take(prompt: list[int], seed: int | None) -> None:
        answer = clear_answer(model, prompt, seed)
        if answer:
            prompts.append(prompt)
            answers.append(answer)
            seeds.append(seed)

    for prompt in wanted:
        take(prompt, None)
    for prompt, answer in list(zip(prompts, answers, strict=True))[::4]:  # the next turn of a conversation
        take([*prompt, *answer[:7], 50], None)
    for i, prompt in enumerate(wanted[::2]):
        take(prompt, 100 + i)
    return Family(model, prompts, answers, seeds)


def clear_answer(model: LlamaForCausalLM, prompt: list[int], seed: int | None) -> list[int]:
    """The bare loop's answer; empty if rounding could have turned one of its choices."""
    greedy = SamplingParams(max_tokens=LONGEST, ignore_eos=True)
    tokens = list(prompt)
    noise = torch.Generator().manual_seed(0)
    for _ in range(LONGEST):
        with torch.inference_mode():
            logits = step(model, tokens, 0, Recompute(), WorkCounts())
        if seed is None:
            best, second = logits.topk(2).values
            if best - second < CLEAR:
                return []
            tokens.append(int(logits.argmax()))
            continue
        shaken = logits + CLEAR / 10 * torch.randn(20, len(logits), generator=noise)
        one = Request(0, list(prompt), SAMPLED[seed % 3], seed=seed)
        one.tokens = tokens
        choices = set(sample_rows(torch.cat([logits[None], shaken]), [one] * 21))
        if len(choices) > 1:
            return []
        tokens += choices
    answer = tokens[len(prompt) :]
    assert seed is not None or answer == list(naive_generate(model, prompt, greedy))
    return answer


def requests_of(case: Scenario, known: Family) -> list[Request]:
    requests = []
    for i, ask in enumerate(case.asks):
        seed, answer = known.seeds[ask.prompt], known.answers[ask.prompt]
        base = SamplingParams() if seed is None else SAMPLED[seed % 3]
        stop_ids = () if ask.stop_after is None else (answer[ask.stop_after], 130)
        own = vars(base) | {"max_tokens": ask.max_tokens, "priority": ask.priority, "cache_salt": ask.salt}
        requests.append(request(i, known.prompts[ask.prompt], stop_ids, **own))
        requests[-1].seed = seed or 0
    return requests


def run(
    case: Scenario,
    model: LlamaForCausalLM | None = None,
    make: Callable[[LlamaForCausalLM, EngineConfig], Engine] = Engine,
    **switches: Any,
) -> list[Request]:
    """Serve a scenario on an engine of its own, as its switches and these want it."""
    if case.switches["graphs"] != "off":
        switches = {"attention": "torch", "kernels": "torch"} | switches
    engine = make(model or family().model, replace(case.config, **switches))
    requests = serve(engine, case, family())
    engine.close()  # its graphs need not wait for the garbage collector
    return requests


def serve(engine: Engine, case: Scenario, known: Family) -> list[Request]:
    """Serve a scenario and check after each step; whatever is in no page in use is NaN."""
    Random(len(case.asks)).shuffle(engine.pages._free)
    requests = requests_of(case, known)
    launch, before = engine.launch, engine.work.tokens_computed
    turn, rows = 0, 0

    def launch_and_abort(batch: Batch) -> Flight:
        nonlocal rows
        flight = launch(batch)
        rows += batch.total_tokens
        for at, i, in_flight in case.aborts:
            if at == turn and in_flight:
                engine.abort(i)
        return flight

    engine.launch = launch_and_abort  # type: ignore[method-assign]
    waiting = sorted(requests, key=lambda r: (case.asks[r.id].at, r.id))
    while waiting or engine.has_work:
        while waiting and case.asks[waiting[0].id].at <= turn:
            engine.add(waiting.pop(0))
        for at, i, in_flight in case.aborts:
            if at == turn and not in_flight:
                engine.abort(i)
        engine.pool.kv[:, :, engine.pages._free] = float("nan")  # whoever reads a free page gets an error
        engine.step()
        check_pool(engine.scheduler, requests)
        turn += 1
        assert turn < 1000, "no end in sight"
    assert not engine.flights
    check_whole(engine.scheduler)
    check_answers(engine, requests, case, known)
    assert engine.work.tokens_computed - before == rows
    engine.launch = launch  # type: ignore[method-assign]
    return requests


def check_answers(engine: Engine, requests: list[Request], case: Scenario, known: Family) -> None:
    for r, ask in zip(requests, case.asks, strict=True):
        prompt, answer = known.prompts[ask.prompt], known.answers[ask.prompt]
        want = expected(prompt, answer, ask.max_tokens, r.stop_ids, engine.scheduler.max_len)
        if want is None:
            assert (r.finish_reason, r.output) == ("error", [])
        elif r.finish_reason == "abort":
            assert r.id in {i for _, i, _ in case.aborts}
            assert r.output == want[: len(r.output)]
        else:
            assert r.output == want, f"request {r.id}: {r.error}"
            assert r.finish_reason == ("stop" if want[-1] in r.stop_ids else "length")
