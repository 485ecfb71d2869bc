"""What the workers of test_ranks run. Torch is imported by those that need it: others start in a tenth of a second."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from minisgl.distributed.ranks import Ranks


def who(seat: Any, below: Sequence[Any] = ()) -> None:
    """Says who it is, and waits to be ended."""
    ran_script = hasattr(sys.modules["__main__"], "MARK")
    seat.ready({"pid": os.getpid(), "rank": seat.rank, "size": seat.size, "ran_script": ran_script, "below": below})
    time.sleep(300)


def leads(seat: Any) -> None:
    """As rank 1, has a worker of its own."""
    below = Ranks(2, who, names=["the hand"]) if seat.rank == 1 else None
    who(seat, below.wait_ready() if below else [])


def leads_and_fails(seat: Any) -> None:
    Ranks(2, raises, (1,), names=["the hand"]).wait_ready()


def returns_when_told(seat: Any) -> None:
    seat.ready(os.getpid())
    seat.connect().get("end")
    seat.connect().set(f"ended {seat.rank}", "by itself")


def shares(seat: Any, value: str) -> None:
    """Puts the value where rank 0 of the same run finds it."""
    seat.connect().set("key", value)
    who(seat)


def raises(seat: Any, rank: int) -> None:
    if seat.rank == rank:
        raise ValueError(f"no weights for rank {rank}")
    time.sleep(300)


def leaves_early(seat: Any, code: int) -> None:
    seat.stage("counting pages")
    sys.exit(code)


def is_late(seat: Any, rank: int) -> None:
    seat.stage("loading weights")
    if seat.rank != rank:
        seat.ready()
    time.sleep(300)


def holds(seat: Any, lock: Any) -> None:
    """Takes a lock of multiprocessing and keeps it."""
    with lock:
        who(seat)


def reduces(seat: Any) -> None:
    """Joins rank 0 in sums, three at most; after them it is alive, and rank 0 waits in vain."""
    group = gloo(seat.connect(), seat.rank, seat.size)
    seat.stage("adding")
    for _ in range(3):
        add(group)
    who(seat)


def gloo(store: Any, rank: int, size: int) -> Any:
    from torch.distributed import PrefixStore, ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=300)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)


def add(group: Any) -> float:
    import torch

    x = torch.ones(1)
    group.allreduce([x]).wait()
    return x.item()
