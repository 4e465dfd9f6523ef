"""Conversion between Hugging Face models and stoker checkpoints, in either direction, by what the source is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..checkpoint.hf_files import CONFIG, has_checkpoints, is_hf_folder, is_peft_folder
from ..utils.errors import UserError
from .output_folder import check_is_apart, check_target

Format = Literal["hf", "stoker"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,100})?")


def is_hub_id(text: str) -> bool:
    """Return True for `org/name` and `org/name@revision`."""
    return _HUB_ID.fullmatch(text) is not None


def check_source_and_target(source: str, target: Path, *, base: Path | None = None, overwrite: bool = False) -> None:
    """Check that SOURCE is there and TARGET can be written, without importing torch.

    Raises:
        UserError: it is not, or cannot.
    """
    check_target(target, overwrite=overwrite)
    for given in (Path(source), *filter(None, [base])):
        check_is_apart(target, given)
    if not is_peft_folder(Path(source)):
        _format_not_of(Path(source), source)


def convert(
    source: str | Path,
    target: Path,
    *,
    to: Format | None = None,
    dtype: str | None = None,
    tokenizer: str | None = None,
    model_type: str | None = None,
    merge: bool = False,
    base: Path | None = None,
    ema: bool = False,
    ignored_fields: Sequence[str] = (),
    overwrite: bool = False,
) -> list[str]:
    """Convert a Hugging Face model, folder or GGUF file to a checkpoint, or a checkpoint to a Hugging Face folder.

    Args:
        source: the model: a folder, a GGUF file, a run directory or checkpoint, or a hub id.
        target: the output folder.
        to: format of the output; None for the one that the source is not.
        dtype: `fp64`, `fp32`, `bf16` or `fp16`; None: unchanged.
        tokenizer: folder with the tokenizer files, or `byte-level`; None: that of the source.
        model_type: architecture of a Hugging Face output; None: the first that supports the model.
        merge: merge an adapter into its base weights.
        base: path of the base weights of an adapter; None: the one recorded in it.
        ema: use the moving average of the weights.
        ignored_fields: fields of config.json to ignore.
        overwrite: replace the output of an earlier conversion.

    Returns:
        Lines that describe the result.

    Raises:
        UserError: the source cannot be converted, with every reason; or the target cannot be written.
    """
    typed, source = str(source), Path(source)
    check_source_and_target(typed, target, base=base, overwrite=overwrite)
    from .convert_adapters import convert_adapter, is_adapter
    from .from_hf import convert_to_stoker
    from .tensor_source import DTYPES
    from .to_hf import convert_to_hf

    torch_dtype = DTYPES[dtype] if dtype else None
    options: dict[str, Any] = {"dtype": torch_dtype, "tokenizer": tokenizer, "overwrite": overwrite}
    if source.is_dir() and is_adapter(source):
        if ignored_fields:
            raise UserError(
                "--ignore-field applies to the config.json of a whole Hugging Face model, not of an adapter"
            )
        return convert_adapter(source, target, merge=merge, to=to, base=base, model_type=model_type, ema=ema, **options)
    if _target_format(source, typed, to, {"--merge": merge, f"--base {base}": base}) == "hf":
        if ignored_fields:
            raise UserError("--ignore-field applies to the config.json of a Hugging Face model")
        return convert_to_hf(source, target, model_type=model_type, ema=ema, **options)
    if ema:
        raise UserError(f"--ema: {typed} is a Hugging Face model, which has no moving average")
    if model_type:
        raise UserError("--model-type applies to --to hf; config.json gives the type of SOURCE")
    if not source.exists():
        from .hub import download

        source = download(typed)
    return convert_to_stoker(source, target, ignored=list(ignored_fields), **options)


def _target_format(source: Path, typed: str, to: Format | None, adapter_options: Mapping[str, object]) -> Format:
    """Return the format a whole model is converted to, `hf` or `stoker`.

    Raises:
        UserError: SOURCE is neither a Hugging Face model nor a stoker checkpoint, or an option does not apply to it.
    """
    if options := [name for name, value in adapter_options.items() if value]:
        if not source.exists():
            raise UserError(f"{typed}: there is no such folder")
        raise UserError(
            f"{', '.join(options)}: {typed} is not an adapter; leave {'it' if len(options) == 1 else 'them'} out"
        )
    other = _format_not_of(source, typed)
    if to not in (None, other):
        raise UserError(f"--to {to}: {typed} already has that format")
    return other


def _format_not_of(source: Path, typed: str) -> Format:
    if not source.exists():
        if is_hub_id(typed):
            return "stoker"
        raise UserError(f"{typed}: there is no such folder")
    if source.suffix == ".gguf" and source.is_file():
        return "stoker"
    if not source.is_dir():
        raise UserError(f"{typed} is neither a folder nor a .gguf file")
    if has_checkpoints(source):
        return "hf"
    if is_hf_folder(source):
        return "stoker"
    raise UserError(f"{typed} holds neither a {CONFIG} with weights nor a stoker checkpoint")
