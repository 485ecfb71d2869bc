"""`minisgl chat --url`: the terminal's chat with a server, the same as with an engine of its own."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
from dataclasses import make_dataclass

import pytest

from minisgl import SamplingParams
from minisgl.cli import main
from minisgl.server.remote import Remote, error_message, server_url

from .conftest import FLAGS, launched, wait_until

Done = make_dataclass("Done", ["returncode", "stdout", "stderr"])
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def chat(monkeypatch, capsys):
    """The command in this process, with what its user types."""

    def run(*flags, typed):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        try:
            main(["chat", *flags])
            code = 0
        except SystemExit as exit:
            code = exit.code
        out, err = capsys.readouterr()
        return Done(code, out, " ".join(err.split()))

    return run


@pytest.mark.parametrize("flags", [[], ["--temperature", "1", "--top-k", "40", "--seed", "3"], ["--stop", "e"]])
def test_it_says_what_an_engine_of_its_own_would_say(chat, server, tiny_folder, flags):
    typed = "hello\nand then?\n/reset\nhello\n"
    flags = [*flags, "--max-tokens", "12", "--logit-bias", "101=3", "--system", "Be brief."]
    remote = chat("--url", server.url, *flags, typed=typed)
    local = chat("--model", str(tiny_folder), *flags, typed=typed)
    assert remote.returncode == 0, remote.stderr
    assert remote.stdout == local.stdout


def test_it_names_the_model_and_takes_the_same_commands(chat, server):
    done = chat("--url", server.url + "/v1/", "--max-tokens", "3", typed="hello\n/reset\n/what\n/exit\nnever\n")
    assert f"tiny at {server.url}." in done.stderr
    assert "starting over" in done.stderr
    assert "unknown command /what" in done.stderr


def test_stats_are_the_servers_count_of_the_last_answer(chat, server):
    before = server.metric("generation_tokens_total")
    done = chat("--url", server.url, "--max-tokens", "5", "--ignore-eos", typed="hello\n/stats\n")
    assert "output tokens 5 " in done.stderr
    assert "prompt tokens " in done.stderr
    assert server.metric("generation_tokens_total") == before + 5


def test_a_question_that_is_too_long_leaves_the_chat_alive(chat, server):
    done = chat("--url", server.url, "--max-tokens", "5", "--ignore-eos", typed="x" * 3000 + "\nhi\n/stats\n")
    assert "1,024 tokens" in done.stderr
    assert "(400)" in done.stderr
    assert "output tokens 5 " in done.stderr


def test_a_stopped_answer_ends_in_the_server_too(server):
    answer = Remote(server.url).stream(HELLO, SamplingParams(max_tokens=900, ignore_eos=True))
    before = server.metric("request_aborts_total")
    next(answer)
    answer.close()
    wait_until(lambda: server.metric("num_requests_running") == 0)
    assert server.metric("request_aborts_total") == before + 1


def test_ctrl_c_keeps_what_was_said_and_the_chat(chat, server, monkeypatch):
    real, calls = Remote.stream, []

    def interrupted(self, messages, params):
        calls.append(messages)
        for piece in real(self, messages, params):
            yield piece
            if len(calls) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(Remote, "stream", interrupted)
    done = chat("--url", server.url, "--max-tokens", "40", "--ignore-eos", typed="hello\nand then?\n")
    assert done.returncode == 0
    assert "stopped" in done.stderr
    assert [message["role"] for message in calls[1]] == ["user", "assistant", "user"]
    assert done.stdout.startswith("> " + calls[1][1]["content"] + "\n")


def test_a_key_is_wanted_and_given(chat, tiny_folder):
    with launched(tiny_folder, "--api-key", "right", *FLAGS) as server:
        wrong = chat("--url", server.url, "--api-key", "wrong", typed="hello\n")
        right = chat("--url", server.url, "--api-key", "right", "--max-tokens", "3", typed="hello\n/stats\n")
    assert (wrong.returncode, "(401)" in wrong.stderr) == (1, True)
    assert "output tokens" in right.stderr


def test_no_server_is_one_line(chat):
    port = free_port()
    done = chat("--url", f"http://127.0.0.1:{port}", typed="hello\n")
    assert done.returncode == 1
    assert done.stderr == f"minisgl: no answer from http://127.0.0.1:{port}: Connection refused"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--model", "nonsense"], "(404)"),
        (["--temperature", "9"], "(400)"),
        (["--n", "2"], "n is 2, but a stream carries one answer"),
    ],
)
def test_the_servers_reason_is_shown(chat, server, flags, problem):
    assert problem in chat("--url", server.url, *flags, typed="hello\n").stderr


@pytest.mark.parametrize("flags", [["--kv-pages", "9"], ["--chapter", "3"], ["--no-chunked-prefill"]])
def test_a_switch_of_the_engine_is_refused(chat, flags):
    done = chat("--url", "http://127.0.0.1:1", *flags, typed="")
    assert done.returncode == 1
    assert "is the engine's, and that runs at --url" in done.stderr


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.parametrize("url", ["http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"])
def test_an_address_is_taken_as_people_paste_it(url):
    assert server_url(url) == "http://host:1"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "host", "ftp://host", ""])
def test_what_is_no_address_is_named(url):
    with pytest.raises(ValueError, match="write it as http://127"):
        server_url(url)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long", "type": "x"}}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"message": "too long"}', "too long"),
        (b'{"detail": "too long"}', "too long"),
        (b"<html>no</html>", "<html>no</html>"),
        (b"[1]", "[1]"),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
        (b"", ""),
    ],
)
def test_an_errors_message_is_found_in_every_shape(body, message):
    assert error_message(body) == message


def test_a_chat_with_a_server_needs_no_torch():
    code = "import sys, minisgl.cli, minisgl.server.remote; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
