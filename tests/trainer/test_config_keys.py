"""Every known key has exactly one state, and each state does what it says."""

from pathlib import Path
from typing import Any

import pytest
from config_helpers import DATA, gpt, historical, load, problems, write
from tiers import cases, extra, looped

from stoker.models.config.model import FAMILIES
from stoker.trainer.config.dotted_paths import put
from stoker.trainer.config.nemo import key_states
from stoker.trainer.config.nemo.key_states import KeyStates, key_state, known_keys
from stoker.trainer.config.nemo.key_table import KeyRow, KeyState, find_row, key_table, unsupported_values
from stoker.trainer.config.problems import Problem
from stoker.trainer.config.schema.key_index import enclosing_open_block, format_value, schema_blocks, schema_keys

CENSUS = (DATA / "nemo_key_paths.txt").read_text().split()


def test_census_is_complete() -> None:
    assert len(CENSUS) == len(set(CENSUS)) == 671


def test_every_census_path_has_exactly_one_state() -> None:
    for path in CENSUS:
        acts = path in schema_keys() or path in schema_blocks() or enclosing_open_block(path) is not None
        assert acts != (find_row(path) is not None), path
        assert key_state(path) is not None, path


def test_table_is_consistent() -> None:
    known = {path for path, _ in known_keys()} | {pattern.removesuffix(".*") for pattern in key_table()}
    for row in key_table().values():
        assert row.pattern not in schema_keys()
        assert row.state is not KeyState.ACTS
        assert row.note
        for other in (row.switch, row.same_as):
            assert not other or other in known, row
        assert not row.same_as or any(row.same_as in schema_keys(family) for family in FAMILIES)
        assert row.state is not KeyState.HISTORICAL or not (row.switch or row.accepts)


def test_values_of_the_table_are_not_values_of_the_schema() -> None:
    for path, values in unsupported_values().items():
        assert not set(map(str, values)) & set(map(str, schema_keys()[path].choices)), path


def refusals(path: str, value: Any) -> list[Problem]:
    """Messages about one key alone."""
    tree: dict[str, Any] = {}
    put(tree, path, value)
    return list(KeyStates(tree, lambda _: "x.yaml:1").problems())


@pytest.mark.parametrize("state", [KeyState.NOT_YET, KeyState.REFUSED, KeyState.HISTORICAL])
def test_each_row_does_what_its_state_says(state: KeyState) -> None:
    """A historical key takes anything; a key that is not yet there, or refused, only its off values."""
    for row in key_table().values():
        if row.state is not state or row.pattern.endswith(".*"):
            continue
        missing = () if "file_names=" in (row.fix or "") else ("???",)  # which asks for the files
        for accepted in (None, *missing, *row.accepts):
            assert not refusals(row.pattern, accepted), (row, accepted)
        found = refusals(row.pattern, "surely not off")
        assert bool(found) != (state is KeyState.HISTORICAL or bool(row.switch)), row
        if found:
            assert found[0].key == row.pattern
            assert found[0].rule == f"{state.value}: {row.note}"


@looped(
    ("path", "value", "state"),
    cases(
        ((path, value, fact.state) for path, values in unsupported_values().items() for value, fact in values.items()),
        fast=20,
    ),
)
def test_values_that_are_not_taken(path: str, value: Any, state: KeyState) -> None:
    problem = problems(f"{path}={format_value(value)}")[path]
    assert problem.rule.startswith(state.value)
    assert path in problem.fix


@looped("value", ["8", "fp8", "transformer-engine"])
def test_fp8_is_no_precision_of_the_trainer(value: str) -> None:
    problem = problems(f"trainer.precision={value}")["trainer.precision"]
    assert problem.rule == "refused: fp8 is model.fp8, beside another precision; use bf16"
    assert problem.fix == "trainer.precision=bf16"


@looped(
    "override",
    [
        "model.pre_process=True",
        "model.apex_transformer_log_level=30",
        "model.nsys_profile.ranks=[0]",
        "model.bias_gelu_fusion=False",
        "trainer.benchmark=True",
        "model.attention_softmax_in_fp32=True",
        "model.use_te_rng_tracker=True",
        "model.gc_interval=100",
    ],
)
def test_historical_keys_are_accepted_and_listed_once(override: str) -> None:
    config = load(override, "+model.mcore_gpt=True")
    path = override.partition("=")[0]
    assert historical(config) == {path, "model.mcore_gpt"}
    notes = [finding for finding in config.findings if path in finding.keys]
    assert len(notes) == 1
    assert notes[0].level == "info"


@looped(
    ("override", "key"),
    [
        ("trainer.logger=True", "trainer.logger"),
        ("trainer.enable_checkpointing=True", "trainer.enable_checkpointing"),
        ("trainer.use_distributed_sampler=True", "trainer.use_distributed_sampler"),
        ("trainer.replace_sampler_ddp=True", "trainer.replace_sampler_ddp"),
        ("trainer.accumulate_grad_batches=2", "trainer.accumulate_grad_batches"),
        ("trainer.limit_train_batches=1", "trainer.limit_train_batches"),
        ("trainer.accumulate_grad_batches=true", "trainer.accumulate_grad_batches"),
        ("trainer.logger=0", "trainer.logger"),
        ("model.use_emha=True", "model.use_emha"),
        ("model.encoder.num_layers=2", "model.encoder.num_layers"),
        ("model.tokens_head_bias=True", "model.tokens_head_bias"),
        ("model.bert.token_types=2", "model.bert.token_types"),
        ("model.mcore_customization_config.foo=1", "model.mcore_customization_config.foo"),
        ("model.tokenizer.trust_remote_code=True", "model.tokenizer.trust_remote_code"),
        ("model.precision=32", "model.precision"),
    ],
)
def test_refused_keys(override: str, key: str) -> None:
    assert problems(override)[key].rule.startswith("refused")


def test_a_key_may_repeat_another() -> None:
    load("model.precision=bf16", "trainer.precision=bf16", "+model.seq_length=256")
    assert problems("model.precision=bf16", "trainer.precision=32")["model.precision"].fix


@looped(
    "overrides",
    [
        ["+model.tensor_model_parallel_size=1", "model.pipeline_model_parallel_size=1", "model.fsdp=False"],
        ["model.rampup_batch_size=null", "model.cpu_offloading=False", "model.cpu_offloading_num_layers=11"],
        ["model.fp8=null", "model.fp8_hybrid=True", "model.activations_checkpoint_method=block"],
        ["model.moe_router_topk=2", "model.window_size=null", "exp_manager.create_wandb_logger=False"],
        ["exp_manager.ema.enable=False", "exp_manager.ema.decay=0.9", "model.peft.peft_scheme=null"],
        ["trainer.limit_train_batches=1.0", "trainer.limit_predict_batches=1.0", "trainer.accumulate_grad_batches=1.0"],
    ],
)
def test_what_is_off_loads(overrides: list[str]) -> None:
    assert gpt(load(*overrides).root).num_layers == 4


@looped(
    "override",
    [
        "model.fp8_recipe=mxfp8",
        "model.data.add_fim=True",
        "trainer.limit_predict_batches=1",
        "exp_manager.checkpoint_callback_params.every_n_epochs=1",
    ],
)
def test_what_is_not_yet_there_says_so(override: str) -> None:
    (problem,) = problems("+" + override).values()
    assert problem.rule.startswith("not yet")
    assert problem.origin.startswith("+" + override)


def test_settings_of_a_feature_share_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    to_come = KeyRow("model.future.*", KeyState.NOT_YET, "a feature to come")
    monkeypatch.setattr(
        key_states, "find_row", lambda path, *_: to_come if path.startswith("model.future.") else find_row(path)
    )
    (problem,) = problems(*(f"+model.future.k{i}=1" for i in range(9))).values()
    assert len(problem.also) == 6


def test_all_errors_come_at_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        "bad",
        "trainer:\n  max_steps: ???\n  logger: True\nmodel:\n  num_layers: 1.5\n  num_layesr: 2\n"
        "  num_attention_heads: 7\n  fp8: 8\n  seed: ${nowhere}\n"
        "  data:\n    path: ???\n    data_impl: text\n  tokenizer: null\n",
    )
    found = problems("model.optim.lr=-1", name="bad", directory=tmp_path)
    assert set(found) == {
        "trainer.max_steps",
        "trainer.logger",
        "model.num_layers",
        "model.num_layesr",
        "model.num_attention_heads",
        "model.fp8",
        "model.seed",
        "model.data.path",
        "model.tokenizer",
        "model.optim.lr",
    }
    assert all(problem.rule for problem in found.values())
    assert {key: problem.origin.rpartition(":")[2] for key, problem in found.items() if ".yaml:" in problem.origin} == {
        "trainer.max_steps": "2",
        "trainer.logger": "3",
        "model.num_layers": "5",
        "model.num_layesr": "6",
        "model.num_attention_heads": "7",
        "model.fp8": "8",
        "model.seed": "9",
        "model.data.path": "11",
        "model.tokenizer": "13",
    }
    assert "must be given" in found["trainer.max_steps"].rule
    assert "must be given" in found["model.data.path"].rule


@pytest.mark.parametrize("name", ["_target_", *extra("_partial_", "_args_", "_recursive_", "_convert_")])
def test_code_is_never_named(name: str, tmp_path: Path) -> None:
    listed = problems(f"+model.nsys_profile.ranks=[[{{{name}:x}}]]")
    assert "must not name code" in listed["model.nsys_profile.ranks"].rule
    for path in (
        name,
        f"model.optim.{name}",
        f"trainer.callbacks.{name}",
        f"model.nsys_profile.{name}",
        f"env_vars.{name}",
    ):
        assert any("must not name code" in problem.rule for problem in problems(f"+{path}=os.system").values()), path
    write(tmp_path, "c", f"model:\n  optim:\n    {name}: torch.optim.SGD\n  data:\n    train_ds:\n    - {name}: x\n")
    assert any("must not name code" in problem.rule for problem in problems(name="c", directory=tmp_path).values())


@looped(
    ("override", "fix"),
    [
        ("model.num_layers=2.0", "model.num_layers=2"),
        ("model.num_layers='2'", "write 2 without quotes"),
        ("model.num_layers=True", ""),
        ("model.num_layers=0", ""),
        ("model.num_layers=null", "model.num_layers=12"),
        ("model.num_layers=[2]", ""),
        ("model.num_layers=99999999999999999999999", ""),
        ("model.bias='true'", "without quotes"),
        ("model.bias=maybe", ""),
        ("model.optim.lr=nan", ""),
        ("model.optim.lr=inf", ""),
        ("model.optim.lr=True", ""),
        ("model.optim.betas=[0.9]", ""),
        ("model.optim.betas=[0.9,x]", ""),
        ("model.activation=swiglue", "model.activation=swiglu"),
        ("model.normalization=layer_norm", "model.normalization=layernorm"),
        ("trainer.max_steps=-2", ""),
        ("trainer.max_time=10:30:00", "trainer.max_time=00:10:30:00"),
        ("trainer.max_time=90000", "trainer.max_time=01:01:00:00"),
        ("trainer.max_time=2h", "such as trainer.max_time=00:04:00:00"),
        ("exp_manager.max_time_per_run='1:2:3:4'", "exp_manager.max_time_per_run=01:02:03:04"),
        ("trainer.limit_val_batches=1.5", ""),
        ("trainer.devices=two", ""),
        ("model.optim=adamw", ""),
        ("name=3", ""),
        ("env_vars.A=[1]", ""),
        ("env_vars=3", ""),
    ],
)
def test_wrong_types_and_ranges(override: str, fix: str) -> None:
    key = override.partition("=")[0]
    if key == "model.optim":
        problem = problems("model=null", "optim=null", "model.optim=adamw")[key]
    else:
        problem = problems(override)[key]
    assert problem.rule.startswith("must be ")
    assert fix in problem.fix


def test_spelling_of_the_documentation() -> None:
    config = load("+model.moe_token_dropping=alltoall", "+model.num_moe_experts=8", "model.moe_aux_loss_coeff=1e-2")
    (warning,) = [finding for finding in config.findings if finding.level == "warning"]
    assert "moe_token_dispatcher_type" in warning.message
    assert (
        "moe_token_dropping"
        in problems("+model.moe_token_dropping=alltoall", "+model.moe_token_dispatcher_type=flex")[
            "model.moe_token_dropping"
        ].fix
    )
    load("+model.moe_token_dropping=False")


def test_case_of_words() -> None:
    assert gpt(load("model.normalization=RMSNorm").root).normalization == "rmsnorm"
    config = load("model.position_embedding_type=ALiBi")
    assert gpt(config.root).position_embedding_type == "alibi"
    (warning,) = [finding for finding in config.findings if finding.level == "warning"]
    assert "`ALiBi` is read as `alibi`" in warning.message


WANDB = "exp_manager.wandb_logger_kwargs"


@looped(
    ("override", "fix"),
    [
        ("trainer.gpus=8", "~trainer.gpus trainer.devices=8"),
        (
            "trainer.resume_from_checkpoint=/a",
            "~trainer.resume_from_checkpoint exp_manager.resume_from_checkpoint=/a",
        ),
        ("trainer.track_grad_norm=inf", "trainer.track_grad_norm=-1"),
        ("trainer.terminate_on_nan=true", "~trainer.terminate_on_nan trainer.max_skipped_steps=0"),
        ("trainer.amp_level=O2", "~trainer.amp_level"),
        (
            "exp_manager.checkpoint_callback_params.save_weights_only=true",
            "exp_manager.checkpoint_callback_params.save_weights_only=false",
        ),
        ("model.nsys_profile.enabled=true", "model.nsys_profile.enabled=false"),
        ("model.optim.grad_sync_dtype=fp16", "~model.optim.grad_sync_dtype, with model.fsdp_grad_reduce_dtype"),
        ("model.optim.param_sync_dtype=fp8", "~model.optim.param_sync_dtype"),
        ("model.optim.dtype=bf16", "model.optim.dtype=fp32"),
        (
            "model.mcore_customization_config.attn_logit_softcapping=50",
            "~model.mcore_customization_config.attn_logit_softcapping model.attn_logit_softcapping=50",
        ),
        ("model.add_bias_linear=false", "~model.add_bias_linear model.bias=false"),
        ("model.data.validation_ds.micro_batch_size=9", "~model.data.validation_ds.micro_batch_size"),
        ("model.data.train_ds.label_key=answer", "~model.data.train_ds.label_key model.data.label_key=answer"),
        ("model.gated_linear_unit=true", "~model.gated_linear_unit model.activation=geglu"),
        ("model.language_model_path=/a", "~model.language_model_path model.restore_from_path=/a"),
        ("model.use_soft_prompts=true", "~model.use_soft_prompts model.peft.peft_scheme=ptuning"),
        ("model.virtual_prompt_style=p-tuning", "~model.virtual_prompt_style model.peft.peft_scheme=ptuning"),
    ],
)
def test_the_way_out_keeps_what_a_refused_key_says(override: str, fix: str) -> None:
    (problem,) = problems(override).values()
    assert problem.rule.startswith("refused: ")
    assert problem.fix.startswith(fix)


@pytest.mark.parametrize(
    "override",
    [
        "model.mcore_customization_config.query_pre_attn_scalar=224",
        "model.mamba_ssm_ngroups=8",
        "model.encoder_arch=perceiver",
    ],
)
def test_a_model_that_is_not_there_has_no_way_out(override: str) -> None:
    (problem,) = problems(override).values()
    assert problem.rule.endswith("stoker has no such model")
    assert not problem.fix


def test_what_says_the_same_as_another_key_or_nothing_is_accepted() -> None:
    load("trainer.gpus=1", "trainer.track_grad_norm=2", "model.optim.dtype=fp32", "model.nsys_profile.enabled=false")
    load("trainer.precision=bf16", "model.optim.param_sync_dtype=bf16", "model.kv_channels=16", "model.hidden_size=64")
    load("model.kv_channels=16", "model.mcore_customization_config.query_pre_attn_scalar=16")
    load("model.use_soft_prompts=false")
    config = load("model.gated_linear_unit=true", "model.activation=fast-geglu")
    assert any("is redundant with `fast-geglu`" in finding.message for finding in config.findings)


def test_other_names_of_nemos_are_read_as_ours() -> None:
    typed = [f"{WANDB}.dir=/a", f"{WANDB}.version=b", "model.optim.grad_sync_dtype=torch.bfloat16"]
    config = load(*typed)
    wandb = config.root.exp_manager.wandb_logger_kwargs
    assert (wandb.save_dir, wandb.id, config.root.model.fsdp_grad_reduce_dtype) == ("/a", "b", "bf16")
    rows = {row.path: row.origin for row in config.key_reports}
    assert rows[f"{WANDB}.save_dir"] == f"{typed[0]} (command line)"
    without = [finding.fix for finding in config.findings if "has no effect with one process" in finding.message]
    assert without == ["~model.optim.grad_sync_dtype"]
    assert list(problems(f"{WANDB}.dir=/a", f"{WANDB}.save_dir=/b")) == [f"{WANDB}.dir"]
    both = ["model.fsdp_grad_reduce_dtype=32", "model.optim.grad_sync_dtype=bf16"]
    config = load(*both)  # NeMo reads the first with FSDP only
    assert config.root.model.fsdp_grad_reduce_dtype == "bf16"
    assert any("in place of 32" in finding.message for finding in config.findings if finding.level == "warning")
    assert "model.optim.grad_sync_dtype" in problems(*both, "model.fsdp=true")
    state = load("model.optim.dtype=bf16", "model.optim.name=mcore_distributed_optim").findings
    assert any("`dtype` (bf16) has no effect" in finding.message for finding in state)


def test_historical_keys_of_the_command_line_are_all_named(tmp_path: Path) -> None:
    files = "".join(f"  {name}: 1\n" for name in ("pre_process", "post_process", "gc_interval", "mcore_gpt"))
    write(tmp_path, "a", f"defaults: [train, _self_]\nmodel:\n{files}")
    typed = [f"model.{name}" for name in ("bias_gelu_fusion", "apply_rope_fusion", "persist_layer_norm")]
    typed += [f"model.{name}" for name in ("bias_dropout_fusion", "sharp", "pipeline_dtype", "batch_p2p_comm")]
    config = load(*(f"{path}=1" for path in typed), name="a", directory=tmp_path)
    (note,) = [finding for finding in config.findings if "command line" in finding.message]
    assert set(note.keys) == set(typed)
    assert all(path in note.message for path in typed)


def test_a_key_read_as_another_has_its_own_default(tmp_path: Path) -> None:
    rows = {row.path: row for row in load("+model.moe_token_dropping=alltoall").key_reports}
    assert (rows["model.moe_token_dropping"].value, rows["model.moe_token_dropping"].origin) == ("false", "default")
    assert "command line" in rows["model.moe_token_dispatcher_type"].origin
    write(tmp_path, "pairs", "defaults: [train, _self_]\nmodel:\n  data:\n    train_ds: {file_names: [a.jsonl]}\n")
    rows = {
        row.path: row
        for row in load("data=null", "trainer.limit_val_batches=0", name="pairs", directory=tmp_path).key_reports
    }
    assert rows["model.data.data_impl"].origin.endswith("pairs.yaml:4")
