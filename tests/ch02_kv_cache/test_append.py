"""Task 02.1: `ContiguousCache.append` stores new K and V behind the old and hands back all of them."""

from __future__ import annotations

import pytest
import torch

from minisgl.kvcache.contiguous import CacheFull, ContiguousCache

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 4


def new_cache(capacity: int, dtype: torch.dtype = torch.float32) -> ContiguousCache:
    """A cache whose unused slots hold NaN, so that reading one shows."""
    cache = ContiguousCache(LAYERS, KV_HEADS, HEAD_DIM, capacity, dtype, torch.device("cpu"))
    cache.kv.fill_(float("nan"))
    return cache


def random_kv(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, tokens, KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
    return k, v


def test_a_prefill_comes_back_as_it_was_stored():
    cache = new_cache(capacity=8)
    k, v = random_kv(5)

    keys, values = cache.append(0, k, v)

    assert keys.shape == (5, KV_HEADS, HEAD_DIM), f"5 tokens were stored, append returned K of shape {list(keys.shape)}"
    assert torch.equal(keys, k), "the first result is not the K that was stored"
    assert torch.equal(values, v), "the second result is not the V that was stored"


@pytest.mark.parametrize("chunks", [[5, 1], [5, 1, 1, 1], [1, 1, 1], [3, 4], [2, 1, 5]])
def test_new_tokens_stand_behind_all_earlier_ones(chunks):
    cache = new_cache(capacity=sum(chunks) + 2)
    k, v = random_kv(sum(chunks))

    end = 0
    for size in chunks:
        start, end = end, end + size
        keys, values = cache.append(0, k[start:end], v[start:end])
        assert len(keys) == len(values) == end, (
            f"after chunks {chunks} up to token {end}, append returned {len(keys)} K and {len(values)} V: "
            f"it must return all {end}, the old and the new"
        )
        assert torch.equal(keys, k[:end]), f"K of tokens 0 … {end - 1} changed or lost their order"
        assert torch.equal(values, v[:end]), f"V of tokens 0 … {end - 1} changed or lost their order"


def test_each_layer_has_its_own_region_and_its_own_length():
    cache = new_cache(capacity=6)
    stored = [random_kv(6, seed=layer) for layer in range(LAYERS)]

    for start, end in [(0, 4), (4, 5), (5, 6)]:
        for layer, (k, v) in enumerate(stored):  # as in a step: one layer after another
            keys, values = cache.append(layer, k[start:end], v[start:end])
            assert torch.equal(keys, k[:end]), f"layer {layer}: K of tokens 0 … {end - 1} are not those it was given"
            assert torch.equal(values, v[:end]), f"layer {layer}: V of tokens 0 … {end - 1} are not those it was given"
    assert cache.lengths == [6] * LAYERS


def test_k_lies_in_half_0_and_v_in_half_1_of_every_layer():
    cache = new_cache(capacity=3)
    for layer in range(LAYERS):
        k, v = random_kv(3, seed=layer)
        cache.append(layer, k, v)
        assert torch.equal(cache.kv[layer, 0], k), f"kv[{layer}, 0] does not hold the K of layer {layer}"
        assert torch.equal(cache.kv[layer, 1], v), f"kv[{layer}, 1] does not hold the V of layer {layer}"


@pytest.mark.parametrize("chunks", [[4], [3, 1], [1, 1, 1, 1]])
def test_the_last_slot_may_be_used(chunks):
    cache = new_cache(capacity=4)
    for size in chunks:
        keys, _ = cache.append(0, *random_kv(size))
    assert len(keys) == 4


@pytest.mark.parametrize(("stored", "more"), [(0, 5), (3, 2), (4, 1)])
def test_one_token_too_many_is_refused_and_the_message_names_the_capacity(stored, more):
    cache = new_cache(capacity=4)
    cache.append(0, *random_kv(stored))

    with pytest.raises(CacheFull) as refusal:
        cache.append(0, *random_kv(more))
    assert "4" in str(refusal.value), f"CacheFull({str(refusal.value)!r}) does not name the capacity, which is 4"


def test_a_refused_append_changes_nothing():
    cache = new_cache(capacity=4)
    k, v = random_kv(3)
    cache.append(0, k, v)
    before = cache.kv.clone()

    with pytest.raises(CacheFull):
        cache.append(0, *random_kv(2, seed=1))

    assert cache.lengths[0] == 3, "the call was refused, yet the length changed: check before you store"
    assert torch.equal(cache.kv.nan_to_num(), before.nan_to_num()), "the call was refused, yet something was stored"
    last_k, last_v = random_kv(1, seed=2)
    keys, values = cache.append(0, last_k, last_v)
    assert torch.equal(keys, torch.cat([k, last_k]))
    assert torch.equal(values, torch.cat([v, last_v]))


def test_nothing_is_copied_on_the_way_out():
    cache = new_cache(capacity=8)
    keys, values = cache.append(1, *random_kv(5))
    assert keys.data_ptr() == cache.kv[1, 0].data_ptr(), "return a view of the region: a copy would move it every step"
    assert values.data_ptr() == cache.kv[1, 1].data_ptr(), "return a view of the region"


def test_the_caller_keeps_its_tensors():
    cache = new_cache(capacity=8)
    k, v = random_kv(2)
    keys, _ = cache.append(0, k, v)
    k.zero_()
    assert keys.abs().sum() > 0, "the cache must own what it stores, not point at the caller's k"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_values_are_stored_bit_for_bit(dtype):
    cache = new_cache(capacity=4, dtype=dtype)
    k, v = random_kv(4, dtype=dtype)
    keys, values = cache.append(2, k, v)
    assert keys.dtype == values.dtype == dtype
    assert torch.equal(keys, k)
    assert torch.equal(values, v)
