"""Parameter-efficient fine-tuning: add adapters to a model and freeze its other parameters."""

from __future__ import annotations

from torch import nn

from ..config.families import FamilySlice
from ..config.peft import AdapterSlice, IA3Slice, LoRASlice, PeftSlice, PromptSlice, SelectiveSlice
from ..language_model import BaseLanguageModel
from ..layer import Layer
from ..layers.mlp import MLP
from ..moe.moe_layer import MoE
from ..stack import Stack
from .adapter import BottleneckAdapter
from .added_parameters import peft_parameter_names
from .ia3 import scale_inputs, scale_outputs
from .lora import LoRAExperts
from .lora_mlp import LoRAMLP
from .lora_parallel import add_lora
from .ptuning import PromptEncoder


def apply_peft(model: BaseLanguageModel, model_slice: FamilySlice, peft: PeftSlice) -> None:
    """Add the PEFT modules to a model on the meta device and freeze all other parameters, in place.

    Args:
        model: built from `model_slice`; split over the tensor-parallel ranks before, if it is.
        model_slice: slice of the model.
        peft: PEFT scheme.

    Raises:
        ValueError: a selected layer does not exist, or a name of `selective` matches no parameter.
    """
    _check_layers(model.stacks, peft)
    for stack, part in zip(model.stacks, model_slice.stacks, strict=True):
        for index, layer in enumerate(stack.layers):
            assert isinstance(layer, Layer)
            match peft:
                case LoRASlice() if peft.layers.includes(index):
                    _add_lora(layer, peft, stack.tensor_parallel is None and peft.can_fuse_mlp(part))
                case AdapterSlice() if peft.layers.includes(index):
                    layer.attention_adapter = BottleneckAdapter(part.hidden_size, peft)
                    layer.mlp_adapter = BottleneckAdapter(part.hidden_size, peft)
                case IA3Slice() if peft.layers.includes(index):
                    _add_ia3(layer)
                case _:
                    pass
    if isinstance(peft, PromptSlice):
        model.prompt = PromptEncoder(model_slice.stacks[0].hidden_size, peft)
    trainable = set(peft_parameter_names(model))
    if isinstance(peft, SelectiveSlice):
        trainable = {name for name, _ in model.named_parameters() if any(part in name for part in peft.names)}
        unmatched = [part for part in peft.names if not any(part in name for name in trainable)]
        if unmatched:
            raise ValueError(
                f"`tunable_base_param_names` ({unmatched[0]}) must be part of the name of a parameter, such as "
                f"{next(iter(dict(model.named_parameters())))}."
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a model by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _check_layers(stacks: tuple[Stack, ...], peft: PeftSlice) -> None:
    if isinstance(peft, PromptSlice | SelectiveSlice):
        return
    num_layers = max(len(stack.layers) for stack in stacks)
    invalid = sorted(number for number in peft.layers.numbers or () if number > num_layers)
    if invalid:
        raise ValueError(f"`layer_selection` ({invalid[0]}) must be from 1 to the number of layers ({num_layers}).")


def _add_lora(layer: Layer, lora: LoRASlice, mlp_is_one_operation: bool) -> None:
    attention, cross, mlp = layer.attention, layer.cross_attention, layer.mlp
    query, key = attention.heads * attention.head_dim, attention.groups * attention.head_dim
    if "attention_qkv" in lora.targets:
        attention.qkv = add_lora(attention.qkv, lora, (query, key, key))
        if cross is not None:
            width = cross.groups * cross.head_dim
            cross.query = add_lora(cross.query, lora, (cross.query.out_features,))
            cross.kv = add_lora(cross.kv, lora, (width, width))
    if "attention_dense" in lora.targets:
        attention.output = add_lora(attention.output, lora, (attention.output.out_features,))
        if cross is not None:
            cross.output = add_lora(cross.output, lora, (cross.output.out_features,))
    if isinstance(mlp, MoE):
        if lora.targets & {"mlp_fc1", "mlp_fc2"}:
            mlp.experts = LoRAExperts(mlp.experts, lora)
            if mlp.shared is not None:
                mlp.shared = LoRAMLP(mlp.shared, lora, fused=mlp_is_one_operation)
    elif lora.targets & {"mlp_fc1", "mlp_fc2"}:
        layer.mlp = LoRAMLP(mlp, lora, fused=mlp_is_one_operation)


def _add_ia3(layer: Layer) -> None:
    attention, cross = layer.attention, layer.cross_attention
    attention.qkv = scale_outputs(attention.qkv, 2 * attention.groups * attention.head_dim)
    if cross is not None:
        cross.kv = scale_outputs(cross.kv, cross.kv.out_features)
    mlp = layer.mlp.shared if isinstance(layer.mlp, MoE) else layer.mlp
    if isinstance(mlp, MLP):
        mlp.down = scale_inputs(mlp.down)
