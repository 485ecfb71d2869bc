"""Decode attention in CUDA C++: a ladder of six steps, of which the last is the engine's `cuda` backend.

Compiled for the GPU at first use (build.py). For tensors of a CPU the same sources run in the emulator, slowly: it is
for tests and for readers without a GPU.
"""

from __future__ import annotations

import functools
import math

import torch

from minisgl_kernels.cuda import build, driver, emulator

__all__ = ["STEPS", "paged_decode", "why_unavailable"]

STEPS = {
    1: "decode_1_naive.cu",
    2: "decode_2_tiles.cu",
    3: "decode_3_warps.cu",
    4: "decode_4_vectors.cu",
    5: "decode_5_async.cu",
    6: "decode_6_split.cu",
}
THREADS = 128  # of a block, in every step
DTYPES = {torch.float32: "float", torch.float16: "f16", torch.bfloat16: "bf16"}  # of common.cuh
MOST_SPLITS = 128
KEYS_PER_SPLIT = 128  # fewer are not worth a block
_FALLBACK = "use --attention triton or torch"


def why_unavailable(device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernels do not run for tensors of this device and dtype; empty if they do."""
    if dtype not in DTYPES:
        return f"no CUDA attention in {dtype}; {_FALLBACK}"
    if device.type != "cuda":
        return f"it is for an NVIDIA GPU, and this is {device}; {_FALLBACK}"
    gpu, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability < (7, 5):
        return f"it needs compute capability 7.5, and {gpu} has {capability}; {_FALLBACK}"
    if capability < (8, 0) and dtype == torch.bfloat16:
        return f"{gpu} has no bfloat16: use float16"
    try:
        build.nvrtc_version()
    except (ImportError, RuntimeError) as error:
        return f"cuda-core with NVRTC is not installed ({error}): pip install '.[gpu]', or {_FALLBACK}"
    return ""


def paged_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    kv_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    window: int = 0,
    out: torch.Tensor | None = None,
    *,
    step: int = 6,
    num_splits: int = 0,
    seed: int = 0,
) -> torch.Tensor:
    """Attention of the sequences that have one query, over K and V in pages. Waits for nothing; can be captured.

    Query head h reads KV head h // (heads / kv_heads); scores, softmax and sums are in fp32.

    Args:
        q: [T, heads, head_dim], float32, float16 or bfloat16; head_dim a multiple of 8 up to 256, and the heads of a
            token contiguous.
        keys, values: one layer's [slots, kv_heads, head_dim] in the dtype of q, head_dim contiguous, with at most 16
            query heads to a KV head. Slot s of page p is p · page_size + s.
        page_table: [B, P] int64, each sequence's pages in order; what lies beyond them is not read.
        page_size: 1 or more.
        kv_lens: [B] int64, keys of each sequence, that of the new token included.
        query_starts: [B + 1] int64, where each sequence's queries start in q, and T.
        scale: what q·k is multiplied by, normally head_dim ** -0.5.
        window: how many last keys a query sees, its own among them; 0 is all.
        out: [T, heads, head_dim] contiguous, where the rows of other sequences stay as they are; None makes it.
        step: of the ladder, 1 to 6.
        num_splits: of each sequence, in step 6; 0 chooses by the batch.
        seed: on a CPU, of the order in which the emulator runs threads.

    Returns:
        out.

    Raises:
        ValueError: a shape, dtype, layout or device is not as above.
        CompileError: a source does not compile.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    _check(q, keys, values, page_table, page_size, kv_lens, query_starts, out, step)
    (_, heads, head_dim), kv_heads, batch = q.shape, keys.shape[1], len(kv_lens)
    if batch == 0:
        return out
    if step < 6:
        num_splits = 1
    elif num_splits == 0:
        num_splits = splits_for(batch * kv_heads, page_table.shape[1] * page_size, heads // kv_heads, q.device)
    partials = lse = None
    if num_splits > 1:
        partials = torch.empty(batch, heads, num_splits, head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(batch, heads, num_splits, dtype=torch.float32, device=q.device)
    args = driver.Args(
        q.data_ptr(), keys.data_ptr(), values.data_ptr(), page_table.data_ptr(), kv_lens.data_ptr(),
        query_starts.data_ptr(), out.data_ptr(), partials.data_ptr() if partials is not None else 0,
        lse.data_ptr() if lse is not None else 0, q.stride(0), page_table.stride(0), *keys.stride()[:2],
        *values.stride()[:2], kv_heads, page_size, window, num_splits, scale * math.log2(math.e),
    )  # fmt: skip
    macros = (("DTYPE", DTYPES[q.dtype]), ("GROUP", heads // kv_heads), ("HEAD_DIM", head_dim))
    _launch(STEPS[step], macros, "decode", (heads if step == 1 else kv_heads, num_splits, batch), args, q.device, seed)
    if num_splits > 1:
        _launch(STEPS[step], macros, "combine", (heads, 1, batch), args, q.device, seed)
    return out


def splits_for(pairs: int, longest: int, group: int, device: torch.device) -> int:
    """Into how many chunks step 6 cuts each sequence, so that the blocks of the batch fill the GPU once.

    Args:
        pairs: sequences times KV heads, a block each without splits.
        longest: keys that the page table has room for.
        group: query heads of a KV head: with more, fewer blocks run at once.
    """
    blocks = _multiprocessors(device) * (5 if group <= 2 else 4 if group <= 4 else 2)
    return max(1, min(blocks // pairs, -(-longest // KEYS_PER_SPLIT), MOST_SPLITS))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _launch(
    name: str, macros: tuple[tuple[str, str | int], ...], entry: str, grid: tuple[int, int, int], args: driver.Args,
    device: torch.device, seed: int,
) -> None:  # fmt: skip
    if device.type == "cpu":
        return emulator.launch(name, dict(macros), entry, grid, THREADS, args, seed)
    current = torch.cuda.current_device()
    index = current if device.index is None else device.index
    if index != current:
        with torch.cuda.device(index):
            return _launch(name, macros, entry, grid, args, device, seed)
    kernel = driver.load(name, macros, entry, index)
    return kernel.launch(grid, THREADS, args, torch.cuda.current_stream().cuda_stream)


def _check(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, page_table: torch.Tensor, page_size: int,
    kv_lens: torch.Tensor, query_starts: torch.Tensor, out: torch.Tensor, step: int,
) -> None:  # fmt: skip
    """Raises ValueError for what the kernels cannot do. Reads no tensor's contents."""
    if step not in STEPS:
        raise ValueError(f"step is {step}: the ladder has 1 to 6")
    if q.device.type not in ("cuda", "cpu"):
        raise ValueError(f"no CUDA attention on {q.device}: {_FALLBACK}")
    if q.dtype not in DTYPES or not q.dtype == keys.dtype == values.dtype == out.dtype:
        dtypes = ", ".join(str(t.dtype) for t in (q, keys, values, out))
        raise ValueError(f"q, K, V and out are {dtypes}: all in one of float32, float16, bfloat16, or {_FALLBACK}")
    (_, heads, head_dim), (slots, kv_heads, key_dim) = q.shape, keys.shape
    if key_dim != head_dim or heads % kv_heads or values.shape != keys.shape or out.shape != q.shape:
        shapes = ", ".join(str(list(t.shape)) for t in (q, keys, values, out))
        raise ValueError(f"the shapes of q, K, V and out do not fit: {shapes}")
    if head_dim % 8 or not 8 <= head_dim <= 256:
        raise ValueError(f"head_dim is {head_dim}: a multiple of 8 up to 256, or {_FALLBACK}")
    if heads // kv_heads > 16:
        raise ValueError(f"{heads // kv_heads} query heads share a KV head: at most 16, or {_FALLBACK}")
    batch = len(kv_lens)
    if page_table.dim() != 2 or len(page_table) != batch or query_starts.shape != (batch + 1,) or batch > 65535:
        raise ValueError(f"{batch} kv_lens (at most 65535) need as many rows of pages and one more query_starts")
    for tensor in (page_table, kv_lens, query_starts):
        if tensor.dtype != torch.int64 or (tensor.numel() > 1 and tensor.stride(-1) != 1):
            raise ValueError("page_table, kv_lens and query_starts must be int64, their last dimension contiguous")
    if page_size < 1 or slots > 2**31 - 1:
        raise ValueError(f"{slots} slots in pages of {page_size}: at most 2^31 - 1, in pages of 1 or more")
    per_vector = 16 // q.element_size()
    for name, tensor in (("q", q), ("keys", keys), ("values", values)):
        token, head, element = tensor.stride()
        if element != 1 or token % per_vector or head % per_vector or tensor.data_ptr() % 16:
            raise ValueError(f"{name} must be contiguous in head_dim, with rows at multiples of 16 bytes: {_FALLBACK}")
        if name != "q" and max(token, head) > 2**31 - 1:
            raise ValueError(f"{name} has strides {tensor.stride()}, of more than 2^31 - 1: {_FALLBACK}")
    if (heads > 1 and q.stride(1) != head_dim) or not out.is_contiguous():
        raise ValueError("the heads of a token in q must be contiguous, and so must out")
    if any(t.device != q.device for t in (keys, values, page_table, kv_lens, query_starts, out)):
        raise ValueError(f"all tensors must be on {q.device}, where q is")
