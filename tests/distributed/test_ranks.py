"""Rank 0 and its workers: how they start, how each of them may die, and that nothing of them stays."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from multiprocessing import active_children, get_context
from pathlib import Path

import pytest

from minisgl.distributed.ranks import RankDied, Ranks
from tests.distributed import rank_targets
from tests.distributed.group import ended_in_time, eventually, gone

ROOT = Path(__file__).parents[2]
FOR_EVER_S = 60  # a test that waits this long has failed; what it waits for takes two seconds


@pytest.fixture
def start():
    """Ranks that are closed after the test."""
    started = []

    def start(size, target, *args, timeout_s=FOR_EVER_S, names=()):
        started.append(Ranks(size, target, args, timeout_s, names=names))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close(grace_s=0)


def is_known(ranks):
    try:
        ranks.check()
    except RankDied:
        return True
    return False


def pids_of(ranks):
    return [info["pid"] for info in ranks.wait_ready()]


def test_every_worker_has_a_rank_and_says_when_it_is_ready(start):
    told = start(3, rank_targets.who).wait_ready()

    assert [(info["rank"], info["size"]) for info in told] == [(1, 3), (2, 3)]
    assert len({os.getpid(), *(info["pid"] for info in told)}) == 3


def test_locks_of_multiprocessing_reach_a_worker(start):
    lock = get_context("spawn").Lock()
    start(2, rank_targets.holds, lock).wait_ready()

    assert not lock.acquire(block=False)


def test_two_runs_side_by_side_do_not_meet(start):
    one, two = start(2, rank_targets.shares, "one"), start(2, rank_targets.shares, "two")

    assert (one.store.get("key"), two.store.get("key")) == (b"one", b"two")
    two.close(grace_s=0)
    [pid] = pids_of(one)
    assert not gone(pid)


def test_a_worker_that_returns_when_told_to_has_not_died(start):
    ranks = start(2, rank_targets.returns_when_told)
    [pid] = ranks.wait_ready()

    ranks.store.set("end", "")
    assert eventually(lambda: gone(pid))
    ranks.check()
    assert ranks.store.get("ended 1") == b"by itself"


def test_close_ends_workers_that_do_not_return(start):
    ranks = start(3, rank_targets.who)
    pids = pids_of(ranks)

    ranks.close(grace_s=0)
    ranks.close()

    assert all(map(gone, pids))
    ranks.check()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_all_processes_of_a_service_get_is_for_rank_0(start, number):
    ranks = start(2, rank_targets.who)
    [pid] = pids_of(ranks)

    os.kill(pid, number)

    assert not eventually(lambda: gone(pid), within_s=0.5)
    ranks.check()


def test_workers_end_when_nobody_holds_their_ranks():
    ranks = Ranks(2, rank_targets.who)
    pids = pids_of(ranks)

    del ranks
    gc.collect()

    assert all(map(gone, pids))


def test_what_a_worker_raises_is_shown(start):
    ranks = start(3, rank_targets.raises, 2)

    with pytest.raises(RankDied, match=r"(?s)rank 2 failed:\nTraceback .*in raises.*ValueError: no weights for rank 2"):
        ranks.wait_ready()


def test_a_target_that_cannot_be_imported_is_a_failure_with_a_traceback(start, tmp_path, monkeypatch):
    code = f"import os\nif os.getppid() == {os.getpid()}: 1 / 0\ndef f(seat): ...\n"
    (tmp_path / "here_only.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    import here_only

    with pytest.raises(RankDied, match=r"(?s)rank 1 failed:\nTraceback .*ZeroDivisionError"):
        start(2, here_only.f).wait_ready()


@pytest.mark.parametrize("code", [0, 3])
def test_a_worker_that_leaves_before_it_is_ready_has_died(start, code):
    with pytest.raises(RankDied, match=f"rank 1 exited with code {code} while counting pages"):
        start(2, rank_targets.leaves_early, code).wait_ready()


def test_a_name_stands_in_messages_for_the_rank(start):
    ranks = start(2, rank_targets.leads_and_fails, names=["the engine"])

    with pytest.raises(RankDied, match=r"(?s)^the engine failed:\nTraceback .*RankDied: the hand failed:\nTraceback"):
        ranks.wait_ready()


def test_a_worker_that_is_killed_takes_its_own_workers_along(start):
    ranks = start(2, rank_targets.leads)
    [told] = ranks.wait_ready()

    os.kill(told["pid"], signal.SIGKILL)

    assert eventually(lambda: gone(told["below"][0]["pid"]))


def test_a_late_worker_is_named_with_its_stage_and_none_is_left(start):
    ranks = start(3, rank_targets.is_late, 2, timeout_s=3)

    with pytest.raises(TimeoutError, match=r"^rank 2 did not report ready within 3 s: it was loading weights$"):
        ranks.wait_ready()
    assert not any(process.name.startswith("rank ") for process in active_children())


def test_a_worker_killed_while_rank_0_is_idle_is_named_at_the_next_check(start):
    ranks = start(3, rank_targets.who)
    first, second = pids_of(ranks)

    os.kill(first, signal.SIGKILL)

    assert eventually(lambda: gone(first) and gone(second))
    for use in (ranks.check, ranks.wait_ready, ranks.guard().__enter__):
        with pytest.raises(RankDied, match=r"^rank 1 was killed by signal 9 \(SIGKILL\) while running$"):
            use()


def test_a_death_breaks_a_wait_at_the_store(start):
    ranks = start(2, rank_targets.who)
    [pid] = pids_of(ranks)
    threading.Timer(0.3, os.kill, (pid, signal.SIGSEGV)).start()

    with pytest.raises(RankDied, match=r"rank 1 was killed by signal 11 \(SIGSEGV\)"), ranks.guard():
        ranks.store.get("what nobody sets")


def test_a_death_breaks_a_sum_over_gloo_and_the_others_are_not_blamed(start):
    ranks = start(3, rank_targets.reduces)
    with ranks.guard():
        group = rank_targets.gloo(ranks.store, 0, 3)
        assert [rank_targets.add(group) for _ in range(3)] == [3, 3, 3]
    pids = pids_of(ranks)
    threading.Timer(0.3, os.kill, (pids[1], signal.SIGKILL)).start()

    with pytest.raises(RankDied, match=r"rank 2 was killed by signal 9 \(SIGKILL\)"), ranks.guard():
        rank_targets.add(group)
    assert eventually(lambda: all(map(gone, pids)))


def test_an_error_of_rank_0_itself_passes_a_guard_unchanged(start):
    ranks = start(2, rank_targets.who)

    with pytest.raises(ZeroDivisionError), ranks.guard():
        _ = 1 / 0
    ranks.check()


def test_what_came_out_of_a_guard_after_a_death_is_not_used(start):
    ranks = start(2, rank_targets.who)
    [pid] = pids_of(ranks)

    def step():
        with ranks.guard():
            os.kill(pid, signal.SIGKILL)
            assert eventually(lambda: is_known(ranks))

    with pytest.raises(RankDied):
        step()


def test_a_death_runs_the_callback_that_frees_rank_0(start):
    ranks, freed = start(2, rank_targets.who), threading.Event()
    ranks.on_death(freed.set)
    [pid] = pids_of(ranks)
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()

    with pytest.raises(RankDied), ranks.guard():
        assert freed.wait(FOR_EVER_S)


SCRIPT = """
import os, signal, sys, threading, time
from minisgl.distributed.ranks import RankDied, Ranks
from tests.distributed import rank_targets
MARK = 1
ranks = Ranks(3, rank_targets.leads)
told = ranks.wait_ready()
everyone = [*told, *told[0]["below"]]
print(*(info["pid"] for info in everyone), *(info["ran_script"] for info in everyone), flush=True)
"""
STUCK = """
os.kill(told[0]["pid"], signal.SIGKILL)
with ranks.guard():
    threading.Event().wait()
"""
BLOCK = """
from multiprocessing.shared_memory import SharedMemory
block = SharedMemory(create=True, size=64)
print(block.name, flush=True)
time.sleep(300)
"""


@pytest.fixture
def run(tmp_path):
    """Starts a script that has no `if __name__ == "__main__"`, in a process group of its own; returns it and the ids of
    its two workers and of the worker that the first of them has."""
    running = []

    def run(more, way="file"):
        (tmp_path / "script.py").write_text(SCRIPT + more)
        arguments = {"file": [str(tmp_path / "script.py")], "-c": ["-c", SCRIPT + more], "stdin": ["-"]}[way]
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=(tmp_path / "script.py").open(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
            start_new_session=True,
        )
        running.append(process)
        *pids, one, two, three = process.stdout.readline().split()
        assert {one, two, three} == {"False"}  # the workers have not run the script
        return process, [int(pid) for pid in pids]

    yield run
    for process in running:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("way", ["file", "-c", "stdin"])
def test_a_script_needs_no_main_guard_and_leaves_no_worker(run, way):
    process, pids = run("", way)

    assert process.communicate(timeout=FOR_EVER_S) == ("", "")
    assert process.returncode == 0
    assert eventually(lambda: all(map(gone, pids)))


def test_rank_0_that_waits_for_ever_exits_with_the_reason(run):
    process, pids = run(STUCK)

    _, error = process.communicate(timeout=FOR_EVER_S)
    assert process.returncode == 1
    assert error == "minisgl: rank 1 was killed by signal 9 (SIGKILL) while running\n"
    assert eventually(lambda: all(map(gone, pids)))


def test_rank_0_that_shares_no_store_imports_no_torch(run):
    process, _ = run("print('torch' in sys.modules)")

    assert process.stdout.readline() == "False\n"


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_leaves_no_worker_and_no_shared_memory(run, by):
    blocks = []

    def kill(process, *pids):
        blocks.append(Path("/dev/shm", process.stdout.readline().strip()))
        process.send_signal(by)

    assert ended_in_time(lambda: run(BLOCK), kill)
    assert eventually(lambda: not any(block.exists() for block in blocks))


def test_a_killed_parent_leaves_no_worker_though_its_forked_child_lives(run):
    process, pids = run("os.fork()\ntime.sleep(300)")

    process.kill()

    assert eventually(lambda: all(map(gone, pids)))
    os.killpg(process.pid, signal.SIGKILL)


def test_ctrl_c_ends_all_and_only_rank_0_speaks_of_it(run):
    process, pids = run("time.sleep(300)")

    os.killpg(process.pid, signal.SIGINT)

    _, error = process.communicate(timeout=FOR_EVER_S)
    assert error.count("Traceback") == error.count("KeyboardInterrupt") == 1
    assert eventually(lambda: all(map(gone, pids)))
