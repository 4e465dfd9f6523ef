"""Fill in the model keys of `stoker finetune` from the pretrained model, and reject keys that contradict it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.config.bert import BertKeys
from ...models.config.gpt import GPTKeys
from ...models.config.memory import MemoryKeys
from ...models.config.model import Family
from ...models.config.t5 import T5Keys
from ..checkpoint.hf_files import check_pretrained_path
from ..config import dotted_paths
from ..config.dotted_paths import MISSING
from ..config.draft import Draft
from ..config.interpolation import InterpolationError, has_interpolation
from ..config.load import load_run_config
from ..config.nemo.nemo_spellings import has_example_length, has_nemo_file_names
from ..config.problems import Problem
from ..config.run_config import DEFAULT_ORIGIN, Origin, RunConfig
from ..config.schema.key_index import format_value, schema_keys
from ..utils import environment

if TYPE_CHECKING:
    from ..checkpoint.reader import Checkpoint

RESTORE_KEY, ADAPTER_KEY = "model.restore_from_path", "model.peft.restore_from_path"
_FAMILY_KEYS: Mapping[Family, frozenset[str]] = {
    "gpt": frozenset(GPTKeys.model_fields),
    "t5": frozenset(T5Keys.model_fields),
    "bert": frozenset(BertKeys.model_fields),
}
EXECUTION_KEYS = {
    *MemoryKeys.own_keys(),
    *("use_flash_attention", "attention_backend", "transformer_engine", "masked_softmax_fusion"),
    *("compile", "seed", "label_smoothing", "loss", "moe_layer_recompute", "moe_grouped_gemm", "moe_per_layer_logging"),
}
"""Keys of a model that concern execution only; they are not taken from the pretrained model."""
SHAPES = frozenset(
    {
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups"),
        *("normalization", "qk_layernorm", "transformer_block_type", "headscale", "bias", "qkv_bias", "activation"),
        *("num_moe_experts", "moe_ffn_hidden_size", "moe_layer_freq", "moe_shared_expert_intermediate_size"),
        *("moe_router_enable_expert_bias", "position_embedding_type", "relative_attention_num_buckets"),
        *("make_vocab_size_divisible_by", "override_vocab_size", "share_embeddings_and_output_weights"),
        *("share_token_embeddings", "share_decoder_tokens_head_embeddings", "tokens_head_bias"),
    }
)
"""Keys that determine the shape of the weights, which fine-tuning must not change."""
SCHEME_KEY, PRESETS = "model.peft.peft_scheme", ("lora", "adapter", "ia3", "ptuning")
ADAPTER_SHAPES = frozenset(
    f"model.peft.{name}"
    for name in (
        *(
            "lora_tuning.target_modules",
            "lora_tuning.adapter_dim",
            "lora_tuning.variant",
            "lora_tuning.layer_selection",
        ),
        *("adapter_tuning.type", "adapter_tuning.adapter_dim", "adapter_tuning.layer_selection"),
        *("adapter_tuning.norm_position", "ia3_tuning.layer_selection", "selective_tuning.tunable_base_param_names"),
        *("p_tuning.virtual_tokens", "p_tuning.bottleneck_dim", "p_tuning.embedding_dim"),
    )
)
"""The same for a restored adapter."""


def load_finetune_config(
    config_name: str | None = None,
    config_dir: Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    **options: Any,
) -> RunConfig:
    """Load a configuration as `load_run_config` does, for `stoker finetune`.

    Keys of the model and its tokenizer that are not given are those of `model.restore_from_path`, which is required;
    `options` are `config_path` and `context`.

    Raises:
        UserError: a file, choice or pretrained model does not exist, or a file cannot be read.
        ConfigError: the configuration is not valid; holds all problems.
    """
    return load_run_config(
        config_name,
        config_dir,
        overrides,
        environ,
        default_name="finetune",
        fill_defaults=fill_pretrained_keys,
        **options,
    )


def fill_pretrained_keys(draft: Draft) -> None:
    """Set the keys of the pretrained model, its tokenizer and adapter where the user gives none.

    Keys that contradict the weights are added to `draft.problems`.
    """
    location = _resolved_text(draft, RESTORE_KEY)
    if not isinstance(location, str) or not location or location == MISSING:
        rule = "must be the pretrained model: a stoker run or checkpoint, or a Hugging Face folder"
        draft.problems.append(
            Problem(RESTORE_KEY, format_value(location), draft.origin_text(RESTORE_KEY), rule, f"{RESTORE_KEY}=FOLDER")
        )
        dotted_paths.put(draft.tree, RESTORE_KEY, None)  # `???` is not reported again
        return
    source = "model.data.data_impl"
    files = isinstance(dotted_paths.get(draft.tree, "model.data.train_ds"), list)  # has a fix of its own
    if dotted_paths.get(draft.tree, source) is None and not files and not has_nemo_file_names(draft.tree):
        rule = "must be set: the fine-tuning data"
        fix = "data=sft, data=chat or data=text (a T5: data=jsonl), each with model.data.path=FILE"
        draft.problems.append(Problem(source, None, draft.origin_text(source), rule, fix))
    pretrained = starting_point(environment.user_path(location, RESTORE_KEY))
    family = dotted_paths.get(draft.tree, "model.family")
    if family not in (None, pretrained.family):
        _report_conflicts(draft, {"model.family": (family, pretrained.family)}, pretrained)
        return
    _fill(draft, "model.family", pretrained.family, pretrained.origin, pretrained.family)
    conflicts: dict[str, tuple[Any, Any]] = {}
    length_is_given = has_example_length(draft.tree)
    for path, value in pretrained.keys.items():
        if path == "model.encoder_seq_length" and length_is_given:
            continue
        name = path.rpartition(".")[2]
        given = dotted_paths.get(draft.tree, path, draft.tree)
        shared = dotted_paths.get(draft.tree, f"model.{name}", draft.tree)  # a T5 key given once for both stacks
        at, given = (f"model.{name}", shared) if given is draft.tree else (path, given)
        if given is draft.tree:
            _fill(draft, path, value, pretrained.origin, pretrained.family)
        elif name in SHAPES and not has_interpolation(given) and given != value:
            conflicts[at] = (given, value)
    _report_conflicts(draft, conflicts, pretrained)
    if not dotted_paths.get(draft.tree, "model.tokenizer") and not pretrained.tokenizer:
        rule = f"must be set: {location} has no supported tokenizer"
        fix = "tokenizer=byte, or tokenizer=huggingface model.tokenizer.type=FOLDER"
        draft.problems.append(Problem("model.tokenizer.library", None, draft.origin_text(RESTORE_KEY), rule, fix))
    if (
        dotted_paths.get(draft.tree, "model.tokenizer.library") is None
    ):  # else it is compared when the weights are loaded
        for path, value in pretrained.tokenizer.items():
            if dotted_paths.get(draft.tree, path, draft.tree) is draft.tree:
                _fill(draft, path, value, pretrained.origin, pretrained.family)
    adapter = _resolved_text(draft, ADAPTER_KEY)
    if isinstance(adapter, str):
        from .convert_adapters import adapter_keys

        adapter_path = environment.user_path(adapter, ADAPTER_KEY)
        base_path = environment.user_path(location, RESTORE_KEY)
        for path, value in adapter_keys(adapter_path, base_path).items():
            given = dotted_paths.get(draft.tree, path, draft.tree)
            from_preset = path in draft.packaged and draft.kind_of(path) == "file"
            if path == SCHEME_KEY and given not in (draft.tree, None, value):
                preset = f"peft={value}" if value in PRESETS else f"{path}={value}"
                draft.problems.append(_conflict(draft, path, given, value, adapter, preset))
            elif given is draft.tree or from_preset:
                _fill(draft, path, value, adapter, pretrained.family)
            elif path in ADAPTER_SHAPES and not has_interpolation(given) and given != value:
                draft.problems.append(_conflict(draft, path, given, value, adapter))


def _resolved_text(draft: Draft, key: str) -> Any:
    """Return the value of `key`, with interpolations resolved if they can be at this stage."""
    value = dotted_paths.get(draft.tree, key)
    if isinstance(value, str) and has_interpolation(value):
        with contextlib.suppress(InterpolationError):  # reported with all the others
            value = draft.resolver(draft.tree).resolve(key).value
    return value


def _fill(draft: Draft, path: str, value: Any, origin: str, family: Family) -> None:
    key = schema_keys(family).get(path)
    if key is None or key.default != value or path == "model.family" or path in draft.packaged:
        dotted_paths.put(draft.tree, path, value)
        draft.origins[path] = Origin("file", origin)
        draft.packaged |= {path}


def _report_conflicts(draft: Draft, conflicts: Mapping[str, tuple[Any, Any]], pretrained: StartingPoint) -> None:
    """Report keys that contradict the weights: one problem per key, or one for all keys of a model preset.

    Args:
        conflicts: path to (given value, value of the weights).
    """
    presets: dict[Path, list[str]] = {}
    for path, (given, value) in conflicts.items():
        file = Path(draft.origins.get(path, DEFAULT_ORIGIN).text.rpartition(":")[0])
        if draft.kind_of(path) == "file" and file.parent.name == "model":
            presets.setdefault(file, []).append(path)
        else:
            draft.problems.append(_conflict(draft, path, given, value, pretrained.origin))
    for file, keys in presets.items():
        names = ", ".join(path.removeprefix("model.") for path in keys)
        rule = f"is another model than that of {pretrained.origin}, whose weights are loaded; they differ in {names}"
        fix = f"leave out model={file.stem}: the shape comes from the pretrained model"
        draft.problems.append(Problem(f"model={file.stem}", None, str(file), rule, fix))
        for path in keys:  # otherwise rules would report a mixture of the two models
            if path != "model.family":
                dotted_paths.put(draft.tree, path, conflicts[path][1])


def _conflict(draft: Draft, path: str, given: Any, value: Any, origin: str, fix: str = "") -> Problem:
    rule = f"must be {format_value(value)}, as in {origin}: its weights have that shape"
    return Problem(path, format_value(given), draft.origin_text(path), rule, fix or f"~{path}")


# ---------------------------------------------------------------- the pretrained model


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Configuration of the pretrained model.

    Attributes:
        keys: values of the model's keys by dotted path.
        tokenizer: values of `model.tokenizer.*` by dotted path; empty if there is no tokenizer.
        origin: the file they were read from, for messages.
    """

    family: Family
    keys: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    origin: str

    @classmethod
    def from_keys(
        cls, family: Family, model: Mapping[str, Any], tokenizer: Mapping[str, Any], origin: str
    ) -> StartingPoint:
        """Select the keys that a run takes from nested `model` and `model.tokenizer` keys."""
        names = _FAMILY_KEYS[family] - EXECUTION_KEYS - {"encoder", "decoder", "bert"}
        keys = {f"model.{name}": value for name, value in model.items() if name in names}
        found = {f"model.tokenizer.{name}": value for name, value in dotted_paths.leaves(tokenizer)}
        return cls(family, keys | _nested_keys(model), found, origin)


def starting_point(path: Path) -> StartingPoint:
    """Read the model keys of a stoker checkpoint or a Hugging Face folder.

    Raises:
        UserError: there is no supported model at `path`; lists all reasons.
    """
    check_pretrained_path(path, RESTORE_KEY)  # before the imports below, which take seconds
    from .from_hf import open_source
    from .pretrained import find_pretrained, has_tokenizer, map_hf_model

    base = find_pretrained(path, verify=False)
    origin = str(base.path / "config.json")
    if base.checkpoint is None:
        with open_source(path) as source:
            incoming = map_hf_model(source)
            tokenizer = incoming.tokenizer_folder.keys_for(path.absolute()) if has_tokenizer(source) else {}
        return StartingPoint.from_keys(incoming.architecture.family, incoming.keys, tokenizer, origin)
    document = _checkpoint_model(base.checkpoint)
    tokenizer = _stored_tokenizer_keys(base.checkpoint, document["tokenizer"])
    return StartingPoint.from_keys(document["family"], document, tokenizer, origin)


def _stored_tokenizer_keys(checkpoint: Checkpoint, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the `model.tokenizer` keys of a checkpoint; those of its own tokenizer document if they do not give it:
    it came with the tokenized data, was made from the text, or its files have moved.
    """
    library, kind = keys["library"], checkpoint.tokenizer_document.get("tokenizer")
    names = ("model", "vocab_file", "merge_file", *(["type"] if library == "huggingface" else []))
    paths = [environment.user_path(keys[name], f"model.tokenizer.{name}") for name in names if keys[name]]
    known = library != "byte-level" or kind == library
    if library in ("char", "checkpoint") or not known or not all(path.exists() for path in paths):
        # Which token is the mask, and the number of sentinels, are not in the document.
        mask = keys["special_tokens"]["mask_token"]
        kept = {"num_sentinel_tokens": keys["num_sentinel_tokens"], "special_tokens": {"mask_token": mask}}
        return {"library": "checkpoint", "type": str(checkpoint.path.absolute()), **kept}
    return keys


def _checkpoint_model(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the `model` block of a checkpoint's configuration."""
    from .checkpoint_io import checkpoint_config
    from .pretrained import check_model_size

    run = checkpoint_config(checkpoint).resolved
    check_model_size(checkpoint, run, run.model.override_vocab_size or 1)
    document = run.model.model_dump(mode="json")
    if document.get("max_position_embeddings", 0) is None:
        length = document["seq_length" if run.model.family == "t5" else "encoder_seq_length"]
        document["max_position_embeddings"] = length if _has_position_table(document) else None
    return document


def _nested_keys(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of blocks below `model` by dotted path: T5's stacks and `bert`."""
    return {
        f"model.{block}.{name}": value
        for block in ("encoder", "decoder", "bert")
        for name, value in dotted_paths.leaves(model.get(block) or {})
        if name not in EXECUTION_KEYS
    }


def _has_position_table(model: Mapping[str, Any]) -> bool:
    stacks = [model, *(model.get(stack) or {} for stack in ("encoder", "decoder"))]
    return any(str(stack.get("position_embedding_type")).startswith("learned_") for stack in stacks)
