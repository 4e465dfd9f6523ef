"""What `stoker finetune` takes from the model it begins with: its keys and its tokenizer, unless they are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.config.bert import BertKeys
from ...models.config.gpt import GPTKeys
from ...models.config.memory import MemoryKeys
from ...models.config.model_keys import Family
from ...models.config.t5 import T5Keys
from . import dotted_paths

if TYPE_CHECKING:
    from ..conversion.pretrained import BaseWeights

KEY, ADAPTER_KEY = "model.restore_from_path", "model.peft.restore_from_path"
_KEYS: Mapping[Family, frozenset[str]] = {
    "gpt": frozenset(GPTKeys.model_fields),
    "t5": frozenset(T5Keys.model_fields),
    "bert": frozenset(BertKeys.model_fields),
}
_OF_THE_RUN = {
    *MemoryKeys.model_fields,
    *("use_flash_attention", "attention_backend", "transformer_engine", "masked_softmax_fusion"),
    *("compile", "seed", "label_smoothing", "moe_layer_recompute", "moe_grouped_gemm", "moe_per_layer_logging"),
}
"""Keys of a model that say how a run computes, and nothing about the model."""
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
"""Keys that its weights were trained with, which no run can change."""
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
"""Likewise of an adapter that a run goes on with."""


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """The model that a run begins with.

    Attributes:
        family: of the model.
        keys: dotted paths below the root to values: of the model alone.
        tokenizer: `model.tokenizer` likewise; empty where it has none.
        origin: where they stand, for messages.
    """

    family: Family
    keys: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    origin: str


def starting_point(path: Path) -> StartingPoint:
    """The keys of the model in a checkpoint of stoker's, or in a folder of Hugging Face's.

    Raises:
        UserError: there is none, with every reason.
    """
    from ..conversion.from_hf import open_source
    from ..conversion.pretrained import checked, find_base, has_tokenizer

    base = find_base(path, verify=False)
    if base.checkpoint is None:
        with open_source(path) as source:
            incoming = checked(source)
            family: Family = incoming.architecture.family
            keys = {
                f"model.{name}": value for name, value in dotted_paths.leaves(incoming.keys) if name in _kept(family)
            }
            keys |= _of_stacks(incoming.keys)
            tokenizer = incoming.tokenizer_folder.keys_in(path.absolute())
            found = {f"model.tokenizer.{name}": value for name, value in tokenizer.items()}
            if not has_tokenizer(source):
                found = {}
            return StartingPoint(family, keys, found, str(path / "config.json"))
    return _of_checkpoint(base)


def adapter_keys(adapter: Path, base: Path) -> dict[str, Any]:
    """The keys of `model.peft` that an adapter was trained with, as dotted paths below the root.

    Args:
        adapter: of stoker's, or a folder in the format of Hugging Face's peft.
        base: the model that a run begins with.

    Raises:
        UserError: there is no adapter, or it belongs to another model.
    """
    from ..conversion.convert_adapters import keys_of_adapter
    from ..conversion.pretrained import find_base

    found = keys_of_adapter(adapter, find_base(base, verify=False))
    return {f"model.peft.{name}": value for name, value in found.items()}


def _of_checkpoint(base: BaseWeights) -> StartingPoint:
    from ..conversion.size_check import check_claimed_size
    from .run_config import RunConfig

    assert base.checkpoint is not None
    origin = str(base.path / "config.json")
    root = RunConfig.from_document(base.checkpoint.config_document, trusted=False, origin=origin).root
    check_claimed_size(base.checkpoint, root, root.model.override_vocab_size or 1)
    document = root.model.model_dump(mode="json")
    family = root.model.family
    if document.get("max_position_embeddings", 0) is None:
        length = document["seq_length" if family == "t5" else "encoder_seq_length"]
        document["max_position_embeddings"] = length if _has_table(document) else None
    keys = {f"model.{name}": value for name, value in document.items() if name in _kept(family)}
    keys |= _of_stacks(document)
    tokenizer = {f"model.tokenizer.{name}": value for name, value in dotted_paths.leaves(document["tokenizer"])}
    return StartingPoint(family, keys, tokenizer, origin)


def _kept(family: Family) -> frozenset[str]:
    return _KEYS[family] - _OF_THE_RUN - {"encoder", "decoder", "bert"}


def _of_stacks(model: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of blocks below the model: of T5's stacks, and BERT's own."""
    return {
        f"model.{block}.{name}": value
        for block in ("encoder", "decoder", "bert")
        for name, value in dotted_paths.leaves(model.get(block) or {})
        if name not in _OF_THE_RUN
    }


def _has_table(model: Mapping[str, Any]) -> bool:
    stacks = [model, *(model.get(stack) or {} for stack in ("encoder", "decoder"))]
    return any(str(stack.get("position_embedding_type")).startswith("learned_") for stack in stacks)
