"""Task 02.4: what one token's K and V weigh."""

from __future__ import annotations

import pytest
import torch

from minisgl.kvcache.contiguous import ContiguousCache, kv_bytes_per_token


@pytest.mark.parametrize(
    ("name", "layers", "kv_heads", "head_dim", "dtype", "expected"),
    [
        ("SmolLM2-135M in bf16", 30, 3, 64, torch.bfloat16, 23_040),
        ("SmolLM2-135M in fp32", 30, 3, 64, torch.float32, 46_080),
        ("Qwen3-0.6B in bf16", 28, 8, 128, torch.bfloat16, 114_688),
        ("one number in 8 bits", 1, 1, 1, torch.float8_e4m3fn, 2),
    ],
)
def test_bytes_of_known_models(name, layers, kv_heads, head_dim, dtype, expected):
    actual = kv_bytes_per_token(layers, kv_heads, head_dim, dtype)
    assert actual == expected, (
        f"{name}: {expected:,} bytes a token, not {actual:,}: K and V, all layers, KV heads, bytes"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_formula_is_what_a_cache_takes(dtype):
    cache = ContiguousCache(5, 3, 8, 11, dtype, torch.device("cpu"))
    formula, region = kv_bytes_per_token(5, 3, 8, dtype) * 11, cache.kv.nbytes
    assert formula == region, f"11 tokens in {dtype}: {formula:,} bytes by the formula, {region:,} in the region"
