"""A whole engine over several processes: the tokens of one process, and an end that leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from minisgl import LLM, EngineConfig, SamplingParams
from minisgl.distributed.ranks import RankDied
from tests.distributed.group import ended_in_time, eventually
from tests.helpers import hf_twin, tiny_model
from tests.tiny_tokenizer import byte_level_tokenizer

ROOT = Path(__file__).parents[2]
PROMPTS = [[3, 99, 14, 15, 92, 65, 35], [3, 99, 14], [7] * 40, [3, 99, 14, 15, 92, 65, 35, 8, 97]]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0, detokenize=False)
EACH = [  # what is drawn, what is filtered, and what needs rank 0's host
    SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.9, seed=1, detokenize=False),
    SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.9, top_k=20, top_p=0.9, seed=2, detokenize=False),
    SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.9, repetition_penalty=1.3, seed=3, detokenize=False),
    SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0, logprobs=2, detokenize=False),
]
SHAPES = [  # KV heads, vocabulary, tied and biases; 12 query heads divide by all sizes
    ("LlamaForCausalLM", 2, {"num_kv_heads": 1, "tie_word_embeddings": True}),
    ("LlamaForCausalLM", 4, {"num_kv_heads": 2, "attention_bias": True}),
    ("Qwen3ForCausalLM", 2, {"num_kv_heads": 3}),
    ("Qwen3ForCausalLM", 4, {"num_kv_heads": 3, "tie_word_embeddings": True}),
]


def save(folder: Path, architecture: str = "LlamaForCausalLM", **shape: Any) -> None:
    """A checkpoint whose 12 query heads and MLP divide by 2 and 4."""
    base = {"num_heads": 12, "head_dim": 8, "intermediate_size": 48, "vocab_size": 101, "tie_word_embeddings": False}
    hf_twin(tiny_model(architecture, **base | shape)).save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)


def workers() -> list[str]:
    """The ranks that this process has started and that still run."""
    return [child.name for child in active_children() if child.name.startswith("rank ")]


def tokens(folder: Path, tp: int) -> list[list[int]]:
    switches = {"kv_pages": 40, "max_batch_tokens": 16, "max_running_requests": 4, "overlap": "on"}
    with LLM(EngineConfig(model=str(folder), tp=tp, device="cpu", **switches)) as llm:
        done = llm.generate(PROMPTS, GREEDY, progress=False) + llm.generate(PROMPTS, EACH, progress=False)
    assert not any(completion.error for completion in done)
    return [completion.token_ids for completion in done]


@pytest.mark.parametrize(("architecture", "tp", "shape"), SHAPES)
def test_tp_gives_the_tokens_of_one_process(architecture, tp, shape, tmp_path):
    save(tmp_path, architecture, **shape)

    assert tokens(tmp_path, tp) == tokens(tmp_path, 1)
    assert not workers()


def test_smollm2_on_three_ranks_and_a_size_that_its_heads_refuse(smollm2_path):
    few = {"kv_pages": 40, "max_running_requests": 2}
    params = SamplingParams(max_tokens=6, temperature=0.0)
    texts = []
    for tp in (1, 3):
        with LLM(EngineConfig(tp=tp, device="cpu", **few)) as llm:
            [done] = llm.generate("The capital of France is", params, progress=False)
            texts.append((done.text, done.token_ids))

    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="9 query heads do not divide by tp 2: choose a divisor of 9"):
        LLM(EngineConfig(tp=2, device="cpu", **few))
    assert not workers()


SCRIPT = """
    import sys
    from minisgl import LLM, EngineConfig, SamplingParams

    with LLM(EngineConfig(model=sys.argv[1], tp=2, device="cpu", kv_pages=40)) as llm:
        [member], ring = llm.engine.group.ranks._crew.members, llm.engine.group._ring
        locks = [lock._semlock.name.replace("/", "sem.", 1) for lock in [*ring._filled, *ring._free]]
        print("ready", member.process.pid, ring._block.name, *locks, flush=True)
        params = SamplingParams(max_tokens=100, ignore_eos=True, detokenize=False)
        while True:
            llm.generate([[3, 99, 14]], params, progress=False)
"""


@pytest.fixture
def run(tmp_path):
    """Starts a process that generates on two ranks for ever, and gives it and the process id of its rank 1. None that
    was started leaves shared memory."""
    save(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    path = os.pathsep.join([str(ROOT), *sys.path])
    started, files = [], []

    def run():
        process = subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        started.append(process)
        line = process.stdout.readline().split()
        assert line[:1] == ["ready"], process.communicate()[1]
        files.extend(Path("/dev/shm", name) for name in line[2:])
        time.sleep(0.3)  # into the run
        return process, [int(line[1])]

    yield run
    for process in started:
        process.kill()
        process.communicate()
    assert len(files) == 3 * len(started)
    assert eventually(lambda: not any(file.exists() for file in files))


@pytest.mark.parametrize(
    ("whom", "what", "said"),
    [
        ("rank 1", signal.SIGKILL, "rank 1 was killed by signal 9 (SIGKILL) while running"),
        ("rank 0", signal.SIGKILL, ""),
        ("rank 0", signal.SIGTERM, ""),
        ("all", signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_whoever_is_killed_in_a_run_all_end_within_two_seconds_and_say_why(run, whom, what, said):
    ended = []

    def kill(process, rank_1):
        ended.append(process)
        if whom == "all":  # as a terminal does
            os.killpg(process.pid, what)
        else:
            os.kill(rank_1 if whom == "rank 1" else process.pid, what)

    assert ended_in_time(run, kill)
    for process in ended:
        _, errors = process.communicate(timeout=60)
        assert process.returncode
        assert said in errors


def test_a_dead_rank_is_an_error_in_the_process_that_lives_on(tmp_path):
    save(tmp_path)
    llm = LLM(EngineConfig(model=str(tmp_path), tp=2, device="cpu", kv_pages=40))
    assert llm.engine.group
    [member] = llm.engine.group.ranks._crew.members
    os.kill(member.process.pid, signal.SIGKILL)

    for _ in range(2):  # now, and later
        with pytest.raises(RankDied, match="rank 1 was killed by signal 9"):
            llm.generate(PROMPTS, GREEDY, progress=False)
    llm.close()


def test_a_rank_that_dies_in_a_step_is_named_although_its_connection_broke_first(tmp_path, monkeypatch):
    save(tmp_path)
    llm = LLM(EngineConfig(model=str(tmp_path), tp=2, device="cpu", kv_pages=40))
    assert llm.engine.group
    crew, step = llm.engine.group.ranks._crew, llm.engine.step
    [member], deaths, steps = crew.members, crew.deaths, []

    def noticed_late():
        time.sleep(0.2)
        return deaths()

    def killing():
        steps.append(len(steps))
        if len(steps) == 3:
            os.kill(member.process.pid, signal.SIGKILL)
        return step()

    monkeypatch.setattr(crew, "deaths", noticed_late)
    monkeypatch.setattr(llm.engine, "step", killing)
    with pytest.raises(RankDied, match="rank 1 was killed by signal 9"):
        llm.generate(PROMPTS, GREEDY, progress=False)
    llm.close()


def test_after_an_interrupted_step_the_engine_says_that_its_ranks_were_ended(tmp_path, monkeypatch):
    save(tmp_path)
    llm = LLM(EngineConfig(model=str(tmp_path), tp=2, device="cpu", kv_pages=40))
    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.runner, "launch", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, progress=False)

    assert not workers()
    with pytest.raises(RankDied, match="the other ranks were ended, as a step broke off"):
        llm.generate(PROMPTS, GREEDY, progress=False)
    llm.close()
