"""Sampling in Triton against its definition in torch: in the interpreter, and in full size on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl
from minisgl_kernels import reference
from minisgl_kernels.reference import SAMPLE_BLOCK
from minisgl_kernels.triton import sampling, score, why_unavailable
from minisgl_kernels.triton.filters import filter_ends
from minisgl_kernels.triton.sampling import gumbel_noise

from tests.tolerances import SAMPLE_NOISE, SAMPLE_SCORES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INF = float("inf")
# numpy, which interprets, warns where the GPU's arithmetic is meant: integers that wrap, the logarithm of 0
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
EACH = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.0, 3, 0.5, 0.5),
    (0.7, 5, 1.0, 0.0),
    (1.5, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1e-4, 0, 1.0, 0.0),
    (2.0, 40, 0.6, 0.02),
    (50.0, 10**6, 0.999, 0.0),
]


@pytest.fixture(params=[torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def dtype(request):
    if reason := why_unavailable(DEVICE, request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def gpu():
    if DEVICE.type != "cuda":
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def poisoned():
    """What an op allocates and does not write is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def logits_of(rows, vocab, dtype=torch.float32, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator, device=DEVICE) * 3).to(dtype)


def parameters(rows, each=None, filtered=True, seeds=None, positions=None):
    """What `sample` takes besides the logits: each row its own, seeds up to the largest."""
    each = [each[i % len(each)] for i in range(rows)] if each else [EACH[i % len(EACH)] for i in range(rows)]
    temperature, top_k, top_p, min_p = zip(*each, strict=True)
    floats = torch.tensor([temperature, top_p, min_p], dtype=torch.float32, device=DEVICE)
    top_k = torch.tensor(top_k, device=DEVICE)
    if seeds is None:
        seeds = 2**63 - 1 - torch.arange(rows, device=DEVICE) * 2**55
    if positions is None:
        positions = torch.arange(rows, device=DEVICE) + 1
    return [floats[0], seeds, positions, *([top_k, floats[1], floats[2]] if filtered else [None] * 3)]


# The same ids as the definition


@pytest.mark.parametrize("vocab", [101, SAMPLE_BLOCK - 1, SAMPLE_BLOCK, SAMPLE_BLOCK + 1, 49_152])
def test_ids_are_those_of_the_definition(vocab, dtype):
    logits, given = logits_of(8, vocab, dtype), parameters(8, filtered=False)

    assert sampling.sample(logits, *given).tolist() == reference.sample(logits, *given).tolist()


@pytest.mark.parametrize("vocab", [101, 10_000])
def test_ids_of_filtered_rows_are_those_of_the_definition(vocab, dtype):
    logits, given = logits_of(8, vocab, dtype), parameters(8)

    assert sampling.sample(logits, *given).tolist() == reference.sample(logits, *given).tolist()


def test_draws_along_positions_are_those_of_the_definition():
    logits = logits_of(1, 37).expand(50, -1).contiguous()
    given = parameters(50, [(1.0, 0, 1.0, 0.0)], filtered=False, seeds=torch.full((50,), 9, device=DEVICE))

    ids = sampling.sample(logits, *given)

    assert ids.tolist() == reference.sample(logits, *given).tolist()
    assert len(ids.unique()) > 3


@triton.jit
def noise_kernel(seeds, positions, counters, out, n: tl.constexpr):
    row, each = tl.program_id(0), tl.arange(0, n)
    noise = gumbel_noise(tl.load(seeds + row), tl.load(positions + row), tl.load(counters + each))
    tl.store(out + row * n + each, noise)


def test_noise_is_that_of_the_definition():
    seeds, positions = torch.tensor([[0, 5, 2**63 - 1], [0, 1, 2**31 + 5]], device=DEVICE)
    counters = torch.arange(-1024, 1024, device=DEVICE, dtype=torch.int32)
    out = torch.full((3, 2048), torch.nan, device=DEVICE)
    noise_kernel[(3,)](seeds, positions, counters, out, 2048)

    SAMPLE_NOISE.check(out, reference.gumbel_noise(seeds, positions, counters.long().unsqueeze(0)))


def test_level_1_leaves_the_largest_logit_and_the_log_sum_exp_with_noise_of_each_block(dtype):
    vocab, temperature, blocks = 2 * SAMPLE_BLOCK + 77, 0.8, 3
    logits = (logits_of(2, vocab, dtype) / 10).to(dtype)  # flat, so that a sum of thousands counts
    given = parameters(2, [(temperature, 0, 1.0, 0.0)], filtered=False)[:3]
    largest, scores = torch.full((2, 2, blocks), torch.nan, device=DEVICE)
    sampling.sample_blocks_kernel[(blocks, 2)](
        logits, *given, None, None, largest, scores, vocab, vocab, SAMPLE_BLOCK, False, num_warps=1
    )

    x = torch.nn.functional.pad(logits.double(), (0, 3 * SAMPLE_BLOCK - vocab), value=-INF).view(2, blocks, -1)
    noise = reference.gumbel_noise(*given[1:], -1 - torch.arange(blocks, device=DEVICE).unsqueeze(0))
    relative = (x - x.amax(dim=-1, keepdim=True)) / temperature
    assert torch.equal(largest.double(), x.amax(dim=-1))
    SAMPLE_SCORES.check(scores.double(), relative.logsumexp(dim=-1) / math.log(2) + noise.double())


def test_level_1_reads_each_logit_once():
    if DEVICE.type != "cpu":
        pytest.skip("bytes are counted in the interpreter")
    logits, given = logits_of(3, 2 * SAMPLE_BLOCK + 5), parameters(3, filtered=False)
    with score.count_bytes() as count:
        sampling.sample(logits, *given)

    blocks, tokens = count.kernels["sample_blocks_kernel"], count.kernels["sample_token_kernel"]
    assert logits.nbytes <= blocks.read <= 1.01 * logits.nbytes
    assert tokens.read <= 1.05 * 3 * SAMPLE_BLOCK * 4


# Filters


def kept_by(logits, top_k, top_p, min_p, temperature):
    """Which tokens of a row the filters keep: sorted, added up one by one in float64."""
    x = logits.double().tolist()
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    weights = [math.exp((x[i] - x[order[0]]) / temperature) for i in order]
    keep = min(top_k or len(x), len(x))
    if top_p < 1:
        total, mass = sum(weights[:keep]), 0.0
        for rank in range(keep):
            if mass >= top_p * total:
                keep = rank
                break
            mass += weights[rank]
    return {i for i, weight in zip(order[:keep], weights, strict=False) if weight >= min_p}


def kept_by_kernel(logits, *filters):
    """The same from filter_ends."""
    top_k, top_p, min_p, temperature = filters
    each = parameters(1, [(temperature, top_k, top_p, min_p)])
    cut, last = filter_ends(logits.unsqueeze(0), each[0], *each[3:])
    token = torch.arange(len(logits), device=DEVICE)
    return set(((logits.float() > cut) | ((logits.float() == cut) & (token <= last))).nonzero().flatten().tolist())


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (7, 1.0, 0.0),
        (300, 1.0, 0.0),
        (10**6, 1.0, 0.0),
        (0, 1e-6, 0.0),
        (0, 0.31, 0.0),
        (0, 0.97, 0.0),
        (0, 1.0, 1e-3),
        (0, 1.0, 0.3),
        (0, 1.0, 1.0),
        (60, 0.5, 0.0),
        (4, 0.97, 0.0),
        (60, 0.97, 0.03),
    ],
)
def test_filters_keep_what_sorting_would_keep(top_k, top_p, min_p, dtype):
    logits = logits_of(1, 1000, dtype)[0]  # of many ties in 16 bits

    assert kept_by_kernel(logits, top_k, top_p, min_p, 2.0) == kept_by(logits, top_k, top_p, min_p, 2.0)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ((3, 1.0, 0.0), [1, 4, 5]),
        ((6, 1.0, 0.0), [0, 1, 2, 4, 5, 6]),  # the ties at 0 that the smaller ids have
        ((0, 0.2, 0.0), [1, 4]),  # the masses are 4 · 2 and 8 · 1: the second 2 reaches a fifth of 16
        ((0, 0.6, 0.0), [0, 1, 2, 4, 5, 6]),
        ((6, 0.85, 0.0), [0, 1, 4, 5, 6]),  # of a kept mass of 10
        ((5, 1.0, 0.4), [0, 1, 4, 5, 6]),
        ((0, 1.0, 0.4), list(range(12))),
        ((0, 1.0, 0.75), [1, 4, 5, 6]),
        ((2, 1.0, 1.0), [1, 4]),
    ],
    ids=str,
)
def test_ties_at_the_end_of_a_filter_go_to_the_smaller_ids(filters, kept):
    logits = torch.zeros(12, device=DEVICE)
    logits[[1, 4, 5, 6]] = math.log(2.0)

    assert kept_by_kernel(logits, *filters, 1.0) == set(kept)


def test_a_filter_may_end_among_zeros_of_both_signs():
    logits = torch.tensor([-0.0, 0.0, -1.0, 0.0, -0.0], device=DEVICE)

    assert kept_by_kernel(logits, 3, 1.0, 0.0, 1.0) == {0, 1, 3}


def test_top_k_may_end_among_impossible_tokens_which_are_never_drawn():
    logits = torch.full((6, 300), -INF, dtype=torch.float16, device=DEVICE)
    logits[:, [7, 200]] = 1.0
    ids = sampling.sample(logits, *parameters(6, [(1.0, 5, 0.99, 0.0)]))

    assert set(ids.tolist()) == {7, 200}


# One row and its neighbours


def test_a_rows_draw_is_the_same_alone_and_in_any_company():
    logits, given = logits_of(8, 3000, torch.float16), parameters(8)
    ids = sampling.sample(logits, *given).tolist()

    turned = [each.flip(0) for each in given]
    assert sampling.sample(logits.flip(0), *turned).tolist() == ids[::-1]
    for i in (0, 1, 5):  # that filter nothing: filtering neighbours change nothing either
        alone = [each[i : i + 1] for each in given[:3]]
        assert sampling.sample(logits[i : i + 1], *alone).tolist() == [ids[i]]


def test_rows_of_other_seeds_draw_other_tokens():
    logits = torch.zeros(16, 5000, device=DEVICE)
    given = parameters(16, [(1.0, 0, 1.0, 0.0)], filtered=False, positions=torch.full((16,), 3, device=DEVICE))

    assert len(set(sampling.sample(logits, *given).tolist())) > 12


@pytest.mark.parametrize(("bad", "filtered"), [(float("nan"), False), (INF, False), (float("nan"), True)])
def test_a_row_with_nan_or_inf_gives_no_id_and_its_neighbours_theirs(bad, filtered):
    logits, given = logits_of(4, 3000, torch.float16), parameters(4, filtered=filtered)
    clean = sampling.sample(logits, *given).tolist()
    logits[1::2, 2500] = bad

    assert sampling.sample(logits, *given).tolist() == [-1 if i % 2 else token for i, token in enumerate(clean)]


@pytest.mark.parametrize("filtered", [False, True], ids=["unfiltered", "filtered"])
def test_a_row_of_minus_inf_gives_no_id(filtered):
    logits = torch.full((len(EACH), 3000), -INF, dtype=torch.float16, device=DEVICE)

    assert sampling.sample(logits, *parameters(len(EACH), filtered=filtered)).tolist() == [-1] * len(EACH)


def test_a_block_without_a_possible_token_is_never_chosen():
    logits = logits_of(8, 3 * SAMPLE_BLOCK, torch.float16)
    logits[:, :SAMPLE_BLOCK] = logits[:, 2 * SAMPLE_BLOCK :] = -INF
    ids = sampling.sample(logits, *parameters(8))

    assert ((ids >= SAMPLE_BLOCK) & (ids < 2 * SAMPLE_BLOCK)).all()


def test_rows_may_lie_apart_in_memory():
    logits, given = logits_of(4, 2500), parameters(4)
    wide = torch.full((4, 2600), torch.nan, device=DEVICE)
    wide[:, :2500] = logits

    assert torch.equal(sampling.sample(wide[:, :2500], *given), sampling.sample(logits, *given))


# Temperatures


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-6])
def test_a_temperature_of_almost_0_takes_the_largest_logit(temperature):
    logits = logits_of(6, 5000) + 20

    ids = sampling.sample(logits, *parameters(6, [(temperature, 0, 1.0, 0.0)], filtered=False))
    assert ids.tolist() == logits.argmax(dim=-1).tolist()


def test_greedy_ties_go_to_the_smaller_id_in_and_across_blocks():
    logits = torch.zeros(3, 3 * SAMPLE_BLOCK, device=DEVICE)
    logits[0, [5000, 2100, 2099]] = 1.0
    logits[1, [5000, 17]] = -1.0

    assert sampling.sample(logits, *parameters(3, [(0.0, 0, 1.0, 0.0)], filtered=False)).tolist() == [2099, 0, 0]


def test_a_huge_temperature_forgets_the_logits():
    logits = torch.linspace(-20, 20, 40, device=DEVICE).expand(32, -1).contiguous()
    ids = sampling.sample(logits, *parameters(32, [(1e6, 0, 1.0, 0.0)], filtered=False))

    assert len(ids.unique()) > 15  # 22 of 40 are expected of 32 draws


# What is refused


@pytest.mark.parametrize("spoil", ["dtype", "logits", "parameters"])
def test_what_the_kernels_cannot_read_is_refused_with_the_fallback(spoil):
    logits, given = logits_of(2, 100), parameters(2)
    if spoil == "dtype":
        logits = logits.double()
    elif spoil == "logits":
        logits = logits_of(100, 2).T
    else:
        given[1] = given[1].repeat_interleave(2)[::2]
    with pytest.raises(ValueError, match="--kernels torch"):
        sampling.sample(logits, *given)


# On a GPU, in full size


@pytest.mark.gpu
@pytest.mark.parametrize("filtered", [False, True], ids=["unfiltered", "filtered"])
def test_a_large_batch_gets_the_ids_of_the_definition(gpu, filtered, dtype):
    logits, given = logits_of(256, 151_936, dtype), parameters(256, filtered=filtered)
    ids, expected = sampling.sample(logits, *given), reference.sample(logits, *given)

    assert (ids != expected).sum() <= 1  # a near-tie, or a token at the very end of a nucleus


@pytest.mark.gpu
def test_draws_on_a_gpu_follow_the_softmax(gpu):
    draws, logits = 20_000, torch.linspace(-1, 1, 29, device=DEVICE)
    given = parameters(draws, [(0.8, 0, 1.0, 0.0)], False, torch.full((draws,), 4, device=DEVICE))
    counts = sampling.sample(logits.repeat(draws, 1), *given).bincount(minlength=29)

    due = (logits.double() / 0.8).softmax(0) * draws
    assert ((counts - due) ** 2 / due).sum() < 28 + 5 * math.sqrt(2 * 28)  # chi-square, five deviations


@pytest.mark.gpu
def test_a_captured_sample_follows_its_inputs(gpu):
    logits, given = logits_of(8, 151_936), parameters(8)
    sampling.sample(logits, *given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = sampling.sample(logits, *given)
    logits.copy_(logits_of(8, 151_936, seed=1))
    given[2] += 1
    graph.replay()

    assert ids.tolist() == sampling.sample(logits, *given).tolist()
