"""Every op of the decoder that is more than a matrix product, in plain torch.

These are the definitions. Faster implementations are compared with them, and a CPU runs them as they are.
Rows are tokens: only `attend` knows of sequences, and nothing here of caches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

linear = F.linear

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


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head of x [T, heads, head_dim] by its token's angles: cos, sin [T, head_dim / 2] (Su et al., 2021).

    Half-split layout, as Hugging Face stores Llama and Qwen: element i is paired with element i + head_dim / 2.
    """
    first, second = x.chunk(2, dim=-1)  # [T, heads, head_dim / 2] each
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, head_dim / 2], the same for every head
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


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


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The gate of a SwiGLU MLP (Shazeer, 2020): silu(gate) · up, for gate_up [..., 2 · width] → [..., width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def sample(
    probs: torch.Tensor,
    uniform: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw from each row of probs [B, vocab] by inverting its cumulative distribution at uniform [B] in (0, 1].

    One number a row is enough, so that it can come from a counter; `torch.multinomial` would take one a token. The
    filters, if given, all are: top_k [B] (0 keeps all), top_p [B], min_p [B], applied in this order. Ties are broken
    towards the smaller id.

    Returns:
        ids [B] int64.
    """
    vocab = probs.shape[-1]
    if top_k is not None and top_p is not None and min_p is not None:
        ranked, ids = probs.sort(dim=-1, descending=True, stable=True)
        kept = torch.where(top_k > 0, top_k, vocab).unsqueeze(1)
        ranked[torch.arange(vocab, device=probs.device) >= kept] = 0
        nucleus = torch.where(top_p < 1, top_p, 2).unsqueeze(1)  # 2: rounding must not cut what nobody asked to cut
        mass_before = ranked.cumsum(dim=-1) - ranked
        ranked[mass_before >= nucleus * ranked.sum(dim=-1, keepdim=True)] = 0  # the token that crosses top_p stays
        ranked[ranked < min_p.unsqueeze(1) * ranked[:, :1]] = 0
        # Back in the order of ids, with unfiltered rows as they were: no row depends on whether its neighbours filter.
        probs = torch.empty_like(probs).scatter_(1, ids, ranked)
    cumulative = probs.cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, uniform.unsqueeze(1) * cumulative[:, -1:])
    return drawn.clamp(max=vocab - 1).squeeze(1)
