"""What there is to preprocess: files, folders, patterns and data sets of the `datasets` package, as named by a user."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ...utils.environment import user_path
from ...utils.errors import UserError

Kind = Literal["text", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "hf"]
_PACKED: dict[str, Kind] = {"": "jsonl", ".gz": "jsonl.gz", ".zst": "jsonl.zst"}
_SUFFIXES: dict[str, Kind] = {".txt": "text", ".text": "text", ".md": "text", ".parquet": "parquet"}
_SUFFIXES |= {f"{name}{packed}": kind for name in (".jsonl", ".ndjson", ".json") for packed, kind in _PACKED.items()}
_KINDS = ".txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet"


@dataclass(frozen=True, slots=True)
class Source:
    """One input.

    Attributes:
        path: absolute path of a file; NAME:SPLIT of a data set.
        kind: how it is read.
        size: bytes of the file; rows of a data set.
        mtime_ns: time of its last change; 0 for a data set.
        version: fingerprint of a data set.
    """

    path: str
    kind: Kind
    size: int
    mtime_ns: int
    version: str = ""

    def to_document(self) -> dict[str, Any]:
        """What tells whether an input is still the same, for JSON."""
        return asdict(self)


def find_sources(names: Sequence[str]) -> list[Source]:
    """The inputs behind names, in the order of the names; files of a folder or pattern in the order of their paths.

    Args:
        names: files, folders, patterns with `*`, or `hf:NAME[:SPLIT]`.

    Raises:
        UserError: a name leads to nothing, to a file of another kind, or to a file that was named already.
    """
    sources = [source for name in names for source in _sources(name)]
    seen: set[str] = set()
    for source in sources:
        if source.path in seen:
            raise UserError(f"{source.path} is named twice; its documents would count twice")
        seen.add(source.path)
    return sources


def _sources(name: str) -> Iterator[Source]:
    if name.startswith("hf:"):
        yield _data_set(name)
        return
    path = user_path(name, "INPUT")
    if path.is_dir():
        found = [file for file in _files_below(path) if _kind(file)]
        if not found:
            raise UserError(f"the folder {path} holds no file to read ({_KINDS})")
    elif path.exists():
        if _kind(path) is None:
            raise UserError(f"{path}: stoker preprocess reads {_KINDS}, folders of them, and hf:NAME")
        found = [path]
    elif glob.has_magic(name):
        matches = (Path(match) for match in glob.glob(str(path), recursive=True))
        found = sorted(match for match in matches if match.is_file() and _kind(match))
        if not found:
            raise UserError(f"{name} matches no file to read ({_KINDS})")
    else:
        raise UserError(f"there is no file or folder {path}")
    for file in found:
        kind = _kind(file)
        assert kind is not None
        try:
            facts = file.stat()
            file.open("rb").close()
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from None
        yield Source(os.path.abspath(file), kind, facts.st_size, facts.st_mtime_ns)


def _kind(path: Path) -> Kind | None:
    name = path.name.lower()
    return next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), None)


def _files_below(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}")

    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = (Path(parent, name) for name in names if not name.startswith("."))
        found += [path for path in paths if path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def load_data_set(name: str) -> Any:
    """The data set behind `NAME:SPLIT`, as `datasets.Dataset`; a local folder of data files is a NAME too.

    Raises:
        UserError: the `datasets` package is missing, or cannot load it.
    """
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(f"hf:{name} needs the `datasets` package: pip install 'stoker[hf]'") from None
    path, _, split = name.rpartition(":")
    try:
        return load_dataset(path, split=split)
    except Exception as error:  # whatever the package, its file systems and the network raise
        raise UserError(f"hf:{name} cannot be loaded: {' '.join(str(error).split())[:300]}") from None


def _data_set(name: str) -> Source:
    spec = name.removeprefix("hf:")
    path, colon, split = spec.rpartition(":")
    spec = f"{path}:{split}" if colon else f"{spec}:train"
    if not spec.partition(":")[0]:
        raise UserError(f"{name}: a data set is hf:NAME or hf:NAME:SPLIT")
    data = load_data_set(spec)
    return Source(spec, "hf", len(data), 0, str(getattr(data, "_fingerprint", "")))
