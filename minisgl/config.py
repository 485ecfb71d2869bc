"""Every switch of the engine, in one frozen dataclass. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class EngineConfig:
    """What to run and how. Each optimisation is one field, whose "off" is simple code.

    Args:
        model: smollm2, a Hugging Face folder, a .gguf file, or a hub id such as Qwen/Qwen3-0.6B.
        device: auto (a CUDA GPU if there is one), cpu, cuda, cuda:1, mps.
        dtype: auto is the checkpoint's, but float32 on a CPU and float16 on a GPU without bfloat16.
        kv_cache: none recomputes the whole sequence for each token; contiguous stores each token's K and V once.
        random_weights: draw weights (std 0.02) in place of loading them; only the model's config is needed.
        weight_seed: seed of the random weights.
    """

    model: str = "smollm2"
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache: Literal["none", "contiguous"] = "contiguous"
    random_weights: bool = False
    weight_seed: int = 0

    @classmethod
    def chapter(cls, number: int, **overrides: Any) -> EngineConfig:
        """The engine as it stands at the end of a chapter.

        Raises:
            ValueError: no such chapter.
        """
        if number not in _CHAPTERS:
            raise ValueError(f"chapter {number} has no engine: choose one of {', '.join(map(str, _CHAPTERS))}")
        return replace(cls(**_CHAPTERS[number]), **overrides)


_CHAPTERS: dict[int, dict[str, Any]] = {
    1: {"kv_cache": "none"},
    2: {"kv_cache": "contiguous"},
}
