"""The least time of one step: from a model's shape, the step, and two numbers of a machine.

Knows no engine. chapters/reference/roofline.js is the same in JavaScript; tests/site/test_roofline.py compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.ch01_length import parameters
from minisgl.models.config import ModelConfig


@dataclass(frozen=True)
class Floor:
    """What a step needs, and the time that each part takes by itself."""

    weight_bytes: float
    kv_bytes: float
    flops: float
    weights_s: float
    kv_s: float
    arithmetic_s: float

    @property
    def seconds(self) -> float:
        """Memory and arithmetic overlap; weights and KV come over the same wires, one after the other."""
        return max(self.weights_s + self.kv_s, self.arithmetic_s)


def weights_read(config: ModelConfig) -> int:
    """Parameters that a step reads: all but an embedding that is not the head too, of which it reads a few rows."""
    count = parameters(config)
    return count["total"] - count["embedding"] + config.vocab_size * config.hidden_size


def kv_numbers(config: ModelConfig) -> int:
    """Numbers in the K and V of one token, all layers together."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim


def prefill_flops(config: ModelConfig, tokens: int) -> int:
    """Operations of a prompt without the head: two a weight and token, and the causal half of q·k and weights·v."""
    count, width = parameters(config), config.num_layers * config.num_heads * config.head_dim
    return 2 * (count["attention"] + count["mlp"]) * tokens + 2 * width * tokens**2


def decode_flops(config: ModelConfig, batch: int, context: int) -> int:
    """Operations of a decode step of `batch` requests that attend over `context` tokens each."""
    count, width = parameters(config), config.num_layers * config.num_heads * config.head_dim
    head = config.vocab_size * config.hidden_size
    return batch * (2 * (count["attention"] + count["mlp"] + head) + 4 * width * context)


def decode(
    config: ModelConfig,
    batch: int,
    context: int,
    bytes_per_s: float,
    flops_per_s: float,
    weight_itemsize: float = 2,
    kv_itemsize: float = 2,
) -> Floor:
    """A step that computes one token for each request: all weights once, and everybody's K and V."""
    weights = weight_itemsize * weights_read(config)
    kv = kv_itemsize * kv_numbers(config) * batch * context
    flops = decode_flops(config, batch, context)
    return Floor(weights, kv, flops, weights / bytes_per_s, kv / bytes_per_s, flops / flops_per_s)


def prefill(
    config: ModelConfig, tokens: int, bytes_per_s: float, flops_per_s: float, weight_itemsize: float = 2
) -> Floor:
    """A step that computes one prompt, which nobody has computed before; the head runs for its last token."""
    weights = weight_itemsize * weights_read(config)
    flops = prefill_flops(config, tokens) + 2 * config.vocab_size * config.hidden_size
    return Floor(weights, 0, flops, weights / bytes_per_s, 0, flops / flops_per_s)
