"""A row of attention scores taken in tile by tile, for the player of chapter 6: three numbers carried along.

The last token of a sentence asks the keys of all of it, in one query head of SmolLM2. Scores, values and the answer are
those of the engine's own step; the tiles are taken in by `minisgl_kernels.online_softmax.update`, task 06.1.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import minisgl_kernels as ops
import torch
from minisgl_kernels.online_softmax import State, begin, finish, update

from benchmarks.record import save
from minisgl.config import EngineConfig
from minisgl.core import ForwardBatch, WorkCounts
from minisgl.llm import LLM
from minisgl.models.llama import LlamaForCausalLM
from minisgl.simple import step

CONFIG = EngineConfig(model="smollm2", device="cpu", dtype="float32", kv_pages=8)
SENTENCE = "The capital of Spain is Madrid. The capital of Italy is Rome. The capital of France is"
LAYER, HEAD = 18, 2  # a head that looks for names of cities, and finds a larger score twice on its way
RUNS = {"tiles of 4": (4, True), "tiles of 8": (8, True), "tiles of 4, not rescaled": (4, False)}


class Look:
    """Attention that remembers what one layer saw."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, batch: ForwardBatch) -> Any:
        """See core.AttentionBackend."""
        out = ops.causal_attention(q, k, v, q.shape[-1] ** -0.5)
        if layer == self.layer:
            self.q, self.k, self.v, self.out = q, k, v, out
        return out


def row(model: LlamaForCausalLM, ids: Sequence[int], layer: int, head: int) -> dict[str, Any]:
    """What the last token's query meets in a head: a score and a value for each key; and the engine's own answer."""
    look = Look(layer)
    with torch.inference_mode():
        logits = step(model, ids, 0, look, WorkCounts())
    kv_head = head // (model.config.num_heads // model.config.num_kv_heads)
    scores = look.k[:, kv_head] @ look.q[-1, head] * look.q.shape[-1] ** -0.5
    return {
        "scores": scores.tolist(),
        "values": look.v[:, kv_head].tolist(),
        "answer": look.out[-1, head].tolist(),
        "next": int(logits.argmax()),
        "kv_head": kv_head,
    }


def not_rescaled(state: State, scores: Sequence[float], values: Sequence[Sequence[float]]) -> State:
    """The mistake: what was summed before stays as it is when a larger score comes."""
    tile = update(State(max(state.largest, *scores), 0.0, [0.0] * len(state.acc)), scores, values)
    return State(tile.largest, state.total + tile.total, [a + b for a, b in zip(state.acc, tile.acc, strict=True)])


def tiles(scores: Sequence[float], values: Sequence[Sequence[float]], tile: int, rescaled: bool) -> list[State]:
    """The state after each tile."""
    take: Callable[..., State] = update if rescaled else not_rescaled
    states = [begin(len(values[0]))]
    for start in range(0, len(scores), tile):
        states.append(take(states[-1], scores[start : start + tile], values[start : start + tile]))
    return states[1:]


def weights(scores: Sequence[float], tile: int, rescaled: bool) -> list[list[float]]:
    """How much each key seen so far weighs in `total`, after each tile: the same, with a 1 of its own as each value."""
    ones = [[float(i == j) for j in range(len(scores))] for i in range(len(scores))]
    return [state.acc[: (i + 1) * tile] for i, state in enumerate(tiles(scores, ones, tile, rescaled))]


def run(found: dict[str, Any], tile: int, rescaled: bool) -> dict[str, Any]:
    """The tiles of a row as frames, and how far their answer is from the engine's."""
    states = tiles(found["scores"], found["values"], tile, rescaled)
    result, _ = finish(states[-1])
    return {
        "tile": tile,
        "rescaled": rescaled,
        "steps": [
            {
                "largest": short(state.largest),
                "total": short(state.total),
                "acc": [*map(short, state.acc)],
                "weights": [*map(short, held)],
            }
            for state, held in zip(states, weights(found["scores"], tile, rescaled), strict=True)
        ],
        "error": float(f"{max(abs(a - b) for a, b in zip(result, found['answer'], strict=True)):.1e}"),
    }


def short(x: float) -> float:
    """Three decimals: less than a pixel."""
    return round(x, 3)


def record(llm: LLM, sentence: str = SENTENCE, layer: int = LAYER, head: int = HEAD) -> dict[str, Any]:
    """The row, and the runs over it."""
    ids = llm.encode(sentence)
    found = row(llm.model, ids, layer, head)
    total = sum(map(math.exp, found["scores"]))
    return {
        "words": [llm.tokenizer.decode([i]) for i in ids],
        "next": llm.tokenizer.decode([found["next"]]),
        "layer": layer,
        "head": head,
        "scores": [*map(short, found["scores"])],
        "exact": [short(math.exp(score) / total) for score in found["scores"]],
        "answer": [*map(short, found["answer"])],
        "runs": {name: run(found, *how) for name, how in RUNS.items()},
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with LLM(CONFIG) as llm:
        data = record(llm)
    for name, found in data["runs"].items():
        print(f"{name}: {len(found['steps'])} tiles, {found['error']:.1e} from the engine's answer")
    print(save("player_softmax", data))


if __name__ == "__main__":
    main()
