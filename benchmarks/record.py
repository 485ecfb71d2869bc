"""Writes and reads results together with what a reader needs to judge them: device, versions, commit, date."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def save(name: str, data: dict[str, Any], device: str = "cpu", path: Path | None = None) -> Path:
    """Write results/<name>.json, or the path, with `data` and the circumstances it was measured under."""
    record = {
        "name": name,
        "device": device_name(device),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in ("torch", "transformers")},
        "commit": _commit(),
        "date": date.today().isoformat(),
        "command": "python -m "
        + Path(sys.argv[0]).resolve().relative_to(RESULTS.parents[1]).with_suffix("").as_posix().replace("/", ".")
        + "".join(f" {arg}" for arg in sys.argv[1:]),
        "data": data,
    }
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def load(name: str) -> dict[str, Any]:
    """Read results/<name>.json."""
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return record


def device_name(device: str) -> str:
    """The GPU's name, or the CPU's model and the number of threads torch uses."""
    import torch

    from chapters.doctor import cpu_name

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def _commit() -> str:
    """Of the checkout; where the code was copied to a machine without one, $COMMIT says which it was copied from."""
    if given := os.environ.get("COMMIT"):
        return given
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=RESULTS, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
