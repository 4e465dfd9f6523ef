"""No key of `model.peft` lies: each changes something that can be seen, or is refused, or warned of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from config_helpers import load, problems
from resolved import build_data, build_model
from tiers import looped
from tiny_run import tiny_config, tiny_document
from torch import Tensor

from stoker.models.build import LanguageModel
from stoker.models.config.peft import peft_slice
from stoker.models.gpt import GPT
from stoker.models.peft.apply import trainable_parameters
from stoker.trainer.config import dotted_paths
from stoker.trainer.config.resolved_run import resolve_run
from stoker.trainer.config.schema.key_index import schema_keys
from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.conversion.from_hf import build_meta_model
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer
from stoker.trainer.train import run_training

AT = "model.peft."
CPU = torch.device("cpu")
LORA = {AT + "peft_scheme": "lora"}
SHAKEN = {**LORA, AT + "lora_tuning.row_init_method": "normal"}
ADAPTER = {AT + "peft_scheme": "adapter"}
SHAKEN_ADAPTER = {**ADAPTER, AT + "adapter_tuning.row_init_method": "normal"}
PROMPT = {AT + "peft_scheme": "ptuning", "model.position_embedding_type": "none"}
Changes = dict[str, Any]


def root_of(changes: Changes) -> RootBlock:
    document = tiny_document(Path("unused"))
    for path, value in changes.items():
        dotted_paths.put(document, path, value)
    return RootBlock.model_validate(document)


def model_of(changes: Changes) -> LanguageModel:
    root = root_of({"model.num_layers": 2, "model.hidden_dropout": 0.0, "model.attention_dropout": 0.0, **changes})
    return build_model(root, build_data(root))


def trained(changes: Changes) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in trainable_parameters(model_of(changes)).items()}


def values(changes: Changes) -> list[Tensor]:
    return list(trainable_parameters(model_of(changes)).values())


def logits(changes: Changes) -> Tensor:
    torch.manual_seed(0)
    model = model_of(changes).eval()
    assert isinstance(model, GPT)
    return model(torch.arange(16)[None])


def training_logits(changes: Changes) -> Tensor:
    torch.manual_seed(0)
    model = model_of(changes).train()
    assert isinstance(model, GPT)
    return model(torch.arange(16)[None])


ROWS: list[tuple[str, Any, Any, Changes]] = [
    ("peft_scheme", "lora", trained, {}),
    ("peft_scheme", "adapter", trained, {}),
    ("peft_scheme", "ptuning", trained, {"model.position_embedding_type": "none"}),
    ("peft_scheme", "ia3", trained, {}),
    ("peft_scheme", "selective", trained, {AT + "selective_tuning.tunable_base_param_names": ["mlp"]}),
    ("lora_tuning.target_modules", ["mlp_fc1"], trained, LORA),
    ("lora_tuning.target_modules", ["mlp_fc2"], trained, LORA),
    ("lora_tuning.target_modules", ["attention_dense"], trained, LORA),
    ("lora_tuning.target_modules", ["attention"], trained, LORA),
    ("lora_tuning.target_modules", ["mlp"], trained, LORA),
    ("lora_tuning.target_modules", ["all"], trained, LORA),
    ("lora_tuning.adapter_dim", 3, trained, LORA),
    ("lora_tuning.alpha", 3.0, logits, SHAKEN),
    ("lora_tuning.adapter_dropout", 0.5, training_logits, SHAKEN),
    ("lora_tuning.column_init_method", "normal", values, LORA),
    ("lora_tuning.column_init_method", "kaiming", values, LORA),
    ("lora_tuning.column_init_method", "zero", values, LORA),
    ("lora_tuning.row_init_method", "normal", values, LORA),
    ("lora_tuning.row_init_method", "xavier", values, LORA),
    ("lora_tuning.row_init_method", "kaiming", values, LORA),
    ("lora_tuning.layer_selection", [2], trained, LORA),
    ("lora_tuning.variant", "nemo", trained, LORA),
    ("adapter_tuning.adapter_dim", 3, trained, ADAPTER),
    ("adapter_tuning.adapter_dropout", 0.5, training_logits, SHAKEN_ADAPTER),
    ("adapter_tuning.norm_position", "post", logits, SHAKEN_ADAPTER),
    ("adapter_tuning.norm_position", None, trained, ADAPTER),
    ("adapter_tuning.column_init_method", "normal", values, ADAPTER),
    ("adapter_tuning.row_init_method", "normal", values, ADAPTER),
    ("adapter_tuning.layer_selection", [1], trained, ADAPTER),
    ("p_tuning.virtual_tokens", 3, trained, PROMPT),
    ("p_tuning.bottleneck_dim", 3, trained, PROMPT),
    ("p_tuning.embedding_dim", 3, trained, PROMPT),
    ("p_tuning.init_std", 0.5, values, PROMPT),
    ("ia3_tuning.layer_selection", [2], trained, {AT + "peft_scheme": "ia3"}),
    ("selective_tuning.tunable_base_param_names", ["mlp"], trained, {AT + "peft_scheme": "selective"}),
]
BEFORE: Changes = {AT + "selective_tuning.tunable_base_param_names": ["norm"]}
ELSEWHERE = {
    "restore_from_path",  # `test_a_run_begins_with_an_adapter`
    "adapter_tuning.type",  # `test_two_names_of_one_function`
    "adapter_tuning.norm_type",
}


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, list):
        return all(map(torch.equal, ours, theirs))
    return ours == theirs


@pytest.mark.parametrize(("key", "value", "observe", "given"), ROWS, ids=[f"{row[0]}={row[1]}" for row in ROWS])
def test_the_key_acts(key: str, value: Any, observe: Any, given: Changes) -> None:
    path = AT + key
    before = {path: BEFORE[path]} if path in BEFORE else {}
    assert not same(observe({**before, **given}), observe({**given, path: value}))


def test_every_key_has_an_entry() -> None:
    keys = {path.removeprefix(AT) for path in schema_keys() if path.startswith(AT)}
    assert keys == {row[0] for row in ROWS} | ELSEWHERE
    tested = {(key, value) for key, value, *_ in ROWS if isinstance(value, str)}
    for path, key in schema_keys().items():
        name = path.removeprefix(AT)
        if path.startswith(AT) and name not in ELSEWHERE:
            missing = {choice for choice in key.choices if (name, choice) not in tested and choice != key.default}
            assert missing <= {"none", *(("xavier", "kaiming", "zero") if name.startswith("adapter") else ())}, path


def test_two_names_of_one_function() -> None:
    names = {"type": "linear_adapter", "norm_type": "layernorm"}
    plain = logits(SHAKEN_ADAPTER)
    for key, value in names.items():
        assert torch.equal(plain, logits({**SHAKEN_ADAPTER, f"{AT}adapter_tuning.{key}": value}))


def test_a_run_begins_with_an_adapter(tmp_path: Path) -> None:
    lora = {"model__peft__peft_scheme": "lora", "trainer__max_steps": 2}
    first = run_training(tiny_config(tmp_path / "first", **lora))
    more = {"model__peft__restore_from_path": str(first.directory), "model__optim__lr": 1e-12}
    second = run_training(tiny_config(tmp_path / "second", **{**lora, **more}))
    before, after = trainable_parameters(first.model), trainable_parameters(second.model)
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)


def test_null_and_none_train_the_whole_model() -> None:
    for scheme in (None, "none"):
        root = root_of({AT + "peft_scheme": scheme})
        assert peft_slice(root.model.peft) is None
        assert all(
            parameter.requires_grad for parameter in build_meta_model(resolve_run(root), ByteTokenizer()).parameters()
        )


# ---------------------------------------------------------------- rules


BASE = "model.restore_from_path=somewhere"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.peft.lora_tuning.adapter_dim=4"], AT + "lora_tuning.adapter_dim"),
        (["peft=ia3", BASE, "model.peft.lora_tuning.adapter_dim=4"], AT + "lora_tuning.adapter_dim"),
        (["peft=lora"], AT + "peft_scheme"),
    ],
)
def test_what_has_no_effect_is_warned_of(overrides: list[str], key: str) -> None:
    assert [finding.keys[0] for finding in load(*overrides).findings if finding.level == "warning"] == [key]


BIAS = ("num_moe_experts=4", "moe_router_score_function=sigmoid", "moe_router_enable_expert_bias=true")
RATE = "moe_router_bias_update_rate=0.1"
NO_CHECKPOINT = "exp_manager.create_checkpoint_callback=false"
SELECTIVE = "model.peft.peft_scheme=selective", AT + "selective_tuning.tunable_base_param_names="


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["peft=lora", BASE, RATE], ["moe_router_bias_update_rate"]),
        (["peft=lora", BASE], []),  # the biases of the base choose
        (["peft=lora", "model.data.data_impl=mock", NO_CHECKPOINT], ["moe_router_enable_expert_bias"]),
        ([SELECTIVE[0], SELECTIVE[1] + "[attention]", BASE, RATE], ["moe_router_bias_update_rate"]),
        ([SELECTIVE[0], SELECTIVE[1] + "[mlp]", BASE, RATE], []),
        ([SELECTIVE[0], SELECTIVE[1] + "[layers.0.mlp.router]", BASE, RATE], []),
    ],
)
def test_a_bias_that_stays_is_told(overrides: list[str], keys: list[str]) -> None:
    whole = ("model.", "peft=", "exp_manager.")
    given = [key if key.startswith(whole) else f"model.{key}" for key in (*BIAS, *overrides)]
    findings = load(*given, "model.moe_aux_loss_coeff=0.01").findings
    assert [finding.keys[0] for finding in findings if finding.level == "warning"] == [f"model.{key}" for key in keys]
    assert all("which trains no router" in finding.message for finding in findings if finding.level == "warning")


@pytest.mark.parametrize("scheme", ["lora", "adapter", "ia3"])
def test_a_whole_scheme_is_not_warned_of(scheme: str) -> None:
    assert not load(f"peft={scheme}", BASE).findings


@looped(
    ("overrides", "key"),
    [
        (["model.peft.peft_scheme='lora,ptuning'"], AT + "peft_scheme"),
        (["model.peft.peft_scheme=qlora"], AT + "peft_scheme"),
        (["peft=lora", BASE, "model.peft.lora_tuning.weight_tying=true"], AT + "lora_tuning.weight_tying"),
        (["peft=lora", BASE, "model.peft.lora_tuning.layer_selection=[9]"], AT + "lora_tuning.layer_selection"),
        (["peft=ia3", BASE, "model.num_moe_experts=4"], AT + "peft_scheme"),
        (["model.peft.restore_from_path=x"], AT + "restore_from_path"),
        (["model.peft.peft_scheme=selective", BASE], AT + "selective_tuning.tunable_base_param_names"),
        (["peft=ptuning", BASE], AT + "p_tuning.virtual_tokens"),
        (
            ["peft=ptuning", BASE, "model.max_position_embeddings=512", "model.data.reset_attention_mask=true"],
            "model.data.reset_attention_mask",
        ),
        (["model=bert_tiny", "peft=ptuning", BASE], AT + "peft_scheme"),
    ],
)
def test_what_cannot_be_is_refused(overrides: list[str], key: str) -> None:
    assert key in problems(*overrides)
