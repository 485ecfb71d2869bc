"""The ring of commands: all that is sent is read, in order, by every reader, and nothing stays behind."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, closing
from multiprocessing import get_context
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from minisgl.distributed.shared_tensor import HEADER, CommandRing

SLOT = 16  # words of a command that fit a slot in these tests
SHM = Path("/dev/shm")


@pytest.fixture
def open_ring():
    """Makes a small ring and its readers in this process; closes all."""
    with ExitStack() as stack:

        def make(readers=1, slots=3, words=SLOT):
            ring = stack.enter_context(closing(CommandRing(readers, slots, slot_bytes=8 * (HEADER + words))))
            return ring, *(stack.enter_context(closing(ring.reader(i))) for i in range(readers))

        yield make


def numbers(*lengths, seed=0):
    """Arrays of these lengths, with numbers that need all 64 bits."""
    random = np.random.default_rng(seed)
    return [random.integers(-(2**63), 2**63, n, dtype=np.int64) for n in lengths]


def take(reader, **options):
    """The next command, copied out of the slot."""
    with reader.receive(**options) as arrays:
        return [array.copy() for array in arrays]


def same(found, sent):
    return [array.tolist() for array in found] == [array.tolist() for array in sent]


def beside(target):
    """Run it in another thread, so that this one can be the other end. Returns the thread and what it gave."""
    results = []
    thread = Thread(target=lambda: results.append(target()), daemon=True)
    thread.start()
    return thread, results


shown = pytest.mark.skipif(not SHM.is_dir(), reason="this system shows no names of shared memory")


def names(ring):
    """What the ring is called in /dev/shm: the block, and each semaphore."""
    semaphores = [f"sem.{s._semlock.name.lstrip('/')}" for s in (*ring._filled, *ring._free)]
    return [ring._block.name.lstrip("/"), *semaphores]


def there(names):
    """Those of the names that are in use."""
    return [name for name in names if (SHM / name).exists()]


# What is sent is read.


def test_commands_come_in_the_order_they_were_sent_in(open_ring):
    ring, reader = open_ring(slots=3)

    found = []
    for i in range(10):  # more than three times around
        ring.send([np.array([i])])
        if i >= 2:  # with three in the ring
            found += take(reader)
    found += take(reader) + take(reader)

    assert [array.tolist() for array in found] == [[i] for i in range(10)]


@pytest.mark.parametrize("words", range(2 * SLOT + 3))
def test_a_command_of_any_length_arrives_whole(open_ring, words):
    """The number of arrays and each length take a word too: a slot is full at SLOT - 2 numbers in one array."""
    ring, reader = open_ring(slots=4)
    sent = numbers(words, seed=words)

    ring.send(sent)
    ring.send([np.array([7])])  # starts in a slot of its own

    assert same(take(reader), sent)
    assert same(take(reader), [np.array([7])])


@pytest.mark.parametrize(
    "lengths",
    [(), (0,), (0, 0, 0), (3, 0, 2), (0, 5, 0), (4, 4, 3), (30, 0, 1), (0,) * 40, (1,) * 40],
    ids=str,
)
def test_the_arrays_of_a_command_keep_their_number_and_lengths(open_ring, lengths):
    ring, reader = open_ring(slots=8)
    sent = numbers(*lengths)

    ring.send(sent)

    assert same(take(reader), sent)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_command_may_be_larger_than_the_whole_ring(open_ring, slots):
    ring, reader = open_ring(slots=slots)
    sent = numbers(500, 0, 77)
    thread, found = beside(lambda: [take(reader, timeout_s=60) for _ in range(2)])

    ring.send(sent, timeout_s=60)
    ring.send(sent[2:], timeout_s=60)
    thread.join(60)

    [[first, second]] = found
    assert same(first, sent)
    assert same(second, sent[2:])


def test_every_reader_reads_every_command(open_ring):
    ring, *readers = open_ring(readers=3, slots=2)
    sent = [numbers(i, 2 * i, seed=i) for i in range(12)]  # of one slot and of several
    others = [beside(lambda reader=reader: [take(reader, timeout_s=60) for _ in sent]) for reader in readers]

    for command in sent:
        ring.send(command, timeout_s=60)
    for thread, _ in others:
        thread.join(60)

    for _, [found] in others:
        assert all(same(*pair) for pair in zip(found, sent, strict=True))


def test_what_was_sent_may_be_changed_afterwards(open_ring):
    ring, reader = open_ring()
    array = np.arange(5)

    ring.send([array])
    array[:] = -1

    assert same(take(reader), [np.arange(5)])


@pytest.mark.parametrize("dtype", [np.int32, np.uint64, np.float64])
def test_only_int64_travels_and_a_refused_command_leaves_no_trace(open_ring, dtype):
    ring, reader = open_ring(slots=1)

    with pytest.raises(TypeError):
        ring.send([np.arange(3), np.zeros(2, dtype)])
    ring.send([np.array([5])], timeout_s=0)

    assert same(take(reader, timeout_s=0), [np.array([5])])


# Read in place.


def test_a_command_in_one_slot_is_read_in_place(open_ring):
    ring, reader = open_ring()
    ring.send(numbers(4, 5))

    with reader.receive() as arrays:
        assert all(np.shares_memory(array, reader.memory) for array in arrays)


@pytest.mark.parametrize("length", [3, 100])
def test_a_reader_can_change_nothing(open_ring, length):
    ring, reader = open_ring(slots=8)
    ring.send(numbers(length))

    with reader.receive() as [array], pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_a_slot_is_given_back_at_the_end_of_the_with(open_ring):
    ring, reader = open_ring(slots=1)
    ring.send(numbers(3))

    with reader.receive() as arrays:
        with pytest.raises(TimeoutError):
            ring.send(numbers(4), timeout_s=0)
        assert same(arrays, numbers(3))  # nothing was written over
    assert arrays == []  # and nobody reads them now by mistake


def test_a_slot_is_given_back_when_the_reader_fails_in_between(open_ring):
    ring, reader = open_ring(slots=1)
    ring.send(numbers(3))

    with pytest.raises(KeyError), reader.receive():
        raise KeyError

    ring.send(numbers(2), timeout_s=0)
    assert same(take(reader), numbers(2))


def test_a_slow_reader_holds_the_writer_back(open_ring):
    ring, quick, slow = open_ring(readers=2, slots=2)
    for i in range(2):
        ring.send([np.array([i])])
        take(quick)

    with pytest.raises(TimeoutError, match=r"rank 0 waits for rank 2 to free one of 2 slots \(warm-up\): nothing in 0"):
        ring.send([np.array([2])], timeout_s=0, stage="warm-up")

    assert [take(slow)[0].tolist() for _ in range(2)] == [[0], [1]]


# Slots that are not what they should be.


@pytest.mark.parametrize(("word", "name"), [(0, "begun"), (HEADER - 1, "ended")])
def test_a_slot_of_another_generation_is_refused(open_ring, word, name):
    ring, _, reader = open_ring(readers=2)
    ring.send(numbers(3))
    take(reader)
    ring.send(numbers(3))
    ring.memory[2, word] = 41

    with pytest.raises(RuntimeError, match=rf"rank 2: torn read: generation 2 is due.*{name} as 41"):
        take(reader)


@pytest.mark.parametrize("word", [0, HEADER - 1])
def test_a_slot_written_over_while_it_is_read_is_noticed(open_ring, word):
    ring, reader = open_ring(slots=1)
    ring.send(numbers(3))

    with pytest.raises(RuntimeError, match="rank 1: torn read: generation 1 is due"), reader.receive():
        ring.memory[0, word] = 2


def test_a_part_written_over_while_it_is_copied_is_noticed(open_ring, monkeypatch):
    ring, reader = open_ring(slots=3)
    ring.send(numbers(2 * SLOT - 2))
    header, looks = reader._header, []

    def overtaken():
        looks.append(1)
        if len(looks) == 2:  # the first is before the copy
            ring.memory[1, 0] = 4
        return header()

    monkeypatch.setattr(reader, "_header", overtaken)
    with pytest.raises(RuntimeError, match="rank 1: torn read: generation 1 is due, the slot was begun as 4"):
        take(reader)


def test_a_command_that_broke_off_is_not_joined_with_the_next(open_ring):
    ring, reader = open_ring(slots=1)
    with pytest.raises(TimeoutError):
        ring.send(numbers(3 * SLOT), timeout_s=0)  # the first part stands in the ring
    thread, _ = beside(lambda: ring.send(numbers(3), timeout_s=60))

    with pytest.raises(RuntimeError, match=f"rank 1: generation 2 .* word 0 on, word {SLOT} is due"):
        take(reader, timeout_s=60)
    thread.join(60)


def test_a_reader_that_gave_up_inside_a_command_does_not_take_its_rest_for_another(open_ring):
    ring, reader = open_ring(slots=1)
    thread, _ = beside(lambda: ring.send(numbers(2 * SLOT - 2), timeout_s=60))

    def stop():
        raise InterruptedError

    reader._filled, filled = Once(reader._filled), reader._filled
    with pytest.raises(InterruptedError):
        take(reader, alive=stop)
    reader._filled = filled
    thread.join(60)

    with pytest.raises(RuntimeError, match=f"rank 1: generation 2 .* word {SLOT} on, word 0 is due"):
        take(reader)


class Once:
    """A semaphore that can be taken once, and then no more."""

    def __init__(self, semaphore):
        self.semaphore = semaphore

    def acquire(self, timeout):
        semaphore, self.semaphore = self.semaphore, None
        return semaphore is not None and semaphore.acquire(timeout=60)


# Waiting.


class PeerIsDead(Exception):
    pass


def peer_is_dead():
    raise PeerIsDead


def test_a_waiting_writer_asks_whether_the_others_live(open_ring):
    ring, _ = open_ring(slots=1)
    ring.send(numbers(1))

    with pytest.raises(PeerIsDead):
        ring.send(numbers(1), alive=peer_is_dead)


def test_a_waiting_reader_asks_whether_the_others_live(open_ring):
    _, reader = open_ring()

    with pytest.raises(PeerIsDead):
        take(reader, alive=peer_is_dead)


def test_why_nobody_answers_is_said_before_that_nobody_answers(open_ring):
    _, reader = open_ring()

    with pytest.raises(PeerIsDead):
        take(reader, alive=peer_is_dead, timeout_s=0)


def test_who_need_not_wait_does_not_ask(open_ring):
    ring, reader = open_ring()

    ring.send(numbers(1), alive=peer_is_dead)

    assert same(take(reader, alive=peer_is_dead), numbers(1))


def test_a_reader_says_what_it_waited_for_and_may_wait_again(open_ring):
    ring, reader = open_ring()

    with pytest.raises(TimeoutError, match=r"rank 1 waits for a command of rank 0 \(load\): nothing in 0.01 s"):
        take(reader, timeout_s=0.01, stage="load")
    ring.send(numbers(2))

    assert same(take(reader), numbers(2))


def test_a_waiting_reader_sleeps_between_its_looks(open_ring):
    """One call of the semaphore for each look: the system wakes it, it does not ask again and again."""
    _, reader = open_ring()
    timeouts = []

    class Never:
        def acquire(self, timeout):
            timeouts.append(timeout)
            return False

    def third_time():
        if len(timeouts) == 3:
            raise PeerIsDead

    reader._filled = Never()
    with pytest.raises(PeerIsDead):
        take(reader, alive=third_time)

    assert timeouts == [0.2] * 3


# Side by side, and afterwards.


def test_two_rings_side_by_side_do_not_mix(open_ring):
    (one, reader_of_one), (other, reader_of_other) = open_ring(), open_ring()

    one.send([np.array([1])])
    other.send([np.array([2])])

    assert same(take(reader_of_other), [np.array([2])])
    assert same(take(reader_of_one), [np.array([1])])


def test_the_name_may_be_taken_away_once_all_readers_have_attached(open_ring):
    ring, reader = open_ring()

    ring.unlink()
    ring.unlink()
    ring.send(numbers(3))

    assert same(take(reader), numbers(3))
    with pytest.raises(FileNotFoundError):
        ring.reader(0)


@shown
def test_a_ring_closed_twice_leaves_nothing_behind():
    ring = CommandRing(2)
    readers = [ring.reader(i) for i in range(2)]
    made = names(ring)
    assert there(made) == made

    for end in (*readers, ring, *readers, ring):
        end.close()
    del end, readers

    assert there(made) == []


def test_a_view_that_is_still_held_survives_the_end_of_the_ring(open_ring):
    ring, reader = open_ring()
    ring.send(numbers(4))
    with reader.receive() as [array]:
        pass

    reader.close()
    ring.close()

    assert same([array], numbers(4))


@pytest.mark.parametrize(
    ("readers", "slots", "slot_bytes"),
    [(-1, 1, 64), (1, 0, 64), (1, 1, 8 * HEADER + 7)],
    ids=["readers", "slots", "bytes"],
)
def test_a_ring_that_could_carry_nothing_is_refused(readers, slots, slot_bytes):
    with pytest.raises(ValueError, match=f"{slots} slots of {slot_bytes} bytes for {readers} readers"):
        CommandRing(readers, slots, slot_bytes)


# Over processes.


def add_up(reader, answers):
    """A rank: says what each command adds up to, until one is empty."""
    answers.send(reader.rank)
    while True:
        with reader.receive(timeout_s=60) as arrays:
            if not arrays:
                return
            answers.send([int(array.sum()) for array in arrays])


def test_other_processes_read_what_this_one_sends():
    spawn, commands = get_context("spawn"), [[np.arange(n), np.full(3, n)] for n in (0, 1, 7, 5000)]
    ring = CommandRing(readers=2, slots=2, slot_bytes=1024)
    made = names(ring)
    pipes = [spawn.Pipe() for _ in range(2)]
    ranks = [spawn.Process(target=add_up, args=(ring.reader(i), pipes[i][1]), daemon=True) for i in range(2)]
    for process in ranks:
        process.start()
    assert [mine.recv() for mine, _ in pipes] == [1, 2]
    ring.unlink()

    for command in [*commands, []]:
        ring.send(command, timeout_s=60)
    for process in ranks:
        process.join(60)

    for mine, _ in pipes:
        assert [mine.recv() for _ in commands] == [[int(a.sum()) for a in command] for command in commands]
    assert [process.exitcode for process in ranks] == [0, 0]
    ring.close()
    del process, ranks
    assert there(made) == []


SCRIPT = """
import os, signal, sys
from multiprocessing import get_context
import numpy as np
from minisgl.distributed.shared_tensor import CommandRing
from tests.distributed.test_shared_tensor import add_up, names

if __name__ == "__main__":
    ring, (mine, theirs) = CommandRing(1), get_context("spawn").Pipe()
    rank = get_context("spawn").Process(target=add_up, args=(ring.reader(0), theirs))
    rank.start()
    mine.recv()
    ring.send([np.arange(4)])
    print(*names(ring), *mine.recv(), flush=True)
    rank.kill()
    rank.join()
    if sys.argv[1] == "unlinked":
        ring.unlink()
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@shown
@pytest.mark.parametrize("end", ["forgotten", "unlinked", "killed"])
def test_a_process_that_does_not_close_its_ring_leaves_nothing_behind(tmp_path, end):
    script = tmp_path / "rank_0.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    # This returns when the resource tracker, which writes to the same pipe, has ended too.
    done = subprocess.run([sys.executable, str(script), end], capture_output=True, text=True, env=environment)

    *made, answer = done.stdout.split()
    assert (len(made), answer) == (3, "6")
    assert there(made) == []
    if end != "killed":  # then the resource tracker cleans up, and says so
        assert done.stderr == ""
