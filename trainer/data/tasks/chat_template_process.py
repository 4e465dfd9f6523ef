"""Chat template renderer, run by `chat_template.py` as a separate process that does not import stoker.

A template comes with a model from an untrusted source, and is a program. Jinja's sandbox restricts what it can access,
but only process limits restrict its time and memory. Requests and responses are JSON objects, one per line:

    {"template": TEXT, "tokens": {NAME: TEXT}}                            the first request
        -> {}
    {"chats": [[MESSAGES, TOOLS], ...], "add_generation_prompt": true}
        -> {"texts": [TEXT, ...]}
    {"chats": [[MESSAGES, TOOLS], ...], "add_generation_prompt": false}
        -> {"texts": [[TEXT, [[START, END], ...]], ...]}

START and END are character offsets of the spans written by the assistant. A failed request returns {"error": TEXT}, and
"number" if it concerns one of the chats, counted from 0.
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
except ImportError:  # Windows; only the timeout of the parent process applies
    resource = None

MAX_MEMORY = 1 << 30
"""Address space in bytes."""
MAX_SECONDS = 20
"""CPU time per request."""
MAX_CHARACTERS = 16 << 20
"""Length of a rendered text."""


class TemplateError(Exception):
    """The template is invalid, or fails on a conversation; the message gives the reason."""


class ChatRenderer:
    """A compiled template in an environment equivalent to that of `transformers`.

    Args:
        tokens: special tokens by name, such as `bos_token`.

    Raises:
        TemplateError: the template is invalid.

    Attributes:
        has_generation_tag: the template marks the assistant's text itself, with `{% generation %}`.
    """

    has_generation_tag: bool = False

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        from jinja2 import nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        renderer = self

        class Generation(Extension):
            """`{% generation %}`: marks text written by the assistant."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Parser) -> nodes.Node:
                renderer.has_generation_tag = True
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                call = nodes.ContextReference()
                return nodes.CallBlock(self.call_method("marked", [call]), [], [], body).set_lineno(line)

            def marked(self, _context: Any, caller: Any) -> str:
                return f"{renderer.start_marker}{caller()}{renderer.end_marker}"

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception  # pyrefly: ignore[unsupported-operation]
        # Random markers, which no message can contain.
        self.start_marker, self.end_marker = (f"\x02{secrets.token_hex(8)}\x03" for _ in range(2))
        try:
            self._template = environment.from_string(source)
        except Exception as error:
            raise TemplateError(f"it is not a valid template: {_reason(error)}") from None
        self._tokens = tokens

    def render_prompt(self, messages: list[Any], tools: list[Any] | None) -> str:
        """Render messages, followed by the generation prompt of the assistant."""
        return self._render_unmarked(messages, tools, add_generation_prompt=True)

    def render(self, messages: list[Any], tools: list[Any] | None) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation and find the spans written by the assistant.

        The template marks them itself with `{% generation %}`, or they are found by comparison: an answer begins where
        the rendering of the messages before it, with the generation prompt, first differs from the full text, and ends
        where the rendering of the messages including it ends.

        Raises:
            TemplateError: the template fails, or renders earlier messages differently because of later ones.
        """
        if self.has_generation_tag:
            return self._extract_spans(self._render(messages, tools, add_generation_prompt=False))
        whole = self._render_unmarked(messages, tools, add_generation_prompt=False)
        spans: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            upto = (
                whole
                if number + 1 == len(messages)
                else self._render_unmarked(messages[: number + 1], tools, add_generation_prompt=False)
            )
            before = self._render_unmarked(messages[:number], tools, add_generation_prompt=False)
            begins = _common_prefix_length(
                whole, self._render_unmarked(messages[:number], tools, add_generation_prompt=True)
            )
            if not (whole.startswith(upto) and len(before) <= begins <= len(upto)):
                raise TemplateError(
                    f"it renders message {number + 1} differently when others follow it, so the assistant's text "
                    "cannot be found; put {% generation %} and {% endgeneration %} around it in the template"
                )
            spans.append((begins, len(upto)))
        return whole, spans

    def _render_unmarked(self, messages: list[Any], tools: list[Any] | None, *, add_generation_prompt: bool) -> str:
        return (
            self._render(messages, tools, add_generation_prompt=add_generation_prompt)
            .replace(self.start_marker, "")
            .replace(self.end_marker, "")
        )

    def _render(self, messages: list[Any], tools: list[Any] | None, *, add_generation_prompt: bool) -> str:
        pieces: list[str] = []
        remaining = MAX_CHARACTERS
        try:
            for piece in self._template.generate(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self._tokens
            ):
                remaining -= len(piece)
                if remaining < 0:
                    raise TemplateError(f"it writes more than {MAX_CHARACTERS:,} characters")
                pieces.append(piece)
        except (TemplateError, MemoryError):
            raise
        except Exception as error:
            raise TemplateError(_reason(error)) from None
        return "".join(pieces)

    def _extract_spans(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """Remove the markers from a text and return their positions."""
        spans: list[tuple[int, int]] = []
        first, *rest = text.split(self.start_marker)
        plain, length = [first], len(first)
        for part in rest:
            inside, _, after = part.partition(self.end_marker)
            spans.append((length, length + len(inside)))
            plain += [inside, after]
            length += len(inside) + len(after)
        return "".join(plain), spans


_WARM_UP_TEMPLATES = (
    "{% macro m(x) %}{{ x }}{% endmacro %}{% set n = namespace(a='\\n') %}{% for k, v in {'a': 1}.items() recursive %}"
    "{{ m(n.a ~ k | trim) | tojson | e | urlencode | pprint }}{{ loop.index }}{{ '%s' | format('a') }}"
    "{{ [1] | random }}{% break %}{% endfor %}{% generation %}{{ 'a-b'.split('-') | join('\\u00e9') | title }}"
    "{% endgeneration %}{{ 'a' | indent | wordwrap }}{{ [{'a': 1}] | groupby('a') | list }}"
    "{{ '<a>' | striptags | safe | urlize }}",
    "{% if",
    "{{ messages.x.x }}",
)
"""Templates that load every module jinja2 may need, while files can still be opened."""


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _common_prefix_length(first: str, second: str) -> int:
    """Return the length of the common prefix."""
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _raise_exception(message: object) -> NoReturn:
    """`raise_exception(...)` of a template."""
    raise TemplateError(f"it says: {' '.join(str(message).split())[:300]}")


def _reason(error: Exception) -> str:
    return f"{' '.join(str(error).split())[:300] or type(error).__name__}"


def _limit_resources() -> None:
    """Limit the memory, and forbid opening and writing files."""
    if resource is None:
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


def _limit_time() -> None:
    """Set the CPU time limit of the next request, which also ends a loop if the parent process is gone."""
    if resource is not None:
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + MAX_SECONDS, most))


def _answer(renderer: ChatRenderer, request: dict[str, Any]) -> dict[str, Any]:
    texts: list[Any] = []
    for messages, tools in request["chats"]:
        try:
            texts.append(
                (renderer.render_prompt if request["add_generation_prompt"] else renderer.render)(messages, tools)
            )
        except TemplateError as error:
            return {"error": str(error), "number": len(texts)}
    return {"texts": texts}


def main() -> None:
    """Answer requests until stdin is closed."""
    sys.path += sys.argv[1:]  # import paths of jinja2, from the parent process
    for template in _WARM_UP_TEMPLATES:
        with contextlib.suppress(TemplateError):
            ChatRenderer(template, {}).render_prompt([], None)
    _limit_resources()
    renderer: ChatRenderer | None = None
    for line in sys.stdin:
        request = json.loads(line)
        _limit_time()
        try:
            if renderer is None:
                renderer = ChatRenderer(request["template"], request["tokens"])
                answer: dict[str, Any] = {}
            else:
                answer = _answer(renderer, request)
        except TemplateError as error:
            answer = {"error": str(error)}
        except MemoryError:
            answer = {"error": f"it needs more than {MAX_MEMORY >> 20:,} MiB of memory"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
