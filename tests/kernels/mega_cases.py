"""Random tiny models, their rows in shuffled pages, and a decode step of them in fp64."""

from __future__ import annotations

import torch
from minisgl_kernels import reference
from minisgl_kernels.cuda.mega import DecodeStep, LayerWeights


class Model:
    """A decoder with random weights and a pool in which rows of these lengths wait for their next token.

    Args:
        lens: tokens of each row, the new one included. What no row owns in the pool is NaN.
        hidden, intermediate, heads, kv_heads, head_dim, layers, vocab: the model's sizes.
        qk_norm: norms of each head of q and k, as in Qwen3.
        tied: the head is the embedding.
    """

    def __init__(
        self, lens, dtype=torch.float16, hidden=128, intermediate=192, heads=4, kv_heads=2, head_dim=64, layers=2,
        vocab=264, qk_norm=True, tied=True, page_size=16, seed=0, device="cpu",
    ):  # fmt: skip
        generator = torch.Generator(device).manual_seed(seed)
        self.lens, self.page_size, self.eps, self.head_dim, self.device = lens, page_size, 1e-5, head_dim, device
        self.heads, self.kv_heads, self.dtype = heads, kv_heads, dtype

        def matrix(rows, columns):
            return (torch.randn(rows, columns, generator=generator, device=device) * columns**-0.5).to(dtype)

        def norm(size):
            return (1 + 0.3 * torch.randn(size, generator=generator, device=device)).to(dtype)

        width = (heads + 2 * kv_heads) * head_dim
        self.layers = [
            LayerWeights(
                norm(hidden), matrix(width, hidden), norm(head_dim) if qk_norm else None,
                norm(head_dim) if qk_norm else None, matrix(hidden, heads * head_dim), norm(hidden),
                matrix(2 * intermediate, hidden), matrix(hidden, intermediate),
            )
            for _ in range(layers)
        ]  # fmt: skip
        self.embedding = torch.randn(vocab, hidden, generator=generator, device=device).to(dtype)
        self.head = self.embedding if tied else matrix(vocab, hidden)
        self.final_norm = norm(hidden)

        batch, needed = len(lens), [-(-length // page_size) for length in lens]
        pages = sum(needed) + 2
        shuffled = 1 + torch.randperm(pages - 1, generator=generator, device=device)
        self.page_table = torch.full((batch, max(needed) + 1), 2**40, device=device)
        self.kv = torch.full((layers, 2, pages, page_size, kv_heads, head_dim), torch.nan, dtype=dtype, device=device)
        self.rows = []
        for i, own in enumerate(shuffled[: sum(needed)].split(needed)):
            self.page_table[i, : needed[i]] = own
            places = torch.arange(lens[i], device=device)
            self.rows.append(own[places // page_size] * page_size + places % page_size)
            old = self.rows[i][:-1]
            shape = (layers, 2, len(old), kv_heads, head_dim)
            self.kv.flatten(2, 3)[:, :, old] = torch.randn(shape, generator=generator, device=device).to(dtype)
        self.input_ids = torch.randint(vocab, (batch,), generator=generator, device=device)
        self.positions = torch.tensor(lens, device=device) - 1
        angles = self.positions.unsqueeze(1) / 100.0 ** torch.linspace(0, 1, head_dim // 2, device=device)
        self.rope = angles.cos().to(dtype), angles.sin().to(dtype)

    def step(self, **options):
        """The megakernel for this model."""
        return DecodeStep(self.layers, self.embedding, self.final_norm, self.head, self.kv, self.eps, **options)

    def run(self, step, **options):
        """Logits, into a tensor of NaNs."""
        logits = torch.full((len(self.lens), len(self.head)), torch.nan, dtype=self.dtype, device=self.device)
        assert step(self.input_ids, self.positions, self.page_table, *self.rope, logits, **options) is logits
        return logits

    def newest(self, kv):
        """K and V of the rows' new tokens: [layers, 2, B, kv_heads, head_dim]."""
        return kv.flatten(2, 3)[:, :, torch.stack([rows[-1] for rows in self.rows])]

    def expected(self, exact=torch.float64):
        """Logits and the pool after the step, computed in `exact`."""
        kv = self.kv.to(exact)
        batch, places = len(self.lens), self.page_table.gather(1, (self.positions // self.page_size).unsqueeze(1))
        slots = places.squeeze(1) * self.page_size + self.positions % self.page_size
        starts = torch.arange(batch + 1, device=self.device)
        rope = [angle.to(exact) for angle in self.rope]
        x = self.embedding[self.input_ids].to(exact)

        def norm(x, weight):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * weight

        for pool, weights in zip(kv, self.layers, strict=True):
            w = LayerWeights(*(None if weight is None else weight.to(exact) for weight in weights))
            keys, values = pool.flatten(1, 2)
            qkv = (norm(x, w.input_norm) @ w.qkv.T).view(batch, -1, self.head_dim)
            q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            if w.q_norm is not None:
                q, k = norm(q, w.q_norm), norm(k, w.k_norm)
            keys[slots], values[slots] = reference.apply_rope(k, *rope), v
            lens, q = self.positions + 1, reference.apply_rope(q, *rope)
            attended = reference.paged_attention(
                q, keys, values, self.page_table, self.page_size, lens, starts, self.head_dim**-0.5
            )
            x = x + attended.flatten(1) @ w.o.T
            gate, up = (norm(x, w.post_norm) @ w.gate_up.T).chunk(2, dim=-1)
            x = x + (torch.nn.functional.silu(gate) * up) @ w.down.T
        return norm(x, self.final_norm.to(exact)) @ self.head.to(exact).T, kv
