"""Ops of your own, each checked against its definition before it is used.

Knows nothing of what an op computes. An op is a function and a slow one that defines it; the first call on a device and
dtype compares the two on random inputs, and an op that differs is never run on real data.

    def inputs(shape, device, dtype, generator):
        return [torch.randn(shape["rows"], 100, device=device, generator=generator).to(dtype)]

    @register_op("double", reference=lambda x: 2 * x, shapes=[{"rows": 1}, {"rows": 37}], inputs=inputs)
    def double(x):
        return x + x
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Shape = Mapping[str, int]
Inputs = Callable[[Shape, torch.device, torch.dtype, torch.Generator], Sequence[Any]]

# ‖out - reference‖ / ‖reference‖. One rounding costs a third of a unit in the last place on average (fp32 2e-8, fp16
# 3e-4, bf16 2e-3 with its worst binade): room for a few in a row, and in fp32 for sums of thousands in another order.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class OpCheckError(Exception):
    """An op differs from its reference; the message says where and by how much. The op was not used."""


@dataclass(frozen=True)
class CheckResult:
    """How far one output set was from the reference, for one shape."""

    shape: Shape
    dtype: torch.dtype
    error: float  # the largest of the outputs' ‖out - reference‖ / ‖reference‖
    tolerance: float


@dataclass(eq=False)
class Op:
    """A checked op: call it as its implementation. Made by `register_op`."""

    name: str
    reference: Callable[..., Any]
    implementation: Callable[..., Any]
    shapes: Sequence[Shape]
    inputs: Inputs
    tolerance: Mapping[torch.dtype, float]
    _verdicts: dict[tuple[torch.device, torch.dtype], str] = field(default_factory=dict)  # "": passed

    def __call__(self, *args: Any) -> Any:
        """Run the implementation, after its check if this is the first call on this device and dtype.

        Raises:
            OpCheckError: the check fails, or failed before.
        """
        key = _device_and_dtype(args)
        if self._verdicts.get(key) != "":
            self._admit(*key)
        return self.implementation(*args)

    def _admit(self, device: torch.device, dtype: torch.dtype) -> None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise OpCheckError(f"{self.name} is first used while a graph is captured: check it before, with check()")
        failed_before = self._verdicts.get((device, dtype))
        if failed_before:
            raise OpCheckError(failed_before)
        try:
            self.check(device, dtype)
        except OpCheckError as error:
            self._verdicts[device, dtype] = str(error)
            raise
        self._verdicts[device, dtype] = ""

    @torch.no_grad()
    def check(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> list[CheckResult]:
        """Compare with the reference on random inputs of every shape; the memory of the outputs is poisoned before.

        The reference runs in fp64 if it can, so that only the implementation's rounding is measured.

        Raises:
            OpCheckError: an output is NaN, too far off or of another shape or dtype; or an input changed.
        """
        if dtype not in self.tolerance:
            raise OpCheckError(f"{self.name} has no tolerance for {dtype}: register one, or use its reference")
        return [self._check_shape(shape, device, dtype, seed) for shape in self.shapes]

    def _check_shape(self, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> CheckResult:
        where = f"{self.name} with {dict(shape)} in {dtype} on {device}"
        args = self.inputs(shape, device, dtype, torch.Generator(device).manual_seed(seed))
        before = _copies(args)
        expected = _tensors(self.reference(*_copies(args)))  # what shapes and dtypes are to come out
        exact = expected
        with contextlib.suppress(RuntimeError, TypeError, ValueError):  # not every reference knows fp64
            exact = _tensors(self.reference(*_copies(args, torch.float64)))
        with _poisoned_memory():
            outputs = _tensors(self.implementation(*args))

        if not all(map(_same_bytes, args, before)):
            raise OpCheckError(f"{where} changed its input")
        got, wanted = ([(tuple(t.shape), t.dtype) for t in tensors] for tensors in (outputs, expected))
        if got != wanted:
            raise OpCheckError(f"{where} returned {got}, its reference returns {wanted}")
        errors = torch.tensor([_relative_error(out, ref) for out, ref in zip(outputs, exact, strict=True)])
        error, tolerance = errors.max().item(), self.tolerance[dtype]  # max keeps a NaN
        if not error <= tolerance:  # so written, NaN fails
            raise OpCheckError(f"{where} is {error:.2e} from its reference, {tolerance:.0e} is allowed")
        return CheckResult(shape, dtype, error, tolerance)


OPS: dict[str, Op] = {}


def register_op(
    name: str,
    *,
    reference: Callable[..., Any],
    shapes: Sequence[Shape],
    inputs: Inputs,
    tolerance: Mapping[torch.dtype, float] = TOLERANCE,
) -> Callable[[Callable[..., Any]], Op]:
    """Decorate an implementation; what comes back is called in its place, and stands in OPS.

    A name that is registered again is replaced, and must pass its check anew: a notebook's cell may run twice.

    Args:
        reference: the definition, in torch: same arguments, same outputs (a tensor or a tuple of them, all finite).
        shapes: what to check, each a dict that `inputs` understands. Have sizes that are no multiple of a block.
        inputs: (shape, device, dtype, generator) → the arguments, drawn with the generator.
        tolerance: ‖out - reference‖ / ‖reference‖ allowed by dtype of the first floating argument.
    """

    def register(implementation: Callable[..., Any]) -> Op:
        OPS[name] = Op(name, reference, implementation, shapes, inputs, tolerance)
        return OPS[name]

    return register


def check(name: str, device: str | torch.device, dtypes: Iterable[torch.dtype] | None = None) -> list[CheckResult]:
    """Check an op by hand, by default in each dtype that it has a tolerance for; the results, one a shape and dtype.

    Raises:
        KeyError: no op has this name.
        OpCheckError: it differs from its reference.
    """
    op, device = OPS[name], torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
    return [result for dtype in dtypes or op.tolerance for result in op.check(device, dtype)]


def _device_and_dtype(args: Sequence[Any]) -> tuple[torch.device, torch.dtype]:
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.is_floating_point():
            return arg.device, arg.dtype
    raise TypeError("an op needs a floating point tensor among its arguments")


def _copies(args: Sequence[Any], dtype: torch.dtype | None = None) -> list[Any]:
    """Args with each tensor copied, floating ones in dtype if given."""
    copied = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    return [a.to(dtype) if dtype and isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in copied]


def _tensors(outputs: Any) -> tuple[torch.Tensor, ...]:
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)


def _relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    out, ref = out.double(), ref.double()
    size = ref.norm().item()
    return (out - ref).norm().item() / (size or 1.0)


def _same_bytes(a: Any, b: Any) -> bool:
    """Whether two arguments are equal, with NaN equal to itself: unused pages hold NaN in tests."""
    if not isinstance(a, torch.Tensor):
        return True
    a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


@contextlib.contextmanager
def _poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN (integers: the largest), so that an element which is never written shows.

    torch does this itself in its deterministic mode, about whose other effects it would warn.
    """
    settings: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            settings.fill_uninitialized_memory = fill
