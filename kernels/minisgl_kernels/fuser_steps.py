"""The steps that a fused kernel is made of: each says what it computes in torch, and which lines of Triton do the same.

Knows nothing of kernels, grids or tiles. Every step transforms `value`, a tile in fp32 [BLOCK_M, BLOCK_N], in place.
The lines that it emits find these names around them:

    value          the tile; columns outside of the tensor are 0 before and after every step
    row            [BLOCK_M] int64, the tile's rows
    col            [BLOCK_N] int64, the tile's columns; col_ok: which of them exist
    keep           [BLOCK_M, BLOCK_N], which elements of the tile exist
    rows, columns  the size of the result; inner: the width of x, before a matrix product
    NAME_ptr       the step's own tensor, where NAME is the name that emit is given; NAME_stride: from row to row
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F

from minisgl_kernels.reference import rms_norm


@dataclass(frozen=True)
class Step:
    """What all steps share. A step of your own is a frozen dataclass like those below."""

    operand: ClassVar[str] = ""  # what its tensor is called in the kernel; "": it has none
    out_dtype: ClassVar[torch.dtype | None] = None  # None: the dtype of the chain's input

    def operand_shape(self, rows: int, width: int, columns: int) -> tuple[int, ...]:
        """Its tensor's shape, between a value [rows, width] and, for a product, its result [rows, columns]."""
        return (width,)

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Its tensor's dtype in a chain of this dtype."""
        return dtype

    def draw(self, shape: tuple[int, ...], **where: Any) -> torch.Tensor:
        """A random tensor for the check; where: device, dtype and generator."""
        return torch.randn(shape, **where)

    def reference(self, value: torch.Tensor, *tensor: torch.Tensor) -> torch.Tensor:
        """The definition, in torch."""
        raise NotImplementedError

    def emit(self, name: str) -> list[str]:
        """Lines of Triton that turn `value` into the step's result."""
        raise NotImplementedError


@dataclass(frozen=True)
class Norm(Step):
    """RMSNorm with weight [width]. The root mean square needs the whole row."""

    eps: float
    operand: ClassVar[str] = "norm_weight"

    def reference(self, value: torch.Tensor, *tensor: torch.Tensor) -> torch.Tensor:
        return rms_norm(value, tensor[0], self.eps)

    def emit(self, name: str) -> list[str]:
        return [
            f"inverse_rms = tl.rsqrt(tl.sum(value * value, axis=1) / columns + {self.eps!r})  # [BLOCK_M]",
            f"{name} = tl.load({name}_ptr + col, mask=col_ok, other=0.0).to(tl.float32)",
            f"value = value * inverse_rms[:, None] * {name}[None, :]",
        ]

    def emit_in_product(self, name: str) -> list[str]:
        """The part that a product's loop does: a tile sees a piece of its rows, and adds up the piece's squares.

        In fp16, x · weight must stay below 65,504, for the product takes it before the row's factor has made it small.
        """
        return [
            "squares += tl.sum(value * value, axis=1)",
            f"{name} = tl.load({name}_ptr + col, mask=col_ok, other=0.0).to(tl.float32)",
            f"value = value * {name}[None, :]",
        ]

    def emit_after_product(self) -> list[str]:
        """What is left once the loop has seen whole rows: one factor a row, which can follow the product."""
        return [f"value = value * tl.rsqrt(squares / inner + {self.eps!r})[:, None]"]


@dataclass(frozen=True)
class Matmul(Step):
    """Product with weight [columns, width], as torch stores a linear layer's. The one step that changes the width."""

    operand: ClassVar[str] = "weight"

    def operand_shape(self, rows: int, width: int, columns: int) -> tuple[int, ...]:
        return (columns, width)

    def draw(self, shape: tuple[int, ...], **where: Any) -> torch.Tensor:
        return torch.randn(shape, **where) * shape[1] ** -0.5  # the result is as large as the input

    def reference(self, value: torch.Tensor, *tensor: torch.Tensor) -> torch.Tensor:
        return F.linear(value, *tensor)

    def emit(self, name: str) -> list[str]:
        return [  # out_col: the columns of the result
            f"{name} = tl.load({name}_ptr + out_col[None, :] * {name}_stride + col[:, None],",
            f"{' ' * len(name)}           mask=col_ok[:, None] & (out_col < columns)[None, :], other=0.0)",
            f'product = tl.dot(value.to({name}.dtype), {name}, product, input_precision="ieee")',
        ]


@dataclass(frozen=True)
class Bias(Step):
    """Add bias [width] to every row."""

    operand: ClassVar[str] = "bias"

    def reference(self, value: torch.Tensor, *tensor: torch.Tensor) -> torch.Tensor:
        return value + tensor[0]

    def emit(self, name: str) -> list[str]:
        return [
            f"{name} = tl.load({name}_ptr + col, mask=col_ok, other=0.0).to(tl.float32)",
            f"value = value + {name}[None, :]",
        ]


@dataclass(frozen=True)
class Activation(Step):
    """An activation function; "gelu" is the one with erf."""

    kind: Literal["silu", "gelu", "relu"]

    def __post_init__(self) -> None:
        if self.kind not in ("silu", "gelu", "relu"):
            raise ValueError(f"activation {self.kind!r} is unknown: use silu, gelu or relu")

    def reference(self, value: torch.Tensor, *tensor: torch.Tensor) -> torch.Tensor:
        functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}
        return functions[self.kind](value)

    def emit(self, name: str) -> list[str]:
        formula = {
            "silu": "value * tl.sigmoid(value)",
            "gelu": f"0.5 * value * (1.0 + tl.erf(value * {0.5**0.5!r}))",
            "relu": "tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)",  # a NaN must be seen, not become 0
        }[self.kind]
        return [f"value = {formula}"]


@dataclass(frozen=True)
class Residual(Step):
    """Add a tensor of the value's own shape."""

    operand: ClassVar[str] = "residual"

    def operand_shape(self, rows: int, width: int, columns: int) -> tuple[int, ...]:
        return (rows, width)

    def reference(self, value: torch.Tensor, *tensor: torch.Tensor) -> torch.Tensor:
        return value + tensor[0]

    def emit(self, name: str) -> list[str]:
        return [
            f"{name} = tl.load({name}_ptr + row[:, None] * {name}_stride + col[None, :], mask=keep, other=0.0)",
            f"value = value + {name}.to(tl.float32)",
        ]


@dataclass(frozen=True)
class Quantise(Step):
    """Divide by a scale in fp32, [1] for the tensor or [rows], round to nearest (ties to even), saturate.

    "fp8" is e4m3 without infinities (torch.float8_e4m3fn), which GPUs have from sm_89. There a NaN stays NaN; int8 has
    none.
    """

    kind: Literal["int8", "fp8"]
    per: Literal["tensor", "row"] = "tensor"
    operand: ClassVar[str] = "scale"

    def __post_init__(self) -> None:
        if self.kind not in ("int8", "fp8") or self.per not in ("tensor", "row"):
            raise ValueError(f"quantise({self.kind!r}, {self.per!r}): use int8 or fp8, per tensor or row")

    @property
    def out_dtype(self) -> torch.dtype:  # type: ignore[override]
        return torch.int8 if self.kind == "int8" else torch.float8_e4m3fn

    def operand_shape(self, rows: int, width: int, columns: int) -> tuple[int, ...]:
        return (rows if self.per == "row" else 1,)

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def draw(self, shape: tuple[int, ...], **where: Any) -> torch.Tensor:
        return 0.01 + 0.02 * torch.rand(shape, **where)  # of values around 1, some saturate

    def reference(self, value: torch.Tensor, *tensor: torch.Tensor) -> torch.Tensor:
        scaled = value.to(torch.promote_types(value.dtype, torch.float32)) / tensor[0].unsqueeze(-1)
        if self.kind == "int8":
            return scaled.round().clamp(-128, 127).to(torch.int8)
        return scaled.clamp(-448, 448).to(torch.float8_e4m3fn)

    def emit(self, name: str) -> list[str]:
        index = "row" if self.per == "row" else "row * 0"
        lines = [
            f"{name} = tl.load({name}_ptr + {index}, mask=row < rows, other=1.0)  # [BLOCK_M]",
            f"value = tl.div_rn(value, tl.broadcast_to({name}[:, None], value.shape))",
        ]
        if self.kind == "int8":
            return [
                *lines,
                "value = tl.clamp(value, -128.0, 127.0)",
                "value = (value + 12582912.0) - 12582912.0  # next to 1.5 * 2**23 fp32 has steps of 1: this rounds",
            ]
        return [
            *lines,
            "value = tl.clamp(value, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)",
            "# Rounded here and not by the conversion, which the interpreter does otherwise: to 3 bits of mantissa, or",
            "# below the smallest normal number to steps of 2**-9, which fp32 has next to 1.5 * 2**14.",
            "bits = value.to(tl.int32, bitcast=True)",
            "bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000",
            "small = (value + 24576.0) - 24576.0",
            "rounded = tl.where(tl.abs(value) < 0.015625, small, bits.to(tl.float32, bitcast=True))",
            "value = tl.where(value == value, rounded, value)  # the bits of a NaN may overflow",
        ]
