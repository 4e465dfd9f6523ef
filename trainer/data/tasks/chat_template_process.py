"""The process that renders chat templates: started by `chat_template.py` as a program of its own, without stoker.

A template comes with a model from anywhere, and is a program. Jinja's sandbox keeps it from reaching out of itself, but
nothing in Python keeps a program from taking all time and memory there is; limits of a process do. Each line that comes
in is a JSON object, and each is answered with one:

    {"template": TEXT, "tokens": {NAME: TEXT}}       -> {}                         the first line
    {"chats": [[MESSAGES, TOOLS], ...], "ask": true}  -> {"texts": [TEXT, ...]}     up to where an answer begins
    {"chats": [[MESSAGES, TOOLS], ...], "ask": false} -> {"texts": [[TEXT, [[START, END], ...]], ...]}

The pairs of numbers are the places in the text that the assistant wrote. What fails is answered with {"error": TEXT},
and with "number" if it is about one of the chats, counted from 0.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import sys
import time
from typing import Any, NoReturn

try:
    import resource
except ImportError:  # Windows; the time limit of the other side is left
    resource = None

MAX_MEMORY = 1 << 30
"""Bytes of address space."""
MAX_SECONDS = 20
"""Of computing, for what is asked at once."""
MAX_CHARACTERS = 16 << 20
"""Of a rendered text."""


class TemplateError(Exception):
    """The template cannot be used, or not on these messages; the text says why."""


class ChatRenderer:
    """A template with the meaning it has in `transformers`, whose environment this one is like.

    Args:
        source: the template.
        tokens: what it finds under the names of special tokens, such as `bos_token`.

    Raises:
        TemplateError: it is no template.

    Attributes:
        marks_answers: it says itself what the assistant writes.
    """

    marks_answers: bool = False

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        renderer = self

        class Generation(Extension):
            """`{% generation %}`: around what the assistant writes."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Parser) -> nodes.Node:
                renderer.marks_answers = True
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                call = nodes.ContextReference()
                return nodes.CallBlock(self.call_method("marked", [call]), [], [], body).set_lineno(line)

            def marked(self, _context: Any, caller: Any) -> str:
                return f"{renderer.opens}{caller()}{renderer.closes}"

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        # Text that no message holds, since nobody knows it before.
        self.opens, self.closes = (f"\x02{secrets.token_hex(8)}\x03" for _ in range(2))
        try:
            self._template = environment.from_string(source)
        except Exception as error:
            raise TemplateError(f"it is no template: {_reason(error)}") from None
        self._tokens = tokens

    def prompt(self, messages: list[Any], tools: list[Any] | None) -> str:
        """The text of some messages and the beginning of the next one, the assistant's."""
        return self._plain(messages, tools, ask=True)

    def conversation(self, messages: list[Any], tools: list[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the places that the assistant wrote.

        The template marks those itself with `{% generation %}`, or they are found: an answer begins where the text of
        the messages before it, with the beginning of an answer, no longer agrees with the whole text, and goes to the
        end of the text of the messages up to it.

        Raises:
            TemplateError: the template fails on these messages, or changes earlier messages because of later ones.
        """
        if self.marks_answers:
            return self._taken_out(self._render(messages, tools, ask=False))
        whole = self._plain(messages, tools, ask=False)
        spans: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            upto = whole if number + 1 == len(messages) else self._plain(messages[: number + 1], tools, ask=False)
            before = self._plain(messages[:number], tools, ask=False)
            begins = _agreeing(whole, self._plain(messages[:number], tools, ask=True))
            if not (whole.startswith(upto) and len(before) <= begins <= len(upto)):
                raise TemplateError(
                    f"it writes message {number + 1} differently when others follow it, so what the assistant wrote "
                    "cannot be found; put {% generation %} and {% endgeneration %} around that in the template"
                )
            spans.append((begins, len(upto)))
        return whole, spans

    def _plain(self, messages: list[Any], tools: list[Any] | None, *, ask: bool) -> str:
        return self._render(messages, tools, ask=ask).replace(self.opens, "").replace(self.closes, "")

    def _render(self, messages: list[Any], tools: list[Any] | None, *, ask: bool) -> str:
        pieces: list[str] = []
        left = MAX_CHARACTERS
        try:
            for piece in self._template.generate(
                messages=messages, tools=tools, add_generation_prompt=ask, **self._tokens
            ):
                left -= len(piece)
                if left < 0:
                    raise TemplateError(f"it writes more than {MAX_CHARACTERS:,} characters")
                pieces.append(piece)
        except (TemplateError, MemoryError):
            raise
        except Exception as error:
            raise TemplateError(_reason(error)) from None
        return "".join(pieces)

    def _taken_out(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """A text without its marks, and where they stood."""
        spans: list[tuple[int, int]] = []
        first, *rest = text.split(self.opens)
        plain, length = [first], len(first)
        for part in rest:
            inside, _, after = part.partition(self.closes)
            spans.append((length, length + len(inside)))
            plain += [inside, after]
            length += len(inside) + len(after)
        return "".join(plain), spans


_EVERYTHING = (
    "{% macro m(x) %}{{ x }}{% endmacro %}{% set n = namespace(a='\\n') %}{% for k, v in {'a': 1}.items() recursive %}"
    "{{ m(n.a ~ k | trim) | tojson | e | urlencode | pprint }}{{ loop.index }}{{ '%s' | format('a') }}"
    "{{ [1] | random }}{% break %}{% endfor %}{% generation %}{{ 'a-b'.split('-') | join('\\u00e9') | title }}"
    "{% endgeneration %}{{ 'a' | indent | wordwrap }}{{ [{'a': 1}] | groupby('a') | list }}"
    "{{ '<a>' | striptags | safe | urlize }}",
    "{% if",
    "{{ messages.x.x }}",
)
"""Templates that need every module there is, so that all are loaded while files can be opened."""


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, where Jinja's own filter writes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _agreeing(first: str, second: str) -> int:
    """How many characters two texts begin with alike."""
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _refuse(message: object) -> NoReturn:
    """`raise_exception(...)` of a template."""
    raise TemplateError(f"it says: {' '.join(str(message).split())[:300]}")


def _reason(error: Exception) -> str:
    return f"{' '.join(str(error).split())[:300] or type(error).__name__}"


def _limit() -> None:
    """Give up what rendering does not need: memory without end, and to open or write files."""
    if resource is None:
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def _limit_time() -> None:
    """The time for what is asked next: should the other side be gone, nobody else stops a loop."""
    if resource is not None:
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + MAX_SECONDS, most))


def _answer(renderer: ChatRenderer, asked: dict[str, Any]) -> dict[str, Any]:
    texts: list[Any] = []
    for messages, tools in asked["chats"]:
        try:
            texts.append((renderer.prompt if asked["ask"] else renderer.conversation)(messages, tools))
        except TemplateError as error:
            return {"error": str(error), "number": len(texts)}
    return {"texts": texts}


def main() -> None:
    """Answer lines until there are no more."""
    sys.path += sys.argv[1:]  # where the other side found jinja2
    for template in _EVERYTHING:
        with contextlib.suppress(TemplateError):
            ChatRenderer(template, {}).prompt([], None)
    _limit()
    renderer: ChatRenderer | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        _limit_time()
        try:
            if renderer is None:
                renderer = ChatRenderer(asked["template"], asked["tokens"])
                answer: dict[str, Any] = {}
            else:
                answer = _answer(renderer, asked)
        except TemplateError as error:
            answer = {"error": str(error)}
        except MemoryError:
            answer = {"error": f"it needs more than {MAX_MEMORY >> 20:,} MiB of memory"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
