"""The dataclasses that travel refuse what makes no sense, and stay light."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from minisgl.config import EngineConfig
from minisgl.core import Request, SamplingParams


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
        ("min_tokens", -1),
        ("min_tokens", 129),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {3: float("nan")}),
        ("stop", ["a", ""]),
        ("n", 0),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_a_sampling_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field} is .*, but must be"):
        SamplingParams(**{field: value})


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match=r"^stop is .*, but must be empty without detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_one_stop_string_is_not_taken_for_its_letters():
    assert SamplingParams(stop="END").stop == ("END",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 0),
        ("kv_pages", 1),
        ("memory_fraction", 1.1),
        ("max_batch_tokens", -1),
        ("graph_tokens", -1),
        ("max_running_requests", 0),
        ("max_model_len", -1),
        ("output_reserve", -0.1),
    ],
)
def test_a_switch_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"^{field} is {value}, but must be"):
        EngineConfig(**{field: value})


def test_a_request_knows_its_answer_from_its_prompt():
    request = Request(0, [1, 2, 3], SamplingParams(max_tokens=5))
    request.tokens += [4, 5]

    assert (request.prompt_len, request.output, request.max_len) == (3, [4, 5], 8)


def test_sampling_params_cannot_be_changed_by_one_request_for_another():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 5


def test_the_chapters_engines_differ_by_their_switch_and_take_overrides():
    assert EngineConfig.chapter(1).kv_cache == "none"
    assert (EngineConfig.chapter(2).kv_cache, EngineConfig.chapter(3).kv_cache) == ("contiguous", "paged")
    assert EngineConfig.chapter(2, device="cpu").device == "cpu"
    assert (EngineConfig.chapter(3).prefix_cache, EngineConfig.chapter(4).prefix_cache) == ("none", "radix")
    assert (EngineConfig.chapter(4).batching, EngineConfig.chapter(5).batching) == ("static", "mixed")


def test_the_first_chapters_run_the_ops_that_their_readers_write():
    for number in range(1, 6):
        config = EngineConfig.chapter(number)
        assert (config.attention, config.kernels) == ("torch", "torch")


def test_what_chapter_8_brings_is_off_before():
    switches = ("graphs", "overlap", "decode_kernels", "pdl", "longest_first")
    for number in range(1, 8):
        config = EngineConfig.chapter(number)
        assert [getattr(config, name) for name in switches] == ["off", "off", "off", "off", False]
    for name in switches:
        assert getattr(EngineConfig.chapter(8), name) in ("auto", True)


def test_chapter_9_is_chapter_8_on_any_number_of_ranks():
    assert EngineConfig.chapter(9) == EngineConfig.chapter(8)
    assert EngineConfig.chapter(9, tp=3) == dataclasses.replace(EngineConfig.chapter(8), tp=3)


def test_an_unknown_chapter_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="chapter 99 has no engine: choose one of 1, 2"):
        EngineConfig.chapter(99)


def test_configs_and_params_are_imported_without_torch():
    code = "import sys, minisgl, minisgl.cli; minisgl.SamplingParams(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
