"""Install torch into the Python that runs this: a CPU build without a GPU, a CUDA build with one.

TORCH overrides: `cpu`, `cuda`, or whatever pip should install, options included. A stamp file records what was
installed: a second run does nothing, another TORCH replaces the build.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

TESTED = "torch==2.13.0"
CPU_BUILD = f"{TESTED}+cpu"  # what the CPU build for Linux is called in the indexes and wheel folders that have it
CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
NOT_FOUND = re.compile("No matching distribution|ResolutionImpossible")

HOW_TO = 'How to choose a build: README.md, "torch and GPUs".'
FALLING_BACK = f"""\
pip finds no CPU build of torch and takes the default one, which brings several GB of CUDA libraries; Ctrl-C stops it.
{HOW_TO}"""


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU with a driver."""
    if Path("/dev/nvidia0").exists():
        return True
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    except OSError:
        return False


def candidates(choice: str, platform: str, gpu: bool) -> list[str]:
    """What to ask pip for, in the order to try. `choice` is the value of TORCH, empty when it is not set."""
    if choice not in ("", "cpu", "cuda"):
        return [choice]
    if platform != "linux" or choice == "cuda" or (not choice and gpu):
        return [TESTED]  # on macOS and Windows this is a build without CUDA
    return [CPU_BUILD] if choice else [CPU_BUILD, TESTED]


def pip_install(requirement: str) -> str:
    """Have pip install it. Returns pip's errors, "" when it is installed."""
    command = [*PIP, "install", "--no-compile", "--constraint", str(CONSTRAINTS), *shlex.split(requirement)]
    pip = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    return pip.stderr if pip.returncode else ""


def main() -> int:
    choice = os.environ.get("TORCH", "")
    wanted = candidates(choice, sys.platform, has_gpu())
    stamp = Path(sys.prefix) / ".torch"
    if stamp.exists():
        if not choice or stamp.read_text() in wanted:
            return 0
        stamp.unlink()
        subprocess.run([*PIP, "uninstall", "--quiet", "--yes", "torch"], check=True)
    errors = ""
    for requirement in wanted:
        if errors:
            print(FALLING_BACK, flush=True)
        print(f"Installing {requirement} …", flush=True)
        errors = pip_install(requirement)
        if not errors:
            stamp.write_text(requirement)
            return 0
        if not NOT_FOUND.search(errors):
            break
    print(f"{errors}{requirement} could not be installed. {HOW_TO}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
