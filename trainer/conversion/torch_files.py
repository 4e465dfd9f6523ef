"""Torch files (`pytorch_model.bin`), loaded only with `weights_only=True`."""

from __future__ import annotations

import re
import tarfile
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..utils.errors import UserError
from ..utils.safetensors_io import tensor_dtype_name
from ..utils.text import one_line


class TorchFile:
    """A dictionary of tensors saved by `torch.save`; memory-mapped if it is a zip archive.

    Attributes:
        described: name to shape and dtype.

    Raises:
        UserError: it holds anything other than tensors, such as code, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            _check_stored(path)
        elif _is_tar(path):
            raise UserError(
                f"{path} is a tar archive, the format of torch before 0.1.10, which cannot be loaded safely; save it "
                "again with a newer torch, or use a safetensors file"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        except OSError:
            raise
        except Exception as error:  # malformed or malicious files raise various exceptions
            raise UserError(
                f"{path}: torch cannot load tensors from it ({type(error).__name__}: {_reason(error)}); it holds "
                "something else, or is damaged. Use a safetensors file"
            ) from None
        if not isinstance(loaded, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
        ):
            raise UserError(f"{path} must hold a dictionary of tensors, and nothing else")
        self._tensors: Mapping[str, Tensor] = loaded
        self.described = {name: (tuple(tensor.shape), _dtype(tensor)) for name, tensor in loaded.items()}

    def tensor(self, name: str) -> Tensor:
        """One of the tensors, contiguous."""
        return self._tensors[name].detach().contiguous()


def _is_tar(path: Path) -> bool:
    """Return True if torch would load the file as a tar archive: it would extract it to a temporary directory."""
    with path.open("rb") as file:
        header = file.read(tarfile.BLOCKSIZE)
    if header == bytes(tarfile.BLOCKSIZE):  # the end of an empty archive
        return True
    try:
        tarfile.TarInfo.frombuf(header, tarfile.ENCODING, "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _check_stored(path: Path) -> None:
    """Reject compressed records: memory-mapping would return compressed bytes, and the decompressed size is unbounded.

    Raises:
        UserError: there is a compressed record, or the archive is damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [record.filename for record in archive.infolist() if record.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise UserError(f"{path} is a damaged archive ({_reason(error)}); use a safetensors file") from None
    if packed:
        raise UserError(
            f"{path}: {packed[0]!r} is compressed, which torch.save never does; repack it without compression, or "
            "use a safetensors file"
        )


def _reason(error: Exception) -> str:
    """Return an error as one line; of torch's message only the rejected part, without its advice to trust the file."""
    text = one_line(error)
    refused = re.search(r"(?i)unsupported (?:(?! Check | Please ).)*", text)
    return (refused.group() if refused else text)[:160]


def _dtype(tensor: Tensor) -> str:
    if tensor.is_meta:  # without values
        return "meta"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return str(tensor.layout).removeprefix("torch.")
    try:
        return tensor_dtype_name(tensor)
    except KeyError:
        return str(tensor.dtype).removeprefix("torch.")
