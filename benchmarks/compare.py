"""Two results beside each other: each figure that both have, and new / old.

Knows no benchmark: a figure is a number of one of the names below, wherever it stands in a result's data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu import table

Result = dict[str, Any]
SPEEDS = {"tokens_per_s", "requests_per_s", "seconds", "ms_per_step", "first_token_s", "fraction_of_limit"}
SPEEDS |= {
    "bandwidth_fraction",
    "idle_share",
    "starved_share",
    "host_ms",
    "step_ms",
    "start_s",
    "times_faster",
    "times_sooner",
    "goodput_per_s",
    "ratio",
}
COUNTS = {"weight_bytes", "kv_pool_bytes", "peak_bytes", "steps", "tokens_computed", "tokens_reused"}
PERCENTILES = {"first_token_ms", "between_tokens_ms", "between_pieces_ms", "per_token_ms", "end_to_end_ms"}
APART = {"passes", "stats", "limit", "machine", "switches"}  # what is counted elsewhere, no measurement, or a setting


def read(path: Path) -> Result:
    """A result as `--json` or benchmarks/results hold it.

    Raises:
        ValueError: the file is none.
        OSError: it cannot be read.
    """
    try:
        result = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no result of a benchmark: {error}") from None
    if not isinstance(result, dict) or not isinstance(result.get("data"), dict):
        raise ValueError(f"{path} is no result of a benchmark: it has no data")
    return result


def figures(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, float]]:
    """Each figure with the names that lead to it."""
    for name, value in data.items():
        here = (*path, name)
        if isinstance(value, Mapping) and name not in APART:
            yield from figures(value, here)
        elif isinstance(value, int | float) and (name in SPEEDS | COUNTS or (path and path[-1] in PERCENTILES)):
            yield " ".join(here).replace("_", " "), value


def rows(old: Result, new: Result) -> list[dict[str, Any]]:
    """The table: figure, old, new, new/old.

    Raises:
        ValueError: they have no figure in common.
    """
    if "peers" in old["data"]:
        before = {f"{peer} {w}": v for peer, p in old["data"]["peers"].items() for w, v in p["tokens_per_s"].items()}
        own = _workloads(new["data"])
        after = {name: own[w] for name in before for w in own if name.endswith(f" {w}")}
    else:
        before, after = dict(figures(old["data"])), dict(figures(new["data"]))
    found = [
        {"figure": name, "old": before[name], "new": value, "new/old": value / before[name] if before[name] else None}
        for name, value in after.items()
        if name in before
    ]
    if not found:
        names = f"{old.get('name')} and {new.get('name')}"
        raise ValueError(f"{names} have no figure in common: are they of one benchmark?")
    return found


def differences(old: Result, new: Result) -> list[str]:
    """Settings that both results name and that are not the same, the device among them."""
    pairs = {"device": (old.get("device"), new.get("device"))}
    for name in old["data"].keys() & new["data"].keys() - SPEEDS - COUNTS:
        pairs[name] = (old["data"][name], new["data"][name])
    settings = {name: pair for name, pair in pairs.items() if not any(isinstance(v, dict | list) for v in pair)}
    return [f"{name}: {was} → {now}" for name, (was, now) in sorted(settings.items()) if was != now]


def show(old: Result, new: Result) -> None:
    """Print the table, and below it what else differs."""
    print(f"old: {old.get('name')}, {old.get('date')}, commit {old.get('commit', 'none')}")
    table(rows(old, new), "figure", "old", "new", "new/old")
    for line in differences(old, new):
        print(f"not the same: {line}")


def _workloads(data: Mapping[str, Any]) -> dict[str, float]:
    """Tokens per second by the peers' names of their workloads."""
    found = {f"batch {n}": done["tokens_per_s"] for n, done in data.get("batches", {}).items()}
    return found | ({"offline": data["tokens_per_s"]} if "tokens_per_s" in data else {})
