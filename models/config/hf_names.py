"""Names of the built-in Hugging Face architectures."""

from __future__ import annotations

HF_ARCHITECTURES = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM"),
    *("GPT2LMHeadModel", "GPTNeoXForCausalLM"),
    *("T5ForConditionalGeneration", "MT5ForConditionalGeneration"),
    "BertForMaskedLM",
)
"""Classes of language models, as in `architectures` of config.json, that need no component of a user's own."""
