"""Task 10.6: a response whose client may go at any moment."""

from __future__ import annotations

import asyncio

import pytest

from minisgl.server.client import EngineDied
from minisgl.server.errors import ApiError
from minisgl.server.live import Live
from minisgl.server.replies import frame
from tests.ch10_serving.scene import Connection, events, run, settled


class Work:
    """What a route does: sends some events, then waits until it is let go. Notes how it ended."""

    def __init__(self, *data: str, fails: Exception | None = None, tidy: int = 0) -> None:
        self.data, self.fails, self.tidy, self.how = data, fails, tidy, "not begun"
        self.go_on = asyncio.Event()

    async def __call__(self, live: Live) -> None:
        self.how = "running"
        try:
            for data in self.data:
                await live.events(frame(data))
            await self.go_on.wait()
            if self.fails:
                raise self.fails
            await live.events(frame("end"), last=True)
            self.how = "done"
        except asyncio.CancelledError:
            for _ in range(self.tidy):  # an abort to send, a queue to close
                await asyncio.sleep(0)
            self.how = "cancelled"
            raise


async def respond(work, client, **options):
    """The response, begun; and the reasons that it is told for cutting the work off."""
    reasons = []
    live = Live(work, cut_off=reasons.append, **options)
    task = asyncio.ensure_future(live({"type": "http"}, client.receive, client.send))
    await settled()
    if task.done():  # there is no reason yet why it should be
        task.result()
    return task, reasons


def test_work_that_ends_is_the_response():
    async def main():
        work, client = Work("one"), Connection()
        task, reasons = await respond(work, client)
        work.go_on.set()
        await task
        assert (events(client.body), client.ended, reasons) == (["one", "end"], True, [])

    run(main())


@pytest.mark.parametrize("data", [(), ("one",)], ids=["before the first byte", "in the middle"])
def test_when_the_client_hangs_up_the_work_is_cancelled_at_once(data):
    async def main():
        work, client = Work(*data), Connection()
        task, reasons = await respond(work, client)
        client.hang_up()
        await settled()
        assert work.how == "cancelled"
        assert reasons == ["client_gone"]
        assert task.done()
        assert events(client.body) == list(data), "something is sent to nobody"
        await task

    run(main())


def test_the_response_is_over_only_when_the_work_has_tidied_up():
    async def main():
        work, client = Work("one", tidy=5), Connection()
        task, _ = await respond(work, client)
        client.hang_up()
        await task
        assert work.how == "cancelled"

    run(main())


def test_a_client_that_stays_is_not_waited_for_or_listened_to():
    async def main():
        work, client = Work(), Connection()
        task, _ = await respond(work, client)
        work.go_on.set()
        await settled()
        assert task.done()

    run(main())  # which finds whatever still runs


def test_an_answer_that_was_complete_when_its_client_hung_up_was_not_cut_off():
    async def main():
        work, client = Work("one"), Connection()
        task, reasons = await respond(work, client)
        work.go_on.set()
        client.hang_up()
        await task
        assert (work.how, reasons) == ("done", [])

    run(main())


def test_after_the_time_the_work_is_cancelled_and_the_client_is_told():
    async def main():
        work, client = Work(), Connection()
        task, reasons = await respond(work, client, timeout_s=0.01)
        with pytest.raises(ApiError) as error:  # nothing is sent yet, so that it becomes the response
            await task
        assert (error.value.status_code, work.how, reasons) == (408, "cancelled", ["timeout"])

    run(main())


def test_in_the_middle_of_a_stream_the_client_is_told_by_its_last_event():
    async def main():
        work, client = Work("one"), Connection()
        task, reasons = await respond(work, client, timeout_s=0.01)
        await task
        [first, last] = events(client.body)
        assert (first, last["error"]["code"], client.ended, reasons) == ("one", "timeout", True, ["timeout"])

    run(main())


def test_without_a_time_limit_there_is_none():
    async def main():
        work, client = Work("one"), Connection()
        task, _ = await respond(work, client, timeout_s=0.0)
        await asyncio.sleep(0.02)
        assert (work.how, task.done()) == ("running", False)
        client.hang_up()
        await task

    run(main())


def test_an_error_before_the_first_byte_becomes_the_response():
    async def main():
        work, client = Work(fails=ApiError(429, "full")), Connection()
        task, reasons = await respond(work, client)
        work.go_on.set()
        with pytest.raises(ApiError):
            await task
        assert (client.sent, reasons) == ([], [])

    run(main())


def test_an_error_in_the_middle_of_a_stream_is_its_last_event():
    async def main():
        work, client = Work("one", fails=EngineDied("killed by signal 9")), Connection()
        task, reasons = await respond(work, client)
        work.go_on.set()
        await task
        [first, last] = events(client.body)
        assert (first, last["error"]["code"], client.ended, reasons) == ("one", "engine_died", True, [])

    run(main())


def test_when_the_response_itself_is_cancelled_its_work_does_not_go_on():
    async def main():
        work, client = Work("one"), Connection()
        task, _ = await respond(work, client)
        task.cancel()
        await settled()
        assert (work.how, task.cancelled()) == ("cancelled", True)

    run(main())
