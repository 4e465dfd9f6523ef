"""Functions of the standard library paired with their docstrings: a sequence-to-sequence task that needs no download.

The input is the source of a function without its docstring, the target the docstring's first paragraph in one line.
"""

from __future__ import annotations

import ast
import io
import platform
import textwrap
import warnings
from collections.abc import Iterator

from ...config.dataset_names import SPLITS, Split
from ...utils.text import one_line
from .text_pairs import TextPair, TextPairs, pairs_fingerprint
from .text_sources import Corpus, Proportions, read_pystd

MAX_TARGET_CHARACTERS = 120
"""Maximum length in characters; functions with a longer first paragraph are skipped."""


def read_docstrings(proportions: Proportions) -> TextPairs:
    """Return the pairs of the running interpreter's standard library, split by module.

    Each file, and so each module, is in one split only. Of pairs with the same input, or the same name and target (such
    as copied functions, and methods of one interface), only the first is kept, training first: no held-out pair was
    trained on.

    Raises:
        UserError: this interpreter has no readable sources.
    """
    return docstring_pairs(read_pystd(proportions))


def docstring_pairs(corpus: Corpus) -> TextPairs:
    """Return the pairs of a corpus whose documents are Python modules; those that cannot be parsed are skipped."""
    seen: set[tuple[str, ...]] = set()
    pairs: dict[Split, list[TextPair]] = {}
    for split in SPLITS:
        pairs[split] = []
        for module in corpus.documents[split]:
            for name, pair in documented_functions(module):
                keys = {(pair.input,), (name, pair.target)}
                if not keys & seen:
                    pairs[split].append(pair)
                seen |= keys
    return TextPairs(f"pystd_docstring (Python {platform.python_version()})", pairs, pairs_fingerprint(pairs))


def documented_functions(module: str) -> Iterator[tuple[str, TextPair]]:
    """Yield name and pair of each function and method with a docstring and at least one more statement, in order."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated syntax in the sources
            tree = ast.parse(module)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = list(io.StringIO(module, newline=None))  # Python's line numbers: `splitlines` also splits at form feeds
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in sorted(functions, key=lambda function: function.lineno):
        target = _first_paragraph(ast.get_docstring(node) or "")
        source = _without_docstring(node, lines)
        if target and source and len(target) <= MAX_TARGET_CHARACTERS:
            yield node.name, TextPair(source, target)


def _first_paragraph(docstring: str) -> str:
    paragraph = docstring.strip().split("\n\n")[0]
    return one_line(paragraph)


def _without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> str:
    """Return a function's lines without its docstring; empty if nothing else is left, or a line is shared with it."""
    docstring, rest = node.body[0], node.body[1:]
    last = docstring.end_lineno
    if not rest or last is None or node.end_lineno is None:
        return ""
    if docstring.lineno == node.lineno or rest[0].lineno == last:
        return ""
    kept = lines[node.lineno - 1 : docstring.lineno - 1] + lines[last : node.end_lineno]
    return textwrap.dedent("".join(kept)).strip("\n") + "\n"
