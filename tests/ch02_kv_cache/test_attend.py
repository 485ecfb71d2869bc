"""Task 02.2: `attend_cached` gives each of the last T tokens the view it would have had in the full triangle."""

from __future__ import annotations

import minisgl_kernels as ops
import pytest
import torch

from minisgl.kvcache.contiguous import attend_cached

ATOL = {
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}  # a few units in the last place of values near 1


def random_qkv(
    new: int, total: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(new, heads, head_dim, generator=generator).to(dtype)
    keys, values = torch.randn(2, total, kv_heads, head_dim, generator=generator).to(dtype)
    return q, keys, values


def by_definition(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """One token and one head at a time, in float64, over a slice in place of a mask."""
    q, keys, values = q.double(), keys.double(), values.double()
    new, heads, _ = q.shape
    total, kv_heads, _ = keys.shape
    out = torch.empty_like(q)
    for t in range(new):
        visible = total - new + t + 1  # itself and all before it
        for h in range(heads):
            kv_head = h // (heads // kv_heads)
            weights = (keys[:visible, kv_head] @ q[t, h] * scale).softmax(dim=0)
            out[t, h] = weights @ values[:visible, kv_head]
    return out


def check(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> None:
    actual = attend_cached(q, keys, values, scale)
    assert actual.shape == q.shape
    assert actual.dtype == q.dtype
    expected = by_definition(q, keys, values, scale)
    error = (actual.double() - expected).abs().flatten(1).amax(dim=1)  # per token
    for t, e in enumerate(error.tolist()):
        position = len(keys) - len(q) + t
        assert e <= ATOL[q.dtype], (
            f"new token {t} of {len(q)} stands at position {position} of {len(keys)}: it sees K and V 0 … {position} "
            f"and no others, but its output is off by {e:.2g}"
        )


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (5, 1), (9, 3)])
@pytest.mark.parametrize(("new", "total"), [(1, 1), (1, 2), (1, 23), (2, 2), (7, 7), (2, 3), (5, 23), (22, 23)])
def test_each_new_token_sees_itself_and_everything_before_it(new, total, heads, kv_heads):
    check(*random_qkv(new, total, heads, kv_heads, head_dim=8), scale=8**-0.5)


@pytest.mark.parametrize("head_dim", [4, 64, 80])
def test_any_head_size_works(head_dim):
    check(*random_qkv(3, 11, 4, 2, head_dim), scale=head_dim**-0.5)


@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_the_scale_is_the_callers(scale):
    check(*random_qkv(3, 11, 4, 2, head_dim=8), scale=scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("new", "total"), [(1, 40), (9, 40)])
def test_16_bits_in_16_bits_out(new, total, dtype):
    check(*random_qkv(new, total, 6, 2, head_dim=16, dtype=dtype), scale=16**-0.5)


def test_the_whole_sequence_at_once_is_the_causal_attention_of_chapter_1():
    q, keys, values = random_qkv(13, 13, 6, 2, head_dim=8)
    torch.testing.assert_close(attend_cached(q, keys, values, 0.3), ops.causal_attention(q, keys, values, 0.3))


def test_the_future_is_not_weighed_down_but_left_out():
    q, keys, values = random_qkv(4, 10, 4, 2, head_dim=8)
    changed_keys, changed_values = keys.clone(), values.clone()
    changed_keys[-1] = 1e4
    changed_values[-1] = 1e4

    before = attend_cached(q, keys, values, 0.3)
    after = attend_cached(q, changed_keys, changed_values, 0.3)

    assert torch.equal(before[:-1], after[:-1]), "tokens before the last changed when the last token's K and V did"
    assert not torch.equal(before[-1], after[-1]), "the last token does not see itself"


def test_large_scores_do_not_overflow():
    q, keys, values = random_qkv(2, 9, 4, 2, head_dim=8)
    out = attend_cached(q * 1e3, keys * 1e3, values, 1.0)
    assert out.isfinite().all(), "scores of a million are legal: softmax subtracts the largest first"


def test_no_input_is_changed():
    inputs = random_qkv(3, 9, 4, 2, head_dim=8)
    copies = [x.clone() for x in inputs]
    attend_cached(*inputs, 0.3)
    for name, x, copy in zip(["q", "keys", "values"], inputs, copies, strict=True):
        assert torch.equal(x, copy), f"{name} was changed in place"
