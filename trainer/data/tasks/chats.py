"""Conversations: parse them from objects, and tokenize them with a chat template and a loss mask.

Two formats are read: `messages`, a list of objects with `role` and `content` (and other keys that the template reads),
and `conversations`, a list of objects with `from` and `value`, as in NeMo's and ShareGPT's datasets.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...config.suggest import closest
from ...utils.errors import UserError
from ...utils.text import one_line
from ..datasets.sft_examples import Example
from ..tokenizers.tokenizer import TokenIds, Tokenizer, encode_utf8, literal_pattern
from ..tokenizers.tokenizer_json import JsonTokenizer
from .chat_files import get_chat_template, special_tokens_map
from .chat_template import Chat, ChatRenderError, Message, RenderedChat

MAX_MESSAGES = 10_000
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
"""ShareGPT's speaker names; case-insensitive."""
_KNOWN_ROLES = ("system", "user", "assistant", "tool", "developer", "function")
_READS_TEXT_PARTS = re.compile(r"""\.text\b|['"]text['"]""")
"""Matches templates that read `content` as a list of parts, each with its text under the key `text`."""


def parse_chat(record: Mapping[str, Any], location: str, template: str = "") -> Chat:
    """Parse a conversation.

    Args:
        template: source of the chat template; roles that occur in it are accepted.

    Raises:
        UserError: it has no message of the assistant, or an unknown role.
    """
    if isinstance(record.get("messages"), list):
        messages = [_message(one, number, location, template) for number, one in enumerate(record["messages"], 1)]
    elif isinstance(record.get("conversations"), list):
        messages = [_turn(one, number, location, template) for number, one in enumerate(record["conversations"], 1)]
    else:
        names = ", ".join(f"`{name[:40]}`" for name in list(record)[:10])
        fix = "; data=sft reads texts" if sum(isinstance(value, str) for value in record.values()) > 1 else ""
        raise UserError(f"{location} must have a list `messages` or `conversations`; it has {names or 'nothing'}{fix}")
    system = record.get("system")
    if isinstance(system, str) and system and messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": _valid_text(system, f"{location}: `system`")}, *messages]
    if len(messages) > MAX_MESSAGES:
        raise UserError(f"{location} has more than {MAX_MESSAGES:,} messages")
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{location} has no message of the assistant: there is nothing to learn from it")
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{location}: `tools` must be a list")
    return Chat(messages, tools, location)


def _message(record: object, number: int, location: str, template: str) -> Message:
    place = f"{location}: message {number}"
    if not isinstance(record, dict) or not isinstance(record.get("role"), str):
        raise UserError(f"{place} must be an object with a text `role` and `content`")
    _check_role(record["role"], place, template)
    content = record.get("content")
    if content is None and ("tool_calls" in record or "function_call" in record):
        return record
    if isinstance(content, str):
        _valid_text(content, place)
    elif not (isinstance(content, list) and content and all(map(_is_text_part, content))):
        raise UserError(f"{place} must have a text `content`, or a list of parts of type text")
    return record


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _turn(record: object, number: int, location: str, template: str) -> Message:
    place = f"{location}: message {number}"
    speaker, text = (record.get("from"), record.get("value")) if isinstance(record, dict) else (None, None)
    if not isinstance(speaker, str) or not isinstance(text, str):
        raise UserError(f"{place} must be an object with texts `from` and `value`")
    role = _ROLES.get(speaker.lower(), speaker.lower())
    _check_role(role, place, template)
    return {"role": role, "content": _valid_text(text, place)}


def _check_role(role: str, place: str, template: str) -> None:
    """Reject a misspelled role: its answers would be treated as prompts."""
    intended = _ROLES.get(role.lower())
    named = bool(role) and any(f"{quote}{role}{quote}" in template for quote in "'\"")
    # Answers are found by the role `assistant`, whatever name the template renders.
    if role in _KNOWN_ROLES or (named and intended != "assistant"):
        return
    intended = intended or closest(role, _KNOWN_ROLES)
    fix = (
        f"did you mean `{intended}`?"
        if intended
        else f"known are {', '.join(_KNOWN_ROLES)} and what the template names"
    )
    raise UserError(f"{place} has role `{role[:40]}`; {fix}")


def _valid_text(text: str, place: str) -> str:
    try:
        encode_utf8(text)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    return text


def conversation_start(chat: Chat) -> str:
    """Return the messages before the first answer as a string: chats that begin alike are assigned to one split."""
    upto = next(number for number, message in enumerate(chat.messages) if message["role"] == "assistant")
    return json.dumps([[message["role"], message.get("content")] for message in chat.messages[:upto]])


# ---------------------------------------------------------------- tokens


def encode_chats(chats: Sequence[Chat], tokenizer: Tokenizer, *, answer_only: bool) -> Iterator[Example]:
    """Tokenize conversations; the assistant's text is predicted.

    Args:
        tokenizer: of the model, with the template.
        answer_only: predict only the assistant's text; False: all tokens but the first.

    Raises:
        UserError: the template fails on a conversation; the message gives its location and beginning.
    """
    if not chats:
        return
    template = get_chat_template(tokenizer)
    if not _READS_TEXT_PARTS.search(template.source):
        chats = [_join_text_parts(chat) for chat in chats]
    with template.start_renderer() as renderer:
        try:
            for chat, rendered in zip(chats, renderer.render_all(chats), strict=True):
                yield _example(chat, rendered, tokenizer, answer_only=answer_only)
        except ChatRenderError as error:
            chat = chats[error.index]
            beginning = one_line(message_text(chat.messages[0]), 60)
            place = f"{chat.location}, " if chat.location else ""
            raise UserError(f"{place}the conversation that begins with {beginning!r}: {error.lines[0]}") from None


def _join_text_parts(chat: Chat) -> Chat:
    """Join the text parts of each message."""
    if not any(isinstance(message.get("content"), list) for message in chat.messages):
        return chat
    return chat._replace(
        messages=[
            {**message, "content": message_text(message)} if isinstance(message.get("content"), list) else message
            for message in chat.messages
        ]
    )


def _example(chat: Chat, rendered: RenderedChat, tokenizer: Tokenizer, *, answer_only: bool) -> Example:
    ids, is_answer = encode_with_assistant_mask(tokenizer, rendered)
    prompt = len(ids)
    while prompt and not is_answer[prompt - 1]:  # tokens after the last answer
        prompt -= 1
    while prompt and is_answer[prompt - 1]:
        prompt -= 1
    last = [message for message in chat.messages if message["role"] == "assistant"][-1]
    counted = is_answer if answer_only else np.arange(len(ids)) > 0
    return Example(ids, counted, prompt, "", message_text(last))


def message_text(message: Message) -> str:
    """Return the text of a message."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def encode_rendered_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a rendered text, with special tokens recognized."""
    return encode_with_assistant_mask(tokenizer, RenderedChat(text, ()))[0].tolist()


def end_of_turn(tokenizer: Tokenizer) -> str:
    """Return the text that the template appends to an answer, without white space: the stop string of generation.

    Raises:
        UserError: the template fails on a question with an answer.
    """
    answer = "Yes"
    with get_chat_template(tokenizer).start_renderer() as renderer:
        chat = Chat([{"role": "user", "content": "No?"}, {"role": "assistant", "content": answer}])
        rendered = renderer.render(chat)
    begin, end = rendered.assistant_spans[-1]
    return rendered.text[begin:end].rpartition(answer)[2].strip()


def encode_with_assistant_mask(tokenizer: Tokenizer, rendered: RenderedChat) -> tuple[TokenIds, NDArray[np.bool_]]:
    """Return the ids of a rendered conversation, [N], and the mask of the assistant's tokens, bool [N].

    As in `transformers`, a token that is partly in an answer belongs to it.

    Raises:
        UserError: the text cannot be tokenized.
    """
    if not isinstance(tokenizer, JsonTokenizer):
        return _encode_segments(tokenizer, rendered)
    ids, offsets = tokenizer.encode_with_offsets(rendered.text)
    mask = np.zeros(len(ids), np.bool_)
    for begin, end in rendered.assistant_spans:
        inside = np.flatnonzero(((offsets[:, 1] > begin) | (offsets[:, 0] >= begin)) & (offsets[:, 0] < end))
        if begin < end and len(inside):
            mask[inside[0] : inside[-1] + 1] = True
    return ids, mask


def _encode_segments(tokenizer: Tokenizer, rendered: RenderedChat) -> tuple[TokenIds, NDArray[np.bool_]]:
    """Tokenize segments between special tokens and answer boundaries, for tokenizers that ignore special tokens."""
    names = special_tokens_map(tokenizer)
    known = {"eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    ids = {text: tokenizer.token_id(text) for text in names.values()}
    ids |= {names[name]: id_ for name, id_ in known.items() if name in names and ids[names[name]] is None}
    special = {text: id_ for text, id_ in ids.items() if id_ is not None and text}
    edges = {0, len(rendered.text), *(edge for span in rendered.assistant_spans for edge in span)}
    segments: list[TokenIds] = []
    masks: list[NDArray[np.bool_]] = []
    ordered = sorted(edges)
    for begin, end in itertools.pairwise(ordered):
        is_answer = any(first <= begin and end <= last for first, last in rendered.assistant_spans)
        segment = _encode_with_special_tokens(tokenizer, rendered.text[begin:end], special)
        segments.append(segment)
        masks.append(np.full(len(segment), is_answer))
    empty = tokenizer.encode("")
    return np.concatenate([empty, *segments]), np.concatenate([np.zeros(0, np.bool_), *masks])


def _encode_with_special_tokens(tokenizer: Tokenizer, text: str, special: Mapping[str, int]) -> TokenIds:
    """Return the ids of a text with special tokens recognized."""
    parts = literal_pattern(special).split(text)  # odd elements are special tokens
    dtype = tokenizer.encode("").dtype
    return np.concatenate(
        [np.array([special[part]], dtype) if index % 2 else tokenizer.encode(part) for index, part in enumerate(parts)]
    )
