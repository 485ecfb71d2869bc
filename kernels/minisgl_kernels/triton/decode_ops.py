"""The ops of minisgl_kernels.triton, with products of our own for few tokens in place of torch's (chapter 8)."""

from minisgl_kernels.triton import *  # noqa: F403
from minisgl_kernels.triton.products import linear, linear_silu_mul  # type: ignore[assignment]  # noqa: F401
