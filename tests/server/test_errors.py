"""Refusals that depend on the server's state and flags. What is wrong with a request itself: test_bad_requests."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from tests.server.conftest import launched, wait_until

pytestmark = pytest.mark.xdist_group("server")

SHORT = {"model": "tiny", "prompt": "x", "max_tokens": 4}
ENDLESS = {"model": "tiny", "prompt": "x", "max_tokens": 1000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def strict(tiny_folder):
    """A server with a key, one place in the batch and one in the queue, small bodies, little time, and a friend."""
    flags = ["--served-model-name", "tiny", "--api-key", "sesame", "--max-queue", "1", "--max-running-requests", "1"]
    flags += ["--max-request-bytes", "3000", "--request-timeout-s", "2", "--cors-origins", "https://friend.example"]
    with launched(tiny_folder, *flags) as served:
        yield served


KEY = {"authorization": "Bearer sesame"}


@pytest.mark.parametrize(
    "sent", [{}, {"authorization": "Bearer open"}, {"authorization": "Basic sesame"}, {"api_key": "sesame"}]
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/stats", "/trace", "/tokenize", "/openapi.json"])
def test_without_the_key_nothing_is_told(strict, path, sent):
    answer = strict.ask(path, **sent)

    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/page/app.js"])
def test_page_health_and_metrics_need_no_key(strict, path):
    assert strict.ask(path).status == 200


def test_with_the_key_all_is_served(strict):
    assert strict.ask("/v1/models", **KEY).status == 200
    assert strict.ask("/v1/completions", SHORT, **KEY).status == 200
    assert strict.ask("/v1/completions", SHORT, authorization="bearer  sesame").status == 200


def test_openais_client_knows_each_error_by_its_class(strict):
    openai = pytest.importorskip("openai")
    options = {"base_url": strict.url + "/v1", "max_retries": 0}
    good, bad = openai.OpenAI(api_key="sesame", **options), openai.OpenAI(api_key="open", **options)

    with pytest.raises(openai.AuthenticationError, match="API key"):
        bad.models.list()
    with pytest.raises(openai.NotFoundError, match="gpt-4o"):
        good.completions.create(**SHORT | {"model": "gpt-4o"})
    with pytest.raises(openai.BadRequestError, match="temperature is 9") as caught:
        good.completions.create(**SHORT, temperature=9)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")


def test_a_prompt_longer_than_the_context_gives_both_numbers(server):
    error = server.ask("/v1/completions", SHORT | {"prompt": "x" * 2000}).error

    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "1,024" in error["message"]
    assert "2,000" in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_text_that_is_far_too_long_is_refused_before_it_is_tokenized(server, path):
    body = {"model": "tiny", "prompt": "x" * 1_000_001}

    assert "1,000,001 characters" in server.ask(path, body).error["message"]


def test_a_long_body_is_refused_however_it_is_announced(strict):
    long = SHORT | {"prompt": "x" * 4000}
    assert strict.ask("/v1/completions", long, **KEY).status == 413
    assert strict.ask("/v1/completions", long, expect="100-continue", **KEY).status == 413

    host = urlsplit(strict.url).netloc
    with socket.create_connection(tuple(host.split(":"))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer sesame\r\n"
        head += "content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.sendall(head.encode() + b"1000\r\n" + b"x" * 4096 + b"\r\n0\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_a_full_queue_is_a_429_that_says_when_to_come_back(strict):
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(strict.ask, "/v1/completions", ENDLESS, **KEY) for _ in range(2)]
        wait_until(lambda: strict.ask("/stats", **KEY).json()["held"] == 2)
        refused = strict.ask("/v1/completions", SHORT, **KEY)
        late = [each.result().status for each in waiting]

    assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (429, "queue_full", "1")
    assert set(late) <= {200, 408}
    assert strict.ask("/v1/completions", SHORT, **KEY).status == 200


def test_more_answers_than_there_will_ever_be_room_for_is_a_400(strict):
    assert strict.ask("/v1/completions", SHORT | {"n": 3}, **KEY).error["param"] == "n"


def test_other_pages_may_call_only_if_they_are_named(strict, server):
    asks = {"origin": "https://friend.example", "access_control_request_method": "POST"}
    stranger = asks | {"origin": "https://stranger.example"}

    granted = strict.ask("/v1/completions", method="OPTIONS", **asks)
    assert (granted.status, granted.headers["access-control-allow-origin"]) == (200, "https://friend.example")
    assert "access-control-allow-origin" not in strict.ask("/v1/completions", method="OPTIONS", **stranger).headers
    assert server.ask("/v1/completions", method="OPTIONS", **asks).status == 405


def test_a_page_that_asks_nobody_first_is_refused(server):
    """Browsers send text/plain to strangers without asking them: the model must not work for any page."""
    answer = server.ask("/v1/completions", b'{"model": "tiny", "prompt": "x"}', content_type="text/plain")
    assert answer.status == 415


def test_an_answer_that_takes_too_long_ends_with_408(tiny_folder):
    flags = ["--served-model-name", "tiny", "--request-timeout-s", "0.05", "--max-running-requests", "4"]
    with launched(tiny_folder, *flags) as served:
        answer = served.ask("/v1/completions", ENDLESS)
        assert (answer.status, answer.headers["x-should-retry"]) == (408, "false")
        wait_until(lambda: served.ask("/stats").json()["running"] == 0)
        assert served.metric("request_aborts_total") == 1
