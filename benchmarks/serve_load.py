"""Many clients for minutes, who change their minds: does a server lose an answer, or anything else?

Each client asks one request after the other: to any of the three routes, streamed or not, of random length, sampling
and number of answers. Some hang up before the answer, some in its middle, some ask for what there is not. Then all
leave, and what the server still holds is compared with what it held at rest before.

    python -m benchmarks.serve_load                       # SmolLM2, 64 clients, 5 minutes
    python -m benchmarks.serve_load --seconds 20 --model FOLDER --kv-pages 300
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import aiohttp

from benchmarks import record
from benchmarks.serving.own import running

WARM_SHARE = 0.25  # of the time, before the first look at what the server holds
SAMPLE_S = 2.0
SETTLE_S = 20.0  # for the last answers to be aborted and connections to be closed
WORDS = ["the", "a", "你好", "😀", "river", "runs", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "né"]
GROWTH_MB, GROWTH = 24, 0.05  # of memory between two rests: what allocators keep, or a twentieth
ANSWERED, GAVE_UP, REFUSED, FULL = "answered", "gave up", "refused", "queue full"


@dataclass
class Plan:
    """A request, and how long its client is willing to wait."""

    path: str
    body: dict[str, Any]
    patience_s: float | None = None  # then the client hangs up
    chunks: int | None = None  # after so many it hangs up
    refused: bool = False  # the request is wrong

    @property
    def num_answers(self) -> int:
        return int(self.body.get("n", 1))


@dataclass
class Outcome:
    """How a request ended."""

    how: str  # one of the four above, or what must not happen
    num_answers: int
    reasons: list[str] = field(default_factory=list)
    tokens: int = 0
    first_s: float | None = None  # from the request to the first token of a stream
    total_s: float = 0.0


def draw(rng: random.Random, model: str, longest: int, patience_s: float) -> Plan:
    """The next request.

    Args:
        longest: tokens of the longest answer; prompts have up to four times as many characters.
        patience_s: of those that hang up, at most.
    """
    path = rng.choice(["/v1/completions", "/v1/chat/completions", "/generate"])
    text = " ".join(rng.choices(WORDS, k=1 + int(rng.random() ** 2 * longest)))[: 4 * longest]
    body: dict[str, Any] = {"max_tokens": rng.randint(1, longest), "stream": rng.random() < 0.6}
    body |= {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    body |= {} if path == "/generate" else {"model": model}
    body |= rng.choice([{"temperature": 0}, {}, {"top_p": 0.9, "seed": 5}, {"top_k": 20, "presence_penalty": 0.5}])
    body |= rng.choice([{}, {}, {"stop": ["the", "😀"]}, {"n": 2}, {"n": 3}, {"logit_bias": {"5": 3}}])
    if rng.random() < 0.2:
        body["logprobs"] = True if "chat" in path else 2
    plan = Plan(path, body)
    fate = rng.random()
    if fate < 0.2:
        plan.patience_s = rng.random() ** 2 * patience_s
    elif fate < 0.35 and body["stream"]:
        plan.chunks = rng.randint(1, 10)
    elif fate > 0.95:
        body["temperature"], plan.refused = -1, True
    return plan


async def ask(http: aiohttp.ClientSession, plan: Plan) -> Outcome:
    """Carry out a plan."""
    begin = time.perf_counter()
    outcome = Outcome(GAVE_UP, plan.num_answers)
    try:
        await asyncio.wait_for(_talk(http, plan, outcome, begin), plan.patience_s)
    except asyncio.TimeoutError:
        outcome.how = GAVE_UP if plan.patience_s is not None else "no answer"
    except (aiohttp.ClientError, OSError) as error:
        outcome.how = f"connection lost: {type(error).__name__}"
    outcome.total_s = time.perf_counter() - begin
    return outcome


async def _talk(http: aiohttp.ClientSession, plan: Plan, outcome: Outcome, begin: float) -> None:
    async with http.post(plan.path, json=plan.body) as response:
        if response.status != 200:
            message = json.loads(await response.read())["error"]["message"]
            expected = {400: REFUSED} if plan.refused else {429: FULL}
            outcome.how = expected.get(response.status, f"{response.status}: {message}")
            return
        if not plan.body["stream"]:
            _take(outcome, json.loads(await response.read()))
        else:
            num = 0
            async for line in response.content:
                if not line.startswith(b"data: {"):  # empty, or [DONE]
                    continue
                data = json.loads(line[6:])
                if "error" in data:
                    outcome.how = f"error in a stream: {data['error']['message']}"
                    return
                _take(outcome, data)
                num += 1
                if outcome.first_s is None and num > ("chat" in plan.path):  # a chat's first chunk holds no token
                    outcome.first_s = time.perf_counter() - begin
                if num == plan.chunks:
                    response.close()
                    return
        outcome.how = ANSWERED if len(outcome.reasons) == plan.num_answers else f"{len(outcome.reasons)} reasons"


def _take(outcome: Outcome, data: dict[str, Any]) -> None:
    outcome.reasons += [choice["finish_reason"] for choice in data["choices"] if choice["finish_reason"]]
    outcome.tokens += (data.get("usage") or {}).get("completion_tokens", 0)


async def fill(http: aiohttp.ClientSession, model: str, seed: int) -> None:
    """Use every page once: the system gives memory to a process when it is first written to, which is no leak."""
    rng = random.Random(seed)
    async with http.get("/v1/models") as response:
        longest = min(500, (await response.json())["data"][0]["max_model_len"] - 2)
    for _ in range(1000):
        async with http.get("/stats") as response:
            if (await response.json())["pages_free"] * 16 < longest:
                return
        prompt = [rng.randrange(10, 250) for _ in range(longest)]
        async with http.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 1}) as response:
            response.raise_for_status()


async def crowd(
    http: aiohttp.ClientSession, model: str, clients: int, seconds: float, longest: int, patience_s: float, seed: int
) -> list[Outcome]:
    """So many clients, for so long; each lets its last request come to its end."""
    outcomes, end = list[Outcome](), time.monotonic() + seconds

    async def client(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while time.monotonic() < end:
            outcome = await ask(http, draw(rng, model, longest, patience_s))
            outcomes.append(outcome)
            await asyncio.sleep(1 if outcome.how == FULL else rng.random() * 0.05)

    await asyncio.gather(*map(client, range(clients)))
    return outcomes


def children(pid: int, word: str) -> list[int]:
    """A process's children whose command line holds a word; on Linux only."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if word.encode() in Path(f"/proc/{child}/cmdline").read_bytes()]


def held(pid: int) -> dict[str, float]:
    """What a process holds: memory in MB, open files, mapped regions, threads."""
    proc = Path(f"/proc/{pid}")
    found = dict(re.findall(r"(VmRSS|Threads):\s+(\d+)", (proc / "status").read_text()))
    return {
        "rss_mb": int(found["VmRSS"]) / 1024,
        "files": len(os.listdir(proc / "fd")),
        "maps": (proc / "maps").read_text().count("\n"),
        "threads": int(found["Threads"]),
    }


async def rest(http: aiohttp.ClientSession, pids: dict[str, int]) -> dict[str, Any]:
    """What server and engine hold when nobody asks for anything."""
    end = time.monotonic() + SETTLE_S
    while True:
        async with http.get("/stats") as response:
            stats = await response.json()
        busy = stats["running"] or stats["waiting"] or stats["held"]
        if time.monotonic() > end or not busy:
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)  # connections are closed behind their last answer
    names = ("running", "waiting", "held", "pages", "pages_free", "pages_cached", "steps", "preemptions")
    return {"stats": {name: stats[name] for name in names}} | {name: held(pid) for name, pid in pids.items()}


async def counted(http: aiohttp.ClientSession) -> dict[str, float]:
    """The server's own count of answers: those that ended by themselves, and those that were cut off."""
    async with http.get("/metrics") as response:
        text = await response.text()
    names = ("request_success", "request_aborts")
    return {
        name: sum(map(float, re.findall(rf"^minisgl:{name}_total{{.*}} (\S+)$", text, re.MULTILINE))) for name in names
    }


async def measure(
    url: str,
    pids: dict[str, int],
    model: str,
    clients: int,
    seconds: float,
    longest: int = 64,
    patience_s: float = 3.0,
    seed: int = 0,
) -> dict[str, Any]:
    """A full cache, then two crowds and a rest behind each of them: see `faults` for what must hold."""
    samples, begin = list[dict[str, Any]](), 0.0

    async def watch() -> None:
        while True:
            samples.append({"s": round(time.monotonic() - begin, 1)} | {name: held(pid) for name, pid in pids.items()})
            await asyncio.sleep(SAMPLE_S)

    async with aiohttp.ClientSession(url) as teller:
        await fill(teller, model, seed)
        before = await counted(teller)
        outcomes, rests = list[Outcome](), []
        begin = time.monotonic()
        watcher = asyncio.ensure_future(watch())
        for part, share in enumerate((WARM_SHARE, 1 - WARM_SHARE)):
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=600)
            async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as http:
                outcomes += await crowd(http, model, clients, seconds * share, longest, patience_s, seed + part)
            rests.append(await rest(teller, pids))
        watcher.cancel()
        after = await counted(teller)
    firsts = [outcome.first_s for outcome in outcomes if outcome.first_s is not None]
    answered = [outcome for outcome in outcomes if outcome.how == ANSWERED]
    percent = quantiles(firsts, n=100) if len(firsts) > 1 else [0.0] * 99
    return {
        "clients": clients,
        "seconds": round(time.monotonic() - begin, 1),
        "requests": len(outcomes),
        "ended": dict(Counter(outcome.how for outcome in outcomes)),
        "answers": {
            "asked": sum(o.num_answers for o in outcomes if o.how not in (REFUSED, FULL)),
            "complete": sum(o.num_answers for o in answered),
        },
        "counted_by_server": {name: after[name] - before[name] for name in after},
        "finish_reasons": dict(Counter(reason for outcome in answered for reason in outcome.reasons)),
        "ttft_ms": {f"p{p}": round(1000 * percent[p - 1], 1) for p in (50, 90, 99)},
        "e2e_s_p99": round(quantiles([o.total_s for o in answered], n=100)[98], 2) if len(answered) > 1 else 0.0,
        "rests": rests,
        "samples": samples[:: max(1, len(samples) // 60)],
    }


def faults(found: dict[str, Any]) -> list[str]:
    """What should not be: a request without an end, pages that did not come back, files or memory that grow."""
    texts = [f"{n} × {how}" for how, n in found["ended"].items() if how not in (ANSWERED, GAVE_UP, REFUSED, FULL)]
    answers, server = found["answers"], found["counted_by_server"]
    if server["request_success"] < answers["complete"]:
        texts.append(f"{answers['complete']} answers were complete, the server knows of {server['request_success']:g}")
    if sum(server.values()) > answers["asked"]:
        texts.append(f"the server ended {sum(server.values()):g} answers, {answers['asked']} were asked for")
    early, late = found["rests"]
    for state in (early["stats"], late["stats"]):
        if state["running"] or state["waiting"] or state["held"]:
            texts.append(f"at rest something is open: {state}")
        if state["pages_free"] + state["pages_cached"] != state["pages"]:
            texts.append(f"pages are lost: {state}")
    for name in early.keys() - {"stats"}:
        for what, slack in (("files", 1), ("threads", 1), ("maps", 40)):
            if late[name][what] > early[name][what] + slack:
                texts.append(f"{name}: {what} grew from {early[name][what]} to {late[name][what]}")
        before, after = early[name]["rss_mb"], late[name]["rss_mb"]
        if after > before + max(GROWTH_MB, GROWTH * before):
            texts.append(f"{name}: memory grew from {before:.0f} to {after:.0f} MB")
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kv-pages", type=int, default=1025, help="few, so that they are soon in use")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--longest", type=int, default=64, help="tokens of the longest answer")
    parser.add_argument("--patience", type=float, default=10, help="seconds, at most, of those who hang up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help="write results/serve_load.json")
    args = parser.parse_args()
    flags = ["--model", args.model, "--device", args.device, "--kv-pages", str(args.kv_pages)]
    with running([*flags, "--served-model-name", "served", "--max-queue", str(2 * args.clients)]) as url:
        [front] = children(os.getpid(), url.rpartition(":")[2])
        [engine] = children(front, "spawn_main")
        pids = {"front": front, "engine": engine}
        found = asyncio.run(
            measure(url, pids, "served", args.clients, args.seconds, args.longest, args.patience, args.seed)
        )
    found["faults"] = faults(found)
    print(json.dumps({name: value for name, value in found.items() if name != "samples"}, indent=1))
    if args.save:
        print("written to", record.save("serve_load", found, args.device))
    sys.exit(bool(found["faults"]))


if __name__ == "__main__":
    main()
