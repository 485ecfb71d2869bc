"""A small server of many requests over one pool of pages. It has one bug: find it.

With room for everybody each request is answered as if it were alone. When the pool runs full, two answers may mix.
Run `pytest tests/ch03_paged_pool/test_bug_hunt.py --runxfail` to see the symptom, and again to see it gone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minisgl.attention.torch_backend import TorchAttention
from minisgl.core import ForwardBatch, PagedRows, Request, SamplingParams
from minisgl.kvcache.mha_pool import MHAPool
from minisgl.kvcache.pages import OutOfPages, PageAllocator
from minisgl.models.llama import LlamaForCausalLM


class Server:
    """Greedy answers for as many requests as there is room for; the others wait, and a small one may overtake."""

    def __init__(self, model: LlamaForCausalLM, num_pages: int, page_size: int) -> None:
        c = model.config
        self.model = model
        self.pool = MHAPool(
            c.num_layers, num_pages, page_size, c.num_kv_heads, c.head_dim, torch.float32, torch.device("cpu")
        )
        self.pages = PageAllocator(num_pages)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> list[list[int]]:
        """The new tokens for each prompt, all requests side by side."""
        requests = [
            Request(i, list(prompt), SamplingParams(max_tokens=n))
            for i, (prompt, n) in enumerate(zip(prompts, max_tokens, strict=True))
        ]
        waiting, running = list(requests), []
        while waiting or running:
            admitted = [request for request in waiting if self.admit(request)]
            waiting = [request for request in waiting if request not in admitted]
            running += admitted
            while not (finished := [r for r in running if len(r.output) == r.params.max_tokens]):
                self.step(running)
            for request in finished:  # their pages may let others in
                self.pages.release(request.pages)
                running.remove(request)
        return [request.output for request in requests]

    def admit(self, request: Request) -> bool:
        """Give the request pages for its prompt and for its answer; False if there are too few at the moment."""
        size = self.pool.page_size
        for_prompt = -(-request.prompt_len // size)
        for_answer = -(-(request.prompt_len + request.params.max_tokens) // size) - for_prompt
        try:
            request.pages += self.pages.alloc(for_prompt)
            request.pages += self.pages.alloc(for_answer)
        except OutOfPages:
            self.pages.release(request.pages)
            return False
        return True

    @torch.inference_mode()
    def step(self, running: Sequence[Request]) -> None:
        """Compute what is not computed yet, and append each request's next token."""
        size, spans = self.pool.page_size, [range(r.num_computed, len(r.tokens)) for r in running]
        ids = [request.tokens[p] for request, span in zip(running, spans, strict=True) for p in span]
        slots = [r.pages[p // size] * size + p % size for r, span in zip(running, spans, strict=True) for p in span]
        width = max(len(request.pages) for request in running)
        rows = PagedRows(
            slots=torch.tensor(slots),
            page_table=torch.tensor([request.pages + [0] * (width - len(request.pages)) for request in running]),
            query_lens=[len(span) for span in spans],
            kv_lens=[len(request.tokens) for request in running],
            query_starts=torch.tensor([0, *(len(span) for span in spans)]).cumsum(0),
            device_kv_lens=torch.tensor([len(request.tokens) for request in running]),
        )
        last_rows = rows.query_starts[1:] - 1
        positions = torch.tensor([p for span in spans for p in span])
        attention = TorchAttention(self.pool, rows)
        logits = self.model(ForwardBatch(torch.tensor(ids), positions, attention, last_rows))
        for request, token in zip(running, logits.argmax(dim=-1).tolist(), strict=True):
            request.num_computed = len(request.tokens)
            request.tokens.append(token)
