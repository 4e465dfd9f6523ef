"""Conversations: objects with messages, and the token rows that a chat template makes of them.

Two forms are read: `messages`, a list of objects with `role` and `content` (and whatever the template reads besides),
and `conversations`, a list of objects with `from` and `value`, of which NeMo's data sets and ShareGPT's are made.
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
from ..datasets.sft_examples import Example
from ..tokenizers.tokenizer import TokenIds, Tokenizer, utf8
from ..tokenizers.tokenizer_json import JsonTokenizer
from .chat_files import chat_of, special_names
from .chat_template import BadChatError, Chat, Message, Rendered

MAX_MESSAGES = 10_000
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Names of ShareGPT's speakers; all are read without regard to case."""
_KNOWN_ROLES = ("system", "user", "assistant", "tool", "developer", "function")
_PART_TEXT = re.compile(r"""\.text\b|['"]text['"]""")
"""What the source of a template holds that reads `content` as a list of parts: each has its text under that name."""


def read_chat(found: Mapping[str, Any], where: str, template: str = "") -> Chat:
    """The conversation of an object.

    Args:
        found: the object.
        where: its place, for messages.
        template: the source of the chat template; roles that it names are no mistakes.

    Raises:
        UserError: it holds none in which the assistant says something, or a role that nobody knows.
    """
    if isinstance(found.get("messages"), list):
        messages = [_message(one, number, where, template) for number, one in enumerate(found["messages"], 1)]
    elif isinstance(found.get("conversations"), list):
        messages = [_turn(one, number, where, template) for number, one in enumerate(found["conversations"], 1)]
    else:
        names = ", ".join(f"`{name[:40]}`" for name in list(found)[:10])
        cure = "; data=sft reads texts" if sum(isinstance(value, str) for value in found.values()) > 1 else ""
        raise UserError(f"{where} must have a list `messages` or `conversations`; it has {names or 'nothing'}{cure}")
    system = found.get("system")
    if isinstance(system, str) and system and messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": _text(system, f"{where}: `system`")}, *messages]
    if len(messages) > MAX_MESSAGES:
        raise UserError(f"{where} has more than {MAX_MESSAGES:,} messages")
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{where} has no message of the assistant: there is nothing to learn from it")
    tools = found.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{where}: `tools` must be a list")
    return Chat(messages, tools, where)


def _message(found: object, number: int, where: str, template: str) -> Message:
    at = f"{where}: message {number}"
    if not isinstance(found, dict) or not isinstance(found.get("role"), str):
        raise UserError(f"{at} must be an object with a text `role` and `content`")
    _check_role(found["role"], at, template)
    content = found.get("content")
    if content is None and ("tool_calls" in found or "function_call" in found):
        return found
    if isinstance(content, str):
        _text(content, at)
    elif not (isinstance(content, list) and content and all(map(_is_text_part, content))):
        raise UserError(f"{at} must have a text `content`, or a list of parts of type text")
    return found


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _turn(found: object, number: int, where: str, template: str) -> Message:
    at = f"{where}: message {number}"
    speaker, said = (found.get("from"), found.get("value")) if isinstance(found, dict) else (None, None)
    if not isinstance(speaker, str) or not isinstance(said, str):
        raise UserError(f"{at} must be an object with texts `from` and `value`")
    role = _ROLES.get(speaker.lower(), speaker.lower())
    _check_role(role, at, template)
    return {"role": role, "content": _text(said, at)}


def _check_role(role: str, at: str, template: str) -> None:
    """Refuse a misspelled role: its answers would be read as prompts."""
    meant = _ROLES.get(role.lower())
    named = bool(role) and any(f"{quote}{role}{quote}" in template for quote in "'\"")
    # Answers are found by the name `assistant`, whatever the template calls them in the text.
    if role in _KNOWN_ROLES or (named and meant != "assistant"):
        return
    meant = meant or closest(role, _KNOWN_ROLES)
    cure = f"did you mean `{meant}`?" if meant else f"known are {', '.join(_KNOWN_ROLES)} and what the template names"
    raise UserError(f"{at} has role `{role[:40]}`; {cure}")


def _text(text: str, at: str) -> str:
    try:
        utf8(text)
    except UserError as error:
        raise UserError(f"{at}: {error}") from None
    return text


def first_words(chat: Chat) -> str:
    """What a conversation begins with, up to the first answer: chats that begin alike belong to one split."""
    upto = next(number for number, message in enumerate(chat.messages) if message["role"] == "assistant")
    return json.dumps([[message["role"], message.get("content")] for message in chat.messages[:upto]])


# ---------------------------------------------------------------- tokens


def chat_examples(chats: Sequence[Chat], tokenizer: Tokenizer, *, answer_only: bool) -> Iterator[Example]:
    """Conversations as tokens; what the assistant wrote counts.

    Args:
        chats: the conversations.
        tokenizer: of the model, with the template.
        answer_only: False: all but the first token counts.

    Raises:
        UserError: the template fails on one, which is named by its place and first words.
    """
    if not chats:
        return
    template = chat_of(tokenizer)
    if not _PART_TEXT.search(template.source):
        chats = [_as_texts(chat) for chat in chats]
    with template.renderer() as renderer:
        try:
            for chat, rendered in zip(chats, renderer.conversations(chats), strict=True):
                yield _example(chat, rendered, tokenizer, answer_only=answer_only)
        except BadChatError as error:
            chat = chats[error.number]
            begins = " ".join(spoken(chat.messages[0]).split())[:60]
            place = f"{chat.where}, " if chat.where else ""
            raise UserError(f"{place}the conversation that begins with {begins!r}: {error.lines[0]}") from None


def _as_texts(chat: Chat) -> Chat:
    """A conversation with the parts of each message as one text."""
    if not any(isinstance(message.get("content"), list) for message in chat.messages):
        return chat
    return chat._replace(
        messages=[
            {**message, "content": spoken(message)} if isinstance(message.get("content"), list) else message
            for message in chat.messages
        ]
    )


def _example(chat: Chat, rendered: Rendered, tokenizer: Tokenizer, *, answer_only: bool) -> Example:
    ids, written = marked_ids(tokenizer, rendered)
    prompt = len(ids)
    while prompt and not written[prompt - 1]:  # what follows the last answer
        prompt -= 1
    while prompt and written[prompt - 1]:
        prompt -= 1
    last = [message for message in chat.messages if message["role"] == "assistant"][-1]
    counted = written if answer_only else np.arange(len(ids)) > 0
    return Example(ids, counted, prompt, "", spoken(last))


def spoken(message: Message) -> str:
    """The text of a message."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that a template wrote, in which the names of special tokens mean those."""
    return marked_ids(tokenizer, Rendered(text, ()))[0].tolist()


def end_of_answer(tokenizer: Tokenizer) -> str:
    """What the template writes behind an answer, without white space: where a generated one is over.

    Raises:
        UserError: the template fails on a question with an answer.
    """
    said = "Yes"
    with chat_of(tokenizer).renderer() as renderer:
        chat = Chat([{"role": "user", "content": "No?"}, {"role": "assistant", "content": said}])
        rendered = renderer.conversation(chat)
    begin, end = rendered.answers[-1]
    return rendered.text[begin:end].rpartition(said)[2].strip()


def marked_ids(tokenizer: Tokenizer, rendered: Rendered) -> tuple[TokenIds, NDArray[np.bool_]]:
    """The ids of a rendered conversation, [n], and which of them the assistant wrote, bool [n].

    A token that lies partly in an answer is part of it, as in `transformers`.

    Raises:
        UserError: the text cannot be tokenized.
    """
    if not isinstance(tokenizer, JsonTokenizer):
        return _by_parts(tokenizer, rendered)
    ids, places = tokenizer.encode_with_places(rendered.text)
    counted = np.zeros(len(ids), np.bool_)
    for begin, end in rendered.answers:
        inside = np.flatnonzero(((places[:, 1] > begin) | (places[:, 0] >= begin)) & (places[:, 0] < end))
        if begin < end and len(inside):
            counted[inside[0] : inside[-1] + 1] = True
    return ids, counted


def _by_parts(tokenizer: Tokenizer, rendered: Rendered) -> tuple[TokenIds, NDArray[np.bool_]]:
    """For tokenizers in which the names of special tokens are ordinary text: cut there, and at the answers' ends."""
    names = special_names(tokenizer)
    known = {"eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    ids = {text: tokenizer.token_id(text) for text in names.values()}
    ids |= {names[name]: id_ for name, id_ in known.items() if name in names and ids[names[name]] is None}
    special = {text: id_ for text, id_ in ids.items() if id_ is not None and text}
    edges = {0, len(rendered.text), *(edge for span in rendered.answers for edge in span)}
    found: list[TokenIds] = []
    counted: list[NDArray[np.bool_]] = []
    ordered = sorted(edges)
    for begin, end in itertools.pairwise(ordered):
        is_answer = any(first <= begin and end <= last for first, last in rendered.answers)
        part = _with_special(tokenizer, rendered.text[begin:end], special)
        found.append(part)
        counted.append(np.full(len(part), is_answer))
    empty = tokenizer.encode("")
    return np.concatenate([empty, *found]), np.concatenate([np.zeros(0, np.bool_), *counted])


def _with_special(tokenizer: Tokenizer, text: str, special: Mapping[str, int]) -> TokenIds:
    """The ids of a text in which the names of special tokens mean those."""
    parts: list[TokenIds] = []
    while text:
        places = {name: text.find(name) for name in special}
        first = min((place for place in places.values() if place >= 0), default=len(text))
        parts.append(tokenizer.encode(text[:first]))
        name = max((name for name, place in places.items() if place == first), key=len, default="")
        if name:
            parts.append(np.array([special[name]], parts[-1].dtype))
        text = text[first + len(name) :]
    return np.concatenate([tokenizer.encode(""), *parts])
