"""Writes one Triton kernel for a chain of steps, so that nothing between them goes through memory.

    op = fuse(norm(1e-6), matmul(), activation("silu"))
    y = op(x, norm_weight, weight)  # the tensors in the order of the steps

Without a product, a program does some rows of the chain. With one it is a tiled matrix product: the steps before it
work on x's tiles as they are loaded, the steps after it on the accumulator before it is stored. An RMSNorm fits in
front, although no tile sees a whole row: its factor is one number a row, so it can wait until the product is done.

What a step does stands in `fuser_steps`, how their lines become a kernel in `fuser_source`. Here the kernel is kept (as
a file in the kernels' cache folder), checked against the same steps in torch before its first use (`registry`), and
launched. The idea of generated epilogues: CUTLASS's visitor trees, torch.compile's templates.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import minisgl_kernels
from minisgl_kernels.cpu.build import BuildError, cache_folder
from minisgl_kernels.fuser_source import UnsupportedChain, generate
from minisgl_kernels.fuser_steps import Activation, Bias, Matmul, Norm, Quantise, Residual, Step
from minisgl_kernels.registry import TOLERANCE, Shape, register_op

__all__ = ["FusedOp", "UnsupportedChain", "activation", "bias", "fuse", "matmul", "norm", "quantise", "residual"]

norm, matmul, bias, activation, residual, quantise = Norm, Matmul, Bias, Activation, Residual, Quantise

MAX_ROW = 16384  # columns that one program can hold, for a norm without a product
# What is checked: each tile that `tile_for` can choose, with sizes that are a multiple of 16 (for which Triton compiles
# another kernel) and sizes that are not.
ROW_SHAPES: tuple[Shape, ...] = (
    {"rows": 1, "columns": 33},
    {"rows": 7, "columns": 1000},
    {"rows": 260, "columns": 64},
)
PRODUCT_SHAPES: tuple[Shape, ...] = (
    {"rows": 1, "inner": 72, "columns": 40},
    {"rows": 16, "inner": 256, "columns": 64},
    {"rows": 37, "inner": 200, "columns": 136},
    {"rows": 256, "inner": 128, "columns": 256},
)
# ‖out - reference‖ / ‖reference‖: where values differ by a rounding, some fall on the other side of a step.
QUANTISED_TOLERANCE = {torch.float32: 3e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Tile:
    """What one program computes, and how."""

    rows: int
    columns: int
    inner: int  # of a product: how far the loop moves; 0 without one
    num_warps: int
    num_stages: int  # tiles in flight


@dataclass(frozen=True)
class Traffic:
    """Bytes that must be moved at least: each tensor read or written once by each kernel that needs it."""

    fused_bytes: int
    composed_bytes: int  # one kernel a step, each at its own minimum

    @property
    def saved_bytes(self) -> int:
        return self.composed_bytes - self.fused_bytes


@functools.cache
def fuse(*steps: Step) -> FusedOp:
    """The op that does these steps in one kernel. The same steps give the same op, which is generated once.

    Raises:
        UnsupportedChain: they cannot be one kernel, and why.
    """
    return FusedOp(steps)


class FusedOp:
    """A generated kernel: call it with x [..., width] and the steps' tensors, in the steps' order."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self.steps = steps
        self.source = generate(steps)
        self.name = " + ".join(repr(step).lower() for step in steps)
        self._has_product = any(isinstance(step, Matmul) for step in steps)
        self._whole_rows = any(isinstance(step, Norm) for step in steps) and not self._has_product
        self._out_dtype = steps[-1].out_dtype
        self._operands = [step for step in steps if step.operand]
        self._checked_call = register_op(
            self.name,
            reference=self.reference,
            shapes=PRODUCT_SHAPES if self._has_product else ROW_SHAPES,
            inputs=self.random_inputs,
            tolerance=QUANTISED_TOLERANCE if self._out_dtype else TOLERANCE,
        )(self._launch)

    def __call__(self, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Run the kernel; on the first call with this device and dtype, after its check.

        Returns:
            [..., width], or [..., columns] after a product; of x's dtype unless the chain quantises.

        Raises:
            OpCheckError: the kernel differs from the composed reference, and is not used.
            ValueError: the tensors do not fit the steps, or no kernel runs on this device and dtype.
        """
        return self._checked_call(x, *tensors)

    def reference(self, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """The same steps in torch, one after the other; it runs everywhere."""
        remaining = iter(tensors)
        for step in self.steps:
            x = step.reference(x, *([next(remaining)] if step.operand else []))
        return x

    def random_inputs(
        self, shape: Shape, device: torch.device, dtype: torch.dtype, generator: torch.Generator
    ) -> list[torch.Tensor]:
        """Arguments for a check: x, then the steps' tensors."""
        where: Any = {"device": device, "generator": generator}
        width = shape.get("inner", shape["columns"])
        # Rows of very different size: among equal rows a norm that does nothing would hardly show.
        size = 2.0 ** (12 * torch.rand((shape["rows"], 1), **where) - 10)
        x = torch.randn((shape["rows"], width), **where) * size
        shapes = self._operand_shapes(shape["rows"], width, shape["columns"])
        drawn = [step.draw(wanted, **where).to(step.operand_dtype(dtype)) for step, wanted in self._zip(shapes)]
        return [x.to(dtype), *drawn]

    def bytes(self, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> Traffic:
        """Bytes for x [rows, columns], or with a product x [rows, inner] and result [rows, columns]."""
        rows, columns = shape["rows"], shape["columns"]
        width = shape.get("inner", columns)
        operands = [
            math.prod(wanted) * step.operand_dtype(dtype).itemsize
            for step, wanted in self._zip(self._operand_shapes(rows, width, columns))
        ]
        values = [rows * width * dtype.itemsize]  # x, then the result of each step
        for step in self.steps:
            width = columns if isinstance(step, Matmul) else width
            values.append(rows * width * (step.out_dtype or dtype).itemsize)
        written_and_read = 2 * sum(values[1:-1])
        fused = values[0] + sum(operands) + values[-1]
        return Traffic(fused_bytes=fused, composed_bytes=fused + written_and_read)

    def report(self, *shapes: Shape, dtype: torch.dtype = torch.bfloat16) -> None:
        """Print what fusing saves, one line a shape."""
        print(f"{self.name}, {dtype}\n{'fused MB':>10} {'composed MB':>12} {'saved':>6}  shape")
        for shape in shapes:
            moved = self.bytes(shape, dtype)
            saved = moved.saved_bytes / moved.composed_bytes
            print(f"{moved.fused_bytes / 1e6:10.2f} {moved.composed_bytes / 1e6:12.2f} {saved:6.0%}  {dict(shape)}")

    @functools.cached_property
    def kernel(self) -> Any:
        """The Triton function, from the file that holds `source`."""
        return _load(self.source).fused_kernel

    def _launch(self, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        if reason := _why_not(x.device, x.dtype, self._out_dtype):
            raise ValueError(f"{self.name} cannot run on {x.device} in {x.dtype}: {reason}; use its .reference")
        if len(tensors) != len(self._operands):
            raise ValueError(
                f"{self.name} takes x and {[s.operand for s in self._operands]}, got {len(tensors)} tensors"
            )
        flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        rows, width = flat.shape
        columns = width
        if self._has_product:
            columns = next(t.shape[0] for s, t in zip(self._operands, tensors, strict=True) if isinstance(s, Matmul))
        if self._whole_rows and columns > MAX_ROW:
            raise ValueError(
                f"a norm over {columns} columns does not fit a program ({MAX_ROW}): use {self.name}.reference"
            )
        if flat.stride(-1) != 1:
            raise ValueError(f"x must have contiguous rows, its strides are {x.stride()}")
        pointers: list[Any] = [flat, flat.stride(0)]
        for (step, wanted), tensor in zip(self._zip(self._operand_shapes(rows, width, columns)), tensors, strict=True):
            tensor = tensor.reshape(-1, tensor.shape[-1]) if len(wanted) == 2 and tensor.dim() != 2 else tensor
            _expect(step, tensor, wanted, x)
            pointers += [tensor, tensor.stride(0)] if len(wanted) == 2 else [tensor]
        out = x.new_empty((*x.shape[:-1], columns), dtype=self._out_dtype or x.dtype)
        if rows == 0:
            return out

        tile = tile_for(rows, columns, self._has_product, self._whole_rows, x.dtype)
        programs = math.ceil(rows / tile.rows) * math.ceil(columns / tile.columns)
        sizes = [rows, width, columns] if self._has_product else [rows, columns]
        blocks = [tile.rows, tile.columns, tile.inner] if self._has_product else [tile.rows, tile.columns]
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            self.kernel[(programs,)](
                *pointers, out, *sizes, *blocks, num_warps=tile.num_warps, num_stages=tile.num_stages
            )
        return out

    def _operand_shapes(self, rows: int, width: int, columns: int) -> list[tuple[int, ...]]:
        """The shapes of the steps' tensors, for x [rows, width] and a result [rows, columns]."""
        shapes = []
        for step in self.steps:
            if step.operand:
                shapes.append(step.operand_shape(rows, width, columns))
            width = columns if isinstance(step, Matmul) else width
        return shapes

    def _zip(self, shapes: list[tuple[int, ...]]) -> Iterator[tuple[Step, tuple[int, ...]]]:
        return zip(self._operands, shapes, strict=True)


def tile_for(rows: int, columns: int, product: bool, whole_rows: bool, dtype: torch.dtype) -> Tile:
    """The tile for a shape, by rule: nothing is tried out at run time.

    With few rows a product is bound by reading its weight, so many narrow tiles read it at once.
    """
    if product:
        if rows <= 16:
            return Tile(16, 32, 128, num_warps=4, num_stages=4)
        if rows <= 64 or dtype == torch.float32:  # fp32 runs without matrix units, and needs more registers
            return Tile(64, 64, 64 if dtype.itemsize == 2 else 32, num_warps=4, num_stages=3)
        return Tile(128, 128, 64, num_warps=8, num_stages=3)
    width = 1 << (columns - 1).bit_length()  # the next power of two
    width = width if whole_rows else min(width, 1024)
    height = 1 if rows < 256 else max(1, 4096 // width)  # few rows: one each, to occupy more of the GPU
    return Tile(height, width, 0, num_warps=min(16, max(1, height * width // 512)), num_stages=1)


def _expect(step: Step, tensor: torch.Tensor, shape: tuple[int, ...], x: torch.Tensor) -> None:
    """Raise ValueError unless the tensor is what the step needs beside x."""
    dtype = step.operand_dtype(x.dtype)
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != x.device:
        got = f"{list(tensor.shape)} in {tensor.dtype} on {tensor.device}"
        raise ValueError(f"{step.operand} must be {list(shape)} in {dtype} on {x.device}, not {got}")
    if tensor.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(f"{step.operand} must have contiguous rows, its strides are {tensor.stride()}")


@functools.cache
def _why_not(device: torch.device, dtype: torch.dtype, out_dtype: torch.dtype | None) -> str:
    """Why no kernel runs on this device and dtype; empty if one does."""
    reason = minisgl_kernels.why_not("triton", device, dtype)
    fp8_on_gpu = out_dtype == torch.float8_e4m3fn and device.type == "cuda"
    if not reason and fp8_on_gpu and torch.cuda.get_device_capability(device) < (8, 9):
        return "fp8 needs a GPU of sm_89 or newer"
    return reason


def _load(source: str) -> Any:
    """The module made of this source, which Triton reads from a file."""
    path = cache_folder() / f"fused_{hashlib.sha256(source.encode()).hexdigest()[:16]}.py"
    try:
        if not path.exists() or path.read_text() != source:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as temporary:  # renamed: two processes may write at once
                (Path(temporary) / path.name).write_text(source)
                (Path(temporary) / path.name).replace(path)
    except OSError as error:
        raise BuildError(f"cannot write {path}: {error}; choose another folder with MINISGL_HOME") from error
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
