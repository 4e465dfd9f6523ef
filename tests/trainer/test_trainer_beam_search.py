"""Beam search finds the texts, with the scores, that transformers finds with the same weights."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from hf_fp64 import map_parameters
from tiers import cases

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.build import LanguageModel, build_model
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.gpt import GPTKeys
from stoker.models.config.t5 import T5Keys
from stoker.models.gpt import GPT
from stoker.models.hf.gpt2 import GPT2
from stoker.models.hf.t5 import T5 as T5_MAP
from stoker.models.incremental_decoding import Decoder, GPTDecoder, T5Decoder
from stoker.models.t5 import T5
from stoker.trainer.generation.beam_search import BeamSearchConfig, Hypothesis, run_beam_search

VOCAB, READ, MOST = 16, 12, 10
CPU = torch.device("cpu")


def their_t5() -> transformers.PreTrainedModel:
    config: Any = transformers.T5Config
    return transformers.T5ForConditionalGeneration(
        config(
            vocab_size=VOCAB, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=3,
            relative_attention_num_buckets=8, relative_attention_max_distance=20, dropout_rate=0.0, pad_token_id=0,
            eos_token_id=1, decoder_start_token_id=0,
        )
    )  # fmt: skip


def their_gpt() -> transformers.PreTrainedModel:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB, n_positions=READ + MOST, n_embd=24, n_layer=2, n_head=3, attn_pdrop=0, resid_pdrop=0,
            embd_pdrop=0, bos_token_id=1, eos_token_id=1, pad_token_id=1,
        )
    )  # fmt: skip


def our_keys(reference: transformers.PreTrainedModel) -> T5Keys | GPTKeys:
    common = {
        "hidden_size": 24, "ffn_hidden_size": 32, "num_attention_heads": 3, "kv_channels": 8, "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }  # fmt: skip
    if isinstance(reference, transformers.GPT2LMHeadModel):
        more = {"num_layers": 2, "ffn_hidden_size": 96, "openai_gelu": True, "encoder_seq_length": READ + MOST}
        return GPTKeys.model_validate(common | more | {"make_vocab_size_divisible_by": 8})
    stack = common | {
        "normalization": "rmsnorm", "layernorm_epsilon": 1e-6, "bias": False, "position_embedding_type": "relative",
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "normalize_attention_scores": False,
        "activation": "relu",
    }  # fmt: skip
    return T5Keys.model_validate(
        {
            "encoder": stack | {"num_layers": 2}, "decoder": stack | {"num_layers": 2}, "seq_length": READ,
            "make_vocab_size_divisible_by": 8, "share_decoder_tokens_head_embeddings": True, "scale_tied_logits": True,
            "tokens_head_bias": False,
        }
    )  # fmt: skip


def pair(reference: transformers.PreTrainedModel, seed: int) -> tuple[Any, LanguageModel]:
    """Their model with random weights, and ours with the same."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in reference.parameters():
        parameter.data.normal_(0, 0.4, generator=generator)
    keys = our_keys(reference)
    form = BatchSpec(seq_length=READ, decoder_seq_length=MOST if isinstance(keys, T5Keys) else 0)
    model = build_model(
        keys,
        vocab_size=VOCAB,
        device="cpu",
        dtype=torch.float32,
        flags=AttentionFlags(),
        micro_batch_size=1,
        batch_spec=form,
    )
    kind = T5_MAP if isinstance(model, T5) else GPT2
    for name, value in map_parameters(kind, model, reference).items():
        model.get_parameter(name).data.copy_(value)
    return reference.eval(), model.eval()


def decoder_of(model: LanguageModel, prompts: int, beams: int) -> Decoder:
    if isinstance(model, T5):
        return T5Decoder(model, prompts * beams, MOST, READ, beams)
    assert isinstance(model, GPT)
    return GPTDecoder(model, prompts * beams, READ + MOST)


def searched(model: LanguageModel, prompts: list[list[int]], search: BeamSearchConfig) -> list[list[Hypothesis]]:
    return run_beam_search(
        decoder_of(model, len(prompts), search.beams), prompts, search, max_new_tokens=MOST, eos_ids={1}, device=CPU,
        autocast=nullcontext, decoder_start_id=0 if isinstance(model, T5) else None,
    )  # fmt: skip


CASES: list[dict[str, Any]] = [
    {"beams": 2},
    {"beams": 4, "length_penalty": 0.0, "early_stopping": "never"},
    {"beams": 3, "length_penalty": 2.0, "early_stopping": True},
    {"beams": 3, "length_penalty": -0.5},
    {"beams": 2, "length_penalty": 2.0, "early_stopping": "never"},
    {"beams": 5, "length_penalty": 1.5, "early_stopping": "never"},
]


@torch.no_grad()
@pytest.mark.parametrize("make", [their_t5, their_gpt])
@pytest.mark.parametrize("case", cases(CASES, fast=1), ids=str)
def test_what_is_found_is_transformers(make: Any, case: dict[str, Any]) -> None:
    """Two texts at once: where one has ended, it must not change while the other goes on."""
    ends: set[bool] = set()
    for seed in (0, 2, 6):
        reference, model = pair(make(), seed)
        drawn = torch.randint(2, VOCAB, (2, READ), generator=torch.Generator().manual_seed(seed)).tolist()
        # theirs pads a GPT's prompts on the left, which would be another text
        prompts = [drawn[0], drawn[1] if isinstance(model, GPT) else drawn[1][:7]]
        found = searched(model, prompts, BeamSearchConfig(**case))
        tokens, present = torch.zeros(2, READ, dtype=torch.int64), torch.zeros(2, READ, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)], present[row, : len(prompt)] = torch.tensor(prompt), 1
        options = {
            "length_penalty": case.get("length_penalty", 1.0),
            "early_stopping": case.get("early_stopping", False),
        }
        theirs = reference.generate(
            tokens, attention_mask=present, num_beams=case["beams"], num_return_sequences=case["beams"],
            max_new_tokens=MOST, do_sample=False, return_dict_in_generate=True, output_scores=True, **options,
        )  # fmt: skip
        skip = READ if isinstance(model, GPT) else 1
        for row, text in enumerate(theirs.sequences[:, skip:].tolist()):
            mine = found[row // case["beams"]][row % case["beams"]]
            ended = 1 in text
            ends.add(ended)
            assert list(mine.tokens) == (text[: text.index(1)] if ended else text)
            assert mine.ended_by_eos == ended
            assert mine.score == pytest.approx(float(theirs.sequences_scores[row]), rel=1e-4, abs=1e-5)
    assert True in ends


@torch.no_grad()
def test_one_beam_is_greedy() -> None:
    _, model = pair(their_gpt(), 5)
    assert isinstance(model, GPT)
    prompt = [3, 4, 5]
    text = list(prompt)
    while len(text) < 3 + MOST and text[-1] != 1:
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    found = searched(model, [prompt], BeamSearchConfig(1))[0][0]
    assert list(found.tokens) == [token for token in text[3:] if token != 1]


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^`beams`"):
        BeamSearchConfig(0)
    with pytest.raises(ValueError, match=r"^`length_penalty`"):
        BeamSearchConfig(2, float("nan"))
