"""Task 07.4: `sample_blocks_kernel`, level 1 of the draw: each block's largest logit, and its noisy log-sum-exp."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from minisgl_kernels import reference
from minisgl_kernels.triton import sampling

from tests.ch07_fused_ops.scene import DEVICE, check, compiles, interpreted, random
from tests.tolerances import SAMPLE_SCORES

INF = float("inf")
BLOCK = 64  # the engine's has reference.SAMPLE_BLOCK tokens; the kernel takes any power of two
# numpy, which interprets, warns where the GPU's arithmetic is meant: integers that wrap, the logarithm of 0
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def level_1(logits, temperatures, seeds=None, positions=None, cut=None):
    """(largest, score), [B, blocks] each, of logits [B, vocab]. Without seeds, rows have different ones."""
    rows, vocab = logits.shape
    blocks = -(-vocab // BLOCK)
    temperatures = torch.tensor(temperatures, dtype=torch.float32, device=DEVICE)
    seeds = torch.tensor(seeds or [2**62 + 7 * row for row in range(rows)], device=DEVICE)
    positions = torch.tensor(positions or [row + 3 for row in range(rows)], device=DEVICE)
    largest, score = torch.full((2, rows, blocks), torch.nan, device=DEVICE)
    cuts = cut or (None, None)
    sampling.sample_blocks_kernel[(blocks, rows)](
        logits, temperatures, seeds, positions, *cuts, largest, score, vocab, vocab, BLOCK, cut is not None, num_warps=1
    )
    return largest, score, reference.gumbel_noise(seeds, positions, -1 - torch.arange(blocks, device=DEVICE)[None])


def in_blocks(logits):
    """[B, vocab] → [B, blocks, BLOCK] in fp64, -inf behind the vocabulary."""
    return torch.nn.functional.pad(logits.double(), (0, -logits.shape[1] % BLOCK), value=-INF).unflatten(1, (-1, BLOCK))


def test_the_block_of_the_page():
    logits = torch.tensor([[0.0, math.log(3.0)]], device=DEVICE)

    largest, score, noise = level_1(logits, [1.0])

    assert largest.item() == logits[0, 1].item(), "the largest logit of the block, as it is"
    expected = math.log2(4 / 3) + noise.double()
    hint = "log₂(e⁰ + e^(-ln 3)) = log₂(4/3), and the block's own noise (counter -1 - block, in powers of two)"
    check(SAMPLE_SCORES, score, expected, hint)


@pytest.mark.parametrize("vocab", [BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_score_is_the_log_sum_exp_of_a_block_and_its_noise(vocab, dtype):
    logits, temperatures = random(4, vocab, dtype=dtype), [1.0, 0.5, 1.7, 0.6]

    largest, score, noise = level_1(logits, temperatures)

    x = in_blocks(logits)
    relative = (x - x.amax(dim=-1, keepdim=True)) / torch.tensor(temperatures, device=DEVICE).view(-1, 1, 1)
    assert torch.equal(largest.double(), x.amax(dim=-1)), "largest is the maximum of the block, without temperature"
    expected = relative.logsumexp(dim=-1) / math.log(2) + noise.double()
    hint = "log₂ Σ exp((x - largest) / temperature), then noise: the temperature divides logits, never noise"
    check(SAMPLE_SCORES, score, expected, hint)


@pytest.mark.parametrize("same", [{"seeds": [5, 5]}, {"positions": [5, 5]}], ids=["other position", "other seed"])
def test_rows_that_differ_in_seed_or_position_get_other_noise(same):
    _, score, noise = level_1(torch.zeros(2, 2 * BLOCK, device=DEVICE), [1.0, 1.0], **same)

    assert (score[0] != score[1]).all(), "two rows of equal logits got the same noise: read the row's seed and position"
    check(SAMPLE_SCORES, score - math.log2(BLOCK), noise, "noise is counted by seed, position and block")


def test_each_block_has_noise_of_its_own_which_no_token_has():
    _, score, _ = level_1(torch.zeros(1, 4 * BLOCK, device=DEVICE), [1.0], [9], [1])

    noise = score[0] - math.log2(BLOCK)
    assert len(set(noise.tolist())) == 4, "blocks share their noise: the counter must depend on the block"
    seeds, positions = torch.tensor([9], device=DEVICE), torch.tensor([1], device=DEVICE)
    of_tokens = reference.gumbel_noise(seeds, positions, torch.arange(4, device=DEVICE)[None])[0]
    assert (noise - of_tokens).abs().min() > 1e-3, "tokens count from 0 up, blocks from -1 down: -1 - block"


def test_a_greedy_row_has_no_noise_and_its_largest_logits_decide():
    logits = random(2, 2 * BLOCK)

    largest, score, _ = level_1(logits, [0.0, 1.0])

    assert score[0].tolist() == [0.0, 0.0], "at temperature 0 the largest logits are compared: every score is 0"
    assert torch.equal(largest[0].double(), in_blocks(logits)[0].amax(dim=-1))


def test_a_block_without_a_possible_token_scores_minus_infinity():
    logits = random(2, 3 * BLOCK)
    logits[:, BLOCK : 2 * BLOCK] = -INF

    largest, score, _ = level_1(logits, [1.0, 0.0])

    assert (score[:, 1] == -INF).all(), "a block of -inf must not be drawn: its score is -inf, not NaN"
    assert largest.isfinite().all(), "largest stays finite (at least _LOWEST), so that -inf - largest is -inf"


def test_a_nan_is_seen():
    logits = random(1, 2 * BLOCK)
    logits[0, 70] = torch.nan

    _, score, _ = level_1(logits, [0.7])

    assert score.isnan().tolist() == [[False, True]], "a block with NaN has a NaN score, from which level 2 makes id -1"


def test_what_a_filter_dropped_counts_nothing():
    logits = random(1, BLOCK)
    cut = logits[0].sort().values[-3]  # three tokens stay
    ends = cut.view(1), torch.tensor([BLOCK], dtype=torch.int32, device=DEVICE)

    _, score, noise = level_1(logits, [1.0], cut=ends)

    kept = logits[0][logits[0] >= cut].double()
    expected = (kept - kept.max()).logsumexp(0) / math.log(2) + noise.double()
    check(SAMPLE_SCORES, score, expected, "logits come from load_kept, which knows the filters")


def test_with_level_2_the_ids_are_those_of_the_definition(dtype):
    rows, vocab = 4, reference.SAMPLE_BLOCK + 70
    logits = 2 * random(rows, vocab, dtype=dtype)
    given = torch.tensor([1.0, 0.0, 0.7, 1.5], device=DEVICE), torch.arange(rows, device=DEVICE) + 2**40
    given = *given, torch.arange(rows, device=DEVICE)

    assert sampling.sample(logits, *given).tolist() == reference.sample(logits, *given).tolist()


@interpreted
def test_each_logit_is_read_once():
    from minisgl_kernels.triton.score import count_bytes

    logits = random(2, 3 * BLOCK + 5)
    with count_bytes() as moved:
        level_1(logits, [1.0, 0.5])

    parameters = 8 * (4 + 8 + 8)  # temperature, seed and position, in each of 8 programs
    assert moved.read <= logits.nbytes + parameters, f"{moved.read} bytes read, of {logits.nbytes} in the logits"


@pytest.mark.slow
def test_it_compiles_for_a_t4_and_an_h100():
    compiles("sample_blocks_kernel[fp16 fp32 i64 VOCAB=151936 BLOCK=2048 FILTERED=False", "sm_75", "sm_90")
