"""Whether a kernel may be let in while the one before still runs. Imports no Triton; `triton.pdl` says how it is done.

Whoever launches says so around the launches, since two engines in one process may differ.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_overlap = ContextVar("_overlap", default=False)


@contextmanager
def overlapping(on: bool = True) -> Iterator[None]:
    """Within, kernels overlap with those before them where the GPU can, also in the graphs that are captured here."""
    before = _overlap.set(on)
    try:
        yield
    finally:
        _overlap.reset(before)


def may_overlap() -> bool:
    """Whether launches may overlap here."""
    return _overlap.get()
