"""`stoker explain attention`: the dispatcher's table for any device, from any machine."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resolved import batch_spec
from tiers import extra
from tiny_run import tiny_config

from stoker.kernels.attention.backend_support import BACKENDS
from stoker.kernels.attention.dispatch import NoBackendError
from stoker.models.build import LanguageModel, build_model
from stoker.models.config.batch_shape import BatchSpec
from stoker.models.dispatch.attention_calls import CallKind
from stoker.trainer.cli.main import main
from stoker.trainer.config.load import load_run_config
from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.device.determinism import attention_flags
from stoker.trainer.plan.attention_report import ARCHITECTURES
from stoker.trainer.train import run_training

KINDS: list[CallKind] = ["training", "evaluation", "generation"]


@pytest.fixture(autouse=True)
def _no_flags_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
        monkeypatch.delenv(name, raising=False)


def explain(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["explain", "attention", "--json", *words]) == code
    return json.loads(capsys.readouterr().out)


def backends(answer: dict[str, Any]) -> list[str | None]:
    return [kind["backend"] for kind in answer["kinds"]]


@pytest.mark.parametrize("words", [["--arch", "sm90"], ["model=t5_tiny", "--arch", "sm90"]])
def test_the_topic_may_be_left_out(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *words]) == 0
    short = capsys.readouterr().out
    assert main(["explain", "attention", *words]) == 0
    assert short == capsys.readouterr().out
    assert ("cross training" in short) == ("model=t5_tiny" in words)


def test_without_a_topic_it_lists_topics(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    assert "stoker explain attention" in capsys.readouterr().out
    assert main(["explain", "atention"]) == 2
    assert "did you mean `stoker explain attention`?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arch", "expected", "word"),
    [
        ("sm75", ["sdpa_efficient"] * 3, "fp32"),
        ("sm80", ["sdpa_flash"] * 3, "sm_80, bf16"),
        ("sm86", ["sdpa_flash"] * 3, "sm_86, bf16"),
        ("sm89", ["sdpa_flash"] * 3, "sm_89, bf16"),
        ("sm90", ["triton", "triton", "sdpa_flash"], "sm_90, bf16"),
        ("sm100", ["sdpa_cudnn", "sdpa_cudnn", "sdpa_flash"], "sm_100, bf16"),
        ("sm120", ["sdpa_cudnn", "sdpa_cudnn", "sdpa_flash"], "sm_120, bf16"),
        ("cpu", ["sdpa_flash"] * 3, "cpu, fp32"),
    ],
)
def test_every_architecture_from_a_machine_without_it(
    capsys: pytest.CaptureFixture[str], arch: str, expected: list[str], word: str
) -> None:
    answer = explain(capsys, "--arch", arch, "model=gpt_125m", "model.transformer_engine=False")
    assert backends(answer) == expected
    assert answer["where"].startswith(f"for {arch}, assuming PyTorch ")
    assert [kind["kind"] for kind in answer["kinds"]] == KINDS
    for kind in answer["kinds"]:
        assert word in kind["call"]
        assert {row["backend"] for row in kind["rows"]} == {backend.name for backend in BACKENDS}
        (chosen,) = (row for row in kind["rows"] if row["backend"] == kind["backend"])
        assert chosen["reason"].startswith("chosen (")
        assert all(row["reason"] for row in kind["rows"])
    assert set(ARCHITECTURES) == {"sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120", "cpu"}


@pytest.mark.parametrize(
    ("words", "where", "how"),
    [
        (["model=gpt_125m", "--arch", "sm90"], {"generation"}, "the decode kernel"),
        (["model=gpt_125m", "--arch", "cpu"], {"generation"}, "plain torch"),
        (["model=gpt_125m", "--arch", "sm90", "trainer.precision=64"], {"generation"}, "plain torch"),
        (["model=t5_base", "--arch", "sm90"], {"decoder generation", "cross generation"}, "the decode kernel"),
        (["model=bert_base", "--arch", "sm90"], set(), ""),
    ],
)
def test_it_tells_what_computes_the_tokens_after_a_prompt(
    capsys: pytest.CaptureFixture[str], words: list[str], where: set[str], how: str
) -> None:
    told = {
        kind["kind"]: note for kind in explain(capsys, *words)["kinds"] for note in kind["notes"] if "prefill" in note
    }
    assert told.keys() == where
    assert all(how in note for note in told.values())


def test_keys_and_flags_act(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = ("--arch", "sm90", "model=gpt_125m")
    te = explain(capsys, *hopper, "model.transformer_engine=True")
    assert backends(te)[0] == "te_fused"
    assert "TransformerEngine 2." in te["where"]
    packed = explain(capsys, *hopper, "model.data.reset_attention_mask=True", "data=text", "model.data.path=README.md")
    assert backends(packed) == ["triton", "triton", "sdpa_flash"]
    assert "packed documents" in packed["kinds"][0]["call"]
    for wish in ("True", "warn"):
        exact = explain(capsys, *hopper, f"trainer.deterministic={wish}", "model.use_flash_attention=True")
        assert backends(exact) == ["triton", "triton", "sdpa_flash"]  # torch is deterministic in such a run
    by_yaml = explain(capsys, *hopper, "+env_vars.NVTE_FUSED_ATTN=0")
    assert backends(by_yaml) == ["triton", "triton", "sdpa_flash"]
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    by_environment = explain(capsys, *hopper)
    assert backends(by_environment) == ["sdpa_cudnn"] * 3
    assert "cuDNN stays" in by_environment["flags"][0]
    monkeypatch.setenv("NVTE_FLASH_ATTN", "off")
    assert main(["explain", "attention", *hopper]) == 2
    assert "`NVTE_FLASH_ATTN` (off) must be 0 or 1" in capsys.readouterr().err


def test_nothing_left_is_exit_2_with_every_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    words = ("--arch", "cpu", "model.use_flash_attention=True", "model.attention_dropout=0.1")
    answer = explain(capsys, *words, code=2)
    assert backends(answer) == [None, "sdpa_flash", "sdpa_flash"]
    assert len(answer["kinds"][0]["rows"]) == len(BACKENDS)
    assert main(["explain", "attention", *words]) == 2
    shown = capsys.readouterr().out
    assert "training: no attention backend for cpu, fp32" in shown
    assert "not support dropout (0.1)" in shown


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "attention", "model=gpt_tiny", "trainer.accelerator=cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("attention of 4 layers on this machine, with PyTorch ")
    assert [line.split(":")[0] for line in lines if line[:1].islower() and ": " in line] == KINDS
    assert main(["explain", "attention", "model.hidden_sice=4"]) == 2


@pytest.mark.parametrize("level", ["0", "1"])
def test_a_run_prints_its_tables_when_asked(
    level: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in run.log in any case, with what the variables do not do."""
    monkeypatch.setenv("NVTE_DEBUG", "1")
    monkeypatch.setenv("NVTE_DEBUG_LEVEL", level)
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    run_training(tiny_config(tmp_path, trainer__max_steps=1))
    printed = "".join(capsys.readouterr())
    log = (tmp_path / "run.log").read_text()
    for words in ("removed by NVTE_FLASH_ATTN=0", "cuDNN stays", "16 x 16 tokens", "chosen ("):
        assert (words in printed) is (level == "1"), words
        assert words in log


# ---------------------------------------------------------------- on a GPU: what the profiler saw

MODULES = r"transformer_engine\..*\."
SIGNATURES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # kernels of the device, forward and backward, and what ran on the host, where kernels do not tell backends apart
    "sdpa_flash": ("flash_fwd", "flash_bwd", ("aten::_scaled_dot_product_flash_attention",)),
    "sdpa_efficient": ("fmha_cutlassF", "fmha_cutlassB", ("aten::_scaled_dot_product_efficient_attention",)),
    "sdpa_cudnn": ("cudnn", "cudnn.*(bprop|bwd)", ("aten::_scaled_dot_product_cudnn_attention",)),
    "sdpa_math": ("(?i)softmax", "(?i)softmax", ("aten::_scaled_dot_product_attention_math",)),
    "triton": ("^(forward_kernel|hopper_)", "^(dkdv_kernel|hopper_)", ("stoker::flash_attention|^FlashAttention$",)),
    "triton_atomic": ("^hopper_forward", "^hopper_fused_backward", ("stoker::flash_attention|^FlashAttention$",)),
    "lse_first": ("^(lse_kernel|hopper_lse)", "^dkdv_kernel", ("stoker::lse_first_attention",)),
    "flash_attn": ("flash_fwd", "flash_bwd", ("flash_attn::_flash_attn",)),
    "te_fused": ("cudnn", "cudnn.*(bprop|bwd)", ("FusedAttnFunc", rf"{MODULES}FusedAttention$")),
    "te_flash": ("flash", "flash", (rf"{MODULES}FlashAttention$",)),
    "te_unfused": ("(?i)softmax", "(?i)softmax", ("aten::baddbmm", rf"{MODULES}UnfusedDotProductAttention$")),
    "unfused": (
        "(?i)softmax|^_forward_kernel",
        "(?i)softmax|^_backward_kernel",
        ("aten::baddbmm", "stoker::scaled_masked_softmax|aten::_softmax"),
    ),
}
LOOK_ALIKES = {
    "te_unfused": {"unfused"},
    "te_flash": {"flash_attn"},
    "triton_atomic": {"triton"},
}  # operations on the way
FAMILIES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
ENVIRONMENTS: list[dict[str, str]] = [
    dict(zip((*FAMILIES, "NVTE_ALLOW_NONDETERMINISTIC_ALGO"), values, strict=True))
    for values in itertools.product("10", repeat=4)
]
ENVIRONMENTS += [{}, *[{f"NVTE_FLASH_ATTN_V{v}": "0"} for v in (2, 3, 4)], {"NVTE_MASKED_SOFTMAX_FUSION": "0"}]
PACKED: dict[str, tuple[str, ...]] = {
    "gpt": ("model.data.reset_attention_mask=True", "data=text", "model.data.path=README.md"),
    "bert": ("model.data.reset_attention_mask=True", "data=text", "model.data.path=README.md"),
    "t5": ("data=docstring", "model.data.packed_sequence=True"),
}
SMALL: dict[str, tuple[str, ...]] = {
    "gpt": ("model.num_layers=1", "model.encoder_seq_length=256", "model.max_position_embeddings=null"),
    "bert": ("model.num_layers=1", "model.encoder_seq_length=256", "model.max_position_embeddings=null"),
    "t5": (
        *("model.encoder.num_layers=1", "model.decoder.num_layers=1", "model.seq_length=256"),
        *("model.data.seq_length_dec=128", "model.encoder.moe_frequency=1"),  # the only layer has experts, if any has
    ),
}
STACKS = {"gpt": ("",), "bert": ("",), "t5": ("encoder.", "decoder.")}


def wishes(family: str, *, by_name: bool) -> list[tuple[str, ...]]:
    """Overrides of one run each, the same for every stack: the two switches, and where asked for every backend."""
    chosen = [
        (f"use_flash_attention={flash}", f"transformer_engine={te}")
        for flash, te in itertools.product(("null", "True", "False"), repeat=2)
    ]
    if by_name:
        chosen += [(f"attention_backend={name}",) for name in ("flash", "fused", "unfused", *SIGNATURES)]
    return [
        (*(f"model.{stack}{wish}" for stack in STACKS[family] for wish in words), *packed)
        for words, packed in itertools.product(chosen, (("data=mock",), PACKED[family]))
    ]


_RUN: set[tuple[object, ...]] = set()  # of this process
PRESETS = sorted(file.stem for file in (Path(__file__).parents[2] / "conf" / "model").glob("*.yaml"))


def seen_by_the_profiler(run: Callable[[], object]) -> tuple[set[str], set[str]]:
    """Kernels of the device, and operations and modules of the host, in a call."""
    from torch.nn.modules.module import register_module_forward_hook
    from torch.profiler import ProfilerActivity, profile

    run()  # compiles and plans
    modules: set[str] = set()
    hook = register_module_forward_hook(
        lambda module, *_: modules.add(f"{type(module).__module__}.{type(module).__qualname__}")
    )
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    hook.remove()
    events = profiler.events()
    assert events is not None
    on_device = {event.name for event in events if str(event.device_type).endswith("CUDA")}
    return on_device, ({event.name for event in events} - on_device) | modules


def matching(kernels: set[str], host: set[str], training: bool) -> set[str]:
    """The backends whose signature is all there."""

    def there(pattern: str, names: set[str]) -> bool:
        return any(re.search(pattern, name) for name in names)

    return {
        backend
        for backend, (forward, backward, ran) in SIGNATURES.items()
        if there(forward, kernels)
        and (there(backward, kernels) or not training)
        and all(there(pattern, host) for pattern in ran)
    }


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*[Pp]rofiler")
@pytest.mark.parametrize("variables", ENVIRONMENTS, ids=lambda v: ",".join(f"{n[5:]}={x}" for n, x in v.items()) or "-")
@pytest.mark.parametrize("preset", PRESETS)
def test_the_profiler_saw_the_backend_that_explain_names(
    preset: str, variables: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer of each stack of each preset, every kind of call, under every combination of switches and keys.

    A model that makes the same call with the same backend is run once: in each environment where TransformerEngine,
    which reads the flags for itself, is in it, else in each that differs in more than the families allowed.
    """
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    family = load_run_config(None, None, [f"model={preset}"]).root.model.family
    for words in wishes(family, by_name=len(variables) < 2):
        sizes = ("model.micro_batch_size=2", "model.global_batch_size=2", "model.compile=False")
        shrunk = [f"model={preset}", *SMALL[family], *sizes, *words]
        code = main(["explain", "attention", "--json", *shrunk])
        answer = json.loads(capsys.readouterr().out)["kinds"]
        assert code == (0 if all(row["backend"] for row in answer) else 2)
        root = load_run_config(None, None, shrunk).root
        for kind in KINDS:
            named = {row["kind"]: row["backend"] for row in answer if row["kind"].endswith(kind)}
            assert len(named) == {"gpt": 1, "bert": 1, "t5": 3}[family]
            own_reader = any(str(backend).startswith("te_") for backend in named.values())
            flags = {name: value for name, value in variables.items() if own_reader or name not in FAMILIES}
            case = preset, kind, *named.values(), batch_spec(root).packed, *flags.items()
            if case not in _RUN:
                _RUN.add(case)
                check_one_kind(root, kind, named, words)


def check_one_kind(root: RootBlock, kind: CallKind, named: dict[str, str | None], words: tuple[str, ...]) -> None:
    """Build the model as a run does, run it, and compare what was seen with the names: attention -> backend."""
    form, flags = batch_spec(root), attention_flags(root.trainer.deterministic)

    def build() -> LanguageModel:
        return build_model(
            root.model, vocab_size=200, device="cuda", dtype=torch.bfloat16, flags=flags,
            micro_batch_size=2, kinds=[kind], batch_spec=form,
        )  # fmt: skip

    if None in named.values():
        with pytest.raises(NoBackendError):
            build()
        return
    training = kind == "training"
    model = build().train(training)
    expected = {str(backend) for backend in named.values()}
    assert {str(label): decision.backend for label, decision in model.attention_decisions.items()} == named
    fields = random_fields(form, generation=kind == "generation")

    def run() -> None:
        with torch.set_grad_enabled(training):
            loss = model.batch_loss(fields, 1.0)
        if training:
            loss.backward()

    kernels, host = seen_by_the_profiler(run)
    seen = matching(kernels, host, training)
    alike = set().union(*(LOOK_ALIKES.get(name, set()) for name in expected)) - expected
    assert seen - alike == expected, (words, kind, named, seen, sorted(kernels), sorted(host))


def random_fields(form: BatchSpec, *, generation: bool) -> dict[str, torch.Tensor]:
    """Two samples of a form; for generation, which has no form, shorter and not packed."""

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(0, 200, (2, 2 * length // 3 if generation else length), device="cuda")

    def documents(of: torch.Tensor) -> torch.Tensor:
        return torch.arange(of.shape[1], device="cuda", dtype=torch.int32).div(50, rounding_mode="floor").expand(2, -1)

    first = tokens(form.seq_length)
    packed = form.packed and not generation
    if not form.decoder_seq_length:
        return {"tokens": first, "labels": first} | ({"documents": documents(first)} if packed else {})
    second = tokens(form.decoder_seq_length)
    fields = {"encoder_tokens": first, "decoder_tokens": second, "labels": second}
    if packed:
        fields |= {"encoder_documents": documents(first), "decoder_documents": documents(second)}
    return fields


def test_the_calls_are_those_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = ["trainer.devices=4", "model.tensor_model_parallel_size=2", "model.context_parallel_size=2"]
    given = ["explain", "attention", "model=llama_1b", "--arch", "sm90", *ranks, "model.global_batch_size=8"]
    assert main([*given, "model.cp_comm_type=a2a"]) == 0
    heads = capsys.readouterr().out
    assert "on each of 2 tensor-parallel and 2 context-parallel ranks" in heads
    assert "4 heads in 1 groups, head width 128, 4096 x 4096 tokens" in heads
    assert main(given) == 0
    assert "8 heads in 2 groups" in capsys.readouterr().out


def test_fp8_names_each_matrix_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    ends = ["model.first_last_layers_bf16=true", "model.num_layers_at_end_in_bf16=0"]
    words = ["experiment=moe_bench", "model.fp8=true", "model.fp8_recipe=rowwise", *ends]
    words += ["model.fp8_params=true", "--arch", "sm90", "--json"]
    assert main(["explain", "fp8", *words]) == 0
    answer = json.loads(capsys.readouterr().out)
    found = {(row["name"], row["is_fp8"]): row for row in answer["matrices"]}
    layers = list(range(1, 16))
    assert found["decoder.layers.*.attention.qkv", True]["layers"] == layers
    kept = ", weights kept in fp8"
    assert f"{kept}, torch's" in found["decoder.layers.*.attention.qkv", True]["how"]
    assert found["decoder.layers.*.mlp.experts", True]["how"] == f"rowwise scaling, e4m3, gradients e5m2{kept}, Gluon"
    assert found["decoder.layers.*.mlp.experts", False]["how"] == "`model.first_last_layers_bf16`"
    assert found["decoder.layers.*.mlp.router", False]["layers"] == [0, *layers]
    assert {"head", "token_embedding"} <= {name for name, is_fp8 in found if not is_fp8}


def test_fp8_says_what_runs_through_transformer_engine(capsys: pytest.CaptureFixture[str]) -> None:
    te = ["explain", "fp8", "experiment=moe_bench", "model.fp8=true", "model.transformer_engine=true"]
    assert main([*te, "--arch", "sm90"]) == 0
    found = capsys.readouterr().out
    assert "qkv  layers 0-15: delayed scaling, e4m3, gradients e5m2, TransformerEngine (cuBLAS)\n" in found
    but = "(the input of fc2 has a scale for each row, the gradient of its activation that of a bound)"
    experts = f"mlp.experts  layers 0-15: tensorwise scaling, e4m3, gradients e5m2 {but}"
    assert f"{experts}, Gluon\n" in found
    for more in (["--arch", "sm89"], ["model.ffn_hidden_size=3600", "--arch", "sm90"]):
        assert main([*te[:4], *more]) == 0
        assert f"{experts}, Triton\n" in capsys.readouterr().out
    assert main([*te, "model.fp8_recipe=rowwise", "--arch", "sm90"]) == 0
    own = "torch's scaled matmul; TransformerEngine has no rowwise scaling\n"
    assert f"qkv  layers 0-15: rowwise scaling, e4m3, gradients e5m2, {own}" in capsys.readouterr().out
    assert main([*te, "--arch", "cpu"]) == 2
    assert "`fp8_recipe` (delayed) needs a GPU for TransformerEngine, and this is cpu" in capsys.readouterr().out


def test_attention_in_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    """Which layers, with what, and where not and why; its scales are delayed beside those of any recipe."""
    te = ["model=llama_1b", "model.fp8=true", "model.transformer_engine=true", "model.fp8_recipe=tensorwise"]
    asked = [*te, "model.fp8_dot_product_attention=true"]
    assert main(["explain", "fp8", *te, "--arch", "sm90"]) == 0
    assert "  no   attention: `model.fp8_dot_product_attention` is off" in capsys.readouterr().out
    assert main(["explain", "fp8", *asked, "model.first_last_layers_bf16=true", "--arch", "sm90"]) == 0
    found = capsys.readouterr().out
    assert "fp8  attention  layers 1-22: delayed scaling, e4m3, gradients e5m2, TransformerEngine (cuDNN)\n" in found
    assert "no   attention  layers 0, 23: `model.first_last_layers_bf16`" in found
    assert "qkv  layers 1-22: tensorwise scaling" in found
    assert main(["explain", "attention", *asked, "--arch", "sm90"]) == 0
    found = capsys.readouterr().out
    assert re.search(r"training: te_fused  \(cuda sm_90, .* causal, in fp8\)\n  yes te_fused", found)
    assert re.search(r"no  triton +flash +does not multiply in fp8", found)
    assert re.search(r"evaluation: te_fused  \(cuda sm_90, .* causal\)\n", found)
    refusal = "`fp8_dot_product_attention` (True) is not available in te_fused, its only backend: multiplies in fp8 on"
    assert main(["explain", "attention", *asked, "--arch", "sm89"]) == 2
    found = capsys.readouterr().out
    assert f"training: {refusal}" in found
    assert re.search(r"no  te_fused +fused +multiplies in fp8 on sm_90", found)
    assert main(["explain", "fp8", *asked, "--arch", "sm89"]) == 2
    found = capsys.readouterr().out
    assert refusal in found
    assert "no   attention  layers 0-23: not possible" in found


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.moe_dropout=0.1"], "experts have dropout (`moe_dropout`)"),
        *extra(
            (["model.bias=true"], "grouped fp8 matmuls add no bias (`bias`)"),
            (["model.fp8_wgrad=false"], "gradients of their weights would be in fp8 (`fp8_wgrad`)"),
            (["model.fp8=false"], "`model.fp8` is off"),
        ),
    ],
)
def test_fp8_says_why_experts_do_not(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "fp8", "experiment=moe_bench", "model.fp8=true", *words, "--arch", "sm90"]) == 0
    assert f"mlp.experts  layers 0-15: {says}" in capsys.readouterr().out


def test_a_card_without_fp8_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "fp8", "model=gpt_tiny", "model.fp8=true", "--arch", "sm80"]) == 2
    found = capsys.readouterr().out
    assert "needs a GPU of compute capability 8.9 or later" in found
    assert "layers" not in found  # of which none multiplies
