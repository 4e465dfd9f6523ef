"""Write checkpoints atomically, and delete those that retention does not keep.

A checkpoint is written to `step-N.tmp-*` in the same directory, each file is synced to disk, then the directory is
renamed. Deletion renames the directory first, so a half-deleted checkpoint is never mistaken for a valid one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..distributed.process_group import DistributedContext
from ..utils.durable_files import fsync_directory
from ..utils.errors import EXIT_IO, UserError
from ..utils.local_shard import LocalShard
from ..utils.safetensors_io import DamagedFileError, FileRecord, read_json, write_json
from .reader import CONFIG, FORMAT, MANIFEST, STATE, TOKENIZER, RunState, checkpoint_paths
from .sharded_safetensors import shard_file_name, write_shards

_TEMPORARY = re.compile(r"step-\d{1,15}\.tmp-.*")
_DELETED, _REPLACED = "old", "replaced"
"""Suffixes of renamed checkpoint directories: to be deleted, or to be replaced by a new one."""


@dataclass(frozen=True)
class CheckpointContent:
    """Content of a checkpoint.

    Attributes:
        state: training state.
        tensors: file kind to tensor name to local shard.
        config_document: configuration document.
        tokenizer_document: tokenizer document.
    """

    state: RunState
    tensors: Mapping[str, Mapping[str, LocalShard]]
    config_document: Mapping[str, Any]
    tokenizer_document: Mapping[str, Any]


def write_checkpoint(directory: Path, content: CheckpointContent, ranks: DistributedContext | None = None) -> Path:
    """Write `directory/step-N` atomically.

    Each rank writes its own tensor file; rank 0 writes the other files and renames the directory.

    Returns:
        The path of the new checkpoint.

    Raises:
        UserError: disk full, read-only or no permission (exit code 74), on any rank; older checkpoints are untouched.
    """
    ranks = ranks or DistributedContext()
    final = directory / f"step-{content.state.step}"
    temporary = directory / f"{final.name}.tmp-{ranks.broadcast_text(str(os.getpid()))}"

    @contextmanager
    def on_all_ranks() -> Iterator[None]:
        """Context at whose end an error of any rank is raised on all ranks, and the temporary directory is removed."""
        try:
            with ranks.raise_on_all_ranks(), _write_errors(final):
                yield
        except UserError:
            if ranks.is_rank_zero:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    with on_all_ranks():
        if ranks.is_rank_zero:
            directory.mkdir(parents=True, exist_ok=True)
            _remove(temporary)
            temporary.mkdir()
    records: dict[str, Any] = {}
    with on_all_ranks():
        for kind, shards in content.tensors.items():
            name = shard_file_name(kind, ranks.rank, ranks.world_size)
            records[name] = asdict(write_shards(temporary / name, shards))
    manifests = ranks.all_gather_text(json.dumps(records))
    with on_all_ranks():
        if ranks.is_rank_zero:
            files = {name: FileRecord(**entry) for part in manifests for name, entry in json.loads(part).items()}
            write_metadata(temporary, files, content.state, content.config_document, content.tokenizer_document)
            # An existing step-N is damaged or identical: a run would have resumed from a valid one.
            replaced = _set_aside(final, _REPLACED)
            temporary.rename(final)
            fsync_directory(directory)
            _remove(replaced)
    return final


@contextmanager
def _write_errors(checkpoint: Path) -> Iterator[None]:
    """Turn an OSError into a UserError that names the newest checkpoint on disk."""
    try:
        yield
    except OSError as error:
        complete = checkpoint_paths(checkpoint.parent)
        raise UserError(
            [
                f"cannot write checkpoint {checkpoint}: {error.strerror or error}",
                f"the newest checkpoint on disk is {complete[-1]}" if complete else "there is no older checkpoint",
            ],
            EXIT_IO,
        ) from None


def write_metadata(
    directory: Path,
    files: Mapping[str, FileRecord],
    state: RunState,
    config_document: Mapping[str, Any],
    tokenizer_document: Mapping[str, Any],
) -> None:
    """Write state, configuration, tokenizer and manifest to a checkpoint directory before it is renamed.

    `files` are the tensor files already written to it.
    """
    records = {name: asdict(record) for name, record in files.items()}
    for name, document in (
        (STATE, state.model_dump()),
        (CONFIG, dict(config_document)),
        (TOKENIZER, dict(tokenizer_document)),
    ):
        records[name] = asdict(write_json(directory / name, document))
    write_json(directory / MANIFEST, {"format": FORMAT, "files": records})
    fsync_directory(directory)


def remove_temporaries(directory: Path) -> list[Path]:
    """Remove temporary directories of interrupted saves; no other process may be writing there.

    A checkpoint whose replacement was interrupted gets its name back.

    Returns:
        The removed paths.
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


def apply_retention(
    directory: Path, *, save_top_k: int, save_last: bool, monitor: str = "val_loss", mode: str = "min"
) -> list[Path]:
    """Delete all checkpoints but the `save_top_k` best (-1: all), and the newest with `save_last`.

    A checkpoint without a value of the metric ranks last; on ties the newer one ranks first. Checkpoints whose state
    cannot be read are skipped.

    Args:
        directory: directory of the checkpoints.
        save_top_k: number of best checkpoints to keep.
        save_last: keep the newest checkpoint in any case.
        monitor: metric to rank by, a name in `RunState.metrics` or `val_loss`.
        mode: `min` or `max`.

    Returns:
        The deleted paths.
    """
    states: dict[Path, RunState] = {}
    for path in checkpoint_paths(directory):
        try:
            states[path] = RunState.model_validate(read_json(path / STATE))
        except (DamagedFileError, ValidationError):
            continue
    if save_top_k == -1 or not states:
        return []
    newest = max(state.step for state in states.values())
    ranks = {path: _rank(state, monitor, mode) for path, state in states.items()}
    ordered = sorted(ranks.values())
    expired = [
        path
        for path, state in states.items()
        if ordered.index(ranks[path]) >= save_top_k and not (save_last and state.step == newest)
    ]
    for path in expired:
        _remove(_set_aside(path, _DELETED))
    return expired


def _rank(state: RunState, monitor: str, mode: str) -> tuple[float, int]:
    value = state.val_loss if monitor == "val_loss" else state.metrics.get(monitor)
    if value is None:
        return (float("inf"), -state.step)
    return (-value if mode == "max" else value, -state.step)


def _set_aside(path: Path, suffix: str) -> Path:
    """Rename a checkpoint directory, if it exists, to a temporary name; return that path."""
    aside = path.with_name(f"{path.name}.tmp-{suffix}-{os.getpid()}")
    if path.exists() or path.is_symlink():
        _remove(aside)
        path.rename(aside)
    return aside


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
