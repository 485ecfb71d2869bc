"""Rank 0 leads: what a step sends to its own device goes to the other ranks as well, and they run the same step.

The others know no requests. A command is a few arrays of integers: which step, what changed in the rows, and the step's
tokens where it has prompts; `StepRunner.follow` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from minisgl.engine.rows import DeviceRows

CAPTURE, REPLAY, EAGER, STOP = range(4)
Command = Sequence[np.ndarray]  # 1-d int64 each; the first begins with one of these four


class Leader:
    """Tells the other ranks what rank 0 is about to run.

    Args:
        send: takes a command to all of them, and may wait until they have room for it.
        rows: those of rank 0, which from now on note what they send.
    """

    def __init__(self, send: Callable[[Command], None], rows: DeviceRows) -> None:
        self._send, self._mailboxes = send, rows.mailboxes
        for mailbox in self._mailboxes:
            mailbox.noted = []

    def capture(self, key: tuple[int, int, bool]) -> None:
        """A graph is about to be captured."""
        self._send([np.array([CAPTURE, *key])])

    def replay(self, key: tuple[int, int, bool]) -> None:
        """A graph is about to be replayed, on what was sent since the command before."""
        self._send([np.array([REPLAY, *key]), *(mailbox.take() for mailbox in self._mailboxes)])

    def eager(self, filtered: bool, by_host: bool, num_tokens: list[int], kv_lens: list[int]) -> None:
        """A step is about to be launched kernel by kernel, on what was sent since the command before."""
        sent = [mailbox.take() for mailbox in self._mailboxes]
        self._send([np.array([EAGER, filtered, by_host]), *sent, np.array(num_tokens), np.array(kv_lens)])
