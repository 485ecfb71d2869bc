"""Task 07.2: `qk_norm_rope_store_kernel` norms and rotates q and k, and brings K and V to their slots."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from minisgl_kernels import reference
from minisgl_kernels.triton.qkv import qk_norm_rope_store

from tests.ch07_fused_ops.scene import DEVICE, check, compiles, interpreted, random, rows_apart
from tests.tolerances import ROTATED

EPS = 1e-5
SIZES = [(1, 1, 1, 4), (3, 4, 2, 24), (5, 9, 3, 64), (40, 2, 1, 80)]  # tokens, heads, KV heads, head_dim


class Scene(NamedTuple):
    """The kernel's arguments, in their order. The pool holds NaN; slots come in no order."""

    qkv: torch.Tensor
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    cos: torch.Tensor
    sin: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor

    def parts(self) -> tuple[torch.Tensor, ...]:
        kv_heads = self.keys.shape[1]
        return self.qkv.split([self.qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)


def new_scene(tokens, heads, kv_heads, head_dim, dtype=torch.float32, norms=True) -> Scene:
    q_weight, k_weight = (1 + 0.3 * random(2, head_dim, seed=4)).to(dtype).unbind() if norms else (None, None)
    keys, values = torch.full((2, tokens + 7, kv_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    slots = torch.randperm(tokens + 6, generator=torch.Generator().manual_seed(5))[:tokens].to(DEVICE) + 1
    angle = 10 * random(tokens, head_dim // 2, seed=9)
    qkv = rows_apart(random(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype))
    return Scene(qkv, q_weight, k_weight, EPS, angle.cos().to(dtype), angle.sin().to(dtype), keys, values, slots)


def exact(x: torch.Tensor, weight: torch.Tensor | None, scene: Scene) -> torch.Tensor:
    x = x.double()
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPS) * weight.double()
    return reference.apply_rope(x, scene.cos.double(), scene.sin.double())


def test_the_head_of_the_page():
    qkv = torch.tensor([[[1.0, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8]]], device=DEVICE)  # one head each of q, k and v
    cos, sin = torch.tensor([[0.0, -1.0]], device=DEVICE), torch.tensor([[1.0, 0.0]], device=DEVICE)
    keys, values = torch.zeros(2, 3, 1, 4, device=DEVICE)

    q = qk_norm_rope_store(qkv, None, None, 0.0, cos, sin, keys, values, torch.tensor([2], device=DEVICE))

    assert q.tolist() == [[[-3, -2, 1, -4]]], "element i turns with element i + head_dim / 2, both from the old values"
    assert keys.tolist() == [[[0] * 4], [[0] * 4], [[-3, -2, 1, -4]]], "K is rotated and lies in slot 2"
    assert values.tolist() == [[[0] * 4], [[0] * 4], [[5, 6, 7, 8]]], "V is not rotated and lies in slot 2"


@pytest.mark.parametrize("norms", [False, True], ids=["no norms", "norms"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_q_is_normed_and_rotated(size, norms, dtype):
    scene = new_scene(*size, dtype, norms)

    q = qk_norm_rope_store(*scene)

    assert q.dtype == dtype
    check(ROTATED[dtype], q, exact(scene.parts()[0], scene.q_weight, scene), "q: its norm, then its token's angles")


@pytest.mark.parametrize("norms", [False, True], ids=["no norms", "norms"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_k_is_normed_and_rotated_and_lies_in_its_slot(size, norms, dtype):
    scene = new_scene(*size, dtype, norms)

    qk_norm_rope_store(*scene)

    stored, expected = scene.keys[scene.slots], exact(scene.parts()[1], scene.k_weight, scene)
    assert not stored.isnan().any(), "K of token t lies in slot slots[t], not at t"
    check(ROTATED[dtype], stored, expected, "K: its own weight, its token's angles")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_v_lies_in_its_slot_bit_for_bit(size, dtype):
    scene = new_scene(*size, dtype)

    qk_norm_rope_store(*scene)

    assert torch.equal(scene.values[scene.slots], scene.parts()[2]), "V passes through: no norm, no rotation"


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_no_other_slot_is_touched(size, dtype):
    scene = new_scene(*size, dtype)

    qk_norm_rope_store(*scene)

    others = torch.ones(len(scene.keys), dtype=torch.bool, device=DEVICE)
    others[scene.slots] = False
    assert scene.keys[others].isnan().all(), "a slot that was not named was written in keys"
    assert scene.values[others].isnan().all(), "a slot that was not named was written in values"


def test_the_norm_is_taken_in_fp32_over_a_whole_head(dtype):
    scene = new_scene(3, 2, 1, 32, dtype)
    scene.qkv.mul_(300)  # squares reach 10⁶, and fp16 ends at 65,504

    q = qk_norm_rope_store(*scene)

    check(ROTATED[dtype], q, exact(scene.parts()[0], scene.q_weight, scene), "both halves' squares, summed in fp32")


def test_the_inputs_stay_as_they_are(dtype):
    scene = new_scene(4, 4, 2, 16, dtype)
    given = (scene.qkv, scene.cos, scene.sin, scene.slots)
    before = [tensor.clone() for tensor in given]

    qk_norm_rope_store(*scene)

    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, before, strict=True))


@interpreted
def test_qkv_is_read_once_and_each_result_written_once():
    from minisgl_kernels.triton.score import count_bytes

    scene = new_scene(4, 4, 2, 64)
    with count_bytes() as moved:
        q = qk_norm_rope_store(*scene)

    inputs = sum(t.nbytes for t in (*scene.parts(), scene.cos, scene.sin, scene.slots, scene.q_weight, scene.k_weight))
    assert moved.read_distinct == inputs, "no more and no less than the arguments is read"
    assert moved.read <= 1.15 * inputs, (  # weights, and angles of a token whose heads two programs share, come again
        f"{moved.read:,} bytes read, {inputs:,} are needed: load each row of qkv once; angles and weights are few"
    )
    results = q.nbytes + 2 * scene.values[scene.slots].nbytes
    assert moved.written == results, f"{moved.written:,} bytes written of {results:,}: store q, K and V, each once"


@pytest.mark.slow
def test_it_compiles_for_an_h100():
    compiles("qk_norm_rope_store_kernel[fp16 i64 HEADS=16", "sm_90")
