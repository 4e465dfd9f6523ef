"""Torch's own files (`pytorch_model.bin`): tensors alone, read by `weights_only`; there is no other way."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..safe_io import tensor_dtype_name


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
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        except OSError:
            raise
        except Exception as error:  # whatever a file that is none of torch's, or a wicked one, makes of its reader
            first = next(iter(str(error).splitlines()), "")
            raise UserError(
                f"{path}: torch reads no tensors from it ({type(error).__name__}: {first[:160]}); it holds something "
                "else, or is damaged. Use a safetensors file"
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


def _dtype(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return str(tensor.layout).removeprefix("torch.")
    try:
        return tensor_dtype_name(tensor)
    except KeyError:
        return str(tensor.dtype).removeprefix("torch.")
