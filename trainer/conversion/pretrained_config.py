"""Keys and tokenizer of a pretrained model, for `stoker finetune`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models.config.bert import BertKeys
from ...models.config.gpt import GPTKeys
from ...models.config.memory import MemoryKeys
from ...models.config.model import Family
from ...models.config.t5 import T5Keys
from ..config import dotted_paths
from ..config.load import config_from_document

if TYPE_CHECKING:
    from .pretrained import PretrainedWeights

KEY, ADAPTER_KEY = "model.restore_from_path", "model.peft.restore_from_path"
_FAMILY_KEYS: Mapping[Family, frozenset[str]] = {
    "gpt": frozenset(GPTKeys.model_fields),
    "t5": frozenset(T5Keys.model_fields),
    "bert": frozenset(BertKeys.model_fields),
}
_RUN_KEYS = {
    *MemoryKeys.own_keys(),
    *("use_flash_attention", "attention_backend", "transformer_engine", "masked_softmax_fusion"),
    *("compile", "seed", "label_smoothing", "moe_layer_recompute", "moe_grouped_gemm", "moe_per_layer_logging"),
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


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """Configuration of the pretrained model.

    Attributes:
        family: model family.
        keys: values of the model's keys by dotted path.
        tokenizer: values of `model.tokenizer.*` by dotted path; empty if there is no tokenizer.
        origin: the file they were read from, for messages.
    """

    family: Family
    keys: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    origin: str


def starting_point(path: Path) -> StartingPoint:
    """Read the model keys of a stoker checkpoint or a Hugging Face folder.

    Raises:
        UserError: there is no supported model at `path`; lists all reasons.
    """
    from .from_hf import open_source
    from .pretrained import find_pretrained, has_tokenizer, map_hf_model

    base = find_pretrained(path, verify=False)
    if base.checkpoint is None:
        with open_source(path) as source:
            incoming = map_hf_model(source)
            family: Family = incoming.architecture.family
            keys = {
                f"model.{name}": value
                for name, value in dotted_paths.leaves(incoming.keys)
                if name in _model_keys(family)
            }
            keys |= _nested_keys(incoming.keys)
            tokenizer = incoming.tokenizer_folder.keys_for(path.absolute())
            found = {f"model.tokenizer.{name}": value for name, value in tokenizer.items()}
            if not has_tokenizer(source):
                found = {}
            return StartingPoint(family, keys, found, str(path / "config.json"))
    return _from_checkpoint(base)


def adapter_keys(adapter: Path, base: Path) -> dict[str, Any]:
    """Read the `model.peft` keys an adapter was trained with, by dotted path.

    Args:
        adapter: a stoker adapter, or a folder in Hugging Face PEFT format.
        base: the pretrained model.

    Raises:
        UserError: there is no adapter, or it belongs to another model.
    """
    from .convert_adapters import adapter_config_keys
    from .pretrained import find_pretrained

    found = adapter_config_keys(adapter, find_pretrained(base, verify=False))
    return {f"model.peft.{name}": value for name, value in found.items()}


def _from_checkpoint(base: PretrainedWeights) -> StartingPoint:
    from .size_check import check_model_size

    assert base.checkpoint is not None
    origin = str(base.path / "config.json")
    root = config_from_document(base.checkpoint.config_document, trusted=False, origin=origin).root
    check_model_size(base.checkpoint, root, root.model.override_vocab_size or 1)
    document = root.model.model_dump(mode="json")
    family = root.model.family
    if document.get("max_position_embeddings", 0) is None:
        length = document["seq_length" if family == "t5" else "encoder_seq_length"]
        document["max_position_embeddings"] = length if _has_position_table(document) else None
    keys = {f"model.{name}": value for name, value in document.items() if name in _model_keys(family)}
    keys |= _nested_keys(document)
    tokenizer = {f"model.tokenizer.{name}": value for name, value in dotted_paths.leaves(document["tokenizer"])}
    return StartingPoint(family, keys, tokenizer, origin)


def _model_keys(family: Family) -> frozenset[str]:
    return _FAMILY_KEYS[family] - _RUN_KEYS - {"encoder", "decoder", "bert"}


def _nested_keys(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of blocks below `model` by dotted path: T5's stacks and `bert`."""
    return {
        f"model.{block}.{name}": value
        for block in ("encoder", "decoder", "bert")
        for name, value in dotted_paths.leaves(model.get(block) or {})
        if name not in _RUN_KEYS
    }


def _has_position_table(model: Mapping[str, Any]) -> bool:
    stacks = [model, *(model.get(stack) or {} for stack in ("encoder", "decoder"))]
    return any(str(stack.get("position_embedding_type")).startswith("learned_") for stack in stacks)
