"""Prompts as token ids: text, T5 inputs with sentinels, and conversations."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...models.t5 import T5
from ..conversion.load_model import LoadedModel
from ..data.tasks.chat_files import get_chat_template
from ..data.tasks.chats import encode_rendered_text, end_of_turn
from ..data.tasks.sentinels import encode_with_sentinels, sentinel_ids, sentinel_name
from ..utils.errors import UserError
from .text_generator import Generator

Messages = Sequence[Mapping[str, Any]]


def build_generator(restored: LoadedModel) -> Generator:
    """Return a generator that shows the sentinels of a T5 as text.

    Raises:
        UserError: the model cannot generate text.
    """
    names: dict[int, str] = {}
    if isinstance(restored.model, T5):
        names = {int(token): sentinel_name(number) for number, token in enumerate(sentinel_ids(restored.tokenizer))}
    return Generator.from_restored(restored, names)


def encode_prompts(restored: LoadedModel, prompts: Sequence[str | Messages], *, chat: bool) -> list[list[int]]:
    """Encode prompts.

    Args:
        restored: the model.
        prompts: texts; with `chat` also lists of messages with `role` and `content`.
        chat: a text is a message of the user, and the chat template of the model is applied.

    Raises:
        UserError: text that the tokenizer cannot encode, no text for a T5, or messages that the template rejects.
    """
    tokenizer = restored.tokenizer
    texts = ["" if not isinstance(prompt, str) else prompt for prompt in prompts]
    if isinstance(restored.model, T5):
        if chat:
            raise UserError("`chat` (--chat) is not supported for T5; give its input as a prompt")
        if not all(texts):
            raise UserError("a T5 needs an input text, in each prompt (--prompt, --prompt-file)")
        ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        return [[*encode_with_sentinels(tokenizer, text), *ends] for text in texts]
    if chat:
        return list(_conversations(restored, prompts))
    return [encode_prompt(restored, text) for text in texts]


def encode_prompt(restored: LoadedModel, text: str) -> list[int]:
    """Encode a text for a GPT to continue; for empty text return the tokens that start a document."""
    tokenizer = restored.tokenizer
    tokens = [*restored.prompt_prefix, *(tokenizer.encode(text).tolist() if text else [])]
    if tokens:
        return tokens
    if tokenizer.eos_id is not None:
        return [tokenizer.eos_id]
    return tokenizer.encode("\n").tolist() if "\n" in tokenizer.decode(range(tokenizer.vocab_size)) else [0]


def stop_strings(restored: LoadedModel, given: Sequence[str], *, chat: bool) -> list[str]:
    """Return the texts that end a generation: those given, and in a chat the end of the assistant's turn."""
    end = end_of_turn(restored.tokenizer) if chat else None
    return [*given, *([end] if end else [])]


def _conversations(restored: LoadedModel, prompts: Sequence[str | Messages]) -> Iterator[list[int]]:
    """Encode conversations up to the start of the assistant's answer."""
    if restored.tokenizer.chat_template is None and not restored.config.root.model.data.chat:
        print("note: the model has no chat template; using ChatML", file=sys.stderr)
    with get_chat_template(restored.tokenizer).start_renderer() as renderer:
        for prompt in prompts:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            yield encode_rendered_text(restored.tokenizer, renderer.render_prompt(messages))
