"""01.3 causal_attention."""

from __future__ import annotations

import math
from typing import Any

import minisgl_kernels.reference as ops
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

SHAPES = [  # tokens, heads, kv_heads, head_dim
    (1, 3, 1, 4),
    (7, 9, 3, 8),
    (5, 4, 4, 6),  # a KV head for each query head
    (6, 5, 1, 10),  # one KV head for all
    (33, 6, 2, 16),
]


def random_qkv(tokens: int, heads: int, kv_heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(tokens, n, head_dim) for n in (heads, kv_heads, kv_heads))


def by_loops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One query head of one token at a time, in double precision."""
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for t in range(len(q)):
        for h in range(q.shape[1]):
            exps = [math.exp(scale * float(q[t, h] @ k[s, h // group])) for s in range(t + 1)]
            for s, e in enumerate(exps):
                out[t, h] += e / sum(exps) * v[s, h // group]
    return out


def test_the_worked_example_of_the_page():
    q = torch.tensor([[[0.0, 0.0]], [[math.log(3), 0.0]]])  # two tokens, one head
    k = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    v = torch.tensor([[[8.0, 0.0]], [[0.0, 4.0]]])

    out = ops.causal_attention(q, k, v, scale=1.0)

    torch.testing.assert_close(
        out,
        torch.tensor([[[8.0, 0.0]], [[6.0, 1.0]]]),
        msg=f"token 0 gives (8, 0) and token 1 gives ¾ · (8, 0) + ¼ · (0, 4) = (6, 1): got {out.tolist()}",
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_token_mixes_the_values_up_to_its_own_by_softmax_of_its_scores(shape: tuple[int, int, int, int]):
    q, k, v = random_qkv(*shape)

    expected = by_loops(q, k, v, shape[3] ** -0.5)

    out = ops.causal_attention(q, k, v, shape[3] ** -0.5)

    torch.testing.assert_close(
        out.double(),
        expected,
        rtol=1e-5,
        atol=1e-5,
        msg=lambda m: f"not Σ softmax(scale · q[t] · k[s]) · v[s] over s ≤ t; an index is (token, head, element)\n{m}",
    )


def test_the_first_token_sees_only_itself():
    q, k, v = random_qkv(5, 3, 1, 8)

    out = ops.causal_attention(q, k, v, 0.3)

    torch.testing.assert_close(
        out[0], v[0].expand(3, 8), msg=lambda m: f"token 0 has nothing but itself: its output is its own value\n{m}"
    )


@pytest.mark.parametrize("changed", range(1, 7))
def test_a_token_knows_nothing_of_those_behind_it(changed: int):
    q, k, v = random_qkv(7, 3, 1, 4)
    before = ops.causal_attention(q, k, v, 0.5)
    k[changed], v[changed] = 3.0, -100.0

    after = ops.causal_attention(q, k, v, 0.5)

    torch.testing.assert_close(
        after[:changed], before[:changed], msg=f"tokens 0 … {changed - 1} changed when only token {changed} did"
    )
    assert (after[changed:] != before[changed:]).any(dim=-1).all(), f"token {changed} and later ones must see it"


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 2), (6, 6), (4, 1)])
def test_neighbouring_query_heads_share_a_kv_head(heads: int, kv_heads: int):
    q, k, _ = random_qkv(4, heads, kv_heads, 2)
    v = torch.arange(kv_heads).float().view(1, -1, 1).expand(4, kv_heads, 2)  # each value says which head it is of

    out = ops.causal_attention(q, k, v, 1.0)

    read = out[-1, :, 0].round().int().tolist()
    expected = [h // (heads // kv_heads) for h in range(heads)]
    assert read == expected, f"query heads read the values of KV heads {read}, but should read {expected}"


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4)])
def test_queries_meet_the_keys_of_the_head_whose_values_they_read(heads: int, kv_heads: int):
    q, _, v = random_qkv(9, heads, kv_heads, 8)
    k = F.one_hot(torch.arange(kv_heads), 8).float().expand(9, -1, -1) * torch.arange(9).view(-1, 1, 1)
    expected = by_loops(q, k, v, 0.2)

    out = ops.causal_attention(q, k, v, 0.2)

    torch.testing.assert_close(
        out[-1].double(),
        expected[-1],
        rtol=1e-5,
        atol=1e-5,
        msg=lambda m: f"query head h is compared with the keys of KV head h // {heads // kv_heads}\n{m}",
    )


@pytest.mark.parametrize("scale", [0.0, 0.125, 1.7])
def test_the_scores_are_multiplied_by_the_scale_that_was_given(scale: float):
    q, k, v = random_qkv(7, 1, 1, 8)  # one head, and below its last token: neither groups nor the mask matter
    expected = by_loops(q, k, v, scale)

    out = ops.causal_attention(q, k, v, scale)

    torch.testing.assert_close(
        out[-1].double(),
        expected[-1],
        rtol=1e-5,
        atol=1e-5,
        msg=lambda m: f"each score is q · k times the scale that was given, here {scale}\n{m}",
    )


def test_large_scores_do_not_overflow():
    q, k, v = random_qkv(7, 4, 2, 8)

    out = ops.causal_attention(q * 100, k * 100, v, 1.0)

    assert out[-1].isfinite().all(), "exp of a large score is infinite: softmax subtracts the largest one first"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_inputs_give_a_16_bit_result(dtype: torch.dtype):
    q, k, v = (x.to(dtype) for x in random_qkv(33, 6, 2, 16))
    expected = by_loops(q, k, v, 0.25)

    out = ops.causal_attention(q, k, v, 0.25)

    result_dtype = out.dtype
    assert result_dtype == dtype, f"inputs in {dtype} gave a result in {result_dtype}"
    torch.testing.assert_close(
        out.double(),
        expected,
        rtol=0.03,
        atol=0.03,
        msg=lambda m: f"right dtype, but not the values mixed by the softmax of the scores\n{m}",
    )


def test_q_k_and_v_may_be_slices_of_one_row_and_are_left_alone():
    torch.manual_seed(0)
    qkv = torch.randn(7, 10, 8)
    before = qkv.clone()
    q, k, v = qkv.split([6, 2, 2], dim=1)

    out = ops.causal_attention(q, k, v, 0.3)

    torch.testing.assert_close(qkv, before, msg="an input was overwritten")
    torch.testing.assert_close(
        out.double(),
        by_loops(*before.split([6, 2, 2], dim=1), 0.3),
        rtol=1e-5,
        atol=1e-5,
        msg=lambda m: f"q, k and v are slices of one row, and their values are mixed wrongly\n{m}",
    )


class CopiesOf(TorchDispatchMode):
    """Notes every operation whose result is larger than `source` and holds nothing but its numbers."""

    def __init__(self, source: torch.Tensor) -> None:
        super().__init__()
        self.source, self.found = source.clone(), list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and self.is_larger_copy(result):
            self.found.append(str(func))
        return result

    def is_larger_copy(self, result: torch.Tensor) -> bool:
        larger = result.untyped_storage().nbytes() > self.source.nbytes
        return larger and result.dtype == self.source.dtype and bool(torch.isin(result, self.source).all())


@pytest.mark.parametrize("name", ["k", "v"])
def test_k_and_v_are_not_repeated_in_memory(name: str):
    q, k, v = random_qkv(7, 9, 3, 8)

    with CopiesOf({"k": k, "v": v}[name]) as copies:
        ops.causal_attention(q, k, v, 0.3)

    assert not copies.found, f"{copies.found[0]} made a larger copy of {name}: stack the query heads of a group instead"
