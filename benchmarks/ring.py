"""What it costs to send a step's command to another rank: round trips between two processes, each over a ring.

Half a round trip is one command sent, one process woken and one command read. Once without a break, and once with a
pause before each, as between steps: the other process sleeps then, and perhaps its core too.
"""

from __future__ import annotations

import argparse
import time
from multiprocessing import get_context
from statistics import quantiles
from typing import Any

import numpy as np

from minisgl.distributed.shared_tensor import CommandRing, RingReader, _Block, _slots


class Answers(CommandRing):
    """A ring made here whose writer is the other process; there it is attached, and not its to unlink."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_block": self._block.name, "_unlink": None, "memory": self.memory.shape}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._block = _Block(state["_block"])
        self.memory = _slots(self._block, *state["memory"])


def answer(commands: RingReader, answers: Answers) -> None:
    """The other process: sends back what it is sent, until it is sent nothing."""
    more = True
    while more:
        with commands.receive(timeout_s=60) as arrays:
            more = bool(arrays)
            answers.send(arrays, timeout_s=60)


def round_trips(trips: int, arrays: int, length: int, pause_s: float = 0.0) -> dict[str, Any]:
    """Microseconds of half a round trip with a command of this size, and of `send` alone."""
    command = [np.random.default_rng(i).integers(0, 1 << 40, length) for i in range(arrays)]
    commands, answers = CommandRing(1), Answers(1)
    back = answers.reader(0)
    process = get_context("spawn").Process(target=answer, args=(commands.reader(0), answers), daemon=True)
    process.start()
    half, send = list[float](), list[float]()
    for trip in range(trips + 100):
        time.sleep(pause_s)
        start = time.perf_counter()
        commands.send(command, timeout_s=60)
        sent = time.perf_counter()
        with back.receive(timeout_s=60) as found:
            end = time.perf_counter()
            assert len(found) == arrays
        if trip >= 100:  # the first wait for the process to start
            half.append(1e6 * (end - start) / 2)
            send.append(1e6 * (sent - start))
    commands.send([], timeout_s=60)
    process.join(60)
    for end_of_ring in (back, commands, answers):
        end_of_ring.close()
    return {"pause_ms": 1000 * pause_s, "half_trip_us": spread(half), "send_us": spread(send)}


def spread(values: list[float]) -> dict[str, float]:
    """The median, and between what values nine tenths of all lie."""
    cuts = quantiles(values, n=20)
    return {"median": round(cuts[9], 2), "p5": round(cuts[0], 2), "p95": round(cuts[-1], 2)}


def main() -> None:
    """Measure and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trips", type=int, default=2000, help="round trips of each kind (default: 2000)")
    parser.add_argument("--arrays", type=int, default=5, help="of a command (default: 5)")
    parser.add_argument("--length", type=int, default=300, help="integers in each (default: 300: about 256 requests)")
    parser.add_argument("--pause-ms", type=float, default=2.0, help="before each trip of the second kind (default: 2)")
    args = parser.parse_args()

    pauses = {"busy": 0.0, "paused": args.pause_ms / 1000}
    kinds = {kind: round_trips(args.trips, args.arrays, args.length, pause) for kind, pause in pauses.items()}
    for kind, found in kinds.items():
        for name in ("half_trip_us", "send_us"):
            cost = found[name]
            print(f"{kind:8} {name:14} {cost['median']:8.1f} µs ({cost['p5']:.1f} … {cost['p95']:.1f})")
    from benchmarks.record import save  # here, since it brings torch, which the other process need not import

    print(save("ring", {"trips": args.trips, "arrays": args.arrays, "length": args.length} | kinds))


if __name__ == "__main__":
    main()
