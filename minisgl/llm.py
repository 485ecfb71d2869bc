"""The engine with words: text or chat in, text out.

Ties together what knows nothing of each other: tokenizer, model, and the loop that generates ids.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from minisgl import hub
from minisgl.config import EngineConfig
from minisgl.core import SamplingParams, WorkCounts
from minisgl.models.config import ModelConfig
from minisgl.models.register import build_model
from minisgl.models.weight import iter_weights, load_weights, random_weights
from minisgl.simple import cached_generate, ends, naive_generate
from minisgl.tokenizer.detokenizer import IncrementalDetokenizer

Message = Mapping[str, str]  # {"role": "user", "content": "…"}
Prompt = str | Sequence[int] | Sequence[Message]
FinishReason = Literal["stop", "length"]

_GENERATE = {"none": naive_generate, "contiguous": cached_generate}


@dataclass
class Completion:
    """What became of one prompt. Times are in seconds from the call."""

    prompt_tokens: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # an end-of-sequence token included
    finish_reason: FinishReason | None = None  # None while it is being written, or if it was cut off
    first_token_s: float = 0.0
    total_s: float = 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first, by the time they took; 0 for a single token."""
        rest = self.total_s - self.first_token_s
        return (len(self.token_ids) - 1) / rest if len(self.token_ids) > 1 else 0.0


class LLM:
    """A model ready to answer.

    Raises:
        FetchError: there is no such model, or it cannot be fetched.
        ValueError: the model is unsupported or damaged.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.path = hub.resolve(self.config.model, config_only=self.config.random_weights)
        self.device = _device(self.config.device)
        model_config = ModelConfig.from_folder(self.path)
        self.model = build_model(model_config)
        dtype = _dtype(self.config.dtype, model_config.dtype, self.device)
        if self.config.random_weights:
            random_weights(self.model, self.config.weight_seed, self.device, dtype)
        else:
            load_weights(self.model, iter_weights(self.path), self.device, dtype)
        self.work = WorkCounts()
        self._output_tokens, self._busy_s = 0, 0.0

    @cached_property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer, loaded when text is first met: token ids need none."""
        return hub.load_tokenizer(self.path)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, of a chat (through the model's chat template, open for the answer), or ids as they are.

        Raises:
            ValueError: a chat for a model without a chat template.
        """
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if not prompt or isinstance(prompt[0], int):
            return list(prompt)  # type: ignore[arg-type]
        if self.tokenizer.chat_template is None:
            raise ValueError(f"{self.config.model} has no chat template: give it plain text to continue")
        text = self.tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # the template wrote them already

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[tuple[str, Completion]]:
        """Yield each new piece of text with the completion as it stands; the last piece comes with its finish_reason.

        Raises:
            ValueError: the prompt is empty or does not fit the context.
        """
        params = params or SamplingParams()
        ids = self.encode(prompt)
        completion = Completion(prompt_tokens=len(ids))
        detokenizer = IncrementalDetokenizer(self.tokenizer)
        start = time.perf_counter()
        for token in _GENERATE[self.config.kv_cache](self.model, ids, params, self.work):
            completion.total_s = time.perf_counter() - start
            completion.first_token_s = completion.first_token_s or completion.total_s
            completion.token_ids.append(token)
            if piece := detokenizer.push(token):
                completion.text += piece
                yield piece, completion
        completion.finish_reason = "stop" if ends(self.model, token, params) else "length"
        self._output_tokens += len(completion.token_ids)
        self._busy_s += completion.total_s
        rest = detokenizer.flush()
        completion.text += rest
        yield rest, completion

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> list[Completion]:
        """Complete each prompt, one after another, and return the completions in the order of the prompts."""
        return [list(self.stream(prompt, params))[-1][1] for prompt in prompts]

    def stats(self) -> dict[str, float]:
        """Work done so far, output tokens per second of generation, and bytes of weights."""
        return asdict(self.work) | {
            "output_tokens": self._output_tokens,
            "output_tokens_per_s": self._output_tokens / self._busy_s if self._busy_s else 0.0,
            "weight_bytes": sum(p.nbytes for p in self.model.parameters()),
        }


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device  # touches the device: a missing one fails here, not in a layer
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None


def _dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        name = checkpoint
        if device.type == "cpu":
            name = "float32"  # torch's 16-bit matrix products are no faster on a CPU, and bf16 flips close choices
        elif name == "bfloat16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            name = "float16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype
