"""Padding goes to no expert, whatever the form of the samples, in training and in evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpt_builder import build_model
from torch import Tensor

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.bert import BERT
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.bert import BertKeys
from stoker.models.config.gpt import GPTKeys
from stoker.models.config.peft import PromptSlice
from stoker.models.config.t5 import T5Keys
from stoker.models.gpt import GPT
from stoker.models.moe.moe_layer import find_moe_layers
from stoker.models.moe.router import STATISTIC_NAMES, Routing
from stoker.models.t5 import T5

EXPERTS, TOKENS, WRITTEN, VOCAB = 4, 16, 8, 100
DENSE: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.3,
}
STACK = DENSE | {
    "num_moe_experts": EXPERTS,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_expert_capacity_factor": 1.0,
}
RELATIVE = {"position_embedding_type": "relative"}


def built(keys: GPTKeys | T5Keys | BertKeys, peft: PromptSlice | None = None, **form: Any) -> GPT | T5 | BERT:
    shape = BatchSpec(seq_length=TOKENS, **form)
    facts: dict[str, Any] = {"device": "cpu", "dtype": torch.float64, "flags": AttentionFlags()}
    return build_model(keys, vocab_size=VOCAB, batch_spec=shape, peft=peft, **facts)


def t5(*, encoder: bool, **form: Any) -> T5:
    """With experts in one of its stacks."""
    stacks = {"encoder": STACK if encoder else DENSE, "decoder": DENSE if encoder else STACK}
    keys = T5Keys.model_validate({name: stack | RELATIVE for name, stack in stacks.items()})
    model = built(keys, decoder_seq_length=WRITTEN, **form)
    assert isinstance(model, T5)
    return model


def texts(seed: int = 0, length: int = TOKENS) -> Tensor:
    return torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))


def pairs() -> dict[str, Tensor]:
    """The second row writes 3 tokens, and then nothing."""
    labels = texts(2, WRITTEN).clone()
    labels[1, 3:] = -100
    return {"encoder_tokens": texts(), "decoder_tokens": texts(1, WRITTEN), "labels": labels}


def documents(length: int, ends: int) -> Tensor:
    """Of rows that hold one text each; padding in the second begins at `ends`."""
    numbers = torch.zeros(2, length, dtype=torch.int32)
    numbers[1, ends:] = 1
    return numbers


def assignments(model: GPT | T5 | BERT) -> float:
    (layer,) = find_moe_layers(model).values()
    return dict(zip(STATISTIC_NAMES, layer.statistics[EXPERTS:].tolist(), strict=True))["assignments"]


@pytest.mark.parametrize("form", ["padded", "packed", "full"])
def test_padding_of_a_decoder_goes_to_no_expert(form: str) -> None:
    model = t5(encoder=False, padded=form == "padded", packed=form == "packed")
    batch = pairs()
    if form == "packed":
        batch |= {"encoder_documents": documents(TOKENS, TOKENS), "decoder_documents": documents(WRITTEN, 3)}
    elif form == "padded":
        batch["encoder_padding"] = torch.ones(2, TOKENS, dtype=torch.bool)
    loss = model.batch_loss(batch, 1.0)
    assert assignments(model) == 2 * (WRITTEN + 3)
    changed = batch["decoder_tokens"].clone()
    changed[1, 3:] = 3
    torch.testing.assert_close(model.batch_loss(batch | {"decoder_tokens": changed}, 1.0), loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_padding_of_an_encoder_goes_to_no_expert(form: str) -> None:
    model = t5(encoder=True, padded=form == "padded", packed=form == "packed")
    batch, padding = pairs(), torch.ones(2, TOKENS, dtype=torch.bool)
    padding[1, 5:] = False
    if form == "packed":
        batch |= {"encoder_documents": documents(TOKENS, 5), "decoder_documents": documents(WRITTEN, 3)}
    else:
        batch["encoder_padding"] = padding
    loss = model.batch_loss(batch, 1.0)
    assert assignments(model) == 2 * (TOKENS + 5)
    changed = batch["encoder_tokens"].clone()
    changed[~padding] = 3
    torch.testing.assert_close(model.batch_loss(batch | {"encoder_tokens": changed}, 1.0), loss, rtol=1e-12, atol=0)


def test_logits_of_padded_texts_do_not_follow_their_padding() -> None:
    model = t5(encoder=True, padded=True)
    padding = torch.ones(2, TOKENS, dtype=torch.bool)
    padding[1, 5:] = False
    first, changed = texts(), texts().masked_fill(~padding, 3)
    told = [model(read, texts(1, WRITTEN), encoder_padding=padding) for read in (first, changed)]
    torch.testing.assert_close(*told, rtol=1e-12, atol=1e-12)


def first_row(labels: Tensor, ends: int) -> Tensor:
    """Labels of a text that ends there, and of a row that only fills up the batch."""
    told = labels.clone()
    told[0, ends:] = told[1] = -100
    return told


READ = {"tokens": texts(), "labels": first_row(texts(1), 5)}
PAIRS = pairs() | {"labels": first_row(texts(2, WRITTEN), 5)}
TOLD = torch.ones(2, TOKENS, dtype=torch.bool)
APART = {  # a text of 9 and 5 tokens, and padding behind it
    "encoder_documents": (torch.arange(TOKENS).expand(2, -1) >= 9).int(),
    "decoder_documents": (torch.arange(WRITTEN).expand(2, -1) >= 5).int(),
}


def gpt(virtual_tokens: int = 0) -> GPT | T5 | BERT:
    """With experts, and learned vectors in front."""
    prompt = PromptSlice(virtual_tokens=virtual_tokens, bottleneck=8, embedding=6, init_std=0.5)
    length = TOKENS + virtual_tokens
    return built(GPTKeys.model_validate(STACK | {"encoder_seq_length": length}), prompt if virtual_tokens else None)


def bert() -> GPT | T5 | BERT:
    """With experts."""
    return built(BertKeys.model_validate(STACK | {"encoder_seq_length": TOKENS}))


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "batch", "tokens"),
    [
        (gpt, READ, 5),
        (gpt, READ | {"padding": TOLD}, 5),
        (lambda: gpt(3), READ, 3 + 5),
        (bert, READ, TOKENS),
        (lambda: t5(encoder=True), PAIRS, TOKENS),
        (lambda: t5(encoder=True, padded=True), PAIRS | {"encoder_padding": TOLD & (torch.arange(TOKENS) < 7)}, 7),
        (lambda: t5(encoder=True, packed=True), PAIRS | APART, 9),
        (lambda: t5(encoder=False), PAIRS, 5),
    ],
    ids=["gpt", "gpt told", "gpt prompt", "bert", "encoder", "encoder padded", "encoder packed", "decoder"],
)
def test_what_fills_up_an_evaluation_takes_no_experts_room(make: Any, batch: dict[str, Tensor], tokens: int) -> None:
    """A row without a label is nobody's, and neither is what stands behind a window that ends early."""
    model = make().eval()
    (layer,) = find_moe_layers(model).values()
    seen: list[Routing] = []

    def note(router: Any, given: Any, routed: Any) -> None:
        seen.append(routed)

    layer.router.register_forward_hook(note)
    loss = model.batch_loss(batch, 1.0)
    (routed,) = seen
    assert routed.statistics[:EXPERTS].sum() == 2 * tokens  # two experts each
    assert routed.keep_mask is not None
    assert not routed.keep_mask[len(routed.keep_mask) // 2 :].any()
    changed = {name: field.clone() for name, field in batch.items()}
    for name in changed.keys() & {"tokens", "encoder_tokens", "decoder_tokens"}:
        changed[name][1] = 3
    assert torch.equal(model.batch_loss(changed, 1.0), loss)
