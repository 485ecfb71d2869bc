"""The command line, run as its user runs it."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import fields, make_dataclass

import pytest

from minisgl import EngineConfig, SamplingParams
from minisgl.cli import main

Done = make_dataclass("Done", ["returncode", "stdout", "stderr"])


@pytest.fixture
def minisgl(monkeypatch, capsys):
    """The command in this process: importing torch anew for each test would take most of the time."""

    def run(*args, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            main(args)
            code = 0
        except SystemExit as exit:
            code = exit.code
        out, err = capsys.readouterr()
        return Done(code, out, " ".join(err.split()))  # one line: the terminal's width must not matter

    return run


def test_the_module_runs_as_a_command():
    done = subprocess.run([sys.executable, "-m", "minisgl", "generate", "x", "--top-p", "2"], capture_output=True)
    assert done.returncode == 1
    assert b"top_p is 2.0" in done.stderr


def test_help_lists_the_commands(minisgl):
    done = minisgl("--help")
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("generate", "chat", "fetch", "examples"))


def test_every_field_of_the_configs_is_a_flag(minisgl):
    text = minisgl("generate", "--help").stdout
    for field in (*fields(EngineConfig), *fields(SamplingParams)):
        assert "--" + field.name.replace("_", "-") in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "x", "--top-p", "2"], "top_p is 2.0, but must be above 0 and at most 1"),
        (["generate", "x", "--chapter", "99"], "chapter 99 has no engine"),
        (["generate", "x", "--model", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_a_users_mistake_is_one_line_and_no_traceback(minisgl, args, message):
    done = minisgl(*args)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_generate_prints_the_answer_to_stdout_and_the_stats_to_stderr(minisgl, tiny_folder):
    done = minisgl("generate", "--model", str(tiny_folder), "--stats", "--max-tokens", "5", "--ignore-eos", "Hi")
    assert done.returncode == 0, done.stderr
    assert "length · first token after" in done.stderr
    assert "output tokens 5 " in done.stderr
    assert "tokens computed" in done.stderr
    assert "tokens computed" not in done.stdout


def test_n_answers_are_told_apart_and_keep_their_seeds(minisgl, tiny_folder):
    flags = ["--model", str(tiny_folder), "--max-tokens", "5", "--temperature", "1", "Hi"]
    both = minisgl("generate", "--n", "2", "--seed", "4", *flags).stdout
    one, other = (minisgl("generate", "--seed", seed, *flags).stdout for seed in "45")

    assert both == f"--- 1 of 2 ---\n{one}--- 2 of 2 ---\n{other}"


def test_logprobs_go_to_stderr_with_the_tokens_they_are_of(minisgl, tiny_folder):
    flags = ["--model", str(tiny_folder), "--max-tokens", "1", "--logit-bias", "72=100", "--ignore-eos", "Hi"]
    done = minisgl("generate", "--logprobs", "1", *flags)

    assert done.returncode == 0, done.stderr
    assert done.stderr.count(" -") == 2  # the chosen one, and the most probable one


def test_flags_that_take_several_values_are_given_several_times(minisgl, tiny_folder):
    flags = ["--model", str(tiny_folder), "--max-tokens", "4", "--logit-bias", "72=50", "--logit-bias", "75=-50", "Hi"]
    stopped = minisgl("generate", "--stop", "zz", "--stop", "ee", "--stats", *flags)

    assert minisgl("generate", *flags).stdout == "eeee\n"
    assert (stopped.stdout, "stop · " in stopped.stderr) == ("\n", True)


def test_a_trace_of_an_answer_has_an_event_for_each_step(minisgl, tiny_folder, tmp_path):
    minisgl(
        "generate", "--model", str(tiny_folder), "--max-tokens", "4", "--ignore-eos", "--trace", f"{tmp_path}/t", "Hi"
    )
    assert len((tmp_path / "t").read_text().splitlines()) == 1 + 4 + 1  # the header, four tokens, and the end


def test_a_prompt_is_read_from_standard_input(minisgl, tiny_folder):
    flags = ["--model", str(tiny_folder), "--max-tokens", "5"]
    assert minisgl("generate", *flags, stdin="Hi").stdout == minisgl("generate", *flags, "Hi").stdout


def test_chat_remembers_resets_and_leaves(minisgl, tiny_folder):
    done = minisgl(
        "chat", "--model", str(tiny_folder), "--max-tokens", "3", stdin="hello\n/stats\n/reset\n/what\nhi\n/exit\n"
    )
    assert done.returncode == 0, done.stderr
    assert "starting over" in done.stderr
    assert "unknown command /what" in done.stderr


def test_chat_survives_a_question_that_does_not_fit(minisgl, tiny_folder):
    done = minisgl("chat", "--model", str(tiny_folder), "--max-tokens", "3", stdin="x" * 500 + "\nhi\n/stats\n")
    assert done.returncode == 0, done.stderr
    assert "tokens, but a sequence may have at most 128 here" in done.stderr
    assert " steps 3 " in done.stderr


@pytest.mark.model
@pytest.mark.parametrize("chapter", ["1", "2", "5"])
def test_the_default_model_knows_the_capital_of_france(minisgl, chapter, smollm2_path):
    question = "What is the capital of France?"
    done = minisgl("generate", "--chat", "--chapter", chapter, "--max-tokens", "16", question)
    assert "Paris" in done.stdout, done.stderr
