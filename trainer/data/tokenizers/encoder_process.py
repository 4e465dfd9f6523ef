"""Tokenizer of a `tokenizer.json`, run by `isolated_encoder.py` as a separate process that does not import stoker.

A tokenizer comes with a model from an untrusted source. Its normalizer can make a short text long, its regular
expressions can take hours, and a panic of the library prints a traceback; process limits contain all three. A message
is a line with a JSON object, then as many bytes as it says:

    {"size": N}                                             the definition, UTF-8: the first request
    {"sizes": [N, ...], "special": false, "offsets": false} texts, UTF-8; with special tokens; with character offsets
        -> {"counts": [N, ...], "size": N}                  all ids, int32; then [START, END] of each, int32
"""

from __future__ import annotations

import json
import math
import sys
import time
from array import array
from typing import Any

try:
    import resource
except ImportError:  # Windows; only the timeout of the parent process applies
    resource = None

MAX_SECONDS = 20
"""CPU time per request; texts add to it."""
BYTES_PER_SECOND = 50_000
"""Slowest speed of a usable tokenizer; the usual ones encode a MB per second or more."""
MAX_TOKENS = 1 << 26
"""Tokens of a request."""


def _limit_resources(max_memory: int) -> None:
    """Limit the address space in bytes, and forbid opening and writing files."""
    if resource is None:
        return
    resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(num_bytes: int) -> None:
    """Set the CPU time limit of the next request, which also ends it if the parent process is gone."""
    if resource is not None:
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        seconds = math.ceil(time.process_time()) + MAX_SECONDS + num_bytes // BYTES_PER_SECOND
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, most))


def _answer(tokenizer: Any, texts: list[str], *, special: bool, offsets: bool) -> tuple[list[int], bytes]:
    counts: list[int] = []
    ids, places = array("i"), array("i")
    for text in texts:
        found = tokenizer.encode(text, add_special_tokens=special)
        if len(ids) + len(found) > MAX_TOKENS:
            raise ValueError(f"it makes more than {MAX_TOKENS:,} tokens")
        ids.extend(found.ids)
        counts.append(len(found))
        if special:  # where the text's own tokens are
            places.extend(found.special_tokens_mask)
        elif offsets:
            for place in found.offsets:
                places.extend(place)
    return counts, ids.tobytes() + places.tobytes()


def main() -> None:
    """Answer requests until stdin is closed."""
    max_memory, import_path = sys.argv[1:]
    sys.path.append(import_path)  # of tokenizers, from the parent process
    from tokenizers import Tokenizer

    _limit_resources(int(max_memory))
    tokenizer: Any = None
    source, target = sys.stdin.buffer, sys.stdout.buffer
    for line in source:
        request = json.loads(line)
        sizes = request["sizes"] if tokenizer is not None else [request["size"]]
        _limit_time(sum(sizes))
        data = b""
        try:
            texts = [source.read(size).decode() for size in sizes]
            if tokenizer is None:
                tokenizer = Tokenizer.from_str(texts[0])
                answer: dict[str, Any] = {}
            else:
                counts, data = _answer(tokenizer, texts, special=request["special"], offsets=request["offsets"])
                answer = {"counts": counts}
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the Rust library is not an Exception
            answer = {"error": " ".join(str(error).split())[:200] or type(error).__name__}
        target.write(json.dumps({**answer, "size": len(data)}).encode() + b"\n" + data)
        target.flush()


if __name__ == "__main__":
    main()
