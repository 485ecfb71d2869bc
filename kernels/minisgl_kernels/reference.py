"""Every op of the decoder, and sampling, in plain torch.

These are the definitions. Faster implementations are compared with them, and any device runs them as they are. Rows are
tokens: only attention knows of sequences. Pages and slots are integers here; who holds them is not known.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from minisgl_kernels.graphs import is_capturing

linear = F.linear
embedding = F.embedding
_LOG2_E = 1.4426950408889634
SAMPLE_BLOCK = 2048  # tokens; which block a token is in decides which noise it gets
_GOLDEN = -0x61C8864680B583EB  # 2⁶⁴ / golden ratio, odd: 0x9E3779B97F4A7C15 as a signed integer

# On a GPU cuDNN would come first, and it plans for a millisecond whenever a length is new, as in every decode step.
_sdpa_without_cudnn = sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])(
    F.scaled_dot_product_attention
)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each row of x [..., hidden] to a root mean square of 1, then by weight [hidden] (Zhang & Sennrich, 2019).

    The mean is taken in fp32 whatever the dtype of x: a sum of squares in 16 bits loses the small terms.
    """
    x32 = x.float()
    inverse_rms = torch.rsqrt(x32.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (x32 * inverse_rms).to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual stream, both [..., hidden], and normalise the sum; returns (normalised, sum).

    The sum is rounded to the dtype of x before it is normalised, as it is where it is kept. Without a residual x is it.
    """
    total = x if residual is None else residual + x
    return rms_norm(total, weight, eps), total


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head of x [T, heads, head_dim] by its token's angles: cos, sin [T, head_dim / 2] (Su et al., 2021).

    Half-split layout, as Hugging Face stores Llama and Qwen: element i is paired with element i + head_dim / 2.
    """
    first, second = x.chunk(2, dim=-1)  # [T, heads, head_dim / 2] each
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, head_dim / 2], the same for every head
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rope_angles(
    positions: torch.Tensor, inv_freq: torch.Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [T, head_dim / 2] of positions [T] times inv_freq [head_dim / 2], all in fp32; then magnitude
    times these, cast to dtype."""
    angles = positions.float().unsqueeze(1) * inv_freq
    return (angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype)


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """What stands between the qkv projection and attention: norms of q and k, rotation, and K and V to their slots.

    Args:
        qkv: [T, heads + 2 · kv_heads, head_dim], the heads of q, k and v behind one another.
        q_weight, k_weight: [head_dim], the weights of a norm of each head (Qwen3); None leaves q or k as it is.
        cos, sin: [T, head_dim / 2], see apply_rope.
        keys, values: one layer's [slots, kv_heads, head_dim], written at `slots` [T] int64.

    Returns:
        q, normalised and rotated: [T, heads, head_dim].
    """
    kv_heads = keys.shape[1]
    q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if q_weight is not None:
        q = rms_norm(q, q_weight, eps)
    if k_weight is not None:
        k = rms_norm(k, k_weight, eps)
    keys.index_copy_(0, slots, apply_rope(k, cos, sin))
    values.index_copy_(0, slots, v)
    return apply_rope(q, cos, sin)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend from each of T tokens to itself and those before it (Vaswani et al., 2017), with grouped KV heads.

    Query head h reads KV head h // (heads / kv_heads) (Ainslie et al., 2023). K and V are never repeated in memory:
    the query heads of one group are stacked as rows of one matrix product.

    Args:
        q: [T, heads, head_dim].
        k, v: [T, kv_heads, head_dim].
        scale: what q·k is multiplied by, normally head_dim ** -0.5.

    Returns:
        [T, heads, head_dim].
    """
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.view(tokens, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("tkgd,skd->kgts", grouped, k).float() * scale  # [kv_heads, group, T, T]
    future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(diagonal=1)
    weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1).to(v.dtype)
    return torch.einsum("kgts,skd->tkgd", weights, v).reshape(tokens, heads, head_dim)


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attention of q [G, n, heads, head_dim] over keys, values [G, S, kv_heads, head_dim]; returns q's shape."""
    groups, new, heads, head_dim = q.shape
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)  # [G, kv_heads, S, head_dim]
    sdpa = _sdpa_without_cudnn if q.is_cuda else F.scaled_dot_product_attention
    if new == 1:  # the query heads that share a KV head become the rows of one product
        out = sdpa(q.view(groups, keys.shape[1], -1, head_dim), keys, values, mask)
    else:
        out = sdpa(q.transpose(1, 2), keys, values, mask, enable_gqa=True).transpose(1, 2)
    return out.reshape(groups, new, heads, head_dim)


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    kv_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    """Causal attention of B sequences' new tokens over paged K and V: of n queries and S keys, query i is at S - n + i.

    Args:
        q: [T, heads, head_dim], the new tokens of all sequences behind one another.
        keys, values: one layer's [slots, kv_heads, head_dim]. Slot s of page p is p · page_size + s.
        page_table: [B, P] int64, each sequence's pages in order; what lies beyond them is not read.
        kv_lens: [B] int64, keys of each sequence, those of the new tokens included.
        query_starts: [B + 1] int64, where each sequence's queries start in q, and T.
        scale: what q·k is multiplied by, normally head_dim ** -0.5.
        window: a token sees this many tokens, itself included (Mistral's sliding window); 0 is all before it.

    Returns:
        [T, heads, head_dim] in the dtype of q; sums are in fp32, or in fp64 for fp64 inputs.
    """
    out = torch.empty_like(q)
    starts, group = query_starts.tolist(), q.shape[1] // keys.shape[1]
    for b, length in enumerate(kv_lens.tolist()):
        rows, places = slice(starts[b], starts[b + 1]), torch.arange(length, device=q.device)
        slots = page_table[b, places // page_size] * page_size + places % page_size
        asks = places[length - (starts[b + 1] - starts[b]) :, None]  # the queries' own places
        seen = (places <= asks) & (places > asks - (window or length))
        grouped = q[rows].view(len(asks), -1, group, q.shape[2])  # [n, kv_heads, group, head_dim]
        scores = torch.einsum("nkgd,skd->kgns", grouped, keys[slots])
        scores = scores.to(torch.promote_types(q.dtype, torch.float32)) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1).to(q.dtype)
        out[rows] = torch.einsum("kgns,skd->nkgd", weights, values[slots]).flatten(1, 2)
    return out


def decode_rows(
    order: torch.Tensor,
    page_tables: torch.Tensor,
    page_size: int,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    seeds: torch.Tensor,
    temperatures: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The inputs of a decode step from what the device keeps of each of R rows, in the order of the batch.

    Args:
        order: [B] int64, the row at each place of the batch.
        page_tables: [R, P] int64.
        tokens, lengths, seeds: [R] int64, the next token, the number of tokens before it, and where noise starts.
        temperatures: [R] fp64.

    Returns:
        By place: token ids, positions, slots and lengths with this token, int64 [B] each; page tables [B, P]; seeds
        [B]; temperatures [B] fp32.
    """
    positions, tables = lengths[order], page_tables.index_select(0, order)  # of whole rows: faster on a CPU
    pages = tables.gather(1, (positions // page_size).unsqueeze(1)).squeeze(1)
    slots = pages * page_size + positions % page_size
    return tokens[order], positions, slots, positions + 1, tables, seeds[order], temperatures[order].float()


def keep_tokens(
    chosen: torch.Tensor, rows: torch.Tensor, kv_lens: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Write what a step chose, and the lengths that it led to, to the rows: the inverse of decode_rows.

    Args:
        chosen: [B] int64; -1, for NaN, is kept as 0, which has an embedding.
        rows: [B] int64. The last row stands for nobody: it may come several times, and stays at length 0.
        kv_lens: [B] int64.
        tokens, lengths: [R] int64, written.
    """
    tokens.index_copy_(0, rows, chosen.clamp(min=0))
    lengths.index_copy_(0, rows, kv_lens * (rows < len(tokens) - 1))


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The gate of a SwiGLU MLP (Shazeer, 2020): silu(gate) · up, for gate_up [..., 2 · width] → [..., width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def linear_silu_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """silu_and_mul of a product: x [T, hidden], weight [2 · width, hidden] with the gate's rows first → [T, width]."""
    return silu_and_mul(linear(x, weight, bias))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose a token for each row of logits, from that row's logits and parameters alone.

    The largest of logit / temperature + Gumbel noise is a draw from the softmax (Gumbel, 1954). The largest noise of
    many is Gumbel noise on the logarithm of their sum, so the draw has two levels: first a block of SAMPLE_BLOCK
    tokens, by the log-sum-exp of each, then a token of this block. That takes one number a block and one for each
    token of one block, in place of one for each token of the vocabulary.

    Args:
        logits: [B, vocab].
        temperature: [B] fp32; 0 takes the largest logit. Ties go to the smaller id, here and in the filters.
        seeds, positions: [B] int64, where a row's noise is counted from.
        top_k: [B] int64, keep the k largest logits; 0 keeps all. The three filters are given together or not at all.
        top_p: [B] fp32, then keep the fewest tokens with at least this share of the kept mass; 1 keeps all.
        min_p: [B] fp32, then drop tokens less probable than this fraction of the most probable one; 0 drops none.

    Returns:
        ids [B] int64; -1 where a row holds NaN or +inf, or -inf only.
    """
    greedy = temperature == 0
    looking = logits.device.type == "cpu" and not is_capturing()  # anywhere else a look would be a wait
    if looking and not greedy.any():
        best = logits.amax(dim=-1)
        ids = _draw(logits.float(), best, temperature, seeds, positions, top_k, top_p, min_p)
    else:
        best, ids = logits.max(dim=-1)
        if not looking or not greedy.all():
            some = temperature.masked_fill(greedy, 1)
            drawn = _draw(logits.float(), best, some, seeds, positions, top_k, top_p, min_p)
            ids = torch.where(greedy, ids, drawn)
    return ids.masked_fill(~best.isfinite(), -1)  # NaN is the largest where it is present


def _draw(
    logits: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    """`sample` for temperatures above 0; best [B] is each row's largest logit."""
    vocab = logits.shape[-1]
    scale = _LOG2_E / temperature.clamp(min=1e-30).unsqueeze(1)  # powers of two, which cost less than those of e
    weights = logits.sub(best.unsqueeze(1)).mul_(scale).exp2_()  # [B, vocab], relative to the most probable
    if top_k is not None and top_p is not None and min_p is not None:
        weights.masked_fill_(_filtered_out(logits, scale, top_k, top_p, min_p), 0)
    width = min(SAMPLE_BLOCK, vocab)
    if short := -vocab % width:
        weights = F.pad(weights, (0, short))
    blocks = weights.reshape(len(weights), -1, width)
    numbers = torch.arange(blocks.shape[1], device=logits.device).unsqueeze(0)  # [1, blocks]
    noisy = blocks.sum(dim=-1).log2() + gumbel_noise(seeds, positions, -1 - numbers)  # [B, blocks]
    block = noisy.argmax(dim=-1, keepdim=True)  # [B, 1]
    tokens = block * width + torch.arange(width, device=logits.device)  # [B, width]
    noisy = weights.gather(1, tokens).log2() + gumbel_noise(seeds, positions, tokens)
    return tokens.gather(1, noisy.argmax(dim=-1, keepdim=True)).squeeze(1)


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Gumbel noise, in powers of two, for each of counters int64 [B or 1, n] in the stream of seeds and positions [B].

    Counted and not drawn (SplitMix64, Steele et al., 2014): a function of three integers, the same on every device.
    Tokens count from 0 up and blocks from -1 down.
    """
    streams = _mix_bits(seeds + positions * _GOLDEN)  # [B]
    bits = _mix_bits(streams.unsqueeze(1) + counters * _GOLDEN)
    uniform = (((bits >> 41) & 0x7FFFFF).float() + 0.5) * 2**-23  # 23 bits and a half: neither 0 nor 1 in fp32
    return -torch.log2(-torch.log2(uniform))  # less a constant that changes no comparison


def _mix_bits(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser: int64 → int64, every bit of the result depends on every bit of x."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9; masks: shifts copy the sign
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB
    return x ^ (x >> 31 & (1 << 33) - 1)


def _filtered_out(
    logits: torch.Tensor, scale: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Which tokens of logits [B, vocab] the filters drop; see `sample`. scale [B, 1] is log2(e) / temperature."""
    vocab = logits.shape[-1]
    ranked, ids = logits.sort(dim=-1, descending=True, stable=True)
    weights = ranked.sub(ranked[:, :1]).mul_(scale).exp2_()
    dropped = torch.arange(vocab, device=logits.device) >= torch.where(top_k > 0, top_k, vocab).unsqueeze(1)
    weights.masked_fill_(dropped, 0)
    mass = weights.cumsum(dim=-1)
    nucleus = torch.where(top_p < 1, top_p, 2).unsqueeze(1)  # 2: rounding must not cut what nobody asked to cut
    dropped |= mass - weights >= nucleus * mass[:, -1:]  # the token that crosses top_p stays
    dropped |= ranked < ranked[:, :1] + min_p.log2().unsqueeze(1) / scale
    return torch.empty_like(dropped).scatter_(1, ids, dropped)
