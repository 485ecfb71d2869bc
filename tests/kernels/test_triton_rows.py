"""The ends of a decode step: from the rows to a step's inputs, and its tokens back to the rows."""

from __future__ import annotations

import pytest
import torch
from minisgl_kernels import reference

pytest.importorskip("triton", reason="Triton is not installed")
from minisgl_kernels import triton as ops

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rows(max_rows, width, page_size, seed=0):
    """Random rows, the last one nobody's, as parts of one tensor, so that they begin anywhere."""
    r = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, width * page_size, (max_rows + 1,), generator=r)
    lengths[-1] = 0
    tables = torch.randint(1, 10**6, (max_rows + 1, width), generator=r)
    tables[-1] = 0
    tokens, seeds = torch.randint(0, 10**5, (2, max_rows + 1), generator=r)
    temperatures = torch.rand(max_rows + 1, generator=r, dtype=torch.float64)
    return [each.to(DEVICE) for each in (tables, tokens, lengths, seeds, temperatures)]


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("width", [1, 5, 300])
def test_a_steps_inputs_are_those_of_the_definition(size, page_size, width):
    tables, tokens, lengths, seeds, temperatures = rows(8, width, page_size)
    order = torch.tensor([5, 8, 0, 7, 8, 2, 1, 3])[:size].to(DEVICE)
    got = ops.decode_rows(order, tables, page_size, tokens, lengths, seeds, temperatures)
    expected = reference.decode_rows(order, tables, page_size, tokens, lengths, seeds, temperatures)

    for place, (mine, right) in enumerate(zip(got, expected, strict=True)):
        if place == 4:  # of the page tables only the pages in use
            for i, position in enumerate(expected[1].tolist()):
                used = position // page_size + 1
                assert torch.equal(mine[i, :used], right[i, :used])
        else:
            assert torch.equal(mine, right)
            assert mine.dtype == right.dtype


def test_tables_that_are_cut_out_of_wider_ones_are_refused():
    tables, *others = rows(4, 6, 2)
    with pytest.raises(ValueError, match="contiguous"):
        ops.decode_rows(torch.tensor([0], device=DEVICE), tables[:, :3], 2, *others)


@pytest.mark.parametrize("size", [1, 5, 130])
def test_tokens_and_lengths_go_to_their_rows_and_nobody_keeps_nothing(size):
    r = torch.Generator().manual_seed(size)
    places = torch.randperm(200, generator=r)[:size]
    places[size // 2 :: 3] = 200  # nobody
    chosen, kv_lens = torch.randint(-1, 9, (size,), generator=r), torch.randint(1, 99, (size,), generator=r)
    mine, right = ([torch.arange(201), torch.arange(201) % 7] for _ in range(2))
    for _, lengths in (mine, right):
        lengths[-1] = 0
    mine = [each.to(DEVICE) for each in mine]
    ops.keep_tokens(chosen.to(DEVICE), places.to(DEVICE), kv_lens.to(DEVICE), *mine)
    reference.keep_tokens(chosen, places, kv_lens, *right)

    for got, expected in zip(mine, right, strict=True):
        assert torch.equal(got.cpu()[:-1], expected[:-1])
    assert mine[1][-1] == right[1][-1] == 0


@pytest.mark.parametrize("pairs", [4, 40, 64])
@pytest.mark.parametrize("tokens", [1, 7, 100])
def test_angles_are_those_of_the_definition_up_to_long_contexts(tokens, pairs):
    positions = torch.randint(0, 131_072, (tokens,), generator=torch.Generator().manual_seed(pairs)).to(DEVICE)
    inv_freq = (1 / 10_000.0 ** (torch.arange(pairs) / pairs)).to(DEVICE)
    got = ops.rope_angles(positions, inv_freq, 1.3, torch.float32)
    angles = (positions.float().unsqueeze(1) * inv_freq).double()  # rounded once, as the definition has it

    for mine, right in zip(got, (angles.cos() * 1.3, angles.sin() * 1.3), strict=True):
        assert mine.shape == (tokens, pairs)
        assert (mine.double() - right).abs().max() < 1e-6
