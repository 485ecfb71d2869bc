"""The engine on a GPU: same tokens in fp32, close logits in 16 bits."""

from __future__ import annotations

import pytest
import torch

from minisgl import LLM, EngineConfig, SamplingParams
from minisgl.core import WorkCounts
from minisgl.engine.engine import Engine
from minisgl.engine.sampler import sample_rows
from minisgl.models.register import build_model
from minisgl.models.weight import load_weights
from minisgl.simple import Recompute, cached_generate, naive_generate, step
from tests.helpers import check_whole, hf_state, request, serve, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PROMPT = [3, 99, 14, 15, 92, 65, 35]


def on_gpu(model, dtype):
    twin = build_model(model.config)
    load_weights(twin, hf_state(model).items(), torch.device("cuda"), dtype)
    return twin


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("generate", [naive_generate, cached_generate])
def test_fp32_greedy_tokens_equal_those_of_the_cpu(architecture, generate):
    model = tiny_model(architecture)
    params = SamplingParams(max_tokens=40, ignore_eos=True)

    assert list(generate(on_gpu(model, torch.float32), PROMPT, params)) == list(generate(model, PROMPT, params))


@pytest.mark.parametrize("prefix_cache", ["none", "radix"])
def test_a_batch_in_fp32_gets_the_greedy_tokens_of_the_cpu(prefix_cache):
    model = tiny_model()
    prompts = [PROMPT, PROMPT[:5], [7] * 40, [*PROMPT, 4]]
    switches = {"page_size": 4, "kv_pages": 40, "max_batch_tokens": 16, "output_reserve": 0.0}  # chunks and preemption
    engine = Engine(on_gpu(model, torch.float32), EngineConfig(prefix_cache=prefix_cache, **switches))
    engine.pool.kv[:, :, 1:] = float("nan")
    requests = serve(engine, *(request(i, p, max_tokens=30) for i, p in enumerate(prompts)))

    params = SamplingParams(max_tokens=30, ignore_eos=True)
    assert [r.output for r in requests] == [list(naive_generate(model, p, params)) for p in prompts]
    check_whole(engine.scheduler)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_batch_runs_to_its_end(dtype):
    engine = Engine(on_gpu(tiny_model(), dtype), EngineConfig(kv_pages=40))
    requests = serve(engine, *(request(i, PROMPT[i:], max_tokens=20) for i in range(4)))

    assert [(r.finish_reason, len(r.output)) for r in requests] == [("length", 20)] * 4


def test_rows_are_sampled_as_on_the_cpu():
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(0)) * 2
    each = [{}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.05}, {"repetition_penalty": 1.3, "logit_bias": {4: 3.0}}]
    rows = [request(i, [i, 4], temperature=0.8, **each[i % len(each)]) for i in range(64)]
    for r in rows:
        r.seed = r.id

    assert sample_rows(logits.cuda(), rows) == sample_rows(logits, rows)


def test_the_pool_takes_its_share_of_the_free_memory():
    engine = Engine(on_gpu(tiny_model(), torch.float32), EngineConfig(memory_fraction=0.001, page_size=64))
    free, _ = torch.cuda.mem_get_info()

    assert engine.pool.kv.device.type == "cuda"
    assert engine.pool.kv.nbytes < 0.002 * free


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_are_close_to_fp32s(dtype):
    model = tiny_model()
    with torch.inference_mode():
        expected = step(model, PROMPT, 0, Recompute(), WorkCounts())
        logits = step(on_gpu(model, dtype), PROMPT, 0, Recompute(), WorkCounts())

    error = (logits.float().cpu() - expected).norm() / expected.norm()
    assert error < 0.03  # 8 bits of mantissa, two layers; a wrong term costs 0.5 or more


def test_a_seed_gives_the_same_tokens_again():
    model = on_gpu(tiny_model(), torch.float32)
    params = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True)

    assert list(cached_generate(model, PROMPT, params)) == list(cached_generate(model, PROMPT, params))


def test_auto_takes_the_gpu_and_the_checkpoints_dtype(tiny_folder):
    llm = LLM(EngineConfig(model=str(tiny_folder), kv_pages=40))

    assert (llm.model.device.type, llm.model.dtype) == ("cuda", torch.float32)
    assert llm.generate(["Hello"])[0].finish_reason in ("stop", "length")
