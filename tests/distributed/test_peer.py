"""Sums over peer memory: taken by the norms of a model on CPU threads, and by processes that share or have GPUs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from minisgl_kernels import reference
from minisgl_kernels.graphs import new_graph

from minisgl import LLM, EngineConfig
from minisgl.core import ForwardBatch
from minisgl.distributed.comm import GroupComm
from minisgl.distributed.peer import SLOT_BYTES, PeerComm, require_peers
from minisgl.models.config import ModelConfig
from minisgl.models.register import MODELS, build_model
from minisgl.models.weight import load_weights
from minisgl.simple import Recompute
from tests.distributed.group import ThreadComm, in_processes, in_threads, rank_logits
from tests.distributed.test_sharding import IDS, needs_gpus, shape
from tests.distributed.test_tp import EACH, GREEDY, PROMPTS, ROOT, save, workers
from tests.helpers import hf_state, tiny_model

# Where a model's sums are taken: on CPU threads


class SummingThread:
    """A thread of a group that takes sums with what follows them."""

    def __init__(self, comm: ThreadComm) -> None:
        self.comm, self.rank, self.size, self.in_graphs = comm, comm.rank, comm.size, comm.in_graphs
        self.all_gather, self.broadcast, self.minimum = comm.all_gather, comm.broadcast, comm.minimum
        self.summed: list[int] = []  # rows of each sum

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a layer takes a sum of its own")

    def all_reduce_add_rms_norm(self, x: torch.Tensor, residual: Any, weight: torch.Tensor, eps: float) -> Any:
        self.summed.append(len(x))
        return reference.add_rms_norm(self.comm.all_reduce(x), residual, weight, eps)


@torch.inference_mode()
def summed_in_norms(comm: ThreadComm, config: ModelConfig, weights: dict[str, torch.Tensor], rows: Any = None) -> Any:
    """Logits of a rank whose norms take the sums, and how many rows each sum had."""
    summing = SummingThread(comm)
    model = build_model(config, comm=summing, sums_in_norms=True)
    load_weights(model, weights.items(), torch.device("cpu"), torch.float32)
    logits = model(ForwardBatch(IDS, torch.arange(len(IDS)), Recompute(), rows))
    return logits, summing.summed


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied-vocabulary-101": {"tie_word_embeddings": True, "vocab_size": 101},
    "biased": {"attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("architecture", MODELS)
def test_sums_in_norms_give_the_logits_of_sums_in_layers(architecture, variant, size):
    whole = tiny_model(architecture, **shape(**variant))

    for logits, _ in in_threads(size, summed_in_norms, whole.config, hf_state(whole)):
        assert torch.equal(logits, in_threads(size, rank_logits, whole.config, hf_state(whole), IDS)[0])


def test_each_norm_takes_one_sum_and_the_last_one_only_rows_that_somebody_reads():
    whole = tiny_model(**shape(num_layers=3))

    results = in_threads(2, summed_in_norms, whole.config, hf_state(whole), torch.tensor([4, 22]))

    assert [summed for _, summed in results] == [[len(IDS)] * 6 + [2]] * 2


# The switch


def test_one_rank_has_nothing_to_sum():
    with pytest.raises(ValueError, match="custom_all_reduce is True, but must be off with one rank"):
        EngineConfig(custom_all_reduce=True)


def test_on_a_cpu_it_is_refused_before_there_are_processes(tmp_path):
    save(tmp_path)
    config = EngineConfig(model=str(tmp_path), tp=2, device="cpu", custom_all_reduce=True)

    with pytest.raises(ValueError, match="custom_all_reduce cannot be used: it is for GPUs, not for cpu"):
        LLM(config)

    assert not workers()


def test_gpus_that_do_not_reach_each_other_are_named(monkeypatch):
    monkeypatch.setattr("minisgl.distributed.peer.why_not", lambda *_: "")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) != (1, 2))

    require_peers(torch.device("cuda"), "nccl", 2)
    require_peers(torch.device("cuda"), "gloo", 4)  # all on one
    with pytest.raises(ValueError, match="GPUs 1 and 2 cannot reach each other's memory; use --no-custom-all-reduce"):
        require_peers(torch.device("cuda"), "nccl", 3)


# Processes


def gathered_bytes(comm: GroupComm) -> list[bytes]:
    return comm.gather_bytes(bytes([comm.rank, 255, 0]))


def test_ranks_meet_to_tell_each_other_bytes(tmp_path):
    assert in_processes(2, tmp_path, "gloo", gathered_bytes) == [[b"\0\xff\0", b"\1\xff\0"]] * 2


def sums_over_a_file(comm: GroupComm, file: str, calls: int) -> list[int]:
    """Calls of random sizes, as fast as each rank can, with inboxes in a file that all map; which were wrong."""
    from minisgl_kernels.triton.all_reduce import GENERATIONS, Inbox, all_reduce

    rank, size, slot, choose, late = comm.rank, comm.size, 512, random.Random(0), random.Random(comm.rank)
    memory = torch.from_file(file, shared=True, size=size * GENERATIONS * size * slot // 2, dtype=torch.int16)
    pointers = torch.tensor([inbox.data_ptr() for inbox in memory.chunk(size)])
    state, broken = torch.zeros(3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    inbox, wrong = Inbox(pointers, state, broken, rank, slot), []
    for call in range(calls):
        xs = torch.randn(size, choose.randint(1, 3), 36, generator=torch.Generator().manual_seed(call))
        time.sleep(late.choice([0, 0, 0.05]))
        if not torch.allclose(all_reduce(xs[rank], inbox), xs.sum(0), atol=1e-6):
            wrong.append(call)
    return wrong


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is not chosen")
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_that_run_at_the_same_time_need_no_other_signal_than_the_data(size, tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    file = tmp_path / "inboxes"
    file.write_bytes(b"\0\x80" * (size * 3 * size * 256))  # all clear

    assert in_processes(size, tmp_path, "gloo", sums_over_a_file, str(file), 8) == [[]] * size


def draw(rows: int, seed: int, dtype: torch.dtype, hidden: int = 576) -> torch.Tensor:
    """The same on each rank: drawn on the host."""
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def total_of(rows: int, seeds: range, dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros(rows, 576, device="cuda")
    for seed in seeds:
        total += draw(rows, seed, dtype).float()
    return total.to(dtype)


def sums(comm: GroupComm, dtype: torch.dtype, calls: int) -> dict[str, Any]:
    """Calls of random sizes in a random order, the same on all ranks; which of them were wrong."""
    peers, choose, rank, size = PeerComm(comm, torch.device("cuda")), random.Random(0), comm.rank, comm.size
    weight, residual = draw(1, -1, dtype)[0], draw(64, -2, dtype)
    from minisgl_kernels.triton.norm import add_rms_norm

    wrong, x = [], torch.zeros(4, 576, dtype=dtype, device="cuda")
    graph = new_graph(x.device)
    graph.warm_up(lambda: peers.all_reduce(x))
    in_graph = graph.capture(lambda: [peers.all_reduce(x), peers.all_reduce(x + x)])
    for call in range(calls):
        seeds, kind = range(size * call, size * (call + 1)), choose.randrange(3)
        if kind == 0:
            x.copy_(draw(4, seeds[rank], dtype))
            graph.replay()
            total = total_of(4, seeds, dtype)
            right = torch.equal(in_graph[0], total) and torch.equal(in_graph[1], total * 2)
        else:
            rows = choose.randint(1, 64)
            mine, total = draw(rows, seeds[rank], dtype), total_of(rows, seeds, dtype)
            if kind == 1:
                right = torch.equal(peers.all_reduce(mine), total)
            else:
                normed, stream = peers.all_reduce_add_rms_norm(mine, residual[:rows], weight, 1e-5)
                expected = add_rms_norm(total, residual[:rows], weight, 1e-5)
                close = torch.allclose(normed.float(), expected[0].float(), rtol=4 * torch.finfo(dtype).eps, atol=0)
                right = close and torch.equal(stream, expected[1])
        if not right:
            wrong.append((call, kind))
    large = torch.ones(SLOT_BYTES // 4 + 1, 1, device="cuda")
    others = {
        "large": bool((peers.all_reduce(large) == size).all()),
        "integers": bool((peers.all_reduce(torch.ones(3, dtype=torch.int64, device="cuda")) == size).all()),
        "gathered": peers.all_gather(torch.full((2, 1), float(rank), device="cuda")).tolist(),
        "least": peers.minimum(10 - rank),
    }
    torch.cuda.synchronize()
    comm.minimum(0)
    peers.close()
    return {"wrong": wrong, **others}


def check_sums(size: int, folder: Path, backend: str, dtype: torch.dtype, calls: int) -> None:
    expected = {
        "wrong": [],
        "large": True,
        "integers": True,
        "gathered": [[float(rank) for rank in range(size)]] * 2,
        "least": 11 - size,
    }
    assert in_processes(size, folder, backend, sums, dtype, calls) == [expected] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [pytest.param(n, marks=needs_gpus(1)) for n in (2, 3)])
def test_processes_on_one_gpu_sum_over_its_memory(size, dtype, tmp_path):
    check_sums(size, tmp_path, "gloo", dtype, 200)


@pytest.mark.parametrize("size", [pytest.param(n, marks=needs_gpus(n)) for n in (2, 4, 8)])
def test_gpus_sum_over_each_others_memory(size, tmp_path):
    check_sums(size, tmp_path, "nccl", torch.bfloat16, 500)


def memory(comm: GroupComm) -> list[tuple[int, int]]:
    """Bytes that the GPU has less while there is peer memory, and less when it is closed. Several times: the first use
    of a GPU takes some for good, and other processes may be using it."""
    less = []
    for _ in range(6):
        comm.minimum(0)
        before = torch.cuda.mem_get_info()[0]
        comm.minimum(0)
        peers = PeerComm(comm, torch.device("cuda"))
        assert bool((peers.all_reduce(torch.ones(2, 576, device="cuda")) == comm.size).all())
        comm.minimum(0)
        during = before - torch.cuda.mem_get_info()[0]
        comm.minimum(0)
        peers.close()
        comm.minimum(0)
        less.append((during, before - torch.cuda.mem_get_info()[0]))
    return less


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="measures all of the GPU, so no other test may use it")
@pytest.mark.parametrize("size", [pytest.param(2, marks=needs_gpus(1))])
def test_closing_gives_the_memory_back(size, tmp_path):
    for less in in_processes(size, tmp_path, "gloo", memory):
        assert max(during for during, _ in less) >= size * 3 * size * SLOT_BYTES
        assert min(after for _, after in less) < 1 << 20


# Engines

ON_GPU = {"device": "cuda", "dtype": "float32", "kv_pages": 40, "max_batch_tokens": 16, "max_running_requests": 4}


def tokens(folder: Path, **switches: Any) -> list[list[int]]:
    with LLM(EngineConfig(model=str(folder), **ON_GPU, **switches)) as llm:
        done = llm.generate(PROMPTS, GREEDY, progress=False) + llm.generate(PROMPTS, EACH, progress=False)
    assert not any(completion.error for completion in done)
    return [completion.token_ids for completion in done]


def check_tokens(folder: Path, architecture: str, **switches: Any) -> None:
    save(folder, architecture, head_dim=16, tie_word_embeddings=True)
    assert tokens(folder, tp=2, custom_all_reduce=True, **switches) == tokens(folder, graphs="off")
    assert not workers()


@pytest.mark.parametrize("architecture", [pytest.param(name, marks=needs_gpus(1)) for name in MODELS])
def test_two_ranks_on_one_gpu_give_the_tokens_of_one(architecture, tmp_path):
    check_tokens(tmp_path, architecture, tp_backend="gloo")


@pytest.mark.parametrize("graphs", [pytest.param(graphs, marks=needs_gpus(2)) for graphs in ("off", "lazy")])
def test_two_ranks_with_a_gpu_each_give_the_tokens_of_one(graphs, tmp_path):
    check_tokens(tmp_path, "Qwen3ForCausalLM", tp_backend="nccl", graphs=graphs)


KILLED = """
    import os, signal, sys
    import torch
    from minisgl import LLM, EngineConfig, SamplingParams
    from minisgl.distributed.ranks import RankDied

    switches = dict(device="cuda", dtype="float32", kv_pages=40, custom_all_reduce=True)
    llm = LLM(EngineConfig(model=sys.argv[1], tp=2, tp_backend=sys.argv[2], **switches))
    step, steps, [member] = llm.engine.step, [], llm.engine.group.ranks._crew.members

    def killing():
        steps.append(0)
        if len(steps) == 5:
            os.kill(member.process.pid, signal.SIGKILL)
        return step()

    llm.engine.step = killing
    params = SamplingParams(max_tokens=100, ignore_eos=True, detokenize=False)
    try:
        llm.generate([[3, 99, 14]], params, progress=False)
    except RankDied as death:
        print(death, flush=True)
    llm.close()
    print("and the GPU computes", torch.ones(3, device="cuda").sum().item())
"""


@pytest.mark.parametrize(
    "backend", [pytest.param("gloo", marks=needs_gpus(1)), pytest.param("nccl", marks=needs_gpus(2))]
)
def test_a_kernel_that_waits_for_a_dead_rank_comes_to_an_end(backend, tmp_path):
    save(tmp_path, head_dim=16)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(KILLED))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}

    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), backend], capture_output=True, text=True, env=env, timeout=300
    )

    assert "rank 1 was killed by signal 9 (SIGKILL) while running" in done.stdout, done.stderr
    assert "and the GPU computes 3.0" in done.stdout, done.stderr
