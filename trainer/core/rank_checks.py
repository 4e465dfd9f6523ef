"""Checks at the start of a run of several processes: what all machines must have in common."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ..checkpoint.run_directory import LOCK_FILE, RunDirectory
from ..checkpoint.run_environment import main_versions
from ..distributed.process_group import DistributedContext
from ..utils.errors import UserError

_Message = Callable[[str, str, str], str]
"""Message from the name of a value and the descriptions of two ranks, with a place for the value of each."""


def check_same_setup(ranks: DistributedContext, digest: str) -> None:
    """Check that all ranks have the same configuration and versions; a collective of all ranks.

    Args:
        ranks: the ranks of the run.
        digest: hash of the configuration.

    Raises:
        UserError: they differ.
    """
    kind = "the ranks have different configurations; start them with the same files and overrides"
    _check_same(ranks, {"configuration": digest}, lambda *_: kind)
    versions = main_versions() | {"cuda": str(torch.version.cuda)}
    cure = "install the same packages on every machine"
    _check_same(ranks, versions, lambda name, own, other: f"{own} has {name} {{}}, but {other} {{}}; {cure}")


def check_same_data(ranks: DistributedContext, fingerprint: str, vocab_size: int) -> None:
    """Check that all ranks have read the same data; a collective of all ranks.

    Args:
        ranks: the ranks of the run.
        fingerprint: hash of the data.
        vocab_size: vocabulary size of the tokenizer.

    Raises:
        UserError: they differ.
    """
    cure = "copy the same files to every machine, or read them from a file system that all share"
    found = {"data": fingerprint[:12], "a vocabulary size of": str(vocab_size)}
    _check_same(ranks, found, lambda name, own, other: f"{own} has {name} {{}}, but {other} {{}}; {cure}")


def _check_same(ranks: DistributedContext, own: Mapping[str, str], message: _Message) -> None:
    """Raise on all ranks, for the first rank that differs from rank 0."""
    if ranks.world_size == 1:
        return
    found = [json.loads(text) for text in ranks.all_gather_text(json.dumps([socket.gethostname(), dict(own)]))]
    for rank, (host, values) in enumerate(found):
        for name, value in values.items():
            expected = found[0][1].get(name)
            if value != expected:
                line = message(name, f"rank {rank} on {host}", f"rank 0 on {found[0][0]}")
                raise UserError(line.format(value, expected))


def mark_shared_directory(directory: RunDirectory) -> str:
    """Write a random token to the lock files of the run directory, on rank 0; return it, or "" without such files."""
    token = secrets.token_hex(8)
    if None in directory.locks:
        return ""
    for lock in filter(None, directory.locks):
        os.pwrite(lock, token.encode(), 0)
        os.fsync(lock)
    return token


def check_shared_directory(token: str, *directories: Path) -> None:
    """Check on another rank than 0 that it sees the directories of rank 0: every rank writes its checkpoints there.

    Raises:
        UserError: the lock file in one of them has no such token, because the directory is on another file system.
    """
    for directory in directories if token else ():
        try:
            found = (directory / LOCK_FILE).read_text()
        except (OSError, ValueError):
            found = ""
        if found != token:
            raise UserError(
                f"{socket.gethostname()} does not see the run directory {directory} of rank 0; "
                "all machines must share it: set exp_manager.exp_dir to a directory on a shared file system"
            )
