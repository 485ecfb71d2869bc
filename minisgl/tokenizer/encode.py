"""A prompt's token ids."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

Message = Mapping[str, str]  # {"role": "user", "content": "…"}
Prompt = str | Sequence[int] | Sequence[Message]


def is_ids(prompt: Prompt) -> TypeGuard[Sequence[int]]:
    """Whether a prompt consists of token ids, or of nothing."""
    return not isinstance(prompt, str) and (not prompt or isinstance(prompt[0], int))


def num_characters(prompt: Prompt) -> int:
    """Of the text that is to be encoded; 0 for ids."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(text) for message in prompt if isinstance(message, Mapping) for text in message.values())


def encode(tokenizer: Any, prompt: Prompt, model: str) -> list[int]:
    """Token ids of a text, or of a chat (through the model's chat template, open for the answer).

    Args:
        tokenizer: a Hugging Face tokenizer, which is used by one thread at a time.
        model: what errors call it.

    Raises:
        ValueError: a chat for a model without a chat template, or one that its template refuses.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt, verbose=False)["input_ids"])
    if tokenizer.chat_template is None:
        raise ValueError(f"{model} has no chat template: give it plain text to continue")
    try:
        text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template raises what it likes: over a role that it does not know, say
        raise ValueError(f"the model's chat template refuses this chat: {error}") from error
    return list(
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    )  # the template wrote them already
