"""What rank 0 tells the others is all that they need: a runner that only follows ends in the same state."""

from __future__ import annotations

import minisgl_kernels as ops
import pytest
import torch

from minisgl.config import EngineConfig
from minisgl.engine.engine import Engine
from minisgl.engine.lead import CAPTURE, EAGER, REPLAY, Leader
from minisgl.layers.attention import FusedAttention
from minisgl.models.register import build_model
from minisgl.models.weight import load_weights
from tests.helpers import hf_state, request, serve, tiny_model

ON_GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
)
PROMPTS = [[3, 99, 14, 15, 92], [3, 99, 14], [7] * 40, [3, 99, 14, 15, 92, 8, 97]]


def engine(device: str, graphs: str, overlap: str) -> Engine:
    """One whole model, always with the same weights."""
    kernels, model = {"cpu": "torch", "cuda": "triton"}[device], tiny_model()
    if device == "cuda":
        if reason := ops.why_not(kernels, torch.device(device), torch.float32):
            pytest.skip(reason)
        twin = build_model(model.config, ops.implementation(kernels), FusedAttention)
        load_weights(twin, hf_state(model).items(), torch.device(device), torch.float32)
        model = twin
    switches = {"attention": kernels, "kernels": kernels, "graphs": graphs, "overlap": overlap, "graph_tokens": 64}
    sizes = {"kv_pages": 40, "page_size": 4, "max_running_requests": 4, "max_batch_tokens": 24}
    made = Engine(model, EngineConfig(**sizes, **switches))
    made.pool.kv.zero_()
    return made


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("graphs", ["off", "lazy"])
def test_a_runner_that_follows_has_the_pool_and_the_rows_of_the_one_that_leads(graphs, overlap, device):
    leading, following = engine(device, graphs, overlap), engine(device, graphs, overlap)
    assert leading.runner
    assert following.runner
    commands = []

    def send(command):
        commands.append(int(command[0][0]))
        following.runner.follow([array.copy() for array in command])

    leading.runner.lead(Leader(send, leading.runner.rows))
    each = [{}, {"temperature": 0.9, "seed": 1}, {"temperature": 0.9, "top_k": 5, "seed": 2}, {"temperature": 0.5}]
    asked = [request(i, p, max_tokens=9, **own) for i, (p, own) in enumerate(zip(PROMPTS, each, strict=True))]
    serve(leading, *asked)
    serve(leading, request(9, PROMPTS[2], max_tokens=5))  # of which a part is cached

    in_graphs = {CAPTURE, REPLAY} if device == "cuda" else {CAPTURE, REPLAY, EAGER}  # the stand-in takes no chunks
    assert set(commands) == ({EAGER} if graphs == "off" else in_graphs)
    ours, theirs = leading.runner.rows, following.runner.rows
    torch.testing.assert_close(following.pool.kv[:, :, 1:], leading.pool.kv[:, :, 1:], rtol=0, atol=0)
    for field in ("page_tables", "tokens", "lengths", "order", "seeds", "temperature", "top_k"):
        assert torch.equal(getattr(theirs, field), getattr(ours, field)), field


def test_a_step_without_changes_is_a_command_of_its_head_alone():
    leading = engine("cpu", "lazy", "on")
    commands = []
    assert leading.runner
    leading.runner.lead(Leader(lambda command: commands.append([len(array) for array in command]), leading.runner.rows))
    serve(leading, request(0, [3, 99, 14], max_tokens=4))  # within a page after its prompt

    assert commands[-1] == [4, 0, 0]
