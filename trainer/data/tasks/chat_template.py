"""Chat templates: Jinja templates that come with tokenizers and format a conversation as one text.

They are rendered in a separate process (`chat_template_process.py`), in Jinja's sandbox, with time and memory limits.
The template is part of the tokenizer, and so saved with every checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from ...utils.errors import UserError
from ..isolated_process import IsolatedProcess, import_path

MAX_TEMPLATE_BYTES = 1 << 20
RENDER_TIMEOUT = 10.0
"""Timeout for `_BATCH_SIZE` conversations, which normally take a few milliseconds."""
_BATCH_SIZE = 64
TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
Message = Mapping[str, Any]
"""`role`, `content` and other keys that the template reads, as in the chat formats of OpenAI and `transformers`."""

_DEFAULT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, except that the tokenizer's own EOS ends answers: ChatML's markers are ordinary text to most tokenizers."""


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and its special tokens.

    Attributes:
        source: the Jinja template.
        tokens: text of special tokens by their names in the template: `bos_token`, `eos_token`, ...
    """

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the document that a checkpoint stores."""
        return {"template": self.source, "tokens": dict(self.tokens)}

    @classmethod
    def from_dict(cls, document: object) -> Self:
        """Rebuild the template from `to_dict`; the document is not trusted.

        Raises:
            ValueError: it is not such a document.
        """
        if not isinstance(document, dict) or set(document) != {"template", "tokens"}:
            raise ValueError("`chat` must be an object with `template` and `tokens`")
        source, tokens = document["template"], document["tokens"]
        if not isinstance(source, str) or len(source) > MAX_TEMPLATE_BYTES:
            raise ValueError("`chat.template` must be a string of at most 1 MiB")
        if not isinstance(tokens, dict) or not all(isinstance(token, str) for token in tokens.values()):
            raise ValueError("`chat.tokens` must be an object of strings")
        if not set(tokens) <= set(TOKEN_NAMES):
            raise ValueError(f"`chat.tokens` may name {', '.join(TOKEN_NAMES)}")
        return cls(source, tokens)

    def start_renderer(self) -> RendererProcess:
        """Start the rendering process; use it as a context manager.

        Raises:
            UserError: the template is invalid.
        """
        return RendererProcess(self)


class Chat(NamedTuple):
    """A conversation.

    Attributes:
        tools: descriptions of functions that the assistant may call, for templates that support them.
        location: file and line, for messages; not part of the text.
    """

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    location: str = ""


class RenderedChat(NamedTuple):
    """A conversation as text.

    Attributes:
        assistant_spans: character spans (begin, end) written by the assistant.
    """

    text: str
    assistant_spans: tuple[tuple[int, int], ...]


class ChatRenderError(UserError):
    """A template fails on a conversation.

    Attributes:
        index: of the conversation in the batch, from 0.
    """

    def __init__(self, line: str, index: int) -> None:
        super().__init__(line)
        self.index = index


class RendererProcess:
    """Render a chat template in a separate process.

    Raises:
        UserError: the template is invalid.
    """

    def __init__(self, template: ChatTemplate) -> None:
        try:
            paths = sorted({import_path(name) for name in ("jinja2", "markupsafe")})
        except ModuleNotFoundError as error:
            raise UserError(f"chat templates need the `{error.name}` package: pip install jinja2") from None
        self._process = IsolatedProcess(Path(__file__).with_name("chat_template_process.py"), paths)
        try:
            self._request({"template": template.source, "tokens": dict(template.tokens)})
        except BaseException:
            self._process.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.close()

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """Render messages, followed by the generation prompt of the assistant.

        Raises:
            UserError: the template fails, or takes too long.
        """
        (text,) = self._render([Chat(messages, tools)], add_generation_prompt=True)
        return text

    def render(self, chat: Chat) -> RenderedChat:
        """Render a conversation and find the spans written by the assistant.

        Raises:
            UserError: as `render_prompt`; or the template renders earlier messages differently because of later ones.
        """
        (rendered,) = self.render_all([chat])
        return rendered

    def render_all(self, chats: Sequence[Chat]) -> Iterator[RenderedChat]:
        """Render many conversations, see `render`.

        Raises:
            ChatRenderError: the template fails on one of them.
            UserError: it takes too long.
        """
        for first in range(0, len(chats), _BATCH_SIZE):
            try:
                answers = self._render(chats[first : first + _BATCH_SIZE], add_generation_prompt=False)
            except ChatRenderError as error:
                raise ChatRenderError(error.lines[0], first + error.index) from None
            for text, spans in answers:
                yield RenderedChat(text, tuple((begin, end) for begin, end in spans))

    def _render(self, chats: Sequence[Chat], *, add_generation_prompt: bool) -> list[Any]:
        conversations = [(chat.messages, chat.tools) for chat in chats]
        return self._request({"chats": conversations, "add_generation_prompt": add_generation_prompt})["texts"]

    def _request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        found = self._process.request(request, seconds=RENDER_TIMEOUT)
        if found is None:
            raise UserError(
                f"the chat template was stopped: it exceeded the limit of {RENDER_TIMEOUT:g} seconds, or the "
                "memory limit"
            )
        answer = found[0]
        if "error" in answer:
            reason = f"the chat template cannot be used: {answer['error']}"
            raise UserError(reason) if "number" not in answer else ChatRenderError(reason, answer["number"])
        return answer


def default_template(eos_token: str) -> ChatTemplate:
    """Return the template for a tokenizer that has none.

    Args:
        eos_token: the text of its EOS token.
    """
    return ChatTemplate(_DEFAULT, {"eos_token": eos_token})
