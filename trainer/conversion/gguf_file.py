"""Llama-type models in GGUF files (llama.cpp): metadata, quantized weights and tokenizer in one file.

The `gguf` package reads the file and dequantizes to fp32. llama.cpp uses interleaved rotary embeddings, transformers
half-rotated ones, so rows of the query and key weights are permuted back (`LlamaModel.permute` of its converter).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..data.tokenizers.gpt2_files import BYTE_LEVEL, byte_level_bpe
from ..data.tokenizers.tokenizer_config import TOKENIZER_CONFIG_FILE
from ..data.tokenizers.tokenizer_files import TOKENIZER_JSON
from ..data.tokenizers.tokenizer_json import added_token
from ..utils.errors import UserError
from ..utils.safetensors_io import TensorSpec
from .hf_folder import FolderTensors

if TYPE_CHECKING:
    from .tokenizer_copy import TokenizerFolder

_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_MODEL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": BYTE_LEVEL,
    "smollm": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]},
}
"""Pre-tokenizer of each GGUF tokenizer kind, in tokenizer.json format."""
_CONTROL, _USER_DEFINED = 3, 4
"""GGUF token types that become added tokens; control tokens are special."""


class GGUFModel:
    """A Llama-type model in a GGUF file.

    Attributes:
        config: fields of a config.json.
        tensors: fp32 tensors under transformers' names.

    Raises:
        UserError: the `gguf` package is not installed, the file is damaged, or the architecture is not supported.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError:
            raise UserError(f"{path}: reading GGUF requires the gguf package: pip install 'stoker[gguf]'") from None
        self._path = path
        self._dequantize: Callable[..., Any] = gguf.dequantize
        try:
            reader = gguf.GGUFReader(str(path))
            self._metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
            self.tensors = self._opened(reader.tensors)
        except UserError:
            raise
        except Exception as error:  # damaged files raise various exceptions
            first = next(iter(str(error).splitlines()), "")
            raise UserError(f"{path} is not a GGUF file, or damaged ({type(error).__name__}: {first[:160]})") from None
        if self._metadata.get("general.architecture") != "llama":
            kind = str(self._metadata.get("general.architecture"))[:40]
            raise UserError(
                f"{path}: `general.architecture` ({kind}) must be llama; convert others from a Hugging Face folder"
            )
        self.config = self._config()

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"model_type": "llama", "rope_theta": 10000.0}
        for name, value in self._metadata.items():
            field = name.removeprefix("llama.")
            if field == name:
                continue
            # Values were rounded to fp32: recover the shortest decimal that rounds to the same value.
            config[_FIELDS.get(field, field)] = float(str(np.float32(value))) if isinstance(value, float) else value
        embedding = self.tensors.specs.get("model.embed_tokens.weight")
        if embedding is not None:
            config.setdefault("vocab_size", embedding.shape[0])
        config["tie_word_embeddings"] = "lm_head.weight" not in self.tensors.specs
        width = config.get("head_dim")
        if width is None and config.get("hidden_size") and config.get("num_attention_heads"):
            width = config["hidden_size"] // config["num_attention_heads"]
        for redundant in ("rope.dimension_count", "attention.value_length"):
            if config.get(redundant) == width:
                config.pop(redundant, None)
        if config.get("rope.scaling.type") == "none":
            config.pop("rope.scaling.type")
        return config

    def _opened(self, tensors: Any) -> FolderTensors:
        facts: dict[str, TensorSpec] = {}
        readers: dict[str, Callable[[], Any]] = {}
        for tensor in tensors:
            name = _name(tensor.name)
            shape = tuple(int(size) for size in reversed(tensor.shape))
            facts[name] = TensorSpec(torch.float32, shape)
            readers[name] = lambda name=name, tensor=tensor, shape=shape: self._read(name, tensor, shape)
        return FolderTensors(facts, {}, readers)

    def _read(self, name: str, tensor: Any, shape: tuple[int, ...]) -> Tensor:
        try:
            values = np.array(self._dequantize(tensor.data, tensor.tensor_type), np.float32, copy=True)
            whole = torch.from_numpy(values).reshape(shape)
        except Exception as error:  # unsupported quantization type, or truncated data
            kind = getattr(tensor.tensor_type, "name", "?")
            raise UserError(f"{self._path}: {name} ({kind}) cannot be dequantized: {str(error)[:160]}") from None
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f".{part}." in name:
                number = self.config.get(heads) or self.config["num_attention_heads"]
                return whole.unflatten(0, (number, -1, 2)).transpose(1, 2).reshape(shape)
        return whole

    def write_tokenizer(self, folder: Path) -> TokenizerFolder:
        """Write tokenizer.json and tokenizer_config.json from the metadata.

        Raises:
            UserError: the kind of tokenizer is not supported.
        """
        from .tokenizer_copy import TokenizerFolder

        metadata = {name.removeprefix("tokenizer.ggml."): value for name, value in self._metadata.items()}
        split = _PRE_TOKENIZERS.get(str(metadata.get("pre"))) if metadata.get("model") == "gpt2" else None
        tokens, merges = metadata.get("tokens"), metadata.get("merges")
        if split is None or not isinstance(tokens, list) or not isinstance(merges, list):
            kind = f"{str(metadata.get('model'))[:40]}, {str(metadata.get('pre'))[:40]}"
            raise UserError(
                f"the tokenizer in {self._path} ({kind}) must be gpt2 with {' or '.join(_PRE_TOKENIZERS)}; "
                "give the folder of the model's tokenizer.json with --tokenizer FOLDER"
            )
        definition = _definition(tokens, merges, metadata.get("token_type"), split)
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        for kind, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
            number = metadata.get(f"{name}_token_id")
            if isinstance(number, int) and 0 <= number < len(tokens):
                settings[f"{kind}_token"] = tokens[number]
        template = self._metadata.get("tokenizer.chat_template")
        if isinstance(template, str):
            settings["chat_template"] = template
        for name, document in ((TOKENIZER_JSON, definition), (TOKENIZER_CONFIG_FILE, settings)):
            (folder / name).write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
        files = {name: folder / name for name in (TOKENIZER_JSON, TOKENIZER_CONFIG_FILE)}
        return TokenizerFolder(files, {"library": "huggingface", "type": "{folder}"}, folder)


def _name(name: str) -> str:
    """Map a GGUF tensor name to transformers; unknown names are unchanged, and reported later as unknown."""
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return name
    if stem in _MODEL_TENSORS:
        return f"{_MODEL_TENSORS[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None or match[2] not in _LAYER_TENSORS:
        return name
    return f"model.layers.{match[1]}.{_LAYER_TENSORS[match[2]]}.{kind}"


def _definition(tokens: list[str], merges: list[str], types: Any, split: Mapping[str, Any]) -> dict[str, Any]:
    """Build the tokenizer.json of a byte-level BPE tokenizer."""
    kinds = types if isinstance(types, list) and len(types) == len(tokens) else [1] * len(tokens)
    added = [
        {**added_token(number, token), "special": kind == _CONTROL}
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return byte_level_bpe(vocabulary, merges, added, split)
