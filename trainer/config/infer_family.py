"""Infer the model family of a configuration without `model.family`, such as NeMo's, from its keys."""

from __future__ import annotations

import re

from ...models.config.model import Family
from . import dotted_paths
from .dotted_paths import MISSING, Tree
from .schema.key_index import STACKS

_FAMILY = "model.family"
_DECODER_LENGTH = "model.data.seq_length_dec"
_TASK = "model.data.dataset_type"
_TASKS_OF_T5 = ("t5", "t5_prefix_lm", "t5_prompt", "seq2seq", "ul2", "ul2_prompt", "bart")
_KEYS_OF_BERT = tuple(f"model.{name}" for name in ("mcore_bert", "bert_binary_head", "add_pooler", "add_lm_head"))
_NAMES = ("name", "exp_manager.name")
_WORD_PIECES = "BertWordPiece"
_SOURCE, _RETRO_DATA = "model.data.data_impl", "retmmap"
_UNSUPPORTED = {"mamba": "Mamba", "griffin": "Griffin", "jamba": "Jamba", "retro": "RETRO"}
_UNSUPPORTED_KEYS = (
    (re.compile(r"model\.(mamba|hybrid)_\w+"), "Mamba"),
    (re.compile(r"model\.retro\..+|model\.data\.retro_data\..+"), "RETRO"),
    (re.compile(r"model\.activations_checkpoint_recurrent"), "Griffin or Mamba"),
    (re.compile(r"model\.hyena\..+"), "Hyena"),
    (re.compile(r"model\.(mm_cfg\..+|vision\..+|unet_config\..+|vision_pretraining_type)"), "multimodal models"),
    (re.compile(r"model\.(num_soft_negatives|use_all_possible_negatives)"), "embedding models"),
    (re.compile(r"model\.language_model\..+"), "models on a BERT of Hugging Face (BERTLMModel)"),
    (re.compile(r"model\.head\..+"), "TransformerLMModel"),
)
"""Keys of unsupported models, which no file of a supported model has."""


def infer_family(tree: Tree) -> tuple[Family, str] | None:
    """Return the inferred family and the reason; None if `model.family` is set or nothing names a family (GPT)."""
    if _names_family(tree):
        return None
    if all(isinstance(stack := dotted_paths.get(tree, path), dict) and stack for path in STACKS["t5"]):
        return "t5", " and ".join(STACKS["t5"]) + " are set"
    if dotted_paths.get(tree, _DECODER_LENGTH, MISSING) not in (None, MISSING):
        return "t5", f"{_DECODER_LENGTH} is set"
    task = dotted_paths.get(tree, _TASK)
    if task in _TASKS_OF_T5:
        return "t5", f"{_TASK} is {task}"
    if dotted_paths.get(tree, "model.mcore_gpt") is not None:
        return None
    for path in _KEYS_OF_BERT:
        if dotted_paths.get(tree, path) is not None:
            return "bert", f"{path} is set"
    pieces = dotted_paths.get(tree, "model.tokenizer.type")
    if isinstance(pieces, str) and pieces.startswith(_WORD_PIECES):
        return "bert", f"model.tokenizer.type is {pieces}"
    for path in _NAMES:  # a file that fine-tunes leaves the architecture to its checkpoint
        name = dotted_paths.get(tree, path)
        if isinstance(name, str) and (match := re.match(r"megatron_(t5|bert)(?![^\W_])", name)):
            return ("t5" if match[1] == "t5" else "bert"), f"{path} is {name}"
    return None


def unsupported_model(tree: Tree) -> tuple[str, str] | None:
    """Return the key that identifies an unsupported NeMo model, and the model's name; None if there is none."""
    if _names_family(tree):
        return None
    for path in _NAMES:
        name = dotted_paths.get(tree, path)
        if isinstance(name, str) and (match := re.match(rf"megatron_({'|'.join(_UNSUPPORTED)})", name)):
            return path, _UNSUPPORTED[match[1]]
    if dotted_paths.get(tree, _SOURCE) == _RETRO_DATA:
        return _SOURCE, _UNSUPPORTED["retro"]
    for path, _ in dotted_paths.leaves(tree):
        for pattern, model_name in _UNSUPPORTED_KEYS:
            if pattern.fullmatch(path):
                return path, model_name
    return None


def _names_family(tree: Tree) -> bool:
    return dotted_paths.get(tree, _FAMILY) is not None
