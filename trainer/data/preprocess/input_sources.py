"""Find the inputs to preprocess: files, folders, glob patterns and Hugging Face datasets."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ...utils.environment import user_path
from ...utils.errors import UserError
from ...utils.text import one_line
from ..sources.text_sources import walk_files

Kind = Literal["text", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "hf"]
_JSONL_KINDS: dict[str, Kind] = {"": "jsonl", ".gz": "jsonl.gz", ".zst": "jsonl.zst"}
_SUFFIXES: dict[str, Kind] = {".txt": "text", ".text": "text", ".md": "text", ".parquet": "parquet"}
_SUFFIXES |= {
    f"{name}{packed}": kind for name in (".jsonl", ".ndjson", ".json") for packed, kind in _JSONL_KINDS.items()
}
_KINDS = ".txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet"


@dataclass(frozen=True, slots=True)
class InputSource:
    """One input.

    Attributes:
        path: absolute path of a file; NAME:SPLIT of a dataset.
        kind: its file format.
        size: bytes of the file; rows of a dataset.
        mtime_ns: time of the last change; 0 for a dataset.
        version: fingerprint of a dataset.
    """

    path: str
    kind: Kind
    size: int
    mtime_ns: int
    version: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON, to detect whether the input has changed."""
        return asdict(self)


def find_sources(names: Sequence[str]) -> list[InputSource]:
    """Return the inputs in the order of the names; files of a folder or pattern are sorted by path.

    Args:
        names: files, folders, patterns with `*`, or `hf:NAME[:SPLIT]`.

    Raises:
        UserError: a name matches nothing, an unsupported file, or a file that was already named.
    """
    sources = [source for name in names for source in _sources(name)]
    seen: set[str] = set()
    for source in sources:
        if source.path in seen:
            raise UserError(f"{source.path} is named twice; its documents would count twice")
        seen.add(source.path)
    return sources


def _sources(name: str) -> Iterator[InputSource]:
    if name.startswith("hf:"):
        yield _data_set(name)
        return
    path = user_path(name, "INPUT")
    if path.is_dir():
        found = [file for file in walk_files(path) if _kind(file)]
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
            status = file.stat()
            if not stat.S_ISREG(status.st_mode):  # a pipe without a writer would be waited for
                raise UserError(f"cannot read {file}: it is not a regular file")
            file.open("rb").close()
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from None
        yield InputSource(os.path.abspath(file), kind, status.st_size, status.st_mtime_ns)


def _kind(path: Path) -> Kind | None:
    name = path.name.lower()
    return next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), None)


def load_hf_dataset(name: str) -> Any:
    """Load the dataset `NAME:SPLIT` as `datasets.Dataset`; NAME may also be a local folder of data files.

    Raises:
        UserError: the `datasets` package is missing, or cannot load it.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(f"hf:{name} needs the `datasets` package: pip install 'stoker[hf]'") from None
    path, _, split = name.rpartition(":")
    try:
        return load_dataset(path, split=split)
    except Exception as error:  # the package, its file systems and the network raise many types
        raise UserError(f"hf:{name} cannot be loaded: {one_line(error, 300)}") from None


def _data_set(name: str) -> InputSource:
    spec = name.removeprefix("hf:")
    path, colon, split = spec.rpartition(":")
    spec = f"{path}:{split}" if colon else f"{spec}:train"
    if not spec.partition(":")[0]:
        raise UserError(f"{name}: a data set must be given as hf:NAME or hf:NAME:SPLIT")
    data = load_hf_dataset(spec)
    return InputSource(spec, "hf", len(data), 0, str(getattr(data, "_fingerprint", "")))
