"""What this machine has, and which chapters will run on it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import minisgl_hub as hub
import torch
from rich.markup import escape
from rich.table import Table

from chapters.manifest import Chapter, load_chapters

OPTIONAL = {
    "triton": "kernels in Python, on a GPU or in its interpreter; pip install '.[gpu]'",
    "cuda-core": "compiles the CUDA kernels; pip install '.[gpu]'",
    "flash-attn": "one of the attention backends; pip install '.[flash-attn]'",
}
MIN_CAPABILITY = (7, 5)
MIN_MEMORY_BYTES = 2_000_000_000  # torch, transformers, SmolLM2 in fp32 and room to run


@dataclass(frozen=True)
class Fact:
    """One line of the report; where something is missing, `value` says what to do."""

    name: str
    value: str
    ok: bool = True


def table(root: Path) -> Table:
    """The report, to be printed."""
    rows = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(no_wrap=True)
    rows.add_column()
    for fact in report(root):
        rows.add_row(fact.name, "[green]✓[/]" if fact.ok else "[yellow]–[/]", escape(fact.value))
    return rows


def report(root: Path) -> list[Fact]:
    """All facts, those of the chapters under root last."""
    machine = [_python(), _torch(), _cpu(), *_gpus(), _memory(), _disk(), _model()]
    packages = [_package(name, use) for name, use in OPTIONAL.items()]
    return [*machine, *packages, *(_chapter(chapter) for chapter in load_chapters(root))]


def _python() -> Fact:
    return Fact("Python", f"{platform.python_version()} ({sys.executable}) on {platform.system()} {platform.machine()}")


def _torch() -> Fact:
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    return Fact("torch", f"{torch.__version__}, {build} build")


def _cpu() -> Fact:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    level = torch.backends.cpu.get_cpu_capability()
    return Fact("CPU", f"{cpu_name()}, {cores} cores for this process, {torch.get_num_threads()} threads, {level}")


def cpu_name() -> str:
    """The CPU's model, as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[Fact]:
    if torch.cuda.is_available():
        return [_gpu(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        return [Fact("GPU", "Apple's, through torch's mps device; the CUDA and Triton chapters need an NVIDIA GPU")]
    if shutil.which("nvidia-smi") is None:
        return [Fact("GPU", "none: everything but the GPU chapters' kernels runs on the CPU")]
    if torch.version.cuda is None:
        return [Fact("GPU", "NVIDIA, but this torch is a CPU build: install a CUDA build (see the README)", ok=False)]
    return [Fact("GPU", "NVIDIA, but torch cannot use it: is the driver too old for this torch?", ok=False)]


def _gpu(index: int) -> Fact:
    gpu = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    value = f"{gpu.name}, {_gb(free)} of {_gb(total)} free, compute capability {gpu.major}.{gpu.minor}"
    if (gpu.major, gpu.minor) < MIN_CAPABILITY:
        return Fact(f"GPU {index}", f"{value}; the kernels need {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}", ok=False)
    return Fact(f"GPU {index}", value)


def _memory() -> Fact:
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return Fact("memory", f"{_gb(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))} in all")
    kib = {line.split(":")[0]: int(line.split()[1]) for line in meminfo.read_text().splitlines()}
    free = kib["MemAvailable"] * 1024
    value = f"{_gb(free)} of {_gb(kib['MemTotal'] * 1024)} free"
    if free < MIN_MEMORY_BYTES:
        return Fact("memory", f"{value}; {_gb(MIN_MEMORY_BYTES)} are needed: close other programs", ok=False)
    return Fact("memory", value)


def _disk() -> Fact:
    home = hub.cache_home()
    place = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(place).free
    value = f"{_gb(free)} free at {place}"
    if free < hub.BUILD_BYTES and not hub.fetched():
        return Fact("disk", f"{value}; fetching the model needs {_gb(hub.BUILD_BYTES)}", ok=False)
    return Fact("disk", value)


def _model() -> Fact:
    home = hub.cache_home()
    if hub.fetched():
        return Fact("model", str(home / hub.DEFAULT_MODEL))
    return Fact("model", f"not in {home} yet: run `minisgl fetch`, or use it and it will be fetched", ok=False)


def _package(name: str, use: str) -> Fact:
    try:
        return Fact(name, version(name))
    except PackageNotFoundError:
        return Fact(name, f"not installed ({use})", ok=False)


def _chapter(chapter: Chapter) -> Fact:
    lacking = lacks(chapter.tier)
    return Fact(f"chapter {chapter.name}", lacking or f"runs here ({chapter.tier})", lacking is None)


def lacks(tier: str) -> str | None:
    """What this machine lacks for a chapter of this tier; None if nothing."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    capable = sum(torch.cuda.get_device_capability(i) >= MIN_CAPABILITY for i in range(gpus))
    if tier == "cpu":
        return None
    if tier == "interpreter":  # kernels run on the GPU, or on the CPU in Triton's interpreter
        return None if importlib.util.find_spec("triton") else "needs triton: pip install '.[gpu]'"
    needed = {"gpu": 1, "multi-gpu": 2}[tier]
    if capable >= needed:
        return None
    capability = ".".join(map(str, MIN_CAPABILITY))
    return f"needs {needed} NVIDIA GPU{'s' * (needed > 1)} of compute capability {capability} or newer; {capable} here"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
