"""When a checkpoint is written: at once, or beside training (`async_save`) from a copy in host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from ..distributed.process_group import Ranks
from ..utils.errors import EXIT_IO, UserError
from .sharded_safetensors import on_host
from .writer import Content, write_checkpoint


class Saver:
    """Writes checkpoints one after the other.

    Args:
        directory: where the `step-N` directories go.
        ranks: the processes that write together.
        clean: called by the first rank after each complete checkpoint, to delete those that are not kept.
        beside: write in a thread while training goes on. Messages between ranks then go through a group of their own.

    Raises:
        UserError: (from `save` and `finish`) the disk is full, read-only or not ours.
    """

    def __init__(self, directory: Path, ranks: Ranks, clean: Callable[[], None], *, beside: bool = False) -> None:
        self._directory = directory
        self._ranks = ranks.apart() if beside else ranks
        self._clean = clean
        self._beside = beside
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, content: Content) -> Path:
        """Write a checkpoint, or begin to: only the copy into host memory is waited for then."""
        self.finish()
        if not self._beside:
            self._write(content)
        else:
            tensors = {kind: on_host(pieces) for kind, pieces in content.tensors.items()}
            copied = Content(content.state, tensors, content.config_document, content.tokenizer_document)
            self._thread = threading.Thread(target=self._try, args=(copied,), name="checkpoint")
            self._thread.start()
        return self._directory / f"step-{content.state.step}"

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _try(self, content: Content) -> None:
        try:
            self._write(content)
        except BaseException as error:  # raised where training asks for it
            self._error = error

    def _write(self, content: Content) -> None:
        write_checkpoint(self._directory, content, self._ranks)
        problem = None
        if self._ranks.is_first:
            try:
                self._clean()
            except OSError as error:
                problem = UserError(
                    [
                        f"cannot delete old checkpoints in {self._directory}: {error.strerror or error}",
                        f"step {content.state.step:,} is saved",
                    ],
                    EXIT_IO,
                )
        self._ranks.raise_together(problem)
