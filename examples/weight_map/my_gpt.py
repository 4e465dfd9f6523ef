"""Weights of an architecture that stoker does not know, in both directions: a Llama under other names.

Its config.json has `"architectures": ["MyGPTForCausalLM"]` and `"model_type": "my_gpt"`.
"""

import stoker
from stoker.models import hf

LAYER, HF_LAYER = "decoder.layers.{n}.", "blocks.{n}."
FIXED = {
    "normalization": "rmsnorm",
    "bias": False,
    "activation": "swiglu",
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": True,
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "ffn_dropout"), 0.0),
}


@stoker.register("weight_map", "MyGPTForCausalLM")
def my_gpt() -> hf.Architecture:
    """Return the fields of config.json and the names and layouts of the weights."""
    qkv = tuple(f"{HF_LAYER}attn.{name}.weight" for name in ("wq", "wk", "wv"))
    gate_up = tuple(f"{HF_LAYER}ffn.{name}.weight" for name in ("gate", "up"))
    norms = ("attention_norm", "norm1"), ("mlp_norm", "norm2")
    outputs = ("attention.output", "attn.wo"), ("mlp.down", "ffn.down")
    return hf.Architecture(
        model_type="my_gpt",
        name="MyGPTForCausalLM",
        family="gpt",
        field_mappings=(
            hf.FixedKeys(FIXED),
            hf.KeyField("vocab_size", ("override_vocab_size",), "size"),
            hf.KeyField("dim", ("hidden_size",), "size"),
            hf.KeyField("ffn_dim", ("ffn_hidden_size",), "size"),
            hf.KeyField("layers", ("num_layers",), "size"),
            hf.KeyField("heads", ("num_attention_heads",), "size"),
            hf.KeyField("kv_heads", ("num_query_groups",), "size"),
            hf.KeyField("eps", ("layernorm_epsilon",), "number"),
            hf.KeyField("theta", ("rotary_base",), "number", 10000.0),
            hf.position_field(2048, "context"),
        ),
        weights=hf.WeightMap(
            rules=(
                hf.WeightRule("token_embedding.weight", ("embed.weight",), hf.PaddedVocabulary()),
                hf.WeightRule("decoder.final_norm.weight", ("norm.weight",)),
                hf.WeightRule(f"{LAYER}attention.qkv.weight", qkv, hf.ConcatenatedRows(("heads", "groups", "groups"))),
                hf.WeightRule(f"{LAYER}mlp.up.weight", gate_up, hf.ConcatenatedRows()),
                *(hf.WeightRule(f"{LAYER}{a}.weight", (f"{HF_LAYER}{b}.weight",)) for a, b in (*norms, *outputs)),
            ),
            head="head.weight",
            embedding="embed.weight",
        ),
        ignored_fields=frozenset({"auto_map"}),  # the model's own code, which stoker's replaces
    )
