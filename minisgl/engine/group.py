"""An engine over several processes: that of rank 0, which the user holds and which plans, and those that follow it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from minisgl_kernels.launches import overlapping

from minisgl.config import EngineConfig
from minisgl.distributed.comm import GroupComm, connect
from minisgl.distributed.peer import PeerComm, require_peers
from minisgl.distributed.ranks import RankDied, Ranks, Seat
from minisgl.distributed.shared_tensor import CommandRing, RingReader
from minisgl.engine.build import build_engine, choose_device, load_model
from minisgl.engine.engine import Engine
from minisgl.engine.lead import STOP, Command
from minisgl.layers.shard import divided
from minisgl.models.config import ModelConfig

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class Group:
    """The other ranks, as rank 0 sees them."""

    def __init__(self, config: EngineConfig, folder: Path, device: torch.device, backend: str) -> None:
        self._ring, self._closed = CommandRing(config.tp - 1), False
        self._comm: GroupComm | PeerComm | None = None
        readers = [self._ring.reader(i) for i in range(config.tp - 1)]
        self.ranks = Ranks(config.tp, work, (replace(config, trace=None), folder, device, backend, readers))

    def joined(self, comm: GroupComm | PeerComm) -> None:
        """Rank 0's own end, which is aborted when a rank dies or a step breaks off, and closed with this."""
        self._comm = comm
        self.ranks.on_death(comm.abort)

    def ready(self) -> None:
        """Wait until all ranks have their engines."""
        self.ranks.wait_ready()
        self._ring.unlink()  # all have attached: nothing stays behind now, however the processes end

    def send(self, command: Command) -> None:
        """Have all ranks run a command."""
        self._ring.send(command, alive=self.ranks.check)

    def guard(self) -> AbstractContextManager[None]:
        """Around a step: see Ranks.guard.

        Raises:
            RankDied: also if the ranks were ended, by close or because a step broke off.
        """
        if self._closed:
            self.ranks.check()  # a death is the better reason
            raise RankDied("the other ranks were ended, as a step broke off or the engine was closed: make a new one")
        return self.ranks.guard()

    def close(self, in_step: bool = False) -> None:
        """End the ranks, once. in_step: they may wait for a rank 0 that will not come."""
        if self._closed:
            return
        self._closed = True
        if in_step:
            self.ranks.settle()
        else:
            with suppress(RankDied):
                self.send([np.array([STOP])])
        self.ranks.close(0 if in_step else 1)
        self._ring.close()
        if self._comm:
            self._comm.close()


def open_engine(config: EngineConfig, folder: Path) -> Engine:
    """An engine as the config wants it: in this process, or on config.tp ranks. Errors as of start."""
    device = choose_device(config.device)
    return build_engine(config, folder, device) if config.tp == 1 else start(config, folder, device)


def start(config: EngineConfig, folder: Path, device: torch.device) -> Engine:
    """An engine on config.tp ranks, which end with it.

    Raises:
        ValueError: as load_model; or the model does not divide by config.tp, or there are too few GPUs.
        RankDied: another rank failed; with its traceback.
    """
    shape = ModelConfig.from_folder(folder)
    divided(shape.num_heads, "query heads", config.tp)  # before there are processes, which would all say so
    divided(shape.intermediate_size, "features of the MLP", config.tp)
    backend = _backend(config, device)
    if config.custom_all_reduce:
        require_peers(device, backend, config.tp)
    group = Group(config, folder, device, backend)
    try:
        with group.guard():
            device, comm = _join(group.ranks.store, 0, config, device, backend)
        group.joined(comm)
        model = load_model(config, folder, device, comm)
        with group.guard():
            engine = Engine(model, config, comm)
        group.ready()
    except BaseException:
        group.close(in_step=True)
        raise
    engine.lead(group)
    return engine


def work(
    seat: Seat, config: EngineConfig, folder: Path, device: torch.device, backend: str, readers: Sequence[RingReader]
) -> None:
    """Another rank, from its start to its end: makes its engine and runs what rank 0 says."""
    if device.type == "cpu":  # which the ranks share
        torch.set_num_threads(max(1, torch.get_num_threads() // seat.size))
    seat.stage("joining the others")
    device, comm = _join(seat.connect(), seat.rank, config, device, backend)
    seat.stage("loading its shard")
    model = load_model(config, folder, device, comm)
    seat.stage("making its engine")
    engine = Engine(model, config, comm)
    reader = readers[seat.rank - 1]
    seat.ready()
    while True:
        with reader.receive() as command, overlapping(config.pdl == "auto"):
            if command[0][0] == STOP:
                return
            assert engine.runner
            engine.runner.follow(command)


def _join(
    store: Store, rank: int, config: EngineConfig, device: torch.device, backend: str
) -> tuple[torch.device, GroupComm | PeerComm]:
    """A rank's own device, and its way to the others."""
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    comm = connect(store, rank, config.tp, backend)
    return device, PeerComm(comm, device) if config.custom_all_reduce else comm


def _backend(config: EngineConfig, device: torch.device) -> str:
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"tp is {config.tp}, but {device.type} runs one process only: use --device cpu, or --tp 1")
    wanted = config.tp_backend if config.tp_backend != "auto" else "nccl" if gpus else "gloo"
    if wanted == "nccl" and gpus < config.tp:
        raise ValueError(
            f"tp is {config.tp}, and there are {gpus} GPUs: with --tp-backend gloo all ranks share a device"
        )
    return wanted
