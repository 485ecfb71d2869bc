"""Time of a sum over the ranks: NCCL's, and that of our kernel over peer memory; alone, and with addition and norm.

For 2, 4 and 8 GPUs, as many as there are. A CUDA graph holds many calls behind one another, so the host's time does not
count. On one GPU two processes take turns, which is slow and says nothing of a link: it is shown and not written.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from minisgl_kernels.graphs import new_graph
from minisgl_kernels.launches import overlapping
from torch import multiprocessing

from benchmarks.gpu import relative_error, table
from benchmarks.record import save
from minisgl.distributed.comm import GroupComm, connect
from minisgl.distributed.peer import SLOT_BYTES, PeerComm

HIDDEN = (1024, 4096, 5120)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MOST_ERROR = 8e-3  # of a sum in bf16: NCCL rounds on its way
COLUMNS = ("ranks", "hidden", "rows", "bytes", "nccl_us", "peer_us", "nccl_norm_us", "peer_norm_us")
Call = Callable[[], Any]


def graph_us(call: Call, comm: GroupComm, calls: int, repeats: int) -> float:
    """Microseconds of a call in a graph of many: the median of the repeats, and of the ranks the slowest."""
    graph = new_graph(torch.device("cuda", torch.cuda.current_device()))
    with overlapping():  # as in the engine
        graph.warm_up(lambda: [call() for _ in range(3)])
        graph.capture(lambda: [call() for _ in range(calls)])
    samples = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # after it the ranks are abreast
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(1000 * start.elapsed_time(end) / calls)
    return -comm.minimum(-round(1000 * median(samples))) / 1000


def check(peers: PeerComm, hidden: int, rows: int) -> None:
    """ValueError if our sum and the group's differ by more than rounding."""
    generator = torch.Generator("cuda").manual_seed(peers.rank)
    x = torch.empty(rows, hidden, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
    error = relative_error(peers.all_reduce(x), peers.comm.all_reduce(x.clone()).float())
    if not error <= MOST_ERROR:
        raise ValueError(f"sums of [{rows}, {hidden}] differ by {error:.1e}: not worth timing")


def size_times(peers: PeerComm, hidden: int, rows: int, calls: int, repeats: int) -> dict[str, Any]:
    """One row of the table; None for what is not measured: NCCL on one GPU, and our kernel where x is too large."""
    from minisgl_kernels.triton.norm import add_rms_norm

    x, residual = torch.zeros(2, rows, hidden, dtype=torch.bfloat16, device="cuda")  # sums of 0 do not grow
    weight, comm, found = torch.ones_like(x[0]), peers.comm, dict.fromkeys(COLUMNS)
    candidates: dict[str, Call] = {}
    if comm.in_graphs:
        candidates["nccl_us"] = lambda: comm.all_reduce(x)
        candidates["nccl_norm_us"] = lambda: add_rms_norm(comm.all_reduce(x), residual, weight, 1e-6)
    if x.nbytes <= SLOT_BYTES:
        check(peers, hidden, rows)
        candidates["peer_us"] = lambda: peers.all_reduce(x)
        candidates["peer_norm_us"] = lambda: peers.all_reduce_add_rms_norm(x, residual, weight, 1e-6)
    for name, call in candidates.items():
        found[name] = graph_us(call, comm, calls, repeats)
    return found | {"ranks": comm.size, "hidden": hidden, "rows": rows, "bytes": x.nbytes}


@torch.inference_mode()
def rank_main(rank: int, size: int, folder: str, backend: str, calls: int, repeats: int) -> None:
    """A rank's process. Rank 0 leaves the rows in a file."""
    torch.cuda.set_device(rank if backend == "nccl" else 0)
    store = torch.distributed.FileStore(str(Path(folder, "store")), size)
    peers = PeerComm(connect(store, rank, size, backend, timeout_s=120), torch.device("cuda"))
    alone = backend == "gloo"
    sizes = [(hidden, rows) for hidden in (HIDDEN[:1] if alone else HIDDEN) for rows in (ROWS[::6] if alone else ROWS)]
    found = [size_times(peers, hidden, rows, calls, repeats) for hidden, rows in sizes]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(found))
    torch.cuda.synchronize()
    peers.minimum(0)
    peers.close()


def group_times(size: int, backend: str, calls: int, repeats: int) -> list[dict[str, Any]]:
    """All rows of a group of this size."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, (size, folder, backend, calls, repeats), nprocs=size)
        rows: list[dict[str, Any]] = json.loads(Path(folder, "rows.json").read_text())
    table(rows, *COLUMNS)
    return rows


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=50, help="in a graph (default: 50)")
    parser.add_argument("--repeats", type=int, default=11, help="replays of each graph (default: 11)")
    parser.add_argument("--name", default="all_reduce", help="of the result file (default: all_reduce)")
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    if not gpus:
        parser.error("this measures NVIDIA GPUs, and torch finds none")
    if gpus == 1:
        group_times(2, "gloo", 10, 3)
        print("one GPU: two processes took turns on it, so these are times of time-slicing; nothing is written")
        return
    data: dict[str, Any] = {"dtype": "bfloat16", "calls": args.calls, "repeats": args.repeats, "slot_bytes": SLOT_BYTES}
    data["nccl"] = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    data["rows"] = []
    for size in (2, 4, 8):
        if size <= gpus:
            data["rows"] += group_times(size, "nccl", args.calls, args.repeats)
            path = save(args.name, data, "cuda")
    print(path)


if __name__ == "__main__":
    main()
