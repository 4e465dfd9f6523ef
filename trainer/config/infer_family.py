"""Which family of models a configuration describes that names none, as NeMo's do: told by the keys of one family."""

from __future__ import annotations

import re

from ...models.config.model_keys import Family
from . import dotted_paths
from .dotted_paths import MISSING, Tree
from .schema.key_index import STACKS

_FAMILY = "model.family"
_DECODER_LENGTH = "model.data.seq_length_dec"
_TASK = "model.data.dataset_type"
_TASKS_OF_T5 = ("t5", "t5_prefix_lm", "t5_prompt", "seq2seq", "ul2", "ul2_prompt", "bart")
_KEYS_OF_BERT = tuple(f"model.{name}" for name in ("mcore_bert", "bert_binary_head", "add_pooler", "add_lm_head"))
_WORD_PIECES = "BertWordPiece"
_SOURCE, _RETRO_DATA = "model.data.data_impl", "retmmap"
_OTHERS = {"mamba": "Mamba", "griffin": "Griffin", "jamba": "Jamba", "retro": "RETRO"}
_KEYS_OF_OTHERS = (
    (re.compile(r"model\.(mamba|hybrid)_\w+"), "Mamba"),
    (re.compile(r"model\.retro\..+|model\.data\.retro_data\..+"), "RETRO"),
    (re.compile(r"model\.activations_checkpoint_recurrent"), "Griffin, or Mamba,"),
)
"""Keys of models that are not stoker's; whatever their value, no file of another model has them."""


def told_family(tree: Tree) -> tuple[Family, str] | None:
    """The family of a configuration that names none, and what tells it; None where nothing does: a GPT.

    Args:
        tree: values as written.
    """
    if _is_named(tree):
        return None
    if all(isinstance(stack := dotted_paths.get(tree, path), dict) and stack for path in STACKS["t5"]):
        return "t5", " and ".join(STACKS["t5"]) + " are there"
    if dotted_paths.get(tree, _DECODER_LENGTH, MISSING) not in (None, MISSING):
        return "t5", f"{_DECODER_LENGTH} is there"
    task = dotted_paths.get(tree, _TASK)
    if task in _TASKS_OF_T5:
        return "t5", f"{_TASK} is {task}"
    if dotted_paths.get(tree, "model.mcore_gpt") is not None:
        return None
    for path in _KEYS_OF_BERT:
        if dotted_paths.get(tree, path) is not None:
            return "bert", f"{path} is there"
    pieces = dotted_paths.get(tree, "model.tokenizer.type")
    if isinstance(pieces, str) and pieces.startswith(_WORD_PIECES):
        return "bert", f"model.tokenizer.type is {pieces}"
    return None


def other_model(tree: Tree) -> tuple[str, str] | None:
    """The key that tells a model of NeMo's that is none of stoker's, and what it is called; None where nothing does."""
    if _is_named(tree):
        return None
    for path in ("name", "exp_manager.name"):
        name = dotted_paths.get(tree, path)
        if isinstance(name, str) and (match := re.match(rf"megatron_({'|'.join(_OTHERS)})", name)):
            return path, _OTHERS[match[1]]
    if dotted_paths.get(tree, _SOURCE) == _RETRO_DATA:
        return _SOURCE, _OTHERS["retro"]
    for path, _ in dotted_paths.leaves(tree):
        for pattern, called in _KEYS_OF_OTHERS:
            if pattern.fullmatch(path):
                return path, called
    return None


def _is_named(tree: Tree) -> bool:
    return dotted_paths.get(tree, _FAMILY) is not None
