"""Convert an adapter checkpoint to Hugging Face peft format: adapter_config.json and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.config.peft import IA3Slice, LoRASlice, PeftSlice, PromptSlice
from ...models.hf.weight_layout import Transposed
from ...models.peft.ptuning import PromptEncoder, virtual_token_embeddings
from ..checkpoint.hf_files import ADAPTER_CONFIG, ADAPTER_TENSORS, CONFIG, read_object
from ..checkpoint.reader import Checkpoint, damage_as_user_error
from ..config.resolved_run import ResolvedRun
from ..utils.errors import UserError
from ..utils.safetensors_io import write_json, write_safetensors_stream
from .checkpoint_io import checkpoint_tokenizer
from .output_folder import atomic_folder
from .peft_map import PEFT_PREFIX, lora_targets, to_peft_pairs, to_peft_vectors
from .pretrained import PretrainedWeights, check_same_base
from .tensor_source import cast_tensors, host_tensors
from .to_hf import HFModel, choose_architecture

_TASKS = {"gpt": "CAUSAL_LM", "t5": "SEQ_2_SEQ_LM", "bert": None}


def convert_to_peft(
    checkpoint: Checkpoint,
    run: ResolvedRun,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    model_type: str | None = None,
    base: PretrainedWeights | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Write a folder that peft loads on top of the base model in transformers.

    Args:
        dtype: output dtype; None keeps the dtype of each tensor.
        model_type: architecture of the base in transformers; None for that of its folder, or the first that fits.
        base: base weights, if they have moved.

    Returns:
        Summary lines.

    Raises:
        UserError: peft does not support the kind of adapter, no architecture supports the base, or the base differs.
    """
    peft = run.peft
    if not isinstance(peft, LoRASlice | IA3Slice | PromptSlice):
        raise UserError(
            f"checkpoint {checkpoint.path}: Hugging Face peft does not support `peft_scheme: "
            f"{run.model.peft.peft_scheme}`"
            + ("; merge it into its base: --merge" if run.model.peft.peft_scheme == "selective" else "")
        )
    wanted = checkpoint.state.base
    if base is not None and wanted is not None:
        check_same_base(base, wanted, checkpoint.path)
    place = base.path.absolute() if base is not None else Path(wanted.path) if wanted is not None else None
    if model_type is None and place is not None and (place / CONFIG).exists():
        named = (read_object(place, CONFIG) or {}).get("model_type")
        model_type = named if isinstance(named, str) else None
    outgoing = choose_architecture(run, checkpoint_tokenizer(checkpoint), model_type)
    with damage_as_user_error(checkpoint.path), checkpoint.open_weights() as held:
        ours = {name: held.read(name) for name in held.specs}
    tensors, config = _converted(ours, outgoing, peft)
    document = {
        "task_type": _TASKS[run.model.family],
        "base_model_name_or_path": None if place is None else str(place),
        "inference_mode": True,
        **config,
    }
    written = cast_tensors(host_tensors(tensors), dtype)
    with atomic_folder(target, overwrite=overwrite) as folder:
        write_safetensors_stream(folder / ADAPTER_TENSORS, written.specs, written.read, {"format": "pt"})
        write_json(folder / ADAPTER_CONFIG, document)
    numbers = sum(tensor.numel() for tensor in tensors.values())
    return [f"{target}: {config['peft_type']} of {outgoing.architecture.name} with {numbers:,} parameters"]


def _converted(
    ours: Mapping[str, Tensor], outgoing: HFModel, peft: PeftSlice
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return peft's tensors and adapter_config.json fields."""
    match peft:
        case LoRASlice():
            return _lora(ours, outgoing, peft)
        case IA3Slice():
            return _ia3(ours, outgoing)
        case _:  # prompt tuning: peft needs only the output of the reparameterization MLP
            vectors = virtual_token_embeddings(*(ours[f"prompt.{name}"] for name in PromptEncoder.peft_parameters))
            return {"prompt_embeddings": vectors}, {
                "peft_type": "PROMPT_TUNING",
                "num_virtual_tokens": len(vectors),
                "token_dim": vectors.shape[1],
                "num_transformer_submodules": 1,
                "prompt_tuning_init": "RANDOM",
            }


def _lora(ours: Mapping[str, Tensor], outgoing: HFModel, lora: LoRASlice) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    modules: list[str] = []
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    known = list(lora_targets(outgoing.placed))
    for target in known:
        down, up = (ours.get(name) for name in target.parameter_names)
        if down is None or up is None:
            continue
        for pair in to_peft_pairs(target, down, up, outgoing.geometry):
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
        "target_modules": target_module_names(modules, [module for target in known for module in target.modules]),
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "fan_in_fan_out": transposed,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def _ia3(ours: Mapping[str, Tensor], outgoing: HFModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    known = list(lora_targets(outgoing.placed))
    factors = list(to_peft_vectors(ours, known, outgoing.geometry))
    tensors = {f"{PEFT_PREFIX}{factor.module}.ia3_l": factor.values for factor in factors}
    every = [module for target in known for module in target.modules]
    of_inputs = [factor.module for factor in factors if factor.scales_inputs]
    return tensors, {
        "peft_type": "IA3",
        "target_modules": target_module_names([factor.module for factor in factors], every),
        "feedforward_modules": target_module_names(of_inputs, every),
        "fan_in_fan_out": any(isinstance(target.placed.layout, Transposed) for target in known),
        "modules_to_save": None,
    }


def target_module_names(modules: Sequence[str], all_modules: Sequence[str]) -> list[str]:
    """Return the shortest `target_modules`: last name components, or full names if those would match other modules."""
    chosen = set(modules)
    ends = sorted({module.rpartition(".")[2] for module in modules})
    meant = {module for module in all_modules if module.rpartition(".")[2] in ends}
    return ends if meant == chosen else sorted(chosen)


def _number(value: float) -> float | int:
    """Return an integer for an integral float, as peft writes it to JSON."""
    return int(value) if float(value).is_integer() else value
