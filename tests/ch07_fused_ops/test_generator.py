"""Task 07.5: `Norm.emit_in_product`, the rule of a norm in front of a product; and the check that guards all rules."""

from __future__ import annotations

import ast
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed")

from minisgl_kernels.fuser import activation, fuse, matmul, norm, residual
from minisgl_kernels.fuser_steps import Norm, Step
from minisgl_kernels.registry import OpCheckError

from tests.ch07_fused_ops.scene import DEVICE, check, random
from tests.tolerances import GENERATED


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path, monkeypatch):
    """Generated kernels of these tests go where nobody else reads them, and no op is known from before."""
    monkeypatch.setenv("MINISGL_HOME", str(tmp_path))
    fuse.cache_clear()
    yield
    fuse.cache_clear()


def run(op, *tensors):
    """The generated kernel's result, without the check, which would tell less."""
    return op._launch(*tensors)


def draw(op, rows, inner, columns, dtype=torch.float32):
    shape = {"rows": rows, "inner": inner, "columns": columns}
    return op.random_inputs(shape, DEVICE, dtype, torch.Generator(DEVICE).manual_seed(3))


def test_the_lines_are_lines_of_a_program():
    lines = Norm(1e-6).emit_in_product("norm_weight_2")

    assert isinstance(lines, list), "return a list, one line of Triton an entry"
    assert all(isinstance(line, str) for line in lines), "return a list, one line of Triton an entry"
    text = "\n".join(lines)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        pytest.fail(f"the lines do not parse: {error}\n{text}", pytrace=False)
    names = {name.id for name in ast.walk(tree) if isinstance(name, ast.Name)}
    assert "name" not in names, f"{{name}} stands in a line as it is: make it an f-string\n{text}"
    assert {"squares", "value"} <= names, "the loop's part adds to `squares` and changes `value`"
    assert "norm_weight_2_ptr" in names, "the weight is at NAME_ptr, with the name that emit_in_product is given"


def test_the_row_of_the_page():
    x, weight = torch.tensor([[3.0, 4.0]], device=DEVICE), torch.tensor([1.0, 10.0], device=DEVICE)
    product = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], device=DEVICE)

    out = run(fuse(norm(1e-12), matmul()), x, weight, product)

    expected = torch.tensor([[3.0, 40.0, 43.0]], device=DEVICE) / 12.5**0.5
    check(GENERATED[torch.float32], out, expected, "(3, 4) · (1, 10) goes into the product; 1 / √12.5 follows it")


@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 40, 24), (5, 300, 40), (20, 150, 70)])
def test_rows_are_normed_whatever_the_tiles(rows, inner, columns, dtype):
    op = fuse(norm(1e-6), matmul())
    args = draw(op, rows, inner, columns, dtype)

    expected = op.reference(*(arg.double() for arg in args))
    hint = f"with {inner} columns in tiles: squares add up over all tiles, and each column has its own weight"
    check(GENERATED[dtype], run(op, *args), expected, hint)


def test_steps_before_and_after_it_stay_in_order():
    op = fuse(residual(), norm(1e-6), matmul(), activation("silu"))
    args = draw(op, 3, 200, 24)

    expected = op.reference(*(arg.double() for arg in args))
    check(GENERATED[torch.float32], run(op, *args), expected, "the norm is of x + residual, as `value` holds it")


def test_the_worked_example_passes_its_check_and_runs():
    op = fuse(norm(1e-6), matmul(), activation("silu"))
    x, norm_weight, weight = draw(op, 4, 96, 40)

    out = op(x, norm_weight, weight)

    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm_weight
    check(GENERATED[torch.float32], out, F.silu(normed @ weight.T), "silu(norm(x) @ weight.T)")


@dataclass(frozen=True)
class Wrong(Step):
    """A rule whose lines do something else than its definition."""

    line: str

    def reference(self, value, *tensor):
        return value * 2

    def emit(self, name):
        return [self.line]


@pytest.mark.parametrize("line", ["value = value * 3", "value = value * float('nan')", "value = value + 0"])
def test_a_rule_that_differs_from_its_definition_is_never_used(line):
    op, x = fuse(Wrong(line)), random(2, 8)

    for _ in range(2):  # nor later
        with pytest.raises(OpCheckError, match="from its reference"):
            op(x)


def test_a_rule_that_keeps_its_definition_is_used():
    x = random(2, 8)

    assert torch.equal(fuse(Wrong("value = value + value"))(x), 2 * x)
