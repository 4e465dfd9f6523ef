"""GGUF files of Llama types: their weights, in their own order of rows, and their tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import TOKENS, VOCAB, random_model
from torch import Tensor

from stoker.trainer.cli.main import main
from stoker.trainer.conversion.load_model import load_model
from stoker.trainer.utils.errors import EXIT_BAD_INPUT, EXIT_OK

gguf: Any = pytest.importorskip("gguf")

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def neighbours(weight: Tensor, heads: int) -> Tensor:
    """Rows in llama.cpp's order: those of the two halves of a head in turn."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def write(path: Path, *, architecture: str = "llama", pre: str = "gpt-2", **more: float) -> Any:
    """A random Llama as llama.cpp would write it, and the model."""
    model = random_model("llama")
    config: Any = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(2)
    writer.add_context_length(TOKENS)
    writer.add_embedding_length(36)
    writer.add_feed_forward_length(50)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_key_length(10)
    writer.add_value_length(10)
    writer.add_rope_dimension_count(10)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for name, value in more.items():
        writer.add_float32(name.replace("__", "."), value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    letters = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab", "</s>"]
    writer.add_token_list([*letters, *(f"<unused{n}>" for n in range(VOCAB - len(letters)))])
    writer.add_token_types([1] * (len(letters) - 1) + [3] * (VOCAB - len(letters) + 1))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(letters) - 1)
    writer.add_chat_template("{{ messages }}")
    for name, tensor in model.state_dict().items():
        whole, parts = tensor, name.split(".")
        if name == "model.embed_tokens.weight":
            theirs = "token_embd.weight"
        elif name == "lm_head.weight":
            theirs = "output.weight"
        elif name == "model.norm.weight":
            theirs = "output_norm.weight"
        else:
            theirs = f"blk.{parts[2]}.{NAMES['.'.join(parts[3:-1])]}.weight"
            if "q_proj" in name or "k_proj" in name:
                whole = neighbours(tensor, 6 if "q_proj" in name else 2)
        writer.add_tensor(theirs, whole.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def test_weights_and_tokenizer(tmp_path: Path) -> None:
    model = write(tmp_path / "model.gguf")
    assert main(["convert", str(tmp_path / "model.gguf"), str(tmp_path / "ours")]) == EXIT_OK
    restored = load_model(tmp_path / "ours", "cpu")
    assert restored.tokenizer.encode("abc a").tolist() == [27, 2, 26, 0]
    assert restored.tokenizer.eos_id == 28
    tokens = torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs, ours = model(tokens).logits, restored.model(tokens)[..., :VOCAB]
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back")]) == EXIT_OK
    assert "{{ messages }}" in (tmp_path / "back" / "tokenizer_config.json").read_text()


def test_what_is_not_a_llama_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, target = tmp_path / "model.gguf", tmp_path / "ours"

    def refused(says: str) -> None:
        assert main(["convert", str(path), str(target)]) == EXIT_BAD_INPUT
        assert says in capsys.readouterr().err
        assert not target.exists()

    write(path, architecture="gemma")
    refused("`general.architecture` (gemma) must be llama")
    write(path, pre="deepseek-coder")
    refused("(gpt2, deepseek-coder) must be gpt2 with gpt-2 or smollm; give the folder")
    write(path, llama__attention__scale=2.0)
    refused("its metadata: `attention.scale` (2.0) is not supported")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused("is not a GGUF file, or damaged")
    path.write_bytes(whole[:8] + b"\xff" * 16 + whole[24:])
    refused("is not a GGUF file, or damaged")
    path.write_bytes(b"GGUF")
    refused("is not a GGUF file, or damaged")
