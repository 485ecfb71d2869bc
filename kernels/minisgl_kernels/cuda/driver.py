"""Loads cubins and launches their kernels on torch's current stream, through the driver's own three functions.

Through ctypes: a kernel takes one struct by value, and a launch costs a few microseconds of the host.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from minisgl_kernels.cuda.build import compile_cuda

_INVALID_CONTEXT = 201  # torch has not yet been used in this thread
_POINTERS = ("q", "keys", "values", "page_table", "kv_lens", "query_starts", "out", "partials", "lse")
_INTS = ("key_slot", "key_head", "value_slot", "value_head", "kv_heads", "page_size", "window", "num_splits")


class Args(ctypes.Structure):
    """The struct of the same name in decode.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("q_stride", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in _INTS),
        ("scale", ctypes.c_float),
    ]


class Kernel:
    """One function of a cubin, on the device that was current when it was loaded."""

    def __init__(self, cubin: bytes, entry: str) -> None:
        module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin))
        _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), module, entry.encode()))

    def launch(self, grid: tuple[int, int, int], threads: int, args: Args, stream: int) -> None:
        """Launch on a stream of this device; returns at once."""
        address = ctypes.c_void_p(ctypes.addressof(args))
        launch = _driver().cuLaunchKernel
        arguments = (self._function, *grid, threads, 1, 1, 0, stream, ctypes.byref(address), None)
        status = launch(*arguments)
        if status == _INVALID_CONTEXT:
            _enter_context(torch.cuda.current_device())
            status = launch(*arguments)
        _check(status)

    def attribute(self, which: int) -> int:
        """One of the driver's CU_FUNC_ATTRIBUTE_…: 1 is bytes of shared memory, 3 of local memory, 4 registers."""
        value = ctypes.c_int()
        _check(_driver().cuFuncGetAttribute(ctypes.byref(value), which, self._function))
        return value.value


@functools.cache
def load(name: str, macros: tuple[tuple[str, str | int], ...], entry: str, device: int) -> Kernel:
    """A source's kernel for a device, which must be the current one: compiled and loaded once a process."""
    major, minor = torch.cuda.get_device_capability(device)
    cubin = compile_cuda(name, dict(macros), f"sm_{major}{minor}")
    _enter_context(device)
    return Kernel(cubin, entry)


def _enter_context(device: int) -> None:
    """Make torch's context of a device this thread's, as torch itself does at its first launch."""
    context = ctypes.c_void_p()
    handle = ctypes.c_int()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), device))
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
    _check(_driver().cuCtxSetCurrent(context))


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    unsigned = ctypes.c_uint
    driver.cuLaunchKernel.argtypes = [ctypes.c_void_p, *[unsigned] * 7, *[ctypes.c_void_p] * 3]
    driver.cuModuleLoadData.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    driver.cuModuleGetFunction.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p]
    driver.cuFuncGetAttribute.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    driver.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
    return driver


def _check(status: int) -> None:
    if status == 0:
        return
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(text))
    raise RuntimeError(f"CUDA error {status}: {(text.value or b'unknown').decode()}")
