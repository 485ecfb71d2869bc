"""A decode step of a whole model in one persistent kernel: see mega.cu.

The idea is Hazy Research's megakernel ("Look Ma, No Bubbles", Spector et al., 2025); Mirage (Jia et al., 2025) compiles
models to such kernels. Here the phases are written by hand, for decoders of Llama's form. For tensors of a CPU the same
sources run in the emulator: for tests.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import NamedTuple

import torch

from minisgl_kernels.cuda import DTYPES, build, driver, emulator

SOURCE = "mega.cu"
MOST_ROWS = 4
MOST_SPLITS = 32  # one a lane
WARPS = 8  # that compute, see mega_stream.cuh; one more fetches weights
MOST_DEPTH = 24  # pieces of 8 rows that are in shared memory or on their way
TOGETHER = 6  # groups of rows whose sums are added up at once
ROWS, CHUNK = 8, 64
_POINTERS = (
    "layers", "embedding", "final_norm", "head", "input_ids", "positions", "cos", "sin", "page_table", "keys", "values",
    "input", "qkv", "attended", "middle", "activation", "partials", "lse", "launches", "logits", "clocks",
)  # fmt: skip
_INTS = ("key_slot", "key_head", "value_slot", "value_head", "batch", "num_layers", "vocab", "page_size", "splits")


class Step(ctypes.Structure):
    """The struct of the same name in mega_step.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("layer_stride", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in _INTS),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


class LayerWeights(NamedTuple):
    """One layer's weights [outputs, inputs], as minisgl's modules hold them; q_norm and k_norm are None without."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def why_unavailable(
    device: torch.device, dtype: torch.dtype, hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int,
    vocab: int,
) -> str:  # fmt: skip
    """Why no step of such a model can run as one kernel for this device and dtype; empty if it can."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the megakernel is for float16 and bfloat16, not {dtype}"
    for name, size, unit in (
        ("hidden_size", hidden, CHUNK), ("intermediate_size", intermediate, CHUNK), ("vocab_size", vocab, 2),
        ("heads · head_dim", heads * head_dim, CHUNK), ("head_dim", head_dim, 8),
    ):  # fmt: skip
        if size % unit:
            return f"the megakernel needs {name} to be a multiple of {unit}, and it is {size}"
    if heads % kv_heads or heads // kv_heads > 8 or head_dim > 128:
        return f"the megakernel cannot share {kv_heads} KV heads of {head_dim} among {heads} heads"
    if device.type != "cuda":
        return f"the megakernel is for an NVIDIA GPU, and this is {device}"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return f"the megakernel needs compute capability 9.0, and {torch.cuda.get_device_name(device)} has less"
    try:
        build.nvrtc_version()
    except (ImportError, RuntimeError) as error:
        return f"cuda-core with NVRTC is not installed ({error}): pip install '.[gpu]'"
    return ""


class DecodeStep:
    """One token of each of up to 4 sequences: ids in, logits out, and K and V of the tokens in their pages.

    Holds the addresses of the weights and what the phases hand to each other. So two steps of one object must not run
    at the same time, and no other kernel that waits for this one may.

    Args:
        layers: each layer's weights; contiguous, of one dtype and device.
        embedding: [vocab, hidden].
        final_norm: [hidden].
        head: [vocab, hidden]; the embedding where they are tied.
        kv: the pool [layers, 2, pages, page_size, kv_heads, head_dim].
        eps: of all norms.
        blocks: of the grid, all of which must fit the GPU at once; 0: one a multiprocessor. Fewer for tiny models.
        macros: to define in the source, for experiments.
        seed: on a CPU, of the order in which the emulator runs threads.

    Raises:
        ValueError: a shape, dtype or layout is not as above.
    """

    def __init__(
        self, layers: list[LayerWeights], embedding: torch.Tensor, final_norm: torch.Tensor, head: torch.Tensor,
        kv: torch.Tensor, eps: float, *, blocks: int = 0, macros: dict[str, int] | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self.layers, self.embedding, self.final_norm, self.head, self.kv = layers, embedding, final_norm, head, kv
        self.eps, self.seed, self.extra = eps, seed, macros or {}
        _, _, _, self.page_size, self.kv_heads, self.head_dim = kv.shape
        self.hidden, self.intermediate = embedding.shape[1], layers[0].down.shape[1]
        self.heads, self.vocab = layers[0].o.shape[1] // self.head_dim, len(head)
        self.device, self.dtype = embedding.device, embedding.dtype
        self._check()
        blocks = blocks or _properties(self.device).multi_processor_count
        self.blocks = min(blocks, self.hidden // 2, self.intermediate // 2)  # each has two outputs of a phase or more
        self.warps = self.extra.get("BLOCK_WARPS", WARPS)
        addresses = [[0 if weight is None else weight.data_ptr() for weight in layer] for layer in layers]
        self.table = torch.tensor(addresses, dtype=torch.int64, device=self.device)

        def words(count: int) -> torch.Tensor:  # of 8 bytes: zeros are no layer's
            return torch.zeros(count, dtype=torch.int64, device=self.device)

        self.width = (self.heads + 2 * self.kv_heads) * self.head_dim
        sizes = self.hidden, self.width, self.heads * self.head_dim, self.hidden, self.intermediate
        self.between = [words(MOST_ROWS * size // 2) for size in sizes]
        parts = self.blocks * (self.heads // self.kv_heads)
        self.partials, self.lse = words(parts * self.head_dim), words(2 * parts)
        self.launches = torch.zeros(self.blocks, dtype=torch.int32, device=self.device)
        self.clocks = words(self.blocks * (11 * len(layers) + 3) if "CLOCKS" in self.extra else 1)

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, page_table: torch.Tensor, cos: torch.Tensor,
        sin: torch.Tensor, logits: torch.Tensor | None = None, splits: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        """Launch a step on the current stream; waits for nothing and can be captured in a graph.

        Args:
            input_ids, positions: [B] int64, B ≤ 4: the tokens, and their places in their sequences.
            page_table: [B, P] int64, each sequence's pages in order, that of the new token included.
            cos, sin: [B, head_dim / 2], of the positions, in the dtype of the weights, contiguous.
            logits: [B, vocab] contiguous; None makes it.
            splits: into how many parts the keys of a row and KV head are cut; 0 fills the grid.

        Returns:
            logits.
        """
        batch = len(input_ids)
        if not 1 <= batch <= MOST_ROWS:
            raise ValueError(f"{batch} rows: the megakernel takes 1 to {MOST_ROWS}")
        if batch * self.kv_heads > self.blocks:
            raise ValueError(
                f"{batch} rows of {self.kv_heads} KV heads need as many blocks, and {self.blocks} are there"
            )
        for tensor, shape in ((positions, (batch,)), (page_table, (batch, page_table.shape[-1]))):
            if tensor.shape != shape or tensor.dtype != torch.int64 or (tensor.numel() > 1 and tensor.stride(-1) != 1):
                raise ValueError(f"positions and page_table must be int64, with {batch} rows")
        for tensor in (cos, sin):
            if tensor.shape != (batch, self.head_dim // 2) or tensor.dtype != self.dtype or not tensor.is_contiguous():
                raise ValueError(f"cos and sin must be [{batch}, {self.head_dim // 2}] in {self.dtype}, contiguous")
        if logits is None:
            logits = torch.empty(batch, self.vocab, dtype=self.dtype, device=self.device)
        most = min(MOST_SPLITS, self.blocks // (batch * self.kv_heads))
        splits = min(splits or most, most)
        tensors = (
            self.table, self.embedding, self.final_norm, self.head, input_ids, positions, cos, sin, page_table,
            self.kv[0, 0], self.kv[0, 1], *self.between, self.partials, self.lse, self.launches, logits, self.clocks,
        )  # fmt: skip
        slot, head = self.kv.stride()[3:5]
        args = Step(
            *(tensor.data_ptr() for tensor in tensors), self.kv.stride(0), page_table.stride(0), slot, head, slot, head,
            batch, len(self.layers), self.vocab, self.page_size, splits, self.eps,
            self.head_dim**-0.5 * math.log2(math.e),
        )  # fmt: skip
        self._launch(1 << (batch - 1).bit_length(), args)
        return logits

    def macros(self, rows: int) -> tuple[dict[str, str | int], int]:
        """What to define in the source for up to `rows` rows, and the bytes of shared memory that a block needs."""
        group, together = self.heads // self.kv_heads, self.extra.get("TOGETHER", TOGETHER)
        widest = max(self.hidden, self.heads * self.head_dim, self.intermediate)
        sums = self.warps * rows * (together * ROWS + 1)
        head = self.warps * group * (2 + self.head_dim) + (group + 2) * self.head_dim // 2
        residual = rows * 2 * -(-self.hidden // 2 // self.blocks)
        others = 4 * (rows * widest + sums + head + residual) + 64 * (4 * len(self.layers) + 1) + 128
        piece = ROWS * 4 * 32 * self.warps * 2 + 32  # and its two signals
        room = others + 3 * piece
        if self.device.type == "cuda":
            room = _properties(self.device).shared_memory_per_block_optin
        depth = self.extra.get("DEPTH", min(MOST_DEPTH, (room - others) // piece))
        if depth < 2:
            raise ValueError(f"a block has {room} bytes of shared memory, too few for {rows} rows of {widest} numbers")
        macros = {
            "DTYPE": DTYPES[self.dtype], "HIDDEN": self.hidden, "INTERMEDIATE": self.intermediate,
            "KV_HEADS": self.kv_heads, "GROUP": group, "HEAD_DIM": self.head_dim, "BATCH": rows,
            "BLOCKS": self.blocks, "BLOCK_WARPS": self.warps, "TOGETHER": together, "DEPTH": depth,
        }  # fmt: skip
        return {**macros, **self.extra}, others + depth * piece

    def _launch(self, rows: int, args: Step) -> None:
        macros, dynamic = self.macros(rows)
        grid, threads = (self.blocks, 1, 1), 32 * (self.warps + 1)
        if self.device.type == "cpu":
            return emulator.launch(
                SOURCE, macros, "step", grid, threads, args, self.seed, dynamic=dynamic, together=True
            )
        with torch.cuda.device(self.device):
            kernel = _load(tuple(macros.items()), torch.cuda.current_device(), dynamic)
            return kernel.launch(grid, threads, args, torch.cuda.current_stream().cuda_stream, dynamic)

    def _check(self) -> None:
        reason = why_unavailable(
            torch.device("cuda") if self.device.type == "cpu" and torch.cuda.is_available() else self.device,
            self.dtype, self.hidden, self.intermediate, self.heads, self.kv_heads, self.head_dim, self.vocab,
        )  # fmt: skip
        if reason and not reason.endswith("this is cpu"):
            raise ValueError(reason)
        width, attended = (self.heads + 2 * self.kv_heads) * self.head_dim, self.heads * self.head_dim
        shapes: list[tuple[int, ...]] = [
            (self.hidden,), (width, self.hidden), (self.head_dim,), (self.head_dim,), (self.hidden, attended),
            (self.hidden,), (2 * self.intermediate, self.hidden), (self.hidden, self.intermediate),
        ]  # fmt: skip
        named: list[tuple[torch.Tensor, tuple[int, ...]]] = [
            (self.embedding, (self.vocab, self.hidden)), (self.head, (self.vocab, self.hidden)),
            (self.final_norm, (self.hidden,)),
        ]  # fmt: skip
        for layer in self.layers:
            if (layer.q_norm is None) != (layer.k_norm is None):
                raise ValueError("q and k are both normalised, or neither")
            named += [(weight, shape) for weight, shape in zip(layer, shapes, strict=True) if weight is not None]
        for tensor, shape in [*named, (self.kv, self.kv.shape)]:
            if tensor.shape != shape:
                raise ValueError(f"a weight is {list(tensor.shape)} where {list(shape)} is needed")
            if tensor.dtype != self.dtype or tensor.device != self.device:
                raise ValueError(f"a weight is in {tensor.dtype} on {tensor.device}, the embedding in {self.dtype}")
            if not tensor.is_contiguous() or tensor.data_ptr() % 16:
                raise ValueError("weights and pool must be contiguous, from addresses that are multiples of 16")
        if self.kv.shape[:2] != (len(self.layers), 2):
            raise ValueError(f"the pool is {list(self.kv.shape)}: K and V of {len(self.layers)} layers are needed")


@functools.cache
def _properties(device: torch.device):  # type: ignore[no-untyped-def]
    return torch.cuda.get_device_properties(device)


@functools.cache
def _load(macros: tuple[tuple[str, str | int], ...], device: int, dynamic: int) -> driver.Kernel:
    kernel = driver.load(SOURCE, macros, "step", device)
    kernel.allow_dynamic(dynamic)
    return kernel
