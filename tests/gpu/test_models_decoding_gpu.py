"""Steps over a cache on a GPU: what the whole text gives, compiled and recorded too, without a wait for the device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cuda_sync import forbid_device_sync
from torch import Tensor

from stoker.kernels import decode_linear
from stoker.kernels.attention import decode
from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.build import LanguageModel, build_model
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.config.gpt import GPTKeys
from stoker.models.config.t5 import T5Keys
from stoker.models.gpt import GPT
from stoker.models.incremental_decoding import GPTDecoder, T5Decoder
from stoker.models.t5 import T5
from stoker.trainer.generation.decode_loop import DecodeLoop
from stoker.trainer.generation.sampling import SamplingParams

pytestmark = pytest.mark.gpu
VOCAB, LENGTH = 1000, 300
SMALL: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "hidden_dropout": 0.0,
    "attention_dropout": 0.0, "init_method_std": 0.1, "normalization": "rmsnorm", "activation": "swiglu", "bias": False,
}  # fmt: skip
MOE = {"num_moe_experts": 4, "moe_router_topk": 2}
CASES: dict[str, dict[str, Any]] = {
    "rope": {"position_embedding_type": "rope", "num_query_groups": 2},
    "xpos_interleaved": {"position_embedding_type": "xpos", "rotary_interleaved": True},
    "window": {"position_embedding_type": "rope", "rotary_percentage": 0.5, "window_size": [70, 0]},
    "sinks": {"position_embedding_type": "rope", "softmax_type": "off-by-one", "num_query_groups": 2},
    "alibi": {"position_embedding_type": "alibi", "attn_logit_softcapping": 5.0, "num_query_groups": 1},
    "kerple": {"position_embedding_type": "kerple", "qk_layernorm": True},
    "experts": {"position_embedding_type": "rope", **MOE},
}


def built(keys: GPTKeys | T5Keys, form: BatchSpec, dtype: torch.dtype) -> LanguageModel:
    return build_model(
        keys, vocab_size=VOCAB, device="cuda", dtype=dtype, flags=AttentionFlags(), micro_batch_size=2, batch_spec=form,
        kinds=("evaluation", "generation"),
    ).eval()  # fmt: skip


def gpt(dtype: torch.dtype, **changes: Any) -> GPT:
    keys = GPTKeys.model_validate(SMALL | {"encoder_seq_length": LENGTH + 1, "compile": False} | changes)
    model = built(keys, BatchSpec(seq_length=LENGTH + 1), dtype)
    assert isinstance(model, GPT)
    return model


def drawn(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(0)).cuda()


def errors(mine: Tensor, theirs: Tensor) -> float:
    mine, theirs = mine[..., :VOCAB].double(), theirs[..., :VOCAB].double()
    return float((mine - theirs).abs().max() / theirs.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_steps_give_what_the_whole_text_gives(case: str, compiled: bool, dtype: torch.dtype, allowed: float) -> None:
    if case == "experts" and dtype == torch.bfloat16:
        pytest.skip("a rounding may send a token to another expert")
    model = gpt(dtype, **CASES[case])
    if compiled:
        model.decoder.compile_decode_step()
    texts, starts = drawn(2, LENGTH), torch.tensor([250, 40], device="cuda")
    whole = model(texts)
    decoder = GPTDecoder(model, 2, LENGTH)
    logits = decoder.prefill(texts[:, :250], starts)
    rows = torch.arange(2, device="cuda")
    for number in range(50):
        assert errors(logits, whole[rows, starts - 1 + number]) < allowed
        following = texts[rows, starts + number]
        with forbid_device_sync() if number > 5 else nullcontext():
            logits = decoder.step(following)


@torch.no_grad()
@pytest.mark.parametrize("case", [case for case in CASES if case != "experts"])
def test_fused_steps_give_what_the_whole_text_gives(case: str) -> None:
    model, text = gpt(torch.bfloat16, **CASES[case]), drawn(1, LENGTH)
    whole, decoder = model(text)[0], GPTDecoder(model, 1, LENGTH)
    assert decoder._fused
    logits = decoder.prefill(text[:, :250], torch.tensor([250], device="cuda"))
    for place in range(250, LENGTH):
        assert errors(logits[0], whole[place - 1]) < 5e-2
        with forbid_device_sync() if place > 255 else nullcontext():
            logits = decoder.step(text[:, place])


@torch.no_grad()
@pytest.mark.parametrize("case", [case for case in CASES if case != "experts"])
def test_programmatic_dependent_launch_changes_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled tokens of a CUDA graph: a kernel that reads before the previous one has written would give others."""
    model, prompt, texts = gpt(torch.bfloat16, **CASES[case]), drawn(1, 9)[0].tolist(), []
    for pdl in (True, True, False):
        if not pdl:
            for module in (decode, decode_linear):
                monkeypatch.setattr(module, "pdl_options", lambda _: {"PDL": False})
        loop = DecodeLoop(
            GPTDecoder(model, 1, LENGTH), SamplingParams(0.7), LENGTH - 9, vocab_size=len(model.output_weight),
            device=torch.device("cuda"), autocast=nullcontext, cuda_graph=True,
        )  # fmt: skip
        texts.append(list(loop.generate([prompt], [0])))
    assert texts[0] == texts[1] == texts[2]


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
def test_a_t5_writes_what_the_whole_text_gives(compiled: bool) -> None:
    stack = SMALL | {"position_embedding_type": "relative"}
    keys = T5Keys.model_validate(
        {"encoder": stack, "decoder": stack | {"relative_position_bias_self_attention_only": False}, "seq_length": 200}
        | {"compile": False}
    )
    model = built(keys, BatchSpec(seq_length=200, decoder_seq_length=60), torch.float32)
    assert isinstance(model, T5)
    if compiled:
        model.decoder.compile_decode_step()
    read, written, lengths = drawn(2, 150), drawn(4, 40), (150, 33)
    decoder = T5Decoder(model, 4, 40, 150, rows_per_encoding=2)
    decoder.prefill(read, torch.tensor(lengths, device="cuda"))
    whole = [model(read[row // 2, : lengths[row // 2]][None], written[row : row + 1])[0] for row in range(4)]
    for place in range(40):
        with forbid_device_sync() if place > 5 else nullcontext():
            logits = decoder.step(written[:, place])
        assert errors(logits, torch.stack([one[place] for one in whole])) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", ["rope", "window", "experts"])
def test_a_recording_writes_what_the_steps_write(case: str, compiled: bool) -> None:
    """Two batches one after the other through one recording, whose second finds nothing of the first."""
    model = gpt(torch.float32, **CASES[case])
    if compiled:
        model.decoder.compile_decode_step()
    prompts = [drawn(2, 9 + number)[1].tolist() for number in range(4)]
    texts = []
    for recorded in (False, True):
        loop = DecodeLoop(
            GPTDecoder(model, 2, 100), SamplingParams(0.7, 50), 60, vocab_size=len(model.output_weight),
            device=torch.device("cuda"), autocast=nullcontext, cuda_graph=recorded,
        )  # fmt: skip
        texts.append([list(loop.generate(prompts[first : first + 2], [first, 7])) for first in (0, 2)])
    assert texts[0] == texts[1]
