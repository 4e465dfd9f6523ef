"""Models by their id on the Hugging Face hub: their files are downloaded, never code."""

from __future__ import annotations

from pathlib import Path

from ..utils.errors import EXIT_IO, UserError
from .hf_folder import has_weights

_TEXTS = ("*.json", "*.model", "vocab.txt", "merges.txt", "*.jinja")
_NEVER = ("*.py", "*.h5", "*.msgpack", "*.onnx", "onnx/*", "original/*", "*/*")


def download(name: str) -> Path:
    """The folder of a model's files, from the hub or from its cache.

    Args:
        name: `org/name`, with `@revision` behind it where another one than `main` is meant.

    Raises:
        UserError: huggingface_hub is not installed, there is no such model, or no network (exit code 74).
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"{name} is no folder here, and to fetch it from the hub takes huggingface_hub: pip install 'stoker[hf]'"
        ) from None
    model, _, revision = name.partition("@")
    folder = Path()
    for weights in ("*.safetensors", "*.bin"):  # the second only where there are none of the first
        try:
            found = snapshot_download(
                model, revision=revision or None, allow_patterns=[*_TEXTS, weights], ignore_patterns=list(_NEVER)
            )
        except Exception as error:  # of the network, of its libraries, or of the hub: all of them end here
            first = next((line for line in str(error).splitlines() if line.strip()), "")
            raise UserError(
                f"there is no folder {name} here, and it cannot be had from the hub ({type(error).__name__}: "
                f"{first[:200]})",
                EXIT_IO,
            ) from None
        folder = Path(found)
        if has_weights(folder):
            break
    return folder
