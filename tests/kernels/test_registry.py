"""An op of one's own is compared with its reference before it touches real data."""

from __future__ import annotations

import pytest
import torch
from minisgl_kernels import registry
from minisgl_kernels.registry import OPS, TOLERANCE, OpCheckError, register_op

SHAPES = ({"rows": 3, "width": 5}, {"rows": 1, "width": 17})


@pytest.fixture(autouse=True)
def _only_our_ops(monkeypatch):
    monkeypatch.setattr(registry, "OPS", OPS.copy())


def double(x):
    return 2 * x


def random_x(shape, device, dtype, generator):
    return [torch.randn(shape["rows"], shape["width"], device=device, generator=generator).to(dtype)]


def register(implementation, reference=double, inputs=random_x, tolerance=TOLERANCE):
    return register_op("double", reference=reference, shapes=SHAPES, inputs=inputs, tolerance=tolerance)(implementation)


def counted(function):
    """The function, with the list of arguments that it was called with."""
    calls = []

    def wrapper(*args):
        calls.append(args)
        return function(*args)

    return wrapper, calls


def test_a_registered_op_is_called_as_its_implementation():
    op = register(lambda x: x + x)
    x = torch.randn(4, 4)

    torch.testing.assert_close(op(x), 2 * x)
    assert registry.OPS["double"] is op


def test_the_first_call_checks_every_shape_and_later_calls_none():
    implementation, calls = counted(lambda x: x + x)
    op = register(implementation)

    op(torch.ones(2, 2))
    assert [tuple(x.shape) for (x,) in calls] == [(3, 5), (1, 17), (2, 2)]
    op(torch.ones(2, 2))
    assert len(calls) == 4


def test_each_dtype_is_checked_on_its_own():
    implementation, calls = counted(lambda x: x + x)
    op = register(implementation)

    op(torch.ones(2, 2))
    op(torch.ones(2, 2, dtype=torch.float16))
    assert [x.dtype for (x,) in calls] == [torch.float32] * 3 + [torch.float16] * 3


def test_a_wrong_op_is_named_with_shape_dtype_error_and_tolerance():
    op = register(lambda x: x * 2.001)

    with pytest.raises(OpCheckError) as caught:
        op(torch.ones(2, 2))
    for part in ("double", "'rows': 3, 'width': 5", "float32", "5.00e-04", "1e-05"):
        assert part in str(caught.value)


def test_a_wrong_op_never_sees_real_data_on_any_later_call():
    implementation, calls = counted(lambda x: x * 3)
    op = register(implementation)
    real = torch.ones(2, 2)

    for _ in range(2):
        with pytest.raises(OpCheckError):
            op(real)
    assert len(calls) == 1  # the first shape of the check
    assert calls[0][0] is not real


def wrong_in_the_last_row(x):
    out = 2 * x
    out[-1] = 0
    return out


def leaves_an_element_unwritten(x):
    out = torch.empty_like(x)
    out.view(-1)[:-1] = 2 * x.view(-1)[:-1]
    return out


def changes_its_input(x):
    return x.mul_(2).clone()


@pytest.mark.parametrize(
    ("implementation", "why"),
    [
        (wrong_in_the_last_row, "from its reference"),
        (lambda x: 2 * x * torch.where(x == x.max(), torch.nan, 1), "nan from its reference"),
        (leaves_an_element_unwritten, "nan from its reference"),
        (changes_its_input, "changed its input"),
        (lambda x: (2 * x).double(), "returned"),
        (lambda x: 2 * x[:-1], "returned"),
        (lambda x: (2 * x, x), "returned"),
    ],
)
def test_a_fault_is_found(implementation, why):
    op = register(implementation)

    with pytest.raises(OpCheckError, match=why):
        op(torch.ones(2, 2))


def test_every_output_is_compared():
    op = register(lambda x: (2 * x, 3 * x), reference=lambda x: (2 * x, 4 * x))

    with pytest.raises(OpCheckError, match=r"2\.50e-01"):
        op(torch.ones(2, 2))


def test_the_reference_runs_in_float64():
    # 1e8 + 1 - 1e8 is 0 in fp32: an implementation that is right must not be judged by a reference that rounds.
    op = register(lambda x: x.clone(), reference=lambda x: (x + 1e8) - 1e8, tolerance={torch.float32: 1e-6})

    op(torch.ones(2, 2))


def test_a_reference_that_refuses_float64_is_used_in_the_dtype_of_the_op():
    def reference(x):
        if x.dtype == torch.float64:
            raise TypeError("no fp64 here")
        return 2 * x

    register(lambda x: x + x, reference=reference)(torch.ones(2, 2))
    with pytest.raises(OpCheckError):
        register(lambda x: x, reference=reference)(torch.ones(2, 2))


def test_a_tolerance_belongs_to_a_dtype():
    op = register(lambda x: 2 * x * 1.001, tolerance={torch.float32: 1e-2, torch.float16: 1e-4})

    op(torch.ones(2, 2))
    with pytest.raises(OpCheckError, match="float16"):
        op(torch.ones(2, 2, dtype=torch.float16))
    with pytest.raises(OpCheckError, match=r"no tolerance for torch\.float64"):
        op(torch.ones(2, 2, dtype=torch.float64))


def test_nan_in_an_input_that_is_not_read_does_not_count_as_a_change():
    def with_unused(*draw):
        return [*random_x(*draw), torch.full((2,), torch.nan)]

    op = register(lambda x, unused: 2 * x, reference=lambda x, unused: 2 * x, inputs=with_unused)

    op(torch.ones(2, 2), torch.ones(2))


def test_the_dtype_of_an_op_is_that_of_its_first_floating_tensor():
    op = register(
        lambda ids, table: table[ids],
        reference=lambda ids, table: table[ids],
        inputs=lambda *draw: [torch.zeros(2, dtype=torch.int64), *random_x(*draw)],
        tolerance={torch.float16: 0.0},
    )

    op(torch.zeros(2, dtype=torch.int64), torch.ones(3, 3, dtype=torch.float16))


def test_check_by_hand_returns_what_was_measured():
    register(lambda x: x + x)

    results = registry.check("double", "cpu", [torch.float32])

    assert [(r.shape, r.dtype, r.error, r.tolerance) for r in results] == [
        (shape, torch.float32, 0.0, 1e-5) for shape in SHAPES
    ]
    assert {r.dtype for r in registry.check("double", "cpu")} == set(TOLERANCE)


def test_another_seed_draws_other_inputs():
    implementation, calls = counted(lambda x: x + x)
    op = register(implementation)

    op.check(torch.device("cpu"), torch.float32, seed=1)
    op.check(torch.device("cpu"), torch.float32, seed=2)
    assert not torch.equal(calls[0][0], calls[2][0])


def test_a_name_registered_again_is_checked_anew():
    register(lambda x: x + x)(torch.ones(2, 2))
    op = register(lambda x: x)

    with pytest.raises(OpCheckError):
        op(torch.ones(2, 2))


def test_the_check_leaves_the_settings_of_torch_as_they_were():
    register(lambda x: x + x)(torch.ones(2, 2))

    assert torch.get_deterministic_debug_mode() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_first_use_inside_a_graph_capture_is_refused_and_one_after_a_check_is_captured():
    op = register(lambda x: x + x)
    x = torch.ones(2, 2, device="cuda")

    with pytest.raises(OpCheckError, match="captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        op(x)
    op(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(x)
    x.fill_(3)
    graph.replay()
    assert out.eq(6).all()
