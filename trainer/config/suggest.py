"""Suggestions ("did you mean"): the nearest known key, group option or value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

from .nemo.other_frameworks import foreign_names

_WRONG_PARENT = 1.0
_NOT_ACTING = 0.25


def edit_distance(a: str, b: str, limit: int) -> int:
    """Return the Damerau-Levenshtein distance (optimal string alignment) of `a` and `b`, at most `limit` + 1."""
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    a, b = a[start:], b[start:]
    while a and b and a[-1] == b[-1]:
        a, b = a[:-1], b[:-1]
    if not a or not b:
        return max(len(a), len(b))
    if sum((Counter(a) - Counter(b)).values()) > limit or sum((Counter(b) - Counter(a)).values()) > limit:
        return limit + 1
    before: list[int] = []
    above = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(above[j] + 1, row[-1] + 1, above[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        if min(row) > limit and min(above) > limit:
            return limit + 1
        before, above = above, row
    return min(above[-1], limit + 1)


def closest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice nearest to `word`, ignoring case and separators; None if none is near."""
    plain = _normalized(word)
    best: tuple[int, str] | None = None
    for choice in choices:
        limit = max(1, min(len(plain), len(choice)) // 3)
        edits = edit_distance(plain, _normalized(choice), limit)
        if edits <= limit and (best is None or edits < best[0]):
            best = (edits, choice)
    if best is None:
        within = [choice for choice in choices if len(plain) > 2 and _normalized(choice).startswith(plain)]
        return within[0] if within else None
    return best[1]


def _normalized(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "").replace(" ", "")


@lru_cache(maxsize=4096)
def nearest_keys(path: str, known: tuple[tuple[str, bool], ...]) -> tuple[str, ...]:
    """Return at most three of the `known` keys, (path, acts), that `path` may have meant: best first."""
    parent, _, name = path.rpartition(".")
    acting = dict(known)
    scored: dict[str, float] = {}
    edits_of: dict[str, int] = {}  # cached by last name, which many paths share
    limit = 2 if len(path) < 12 else 3
    for candidate, acts in known:
        above, _, last = candidate.rpartition(".")
        score = float(edit_distance(path, candidate, limit))
        shortest = min(len(name), len(last))
        if score > limit or (above == parent and score > max(1, shortest // 2)):  # `foo` is not `fp8`
            score = float("inf")
        near = min(2, shortest // 3)
        if last not in edits_of:
            edits_of[last] = edit_distance(name, last, near)
        if above != parent and edits_of[last] <= near:
            score = min(score, edits_of[last] + _WRONG_PARENT)
        if score < float("inf"):
            scored[candidate] = score + (0 if acts else _NOT_ACTING)
    foreign = _foreign_match(name, parent, acting)
    if foreign is not None and min((scored[key] for key in scored if acting[key]), default=9.0) > 1.0 + (parent != ""):
        scored[foreign] = -1.0
    elif foreign is not None:
        beside = foreign.rpartition(".")[0] == parent or f"{parent}.{name}" in foreign_names()
        scored[foreign] = min(scored.get(foreign, 9.0), 0.9 if beside else 1.5)
    if not scored:
        scored = dict.fromkeys(_sharing_words(name, tuple(acting)), 9.0)
    ranked = sorted(scored, key=lambda key: (scored[key], -_common_names(path, key), len(key), key))
    return tuple(ranked[:3])


def _foreign_match(name: str, parent: str, known: dict[str, bool]) -> str | None:
    """Return the key for a name of another framework; for a T5 below the given stack (or the encoder)."""
    word = name.lower().replace("-", "_")
    target = foreign_names().get(f"{parent}.{word}", foreign_names().get(word, ""))
    below = target.removeprefix("model.")
    return next((path for path in (target, f"{parent}.{below}", f"model.encoder.{below}") if path in known), None)


def _sharing_words(name: str, known: Sequence[str]) -> list[str]:
    """Return keys that share at least two words, or all words, with `name`."""
    words = set(name.lower().split("_")) - {"", "use", "the", "of"}
    ranked = []
    for candidate in known:
        theirs = set(candidate.rpartition(".")[2].split("_"))
        shared = len(words & theirs)
        if shared >= 2 or (words and words <= theirs):
            ranked.append((-shared, len(theirs), candidate))
    return [candidate for _, _, candidate in sorted(ranked)]


def _common_names(path: str, other: str) -> int:
    """Return the number of common leading names of two paths plus that of common trailing names."""
    a, b = path.split("."), other.split(".")
    head = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    tail = next((i for i, (x, y) in enumerate(zip(a[::-1], b[::-1], strict=False)) if x != y), min(len(a), len(b)))
    return head + tail
