"""Logits and every gradient equal those of transformers' T5, ByT5 and BERT with the same random weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import transformers
from config_helpers import load
from gpt_builder import build_model
from hf_fp64 import keep_input_dtype, map_parameters, relative_difference
from tiers import cases, extra
from torch import Tensor, nn

from stoker.models.build import LanguageModel
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.bert import BertKeys
from stoker.models.config.families import FamilyKeys
from stoker.models.config.t5 import T5Keys
from stoker.models.hf.architecture import Architecture
from stoker.models.hf.bert import BERT
from stoker.models.hf.t5 import T5, T5_GATED

VOCAB, BATCH, TOKENS, ANSWER = 53, 3, 41, 23


class Case(NamedTuple):
    """Their model, our keys, and what it is among theirs."""

    reference: transformers.PreTrainedModel
    keys: FamilyKeys
    kind: Architecture


@pytest.fixture
def hf_upcasts_lifted() -> Iterator[None]:
    with keep_input_dtype():
        yield


def t5(*, layers: tuple[int, int], gated: bool, tied: bool, backend: str = "auto", heads: int = 3) -> Case:
    config_class: Any = transformers.T5Config
    config = config_class(
        vocab_size=VOCAB, d_model=24, d_kv=10, d_ff=37, num_layers=layers[0], num_decoder_layers=layers[1],
        num_heads=heads, relative_attention_num_buckets=12, relative_attention_max_distance=30, dropout_rate=0.0,
        feed_forward_proj="gated-gelu" if gated else "relu", tie_word_embeddings=tied, pad_token_id=0, eos_token_id=1,
        decoder_start_token_id=0,
    )  # fmt: skip
    reference = transformers.T5ForConditionalGeneration(config)
    if not tied:  # transformers 5 ties them all the same, although v1.1 and ByT5 have heads of their own
        reference.lm_head = nn.Linear(24, VOCAB, bias=False)
    stack: dict[str, Any] = {
        "hidden_size": 24, "kv_channels": 10, "ffn_hidden_size": 37, "num_attention_heads": heads,
        "normalization": "rmsnorm", "layernorm_epsilon": 1e-6, "bias": False, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "position_embedding_type": "relative", "relative_attention_num_buckets": 12,
        "relative_attention_max_distance": 30, "normalize_attention_scores": False,
        "activation": "geglu" if gated else "relu", "openai_gelu": gated, "attention_backend": backend,
    }  # fmt: skip
    ours = T5Keys.model_validate(
        {
            "encoder": stack | {"num_layers": layers[0]},
            "decoder": stack | {"num_layers": layers[1]},
            "seq_length": TOKENS,
            "make_vocab_size_divisible_by": 8,
            "share_decoder_tokens_head_embeddings": tied,
            "scale_tied_logits": tied,
            "tokens_head_bias": False,
        }
    )
    return Case(reference, ours, T5_GATED if gated else T5)


def bert() -> Case:
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=30, num_hidden_layers=2, num_attention_heads=5, intermediate_size=44,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=TOKENS,
    )  # fmt: skip
    ours = BertKeys.model_validate(
        {
            "num_layers": 2, "hidden_size": 30, "ffn_hidden_size": 44, "num_attention_heads": 5, "hidden_dropout": 0.0,
            "attention_dropout": 0.0, "layernorm_epsilon": 1e-12, "transformer_block_type": "post_ln",
            "encoder_seq_length": TOKENS, "make_vocab_size_divisible_by": 8,
        }
    )  # fmt: skip
    return Case(transformers.BertForMaskedLM(config), ours, BERT)


def same_weights(case: Case, dtype: torch.dtype, *, padded: bool, std: float) -> LanguageModel:
    """Randomise the reference (biases and norms too), and our model with the same values."""
    generator = torch.Generator().manual_seed(7)
    for parameter in case.reference.parameters():
        parameter.data.normal_(0, std, generator=generator)
    model = build_model(
        case.keys,
        vocab_size=VOCAB,
        dtype=dtype,
        micro_batch_size=BATCH,
        batch_spec=BatchSpec(seq_length=TOKENS, decoder_seq_length=ANSWER, padded=padded),
    )
    for name, value in map_parameters(case.kind, model, case.reference).items():
        model.get_parameter(name).data.copy_(value)
    return model


def worst_difference(case: Case, dtype: torch.dtype, *, padded: bool, std: float = 0.3) -> float:
    reference: Any = case.reference
    reference.to(dtype)
    case.reference.set_attn_implementation("eager")
    model = same_weights(case, dtype, padded=padded, std=std)
    generator = torch.Generator().manual_seed(1)

    def drawn(length: int) -> Tensor:
        return torch.randint(2, VOCAB, (BATCH, length), generator=generator)

    is_t5 = isinstance(case.keys, T5Keys)
    tokens, labels, mask = drawn(TOKENS), drawn(ANSWER if is_t5 else TOKENS), torch.ones(BATCH, TOKENS).bool()
    labels[0, :4] = -100
    if padded:
        mask[1, 30:], mask[2, 7:] = False, False
    counted = (labels != -100).sum()
    theirs: dict[str, Tensor] = {"input_ids": tokens, "attention_mask": mask.to(torch.int64)}
    ours: dict[str, Tensor] = {}
    if is_t5:
        ours = {"encoder_tokens": tokens, "decoder_tokens": drawn(ANSWER)}
        theirs["decoder_input_ids"] = ours["decoder_tokens"]
        ours |= {"encoder_padding": mask} if padded else {}
    else:
        types = torch.randint(0, 2, (BATCH, TOKENS), generator=generator)
        ours, theirs = {"tokens": tokens, "token_types": types}, theirs | {"token_type_ids": types}
        ours |= {"padding": mask} if padded else {}

    logits = reference(**theirs).logits
    (F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / counted).backward()
    errors = [relative_difference(model(**ours)[..., :VOCAB], logits)]
    model.batch_loss({**ours, "labels": labels}, counted).backward()
    for name, gradient in map_parameters(case.kind, model, case.reference, "grad").items():
        mine = model.get_parameter(name).grad
        assert mine is not None
        errors.append(relative_difference(mine, gradient))  # rows of padding have gradients of zero
    return max(errors)


CASES = {
    "t5_v1_0": lambda: t5(layers=(2, 2), gated=False, tied=True),
    "t5_v1_1": lambda: t5(layers=(2, 3), gated=True, tied=False),
    "t5_v1_1_unfused": lambda: t5(layers=(1, 1), gated=True, tied=False, backend="unfused"),
    "byt5": lambda: t5(layers=(3, 1), gated=True, tied=False, backend="sdpa_math", heads=2),
    "bert": bert,
}


@pytest.mark.usefixtures("hf_upcasts_lifted")
@pytest.mark.parametrize("padded", cases([False, True], fast=1))
@pytest.mark.parametrize("case", CASES)
def test_fp64(case: str, padded: bool) -> None:
    assert worst_difference(CASES[case](), torch.float64, padded=padded) <= 1e-10


@pytest.mark.parametrize("case", CASES)
def test_fp32_with_their_own_arithmetic(case: str) -> None:
    assert worst_difference(CASES[case](), torch.float32, padded=False) <= 1e-5


RELEASED: dict[str, dict[str, Any]] = {
    "t5_small": {"d_model": 512, "d_ff": 2048, "num_heads": 8, "feed_forward_proj": "relu"},
    "t5_base": {"d_model": 768, "d_ff": 3072, "num_heads": 12, "feed_forward_proj": "relu"},
    "t5_v1_1_base": {"d_model": 768, "d_ff": 2048, "num_heads": 12, "feed_forward_proj": "gated-gelu"},
    "byt5_small": {"d_model": 1472, "d_ff": 3584, "num_heads": 6, "feed_forward_proj": "gated-gelu"},
    "bert_base": {},
}
"""config.json of the released models, as far as it differs from the defaults of transformers' class."""


@pytest.mark.usefixtures("hf_upcasts_lifted")
@pytest.mark.parametrize(
    "name",
    [
        "t5_small",
        *extra("t5_v1_1_base", "bert_base", "t5_base", "byt5_small"),
    ],
)
def test_the_presets_are_the_released_models(name: str) -> None:
    """With one layer and few tokens; every width, activation, norm and scale is the preset's."""
    length = ("seq_length", "encoder_seq_length")[name == "bert_base"]
    stacks = ("model.encoder.", "model.decoder.") if length == "seq_length" else ("model.",)
    rates = [f"{stack}{part}_dropout=0" for stack in stacks for part in ("hidden", "attention", "ffn")]
    layers = [f"{stack}num_layers=1" for stack in stacks]
    ours = load(
        f"model={name}", "data=mock", f"model.override_vocab_size={VOCAB}", "model.make_vocab_size_divisible_by=8",
        f"model.{length}={TOKENS}", *rates, *layers,
    ).root.model  # fmt: skip
    config_class: Any = transformers.BertConfig if name == "bert_base" else transformers.T5Config
    if name == "bert_base":
        config = config_class(
            vocab_size=VOCAB, num_hidden_layers=1, max_position_embeddings=TOKENS, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        case = Case(transformers.BertForMaskedLM(config), ours, BERT)
    else:
        untied = RELEASED[name]["feed_forward_proj"] == "gated-gelu"
        config = config_class(
            vocab_size=VOCAB, num_layers=1, num_decoder_layers=1, dropout_rate=0.0, decoder_start_token_id=0,
            **RELEASED[name], **({"tie_word_embeddings": False} if untied else {}),
        )  # fmt: skip
        reference = transformers.T5ForConditionalGeneration(config)
        if untied:
            reference.lm_head = nn.Linear(config.d_model, VOCAB, bias=False)
        case = Case(reference, ours, T5_GATED if untied else T5)
    assert worst_difference(case, torch.float64, padded=False, std=0.05) <= 1e-10
