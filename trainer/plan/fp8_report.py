"""Matrices and attentions of a run that multiply in fp8 in training, with recipe and kernel, and why the others do not;
no device is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING

from ..config.resolved_run import resolve_run
from ..config.schema.root import RootBlock
from ..device.attention_software import run_flags
from ..utils.errors import UserError
from .attention_report import ARCHITECTURES, AttentionChoice, explain_attention, this_machine

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ...models.config.fp8 import Fp8Slice

_NUMBER = re.compile(r"\.layers\.(\d+)\.")
_KERNELS = {
    "tensorwise": "torch's scaled matmul (cuBLAS)",
    "rowwise": "torch's scaled matmul",
    "blockwise": "Triton, or torch's scaled matmul (cuBLAS) for e4m3 with widths that are multiples of 128",
}
"""Kernels of linear layers that do not multiply through TransformerEngine, see `kernels.fp8.scaled_matmul`."""


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """One matrix, or the attention, of some layers of a stack.

    Attributes:
        name: of the parameter, with `*` for the number of the layer; `attention`.
        layers: numbers of the layers; empty outside of layers.
        is_fp8: it multiplies in fp8 in training.
        how: recipe and kernel, or why it does not.
    """

    name: str
    layers: tuple[int, ...]
    is_fp8: bool
    how: str

    def __str__(self) -> str:
        where = f"  layers {_ranges(self.layers)}" if self.layers else ""
        return f"  {'fp8 ' if self.is_fp8 else 'no  '} {self.name}{where}: {self.how}"


@dataclass(frozen=True, slots=True)
class Fp8Report:
    """fp8 of a run.

    Attributes:
        where: the device.
        problem: why the run does not start there; empty if it does.
        matrices: all that multiply activations, embeddings, and attentions; none if linear layers are the problem.
    """

    where: str
    problem: str
    matrices: tuple[Fp8Matrix, ...]

    def __str__(self) -> str:
        problem = [self.problem] if self.problem else []
        return "\n".join([f"fp8 in training {self.where}", *problem, *map(str, self.matrices)])


def explain_fp8(root: RootBlock, arch: str | None = None) -> Fp8Report:
    """Say which matrices and attentions of a run multiply in fp8.

    Args:
        root: the configuration.
        arch: a name in `ARCHITECTURES`, whose device need not be present; None: the device of the configuration.

    Raises:
        UserError: there is no such device, or the model cannot be built.
    """
    import torch

    from ...kernels.attention.installed_software import detect_installed_software
    from ...kernels.fp8.te_linear import check_transformer_engine
    from ...models.build import TORCH_DTYPES, build_model
    from ...models.config.families import keys_by_stack, name_stacks
    from ...models.config.fp8 import check_fp8

    if arch is None:
        device, capability, *_ = this_machine(root.trainer)
        where = "on this machine"
    else:
        capability = ARCHITECTURES[arch]
        device, where = "cpu" if capability is None else "cuda", f"on {arch}"
    run = resolve_run(root, capability=capability)
    problem = run.why_not_fp8_params
    recipes = [stack.fp8 for stack in run.family.stacks if stack.fp8 is not None]
    try:
        model = build_model(
            run.model,
            vocab_size=run.model.override_vocab_size or 1,
            device="meta",
            dtype=torch.bfloat16,
            flags=run_flags(run),
            micro_batch_size=run.model.micro_batch_size,
            batch_spec=run.batch_spec,
            peft=run.peft,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
    try:
        for recipe in recipes:
            check_fp8(recipe, device, capability, run.precision.compute)
            if arch is None and device == "cuda" and recipe.uses_transformer_engine:
                check_transformer_engine(recipe.recipe, detect_installed_software(device))
    except ValueError as error:
        problem = name_stacks(str(error), run.model)
    if problem:
        return Fp8Report(where, problem, ())
    slices = dict(zip(keys_by_stack(run.model), (stack.fp8 for stack in run.family.stacks), strict=True))
    reasons = (stack.why_experts_without_fp8 for stack in run.family.stacks)
    experts = next(filter(None, reasons), "experts have LoRA updates")
    cores, refusal = _attentions(explain_attention(root, arch).choices, slices)
    return Fp8Report(
        where, refusal, (*_matrices(model, slices, capability, experts, TORCH_DTYPES[run.precision.compute]), *cores)
    )


def _attentions(
    choices: Sequence[AttentionChoice], slices: Mapping[str, Fp8Slice | None]
) -> tuple[list[Fp8Matrix], str]:
    """Return the attentions of training, and why one is not possible; empty if all are."""
    found: list[Fp8Matrix] = []
    refusal = ""
    for choice in choices:
        stack, _, kind = choice.kind.rpartition(" ")
        if kind != "training":
            continue
        fp8, name = slices[{"": "", "encoder": "encoder."}.get(stack, "decoder.")], f"{stack} attention".strip()
        if fp8 is None or not fp8.attention:
            reason = "`model.fp8` is off" if fp8 is None else "`model.fp8_dot_product_attention` is off"
            found.append(Fp8Matrix(name, (), False, reason))
            continue
        numbers, rest = (tuple(compress(range(len(fp8.layers)), on)) for on in (fp8.layers, _others(fp8.layers)))
        description = replace(fp8, recipe=fp8.attention_recipe).description
        how = f"{description}, TransformerEngine (cuDNN)" if choice.backend else "not possible"
        found.append(Fp8Matrix(name, numbers, bool(choice.backend), how))
        if rest:
            found.append(Fp8Matrix(name, rest, False, "`model.first_last_layers_bf16`"))
        refusal = refusal or next(iter(choice.problem), "")
    return found, refusal


def _others(layers: Sequence[bool]) -> list[bool]:
    return [not each for each in layers]


def _how(fp8: Fp8Slice, capability: tuple[int, int] | None) -> str:
    """Return recipe and kernel of linear layers."""
    if capability is None:
        return f"{fp8.description}, emulated, slowly"
    if fp8.uses_transformer_engine:
        return f"{fp8.description}, TransformerEngine (cuBLAS)"
    why = f"; {fp8.why_own_kernels}" if fp8.transformer_engine else ""
    return f"{fp8.description}, {_KERNELS[fp8.recipe.scaling]}{why}"


def _how_experts(fp8: Fp8Slice, capability: tuple[int, int] | None, experts: nn.Module, out_dtype: torch.dtype) -> str:
    """Return recipe and kernel of experts."""
    from ...kernels.fp8.hopper_launch import supports_product

    recipe = fp8.expert_recipe
    sizes = (size for parameter in experts.parameters() for size in parameter.shape[1:])
    hopper = capability == (9, 0) and supports_product((recipe.inputs, recipe.weights), out_dtype, *sizes)
    kernel = "emulated, slowly" if capability is None else "Gluon" if hopper else "Triton"
    but = ""
    if recipe.scaling == "tensorwise":
        bound = ", the gradient of its activation that of a bound" if recipe.backward == "e5m2" else ""
        but = f" (the input of fc2 has a scale for each row{bound})"
    return f"{replace(fp8, recipe=recipe).description}{but}, {kernel}"


def _matrices(
    model: nn.Module, slices: Mapping[str, Fp8Slice | None], capability: tuple[int, int] | None, experts: str,
    out_dtype: torch.dtype,
) -> list[Fp8Matrix]:  # fmt: skip
    from torch import nn

    from ...models.fp8 import fp8_modules
    from ...models.moe.experts import Experts

    in_fp8, found = fp8_modules(model), dict[tuple[str, bool, str], list[int]]()
    layers = {_layer_of(name) for name in in_fp8}
    for name, module in model.named_modules():
        reason, fp8 = _why_not(name, module, on=any(slices.values())), _slice_of(name, slices)
        if name in in_fp8 and fp8 is not None:
            linear = isinstance(module, nn.Linear)
            reason = _how(fp8, capability) if linear else _how_experts(fp8, capability, module, out_dtype)
        elif reason and isinstance(module, Experts) and _layer_of(name) in layers:
            reason = experts
        if reason:
            number = _NUMBER.search(f".{name}")
            pattern = _NUMBER.sub(".layers.*.", f".{name}").removeprefix(".")
            found.setdefault((pattern, name in in_fp8, reason), []).extend([int(number[1])] if number else [])
    return [Fp8Matrix(name, tuple(layers), is_fp8, why) for (name, is_fp8, why), layers in found.items()]


def _slice_of(name: str, slices: Mapping[str, Fp8Slice | None]) -> Fp8Slice | None:
    """Return fp8 of the stack that a module is in; slices are by the prefix of its names, empty for the only one."""
    return next((fp8 for at, fp8 in slices.items() if name.startswith(at)), None)


def _layer_of(name: str) -> str:
    number = _NUMBER.search(f".{name}")
    return "" if number is None else f".{name}"[: number.end()]


def _why_not(name: str, module: nn.Module, *, on: bool) -> str:
    """Return why a module that multiplies does not do so in fp8; empty for one that does not multiply."""
    from torch import nn

    from ...models.moe.experts import Experts
    from ...models.moe.router import Router

    if isinstance(module, nn.Embedding):
        return "an embedding is a table"
    if not isinstance(module, nn.Linear | Experts | Router):
        return ""
    if not on:
        return "`model.fp8` is off"
    if isinstance(module, Router):
        return "a router is small, and chooses by its scores"
    if ".layers." not in f".{name}":
        return "the head and what belongs to it need the precision"
    if "adapter" in name or "prompt" in name:
        return "adapters are small"
    return "`model.first_last_layers_bf16`"


def _ranges(numbers: tuple[int, ...]) -> str:
    """Return ascending numbers as `0-3, 6`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
