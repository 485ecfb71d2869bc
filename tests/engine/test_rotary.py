from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from minisgl.layers.rotary import ROPE_TYPES, RopeConfig, Rotary
from minisgl.models.config import ROPE_FIELDS
from tests.helpers import ROPES, hf_json, tiny_config
from tests.tolerances import ROPE_ANGLES, ROPE_FREQUENCIES

# The sizes of real models: their many pairs fall on both sides of every threshold.
LARGE = {
    "default": RopeConfig(rope_theta=1e6),
    "linear": RopeConfig("linear", 1e5, factor=4.0),
    "llama3.2": RopeConfig("llama3", 5e5, 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": RopeConfig("yarn", 1e6, 4.0, 32768),
    "yarn untruncated": RopeConfig("yarn", 1.5e5, 32.0, 4096, truncate=False),
    "yarn deepseek": RopeConfig("yarn", 1e4, 40.0, 4096, mscale=0.707, mscale_all_dim=1.0),
    "yarn beta": RopeConfig("yarn", 1e4, 8.0, 4096, beta_fast=24.0, beta_slow=2.0, attention_factor=1.25),
    "yarn, context below one turn": RopeConfig("yarn", 1e4, 8.0, 6),
}


def hf_rotary(head_dim: int, rope: RopeConfig) -> LlamaRotaryEmbedding:
    config = hf_json(tiny_config(head_dim=head_dim, rope=rope))
    return LlamaRotaryEmbedding(transformers.AutoConfig.for_model(**config))


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("rope", LARGE.values(), ids=LARGE.keys())
def test_angles_equal_those_of_transformers_far_beyond_the_original_context(rope: RopeConfig, head_dim: int):
    positions = torch.tensor([0, 1, 63, 4095, 4096, 8191, 32768, 100_000])

    cos, sin = Rotary(head_dim, rope)(positions, torch.float32)

    hf_cos, hf_sin = hf_rotary(head_dim, rope)(cos, positions[None])
    ROPE_ANGLES.check(cos, hf_cos[0, :, : head_dim // 2])
    ROPE_ANGLES.check(sin, hf_sin[0, :, : head_dim // 2])


@pytest.mark.parametrize("rope", [*LARGE.values(), *ROPES.values()], ids=[*LARGE.keys(), *ROPES.keys()])
def test_frequencies_and_magnitude_equal_those_of_transformers(rope: RopeConfig):
    ours, theirs = Rotary(80, rope), hf_rotary(80, rope)

    ROPE_FREQUENCIES.check(ours._inv_freq[torch.device("cpu")], theirs.inv_freq)
    assert ours.magnitude == pytest.approx(theirs.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("rope", [LARGE["default"], LARGE["linear"]], ids=["default", "linear"])
def test_unblended_frequencies_equal_those_of_transformers_bit_for_bit(rope: RopeConfig):
    assert torch.equal(Rotary(128, rope)._inv_freq[torch.device("cpu")], hf_rotary(128, rope).inv_freq)


@pytest.mark.parametrize("name", [name for name in LARGE if name != "default"])
def test_every_scaling_changes_some_angle(name: str):
    plain = Rotary(64, replace(LARGE[name], rope_type="default"))
    positions = torch.tensor([1000])

    assert not torch.equal(Rotary(64, LARGE[name])(positions, torch.float32)[0], plain(positions, torch.float32)[0])


def test_angles_are_computed_in_fp32_and_rounded_once():
    rotary, positions = Rotary(64, LARGE["default"]), torch.tensor([8191])

    cos, _ = rotary(positions, torch.bfloat16)

    assert torch.equal(cos, rotary(positions, torch.float32)[0].bfloat16())


def test_a_rotary_built_on_the_meta_device_holds_real_frequencies():
    with torch.device("meta"):
        rotary = Rotary(64, LARGE["llama3.2"])

    cos, _ = rotary(torch.tensor([0]), torch.float32)

    assert torch.equal(cos, torch.ones(1, 32))


def test_the_config_reader_knows_the_fields_of_every_rope_type():
    assert ROPE_FIELDS.keys() == ROPE_TYPES.keys()
    assert ROPE_TYPES.keys() <= ROPE_INIT_FUNCTIONS.keys() | {"default"}
