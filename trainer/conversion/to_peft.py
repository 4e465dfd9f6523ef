"""From an adapter checkpoint to a folder in the format of Hugging Face's peft: adapter_config.json and its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.config.peft_slice import IA3Slice, LoRASlice, PeftSlice, PromptSlice, peft_slice
from ...models.hf.weight_layout import Transposed
from ...models.peft.ptuning import Prompt, prompt_vectors
from ..checkpoint.reader import Checkpoint
from ..config.schema.root import RootBlock
from ..data.tokenizers.tokenizer import from_document
from ..data.tokenizers.vocabulary import model_vocabulary
from ..utils.errors import UserError
from ..utils.safetensors_io import DamagedFileError, write_json, write_tensors
from .casting import cast
from .hf_folder import CONFIG, read_object
from .output_folder import new_folder
from .peft_factors import factors_of
from .peft_map import PREFIX, targets_of, to_pairs
from .pretrained import BaseWeights, check_base
from .to_hf import Outgoing, choose

ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
_TASKS = {"gpt": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM", "bert": None}


def convert_to_peft(
    checkpoint: Checkpoint,
    root: RootBlock,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    model_type: str | None = None,
    base: BaseWeights | None = None,
) -> list[str]:
    """Write a folder that peft loads on top of the base, as it is in transformers.

    Args:
        checkpoint: of an adapter.
        root: its configuration.
        target: the new folder.
        dtype: of its tensors; None leaves each as it is.
        model_type: which architecture the base is there; None takes that of its folder, or the first that holds it.
        base: its frozen weights, if they have moved.

    Returns:
        Lines that say what was done.

    Raises:
        UserError: the adapter is of a kind that peft has not, or no architecture holds the base; or that is another.
    """
    peft = peft_slice(root.model.peft)
    if not isinstance(peft, LoRASlice | IA3Slice | PromptSlice):
        raise UserError(
            f"checkpoint {checkpoint.path}: Hugging Face's peft has nothing like `peft_scheme: "
            f"{root.model.peft.peft_scheme}`"
            + ("; make one model of it and its base: --merge" if root.model.peft.peft_scheme == "selective" else "")
        )
    wanted = checkpoint.state.base
    if base is not None and wanted is not None:
        check_base(base, wanted, checkpoint.path)
    place = base.path.absolute() if base is not None else Path(wanted.path) if wanted is not None else None
    outgoing = _outgoing(checkpoint, root, model_type, place)
    try:
        with checkpoint.open_weights() as held:
            ours = {name: held.read(name) for name in held.facts}
    except DamagedFileError as error:
        raise UserError(f"checkpoint {checkpoint.path} cannot be used: {error}") from None
    tensors, config = _converted(ours, outgoing, peft)
    document = {
        "task_type": _TASKS[root.model.family],
        "base_model_name_or_path": None if place is None else str(place),
        "inference_mode": True,
        **config,
    }
    written = {name: cast(tensor, dtype or tensor.dtype, name).contiguous() for name, tensor in tensors.items()}
    with new_folder(target) as folder:
        write_tensors(folder / ADAPTER_TENSORS, written, {"format": "pt"})
        write_json(folder / ADAPTER_CONFIG, document)
    numbers = sum(tensor.numel() for tensor in written.values())
    return [f"{target}: {config['peft_type']} of {outgoing.architecture.name} with {numbers:,} parameters"]


def _outgoing(checkpoint: Checkpoint, root: RootBlock, model_type: str | None, base: Path | None) -> Outgoing:
    """What the base of an adapter is in transformers."""
    if model_type is None and base is not None and (base / CONFIG).exists():
        named = (read_object(base, CONFIG) or {}).get("model_type")
        model_type = named if isinstance(named, str) else None
    try:
        tokenizer = from_document(checkpoint.saved_tokenizer)
        vocab_size = model_vocabulary(root, tokenizer)
    except ValueError as error:
        raise UserError(f"checkpoint {checkpoint.path} cannot be used: tokenizer.json: {error}") from None
    return choose(root, tokenizer, vocab_size, model_type)


def _converted(
    ours: Mapping[str, Tensor], outgoing: Outgoing, peft: PeftSlice
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Their tensors, and what their configuration says of them."""
    match peft:
        case LoRASlice():
            return _lora(ours, outgoing, peft)
        case IA3Slice():
            return _ia3(ours, outgoing)
        case _:  # what the MLP makes is all that peft needs
            vectors = prompt_vectors(*(ours[f"prompt.{name}"] for name in Prompt.added))
            return {"prompt_embeddings": vectors}, {
                "peft_type": "PROMPT_TUNING",
                "num_virtual_tokens": len(vectors),
                "token_dim": vectors.shape[1],
                "num_transformer_submodules": 1,
                "prompt_tuning_init": "RANDOM",
            }


def _lora(ours: Mapping[str, Tensor], outgoing: Outgoing, lora: LoRASlice) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    modules: list[str] = []
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    known = list(targets_of(outgoing.placed))
    for target in known:
        down, up = (ours.get(name) for name in target.ours)
        if down is None or up is None:
            continue
        for pair in to_pairs(target, down, up, outgoing.geometry):
            tensors |= pair.tensors
            modules.append(pair.module)
            if pair.stacked > 1:
                ranks[pair.module] = pair.stacked * lora.rank
                alphas[pair.module] = _number(pair.stacked * lora.alpha)
    transposed = any(isinstance(target.placed.layout, Transposed) for target in known)
    return tensors, {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": _number(lora.alpha),
        "lora_dropout": lora.dropout,
        "target_modules": short_names(modules, [module for target in known for module in target.modules]),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "fan_in_fan_out": transposed,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def _ia3(ours: Mapping[str, Tensor], outgoing: Outgoing) -> tuple[dict[str, Tensor], dict[str, Any]]:
    known = list(targets_of(outgoing.placed))
    factors = list(factors_of(ours, known, outgoing.geometry))
    tensors = {f"{PREFIX}{factor.module}.ia3_l": factor.values for factor in factors}
    every = [module for target in known for module in target.modules]
    of_inputs = [factor.module for factor in factors if factor.is_of_inputs]
    return tensors, {
        "peft_type": "IA3",
        "target_modules": short_names([factor.module for factor in factors], every),
        "feedforward_modules": short_names(of_inputs, every),
        "fan_in_fan_out": any(isinstance(target.placed.layout, Transposed) for target in known),
        "modules_to_save": None,
    }


def short_names(modules: Sequence[str], every: Sequence[str]) -> list[str]:
    """The ends of names that say which modules these are; whole names where an end would mean others too.

    Args:
        modules: some modules.
        every: all that could be meant.
    """
    chosen = set(modules)
    ends = sorted({module.rpartition(".")[2] for module in modules})
    meant = {module for module in every if module.rpartition(".")[2] in ends}
    return ends if meant == chosen else sorted(chosen)


def _number(value: float) -> float | int:
    """As the JSON of others has it: an integer where it is one."""
    return int(value) if float(value).is_integer() else value
