"""The guide's op: checked against its definition, and inside the engine."""

from __future__ import annotations

from unittest.mock import patch

import minisgl_kernels as ops
import pytest
import torch
from minisgl_kernels.registry import OPS, OpCheckError, check, register_op

from chapters.reference.examples import add_op
from minisgl.config import EngineConfig
from minisgl.core import SamplingParams
from minisgl.engine.engine import Engine
from minisgl.models.register import build_model
from minisgl.models.weight import load_weights
from minisgl.simple import naive_generate
from tests.helpers import hf_state, request, serve, tiny_model

CPU = torch.device("cpu")


@pytest.fixture(params=["torch", "triton"])
def implementation(request, monkeypatch):
    """Which of the op's implementations runs."""
    if request.param == "triton" and (reason := ops.why_not("triton", CPU, torch.float32)):
        pytest.skip(reason)
    monkeypatch.setattr(add_op, "_triton_runs", lambda *_: request.param == "triton")
    return request.param


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_op_is_within_the_registrys_tolerance_of_its_reference(dtype):
    results = check("add_rms_norm", CPU, [dtype])

    assert [r.shape["hidden"] for r in results] == [576, 100]
    assert all(r.error <= r.tolerance for r in results)


def test_an_op_that_differs_from_its_reference_is_never_run_on_data():
    op = OPS["add_rms_norm"]
    with patch.dict(OPS):

        @register_op("no_eps", reference=op.reference, shapes=op.shapes, inputs=op.inputs)
        def without_residual(x, residual, weight, eps):
            return ops.rms_norm(x, weight, eps), residual + x

        with pytest.raises(OpCheckError, match=r"no_eps with .* from its reference"):
            without_residual(*op.inputs(op.shapes[0], CPU, torch.float32, torch.Generator()))


@pytest.mark.usefixtures("implementation")
def test_an_engine_with_the_op_gives_the_tokens_of_the_reference():
    plain = tiny_model()
    with patch.dict(ops.IMPLEMENTATIONS):
        add_op.register()
        model = build_model(plain.config, ops.implementation("mine"))
        load_weights(model, hf_state(plain).items(), CPU, torch.float32)
        engine = Engine(model, EngineConfig(kernels="mine", attention="torch", kv_pages=20))
    before = add_op.checked._verdicts.copy()
    add_op.checked._verdicts.clear()
    [r] = serve(engine, request(0, [3, 99, 14, 15, 92], max_tokens=8))

    assert add_op.checked._verdicts == {(CPU, torch.float32): ""}, "the op was not called"
    add_op.checked._verdicts.update(before)
    assert r.output == list(naive_generate(plain, [3, 99, 14, 15, 92], SamplingParams(max_tokens=8, ignore_eos=True)))
