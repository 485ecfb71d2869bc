"""Kernels in C++ for a CPU, compiled at first use (build.py); torch does what they cannot.

Why not torch's own product: for the few rows of a decode step it reads the weights at half the memory's rate or less,
and in bf16 on a processor without bf16 arithmetic far slower.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from minisgl_kernels import reference
from minisgl_kernels.cpu.build import BuildError, build_library
from minisgl_kernels.reference import decode_rows, embedding, keep_tokens, rope_angles, sample

__all__ = ["apply_rope", "available", "linear", "max_rows", "paged_attention", "rms_norm", "silu_and_mul"]
__all__ += ["add_rms_norm", "decode_rows", "embedding", "keep_tokens", "linear_silu_mul", "rope_angles", "sample"]
__all__ += ["why_unavailable"]

_PAIRS = {  # dtypes of the input, and of the weights or the KV cache
    (torch.float32, torch.float32): "f32_f32",
    (torch.float32, torch.bfloat16): "f32_bf16",
    (torch.bfloat16, torch.bfloat16): "bf16_bf16",
}
_ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES = {
    "linear": [_ADDRESS] * 4 + [_SIZE] * 3 + [ctypes.c_int],
    "attention": [_ADDRESS] * 7 + [_SIZE] * 11 + [ctypes.c_float, ctypes.c_int],
    "rms_norm": [_ADDRESS] * 3 + [_SIZE] * 2 + [ctypes.c_float],
    "apply_rope": [_ADDRESS] * 4 + [_SIZE] * 4,
    "silu_and_mul": [_ADDRESS] * 2 + [_SIZE] * 2,
}
MOST_ELEMENTS = 64 * 1024
Kernels = dict[tuple[torch.dtype, torch.dtype], Callable[..., None]]


def available() -> bool:
    """Whether the kernels run here; the first call compiles them (some seconds, once a machine)."""
    return not why_unavailable()


def why_unavailable() -> str:
    """Why the kernels do not run here, the compiler's complaint included; empty if they do."""
    library = _library()
    return library if isinstance(library, str) else ""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b as torch.nn.functional.linear gives it, but at the memory's rate for few rows.

    Sums are in fp32, each in one order whatever the number of rows and threads: a row's result is the same bits alone
    and in a batch of up to max_rows(…) rows. Beyond these, on another device, for other dtypes, weights
    that are not contiguous, or where a gradient is asked for, this is torch's product.

    Args:
        x: [..., in_features], float32 or bfloat16.
        weight: [out_features, in_features] in the dtype of x, or bfloat16 for a float32 x: the weights are then
            exact, and half as many bytes are read.
        bias: [out_features] in the dtype of weight.

    Returns:
        [..., out_features] in the dtype of x.

    Raises:
        RuntimeError: shapes or dtypes do not fit, in torch's words.
    """
    kernel = _kernels("linear").get((x.dtype, weight.dtype))
    if kernel is None or not _fits(x, weight, bias):
        return _torch_linear(x, weight, bias)
    out_features, in_features = weight.shape
    rows = x.numel() // in_features
    if rows > max_rows(x.dtype, weight.dtype):
        return _torch_linear(x, weight, bias)
    x = x.contiguous()
    y = x.new_empty(rows, out_features)
    bias_address = None if bias is None else bias.data_ptr()
    threads = torch.get_num_threads()
    kernel(x.data_ptr(), weight.data_ptr(), bias_address, y.data_ptr(), rows, in_features, out_features, threads)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], out_features)


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    kv_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention of B sequences' new tokens over paged K and V, read where they lie.

    Query head h reads KV head h // (heads / kv_heads). Of a sequence with n queries and S keys, query i is the token
    at S - n + i. Scores, softmax and sums are in fp32. A token's result is the same bits whatever the page size, the
    batch, the chunk it comes in and the number of threads. Without queries a sequence costs nothing.

    Args:
        q: [T, heads, head_dim], float32 or bfloat16.
        keys, values: one layer's [slots, kv_heads, head_dim] of equal dtype, that of q, or bfloat16 for a float32 q;
            head_dim contiguous. Slot s of page p is p · page_size + s.
        page_table: [B, P] int64, each sequence's pages in order; what lies beyond them is not read.
        kv_lens: [B] int64, keys of each sequence, those of the new tokens included: n ≤ S ≤ P · page_size.
        query_starts: [B + 1] int64, where each sequence's queries start in q, and T.
        scale: what q·k is multiplied by, normally head_dim ** -0.5.

    Returns:
        [T, heads, head_dim] in the dtype of q.

    Raises:
        RuntimeError: the kernels are not available here; see why_unavailable.
        ValueError: a dtype, shape or layout is not as above. The numbers in the last three tensors are not checked.
    """
    kernel = _kernels("attention").get((q.dtype, keys.dtype))
    if kernel is None:
        if not available():
            raise RuntimeError(f"there is no C++ attention here: {why_unavailable()}")
        raise ValueError(f"no C++ attention for q of {q.dtype} and K of {keys.dtype}")
    (tokens, heads, head_dim), (_, kv_heads, key_dim), batch = q.shape, keys.shape, len(page_table)
    if key_dim != head_dim or heads % kv_heads or values.shape != keys.shape or values.dtype != keys.dtype:
        raise ValueError(f"q {list(q.shape)}, K {list(keys.shape)} and V {list(values.shape)} do not fit")
    if kv_lens.shape != (batch,) or query_starts.shape != (batch + 1,):
        raise ValueError(f"{batch} rows of pages need as many kv_lens and one more query_starts")
    for tensor in (page_table, kv_lens, query_starts):
        if tensor.dtype != torch.int64 or tensor.stride(-1) != 1:
            raise ValueError("page_table, kv_lens and query_starts must be int64, their last dimension contiguous")
    (key_slot, key_head, key_element), (value_slot, value_head, value_element) = keys.stride(), values.stride()
    if key_element != 1 or value_element != 1:
        raise ValueError("K and V must be contiguous in head_dim")
    q_stride, *rest = q.stride()
    if rest != [head_dim, 1]:
        q, q_stride = q.contiguous(), heads * head_dim
    out = q.new_empty(tokens, heads, head_dim)
    addresses = [tensor.data_ptr() for tensor in (q, keys, values, page_table, kv_lens, query_starts, out)]
    sizes = (batch, heads, kv_heads, head_dim, page_table.stride(0), page_size, q_stride)
    kernel(*addresses, *sizes, key_slot, key_head, value_slot, value_head, scale, torch.get_num_threads())
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See reference.rms_norm, which computes what does not fit here."""
    kernel = _small("rms_norm", x)
    if kernel is None or not x.is_contiguous():
        return reference.rms_norm(x, weight, eps)
    out = torch.empty_like(x)
    kernel(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // x.shape[-1], x.shape[-1], eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.add_rms_norm."""
    total = x if residual is None else residual + x
    return rms_norm(total, weight, eps), total


def linear_silu_mul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """See reference.linear_silu_mul."""
    return silu_and_mul(linear(x, weight, bias))


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See reference.apply_rope. x [T, heads, head_dim] may be a part of wider rows."""
    kernel = _small("apply_rope", x)
    tokens, heads, head_dim = x.shape
    if kernel is None or x.stride()[1:] != (head_dim, 1):
        return reference.apply_rope(x, cos, sin)
    out = x.new_empty(x.shape)
    addresses = (x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr())
    kernel(*addresses, tokens, heads, head_dim // 2, x.stride(0))
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See reference.silu_and_mul."""
    kernel = _small("silu_and_mul", gate_up)
    if kernel is None or not gate_up.is_contiguous():
        return reference.silu_and_mul(gate_up)
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    kernel(gate_up.data_ptr(), out.data_ptr(), out.numel() // width, width)
    return out


def _small(op: str, x: torch.Tensor) -> Callable[..., None] | None:
    """The kernel of an elementwise op for few numbers; for many, torch uses all threads and passes count little."""
    if not x.is_cpu or not 0 < x.numel() <= MOST_ELEMENTS or (torch.is_grad_enabled() and x.requires_grad):
        return None
    return _kernels(op).get((x.dtype, x.dtype))


@functools.cache
def max_rows(x_dtype: torch.dtype, weight_dtype: torch.dtype) -> int:
    """The most rows for which the kernels are used, for these dtypes: with more, torch's product is the faster one."""
    if weight_dtype == torch.float32:
        return 64  # measured with AVX2: MKL draws level between 64 and 96 rows
    if x_dtype == torch.bfloat16 and getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)():
        return 8  # measured on a Xeon with AMX: torch multiplies in bf16 there, and draws level at 8 rows
    return 2**62  # measured with AVX2: torch's bf16 is slower at any number, and so is a conversion to fp32 before MKL


def _fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the kernels can do it: what they cannot, and what is wrong, is torch's."""
    if not (x.is_cpu and weight.is_cpu and weight.dim() == 2 and weight.is_contiguous()):
        return False
    if x.dim() == 0 or x.numel() == 0 or weight.numel() == 0 or x.shape[-1] != weight.shape[1]:
        return False
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return False
    if bias is None:
        return True
    return bias.is_cpu and bias.dtype == weight.dtype and bias.shape == weight.shape[:1] and bias.is_contiguous()


def _torch_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.dtype == torch.float32 and weight.dtype == torch.bfloat16:
        return F.linear(x, weight.float(), None if bias is None else bias.float())
    return F.linear(x, weight, bias)


@functools.cache
def _kernels(op: str) -> Kernels:
    library = _library()
    if isinstance(library, str):
        return {}
    return {pair: getattr(library, f"{op}_{suffix}") for pair, suffix in _pairs(op).items()}


def _pairs(op: str) -> dict[tuple[torch.dtype, torch.dtype], str]:
    """The dtypes that an op takes; those with weights also take bf16 ones beside an fp32 input."""
    return _PAIRS if op in ("linear", "attention") else {p: suffix for p, suffix in _PAIRS.items() if p[0] == p[1]}


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The kernels, or why there are none."""
    try:
        return load(build_library())
    except (BuildError, OSError) as error:
        return str(error)


def load(path: Path) -> ctypes.CDLL:
    """Open a built library and give it the threads of torch.

    torch brings an OpenMP runtime along. A library linked against the system's would start a second set of threads, and
    the two, which spin while they wait, would fight for the cores. So ours is linked against none: it gets the three
    functions that it needs from the runtime that torch has loaded, and without one it computes on one thread.
    """
    library = ctypes.CDLL(str(path))
    for op, signature in _SIGNATURES.items():
        for suffix in _pairs(op).values():
            kernel = getattr(library, f"{op}_{suffix}")
            kernel.argtypes, kernel.restype = signature, None
    library.use_runtime.restype = None
    runtime = _torch_runtime()
    if runtime is not None:
        library.use_runtime(runtime.GOMP_parallel, runtime.omp_get_thread_num, runtime.omp_get_num_threads)
    return library


def _torch_runtime() -> ctypes.CDLL | None:
    """A handle through which torch's OpenMP functions are found: the library's dependencies are searched as well."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (folder / name).exists():
            handle = ctypes.CDLL(str(folder / name))
            return handle if hasattr(handle, "GOMP_parallel") else None
    return None
