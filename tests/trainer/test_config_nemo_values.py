"""Values that NeMo's own files hold and NeMo runs: they load, with a warning where they have no effect."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from config_helpers import gpt, load, problems, write
from tiers import looped

from stoker.trainer.cli.main import main
from stoker.trainer.config.dotted_paths import get
from stoker.trainer.config.load import load_run_config
from stoker.trainer.config.problems import ConfigError
from stoker.trainer.config.schema.optim import build_schedule
from stoker.trainer.utils.errors import UserError

SCHED, DATA, TOKENIZER = "model.optim.sched", "model.data", "model.tokenizer"


def messages(*overrides: str, level: str) -> list[str]:
    return [finding.message for finding in load(*overrides).findings if finding.level == level]


@looped(
    "overrides",
    [
        ["trainer.max_steps=1000", f"{SCHED}.warmup_steps=2000"],
        [f"{SCHED}.warmup_ratio=0.6", f"{SCHED}.constant_ratio=0.4"],
        [f"{SCHED}.max_steps=10", f"{SCHED}.constant_steps=10"],
        [f"{SCHED}.name=WarmupHoldAnnealLinear", f"{SCHED}.hold_ratio=0.99"],
    ],
)
def test_phases_longer_than_the_schedule_are_a_warning(overrides: list[str]) -> None:
    (found,) = messages(*overrides, level="warning")
    assert "no steps are left for the decay" in found


def test_a_schedule_shorter_than_its_warm_up_is_only_warm_up() -> None:
    config = load("trainer.max_steps=10", f"{SCHED}.warmup_steps=40", "model.optim.lr=0.41")
    schedule = build_schedule(config.root.model.optim, 10)
    assert [schedule(step) for step in range(11)] == pytest.approx([0.01 * (step + 1) for step in range(11)])


def test_warm_up_may_be_a_fraction_of_a_step() -> None:
    config = load(f"{SCHED}.warmup_steps=2.5", "model.optim.lr=0.35")
    schedule = build_schedule(config.root.model.optim, 100)
    assert [schedule(step) for step in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    assert schedule(3) < 0.35
    assert problems(f"{SCHED}.warmup_steps=-0.5")[f"{SCHED}.warmup_steps"].rule.startswith("must be an integer >= 0")


@looped(
    ("override", "path", "value"),
    [
        ("exp_manager.resume_if_exists=0", "exp_manager.resume_if_exists", False),
        ("exp_manager.ema.enable=1", "exp_manager.ema.enable", True),
        ("model.bias=0", "model.bias", False),
        ("trainer.deterministic=1", "trainer.deterministic", True),
        ("trainer.fast_dev_run=1", "trainer.fast_dev_run", 1),
        ("trainer.deterministic=null", "trainer.deterministic", False),
        (f"{TOKENIZER}.additional_special_tokens=null", f"{TOKENIZER}.additional_special_tokens", []),
        ("exp_manager.files_to_copy=null", "exp_manager.files_to_copy", []),
        ("exp_manager.summary_writer_kwargs=null", "exp_manager.summary_writer_kwargs.max_queue", 10),
        ("env_vars=null", "env_vars", {}),
    ],
)
def test_values_are_read_as_in_nemo(override: str, path: str, value: Any) -> None:
    found = get(load(override).root.model_dump(), path)
    assert found == value
    assert type(found) is type(value)


@looped("override", ["exp_manager.resume_if_exists=2", "model.bias=1.0", "model.bias=null", "model.tokenizer=null"])
def test_other_values_are_still_refused(override: str) -> None:
    assert list(problems(override)) == [override.partition("=")[0]]


@looped(
    "override",
    [
        "model.num_micro_batches_with_partial_activation_checkpoints=0",
        "exp_manager.save_nemo_on_validation_end=True",
        "exp_manager.checkpoint_callback_params.save_nemo_on_validation_end=True",
        f"{DATA}.data_impl_kwargs={{}}",
        f"{DATA}.data_impl_kwargs.text_mmap.newline_int=10",
        f"{DATA}.data_impl_kwargs={{csv_mmap: {{data_col: 1}}}}",
    ],
)
def test_keys_of_nemo_without_effect(override: str) -> None:
    assert not messages(override, level="warning")


def test_the_typo_of_nemo_warns() -> None:
    (found,) = messages("model.deteministic_mode=True", level="warning")
    assert "a typo" in found
    assert not messages("model.deteministic_mode=False", level="warning")


def test_a_wandb_project_of_null_is_left_to_wandb() -> None:
    on = "exp_manager.create_wandb_logger=True"
    path = "exp_manager.wandb_logger_kwargs.project"
    assert any("WANDB_PROJECT" in message for message in messages(on, f"{path}=null", level="info"))
    assert list(problems(on)) == [path]


def test_splits_string_of_null_goes_with_a_prefix_for_each_split() -> None:
    mmap = [f"{DATA}.data_impl=mmap", f"{DATA}.splits_string=null"]
    assert load(*mmap, f"{DATA}.data_prefix={{train:[a],validation:[b],test:[c]}}")
    assert list(problems(*mmap, f"{DATA}.data_prefix=[a]")) == [f"{DATA}.splits_string"]


@pytest.mark.parametrize(
    ("kind", "samples", "expected"),
    [
        ("learned_absolute", 256, (256, 512)),
        ("rope", 256, (256, 512)),
        ("alibi", 256, (256, None)),
        ("rope", 1024, (1024, None)),
        ("none", 1024, (1024, None)),
    ],
)
def test_samples_may_be_shorter_or_longer_than_the_model(
    kind: str, samples: int, expected: tuple[int, int | None]
) -> None:
    length = ["model.encoder_seq_length=512", f"model.position_embedding_type={kind}"]
    config = load(*length, f"{DATA}.seq_length={samples}")
    (warning,) = [finding for finding in config.findings if finding.level == "warning"]
    assert f"samples have `data.seq_length` ({samples}) tokens" in warning.message
    model = gpt(config.root)
    assert (model.encoder_seq_length, model.max_position_embeddings) == expected
    assert not load(*length, f"{DATA}.seq_length={samples}", *warning.fix.split()).findings


def test_samples_longer_than_a_learned_table_are_refused() -> None:
    learned = ["model.encoder_seq_length=512", "model.position_embedding_type=learned_absolute"]
    assert list(problems(*learned, f"{DATA}.seq_length=1024")) == [f"{DATA}.seq_length"]
    config = load(*learned, f"{DATA}.seq_length=1024", "model.max_position_embeddings=2048")
    assert gpt(config.root).encoder_seq_length == 1024


def test_word_pieces_are_told_the_files_of_the_other_type_at_once() -> None:
    library = f"{TOKENIZER}.library=megatron"
    (problem,) = problems(library, f"{TOKENIZER}.type=BertWordPieceLowerCase", "model=bert_base").values()
    cure = problem.fix.partition(", or ")[0].replace("FILE", "a.json").split()
    assert [word.partition("=")[0] for word in cure] == [
        f"{TOKENIZER}.{x}" for x in ("type", "vocab_file", "merge_file")
    ]
    assert load(library, *cure, "model=bert_base")
    assert load(library, f"{TOKENIZER}.type=BertWordPieceLowerCase", "model=bert_base", "data=mock")  # reads none


MCORE, FALCON = "model.mcore_customization_config", "model.name=megatron_falcon_gpt"


def test_keys_of_falcons_layer_act_in_that_layer_only() -> None:
    on = [f"{MCORE}.parallel_attention=true", f"{MCORE}.new_decoder_architecture=true"]
    assert "only the layer of `name: megatron_falcon_gpt` reads it" in messages(*on, level="warning")[0]
    assert load(FALCON, f"{MCORE}.parallel_attention=false", f"{MCORE}.new_decoder_architecture=false")
    for override, said in zip(on, ("share a norm", "is `transformer_block_type: parallel_ln`"), strict=True):
        (problem,) = problems(FALCON, override).values()
        assert said in problem.rule
        assert gpt(load(FALCON, override, problem.fix).root).transformer_block_type == "parallel_ln"


def test_files_that_fine_tune_a_t5_hold_keys_of_a_gpt() -> None:
    t5, train, held_out = "model=t5_small", f"{DATA}.train_ds.max_seq_length", f"{DATA}.validation_ds.max_seq_length"
    assert not messages(t5, "model.answer_only_loss=True", level="warning")
    assert problems(t5, "model.answer_only_loss=False")["model.answer_only_loss"].fix == "~model.answer_only_loss"
    found = problems(t5, f"{train}=256", f"{held_out}=128")
    assert [problem.fix for problem in found.values()] == [f"~{train} model.seq_length=256", f"~{held_out}"]
    moved = f"{DATA}.train_ds.max_src_seq_length"
    assert problems(t5, f"{moved}=256")[moved].fix == f"~{moved} model.seq_length=256"


def test_a_prompt_template_holds_the_line_breaks() -> None:
    path, template = f"{DATA}.train_ds.separate_prompt_and_response_with_newline", f"{DATA}.train_ds.prompt_template"
    assert list(problems(f"{path}=True")) == [path]
    config = load(f"{path}=True", f"'{template}={{input}} {{output}}'".strip("'"))
    assert any(path in finding.keys and "line breaks" in finding.message for finding in config.findings)


def test_the_context_is_truncated_in_older_files() -> None:
    pairs = [f"{DATA}.data_impl=jsonl", f"{DATA}.train_ds.file_names=[a]", f"{DATA}.validation_ds.file_names=[b]"]
    fields = [f"{DATA}.{name}.truncation_field=context" for name in ("train_ds", "validation_ds")]
    assert load(*pairs, *fields).root.model.data.train_ds.truncation_field == "input"
    assert not messages(*pairs, *fields, level="warning")
    other = f"'{DATA}.train_ds.prompt_template={{question}} {{output}}'".strip("'")
    assert list(problems(*pairs, fields[0], other)) == [f"{DATA}.train_ds.truncation_field"]


def test_a_refused_block_is_one_error(tmp_path: Path) -> None:
    write(
        tmp_path, "a", "defaults: [train, _self_]\nmodel: {train_ds: {batch_size: 1, shuffle: false, drop_last: true}}"
    )
    (problem,) = problems(name="a", directory=tmp_path).values()
    assert (problem.key, len(problem.also), problem.fix) == ("model.train_ds.batch_size", 2, "~model.train_ds")
    assert load(problem.fix, name="a", directory=tmp_path)


def test_text_files_of_pairs_are_replaced_by_jsonl_files() -> None:
    path = f"{DATA}.train_ds.src_file_name"
    assert problems(f"{path}=a.txt")[path].fix == f"~{path} {DATA}.train_ds.file_names=[FILE]"


def test_text_files_that_must_be_given_are_asked_for_as_jsonl_files(tmp_path: Path) -> None:
    files = "{src_file_name: '???', tgt_file_name: '???'}"
    write(tmp_path, "a", f"model: {{family: t5, data: {{train_ds: {files}}}}}")
    (problem,) = problems(name="a", directory=tmp_path).values()
    assert (problem.key, problem.value) == (f"{DATA}.train_ds.src_file_name", "???")
    unchecked = "trainer.limit_val_batches=0"
    assert load(unchecked, *problem.fix.replace("FILE", "a.jsonl").split(), name="a", directory=tmp_path)
    assert load(unchecked, f"{DATA}.train_ds.file_names=[a.jsonl]", name="a", directory=tmp_path)


def test_a_rule_waits_for_the_value_that_another_fix_replaces() -> None:
    path, micro = f"{DATA}.train_ds.global_batch_size", "model.micro_batch_size=3"
    (problem,) = problems(f"{path}=64", micro).values()
    assert (problem.key, problem.fix) == (path, f"~{path} model.global_batch_size=64")
    assert list(problems("model.global_batch_size=64", micro)) == ["model.global_batch_size"]


def test_a_wrong_value_of_the_block_named_like_its_family_is_named() -> None:
    assert list(problems("model=bert_base", "model.bert.token_types=[]")) == ["model.bert.token_types"]
    assert problems("model.optim.betas='2'")["model.optim.betas"].fix == "such as model.optim.betas=[0.9, 0.98]"


def test_a_ramp_up_waits_for_the_number_of_devices_and_the_global_batch() -> None:
    ramp, batch = "model.rampup_batch_size=[16,7,1000]", ["model.micro_batch_size=3", "model.global_batch_size=100"]
    sizes = [ramp, *batch, "trainer.devices=16"]
    assert list(problems(*sizes, "model.pipeline_model_parallel_size=0")) == ["model.pipeline_model_parallel_size"]
    found = problems(ramp.replace("16,7", "48,48"), *sizes[1:])
    assert [problem.fix for problem in found.values()] == ["model.global_batch_size=96"]


def test_an_emptied_block_of_unsupported_keys_is_accepted(tmp_path: Path) -> None:
    write(tmp_path, "a", "defaults: [train, _self_]\nmodel: {peft: {restore_from_ckpt: {checkpoint_name: x}}}")
    (problem,) = problems(name="a", directory=tmp_path).values()
    assert load(problem.fix, name="a", directory=tmp_path)


def test_a_fix_shows_what_a_key_takes() -> None:
    monitor, weights = (
        "exp_manager.checkpoint_callback_params.monitor",
        f"{DATA}.train_ds.concat_sampling_probabilities",
    )
    assert problems(f"{monitor}=validation_exact_string_match")[monitor].fix == f"such as {monitor}=val_loss"
    assert problems("model.tokenizer=null")["model.tokenizer"].fix.startswith("~model.tokenizer, or write its keys")
    assert problems(f"{DATA}.test_ds=[a]")[f"{DATA}.test_ds"].fix == f"'{DATA}.test_ds.file_names=[a]'"
    found = problems(f"{DATA}.data_impl=jsonl", f"{DATA}.train_ds.file_names=[a]", f"{weights}=???")
    assert found[weights].fix == f"{weights}=[VALUE]"


ATTENTION = "model.fp8_dot_product_attention"


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="TransformerEngine is installed")
def test_transformer_engine_is_a_warning_until_a_run_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own, both = (
        "model.transformer_engine=null",
        "model.encoder.transformer_engine=null model.decoder.transformer_engine=null",
    )
    for given, why, cure in (
        ("model=gpt_tiny", "not installed", own),
        ("model=t5_tiny", "not installed", both),
        ("model=t5_tiny model.fp8=true model.fp8_recipe=delayed", "is cpu", f"{both} model.fp8_recipe=tensorwise"),
        (f"model=gpt_tiny model.kv_channels=128 model.fp8=true {ATTENTION}=true", "is cpu", f"{own} {ATTENTION}=false"),
    ):
        words = [*given.split(), "data=mock", "model.transformer_engine=True", "trainer.accelerator=cpu"]
        for verb in ("config", "plan"):
            assert main([verb, *words]) == 0
            captured = capsys.readouterr()
            assert cure in " ".join((captured.out + captured.err).split())
        assert main(["train", *words]) == 2
        assert f"{why}; use {cure}" in " ".join(capsys.readouterr().err.split())
        replaced = {word.partition("=")[0] for word in cure.split()} | {"model.transformer_engine"}
        kept = [word for word in words if word.partition("=")[0] not in replaced]
        assert not load(*kept, *cure.split()).findings


INFERENCE = """
inference:
  greedy: False
  top_k: 0
  top_p: 0.9
  temperature: 1.0
  add_BOS: True
  tokens_to_generate: 30
  all_probs: False
  repetition_penalty: 1.2
  min_tokens_to_generate: 0
  compute_logprob: False
  end_strings: ["<|endoftext|>"]
trainer: {devices: 1, num_nodes: 1, accelerator: gpu, logger: False, precision: 16, use_distributed_sampler: False}
tensor_model_parallel_size: -1
pipeline_model_parallel_size: -1
pipeline_model_parallel_split_rank: -1
megatron_amp_O2: False
gpt_model_file: null
checkpoint_dir: null
checkpoint_name: null
hparams_file: null
prompts: ["Q: How are you?", "Q: How big is the universe?"]
server: False
port: 5555
web_server: False
share: False
username: test
password: test2
web_port: 9889
chat: False
chatbot_config: {value: False, attributes: [{name: Quality, min: 0, max: 4, key: quality, type: int, default: 4}]}
"""


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("trainer: {devices: 1}\ngpt_model_file: null\nmodel_type: gpt\n", 2, "evaluation or export of a model"),
        ("data: {test_ds: '???'}\nvirtual_prompt_model_file: '???'\n", 2, "inference with learned prompts"),
        ("model: {}\ncommon_inference_params:\n  top_k: 1\n", 3, "text generation"),
        ("inference:\n  greedy: true\nquantization:\n  algorithm: int4\n", 4, "quantization"),
    ],
)
def test_files_of_other_programs_end_in_one_line(tmp_path: Path, text: str, line: int, said: str) -> None:
    write(tmp_path, "a", text)
    with pytest.raises(UserError, match=rf"a\.yaml:{line}: a file of NeMo's {said}, not of training"):
        load(name="a", directory=tmp_path)


@looped("key", ["hyena.d_model", "mm_cfg.llm.freeze", "vision_pretraining_type", "num_soft_negatives"])
def test_other_models_are_one_error(key: str, tmp_path: Path) -> None:
    write(tmp_path, "a", "model: {num_layers: 2}")
    (problem,) = problems(f"model.{key}=1", name="a", directory=tmp_path).values()
    assert problem.rule.startswith("a configuration of NeMo's ")


def test_a_file_of_fine_tuning_may_hold_options_of_generation(tmp_path: Path) -> None:
    training = "model:\n  data:\n    train_ds: {file_names: [a.jsonl]}\n    validation_ds: {file_names: [b.jsonl]}\n"
    training += "    chat: false\n    chat_prompt_tokens: {turn_start: x}\n"
    write(tmp_path, "a", training + "inference: {greedy: true, top_k: 0}\n")
    config = load(name="a", directory=tmp_path)
    (note,) = [found.message for found in config.findings if "inference.greedy" in found.message]
    assert "of NeMo without effect here" in note
    found = problems("model.data.chat=true", name="a", directory=tmp_path)
    assert "use model.tokenizer.chat_template" in found["model.data.chat_prompt_tokens.turn_start"].rule


@looped(
    ("key", "value", "cures"),
    [
        ("data_impl", "text_mmap", [f"{DATA}.data_impl=text", f"{DATA}.path=a.txt"]),
        ("data_impl", "lazy", [f"{DATA}.data_impl=mmap", f"{DATA}.data_prefix=[a]"]),
        ("mock_dataset", "true", [f"~{DATA}.mock_dataset", f"{DATA}.data_impl=mock"]),
    ],
)
def test_cures_of_data_keys_are_accepted(key: str, value: str, cures: list[str], tmp_path: Path) -> None:
    """The last cure of `data_impl` is of the error that follows."""
    write(tmp_path, "a", f"model: {{data: {{{key}: {value}}}}}\n")
    fix = problems(name="a", directory=tmp_path)[f"{DATA}.{key}"].fix
    assert fix.split() == (cures if key == "mock_dataset" else cures[:1])
    load(*cures, name="a", directory=tmp_path)


def test_a_file_of_text_generation_ends_in_one_line(tmp_path: Path) -> None:
    write(tmp_path, "megatron_gpt_inference", INFERENCE)
    with pytest.raises(UserError) as caught:
        load_run_config("megatron_gpt_inference", tmp_path, [], {})
    (line,) = caught.value.lines
    assert line.endswith("stand for the keys of `inference`")
    assert "megatron_gpt_inference.yaml:3: a file of NeMo's text generation" in line
    assert "stoker generate --checkpoint DIR" in line


SFT_FILE = """\
model:
  data:
    train_ds: {file_names: '???', max_seq_length: 96}
    validation_ds: {file_names: [b], max_seq_length: 96}
  optim: {name: fused_adam, sched: {monitor: validation_loss, reduce_on_plateau: false}}
exp_manager: {create_wandb_logger: null}
"""


def test_the_length_of_examples_is_that_of_the_model(tmp_path: Path) -> None:
    write(tmp_path, "sft", SFT_FILE)
    files, length = f"{DATA}.train_ds.file_names=[a]", "model.encoder_seq_length"
    config = load(files, name="sft", directory=tmp_path)
    assert (gpt(config.root).encoder_seq_length, config.root.exp_manager.create_wandb_logger) == (96, False)
    assert config.origins[length].kind == "default"
    assert any("`model.data.train_ds.max_seq_length` is read as" in found.message for found in config.findings)
    # A length of the model's own is not replaced, whichever of the two the advice leaves out.
    (train, held_out) = problems(files, f"{length}=64", name="sft", directory=tmp_path).values()
    assert [train.fix, held_out.fix] == [f"~{DATA}.{name}.max_seq_length" for name in ("train_ds", "validation_ds")]
    assert gpt(load(files, f"{length}=64", train.fix, held_out.fix, name="sft", directory=tmp_path).root)
    # Neither is a default by a block that the data do not come from.
    other = problems(f"~{DATA}.train_ds.file_names", f"{DATA}.data_impl=mock", name="sft", directory=tmp_path)
    assert f"{DATA}.train_ds.max_seq_length" in other


def test_a_missing_list_of_files_is_found_where_the_file_has_it(tmp_path: Path) -> None:
    path = write(tmp_path, "sft", SFT_FILE)
    (problem,) = problems(name="sft", directory=tmp_path).values()
    assert (problem.key, problem.origin) == (f"{DATA}.train_ds.file_names", f"{path}:3")


PROMPT_LEARNING = """\
name: tuning_${model.new_tasks[0]}_${model.adapter_tuning.adapter_dim}
model:
  encoder_seq_length: 32
  validation_global_batch_size: 4
  validation_micro_batch_size: 2
  validation_drop_last: false
  report_validation_metric: false
  validation_metric: accuracy
  new_tasks: [rte]
  adapter_tuning: {type: parallel_adapter, adapter_dim: 50}
  inference: {greedy: false, top_k: 0}
  data: {train_ds: '???', validation_ds: [b.jsonl], add_eos: true, shuffle: true, load_cache: false, min_seq_length: 1,
         max_seq_length: 64, train_cache_data_path: null}
"""


def test_files_of_prompt_learning_load_after_all_advice(tmp_path: Path) -> None:
    """Files of NeMo until 1.20: every key is known, and the advice keeps the method."""
    write(tmp_path, "a", PROMPT_LEARNING)
    overrides: list[str] = []
    unknown: list[str] = []
    for _ in range(3):
        try:
            config = load(*overrides, name="a", directory=tmp_path)
            break
        except ConfigError as error:
            unknown += [problem.key for problem in error.problems if "there is no such key" in problem.rule]
            fixes = " ".join(problem.fix for problem in error.problems).replace("'", "")
            overrides += fixes.replace("[FILE]", "[a.jsonl]").replace("VALUE", "x").split()
    else:
        pytest.fail("the advice does not end")
    assert not unknown
    assert config.root.model.peft.peft_scheme == "adapter"
    assert (config.root.name, gpt(config.root).encoder_seq_length) == ("x", 64)
    assert config.root.model.data.validation_ds.file_names == ["b.jsonl"]


def test_keys_of_a_t5s_prompt_learning_are_known(tmp_path: Path) -> None:
    keys = {"decoder_starts_with_pad": True, "add_eos_to_decoder_output": True, "add_sentinel_to_input": False}
    lines = "".join(f"    {key}: {not value}\n" for key, value in keys.items())
    write(tmp_path, "a", f"model:\n  family: t5\n  data:\n    data_impl: mock\n    ul2_prompt_token: x\n{lines}")
    found = problems(name="a", directory=tmp_path)
    assert {path: problem.fix for path, problem in found.items()} == {
        f"{DATA}.ul2_prompt_token": f"~{DATA}.ul2_prompt_token",
        **{f"{DATA}.{key}": f"{DATA}.{key}={str(value).lower()}" for key, value in keys.items()},
    }
    assert load(*(problem.fix for problem in found.values()), name="a", directory=tmp_path)
