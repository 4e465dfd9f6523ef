"""Merge an adapter into its base weights, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from ...models.config.peft import IA3Slice, LoRASlice, SelectiveSlice, peft_slice
from ...models.peft.added_parameters import PeftModule
from ..checkpoint.reader import Checkpoint
from ..checkpoint.sharded_safetensors import open_full_tensors
from ..config.schema.root import RootBlock
from ..data.tokenizers.tokenizer import Tokenizer
from ..utils.errors import UserError
from ..utils.safetensors_io import TensorSpec
from .from_hf import build_meta_model, open_source
from .pretrained import PretrainedWeights, check_same_base, map_hf_model

ReadTensor = Callable[[str], Tensor]


class MergedTensors:
    """Parameters of the merged model, computed one at a time.

    Args:
        facts: name to dtype and shape.
        base: reads a base parameter.
        adapter: trained parameters by name.
        modules: modules with added parameters, by name.
    """

    def __init__(
        self,
        facts: Mapping[str, TensorSpec],
        base: ReadTensor,
        adapter: Mapping[str, Tensor],
        modules: Mapping[str, PeftModule],
    ) -> None:
        self.specs = facts
        self._base = base
        self._adapter = adapter
        self._modules = modules

    def read(self, name: str) -> Tensor:
        """Return a merged parameter in host memory, in the base dtype; merging is done in at least fp32."""
        weight = self._base(name)
        if name in self._adapter:  # a base parameter that was trained (selective)
            return self._adapter[name].to(weight.dtype)
        at, _, own = name.rpartition(".")
        module = self._modules.get(at)
        if module is None:
            return weight
        added = {
            each: self._adapter[f"{at}.{each}"] for each in module.peft_parameters if f"{at}.{each}" in self._adapter
        }
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return module.merge(own, wide, added).to(weight.dtype)


@contextmanager
def open_merged(
    checkpoint: Checkpoint, root: RootBlock, tokenizer: Tokenizer, base: PretrainedWeights
) -> Iterator[MergedTensors]:
    """Open an adapter and its base for merging.

    Args:
        checkpoint: adapter checkpoint.
        root: its configuration.
        tokenizer: tokenizer of the model.
        base: base weights it was trained on.

    Raises:
        UserError: the base differs, or the adapter cannot be merged.
    """
    peft = peft_slice(root.model.peft)
    if not isinstance(peft, LoRASlice | IA3Slice | SelectiveSlice):
        raise UserError(
            f"checkpoint {checkpoint.path}: `peft_scheme: {root.model.peft.peft_scheme}` adds modules that a merged "
            "model cannot represent; lora, ia3 and selective can be merged"
        )
    if checkpoint.state.base is not None:
        check_same_base(base, checkpoint.state.base, checkpoint.path)
    model = build_meta_model(root, tokenizer, peft)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, PeftModule)}
    with ExitStack() as stack:
        held = stack.enter_context(checkpoint.open_weights())
        adapter = {name: held.read(name) for name in held.specs}
        facts, read = open_base_tensors(base, stack)
        yield MergedTensors(facts, read, adapter, modules)


def first_different_parameter(one: PretrainedWeights, other: PretrainedWeights) -> str | None:
    """Return the first parameter in which two models differ, or None if they are equal, whatever the file format.

    Values are compared in the narrower of the two dtypes.
    """
    with ExitStack() as stack:
        (facts, read), (other_facts, read_other) = open_base_tensors(one, stack), open_base_tensors(other, stack)
        for name in sorted({*facts, *other_facts}):
            if name not in facts or name not in other_facts or facts[name].shape != other_facts[name].shape:
                return name
            kind = min(facts[name].dtype, other_facts[name].dtype, key=lambda dtype: dtype.itemsize)
            if not torch.equal(read(name).to(kind), read_other(name).to(kind)):
                return name
    return None


def open_base_tensors(base: PretrainedWeights, stack: ExitStack) -> tuple[Mapping[str, TensorSpec], ReadTensor]:
    """Open base weights under stoker names: (facts, reader), valid while `stack` is open."""
    if base.checkpoint is not None:
        whole = stack.enter_context(open_full_tensors(base.checkpoint.weight_files))
        return whole.specs, whole.read
    source = stack.enter_context(open_source(base.path))
    incoming = map_hf_model(source)
    placed = {entry.parameter: entry for entry in incoming.placed}
    facts: dict[str, TensorSpec] = {}
    for entry in incoming.placed:
        kind = source.tensors.specs[entry.hf_tensors[0][0]].dtype
        for name, _ in entry.hf_tensors:
            kind = torch.promote_types(kind, source.tensors.specs[name].dtype)
        facts[entry.parameter] = TensorSpec(kind, entry.shape)

    def read(name: str) -> Tensor:
        parts = [source.tensors.read(theirs).to(facts[name].dtype) for theirs, _ in placed[name].hf_tensors]
        return placed[name].join(parts, incoming.geometry)

    return facts, read
