"""Torch's own files (`pytorch_model.bin`): tensors alone, read by `weights_only`; there is no other way."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..utils.errors import UserError
from ..utils.safetensors_io import tensor_dtype_name


class TorchFile:
    """A file that `torch.save` made of a dictionary of tensors; where it can be mapped, it is not read at once.

    Args:
        path: the file.

    Attributes:
        described: name to shape and dtype.

    Raises:
        UserError: it holds something else than tensors, such as code, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            _check_stored(path)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
        except OSError:
            raise
        except Exception as error:  # whatever a file that is none of torch's, or a wicked one, makes of its reader
            raise UserError(
                f"{path}: torch reads no tensors from it ({type(error).__name__}: {_reason(error)}); it holds "
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


def _check_stored(path: Path) -> None:
    """Refuse compressed records: a mapped file gives their bytes as they are, and unpacked they may have any size.

    Raises:
        UserError: there is one, or the file is no archive after all.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [record.filename for record in archive.infolist() if record.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise UserError(f"{path} is a damaged archive ({_reason(error)}); use a safetensors file") from None
    if packed:
        raise UserError(
            f"{path}: {packed[0]!r} is compressed, which torch.save never does; pack it anew without compression, or "
            "use a safetensors file"
        )


def _reason(error: Exception) -> str:
    """What a reader says, in a line; of torch's advice, which is to trust the file, only what it refused."""
    text = " ".join(str(error).split())
    refused = re.search(r"(?i)unsupported (?:(?! Check | Please ).)*", text)
    return (refused.group() if refused else text)[:160]


def _dtype(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return str(tensor.layout).removeprefix("torch.")
    try:
        return tensor_dtype_name(tensor)
    except KeyError:
        return str(tensor.dtype).removeprefix("torch.")
