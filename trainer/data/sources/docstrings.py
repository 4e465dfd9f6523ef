"""Functions of the standard library and what their docstrings say: a task that every Python brings along.

The input is the source of a function without its docstring, the target the docstring's first paragraph in one line.
"""

from __future__ import annotations

import ast
import io
import platform
import textwrap
import warnings
from collections.abc import Iterator
from typing import NamedTuple

from .text_pairs import TextPair, TextPairs, fingerprint_of
from .text_sources import SPLITS, Corpus, Proportions, Split, read_pystd

LONGEST_TARGET = 120
"""Characters; a first paragraph that is longer is an essay."""


class Documented(NamedTuple):
    """A function with a docstring."""

    name: str
    pair: TextPair


def read_docstrings(proportions: Proportions) -> TextPairs:
    """The pairs of the running interpreter's standard library, split by module.

    A file, and so a module, is in one split only. Of pairs that have the same input, or the same name and target (as
    copied functions and methods of one interface have), only the first counts, training first: nothing that is held
    out was trained on.

    Args:
        proportions: parts of train, validation and test.

    Raises:
        UserError: this interpreter has no readable sources.
    """
    return docstring_pairs(read_pystd(proportions))


def docstring_pairs(corpus: Corpus) -> TextPairs:
    """The pairs of a corpus whose documents are Python modules; those that are no Python are left out."""
    seen: set[tuple[str, ...]] = set()
    pairs: dict[Split, list[TextPair]] = {}
    for split in SPLITS:
        pairs[split] = []
        for module in corpus.documents[split]:
            for name, pair in documented_functions(module):
                marks = {(pair.input,), (name, pair.target)}
                if not marks & seen:
                    pairs[split].append(pair)
                seen |= marks
    return TextPairs(f"pystd_docstring (Python {platform.python_version()})", pairs, fingerprint_of(pairs))


def documented_functions(module: str) -> Iterator[Documented]:
    """The functions and methods of a module that have a docstring and do something else too, in order.

    Args:
        module: its source.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old spellings in the sources
            tree = ast.parse(module)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = list(io.StringIO(module, newline=None))  # as Python counts them: a form feed ends none
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in sorted(functions, key=lambda function: function.lineno):
        target = _first_paragraph(ast.get_docstring(node) or "")
        source = _without_docstring(node, lines)
        if target and source and len(target) <= LONGEST_TARGET:
            yield Documented(node.name, TextPair(source, target))


def _first_paragraph(docstring: str) -> str:
    paragraph = docstring.strip().split("\n\n")[0]
    return " ".join(paragraph.split())


def _without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str:
    """The lines of a function but those of its docstring; empty where they hold nothing else, or share a line."""
    docstring, rest = node.body[0], node.body[1:]
    last = docstring.end_lineno
    if not rest or last is None or node.end_lineno is None:
        return ""
    if docstring.lineno == node.lineno or rest[0].lineno == last:
        return ""
    kept = lines[node.lineno - 1 : docstring.lineno - 1] + lines[last : node.end_lineno]
    return textwrap.dedent("".join(kept)).strip("\n") + "\n"
