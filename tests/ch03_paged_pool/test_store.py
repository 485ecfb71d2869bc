"""Task 03.4: `MHAPool.store` writes K and V of new tokens into their slots and nowhere else."""

from __future__ import annotations

import pytest
import torch

from minisgl.kvcache.mha_pool import MHAPool

LAYERS, PAGES, KV_HEADS, HEAD_DIM = 3, 6, 2, 4


def new_pool(page_size: int, dtype: torch.dtype = torch.float32) -> MHAPool:
    pool = MHAPool(LAYERS, PAGES, page_size, KV_HEADS, HEAD_DIM, dtype, torch.device("cpu"))
    pool.kv.fill_(float("nan"))
    return pool


def random_kv(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, tokens, KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
    return k, v


def shuffled_slots(pool: MHAPool, tokens: int) -> list[int]:
    """Slots of tokens that lie in pages 5, 1, 4, …, none of them the dummy page."""
    return [page * pool.page_size + offset for page in (5, 1, 4, 2, 3) for offset in range(pool.page_size)][:tokens]


@pytest.mark.parametrize(("page_size", "tokens"), [(1, 5), (3, 1), (3, 7), (16, 40)])
def test_each_token_lies_in_its_page_at_its_place(page_size, tokens):
    pool, (k, v) = new_pool(page_size), random_kv(tokens)
    slots = shuffled_slots(pool, tokens)

    pool.store(1, k, v, torch.tensor(slots))

    for t, slot in enumerate(slots):
        page, offset = divmod(slot, page_size)
        for half, name, new in [(0, "K", k), (1, "V", v)]:
            assert torch.equal(pool.kv[1, half, page, offset], new[t]), (
                f"slot {slot} is place {offset} of page {page}: kv[1, {half}, {page}, {offset}] must hold the {name} "
                f"of token {t}"
            )


def test_no_other_slot_is_touched():
    pool, (k, v) = new_pool(page_size=3), random_kv(4)
    slots = shuffled_slots(pool, 4)
    pool.store(2, k, v, torch.tensor(slots))
    written = {divmod(slot, 3) for slot in slots}
    for page in range(PAGES):
        for offset in range(3):
            if (page, offset) not in written:
                assert pool.kv[2, :, page, offset].isnan().all(), f"place {offset} of page {page} was not given"
    assert pool.kv[:2].isnan().all(), "layers 0 and 1 were not given"


def test_layers_are_apart():
    pool = new_pool(page_size=2)
    slots = torch.tensor([9, 2, 3])
    stored = [random_kv(3, seed=layer) for layer in range(LAYERS)]
    for layer, (k, v) in enumerate(stored):
        pool.store(layer, k, v, slots)
    for layer, (k, v) in enumerate(stored):
        keys, values = pool.layer(layer)
        assert torch.equal(keys[slots], k), f"the K of layer {layer} is not what was stored there"
        assert torch.equal(values[slots], v), f"the V of layer {layer} is not what was stored there"


def test_a_slot_that_is_used_again_holds_the_new_token_only():
    pool = new_pool(page_size=2)
    pool.kv.zero_()
    old, new = random_kv(1, seed=1), random_kv(1, seed=2)
    pool.store(0, *old, torch.tensor([5]))
    pool.store(0, *new, torch.tensor([5]))
    keys, values = pool.layer(0)
    assert torch.equal(keys[5], new[0][0])
    assert torch.equal(values[5], new[1][0])


def test_the_pool_is_written_in_place_and_owns_what_it_holds():
    pool, (k, v) = new_pool(page_size=2), random_kv(2)
    address = pool.kv.data_ptr()
    pool.store(0, k, v, torch.tensor([4, 3]))
    k.zero_()
    v.zero_()
    assert pool.kv.data_ptr() == address, "write into the pool; a new tensor would copy all requests' K and V"
    assert pool.kv[0, 0, 2, 0].abs().sum() > 0, "the pool must own what it stores, not point at the caller's k"


def test_slices_of_a_wider_tensor_are_stored_too():
    pool = new_pool(page_size=2)
    qkv = torch.randn(3, 3 * KV_HEADS, HEAD_DIM)  # as a layer's merged projection makes them
    _, k, v = qkv.split(KV_HEADS, dim=1)
    pool.store(0, k, v, torch.tensor([6, 2, 9]))
    keys, values = pool.layer(0)
    assert torch.equal(keys[[6, 2, 9]], k)
    assert torch.equal(values[[6, 2, 9]], v)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_values_are_stored_bit_for_bit(dtype):
    pool, (k, v) = new_pool(2, dtype), random_kv(2, dtype=dtype)
    pool.store(0, k, v, torch.tensor([3, 8]))
    assert torch.equal(pool.layer(0)[0][[3, 8]], k)
    assert torch.equal(pool.layer(0)[1][[3, 8]], v)
