"""A server's start, its clients' leaving, and its end, in processes that are really ended."""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from minisgl.cli import main
from tests.server.conftest import PATIENCE_S, launched, wait_until, write_tiny_model

pytestmark = [pytest.mark.xdist_group("server"), pytest.mark.slow]

ENDLESS = {"model": "tiny", "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}
FLAGS = ["--served-model-name", "tiny", "--max-running-requests", "3", "--kv-pages", "1025"]


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    """A model with room for long answers."""
    return write_tiny_model(tmp_path_factory.mktemp("patient"), max_position_embeddings=4096)


@contextmanager
def asked(served, body, path="/v1/completions"):
    """A request on its way; leaving closes the connection."""
    with closing(HTTPConnection(urlsplit(served.url).netloc, timeout=PATIENCE_S)) as connection:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        yield connection


@contextmanager
def watching(served):
    """Someone who looks at the trace."""
    with closing(HTTPConnection(urlsplit(served.url).netloc, timeout=PATIENCE_S)) as connection:
        connection.request("GET", "/trace")
        header = connection.getresponse().readline()
        assert json.loads(header.removeprefix(b"data: "))["pages"] == 1024
        yield


def stats(served):
    return served.ask("/stats").json()


# Start


def test_while_the_model_loads_health_is_red_and_requests_are_refused(tiny_folder):
    with launched(tiny_folder, *FLAGS, ready=False) as served:
        health, refused = served.ask("/health"), served.ask("/v1/completions", ENDLESS)
        assert (health.status, refused.status, refused.headers["retry-after"]) == (503, 503, "5")
        assert "starting" in health.error["message"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--port", "99999"], "port is 99999, but must be between 0 (any) and 65535"),
        (["--host", "no.such.host.invalid"], "cannot listen at port 8000 of no.such.host.invalid"),
        (["--preload", "/no/such/file"], "/no/such/file"),
        (["--model", "TINY", "--max-model-len", "9999", "--port", "0"], "max_model_len is 9,999"),
        (["--model", "TINY", "--port", "TAKEN"], "is taken: choose another with --port"),
    ],
)
def test_a_mistake_at_the_start_is_one_line(flags, says, tiny_folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        stand_ins = {"TINY": str(tiny_folder), "TAKEN": str(other.getsockname()[1])}
        with pytest.raises(SystemExit) as exit:
            main(["serve", *(stand_ins.get(flag, flag) for flag in flags)])

    said = " ".join(capsys.readouterr().err.split())
    assert exit.value.code == 1
    assert says in said
    assert "Traceback" not in said


def test_preloaded_prompts_are_in_the_cache(tiny_folder, tmp_path):
    system = {"role": "system", "content": "You are a patient teacher of small models, and you like pages of sixteen."}
    text = "A text that many requests begin with, which is why it was computed before."
    file = tmp_path / "prompts.txt"
    file.write_text(f"{text}\n\n{json.dumps({'messages': [system]})}\n" + "x" * 5000 + "\n")

    with launched(tiny_folder, *FLAGS, "--preload", str(file)) as served:
        asked = {"model": "tiny", "max_tokens": 1}
        answers = [
            served.ask("/v1/completions", asked | {"prompt": text + " And then?"}),
            served.ask("/v1/chat/completions", asked | {"messages": [system, {"role": "user", "content": "?"}]}),
        ]
        cached = [answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        log = "".join(served.lines)

    assert all(tokens >= len(prompt) - 16 for tokens, prompt in zip(cached, (text, system["content"]), strict=True))
    assert "preloaded 2 prompts" in log
    assert "prompt 3 of --preload was left out" in log


# Clients that leave


@pytest.fixture(scope="module")
def roomy(patient):
    """A server on that model, with places for three."""
    with launched(patient, *FLAGS) as served:
        yield served


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_pages(roomy, stream):
    before, aborted = stats(roomy), roomy.metric("request_aborts_total")
    with asked(roomy, ENDLESS | {"stream": stream, "n": 3}) as connection:
        wait_until(lambda: stats(roomy)["running"] == 3)
        if stream:
            assert connection.getresponse().readline().startswith(b"data: ")
    wait_until(lambda: stats(roomy)["running"] == 0)

    after = stats(roomy)
    assert after["pages_available"] == after["pages"]
    assert roomy.metric("request_aborts_total") - aborted == 3
    assert after["steps"] - before["steps"] < 3000


def test_a_request_that_waits_leaves_the_queue_with_its_client(roomy):
    with asked(roomy, ENDLESS | {"n": 3}):
        wait_until(lambda: stats(roomy)["running"] == 3)
        with asked(roomy, ENDLESS):
            wait_until(lambda: stats(roomy)["waiting"] == 1)
        wait_until(lambda: stats(roomy)["waiting"] == 0)
        assert stats(roomy)["running"] == 3


# The end


def end(served, number=signal.SIGTERM) -> int:
    served.process.send_signal(number)
    return served.process.wait(PATIENCE_S)


def test_a_signal_lets_open_answers_end_and_takes_no_new_ones(patient):
    with launched(patient, *FLAGS, "--grace-s", "100") as served:
        engine = served.engine_pid()
        with asked(served, ENDLESS | {"stream": True}) as connection, watching(served):
            response = connection.getresponse()
            response.readline()
            served.process.send_signal(signal.SIGTERM)
            wait_until(lambda: served.ask("/health").status == 503)
            refused = served.ask("/v1/completions", ENDLESS)
            rest = response.read().decode()
            assert served.process.wait(PATIENCE_S) == 0  # whoever watches the trace does not hold it up
        assert (refused.status, "stopping" in refused.error["message"]) == (503, True)
        assert rest.endswith("data: [DONE]\n\n")
        wait_until(lambda: not os.path.exists(f"/proc/{engine}"))


def test_after_the_grace_time_open_answers_are_told_why_they_end(patient):
    with launched(patient, *FLAGS, "--grace-s", "0") as served:
        with asked(served, ENDLESS | {"stream": True}) as streaming, asked(served, ENDLESS) as whole:
            stream = streaming.getresponse()
            stream.readline()
            wait_until(lambda: stats(served)["running"] == 2)
            served.process.send_signal(signal.SIGINT)
            last = stream.read().decode()
            response = whole.getresponse()
            assert response.status == 503
            assert "stopping" in json.loads(response.read())["error"]["message"]
        error = json.loads(last.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "aborted")
        assert served.process.wait(PATIENCE_S) == 0


def test_a_second_signal_ends_at_once(patient):
    with launched(patient, *FLAGS, "--grace-s", "1000") as served:
        engine = served.engine_pid()
        with asked(served, ENDLESS | {"stream": True, "n": 3}) as connection:
            connection.getresponse().readline()
            served.process.send_signal(signal.SIGTERM)
            wait_until(lambda: served.ask("/health").status == 503)
            assert end(served) == 130
        wait_until(lambda: not os.path.exists(f"/proc/{engine}"))


def test_a_signal_while_the_model_loads_ends_it(tiny_folder):
    with launched(tiny_folder, *FLAGS, ready=False) as served:
        assert end(served) == 0


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="finds the engine's process through /proc")
def test_when_the_engine_is_killed_all_clients_are_told_and_the_server_ends_with_1(patient):
    with launched(patient, *FLAGS) as served:
        with asked(served, ENDLESS | {"stream": True}) as streaming, asked(served, ENDLESS) as whole:
            stream = streaming.getresponse()
            stream.readline()
            wait_until(lambda: stats(served)["running"] == 2)
            os.kill(served.engine_pid(), signal.SIGKILL)
            last = stream.read().decode().strip().split("\n\n")[-1]
            response = whole.getresponse()
            error = json.loads(response.read())["error"]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_died"
        assert (response.status, error["code"]) == (503, "engine_died")
        assert "SIGKILL" in error["message"]
        assert served.process.wait(PATIENCE_S) == 1
        port = served.url.rpartition(":")[2]
    with launched(patient, *FLAGS, "--port", port) as again:  # at once, at the same port
        assert again.ask("/v1/models").status == 200


def test_the_alarm_rings_while_memory_is_short(patient):
    with launched(patient, "--served-model-name", "tiny", "--kv-pages", "41", "--memory-alarm", "0.5") as served:
        with asked(served, ENDLESS | {"prompt": "x" * 400, "stream": True}):
            wait_until(lambda: served.metric("memory_alarm") == 1)
        wait_until(lambda: served.metric("memory_alarm") == 0)
        wait_until(lambda: any("the alarm is over" in line for line in served.lines))
        assert sum("of the pages are in use, --memory-alarm is 0.5" in line for line in served.lines) == 1
