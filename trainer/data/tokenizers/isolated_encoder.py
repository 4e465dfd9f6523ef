"""Run a tokenizer of unknown cost in a separate process (`encoder_process.py`) with limits on time and memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..isolated_process import IsolatedProcess, import_path
from .encoder_process import BYTES_PER_SECOND

MAX_MEMORY = 1 << 30
"""Address space of the process in bytes."""
ENCODE_TIMEOUT = 30.0
"""Seconds for a request, to which its texts add."""
_TRIAL = "".join(map(chr, range(32, 127))) + "a" * 2000 + " " * 2000 + "1" * 500 + "\n" * 500 + "\ufdfa\u0130中é\u0301"
"""Text that each tokenizer must encode before it is used: repetitions, which bad regular expressions take long for."""


class EncodedText(NamedTuple):
    """Tokens of one text.

    Attributes:
        ids: int32 [N].
        places: character offsets, [N, 2]; with special tokens 1 for each of them, [N, 1]; otherwise [N, 0].
    """

    ids: NDArray[np.int32]
    places: NDArray[np.int32]


class IsolatedEncoder:
    """Encode texts in a separate process, which is started on first use, and again after a fork.

    Args:
        definition: text of the `tokenizer.json`.
        field: its part without a known bound, for messages.
    """

    def __init__(self, definition: str, field: str) -> None:
        self._definition = definition
        self._field = field
        self._process: IsolatedProcess | None = None
        self._lock = threading.Lock()

    def check(self) -> None:
        """Load the tokenizer and encode a trial text; errors as `encode`."""
        self.encode([_TRIAL])

    def encode(self, texts: Sequence[str], *, special: bool = False, offsets: bool = False) -> list[EncodedText]:
        """Return the tokens of each text.

        Raises:
            UnicodeEncodeError: a text contains a lone surrogate.
            ValueError: the tokenizer fails, or exceeds a limit.
        """
        encoded = [text.encode() for text in texts]
        with self._lock:
            if self._process is None or not self._process.is_own:
                arguments = [str(MAX_MEMORY), import_path("tokenizers")]
                self._process = IsolatedProcess(Path(__file__).with_name("encoder_process.py"), arguments)
                definition = self._definition.encode()
                self._request({"size": len(definition)}, definition)
            header = {"sizes": list(map(len, encoded)), "special": special, "offsets": offsets}
            answer, data = self._request(header, b"".join(encoded))
        ends = np.cumsum([0, *answer["counts"]])
        numbers = np.frombuffer(data, np.int32)
        ids = numbers[: ends[-1]]
        places = numbers[ends[-1] :].reshape(int(ends[-1]), -1) if len(ids) else np.zeros((0, 2 * offsets), np.int32)
        spans = list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))
        return [EncodedText(ids[begin:end], places[begin:end]) for begin, end in spans]

    def _request(self, header: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        assert self._process is not None
        seconds = ENCODE_TIMEOUT + len(data) / BYTES_PER_SECOND
        answer = self._process.request(header, data, seconds=seconds)
        if answer is not None and "error" not in answer[0]:
            return answer
        self._process.close()
        self._process = None
        fix = f"simplify its `{self._field}`, or use another tokenizer"
        if answer is not None:
            raise ValueError(f"the tokenizers library rejects it: {answer[0]['error'][:120]}; {fix}")
        limits = f"the limits of {seconds:.0f} seconds and {MAX_MEMORY >> 20:,} MiB of memory"
        raise ValueError(f"it was stopped: it exceeded {limits}; {fix}")
