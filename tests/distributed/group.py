"""Groups of ranks to test with: threads of this process, which start at once, and real processes over gloo or NCCL."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl.config import EngineConfig
from minisgl.core import ForwardBatch
from minisgl.distributed.comm import Comm, connect
from minisgl.engine.engine import Engine
from minisgl.engine.lead import STOP, Command
from minisgl.models.config import ModelConfig
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.register import build_model
from minisgl.models.weight import Weights, iter_weights, load_weights
from minisgl.simple import Recompute
from tests.helpers import hf_state, tiny_config


class Seat:
    """A rank that is asked what it would hold, and never meets the others."""

    in_graphs = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def seats(size: int) -> list[Any]:
    return [Seat(rank, size) for rank in range(size)]


def eventually(true: Callable[[], bool], within_s: float = 60) -> bool:
    """Whether it comes true; a test that waits so long has failed."""
    end = time.monotonic() + within_s
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def gone(pid: int) -> bool:
    """No process has this id, not even a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def ended(pid: int) -> bool:
    """It runs no more. Who inherits an orphan may wait for seconds before asking how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return gone(pid)


def slowness() -> float:
    """Seconds that go by while this process gets one of a core: 1 if nobody else wants it."""
    wall, cpu = time.monotonic(), time.process_time()
    while time.process_time() - cpu < 0.2:
        pass
    return (time.monotonic() - wall) / (time.process_time() - cpu)


def ended_in_time(start: Callable[[], tuple[subprocess.Popen[str], list[int]]], end: Callable[..., object]) -> bool:
    """Whether the process and all others that `start()` gives have ended two seconds after `end(process, *others)`.

    That is what is promised on a machine that has the time. On a busy one it is as much longer as a loop takes longer,
    and of three tries one must do."""

    def in_time() -> bool:
        process, others = start()
        within_s = 2 * slowness()
        end(process, *others)
        return eventually(lambda: process.poll() is not None and all(map(ended, others)), within_s)

    return any(in_time() for _ in range(3))


class ThreadComm:
    """One of `size` threads, which put their tensors into a common list and wait for the others."""

    in_graphs = False

    def __init__(self, rank: int, barrier: threading.Barrier, shared: list[Any]) -> None:
        self.rank, self.size = rank, barrier.parties
        self.barrier, self.shared = barrier, shared
        self.calls = Counter[str]()

    def _all(self, mine: Any, collective: str) -> list[Any]:
        self.calls[collective] += 1
        self.shared[self.rank] = (collective, mine)
        self.barrier.wait()
        everyones = list(self.shared)
        self.barrier.wait()  # nobody writes before all have read
        assert {name for name, _ in everyones} == {collective}, "the ranks make different calls"
        return [value for _, value in everyones]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._all(x, "all_reduce")).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(x, "all_gather"), dim=-1)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        return self._all(x, "broadcast")[src].clone()

    def minimum(self, n: int) -> int:
        return min(self._all(n, "minimum"))


def in_threads(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """function(comm, *args) of each rank, and what each returned. The first error of a rank is raised."""
    barrier, shared = threading.Barrier(size, timeout=60), [None] * size
    results, errors = [None] * size, []

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadComm(rank, barrier, shared), *args)
        except BaseException as error:
            errors.append(error)
            barrier.abort()  # or the others would wait

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class ThreadGroup:
    """The other ranks of an engine as threads, in place of engine.group.Group's processes and ring."""

    def __init__(self, size: int, follow: Callable[[Comm, queue.Queue[Any]], None]) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        shared: list[Any] = [None] * size
        self.comm = ThreadComm(0, self.barrier, shared)
        self.queues: list[queue.Queue[Any]] = [queue.Queue() for _ in range(size - 1)]
        self.errors: list[BaseException] = []
        self.threads = []
        for rank, commands in enumerate(self.queues, 1):
            args = (follow, ThreadComm(rank, self.barrier, shared), commands)
            self.threads.append(threading.Thread(target=self._run, args=args, daemon=True))
            self.threads[-1].start()

    def _run(self, follow: Callable[[Comm, queue.Queue[Any]], None], comm: Comm, commands: queue.Queue[Any]) -> None:
        try:
            follow(comm, commands)
        except BaseException as error:
            self.errors.append(error)
            self.barrier.abort()  # or rank 0 would wait

    def send(self, command: Command) -> None:
        for commands in self.queues:
            commands.put([array.copy() for array in command])

    def guard(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self, in_step: bool = False) -> None:
        self.send([np.array([STOP])])
        for thread in self.threads:
            thread.join(timeout=60)
        if self.errors:
            raise self.errors[0]


def engine_on_threads(model: LlamaForCausalLM, config: EngineConfig, size: int = 2) -> Engine:
    """Rank 0's engine of a model, whose other ranks are threads of this process."""
    weights = hf_state(model)

    def shard(comm: Comm) -> Engine:
        return Engine(load_rank(comm, model.config, weights.items()), config, comm)

    def follow(comm: Comm, commands: queue.Queue[Any]) -> None:
        engine = shard(comm)
        assert engine.runner
        while (command := commands.get(timeout=60))[0][0] != STOP:
            engine.runner.follow(command)

    group: Any = ThreadGroup(size, follow)
    engine = shard(group.comm)
    engine.lead(group)
    return engine


def in_processes(size: int, folder: Path, backend: str, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The same in new processes, whose groups meet at a file; the function and its arguments must be importable."""
    context = multiprocessing.get_context("spawn")
    seats = [(rank, size, folder, backend, function, args) for rank in range(size)]
    processes = [context.Process(target=_process, args=seat, daemon=True) for seat in seats]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    ends = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert ends == [0] * size, "a rank failed or did not end: see its output"
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


def _process(rank: int, size: int, folder: Path, backend: str, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = torch.distributed.FileStore(str(folder / "store"), size)
    comm = connect(store, rank, size, backend, timeout_s=60)
    torch.save(function(comm, *args), folder / f"{rank}.pt")
    comm.minimum(0)  # a rank that leaves first would take its connections along


# What the ranks run.


def load_rank(comm: Comm, config: ModelConfig, weights: Weights, device: str = "cpu") -> LlamaForCausalLM:
    """The rank's part of a model in fp32."""
    model = build_model(config, comm=comm)
    load_weights(model, weights, torch.device(device), torch.float32)
    return model


@torch.inference_mode()
def logits_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    ids = ids.to(model.device)
    return model(ForwardBatch(ids, torch.arange(len(ids), device=ids.device), Recompute())).cpu()


def rank_logits(comm: Comm, config: ModelConfig, checkpoint: dict[str, torch.Tensor], ids: torch.Tensor) -> Any:
    return logits_of(load_rank(comm, config, checkpoint.items()), ids)


def collectives_and_logits(comm: Comm, device: str, folder: Path, overrides: dict[str, Any], ids: list[int]) -> Any:
    """Each collective of numbers that tell the ranks apart, then a model read from a file."""
    rank, size = comm.rank, comm.size
    mine = torch.tensor([[rank, 10 + rank], [20 + rank, 30 + rank]], dtype=torch.float32, device=device)
    model = load_rank(comm, tiny_config(**overrides), iter_weights(folder), device)
    results = {
        "sum": comm.all_reduce(mine.clone()),
        "sum of a view": comm.all_reduce(with_gaps(mine)),
        "bf16 sum": comm.all_reduce((mine + 1).bfloat16()),
        "gathered": comm.all_gather(mine),
        "gathered view": comm.all_gather(with_gaps(mine)),
        "gathered nothing": comm.all_gather(mine[:0]),
        "of the last": comm.broadcast(with_gaps(mine.long()), src=size - 1),
        "of the first": comm.broadcast(mine[:, 0].clone()),
    }
    kinds = {tensor.device.type for tensor in results.values()}
    assert kinds == {torch.device(device).type}
    results = {name: tensor.cpu() for name, tensor in results.items()}
    return results | {"least": comm.minimum(10 - rank), "logits": logits_of(model, torch.tensor(ids))}


def with_gaps(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, every other one of a row in memory."""
    return x.repeat_interleave(2, dim=1)[:, ::2]


def sum_in_a_graph(comm: Comm) -> torch.Tensor:
    """Replay a recorded all-reduce over new numbers."""
    x = torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = comm.all_reduce(x * 1)
    x.fill_(comm.rank + 1)
    graph.replay()
    torch.cuda.synchronize()
    return total.cpu()
