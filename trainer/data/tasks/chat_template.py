"""Chat templates: Jinja programs that come with tokenizers and write a conversation as one text.

They are rendered in a process of their own (`template_process.py`), in Jinja's sandbox, with limits of time and memory.
A tokenizer carries its template along, into every checkpoint.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from ...utils.errors import UserError

MAX_TEMPLATE_BYTES = 1 << 20
SECONDS = 10.0
"""For `_AT_ONCE` conversations, which take some milliseconds."""
_AT_ONCE = 64
TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
Message = Mapping[str, Any]
"""`role`, `content` and whatever else the template reads, as in the chat formats of OpenAI and `transformers`."""

_DEFAULT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, but that the tokenizer's own end token ends answers: ChatML's marks are ordinary text to most of them."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the special tokens it may write.

    Attributes:
        source: the Jinja program.
        tokens: text of special tokens by their names in the template: `bos_token`, `eos_token`, ...
    """

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)

    def to_document(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"template": self.source, "tokens": dict(self.tokens)}

    @classmethod
    def from_document(cls, document: object) -> Self:
        """Read back what `to_document` gave, from anywhere.

        Raises:
            ValueError: it is not such a document.
        """
        if not isinstance(document, dict) or set(document) != {"template", "tokens"}:
            raise ValueError("`chat` must be an object with `template` and `tokens`")
        source, tokens = document["template"], document["tokens"]
        if not isinstance(source, str) or len(source) > MAX_TEMPLATE_BYTES:
            raise ValueError("`chat.template` must be a text of at most 1 MiB")
        if not isinstance(tokens, dict) or not all(isinstance(token, str) for token in tokens.values()):
            raise ValueError("`chat.tokens` must be texts by name")
        if not set(tokens) <= set(TOKEN_NAMES):
            raise ValueError(f"`chat.tokens` may name {', '.join(TOKEN_NAMES)}")
        return cls(source, tokens)

    def renderer(self) -> Renderer:
        """Start the process that renders it; use it as a context manager.

        Raises:
            UserError: the template is none.
        """
        return Renderer(self)


class Chat(NamedTuple):
    """A conversation.

    Attributes:
        messages: what was said.
        tools: descriptions of functions that the assistant may call, for templates that write them.
        where: the file and line that it was read from, for messages; no part of what is learnt.
    """

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    where: str = ""


class Rendered(NamedTuple):
    """A conversation as text.

    Attributes:
        text: all of it.
        answers: from where to where in it the assistant wrote, in characters.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


class BadChatError(UserError):
    """A template fails on a conversation.

    Attributes:
        number: which one of those it was given, from 0.
    """

    def __init__(self, line: str, number: int) -> None:
        super().__init__(line)
        self.number = number


class Renderer:
    """A template at work.

    Args:
        template: the template.

    Raises:
        UserError: it is no template.
    """

    def __init__(self, template: ChatTemplate) -> None:
        places = {_folder_of(name) for name in ("jinja2", "markupsafe")}
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__).with_name("chat_template_process.py")), *sorted(places)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        try:
            self._ask({"template": template.source, "tokens": dict(template.tokens)})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """The text of some messages and the beginning of the assistant's next one.

        Raises:
            UserError: the template fails on them, or takes too long.
        """
        (text,) = self._texts([Chat(messages, tools)], ask=True)
        return text

    def conversation(self, chat: Chat) -> Rendered:
        """The text of a conversation, and what of it the assistant wrote.

        Raises:
            UserError: as `prompt`; or the template writes earlier messages differently because of later ones.
        """
        (rendered,) = self.conversations([chat])
        return rendered

    def conversations(self, chats: Sequence[Chat]) -> Iterator[Rendered]:
        """`conversation` of many.

        Raises:
            BadChatError: a template fails on one of them.
            UserError: it takes too long.
        """
        for first in range(0, len(chats), _AT_ONCE):
            try:
                answers = self._texts(chats[first : first + _AT_ONCE], ask=False)
            except BadChatError as error:
                raise BadChatError(error.lines[0], first + error.number) from None
            for text, spans in answers:
                yield Rendered(text, tuple((begin, end) for begin, end in spans))

    def _texts(self, chats: Sequence[Chat], *, ask: bool) -> list[Any]:
        return self._ask({"chats": [(chat.messages, chat.tools) for chat in chats], "ask": ask})["texts"]

    def _ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(asked) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # it ended before it had read everything
            line = ""
        finally:
            timer.cancel()
        if not line:
            raise UserError(
                f"the chat template was stopped: it takes more than {SECONDS:g} seconds, or more memory than it "
                "is given"
            )
        answer = json.loads(line)
        if "error" in answer:
            reason = f"the chat template cannot be used: {answer['error']}"
            raise UserError(reason) if "number" not in answer else BadChatError(reason, answer["number"])
        return answer


def default_template(eos_token: str) -> ChatTemplate:
    """The template of a tokenizer that has none.

    Args:
        eos_token: the text of its end token.
    """
    return ChatTemplate(_DEFAULT, {"eos_token": eos_token})


def _folder_of(package: str) -> str:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise UserError(f"chat templates need the `{package}` package: pip install jinja2")
    return str(Path(found.origin).parent.parent)
