"""The radix tree at work: match, split, lock, insert and evict, operation by operation, for six requests.

The engine of chapter 4 runs for real. Its trace has one event a step, and a step may split, lock and insert; so the
operations themselves are watched here, and after each one the tree and the pages' holders are written down.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.record import save
from minisgl.config import EngineConfig
from minisgl.core import Batch, Request, SamplingParams
from minisgl.engine.engine import Engine
from minisgl.engine.runner import Flight
from minisgl.kvcache.radix_cache import Node
from minisgl.llm import LLM

PAGE_SIZE, PAGES = 4, 22  # the dummy included
RULES = "You answer for the harbour office. Be brief.\n"
ROUNDS: list[list[tuple[int, str, int]]] = [  # who continues (-1: nobody), text, new tokens; a round runs side by side
    [(-1, f"{RULES}Q: May I moor here overnight?\nA:", 8)],
    [(-1, f"{RULES}Q: Who may use the crane?\nA:", 5), (-1, f"{RULES}Q: When does the lock open?\nA:", 6)],
    [(0, "\nQ: And for two nights?\nA:", 5)],
    [(-1, "A cat sat on the wall by the old mill and saw a red bus go by, one of two", 5)],
    [(-1, f"{RULES}Q: Who may use the crane?\nA:", 5)],
]


class Watch:
    """Frames of an engine, one for each operation of its prefix cache."""

    def __init__(self, engine: Engine, decode: Any) -> None:
        self.engine, self.decode, self.frames, self.texts = engine, decode, list[dict[str, Any]](), list[str]()
        self.requests: list[Request] = []
        self._who = -1
        cache, prefix = engine.scheduler.cache, engine.prefix
        attach, detach, publish, launch = cache.attach, cache.detach, cache.publish, engine.launch
        match, split, evict, insert = prefix.match_prefix, prefix._split, prefix.evict, prefix.insert

        def watched_attach(request: Request) -> None:
            self._who = request.id
            attach(request)
            if request.pages:
                self.add("lock", pages=list(request.pages))

        def watched_match(tokens: Sequence[int], salt: str = "") -> tuple[Node, list[int]]:
            node, pages = match(tokens, salt)
            self.add("match", pages=list(pages), tokens=len(tokens))
            return node, pages

        def watched_split(node: Node, num_pages: int) -> Node:
            upper = split(node, num_pages)
            self.add("split", pages=[*upper.pages, *node.pages], tokens=len(upper.tokens))
            return upper

        def watched_evict(num_pages: int) -> int:
            if num_pages <= 0:
                return evict(num_pages)
            before, free = pages_of(prefix.root), engine.pages.num_free
            self.add("short", pages=[], tokens=num_pages, free=free)
            gone = evict(num_pages)
            lost = [page for page in before if page not in pages_of(prefix.root)]
            self.frames[-1]["pages"] = lost
            self.add("evict", pages=lost)
            return gone

        def watched_launch(batch: Batch) -> Flight:
            if batch.total_tokens > len(batch.requests):
                rows = [[request.id, start, tokens] for request, start, tokens in batch]
                self.add("step", pages=[], rows=rows)
            return launch(batch)

        def watched_insert(tokens: Sequence[int], pages: Sequence[int], salt: str = "") -> tuple[Node, list[int]]:
            before = pages_of(prefix.root)
            result = insert(tokens, pages, salt)
            self._inserted = [page for page in pages_of(prefix.root) if page not in before]
            return result

        def watched_publish(request: Request, num_tokens: int) -> bool:
            self._who, moved = request.id, publish(request, num_tokens)
            self.add("insert", pages=self._inserted, tokens=num_tokens, ended=request.finish_reason is not None)
            return moved

        def watched_detach(request: Request) -> None:
            self._who = request.id
            detach(request)
            self.add("unlock", pages=[])

        self._inserted: list[int] = []
        for owner, watched in [
            (cache, {"attach": watched_attach, "detach": watched_detach, "publish": watched_publish}),
            (prefix, {"match_prefix": watched_match, "_split": watched_split, "evict": watched_evict}),
            (prefix, {"insert": watched_insert}),
            (engine, {"launch": watched_launch}),
        ]:
            for name, function in watched.items():
                setattr(owner, name, function)

    def add(self, what: str, **more: Any) -> None:
        """The state now: the tree from the root down, the page tables, and how many hold each page."""
        holders = self.engine.pages.holders
        self.frames.append(
            {"what": what, "who": self._who}
            | more
            | {
                "tree": self._tree(),
                "tables": {request.id: list(request.pages) for request in self.requests if request.pages},
                "holders": "".join(str(holders(page)) for page in range(1, self.engine.pages.capacity + 1)),
            }
        )

    def _tree(self) -> list[Any]:
        """[parent's index, locks, pages, their texts' indices], in the order of a walk from the root downwards."""
        nodes: list[Any] = []

        def walk(node: Node, parent: int) -> None:
            size = self.engine.config.page_size
            texts = [self._text(node.tokens[i * size : (i + 1) * size]) for i in range(len(node.pages))]
            nodes.append([parent, node.locks, list(node.pages), texts])
            at = len(nodes) - 1
            for child in node.children.values():
                walk(child, at)

        for child in self.engine.prefix.root.children.values():
            walk(child, -1)
        return nodes

    def _text(self, tokens: Sequence[int]) -> int:
        text = self.decode(list(tokens))
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text)


def pages_of(node: Node) -> list[int]:
    """Pages of a node and all below it."""
    return [*node.pages, *(page for child in node.children.values() for page in pages_of(child))]


def record(
    llm: LLM,
    rounds: Sequence[Sequence[tuple[int, str, int]]] = ROUNDS,
    page_size: int = PAGE_SIZE,
    pages: int = PAGES,
) -> dict[str, Any]:
    """Round after round, each to its end."""
    config = EngineConfig.chapter(4, page_size=page_size, kv_pages=pages)
    engine = Engine(llm.model, config)
    watch = Watch(engine, llm.tokenizer.decode)
    requests = watch.requests
    for group in rounds:
        for continues, text, new_tokens in group:
            history = requests[continues].tokens if continues >= 0 else []
            prompt = [*history, *llm.encode(text)]
            requests.append(Request(len(requests), prompt, SamplingParams(max_tokens=new_tokens)))
            engine.add(requests[-1])
        while engine.has_work:
            engine.step()
    engine.close()
    texts = [(continues, text) for group in rounds for continues, text, _ in group]
    return {
        "page_size": page_size,
        "requests": [
            {
                "continues": continues,
                "text": text,
                "prompt": request.prompt_len,
                "found": request.num_cached,
                "answer": llm.tokenizer.decode(request.output),
            }
            for (continues, text), request in zip(texts, requests, strict=True)
        ],
        "texts": watch.texts,
        # An empty tree shows nothing: begin where the first request has been computed.
        "frames": watch.frames[next(i for i, frame in enumerate(watch.frames) if frame["what"] == "insert") :],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--name", default="player_radix", help="of the result file (default: %(default)s)")
    args = parser.parse_args()
    llm = LLM(EngineConfig.chapter(4, model=args.model, device="cpu", dtype="float32", kv_pages=2))
    print(save(args.name, record(llm)))


if __name__ == "__main__":
    main()
