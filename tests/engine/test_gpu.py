"""The engine on a GPU: same tokens in fp32, close logits in 16 bits, on every backend, with graphs and without."""

from __future__ import annotations

import minisgl_kernels as ops
import pytest
import torch

from minisgl import LLM, EngineConfig, SamplingParams
from minisgl.attention import backend
from minisgl.core import WorkCounts
from minisgl.engine.engine import Engine
from minisgl.engine.graph import StepGraphs
from minisgl.engine.rows import Mailbox
from minisgl.layers.attention import Attention, FusedAttention
from minisgl.models.register import build_model
from minisgl.models.weight import load_weights
from minisgl.simple import Recompute, cached_generate, naive_generate, step
from tests.helpers import check_whole, hf_state, request, sample_rows, serve, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PROMPT = [3, 99, 14, 15, 92, 65, 35]
PROMPTS = [PROMPT, PROMPT[:5], [7] * 40, [*PROMPT, 4]]
ATTENTION = ["torch", "triton", "cuda"]
# Of a row, relative to its norm, after two layers; 0.044 was seen in torch's bfloat16. A wrong term costs 0.5 or more.
LOGIT_ERROR = {torch.bfloat16: 0.1, torch.float16: 0.1 / 8}


def on_gpu(model, dtype, kernels="torch", attention=Attention):
    twin = build_model(model.config, ops.implementation(kernels), attention)
    load_weights(twin, hf_state(model).items(), torch.device("cuda"), dtype)
    return twin


def engine_on_gpu(model, dtype, attention, kernels, **config):
    """An engine with these ops, its layers as LLM chooses them and its pool NaN; skips where they do not run.

    Few requests run side by side and sizes are captured when they are met, since a capture takes longer than a run.
    """
    for name in (attention, kernels):
        if reason := ops.why_not(name, torch.device("cuda"), dtype):
            pytest.skip(reason)
    layer = FusedAttention if kernels == "triton" and attention != "torch" else Attention
    small = {"kv_pages": 40, "max_running_requests": 8, "graphs": "lazy"}
    config = small | {"attention": attention, "kernels": kernels} | config
    engine = Engine(on_gpu(model, dtype, kernels, layer), EngineConfig(**config))
    engine.pool.kv[:, :, 1:] = float("nan")
    return engine


def check_logits_of_each_step(engine, model):
    """Serve PROMPTS, all side by side, without graphs, and compare each step's logits with the CPU's in fp32."""
    steps, places = list[torch.Tensor](), list[list[int]]()
    hook = engine.model.register_forward_hook(lambda _, __, logits: steps.append(logits.float().cpu()))
    launch = engine.launch

    def launch_and_note_the_order(batch):
        flight = launch(batch)
        places.append([r.id for r in batch.requests])
        return flight

    engine.launch = launch_and_note_the_order
    requests = serve(engine, *(request(i, p, max_tokens=6) for i, p in enumerate(PROMPTS)))
    hook.remove()
    assert [len(logits) for logits in steps] == [len(PROMPTS)] * 6
    for i, r in enumerate(requests):
        with torch.inference_mode():  # given the tokens that the GPU chose
            expected = torch.stack(
                [step(model, r.tokens[:n], 0, Recompute(), WorkCounts()) for n in range(r.prompt_len, len(r.tokens))]
            )
        logits = torch.stack([each[ids.index(i)] for each, ids in zip(steps, places, strict=True)])
        error = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < LOGIT_ERROR[engine.model.dtype]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("generate", [naive_generate, cached_generate])
def test_fp32_greedy_tokens_equal_those_of_the_cpu(architecture, generate):
    model = tiny_model(architecture)
    params = SamplingParams(max_tokens=40, ignore_eos=True)

    assert list(generate(on_gpu(model, torch.float32), PROMPT, params)) == list(generate(model, PROMPT, params))


@pytest.mark.parametrize("prefix_cache", ["none", "radix"])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("attention", ATTENTION)
def test_a_batch_in_fp32_gets_the_greedy_tokens_of_the_cpu(attention, kernels, prefix_cache):
    model = tiny_model(head_dim=16)  # CUDA C++ takes multiples of 8
    switches = {"page_size": 4, "max_batch_tokens": 16, "output_reserve": 0.0}  # chunks and preemption
    engine = engine_on_gpu(model, torch.float32, attention, kernels, prefix_cache=prefix_cache, **switches)
    requests = serve(engine, *(request(i, p, max_tokens=30) for i, p in enumerate(PROMPTS)))

    params = SamplingParams(max_tokens=30, ignore_eos=True)
    assert [r.output for r in requests] == [list(naive_generate(model, p, params)) for p in PROMPTS]
    check_whole(engine.scheduler)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("attention", ATTENTION)
def test_a_model_with_norms_of_q_and_k_gets_the_greedy_tokens_of_the_cpu(attention, kernels):
    model = tiny_model("Qwen3ForCausalLM", head_dim=16)
    engine = engine_on_gpu(model, torch.float32, attention, kernels)
    requests = serve(engine, *(request(i, p, max_tokens=30) for i, p in enumerate(PROMPTS)))

    params = SamplingParams(max_tokens=30, ignore_eos=True)
    assert [r.output for r in requests] == [list(naive_generate(model, p, params)) for p in PROMPTS]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("attention", ATTENTION)
def test_16_bit_logits_of_prefills_and_decodes_are_close_to_fp32s(attention, kernels, dtype):
    model = tiny_model(head_dim=16)

    check_logits_of_each_step(engine_on_gpu(model, dtype, attention, kernels, graphs="off"), model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_with_the_flash_attn_package_are_close_to_fp32s(dtype):
    pytest.importorskip("flash_attn", reason="the package flash-attn is not installed")
    model = tiny_model(head_dim=32)

    engine = engine_on_gpu(model, dtype, "flash_attn", "torch", page_size=256, graphs="off")
    check_logits_of_each_step(engine, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_batch_runs_to_its_end(dtype):
    config = EngineConfig(kv_pages=40, graphs="lazy", max_running_requests=8)
    engine = Engine(on_gpu(tiny_model(), dtype), config)
    requests = serve(engine, *(request(i, PROMPT[i:], max_tokens=20) for i in range(4)))

    assert [(r.finish_reason, len(r.output)) for r in requests] == [("length", 20)] * 4


def test_after_a_first_capture_that_failed_another_may_follow():
    graphs, x, runs = StepGraphs(torch.device("cuda")), torch.ones(3, device="cuda"), []

    def fails_when_it_is_recorded():
        runs.append(len(runs))
        if len(runs) == 2:
            raise MemoryError
        return x + 1

    with pytest.raises(MemoryError):
        graphs.capture("first", fails_when_it_is_recorded)
    graphs.open_pool()
    graphs.capture("second", lambda: x + 1)
    x.fill_(4)

    assert graphs.replay("second").tolist() == [5, 5, 5]


def test_rows_are_sampled_as_on_the_cpu():
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(0)) * 2
    each = [{}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.05}, {"repetition_penalty": 1.3, "logit_bias": {4: 3.0}}]
    rows = [request(i, [i, 4], temperature=0.8, **each[i % len(each)]) for i in range(64)]
    for r in rows:
        r.seed = r.id

    assert sample_rows(logits.cuda(), rows) == sample_rows(logits, rows)


def test_the_pool_takes_its_share_of_the_free_memory():
    config = EngineConfig(memory_fraction=0.001, page_size=64, graphs="off")
    engine = Engine(on_gpu(tiny_model(), torch.float32), config)
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


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("attention", ATTENTION)
def test_a_seed_gives_the_same_tokens_whatever_runs_beside(attention, kernels):
    model = tiny_model(head_dim=16)
    outputs = []
    for neighbours in (0, 1, 20):  # each with another number of splits
        engine = engine_on_gpu(model, torch.float32, attention, kernels, kv_pages=200, max_running_requests=24)
        others = [request(1 + i, PROMPTS[i % 4], max_tokens=3 + i, temperature=2.0) for i in range(neighbours)]
        drawn = request(0, PROMPT, max_tokens=20, temperature=1.0, top_p=0.9)
        drawn.seed = 7
        serve(engine, *others, drawn)
        outputs.append(drawn.output)

    assert len(outputs[0]) == 20
    assert outputs == [outputs[0]] * 3


@pytest.mark.parametrize("decode_kernels", ["auto", "off"])
def test_auto_is_triton_for_attention_layers_and_sampling(tiny_folder, decode_kernels):
    if reason := ops.why_not("triton", torch.device("cuda"), torch.float32):
        pytest.skip(reason)
    llm = LLM(EngineConfig(model=str(tiny_folder), kv_pages=40, graphs="lazy", decode_kernels=decode_kernels))
    chosen = ops.implementation("triton", decode_kernels == "auto")

    assert llm.engine.attention is backend("triton")
    assert llm.engine.ops is ops.implementation("triton")
    for layer in llm.model.model.layers:
        assert type(layer.self_attn) is FusedAttention
        assert layer.self_attn.ops is layer.mlp.ops is layer.input_layernorm.ops is chosen


def test_auto_takes_the_gpu_and_the_checkpoints_dtype(tiny_folder):
    llm = LLM(EngineConfig(model=str(tiny_folder), kv_pages=40, graphs="lazy"))

    assert (llm.model.device.type, llm.model.dtype) == ("cuda", torch.float32)
    assert llm.generate(["Hello"])[0].finish_reason in ("stop", "length")


# Graphs and overlap


@pytest.mark.parametrize(
    ("graphs", "overlap", "attention", "kernels"),
    [
        ("off", "off", "torch", "torch"),
        ("off", "off", "cuda", "triton"),
        ("off", "on", "torch", "triton"),
        ("off", "on", "triton", "torch"),
        ("off", "on", "cuda", "torch"),
        ("lazy", "off", "torch", "triton"),
        ("lazy", "off", "triton", "torch"),
        ("lazy", "on", "torch", "torch"),
        ("lazy", "on", "triton", "triton"),
        ("lazy", "on", "cuda", "triton"),
        ("on", "off", "triton", "triton"),
        ("on", "off", "cuda", "torch"),
        ("on", "on", "torch", "torch"),
        ("on", "on", "torch", "triton"),
        ("on", "on", "triton", "torch"),
        ("on", "on", "triton", "triton"),
        ("on", "on", "cuda", "triton"),
    ],
)
def test_with_graphs_and_overlap_fp32_greedy_tokens_are_those_of_the_cpu(graphs, overlap, attention, kernels):
    model = tiny_model(head_dim=16)
    tight = {"page_size": 4, "kv_pages": 28, "max_batch_tokens": 16, "output_reserve": 0.0}  # chunks and preemption
    engine = engine_on_gpu(model, torch.float32, attention, kernels, graphs=graphs, overlap=overlap, **tight)
    requests = serve(engine, *(request(i, p, max_tokens=30) for i, p in enumerate(PROMPTS)))

    params = SamplingParams(max_tokens=30, ignore_eos=True)
    assert [r.output for r in requests] == [list(naive_generate(model, p, params)) for p in PROMPTS]
    assert engine.work.preemptions > 0
    assert (engine.work.graph_steps > 0) == (graphs != "off")
    check_whole(engine.scheduler)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_requests_that_need_the_host_beside_others_get_the_tokens_of_an_engine_without_graphs(overlap):
    model = tiny_model(head_dim=16)
    kinds = [{}, {"repetition_penalty": 1.5}, {"logprobs": 3}, {"temperature": 0.8, "top_k": 9}, {"logit_bias": {5: 3}}]

    def answers(**switches):
        engine = engine_on_gpu(model, torch.float32, "triton", "triton", **switches)
        requests = [request(i, PROMPTS[i % 4], max_tokens=5 + 3 * i, **kind) for i, kind in enumerate(kinds)]
        for r in requests:
            r.seed = r.id
        serve(engine, *requests)
        return [r.output for r in requests], [each.token_id for each in requests[2].logprobs]

    assert answers(graphs="lazy", overlap=overlap) == answers(graphs="off", overlap="off")


@pytest.mark.parametrize("attention", ["triton", "cuda"])
def test_small_steps_with_prompts_are_replayed_too(attention):
    engine = engine_on_gpu(tiny_model(head_dim=16), torch.float32, attention, "triton")
    serve(engine, *(request(i, p, max_tokens=6) for i, p in enumerate(PROMPTS)))

    assert sum(map(len, PROMPTS)) <= 64  # the smallest size
    assert engine.work.graph_steps == engine.work.steps == 6


@pytest.mark.parametrize("attention", ["triton", "cuda"])
def test_a_prompt_beyond_the_graphs_sizes_runs_eagerly_and_is_counted(attention):
    engine = engine_on_gpu(tiny_model(head_dim=16), torch.float32, attention, "triton", graph_tokens=64)
    serve(engine, request(0, [*range(100)], max_tokens=6))
    stats = engine.stats()

    assert (stats["steps"], stats["graph_steps"], stats["eager_steps_size"]) == (6, 5, 1)


@pytest.mark.parametrize("attention", ["triton", "cuda"])
def test_decode_steps_between_two_pages_allocate_nothing_and_send_nothing(attention, monkeypatch):
    engine = engine_on_gpu(tiny_model(head_dim=16), torch.float32, attention, "triton", page_size=64, graphs="on")
    requests = [request(i, PROMPT, max_tokens=50) for i in range(4)]
    for r in requests:
        engine.add(r)
    for _ in range(5):
        engine.step()
    sent, send = [], Mailbox.send
    monkeypatch.setattr(Mailbox, "send", lambda self, *args: sent.append(args) or send(self, *args))
    before = engine.work.graph_steps, torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(20):
        engine.step()
    after = engine.work.graph_steps, torch.cuda.memory_stats()["allocation.all.allocated"]

    assert after == (before[0] + 20, before[1])
    assert sent == []
    serve(engine)
    assert {len(r.output) for r in requests} == {50}


def test_the_memory_of_the_largest_step_is_measured_before_the_pool_takes_its_share():
    engine = engine_on_gpu(tiny_model(head_dim=16), torch.float32, "triton", "triton", max_batch_tokens=4096)
    hidden_bytes = 4096 * 52 * 4  # tokens, intermediate size, fp32

    assert engine._activation_bytes() > hidden_bytes


@pytest.mark.parametrize("attention", ATTENTION)
def test_with_every_attention_an_engine_sizes_its_own_pool(attention):
    """torch's attention plans by lengths on the host, and no step of nobody can be run to measure its memory."""
    switches = {"kv_pages": 0, "memory_fraction": 0.001, "graphs": "off", "overlap": "on"}
    engine = engine_on_gpu(tiny_model(head_dim=16), torch.float32, attention, "torch", **switches)
    [served] = serve(engine, request(0, PROMPT, max_tokens=5))

    assert len(served.output) == 5


def test_two_engines_with_graphs_do_not_meet():
    model = tiny_model(head_dim=16)
    engines = [engine_on_gpu(model, torch.float32, "triton", "triton", overlap="on") for _ in range(2)]
    requests = [request(0, prompt, max_tokens=20) for prompt in PROMPTS[:2]]
    for engine, r in zip(engines, requests, strict=True):
        engine.add(r)
    while any(engine.has_work for engine in engines):
        for engine in engines:
            engine.step()

    params = SamplingParams(max_tokens=20, ignore_eos=True)
    assert [r.output for r in requests] == [list(naive_generate(model, p, params)) for p in PROMPTS[:2]]
