"""Checkpoint saver: synchronous, or asynchronous (`async_save`) from a copy in host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from ..distributed.process_group import DistributedContext
from ..utils.errors import EXIT_IO, UserError
from .sharded_safetensors import copy_to_host
from .writer import CheckpointContent, write_checkpoint


class CheckpointSaver:
    """Save checkpoints one at a time.

    Args:
        directory: directory of the `step-N` checkpoints.
        ranks: the ranks that write together.
        apply_retention: called by rank 0 after each complete checkpoint, to apply retention.
        async_save: write in a background thread while training continues; ranks then use a separate process group.
        on_saved: called by rank 0 with the path of a complete checkpoint and the seconds it took to write.

    Raises:
        UserError: (from `save` and `wait`) the disk is full, read-only or not writable.
    """

    def __init__(
        self,
        directory: Path,
        ranks: DistributedContext,
        apply_retention: Callable[[], None],
        *,
        async_save: bool = False,
        on_saved: Callable[[Path, float], None] = lambda path, seconds: None,
    ) -> None:
        self._directory = directory
        self._ranks = ranks.with_own_group() if async_save else ranks
        self._apply_retention = apply_retention
        self._async_save = async_save
        self._on_saved = on_saved
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, content: CheckpointContent) -> Path:
        """Save a checkpoint and return its path; an asynchronous save waits only for the copy to host memory."""
        self.wait()
        if not self._async_save:
            self._write(content)
        else:
            tensors = {kind: copy_to_host(shards) for kind, shards in content.tensors.items()}
            copied = CheckpointContent(content.state, tensors, content.config_document, content.tokenizer_document)
            self._thread = threading.Thread(target=self._write_in_thread, args=(copied,), name="checkpoint")
            self._thread.start()
        return self._directory / f"step-{content.state.step}"

    @property
    def is_writing(self) -> bool:
        """True while a checkpoint is written in the background."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the checkpoint being written, if any."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write_in_thread(self, content: CheckpointContent) -> None:
        try:
            self._write(content)
        except BaseException as error:  # re-raised by `wait`
            self._error = error

    def _write(self, content: CheckpointContent) -> None:
        started_at = time.monotonic()
        path = write_checkpoint(self._directory, content, self._ranks)
        if self._ranks.is_rank_zero:
            self._on_saved(path, time.monotonic() - started_at)
        with self._ranks.raise_on_all_ranks():
            try:
                if self._ranks.is_rank_zero:
                    self._apply_retention()
            except OSError as error:
                raise UserError(
                    [
                        f"cannot delete old checkpoints in {self._directory}: {error.strerror or error}",
                        f"step {content.state.step:,} is saved",
                    ],
                    EXIT_IO,
                ) from None
