"""Convert an adapter in Hugging Face peft format to the trainable parameters of a stoker model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.config.peft import IA3Slice, LoRASlice
from ...models.hf.architectures import all_architectures
from ...models.hf.config_fields import format_value
from ...models.hf.weight_layout import Geometry
from ..checkpoint.hf_files import ADAPTER_CONFIG, ADAPTER_TENSORS, read_object, resolve_in_folder
from ..config.resolved_run import ResolvedRun
from ..data.tokenizers.tokenizer import Tokenizer
from ..utils.errors import UserError
from ..utils.safetensors_io import DamagedFileError, open_safetensors
from ..utils.text import truncate_lines
from .from_hf import parameter_layout
from .peft_map import PEFT_PREFIX, LoRATarget, from_peft_pairs, ia3_parameter_name, lora_targets

_SHOWN = 10
_SUPPORTED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "use_qalora": (None, False),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None,),
    "arrow_config": (None,),
}
"""Fields that change the adapter, with their supported values."""
_FIELD_TYPES: Mapping[str, Any] = {"lora_alpha": (int, float), "lora_dropout": (int, float), "alpha_pattern": dict}
_PLAIN_PATTERN = re.compile(r"\^?(\w|-|\\?\.)+")
"""Names of modules in `alpha_pattern`. Other regular expressions could take forever: the file is untrusted."""
_PROJECTIONS = {
    "attention.qkv": "attention_qkv",
    "cross_attention.query": "attention_qkv",
    "cross_attention.kv": "attention_qkv",
    "attention.output": "attention_dense",
    "cross_attention.output": "attention_dense",
    "mlp.up": "mlp_fc1",
    "mlp.experts.up": "mlp_fc1",
    "mlp.shared.up": "mlp_fc1",
    "mlp.down": "mlp_fc2",
    "mlp.experts.down": "mlp_fc2",
    "mlp.shared.down": "mlp_fc2",
}
"""Linear layers of a transformer layer, with their names in `lora_tuning.target_modules`."""


@dataclass(frozen=True, slots=True)
class PeftFolder:
    """An adapter in peft format, read into memory.

    Attributes:
        tensors: base module name to tensor kind (`lora_A.weight`, `ia3_l`) to tensor.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Mapping[str, Tensor]]

    @property
    def kind(self) -> str:
        """`LORA` or `IA3`."""
        return str(self.config["peft_type"])


def read_peft_folder(path: Path) -> PeftFolder:
    """Read an adapter in peft format.

    Raises:
        UserError: not an adapter, or not supported; lists every reason.
    """
    config = read_object(path, ADAPTER_CONFIG)
    if config is None:
        raise UserError(f"{path} holds no {ADAPTER_CONFIG}")
    problems = [
        f"{ADAPTER_CONFIG}: `{name}` ({format_value(config[name])}) must be {format_value(known[-1])}"
        for name, known in _SUPPORTED_VALUES.items()
        if name in config and config[name] not in known
    ]
    for name, kind in _FIELD_TYPES.items():
        if config.get(name) is not None and (not isinstance(config[name], kind) or config[name] is True):
            problems.append(f"{ADAPTER_CONFIG}: `{name}` ({format_value(config[name])}) has an invalid type")
    patterns = config.get("alpha_pattern")
    problems += [
        f"{ADAPTER_CONFIG}: `alpha_pattern` names {format_value(name)}, a regular expression; write the names that it "
        "matches, each with its alpha"
        for name in (patterns if isinstance(patterns, dict) else ())
        if not _PLAIN_PATTERN.fullmatch(name)
    ]
    if config.get("peft_type") not in ("LORA", "IA3"):
        problems.append(f"{ADAPTER_CONFIG}: `peft_type` ({format_value(config.get('peft_type'))}) must be LORA or IA3")
    file = resolve_in_folder(path, ADAPTER_TENSORS)
    if file is None:
        problems.append(f"it holds no {ADAPTER_TENSORS}")
    if problems or file is None:
        raise UserError([f"{path} cannot be read as an adapter:", *(f"  {problem}" for problem in problems)])
    modules: dict[str, dict[str, Tensor]] = {}
    try:
        with open_safetensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                module, kind = _parsed(name)
                modules.setdefault(module, {})[kind] = tensors.get_tensor(name)
    except DamagedFileError as error:
        raise UserError(f"{path}: {error}") from None
    wanted = {"lora_A.weight", "lora_B.weight"} if config["peft_type"] == "LORA" else {"ia3_l"}
    wrong = [module for module, kinds in modules.items() if "?" in kinds]
    wrong += [
        f"{module}.{kind}"
        for module, kinds in modules.items()
        if "?" not in kinds
        for kind in sorted(set(kinds) ^ wanted)
    ]
    wrong += [
        f"{module}.{kind}"
        for module, kinds in modules.items()
        for kind, tensor in kinds.items()
        if kind in wanted
        if not tensor.is_floating_point() or tensor.ndim != 2 or not tensor.numel()
    ]
    wrong += [] if modules else ["any tensor"]
    if wrong:
        raise UserError(
            [
                f"{path} cannot be read as an adapter:",
                *_truncated_list(f"{format_value(name, 120)} is missing, unknown or not a matrix" for name in wrong),
            ]
        )
    return PeftFolder(path, config, modules)


def peft_config_keys(folder: PeftFolder, run: ResolvedRun, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the dotted `model.peft` keys that match an adapter.

    Raises:
        UserError: the adapter belongs to another model.
    """
    targets, _ = _fitting(folder, run, tokenizer)
    touched = [target for target in targets if any(module in folder.tensors for module in target.modules)]
    layers = sorted({_place(target)[0] + 1 for target in touched})
    all_layers = sorted({_place(target)[0] + 1 for target in targets if _place(target)[1] in _PROJECTIONS})
    selection = None if layers == all_layers else layers
    if folder.kind == "IA3":
        return {"peft_scheme": "ia3", "ia3_tuning.layer_selection": selection}
    rank = max(len(kinds["lora_A.weight"]) for kinds in folder.tensors.values())
    fused = any(
        target.placed.parameter.endswith("attention.qkv.weight") and target.modules_per_expert == 1
        for target in targets
    )
    return {
        "peft_scheme": "lora",
        "lora_tuning.target_modules": sorted({_PROJECTIONS[_place(target)[1]] for target in touched}),
        "lora_tuning.adapter_dim": rank,
        "lora_tuning.alpha": float(_default_scale(folder) * rank),
        "lora_tuning.adapter_dropout": float(folder.config.get("lora_dropout") or 0.0),
        "lora_tuning.layer_selection": selection,
        "lora_tuning.variant": "nemo" if fused else "canonical",
    }


def convert_adapter_tensors(
    folder: PeftFolder,
    run: ResolvedRun,
    tokenizer: Tokenizer,
    shapes: Mapping[str, tuple[int, ...]],
    elsewhere: Set[str] = frozenset(),
) -> dict[str, Tensor]:
    """Convert an adapter to the trainable parameters of a model.

    Args:
        run: configuration of the model, including `model.peft`.
        shapes: names and shapes of the trainable parameters.
        elsewhere: names of the parameters that other ranks have (`names_elsewhere`).

    Raises:
        UserError: the adapter does not match; lists the differences.
    """
    peft = run.peft
    if not isinstance(peft, LoRASlice if folder.kind == "LORA" else IA3Slice):
        raise UserError(
            f"{folder.path} holds {folder.kind}, but `model.peft.peft_scheme` is {run.model.peft.peft_scheme}"
        )
    targets, geometry = _fitting(folder, run, tokenizer)
    targets = [target for target in targets if target.placed.parameter not in elsewhere]
    if isinstance(peft, LoRASlice):
        return _lora(folder, peft, targets, geometry, shapes)
    return _factors(folder, targets, geometry, shapes)


def _lora(
    folder: PeftFolder,
    lora: LoRASlice,
    targets: Sequence[LoRATarget],
    geometry: Geometry,
    wanted: Mapping[str, tuple[int, ...]],
) -> dict[str, Tensor]:
    pairs = {
        module: (kinds["lora_A.weight"], kinds["lora_B.weight"], _scale(folder, module) / lora.scale)
        for module, kinds in folder.tensors.items()
    }
    found: dict[str, Tensor] = {}
    problems: list[str] = []
    for target in targets:
        present = [module for module in target.modules if module in pairs]
        shape = wanted.get(target.parameter_names[0])
        if shape is None:
            problems += [f"{module}: `target_modules` or `layer_selection` has no update for it" for module in present]
            continue
        parts = shape[-2] // lora.rank
        problems += list(_misfits(target, pairs, parts, lora.rank))
        if not problems and present:
            found |= zip(
                target.parameter_names, from_peft_pairs(target, pairs, parts, lora.rank, geometry), strict=True
            )
    _raise_misfit(folder, problems)
    kind = next(iter(pairs.values()))[0].dtype
    return {name: found[name] if name in found else torch.zeros(shape, dtype=kind) for name, shape in wanted.items()}


def _misfits(
    target: LoRATarget, pairs: Mapping[str, tuple[Tensor, Tensor, float]], parts: int, rank: int
) -> Iterator[str]:
    for number, module in enumerate(target.modules):
        if module not in pairs:
            continue
        down, up, _ = pairs[module]
        rows, columns = target.output_width(number), target.columns
        if down.ndim != 2 or tuple(down.shape[1:]) != (columns,) or tuple(up.shape) != (rows, len(down)):
            yield f"{module}: A {list(down.shape)} and B {list(up.shape)} do not fit a layer of {columns} to {rows}"
        elif len(down) > rank:
            yield f"{module}: its rank is {len(down)}, but `lora_tuning.adapter_dim` is {rank}"
        elif parts not in (1, target.modules_per_expert) or (parts == 1 and target.modules_per_expert > 1):
            yield (
                f"{module}: `lora_tuning.variant` must be "
                f"{'nemo' if target.modules_per_expert == 1 else 'canonical'} for it"
            )


def _factors(
    folder: PeftFolder, targets: Sequence[LoRATarget], geometry: Geometry, wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    problems: list[str] = []
    for target in targets:
        present = {module: folder.tensors[module]["ia3_l"] for module in target.modules if module in folder.tensors}
        name = ia3_parameter_name(target)
        if not present:
            continue
        if name not in wanted:
            problems += [f"{module}: IA3 is not applied to this layer" for module in present]
            continue
        if name.endswith(".down.ia3"):
            (factors,) = present.values()
            found[name] = factors.flatten()
        else:
            kind = next(iter(present.values())).dtype
            sizes = [len(rows) for rows in target.split_rows(torch.empty(target.rows, 1), geometry)]
            columns = [
                present[module].reshape(-1, 1) if module in present else torch.ones(size, 1, dtype=kind)
                for module, size in zip(target.modules, sizes, strict=True)
            ]
            if [len(column) for column in columns] != sizes:
                problems.append(f"{target.modules[0]}: its factors do not fit the weight")
                continue
            whole = target.join_rows(columns, geometry).flatten()
            plain, found[name] = whole.split([len(whole) - wanted[name][0], wanted[name][0]])
            if not torch.equal(plain, torch.ones_like(plain)):
                problems.append(f"{target.modules[0]}: IA3 factors of queries are not supported")
        if tuple(found[name].shape) != wanted[name]:
            problems.append(f"{target.modules[0]}: {len(found[name])} factors, which must be {wanted[name][0]}")
    _raise_misfit(folder, problems)
    return {name: found.get(name, torch.ones(shape)) for name, shape in wanted.items()}


def _fitting(folder: PeftFolder, run: ResolvedRun, tokenizer: Tokenizer) -> tuple[list[LoRATarget], Geometry]:
    """Return the linear layers of the base under the names of the first architecture with all modules of an adapter.

    Raises:
        UserError: there is no such architecture.
    """
    shapes, geometry = parameter_layout(run, tokenizer)
    unknown: list[str] | None = None
    for architecture in all_architectures():
        if architecture.family != run.model.family:
            continue
        targets = list(lora_targets(architecture.weights.map_parameters(shapes, geometry)[0]))
        known = {module for target in targets if _place(target)[1] in _PROJECTIONS for module in target.modules}
        rest = sorted(set(folder.tensors) - known)
        if not rest:
            return targets, geometry
        unknown = rest if unknown is None or len(rest) < len(unknown) else unknown
    names = [f"{format_value(name, 120)} is not a linear layer of this model" for name in unknown or ()]
    raise UserError([f"{folder.path} is an adapter of another model:", *_truncated_list(names)])


def _place(target: LoRATarget) -> tuple[int, str]:
    """Return the index of the layer that contains a linear layer and its name there; -1 outside of layers."""
    stem = target.placed.parameter.removesuffix(".weight")
    _, _, inside = stem.partition(".layers.")
    number, _, name = inside.partition(".")
    return (int(number), name) if number.isdigit() else (-1, stem)


def _default_scale(folder: PeftFolder) -> float:
    """Return the most common scale of the modules."""
    scales = [_scale(folder, module) for module in folder.tensors]
    return max(set(scales), key=scales.count)


def _scale(folder: PeftFolder, module: str) -> float:
    """Return the LoRA scale of a module: alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv 2312.03732)."""
    config = folder.config
    rank = len(folder.tensors[module]["lora_A.weight"])
    alpha = config.get("lora_alpha", 8)
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        name = pattern.replace("\\.", ".")
        if module == name.removeprefix("^") or module.endswith(f".{name}"):
            alpha = value
            break  # as in peft, the first one counts
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise UserError(f"{folder.path}: {ADAPTER_CONFIG}: `lora_alpha` ({format_value(alpha)}) must be a number")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _parsed(name: str) -> tuple[str, str]:
    """Split a tensor name into module and kind; the kind is `?` if unknown."""
    plain = name.removeprefix(PEFT_PREFIX)
    for kind in ("lora_A.weight", "lora_B.weight", "ia3_l"):
        if plain.endswith(f".{kind}"):
            return plain.removesuffix(f".{kind}"), kind
    return plain, "?"


def _raise_misfit(folder: PeftFolder, problems: Sequence[str]) -> None:
    if problems:
        raise UserError([f"{folder.path} does not fit the model of this configuration:", *_truncated_list(problems)])


def _truncated_list(problems: Iterable[str]) -> list[str]:
    return truncate_lines(problems, _SHOWN, indent="  ")
