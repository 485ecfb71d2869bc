"""Recorded work that is replayed: CUDA graphs, and a stand-in for a CPU that keeps their rules.

A graph holds operations with the memory they read and write, no Python. What a program does to that memory between two
replays is seen; a new tensor, another shape or a look at a result is not possible. On a GPU breaking the rules gives
wrong numbers or an obscure error; the stand-in says what was broken.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_recording = False  # by the stand-in: torch knows of CUDA's captures itself


class GraphError(RuntimeError):
    """Something that a graph cannot hold, or memory that it reads and that is gone."""


def is_capturing() -> bool:
    """Whether what runs now is being recorded, so that nothing may wait for a result."""
    return _recording or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def new_graph(device: torch.device, pool: Any = None) -> CudaGraph | RecordedGraph:
    """An empty graph for a device; on a GPU its memory comes from a pool, a handle of torch.cuda.graph_pool_handle."""
    return CudaGraph(device, pool) if device.type == "cuda" else RecordedGraph()


class CudaGraph:
    """torch's CUDA graph, recorded on a stream of its own. Replays go to the current stream."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._graph, self._pool, self._stream = torch.cuda.CUDAGraph(), pool, _stream(device)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def warm_up(self, step: Callable[[], Any]) -> None:
        """Run the step on the stream on which it will be recorded: libraries keep work memory by stream."""
        with self._on_stream():
            step()

    def capture(self, step: Callable[[], Any]) -> Any:
        """Record the step, which is not run; returns its result, whose memory each replay fills."""
        enabled = gc.isenabled()
        gc.disable()  # a tensor that dies now could free memory, which a capture does not allow
        try:
            with self._on_stream():
                self._graph.capture_begin(self._pool)
                try:
                    return step()
                finally:
                    self._graph.capture_end()
        finally:
            if enabled:
                gc.enable()

    def replay(self) -> None:
        self._graph.replay()


_streams: dict[torch.device, Any] = {}


def _stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


class RecordedGraph:
    """The stand-in: a list of torch's operations, run again on the memory they were recorded with.

    Memory made outside is not kept alive, as a GPU would not: if it is gone, or of another size, the replay says so.
    """

    def __init__(self) -> None:
        self._calls = list[_Call]()
        self._inside: dict[int, torch.UntypedStorage] = {}  # memory that was made while recording, by address

    def warm_up(self, step: Callable[[], Any]) -> None:
        """Run the step, as on a GPU."""
        step()

    def capture(self, step: Callable[[], Any]) -> Any:
        """Record the step, which is run, but not seen: memory made outside is put back as it was.

        Raises:
            GraphError: the step looks at a result, or takes data from the host.
        """
        global _recording
        _recording = True
        try:
            with _NoLooks(), _Recorder(self):
                result = step()
        finally:
            _recording = False
            for call in reversed(self._calls):
                call.put_back()
        return result

    def replay(self) -> None:
        """Run the operations again.

        Raises:
            GraphError: memory that the graph reads or writes is gone or has another size.
        """
        for call in self._calls:
            call.run()

    def record(self, function: Any, args: Any, kwargs: Any) -> Any:
        call = _Call(function, args, kwargs, self._inside)
        if call.is_needed:
            self._calls.append(call)
        return call.result


class _Outside:
    """A tensor that was made before the recording: where it lies, without keeping it alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage, self._bytes = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self._layout = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> torch.Tensor:
        dtype, offset, shape, stride = self._layout
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise GraphError(f"a tensor {list(shape)} that the graph uses is gone: fill it in place, make no new one")
        if storage.nbytes() != self._bytes:
            raise GraphError(f"a tensor {list(shape)} that the graph uses has another size now: a graph has one shape")
        with torch.inference_mode(False):
            return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


class _Call:
    """One operation: what it was given, and where its results go."""

    def __init__(self, function: Any, args: Any, kwargs: Any, inside: dict[int, torch.UntypedStorage]) -> None:
        def keep(tensor: torch.Tensor) -> torch.Tensor | _Outside:
            return tensor if _address(tensor) in inside else _Outside(tensor)

        self._function = function
        self._args, self._kwargs = tree_map_only(torch.Tensor, keep, (args, kwargs))
        self._needs_outside = any(isinstance(leaf, _Outside) for leaf in tree_leaves((self._args, self._kwargs)))
        given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        written = [
            args[i] if i < len(args) else kwargs.get(argument.name)
            for i, argument in enumerate(function._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        outside = [tensor for tensor in written if isinstance(tensor, torch.Tensor) and _address(tensor) not in inside]
        self._before = [(_Outside(tensor), tensor.clone()) for tensor in outside]
        self.result = function(*args, **kwargs)
        # A view needs no work at a replay: its memory is what counts.
        self._results = [None if _address(tensor) in given else tensor for tensor in _tensors(self.result)]
        self.is_needed = bool(written) or any(tensor is not None for tensor in self._results)
        for tensor in self._results:
            if tensor is not None:
                inside[_address(tensor)] = tensor.untyped_storage()

    def put_back(self) -> None:
        """Undo what the recording itself wrote to memory outside, the last write first."""
        for place, before in self._before:
            place.tensor().copy_(before)
        self._before = []

    def run(self) -> None:
        args, kwargs = self._args, self._kwargs
        if self._needs_outside:
            args, kwargs = tree_map_only(_Outside, _Outside.tensor, (args, kwargs))
        for place, value in zip(self._results, _tensors(self._function(*args, **kwargs)), strict=True):
            if place is not None:
                place.copy_(value)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):  # as most are
        return [results]
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operation to a graph."""

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masked = func is _aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        if func in _WAITS or masked:  # a mask says how many only by its contents
            raise GraphError(f"{func} needs the result of what is only being recorded: a graph cannot wait for it")
        if func is torch.ops.aten.lift_fresh.default:
            raise GraphError(
                "data of the host, as of torch.tensor([…]), would be read only once: send it before "
                "(x[i] = 0 looks the same here: use fill_ or where)"
            )
        return self._graph.record(func, args, kwargs or {})


class _NoLooks(TorchFunctionMode):
    """Refuses the ways to look at a tensor that torch does not see as operations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _LOOKS:
            raise GraphError(f"{func.__name__}() looks at what is only being recorded: a graph cannot wait for it")
        return func(*args, **(kwargs or {}))


_LOOKS = {"tolist", "item", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "cpu"}
_aten = torch.ops.aten
_WAITS = {
    _aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default, _aten.equal.default,
    _aten._unique2.default,
}  # fmt: skip
