"""The dataclasses that travel refuse what makes no sense, and stay light."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from minisgl.config import EngineConfig
from minisgl.core import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_a_sampling_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field} is .*, but must be"):
        SamplingParams(**{field: value})


def test_sampling_params_cannot_be_changed_by_one_request_for_another():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 5


def test_the_chapters_engines_differ_by_their_switch_and_take_overrides():
    assert EngineConfig.chapter(1).kv_cache == "none"
    assert EngineConfig.chapter(2, device="cpu") == EngineConfig(kv_cache="contiguous", device="cpu")


def test_an_unknown_chapter_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="chapter 99 has no engine: choose one of 1, 2"):
        EngineConfig.chapter(99)


def test_configs_and_params_are_imported_without_torch():
    code = "import sys, minisgl, minisgl.cli; minisgl.SamplingParams(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
