"""Files of the NeMo-Framework-Launcher load as they are; what their launcher adds is taken from overrides."""

import json
from pathlib import Path

import pytest
from config_helpers import gpt, historical, load, problems, write
from tiers import cases

from stoker.trainer.config.load import config_from_document
from stoker.trainer.config.problems import ConfigError
from stoker.trainer.config.schema.key_index import schema_keys
from stoker.trainer.utils.errors import UserError

STAGE = """\
defaults:
  - _self_
  - optional tp_overlap@model.ub_tp_comm_overlap_cfg: none_here
hydra:
  searchpath:
    - file:///opt/NeMo/conf
run:
  name: tiny
  results_dir: ${base_results_dir}/${.name}
  time_limit: "0-04:00:00"
  dependency: singleton
trainer:
  devices: 1
  precision: 32
  max_steps: 50
  logger: False
exp_manager:
  explicit_log_dir: ${training.run.results_dir}/results
  name: megatron_gpt
  wandb_logger_kwargs:
    name: ${training.run.name}
  checkpoint_callback_params:
    model_parallel_size: ${multiply:${training.model.tensor_model_parallel_size}, 1}
model:
  tensor_model_parallel_size: 1
  num_layers: 2
  hidden_size: 64
  ffn_hidden_size: ${multiply:4, ${.hidden_size}}
  num_attention_heads: 4
  encoder_seq_length: 32
  tokenizer:
    library: megatron
    type: GPT2BPETokenizer
    vocab_file: ${data_dir}/bpe/vocab.json
    merge_file: ${data_dir}/bpe/merges.txt
  optim:
    name: fused_adam
    sched:
      warmup_steps: ${divide_floor:${training.trainer.max_steps},10}
  data:
    data_impl: mmap
    seq_length: ${training.model.encoder_seq_length}
    data_prefix: [0.5, "${data_dir}/a_text_document", 0.5, "${data_dir}/b_text_document"]
"""
DIRECTORIES = ["data_dir=/data", "base_results_dir=/results"]


def write_stage(folder: Path, text: str = STAGE) -> None:
    write(folder, "training/gpt/tiny", text)


def test_stage_loads_as_it_is(tmp_path: Path) -> None:
    write_stage(tmp_path)
    config = load(*DIRECTORIES, name="gpt/tiny", directory=tmp_path / "training")
    root = config.root
    assert (root.name, root.exp_manager.explicit_log_dir) == ("tiny", "/results/tiny/results")
    assert root.model.tokenizer.vocab_file == "/data/bpe/vocab.json"
    assert root.model.data.data_prefix == [0.5, "/data/a_text_document", 0.5, "/data/b_text_document"]
    assert (gpt(root).ffn_hidden_size, root.model.optim.sched.warmup_steps) == (256, 5)
    notes = {row.path: row.note for row in config.key_reports}
    assert set(config.origins) - set(notes) <= {"run.name", "hydra", "hydra.searchpath"}
    assert any("`run.name` is read as `name`" in finding.message for finding in config.findings)
    assert {"run.time_limit", "run.dependency"} <= historical(config)
    for path in ("data_dir", "base_results_dir", "run.results_dir"):
        assert notes[path] == f"used as ${{{path}}}"


def test_every_place_of_a_stage_means_the_same(tmp_path: Path) -> None:
    write_stage(tmp_path)
    write(tmp_path, "config", "defaults:\n  - _self_\n  - training: gpt/tiny\n  - peft: null\ncluster_type: bcm\n")
    indented = "".join(f"  {line}\n" for line in STAGE.splitlines()[6:])
    write(tmp_path, "block", f"data_dir: /data\nbase_results_dir: /results\ntraining:\n{indented}")
    bare = load(*DIRECTORIES, name="gpt/tiny", directory=tmp_path / "training")
    for name, overrides in (("training/gpt/tiny", DIRECTORIES), ("config", DIRECTORIES), ("block", [])):
        assert load(*overrides, name=name, directory=tmp_path).document == bare.document


def test_resolved_stage_loads(tmp_path: Path) -> None:
    write(
        tmp_path,
        "tiny_hydra",
        "run: {name: tiny, results_dir: /results/tiny, time_limit: 0-01:00:00, model_train_name: x}\n"
        "name: megatron_gpt\nexp_manager: {explicit_log_dir: /results/tiny/results}\nmodel: {num_layers: 2}\n",
    )
    config = load(name="tiny_hydra", directory=tmp_path)
    assert config.root.name == "megatron_gpt"
    assert {"run.name", "run.results_dir", "run.time_limit", "run.model_train_name"} <= historical(config)


def test_overrides_may_name_the_stage(tmp_path: Path) -> None:
    write_stage(tmp_path)
    config = load(
        *DIRECTORIES, "training.model.seed=7", "training.run.name=x", name="training/gpt/tiny", directory=tmp_path
    )
    assert (config.root.model.seed, config.root.exp_manager.explicit_log_dir) == (7, "/results/x/results")
    assert config.origins["model.seed"].text == "training.model.seed=7"
    twice = ("training.model.seed=7", "model.seed=8")
    assert load(*DIRECTORIES, *twice, name="training/gpt/tiny", directory=tmp_path).root.model.seed == 8
    elsewhere = problems("training.model.seed=7")  # of no launcher's file
    assert "no stage `training`" in elsewhere["training.model.seed"].rule
    assert elsewhere["training.model.seed"].fix == "model.seed=7"


def test_one_of_several_stages_is_chosen(tmp_path: Path) -> None:
    write_stage(tmp_path)
    write(tmp_path, "peft/gpt/tiny", STAGE.replace("training.", "peft.").replace("name: tiny", "name: adapter"))
    write(
        tmp_path,
        "config",
        "defaults:\n  - _self_\n  - training: gpt/tiny\n  - peft: gpt/tiny\nstages: [conversion]\n"
        "launcher_scripts_path: ???\ndata_dir: ${launcher_scripts_path}/data\nbase_results_dir: /results\n"
        "env_vars: {NCCL_DEBUG: null, NCCL_NVLS_ENABLE: 0}\ntraining_config: ${hydra:runtime.choices.training}\n",
    )
    with pytest.raises(UserError, match=r"several stages .*: training, peft; .* such as stages=\[training\]"):
        load(name="config", directory=tmp_path)
    config = load("stages=[conversion,peft]", "launcher_scripts_path=/l", name="config", directory=tmp_path)
    assert (config.root.name, config.root.model.tokenizer.merge_file) == ("adapter", "/l/data/bpe/merges.txt")
    assert config.root.env_vars == {"NCCL_NVLS_ENABLE": 0}
    assert "env_vars.NCCL_DEBUG" not in config.origins
    found = problems("stages=[training]", name="config", directory=tmp_path)
    assert [problem.fix for problem in found.values()] == ["launcher_scripts_path=FOLDER"]


def test_missing_variables_are_asked_for_once(tmp_path: Path) -> None:
    write_stage(tmp_path)
    (found,) = problems(name="gpt/tiny", directory=tmp_path / "training").values()
    assert (found.key, found.fix) == ("base_results_dir, data_dir", "base_results_dir=FOLDER data_dir=FOLDER")
    assert found.origin.endswith("gpt/tiny.yaml:18")
    assert "exp_manager.explicit_log_dir, model.tokenizer.vocab_file" in found.rule
    load(*found.fix.split(), name="gpt/tiny", directory=tmp_path / "training")


def test_an_unsupported_key_is_refused_before_its_variable_is_set(tmp_path: Path) -> None:
    write(tmp_path, "glue", "model: {data: {train_ds: {file_path: '${data_dir}/train.tsv'}}}\n")
    (found,) = problems(name="glue", directory=tmp_path).values()
    assert (found.key, found.value, found.rule) == (
        "model.data.train_ds.file_path",
        "${data_dir}/train.tsv",
        "refused: use file_names",
    )
    assert found.fix == "~model.data.train_ds.file_path model.data.train_ds.file_names=[FILE]"


def test_variable_of_the_run_is_named_as_an_override(tmp_path: Path) -> None:
    write(tmp_path, "a", "run: {time_limit: x}\nexp_manager: {explicit_log_dir: '${fine_tuning.run.convert_dir}'}\n")
    found = problems(name="a", directory=tmp_path)
    assert found["run.convert_dir"].fix == "run.convert_dir=FOLDER"
    write(tmp_path, "b", "run: {hosts: [a, b]}\nexp_manager: {wandb_logger_kwargs: {tags: '${run.hosts}'}}\n")
    assert load(name="b", directory=tmp_path).root.exp_manager.wandb_logger_kwargs.tags == ["a", "b"]
    assert load("run.convert_dir=/c", name="a", directory=tmp_path).root.exp_manager.explicit_log_dir == "/c"


@pytest.mark.parametrize(
    "text",
    [
        "model: {data: {data_impl: mock, index_mapping_dir: '${data_dir}', data_prefix: ['${data_dir}/x']}}\n",
        "model: {data: {data_impl: mock}, tokenizer: {library: megatron, vocab_file: '${data_dir}/v'}}\n",
        "model: {data: {data_impl: mock}, tokenizer: {library: sentencepiece, model: '${data_dir}/t'}}\n",
        "model: {data: {data_impl: mock}, tokenizer: {library: huggingface, type: '${data_dir}/t'}}\n",
        "exp_manager: {create_wandb_logger: false, wandb_logger_kwargs: {project: '${run.name}'}}\n",
        "exp_manager: {checkpoint_callback_params: {filename: '${run.name}'}}\n",
        "conversion: {run: {results_dir: '${base_results_dir}'}}\nrun: {results_dir: '${base_results_dir}'}\n",
        "model: {data: {data_impl: mock, data_prefix: '???', splits_string: '???'}}\nlauncher_scripts_path: ???\n",
    ],
)
def test_value_that_nothing_reads_is_not_asked_for(tmp_path: Path, text: str) -> None:
    write(tmp_path, "a", text)
    config = load(name="a", directory=tmp_path)
    assert "???" not in json.dumps(config.document)


def test_missing_value_is_told_once(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a",
        "model:\n  hidden_size: ???\n  kv_channels: ${.hidden_size}\n"
        "  tokenizer: {library: megatron, vocab_file: '???', merge_file: x}\n"
        "  data: {data_impl: mmap, data_prefix: '???'}\n",
    )
    found = problems(name="a", directory=tmp_path)
    assert set(found) == {"model.hidden_size", "model.tokenizer.vocab_file", "model.data.data_prefix"}
    assert "also for model.kv_channels" in found["model.hidden_size"].rule
    assert found["model.data.data_prefix"].fix == "model.data.data_prefix=VALUE"


def problem_keys(*overrides: str) -> list[str]:
    try:
        load(*overrides)
    except ConfigError as error:
        return [problem.key for problem in error.problems]
    return []


@pytest.mark.parametrize("preset", cases(["gpt_tiny", "t5_tiny", "bert_tiny"], fast=1))
def test_missing_value_of_any_key_is_told_alone_or_needless(preset: str) -> None:
    family = preset.partition("_")[0]
    keys = [path for path, key in schema_keys(family).items() if not key.is_open and path != "model.family"]
    told = {path: problem_keys(f"model={preset}", "data=mock", f"{path}='???'") for path in cases(keys, fast=20)}
    assert all(found in ([path], []) for path, found in told.items()), told
    needless = [path for path, found in told.items() if not found]
    assert 0 < len(needless) < len(keys) / 2
    assert not {"model.hidden_size", "trainer.max_steps", "model.restore_from_path"}.intersection(needless)


def test_missing_files_are_no_reason_for_random_tokens(tmp_path: Path) -> None:
    """Without `data_impl` a file that leaves the data to the user needs them; its default would be `mock`."""
    sets = "train_ds: {file_names: ???, concat_sampling_probabilities: ???}\n    validation_ds: {file_names: ???}\n"
    write(tmp_path, "files", f"model:\n  data:\n    {sets}".replace("???", "'???'"))
    write(tmp_path, "prefix", "model: {data: {data_prefix: '???'}}\n")
    of_train = ("file_names", "concat_sampling_probabilities")
    assert set(problems(name="files", directory=tmp_path)) == {
        *(f"model.data.train_ds.{name}" for name in of_train),
        "model.data.validation_ds.file_names",
    }
    assert set(problems(name="prefix", directory=tmp_path)) == {"model.data.data_prefix"}
    for name in ("files", "prefix"):
        assert load("model.data.data_impl=mock", name=name, directory=tmp_path).root.model.data.data_impl == "mock"


def test_stage_named_like_a_block_of_the_model(tmp_path: Path) -> None:
    """`${peft.model.seed}` starts at the stage, `${peft.peft_scheme}` at the model."""
    write(
        tmp_path,
        "a",
        "run: {name: x}\nmodel:\n  seed: 5\n  restore_from_path: ${peft.run.name}\n"
        "  save_nemo_on_validation_end: false\n  model_parallel_size: ${multiply:1,${.tensor_model_parallel_size}}\n"
        "  peft: {peft_scheme: lora, lora_tuning: {adapter_dim: '${peft.model.seed}', variant: canonical}}\n"
        "  data: {train_ds: {add_eos: false}, test_ds: {add_eos: '${data.train_ds.add_eos}'}}\n"
        "exp_manager: {name: 'a-${model.peft.peft_scheme}', wandb_logger_kwargs: {group: 'g'}}\n",
    )
    config = load(name="a", directory=tmp_path)
    assert (config.root.model.peft.lora_tuning.adapter_dim, config.root.model.restore_from_path) == (5, "x")
    assert {"model.save_nemo_on_validation_end", "model.model_parallel_size"} <= historical(config)


def test_document_holds_variables_of_the_environment_written_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stage(tmp_path)
    overrides = ["data_dir=${oc.env:DATA}", "base_results_dir=${oc.env:RESULTS}"]
    environ = {"DATA": "/secret", "RESULTS": "/r"}
    config = load(*overrides, name="gpt/tiny", directory=tmp_path / "training", environ=environ)
    assert config.root.model.tokenizer.vocab_file == "/secret/bpe/vocab.json"
    assert "/secret" not in json.dumps(config.document)
    assert config.document["exp_manager"]["explicit_log_dir"] == "${oc.env:RESULTS}/tiny/results"
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert config_from_document(config.document, trusted=True).root == config.root
