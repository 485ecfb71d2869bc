"""Attention over the paged pool: one module a backend, imported when it is chosen."""

from importlib import import_module
from typing import Any

# Module and class; a module's name begins with a dot if it lies here, and may be any other.
BACKENDS = {
    "torch": ".torch_backend:TorchAttention",
    "cpp": ".cpp_backend:CppAttention",
    "triton": ".triton_backend:TritonAttention",
    "cuda": ".cuda_backend:CudaAttention",
    "flash_attn": ".flash_attn:FlashAttention",
}

# Those that attend in a step of fixed shapes, of which the host knows no lengths: what a graph can hold.
IN_GRAPHS = {"torch": ".torch_backend:PaddedAttention", "triton": BACKENDS["triton"], "cuda": BACKENDS["cuda"]}


def backend(name: str, in_graph: bool = False) -> Any:
    """The class of a backend, made anew for each step from a pool, the step's rows and the work counts.

    Raises:
        ValueError: in_graph, and this backend needs the lengths on the host.
    """
    if in_graph and name not in IN_GRAPHS:
        known = ", ".join(IN_GRAPHS)
        raise ValueError(f"attention {name} cannot run in a graph: use --graphs off, or an attention of {known}")
    module, _, symbol = (IN_GRAPHS if in_graph else BACKENDS)[name].partition(":")
    return getattr(import_module(module, __name__), symbol)


def needs_lengths(name: str) -> bool:
    """Whether a backend plans by lengths on the host: it runs no step of nobody, and as it is no graph."""
    return IN_GRAPHS.get(name) != BACKENDS[name]
