"""Merge an adapter into its base weights, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ...models.config.peft import IA3Slice, LoRASlice, SelectiveSlice
from ...models.peft.added_parameters import PeftModule
from ..checkpoint.reader import Checkpoint
from ..config.resolved_run import ResolvedRun
from ..data.tokenizers.tokenizer import Tokenizer
from ..utils.errors import UserError
from .from_hf import build_meta_model
from .pretrained import PretrainedWeights, check_same_base
from .tensor_source import DTYPE_NAMES, ComputedTensors, TensorSource, cast_tensors


@contextmanager
def open_merged(
    checkpoint: Checkpoint,
    run: ResolvedRun,
    tokenizer: Tokenizer,
    base: PretrainedWeights,
    dtype: torch.dtype | None,
    log: Callable[[str], None],
) -> Iterator[TensorSource]:
    """Open the parameters of the merged model, computed one at a time; merging is done in at least fp32.

    They have the dtype of the base, or `dtype`; None keeps that of each, and logs a line if merged values are rounded.

    Raises:
        UserError: the base differs, or the adapter cannot be merged.
    """
    peft = run.peft
    if not isinstance(peft, LoRASlice | IA3Slice | SelectiveSlice):
        raise UserError(
            f"checkpoint {checkpoint.path}: `peft_scheme: {run.model.peft.peft_scheme}` adds modules that a merged "
            "model cannot represent; lora, ia3 and selective can be merged"
        )
    if checkpoint.state.base is not None:
        check_same_base(base, checkpoint.state.base, checkpoint.path)
    model = build_meta_model(run, tokenizer, peft)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, PeftModule)}
    with checkpoint.open_weights() as held, base.open_tensors() as tensors:
        adapter = {name: held.read(name) for name in held.specs}
        is_known = dtype is not None

        def merged(name: str) -> Tensor:
            nonlocal is_known
            weight = tensors.read(name)  # in the wider dtype, so that `cast_tensors` rounds the sum, and only once
            own, wide = weight.dtype, torch.promote_types(weight.dtype, dtype or weight.dtype)
            values = _merged(name, weight.to(wide), adapter, modules)
            if not is_known and values.dtype != own and not torch.equal(values.to(own).to(values.dtype), values):
                is_known, wide = True, torch.promote_types(own, values.dtype)
                log(
                    f"merged weights are rounded to {DTYPE_NAMES[own]}, as those of the base are; "
                    f"--dtype {DTYPE_NAMES[wide]} keeps them"
                )
            return values

        yield cast_tensors(ComputedTensors(tensors.specs, merged), dtype)


def _merged(name: str, weight: Tensor, adapter: Mapping[str, Tensor], modules: Mapping[str, PeftModule]) -> Tensor:
    """Return a parameter; a merged one in at least fp32.

    Args:
        weight: the base parameter.
        adapter: trained parameters by name.
        modules: modules with added parameters, by name.
    """
    if name in adapter:  # a base parameter that was trained (selective)
        return adapter[name]
    at, _, own = name.rpartition(".")
    module = modules.get(at)
    if module is None:
        return weight
    added = {each: adapter[f"{at}.{each}"] for each in module.peft_parameters if f"{at}.{each}" in adapter}
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return module.merge(own, wide, added)


def first_different_parameter(one: PretrainedWeights, other: PretrainedWeights) -> str | None:
    """Return the first parameter in which two models differ, or None if they are equal, whatever the file format.

    Values are compared in the narrower of the two dtypes.
    """
    with one.open_tensors() as left, other.open_tensors() as right:
        for name in sorted({*left.specs, *right.specs}):
            spec, other_spec = left.specs.get(name), right.specs.get(name)
            if spec is None or other_spec is None or spec.shape != other_spec.shape:
                return name
            dtype = min(spec.dtype, other_spec.dtype, key=lambda dtype: dtype.itemsize)
            if not torch.equal(left.read(name).to(dtype), right.read(name).to(dtype)):
                return name
    return None
