"""Download models from the Hugging Face hub; code files are never downloaded."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint.hf_files import has_weights
from ..utils.errors import EXIT_IO, UserError

_ALLOWED = ("*.json", "*.model", "vocab.txt", "merges.txt", "*.jinja")
_IGNORED = ("*.py", "*.h5", "*.msgpack", "*.onnx", "onnx/*", "original/*", "*/*")


def download(name: str) -> Path:
    """Download a model, or take it from the hub cache; return its folder.

    Args:
        name: `org/name` or `org/name@revision`.

    Raises:
        UserError: huggingface_hub is not installed, there is no such model, or no network (exit code 74).
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"{name} is not a local folder, and downloading it requires huggingface_hub: pip install 'stoker[hf]'"
        ) from None
    model, _, revision = name.partition("@")
    folder = Path()
    for weights in ("*.safetensors", "*.bin"):  # *.bin only if there is no safetensors file
        try:
            found = snapshot_download(
                model, revision=revision or None, allow_patterns=[*_ALLOWED, weights], ignore_patterns=list(_IGNORED)
            )
        except Exception as error:  # any error of the network or the hub library
            first = next((line for line in str(error).splitlines() if line.strip()), "")
            raise UserError(
                f"{name} is not a local folder, and cannot be downloaded from the hub ({type(error).__name__}: "
                f"{first[:200]})",
                EXIT_IO,
            ) from None
        folder = Path(found)
        if has_weights(folder):
            break
    return folder
