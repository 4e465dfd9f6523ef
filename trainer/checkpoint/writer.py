"""Writing checkpoints, and deleting those that are not kept: each is there completely or not at all, at any moment.

A checkpoint is written as `step-N.tmp-*` beside its final place, every file flushed to the disk, then renamed. One that
is deleted loses its name first.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from ..distributed.process_group import Ranks
from ..utils.errors import EXIT_IO, UserError
from ..utils.local_shard import Piece
from ..utils.safetensors_io import DamagedFileError, FileRecord, read_json, sync_directory, write_json
from .reader import CONFIG, FORMAT, MANIFEST, STATE, TOKENIZER, RunState, checkpoint_paths
from .sharded_safetensors import file_name, write_pieces

T = TypeVar("T")
_TEMPORARY = re.compile(r"step-\d{1,15}\.tmp-.*")
_DELETED, _REPLACED = "old", "replaced"
"""What becomes of a checkpoint that is set aside."""


@dataclass(frozen=True)
class Content:
    """What a checkpoint is made of.

    Attributes:
        state: where the run stands.
        tensors: kind of file to name to this rank's rows.
        config_document: the configuration.
        tokenizer_document: what the tokenizer is rebuilt from.
    """

    state: RunState
    tensors: Mapping[str, Mapping[str, Piece]]
    config_document: Mapping[str, Any]
    tokenizer_document: Mapping[str, Any]


def write_checkpoint(directory: Path, content: Content, ranks: Ranks | None = None) -> Path:
    """Write `directory/step-N` so that it exists completely or not at all, whatever happens in between.

    Every rank writes its own files; the first one writes the rest and gives the whole its name.

    Returns:
        The path of the new checkpoint.

    Raises:
        UserError: the disk is full, read-only or not ours (exit code 74), on any rank; older checkpoints are untouched.
    """
    ranks = ranks or Ranks()
    final = directory / f"step-{content.state.step}"
    temporary = directory / f"{final.name}.tmp-{ranks.from_first(str(os.getpid()))}"

    def together(act: Callable[[], T]) -> T | None:
        result, problem = None, None
        try:
            result = act()
        except OSError as error:
            complete = checkpoint_paths(directory)
            problem = UserError(
                [
                    f"cannot write checkpoint {final}: {error.strerror or error}",
                    f"the newest checkpoint on disk is {complete[-1]}" if complete else "there is no older checkpoint",
                ],
                EXIT_IO,
            )
        try:
            ranks.raise_together(problem)
        except UserError:
            if ranks.is_first:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        return result

    def prepare() -> None:
        if ranks.is_first:
            directory.mkdir(parents=True, exist_ok=True)
            _remove(temporary)
            temporary.mkdir()

    def write_own() -> dict[str, FileRecord]:
        return {
            name: write_pieces(temporary / name, pieces)
            for kind, pieces in content.tensors.items()
            if (name := file_name(kind, ranks.rank, ranks.world_size))
        }

    def complete() -> None:
        if not ranks.is_first:
            return
        files = {name: FileRecord(**entry) for text in texts for name, entry in json.loads(text).items()}
        seal(temporary, files, content.state, content.config_document, content.tokenizer_document)
        # Only a damaged or an equal checkpoint of the same step can be in the way: newer valid ones are resumed from.
        replaced = _set_aside(final, _REPLACED)
        temporary.rename(final)
        sync_directory(directory)
        _remove(replaced)

    together(prepare)
    records = together(write_own) or {}
    texts = ranks.gather(json.dumps({name: asdict(record) for name, record in records.items()}))
    together(complete)
    return final


def seal(
    directory: Path,
    files: Mapping[str, FileRecord],
    state: RunState,
    config_document: Mapping[str, Any],
    tokenizer_document: Mapping[str, Any],
) -> None:
    """Write what a checkpoint has beside its tensors, and the manifest of all.

    Args:
        directory: of the checkpoint, not yet under its name.
        files: the tensor files that are in it.
        state: and the two documents: as in `Content`.
        config_document: the configuration.
        tokenizer_document: what the tokenizer is rebuilt from.
    """
    records = {name: asdict(record) for name, record in files.items()}
    for name, document in (
        (STATE, state.model_dump()),
        (CONFIG, dict(config_document)),
        (TOKENIZER, dict(tokenizer_document)),
    ):
        records[name] = asdict(write_json(directory / name, document))
    write_json(directory / MANIFEST, {"format": FORMAT, "files": records})
    sync_directory(directory)


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove what interrupted saves left; only while no other process writes there.

    A checkpoint that was to be replaced, and was not, gets its name back.

    Returns:
        The paths that were removed.
    """
    removed: list[Path] = []
    for path in [path for path in directory.glob("step-*") if _TEMPORARY.fullmatch(path.name)]:
        name, _, kind = path.name.partition(".tmp-")
        if kind.startswith(_REPLACED) and not (directory / name).exists():
            path.rename(directory / name)
        else:
            _remove(path)
            removed.append(path)
    return removed


def is_kept(
    candidate: RunState,
    others: list[RunState],
    *,
    save_top_k: int,
    save_last: bool,
    monitor: str = "val_loss",
    mode: str = "min",
) -> bool:
    """Whether a checkpoint survives among others: the best `save_top_k` do (-1: all), and the newest with `save_last`.

    A checkpoint whose step has no value of the metric ranks last, and a newer one before an older one.

    Args:
        candidate: the checkpoint.
        others: those beside it.
        save_top_k: how many of the best are kept.
        save_last: keep the newest too.
        monitor: the metric, a name in `RunState.metrics` or `val_loss`.
        mode: `min` or `max`: which values of it are better.
    """
    if save_top_k == -1 or (save_last and all(candidate.step >= other.step for other in others)):
        return True
    rank = _rank(candidate, monitor, mode)
    return sum(_rank(other, monitor, mode) < rank for other in others) < save_top_k


def apply_retention(
    directory: Path, *, save_top_k: int, save_last: bool, monitor: str = "val_loss", mode: str = "min"
) -> list[Path]:
    """Delete the checkpoints that are not kept (see `is_kept`); those whose state cannot be read are left alone.

    Returns:
        The paths that were deleted.
    """
    states: dict[Path, RunState] = {}
    for path in checkpoint_paths(directory):
        try:
            states[path] = RunState.model_validate(read_json(path / STATE))
        except (DamagedFileError, ValidationError):
            continue
    doomed = [
        path
        for path, state in states.items()
        if not is_kept(
            state,
            [other for other in states.values() if other is not state],
            save_top_k=save_top_k,
            save_last=save_last,
            monitor=monitor,
            mode=mode,
        )
    ]
    for path in doomed:
        _remove(_set_aside(path, _DELETED))
    return doomed


def _rank(state: RunState, monitor: str, mode: str) -> tuple[float, int]:
    value = state.val_loss if monitor == "val_loss" else state.metrics.get(monitor)
    if value is None:
        return (float("inf"), -state.step)
    return (-value if mode == "max" else value, -state.step)


def _set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint, if there is one, so that a half-deleted one is never mistaken for one; returns the name."""
    aside = path.with_name(f"{path.name}.tmp-{why}-{os.getpid()}")
    if path.exists() or path.is_symlink():
        _remove(aside)
        path.rename(aside)
    return aside


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
