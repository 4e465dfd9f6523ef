"""`scripts/bench/gpt2_peers.py`: the plain GPT-2 is transformers' GPT-2, as large as stoker's."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from config_helpers import load
from resolved import batch_spec
from torch.nn.attention import SDPBackend
from transformers import GPT2Config, GPT2LMHeadModel

from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.build import build_model, num_parameters

BENCH = Path(__file__).resolve().parents[1] / "scripts" / "bench"
NAMES = {"norm1": "ln_1", "qkv": "attn.c_attn", "output": "attn.c_proj", "norm2": "ln_2", "up": "mlp.c_fc"}
NAMES |= {"down": "mlp.c_proj"}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import training_step

    return training_step


def test_plain_gpt2_is_that_of_transformers(bench: ModuleType) -> None:
    shape = bench.Shape(layers=2, hidden=32, heads=4, groups=4, ffn=128, vocab=64, sequence=16, micro_batch=2)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # biases and norms too
    found = theirs.transformer.state_dict()
    weights = {"embedding.weight": found["wte.weight"], "positions": found["wpe.weight"]}
    weights |= {f"norm.{kind}": found[f"ln_f.{kind}"] for kind in ("weight", "bias")}
    for block in range(2):
        for ours, name in NAMES.items():
            for kind in ("weight", "bias"):
                weights[f"blocks.{block}.{ours}.{kind}"] = found[f"h.{block}.{name}.{kind}"].t()
    model = bench.gpt2_peers.PlainGPT2(shape, SDPBackend.MATH)
    model.double().load_state_dict(weights)
    tokens, labels = torch.randint(0, 64, (2, 2, 16), generator=torch.Generator().manual_seed(0))
    expected = F.cross_entropy(theirs(input_ids=tokens).logits.float().flatten(0, 1), labels.flatten())
    torch.testing.assert_close(model(tokens, labels), expected, rtol=1e-6, atol=0)


def test_plain_gpt2_has_as_many_parameters_as_stokers(bench: ModuleType) -> None:
    shape, overrides, _ = bench.MODELS["gpt2"]
    with torch.device("meta"):
        model = bench.gpt2_peers.PlainGPT2(shape, SDPBackend.MATH)
    root = load(*overrides).root
    ours = build_model(
        root.model,
        vocab_size=root.model.override_vocab_size or 0,
        device="meta",
        dtype=torch.bfloat16,
        flags=AttentionFlags(),
        micro_batch_size=shape.micro_batch,
        batch_spec=batch_spec(root),
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(ours) == 124_475_904


def test_main_weights_are_updated_as_fp32_weights(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model: model)
    shape = bench.Shape(layers=1, hidden=16, heads=2, groups=2, ffn=32, vocab=32, sequence=8, micro_batch=2)
    model = bench.gpt2_peers.PlainGPT2(shape, SDPBackend.MATH).bfloat16()
    tokens, labels = torch.randint(0, 32, (2, 2, 8), generator=torch.Generator().manual_seed(0))
    model(tokens, labels).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    mains = [torch.nn.Parameter(each.detach().float()) for each in model.parameters()]
    for main, weight in zip(mains, model.parameters(), strict=True):
        assert weight.grad is not None
        main.grad = weight.grad.float()
    bench.peers.build_optimizer(torch.nn.ParameterList(mains)).step()
    model.zero_grad()
    bench.peers.plain_step(model, "main")(tokens, labels)
    for main, weight in zip(mains, model.parameters(), strict=True):
        assert torch.equal(weight, main.bfloat16())
