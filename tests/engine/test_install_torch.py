"""Which build of torch a machine gets."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts import install_torch
from scripts.install_torch import CPU_BUILD, TESTED, candidates

NOT_FOUND = "ERROR: No matching distribution found for torch"


@pytest.mark.parametrize(
    ("choice", "platform", "gpu", "wanted"),
    [
        ("", "linux", False, [CPU_BUILD, TESTED]),
        ("", "linux", True, [TESTED]),
        ("cpu", "linux", True, [CPU_BUILD]),
        ("cuda", "linux", False, [TESTED]),
        ("", "darwin", False, [TESTED]),
        ("cpu", "darwin", False, [TESTED]),
        ("torch==2.11.0 --pre", "linux", True, ["torch==2.11.0 --pre"]),
    ],
)
def test_the_build_follows_the_gpu_unless_torch_is_set(choice, platform, gpu, wanted):
    assert candidates(choice, platform, gpu) == wanted


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A Linux machine without a GPU, nothing installed: pip's errors by requirement, and what pip was asked."""
    answers: dict[str, str] = {}
    asked: list[str] = []

    def pip_install(requirement: str) -> str:
        asked.append(requirement)
        return answers.get(requirement, "")

    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(install_torch, "has_gpu", lambda: False)
    monkeypatch.setattr(install_torch, "pip_install", pip_install)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: asked.append(command[len(install_torch.PIP)]))
    return answers, asked


def test_a_second_run_installs_nothing(machine):
    _, asked = machine

    assert install_torch.main() == 0
    assert install_torch.main() == 0
    assert asked == [CPU_BUILD]


def test_without_a_cpu_build_it_says_so_and_takes_the_default_one(machine, capsys):
    answers, asked = machine
    answers[CPU_BUILD] = NOT_FOUND

    assert install_torch.main() == 0
    assert asked == [CPU_BUILD, TESTED]
    assert "several GB of CUDA libraries" in capsys.readouterr().out


def test_a_broken_download_of_the_cpu_build_does_not_bring_the_cuda_libraries(machine, capsys):
    answers, asked = machine
    answers[CPU_BUILD] = "ERROR: Read timed out."

    assert install_torch.main() == 1
    assert asked == [CPU_BUILD]
    assert "Read timed out" in capsys.readouterr().err


def test_a_cpu_build_that_was_asked_for_is_not_replaced_by_another(machine, monkeypatch, capsys):
    answers, asked = machine
    answers[CPU_BUILD] = NOT_FOUND
    monkeypatch.setenv("TORCH", "cpu")

    assert install_torch.main() == 1
    assert asked == [CPU_BUILD]
    assert "README.md" in capsys.readouterr().err


def test_another_value_of_torch_replaces_the_build(machine, monkeypatch):
    _, asked = machine
    install_torch.main()
    monkeypatch.setenv("TORCH", "cuda")

    assert install_torch.main() == 0
    assert install_torch.main() == 0
    assert asked == [CPU_BUILD, "uninstall", TESTED]
