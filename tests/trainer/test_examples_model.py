"""Users' own activations, position biases, blocks and weight maps: their examples, and twins of built-in ones."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_builder import build_gpt
from hf_folders import random_model, save
from run_metrics import logged
from safetensors.torch import load_file
from tiers import extra, full_only
from torch import Tensor

import stoker
from stoker.kernels.attention.flags import AttentionFlags
from stoker.models.config.gpt import GPTKeys
from stoker.models.config.hf_names import HF_ARCHITECTURES
from stoker.models.hf.architectures import ARCHITECTURES
from stoker.models.hf.gpt2 import GPT2
from stoker.models.model_cost import count_parameters
from stoker.trainer.cli.main import main
from stoker.trainer.config.component_keys import component_sources

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = {
    "trainer": "cpu", "trainer.max_steps": 3, "trainer.log_every_n_steps": 1, "trainer.val_check_interval": 3,
    "trainer.limit_val_batches": 1, "trainer.enable_model_summary": False, "model.data.data_impl": "mock",
    "model.micro_batch_size": 2, "model.global_batch_size": 4,
}  # fmt: skip
STACK = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "hidden_dropout": 0.1}
GPT = {"model": "gpt_tiny", "model.encoder_seq_length": 16, **{f"model.{name}": value for name, value in STACK.items()}}
BERT = {**GPT, "model": "bert_tiny"}
T5 = {
    "model": "t5_tiny", "model.seq_length": 16, "model.data.seq_length_dec": 8,
    "model.encoder.openai_gelu": False, "model.decoder.openai_gelu": False,
    **{f"model.{stack}.{name}": value for stack in ("encoder", "decoder") for name, value in STACK.items()},
}  # fmt: skip
MOE = {**GPT, "model.num_moe_experts": 4, "model.moe_router_topk": 2, "model.moe_shared_expert_intermediate_size": 16}
AGAIN = "model.activations_checkpoint"


@pytest.fixture
def here(tmp_path: Path, own_components: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for path in EXAMPLES.glob("*/*.py"):  # to be imported anew
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return tmp_path


def run(verb: str, *arguments: str, **keys: Any) -> int:
    return main([verb, *arguments, *(f"{name}={value}" for name, value in keys.items())])


def train(name: str, keys: dict[str, Any]) -> tuple[dict[str, Tensor], list[float]]:
    """Return the weights after three steps, and the losses of all steps and of the validation."""
    assert run("train", **{**SMALL, **keys, "exp_manager.explicit_log_dir": name}) == 0
    (saved,) = (path for path in Path(name, "checkpoints/step-3").glob("*.safetensors") if path.stem != "optimizer")
    weights = load_file(saved)
    return weights, logged(Path(name), "loss", "val_loss", "grad_norm")


@pytest.mark.parametrize(
    ("base", "keys"),
    [
        (MOE, {"activation": ("swiglu", "own_silu-glu")}),
        (GPT, {"transformer_block_type": ("pre_ln", "own_pre_ln")}),
        (T5, {"transformer_block_type": ("pre_ln", "own_pre_ln"), "activation": ("geglu", "own_gelu-glu")}),
        *extra(
            (GPT, {"activation": ("gelu", "own_gelu")}),
            (
                {**GPT, f"{AGAIN}_modules": "[mlp_activation,core_attention]"},
                {"activation": ("swiglu", "own_silu-glu")},
            ),
            ({**MOE, f"{AGAIN}_modules": "[moe]"}, {"transformer_block_type": ("pre_ln", "own_pre_ln")}),
            ({**GPT, "trainer.precision": "bf16-mixed"}, {"activation": ("gelu", "own_gelu")}),
            ({**MOE, "model.moe_grouped_gemm": False}, {"activation": ("gelu", "own_gelu")}),
            (BERT, {"transformer_block_type": ("pre_ln", "own_pre_ln")}),
            (
                {**T5, f"{AGAIN}_granularity": "full", f"{AGAIN}_method": "uniform", f"{AGAIN}_num_layers": 1},
                {"transformer_block_type": ("pre_ln", "own_pre_ln")},
            ),
            ({**GPT, "model.peft.peft_scheme": "lora"}, {"transformer_block_type": ("pre_ln", "own_pre_ln")}),
            ({**GPT, "model.peft.peft_scheme": "adapter"}, {"transformer_block_type": ("pre_ln", "own_pre_ln")}),
        ),
    ],
    ids=lambda value: value.get("model", "") if "model" in value else ",".join(value),
)
def test_an_own_activation_or_block_trains_to_the_bits_of_the_built_in_one(
    here: Path, base: dict[str, Any], keys: dict[str, tuple[str, str]]
) -> None:
    def keys_of(own: bool) -> dict[str, Any]:
        blocks = ("model.encoder.", "model.decoder.") if base["model"] == "t5_tiny" else ("model.",)
        return {f"{block}{name}": values[own] for block in blocks for name, values in keys.items()}

    built_in, own = (train(f"run_{own}", {**base, **keys_of(own)}) for own in (False, True))
    assert own[1] == built_in[1]
    assert own[0].keys() == built_in[0].keys()
    assert all(torch.equal(tensor, built_in[0][name]) for name, tensor in own[0].items())


@pytest.mark.parametrize("base", [GPT, *extra(T5, BERT)], ids=lambda base: base["model"])
@pytest.mark.parametrize("kind", ["kerple", *extra("alibi")])
def test_an_own_bias_is_that_of_the_built_in_one(
    here: Path, capsys: pytest.CaptureFixture[str], base: dict[str, Any], kind: str
) -> None:
    """In fp64: losses, all weights after three steps, which have the gradients in them, and what is generated."""
    blocks = ("model.encoder.", "model.decoder.") if base is T5 else ("model.",)

    def of(name: str) -> tuple[dict[str, Tensor], list[float], str]:
        keys = {f"{block}position_embedding_type": name for block in blocks}
        weights, losses = train(name, {**base, **keys, "trainer.precision": 64, "model.attention_dropout": 0.1}
                                if base is not T5 else {**base, **keys, "trainer.precision": 64})  # fmt: skip
        written = ""
        if base is not BERT:
            capsys.readouterr()
            assert run("generate", name, "--prompt", "ab", "--max-new-tokens", "12", "--temperature", "0") == 0
            written = capsys.readouterr().out
        return (
            {path.replace(".score_positions.bias.", ".score_positions."): w for path, w in weights.items()},
            losses,
            written,
        )

    built_in, own = of(kind), of(f"own_{kind}")
    assert own[0].keys() == built_in[0].keys()
    assert any("score_positions" in name for name in own[0]) == (kind == "kerple")
    for name, tensor in own[0].items():
        torch.testing.assert_close(tensor, built_in[0][name], rtol=0, atol=1e-12)
    assert own[1] == pytest.approx(built_in[1], rel=1e-12)
    assert own[2] == built_in[2]


def test_the_weight_map_of_the_example_goes_both_ways(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "weight_map"))
    imports, theirs = ("--import", "my_gpt"), EXAMPLES / "weight_map" / "my_gpt_tiny"
    assert run("convert", *imports, str(theirs), "ours", "--tokenizer", "byte-level") == 0
    assert run("convert", *imports, "ours", "back", "--to", "hf", "--model-type", "my_gpt") == 0
    assert json.loads((here / "back/config.json").read_text())["architectures"] == ["MyGPTForCausalLM"]
    weights, back = (load_file(folder / "model.safetensors") for folder in (theirs, here / "back"))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())


@full_only
def test_a_weight_map_written_for_gpt2_gives_what_the_built_in_one_gives(here: Path) -> None:
    @stoker.register("weight_map", "OurGPT2")
    def our_gpt2() -> Any:
        return replace(GPT2, name="OurGPT2", model_type="our_gpt2", aliases=())

    theirs = save(random_model("gpt2"), here / "theirs")
    assert run("convert", "theirs", "built_in", "--tokenizer", "byte-level") == 0
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(config | {"architectures": ["OurGPT2"], "model_type": "our_gpt2"}))
    assert run("convert", "theirs", "own", "--tokenizer", "byte-level") == 0
    weights = "checkpoints/step-0/model.safetensors"
    assert (here / "own" / weights).read_bytes() == (here / "built_in" / weights).read_bytes()
    assert run("convert", "own", "back", "--model-type", "our_gpt2") == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (theirs, here / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_the_list_of_built_in_architectures_is_whole() -> None:
    assert set(HF_ARCHITECTURES) == {architecture.name for architecture in ARCHITECTURES}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["model.activation=own_geluu"],
            ["(own_gelu, own_mish, own_silu)", "own_gelu?", "--import"],
        ),
        (["model=t5_tiny", "model.decoder.transformer_block_type=no"], ["registered `block` (own_pre_ln)", "--import"]),
        (
            ["model.position_embedding_type=own_alib"],
            ["`attention_bias` (own_alibi, own_kerple)", "own_alibi?"],
        ),
        (["model.activation=own_gelu", "model.openai_gelu=true"], ["cannot be combined with `activation` (own_gelu)"]),
        (
            ["model.transformer_block_type=own_pre_ln", "model.tensor_model_parallel_size=2", "trainer.devices=2"],
            ["(2) is not supported with a `transformer_block_type` of your own (own_pre_ln)"],
        ),
        (
            ["model.transformer_block_type=own_pre_ln", "model.activations_checkpoint_modules=[norm]"],
            ["`norm` is not supported with a `transformer_block_type` of your own (own_pre_ln)"],
        ),
        (
            ["model=t5_tiny", "model.decoder.transformer_block_type=own_crossless"],
            ["`decoder.transformer_block_type` (own_crossless) has no cross-attention"],
        ),
    ],
)
def test_what_is_not_supported_is_refused_in_a_line(
    here: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], says: list[str]
) -> None:
    stoker.register("block", "own_crossless")(stoker.Block) if "own_crossless" in overrides[-1] else None
    assert main(["config", *overrides]) == 2
    found = " ".join(capsys.readouterr().err.split())
    assert all(part in found for part in says), found


def test_the_plan_says_what_it_does_not_know_of_a_block(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", **GPT, **{"model.transformer_block_type": "own_pre_ln"}) == 0
    assert "note: `transformer_block_type` (own_pre_ln) is your own" in capsys.readouterr().out


class Twice(stoker.Block):
    def run(self, hidden: Tensor, branches: stoker.Branches) -> Tensor:
        return branches.attention(branches.attention(hidden))


class Narrow(torch.nn.Module):
    def __init__(self, num_heads: int) -> None:
        super().__init__()

    def forward(self, distances: Tensor) -> Tensor:
        return distances[None] * 1.0


def halve(inputs: Tensor) -> Tensor:
    return inputs.half()


def fail(inputs: Tensor) -> Tensor:
    raise RuntimeError("mine")


@pytest.mark.parametrize(
    ("kind", "key", "component", "says"),
    [
        (
            "block",
            "transformer_block_type",
            Twice,
            "must call each branch once, but called attention, cross_attention ",
        ),
        ("block", "transformer_block_type", Narrow, "the block mine must be a subclass of stoker.Block"),
        (
            "attention_bias",
            "position_embedding_type",
            Narrow,
            "must return (4, 31), (heads, distances), but returned (1,",
        ),
        (
            "activation",
            "activation",
            halve,
            "the activation mine must return (2, 16, 48) of torch.float32, as its input",
        ),
        ("activation", "activation", fail, f"error in a component of your own ({__file__}:"),
    ],
)
def test_a_faulty_component_is_the_users_error(
    here: Path, capsys: pytest.CaptureFixture[str], kind: Any, key: str, component: Any, says: str
) -> None:
    stoker.register(kind, "mine")(component)
    assert run("train", **SMALL, **GPT, **{f"model.{key}": "mine"}) in (1, 2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(("error in a component of your own", "the block mine"))
    assert says in line


class Scaled(stoker.Block):
    def __init__(self, *, norm: Any, **parts: Any) -> None:
        super().__init__(norm=norm, **parts)
        self.mlp_norm = None  # pyrefly: ignore[bad-assignment]
        self.scale = torch.nn.Parameter(torch.full((2,), 0.5))
        self.mixer = torch.nn.Linear(3, 2)
        self.register_buffer("tenth", torch.tensor(0.1, dtype=torch.float64))

    def run(self, hidden: Tensor, branches: stoker.Branches) -> Tensor:
        hidden = branches.attention(self.attention_norm(hidden), add_to=hidden) * self.scale.sum()
        return branches.mlp(hidden, add_to=hidden) + self.mixer(hidden[..., :3]).mean() * self.tenth


def test_what_a_block_adds_begins_as_its_constructor_leaves_it(here: Path) -> None:
    stoker.register("block", "scaled")(Scaled)
    keys = GPTKeys(**STACK, encoder_seq_length=16, transformer_block_type="scaled", make_vocab_size_divisible_by=1)
    arguments: dict[str, Any] = {"device": "cpu", "flags": AttentionFlags(), "micro_batch_size": 1, "vocab_size": 11}
    state = torch.random.get_rng_state()
    model, again = (build_gpt(keys, dtype=torch.float32, **arguments) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    layers: list[Any] = [model.decoder.layers.get_submodule(str(number)) for number in range(2)]
    first, second = layers
    assert first.scale.tolist() == [0.5, 0.5]
    assert float(first.tenth) == pytest.approx(0.1)
    assert 0 < first.mixer.weight.abs().max() <= 3**-0.5  # PyTorch's default
    assert not torch.equal(first.mixer.weight, second.mixer.weight)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert count_parameters(keys, 11) == sum(parameter.numel() for parameter in model.parameters())


@full_only
@pytest.mark.usefixtures("own_components")
def test_compiled_layers_trace_own_components_to_the_bits_of_the_built_in_ones() -> None:
    """As a full graph, split into forward and backward as on a GPU, but run by plain operations."""

    def passes(block: str, activation: str) -> list[Tensor]:
        keys = GPTKeys(**STACK, encoder_seq_length=16, transformer_block_type=block, activation=activation)
        arguments: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "vocab_size": 128, "micro_batch_size": 2}
        model = build_gpt(keys, flags=AttentionFlags(), **arguments).train()
        for layer in model.decoder.layers:
            layer.compile(backend="aot_eager", fullgraph=True, dynamic=False)
        torch.manual_seed(0)
        logits = model(torch.randint(128, (2, 16)))
        logits.square().mean().backward()
        return [logits, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    built_in, own = passes("pre_ln", "swiglu"), passes("own_pre_ln", "own_silu-glu")
    assert len(own) == len(built_in) > 10
    assert all(torch.isfinite(a).all() and torch.equal(a, b) for a, b in zip(own, built_in, strict=True))


@pytest.mark.usefixtures("own_components")
def test_records_say_where_components_of_layers_come_from() -> None:
    keys = ["model=gpt_tiny", "model.activation=halved-glu"]
    stoker.register("activation", "halved")(halve)
    assert component_sources(stoker.load_config(keys).root) == {"model.activation": f"{__name__}:halve"}
    plain = ["model.encoder.openai_gelu=False", "model.decoder.openai_gelu=False", "model.decoder.activation=gelu"]
    t5 = stoker.load_config(["model=t5_tiny", *plain, "model.encoder.activation=halved"])
    assert component_sources(t5.root) == {"model.encoder.activation": f"{__name__}:halve"}
