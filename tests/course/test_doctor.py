"""The doctor names what is there and, where something is missing, what to do."""

from __future__ import annotations

import pytest
import torch

from chapters import doctor
from chapters.__main__ import main


@pytest.fixture
def fact(root):
    """The report's line of a name."""

    def find(name: str) -> doctor.Fact:
        return next(fact for fact in doctor.report(root) if fact.name == name)

    return find


@pytest.mark.parametrize("name", ["Python", "torch", "CPU", "memory", "disk"])
def test_the_machine_is_described(name, fact):
    assert fact(name).value


def test_an_absent_model_is_reported_with_the_command_that_fetches_it(fact, tmp_path, monkeypatch):
    monkeypatch.setenv("MINISGL_HOME", str(tmp_path))
    assert not fact("model").ok
    assert "minisgl fetch" in fact("model").value


def test_an_absent_package_is_reported_with_how_to_install_it(fact, monkeypatch):
    monkeypatch.setattr(doctor, "OPTIONAL", {"no-such-package": "pip install '.[gpu]'"})
    assert fact("no-such-package") == doctor.Fact("no-such-package", "not installed (pip install '.[gpu]')", ok=False)


def test_the_printed_report_keeps_the_brackets_of_a_command(root, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "report", lambda root: [doctor.Fact("x", "pip install '.[gpu]'", ok=False)])
    assert main(["doctor"], root) == 0
    assert "pip install '.[gpu]'" in capsys.readouterr().out


def test_each_chapter_of_the_course_has_a_line(edit, fact, monkeypatch):
    edit("chapters/12_more/chapter.yml", "tier: cpu", "tier: multi-gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fact("chapter 01_sums") == doctor.Fact("chapter 01_sums", "runs here (cpu)")
    assert fact("chapter 12_more").value == "needs 2 NVIDIA GPUs of compute capability 7.5 or newer; 0 here"


@pytest.mark.parametrize(
    ("tier", "capabilities", "runs"),
    [
        ("cpu", [], True),
        ("gpu", [], False),
        ("gpu", [(7, 5)], True),
        ("gpu", [(7, 0)], False),
        ("multi-gpu", [(9, 0)], False),
        ("multi-gpu", [(9, 0), (7, 0)], False),
        ("multi-gpu", [(9, 0), (9, 0)], True),
    ],
)
def test_a_chapter_runs_where_its_gpus_are(tier, capabilities, runs, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
    assert (doctor.lacks(tier) is None) == runs
