"""Random traffic through the real engine: the greedy tokens of the bare loop, whatever the switches and the pool.

MINISGL_SCENARIOS=20000 tries that many scenarios, drawn anew; by default they are the same in each run. On a GPU they
come in parts, which pytest-xdist runs side by side: `pytest -n 15 -m gpu tests/engine/test_properties.py`.
"""

from __future__ import annotations

from functools import cache, partial
from random import Random

import minisgl_kernels as ops
import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from minisgl.layers.attention import FusedAttention
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.register import build_model
from minisgl.models.weight import load_weights
from tests.distributed.group import engine_on_threads
from tests.engine.scenarios import FRESH, pairwise, scenario, scenarios
from tests.engine.traffic import LONGEST, family, run
from tests.helpers import hf_state

PARTS = 16  # of the scenarios for a GPU


@cache
def twin_on_gpu() -> LlamaForCausalLM:
    model = family().model
    twin = build_model(model.config, ops.implementation("triton"), FusedAttention)
    load_weights(twin, hf_state(model).items(), torch.device("cuda"), torch.float32)
    return twin


def test_the_family_has_greedy_and_sampled_answers_without_close_choices():
    known = family()
    assert sum(seed is None for seed in known.seeds) >= 15
    assert {seed % 3 for seed in known.seeds if seed is not None} == {0, 1, 2}


@settings(
    max_examples=scenarios(400),
    derandomize=not FRESH,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.randoms(use_true_random=False))
def test_any_traffic_gets_the_bare_loops_tokens_and_gives_all_pages_back(r: Random):
    case = scenario(r, len(family().prompts), LONGEST)
    note(f"{case}")
    run(case)


@pytest.mark.parametrize("row", pairwise(Random(0)), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_switches_gives_the_bare_loops_tokens(row):
    draw = partial(scenario, prompts=len(family().prompts), answer=LONGEST, **row)
    for seed in range(4 if row["graphs"] == "off" else 2):
        run(draw(Random(seed)))


@pytest.mark.parametrize("part", range(4))
def test_any_traffic_on_two_ranks_gets_the_bare_loops_tokens(part):
    first = Random().randrange(10**9) if FRESH else 0
    for seed in range(first + part, first + scenarios(200), 4):
        case = scenario(Random(seed), len(family().prompts), LONGEST, graphs="off")
        print(f"scenario {seed}: {case}")  # pytest shows the last one if it fails
        run(case, make=engine_on_threads)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("part", range(PARTS))
def test_any_traffic_on_a_gpu_with_graphs_and_overlap_gets_the_bare_loops_tokens(part):
    if reason := ops.why_not("triton", torch.device("cuda"), torch.float32):
        pytest.skip(reason)
    first = Random().randrange(10**9) if FRESH else 0
    for seed in range(first + part, first + scenarios(320), PARTS):
        case = scenario(Random(seed), len(family().prompts), LONGEST, graphs="lazy", overlap="on")
        print(f"scenario {seed}: {case}")  # pytest shows the last one if it fails
        run(case, twin_on_gpu(), attention="triton", kernels="triton")
