"""Requests as OpenAI's API words them, and what they mean to the engine.

A field that is not listed here is refused by name, and one that is listed is obeyed. Where OpenAI has a field that this
server has not got, the value that asks for nothing is accepted: clients send it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from minisgl.core import SamplingParams
from minisgl.server.errors import ApiError

_OWN = {field.name for field in fields(SamplingParams)}

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Word = Annotated[str, Field(min_length=1, max_length=1000)]


def _branch(value: Any) -> str:
    """Which of the forms of a text or a prompt this is meant to be, so that an error speaks of that form only."""
    if not isinstance(value, list):
        return "~text"
    return {int: "~ids", list: "~batch", dict: "~parts"}.get(type(value[0]) if value else str, "~texts")


class Strict(BaseModel):
    """Refuses the first unknown field; a number in quotes is no number, and true is none either."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                raise PydanticCustomError("unknown_field", "unknown field", {"field": name[:100]})
        return data


class StreamOptions(Strict):
    """What a stream brings besides the answer."""

    include_usage: bool = False
    include_obfuscation: Literal[False, None] = None


class Sampling(Strict):
    """The fields that all answering routes share. Null is as good as none."""

    n: Annotated[int, Field(ge=1, le=128)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None = (
        None
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[
            Annotated[Word, Tag("~text")]
            | Annotated[Annotated[list[Word], Field(fail_fast=True, max_length=64)], Tag("~texts")],
            Discriminator(lambda value: "~texts" if isinstance(value, list) else "~text"),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=256)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(max_length=1000)] | None = None
    stream: bool | None = None

    def params(self, max_len: int) -> SamplingParams:
        """What the engine is asked for; sequences have at most max_len tokens.

        Raises:
            ApiError: fields that do not go together.
        """
        given = {name: value for name, value in self if name in _OWN and value is not None} | self._worded(max_len)
        if given.get("temperature") is None:
            given["temperature"] = 1.0
        if self.seed is not None:
            given["seed"] = self.seed % 2**63
        if self.top_p is not None:  # 0, which OpenAI's range has, leaves the most probable token
            given["top_p"] = max(self.top_p, 1e-9)
        if self.top_k == -1:  # "all", in vLLM and SGLang
            given["top_k"] = 0
        if self.logit_bias:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        try:
            return SamplingParams(**given)
        except ValueError as error:
            raise ApiError(400, str(error), str(error).partition(" ")[0], "invalid_value") from None

    def _worded(self, max_len: int) -> dict[str, Any]:
        """What the route words differently than SamplingParams."""
        return {}


class StreamedSampling(Sampling):
    """What OpenAI's two routes have beyond that, and what they have that means nothing here."""

    model: str
    stream_options: StreamOptions | None = None
    user: str | None = None  # for OpenAI's bookkeeping, as are the harmless fields of chats

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens.

        Raises:
            ApiError: stream options without a stream.
        """
        if self.stream_options and not self.stream:
            raise ApiError(400, "stream_options go with stream: true only", "stream_options", "invalid_value")
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(StreamedSampling):
    """The body of /v1/completions."""

    prompt: Annotated[
        Annotated[str, Tag("~text")]
        | Annotated[list[str], Field(fail_fast=True, min_length=1), Tag("~texts")]
        | Annotated[Ids, Tag("~ids")]
        | Annotated[list[Ids], Field(fail_fast=True), Tag("~batch")],
        Discriminator(_branch),
    ]
    max_tokens: Count | None = 16
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    echo: Literal[False, None] = None
    suffix: Literal["", None] = None

    def prompts(self) -> list[Any]:
        """Each a text or a list of ids."""
        many = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return self.prompt if many else [self.prompt]  # type: ignore[return-value]

    def _worded(self, max_len: int) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens or 16}  # OpenAI's default


class TextPart(Strict):
    """A part of a message; there are no pictures and no sound here."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One message of a chat. Texts of several parts are joined by line ends."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("~text")] | Annotated[list[TextPart], Field(fail_fast=True, min_length=1), Tag("~parts")],
        Discriminator(lambda value: "~parts" if isinstance(value, list) else "~text"),
    ]
    name: None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    def plain(self) -> dict[str, str]:
        """As chat templates know it; a developer is the system, which models here were trained with."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class TextFormat(Strict):
    """The only format of an answer."""

    type: Literal["text"]


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]


class ChatRequest(StreamedSampling):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_tokens: Count | None = None  # without either, as many as fit
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # harmless: for OpenAI's bookkeeping
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    # accepted when they ask for nothing
    modalities: list[Literal["text"]] | None = None
    response_format: TextFormat | None = None
    service_tier: Literal["auto", "default", None] = None
    store: Literal[False, None] = None
    tool_choice: Literal["none", "auto", None] = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: Literal["none", "auto", None] = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None

    def prompts(self) -> list[list[dict[str, str]]]:
        """The one chat."""
        return [[message.plain() for message in self.messages]]

    def _worded(self, max_len: int) -> dict[str, Any]:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs go with logprobs: true only", "top_logprobs", "invalid_value")
        most = self.max_completion_tokens or self.max_tokens or max_len
        return {"max_tokens": most, "logprobs": (self.top_logprobs or 0) if self.logprobs else None}


class GenerateRequest(Sampling):
    """The body of /generate, the engine's own words: texts or ids in, texts and ids out."""

    prompt: Annotated[
        Annotated[str, Tag("~text")] | Annotated[Ids, Tag("~ids")],
        Discriminator(lambda value: "~ids" if isinstance(value, list) else "~text"),
    ]
    max_tokens: Count | None = 128
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class TokenizeRequest(Strict):
    """The body of /tokenize: either of the two."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None

    def only(self) -> str | list[dict[str, str]]:
        """The one that is given.

        Raises:
            ApiError: both are, or neither.
        """
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt", "invalid_value")
        return self.prompt if self.prompt is not None else [message.plain() for message in self.messages or ()]


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
