"""Files, groups and overrides become one configuration, and every value knows where it came from."""

import importlib.metadata
import re
from pathlib import Path

import pytest
from config_helpers import DATA, gpt, historical, load, problems, write
from tiers import cases, looped

from stoker.trainer.config import dotted_paths, overrides
from stoker.trainer.config.compose import PACKAGED_CONF, Composer
from stoker.trainer.config.load import load_run_config
from stoker.trainer.config.problems import ConfigError
from stoker.trainer.config.render import finding_lines
from stoker.trainer.config.schema.root import T5ModelBlock
from stoker.trainer.utils.errors import UserError

pytestmark = pytest.mark.usefixtures("in_tmp_path")
GROUPS = ("model", "data", "tokenizer", "optim", "peft", "trainer", "experiment")
PRESETS = [(group, path.stem) for group in GROUPS for path in sorted((PACKAGED_CONF / group).glob("*.yaml"))]


def refusal(*overrides: str, name: str | None = None, directory: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_run_config(name, directory, overrides, {})
    assert caught.value.exit_code == 2
    return "\n".join(caught.value.lines)


@pytest.mark.parametrize(("group", "name"), cases(PRESETS, fast=12))
def test_every_preset_is_valid(group: str, name: str) -> None:
    given = ["model.data.path=x.txt"] if name in ("text", "shakespeare_char_cpu") else []
    given += ["model.data.data_prefix=x"] if name == "mmap" else []
    given += ["model=t5_tiny"] if group == "data" and name in ("docstring", "jsonl") else []
    given += ["model.data.path=x.jsonl"] if name in ("jsonl", "sft", "chat") else []
    given += ["model.restore_from_path=x", "model.max_position_embeddings=512"] if group == "peft" else []
    if group == "tokenizer":
        files = {
            "gpt2": ["model.tokenizer.vocab_file=v", "model.tokenizer.merge_file=m"],
            "huggingface": ["model.tokenizer.type=x"],
            "sentencepiece": ["model.tokenizer.model=x"],
        }
        given += files.get(name, [])
    config = load(f"{group}={name}", *given)
    assert not [finding for finding in config.findings if finding.level == "warning"]
    assert not historical(config)


def test_presets_that_are_promised_exist() -> None:
    models = {name for group, name in PRESETS if group == "model"}
    assert models >= {"gpt_tiny", "gpt_125m", "gpt2_124m", "llama_1b", "gpt3_1b"}


def test_no_packaged_file_reads_the_environment() -> None:
    for path in PACKAGED_CONF.rglob("*.yaml"):
        assert "oc.env" not in path.read_text(), path


def test_bench_shape() -> None:
    root = load("experiment=llama_1b_bench").root
    model = gpt(root)
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.num_query_groups) == (24, 2048, 16, 4)
    assert (model.ffn_hidden_size, model.activation, model.normalization) == (5632, "swiglu", "rmsnorm")
    assert (model.bias, model.share_embeddings_and_output_weights, model.hidden_dropout) == (False, False, 0.0)
    assert (model.encoder_seq_length, model.micro_batch_size, model.global_batch_size) == (4096, 4, 4)
    assert (model.override_vocab_size, model.data.data_impl) == (32000, "mock")
    assert (root.exp_manager.create_checkpoint_callback, root.trainer.limit_val_batches) == (False, 0)


def test_nanogpt_recipe() -> None:
    root = load("experiment=shakespeare_char_cpu", "model.data.path=f").root
    sched = root.model.optim.sched
    assert (sched.warmup_steps, sched.warmup_ratio, sched.min_lr, root.model.optim.lr) == (100, None, 1e-4, 1e-3)
    assert (root.model.optim.betas, root.trainer.max_steps, root.model.tokenizer.library) == ([0.9, 0.99], 2000, "char")
    assert (root.model.data.splits_string, root.model.data.data_impl) == ("90,10,0", "text")


@pytest.mark.parametrize("form", ["experiment=pystd_gpu", "+experiment=pystd_gpu", "++experiment=pystd_gpu"])
def test_experiment_in_every_form(form: str) -> None:
    config = load(form)
    assert (config.root.name, gpt(config.root).hidden_size) == ("pystd_gpu", 768)


def test_choice_on_the_command_line_beats_the_experiment() -> None:
    config = load("experiment=pystd_gpu", "model=gpt_tiny")
    assert (gpt(config.root).hidden_size, config.root.model.global_batch_size) == (128, 32)


@pytest.mark.parametrize("form", ["trainer=null", "~trainer", "experiment=null", "+trainer=cpu", "model=null"])
def test_a_group_can_be_left_out(form: str) -> None:
    assert load(form).root.trainer.max_steps == 2000


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_all_forms_set_a_key(prefix: str) -> None:
    config = load(f"{prefix}model.num_query_groups=2", f"{prefix}model.hidden_size=64")
    assert (gpt(config.root).num_query_groups, gpt(config.root).hidden_size) == (2, 64)
    assert config.origins["model.hidden_size"].text == f"{prefix}model.hidden_size=64"


def test_tilde_goes_back_to_the_default() -> None:
    config = load("model=gpt_tiny", "~model.hidden_size", "~model.num_layers", "~model.optim.sched")
    assert (gpt(config.root).hidden_size, gpt(config.root).num_layers) == (768, 12)
    assert config.root.model.optim.sched.warmup_ratio is None
    assert str(config.origins["model.hidden_size"]) == "default"


def test_blocks_merge() -> None:
    config = load("model.optim={lr: 0.1, sched: {min_lr: 0.01}}", "model.optim.eps=0.2")
    assert (config.root.model.optim.lr, config.root.model.optim.sched.min_lr) == (0.1, 0.01)
    assert (config.root.model.optim.eps, config.root.model.optim.weight_decay) == (0.2, 0.1)


@pytest.mark.parametrize(
    ("typed", "key", "value"),
    [
        (["trainer.max_steps=10", "trainer.max_steps=20"], "trainer.max_steps", 20),
        (["trainer.max_steps=10", "+trainer.max_steps=20", "++trainer.max_steps=30"], "trainer.max_steps", 30),
        (["trainer.max_steps=10", "~trainer.max_steps"], "trainer.max_steps", 100000),
        (["~trainer.max_steps", "trainer.max_steps=10"], "trainer.max_steps", 10),
        (["model.optim.lr=0.1", "~model.optim"], "model.optim.lr", 2e-4),
        (["model.optim={lr: 0.1}", "model.optim.lr=0.2"], "model.optim.lr", 0.2),
        (["model.optim.lr=0.2", "model.optim={lr: 0.1}"], "model.optim.lr", 0.1),
        (["exp_manager.ema=null", "exp_manager.ema.decay=0.5"], "exp_manager.ema.decay", 0.5),
        (["env_vars={A: '1'}", "env_vars={B: '2'}"], "env_vars", {"B": "2"}),
        (["model=gpt_125m", "model=gpt_tiny"], "model.hidden_size", 128),
        (["data=mock", "+data=pystd"], "model.data.data_impl", "pystd"),
    ],
)
def test_of_a_repeated_override_the_last_wins(typed: list[str], key: str, value: object) -> None:
    config = load_run_config(overrides=typed, environ={})
    assert dotted_paths.get(config.root.model_dump(), key) == value
    *others, last = typed
    notes = [finding.message for finding in config.findings if "given before it on the command line" in finding.message]
    if others[0].startswith("~"):
        assert not notes
    else:
        assert notes == [f"`{last}` replaces {', '.join(others)}, given before it on the command line"]


def test_two_secrets_are_not_shown() -> None:
    (note,) = overrides.parse_overrides(["a.api_key=hush", "a.api_key=hush2"], lambda group: False).notes
    assert note.message == "`a.api_key=***` replaces a.api_key=***, given before it on the command line"


@pytest.mark.parametrize(
    "typed",
    [
        ["trainer.max_steps=10", "+trainer.max_steps=10"],
        ["~trainer.max_steps", "trainer.max_steps=20", "++trainer.max_steps=20"],
        ["~model.optim.sched", "model.optim.sched.warmup_steps=10"],
        ["model=gpt_tiny", "model=gpt_tiny", "model.num_layers=3"],
        ["env_vars={A: '1'}", "env_vars.B='2'"],
        ["model.optim={lr: 0.1}", "model.optim={eps: 0.2}", "model.optim.lr=0.1"],
        ["~model.optim", "~model.optim.sched"],
    ],
)
def test_what_is_given_twice_with_one_meaning_is_accepted(typed: list[str]) -> None:
    load_run_config(overrides=typed, environ={})


def test_defaults_are_below_interpolations() -> None:
    config = load(
        "model=null",
        "model.ffn_hidden_size=${multiply:2,${.hidden_size}}",
        "model.kv_channels=${sum:${.num_layers},-4}",
    )
    assert (gpt(config.root).ffn_hidden_size, gpt(config.root).kv_channels) == (1536, 8)


def test_interpolation_follows_an_override() -> None:
    assert load("model.optim.lr=1e-2").root.model.optim.sched.min_lr == pytest.approx(1e-3)


def test_text_keys_take_text_as_typed() -> None:
    config = load(
        "model.data.splits_string=90,10,0", "trainer.max_time=01:02:03:04", "name=a(b)", "exp_manager.name='x y'"
    )
    assert config.root.model.data.splits_string == "90,10,0"
    assert (config.root.trainer.max_time, config.root.name, config.root.exp_manager.name) == (
        "01:02:03:04",
        "a(b)",
        "x y",
    )


@pytest.mark.parametrize("form", ["warmup_steps: 5", "warmup_steps: 5\n      warmup_ratio: null"])
def test_steps_of_a_users_file_replace_a_ratio_of_a_packaged_one(tmp_path: Path, form: str) -> None:
    write(tmp_path, "experiment/mine", f"# @package _global_\nmodel:\n  optim:\n    sched:\n      {form}\n")
    schedule = load("experiment=mine", directory=tmp_path).root.model.optim.sched
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (5, None)
    both = "# @package _global_\nmodel: {optim: {sched: {warmup_steps: 5, warmup_ratio: 0.5}}}\n"
    write(tmp_path, "experiment/both", both)
    assert "model.optim.sched.warmup_ratio" in problems("experiment=both", directory=tmp_path)


def test_steps_typed_replace_a_ratio_of_a_file() -> None:
    config = load("model.optim.sched.warmup_steps=10")
    assert (config.root.model.optim.sched.warmup_steps, config.root.model.optim.sched.warmup_ratio) == (10, None)
    assert any("replaces" in finding.message for finding in config.findings)
    assert "model.optim.sched.warmup_ratio" in problems(
        "model.optim.sched.warmup_steps=10", "model.optim.sched.warmup_ratio=.1"
    )


def test_own_folder_comes_first(tmp_path: Path) -> None:
    write(tmp_path / "mine", "model/gpt_tiny", "num_layers: 7\n")
    write(tmp_path / "mine", "model/big", "num_layers: 9\nffn_hidden_size: ${multiply:4,${.hidden_size}}\n")
    assert gpt(load(directory=tmp_path / "mine").root).num_layers == 7
    config = load("model=big", directory=tmp_path / "mine")
    assert (gpt(config.root).num_layers, gpt(config.root).ffn_hidden_size) == (9, 3072)
    assert config.origins["model.num_layers"].text == "mine/model/big.yaml:1"


def test_conf_folder_and_variable_are_found(tmp_path: Path) -> None:
    write(tmp_path / "conf", "model/a", "num_layers: 1\n")
    write(tmp_path / "other", "model/a", "num_layers: 2\n")
    write(tmp_path / "other", "model/b", "num_layers: 3\n")
    environ = {"STOKER_CONF": str(tmp_path / "other")}
    assert gpt(load("model=a", environ=environ).root).num_layers == 1
    assert gpt(load("model=b", environ=environ).root).num_layers == 3
    assert gpt(load("model=gpt_tiny", environ=environ).root).num_layers == 4
    assert gpt(load("model=a", directory=tmp_path / "other").root).num_layers == 2


def test_primary_file_without_defaults_list(tmp_path: Path) -> None:
    write(tmp_path, "plain", "model:\n  num_layers: 2\n  hidden_size: 96\n")
    config = load("data=mock", "+tokenizer=char", name="plain", directory=tmp_path)
    assert (gpt(config.root).num_layers, gpt(config.root).ffn_hidden_size) == (2, 3072)
    assert (config.root.model.data.data_impl, config.root.model.tokenizer.library) == ("mock", "char")
    assert gpt(load(name="plain.yaml", directory=tmp_path).root).hidden_size == 96


def test_primary_file_can_extend_the_packaged_one(tmp_path: Path) -> None:
    write(
        tmp_path, "mine", "defaults:\n  - train\n  - override model: gpt2_124m\n  - _self_\ntrainer:\n  max_steps: 7\n"
    )
    config = load(name="mine", directory=tmp_path)
    assert (config.root.trainer.max_steps, config.root.model.override_vocab_size) == (7, 50257)
    assert config.origins["trainer.max_steps"].text == "mine.yaml:6"
    assert [path.name for path in config.files][:2] == ["gpt2_124m.yaml", "pystd.yaml"]


def test_a_value_of_a_later_file_hides_a_block_of_an_earlier_one(tmp_path: Path) -> None:
    write(tmp_path, "base", "env_vars:\n  A: 1\n  B: 2\n")
    write(tmp_path, "top", "defaults: [base, _self_]\nenv_vars:\n  B: 3\n")
    config = load(name="top", directory=tmp_path)
    assert config.root.env_vars == {"A": 1, "B": 3}
    assert {key: str(config.origins[f"env_vars.{key}"]) for key in "AB"} == {"A": "base.yaml:2", "B": "top.yaml:3"}


def test_nemo_file_loads_as_it_is() -> None:
    config = load(name="nemo_style_gpt", directory=DATA)
    root = config.root
    assert (gpt(root).ffn_hidden_size, gpt(root).normalization, gpt(root).hidden_dropout) == (512, "rmsnorm", 0.1)
    assert (root.exp_manager.name, root.trainer.max_time, root.trainer.limit_val_batches) == (
        "nemo_style_gpt",
        "6:11:00:00",
        1.0,
    )
    given = set(config.origins)
    accounted = {row.path for row in config.key_reports}
    assert given <= accounted, given - accounted
    assert "model.pre_process" in historical(config)
    warned = {finding.keys[0] for finding in config.findings if finding.level == "warning"}
    assert warned == {
        "model.normalization",
        "model.apply_query_key_layer_scaling",
        "model.tokenizer.type",
        "model.activations_checkpoint_method",  # without a granularity
    }


def test_t5_file_composes_and_says_what_it_is(tmp_path: Path) -> None:
    write(tmp_path, "base", "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nactivation: geglu\n")
    write(
        tmp_path,
        "t5",
        "defaults:\n  - .@model.encoder: base\n  - .@model.decoder: base\nmodel:\n  encoder:\n    num_layers: 3\n"
        "  share_token_embeddings: true\n  tensor_model_parallel_size: 1\n",
    )
    config = load(name="t5", directory=tmp_path)
    model = config.root.model
    assert isinstance(model, T5ModelBlock)
    assert (model.encoder.num_layers, model.decoder.num_layers, model.decoder.hidden_size) == (3, 2, 64)
    assert config.origins["model.family"].text == "model.encoder and model.decoder are set"


def test_a_reset_names_the_value_there_is_or_none() -> None:
    assert load("~model.seed=1234", "~trainer.max_steps=2000").root.model.seed == 1234
    found = problems("~model.seed=5")
    assert found["model.seed"].lines() == [
        "~model.seed=5 (command line): model.seed = 1234",
        "    is reset only if it is 5; its value is from default",
        "    fix: ~model.seed, or model.seed=5",
    ]
    assert "no such key" in problems("~model.sede=5")["model.sede"].rule


def test_a_file_that_is_not_chosen_cannot_be_left_out(tmp_path: Path) -> None:
    write(tmp_path, "own", "model: {num_layers: 2}\n")
    for group in ("trainer", "model", "data"):
        said = refusal(f"~{group}", name="own", directory=tmp_path)
        assert said.startswith(f"~{group} (command line): no file of the group {group} is chosen")
        assert "fix: " in said
    assert "the file of the group data is pystd, not mock" in refusal("~data=mock")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model=gpt_125"], ["there is no model `gpt_125`", "model=gpt_125m?", "gpt_tiny, llama_1b"]),
        (["experiment=shakespeare"], ["experiment=shakespeare_char_cpu?"]),
        (["+data=pystdd"], ["data=pystd?"]),
    ],
)
def test_unknown_choice_names_the_nearest(overrides: list[str], says: list[str]) -> None:
    said = refusal(*overrides)
    for part in says:
        assert part in said


def test_unknown_names_in_a_defaults_list(tmp_path: Path) -> None:
    write(tmp_path, "a", "defaults:\n  - model: gpt_125\n")
    write(tmp_path, "b", "defaults:\n  - modl: gpt_tiny\n")
    write(tmp_path, "c", "defaults:\n  - model: ???\n")
    write(tmp_path, "d", "defaults:\n  - ../../etc/passwd\n")
    write(tmp_path, "e", "defaults:\n  - 3\n")
    assert "did you mean model=gpt_125m?" in refusal(name="a", directory=tmp_path)
    assert "did you mean model?" in refusal(name="b", directory=tmp_path)
    assert "You must specify 'model'" in refusal(name="c", directory=tmp_path)
    assert "defaults list" in refusal(name="d", directory=tmp_path)
    assert "defaults list" in refusal(name="e", directory=tmp_path)


def test_unknown_primary_file(tmp_path: Path) -> None:
    write(tmp_path, "mine", "name: x\n")
    (tmp_path / "old.yml").write_text("name: x\n")
    assert "did you mean mine?" in refusal(name="mien", directory=tmp_path)
    assert "rename old.yml" in refusal(name="old", directory=tmp_path)
    assert "no such folder" in refusal(directory=tmp_path / "nowhere")
    assert "mine.yaml exists: --config-dir . --config-name mine" in refusal(name="mine.yaml")
    write(tmp_path, "runs/small", "name: x\n")
    assert "--config-dir runs --config-name small" in refusal(name="runs/small.yaml")


def test_a_warning_says_where_its_key_was_set(tmp_path: Path) -> None:
    write(tmp_path, "a", "defaults: [train]\nmodel:\n  activations_checkpoint_method: uniform\n")
    in_file, typed = "a.yaml:3: model.activations_checkpoint_method: ", "model.activations_checkpoint_method=block"
    for words, start in (((), in_file), ((typed,), f"{typed} (command line): ")):
        (finding,) = load(*words, name="a", directory=tmp_path).findings
        (line,) = finding_lines([finding])
        assert line.startswith(f"warning: {start}`activations_checkpoint_method`")
    write(tmp_path, "b", "defaults: [train]\nmodel:\n  apply_query_key_layer_scaling: true\n  num_query_groups: 3\n")
    with pytest.raises(ConfigError) as caught:
        load(name="b", directory=tmp_path)
    assert [finding.origin for finding in caught.value.findings] == ["b.yaml:3"]


def test_bad_yaml_names_file_and_line(tmp_path: Path) -> None:
    write(tmp_path, "twice", "name: x\nmodel:\n  seed: 1\n  seed: 2\n")
    assert refusal(name="twice", directory=tmp_path) == "twice.yaml:4: `model.seed` is given twice"


@looped(
    ("typed", "rule", "fix"),
    [
        ("model.num_layers", "is not an override", "write model.num_layers=VALUE; it takes an integer"),
        ("model.optim.lr=1,2", "several values", "it takes a number > 0"),
        ("model.optim.betas=0.9,0.95", "several values", "model.optim.betas=[0.9,0.95]"),
        ("model=[a", "cannot be read", "quote"),
        ("model/deep=x", "no group `model/deep`", "groups are"),
        ("model.num_layers=range(1,3)", "several values", ""),
        ("=3", "a name is missing", "write NAME=3"),
        ("model..seed=3", "a name is missing", "write model.seed=3"),
        ("model.seed=" + "[" * 3000, "cannot be read", "it takes an integer >= 0, such as model.seed=1234"),
        ("name=" + "x" * 70_000, "longer than", "YAML"),
        ("model.optim.betas=(0.9,0.95)", "cannot be read", "write 'model.optim.betas=[0.9,0.95]'"),
        ("no.such=(a", "cannot be read", "quote it: 'no.such=\"(a\"'"),
        (" model.seed=3", "cannot be read", "write model.seed=3"),
        ("'model seed'=3", "cannot be read", "no spaces"),
        ("mod\u0435l.seed=3", "cannot be read", "beyond a to z"),
        ("10", "is not an override", "write NAME=10"),
        ("conf of mine/run.yaml", "is not an override", "write --config-dir 'conf of mine' --config-name run"),
        ("conf/my gpt.yaml", "is not an override", "write --config-dir conf --config-name 'my gpt'"),
        ("gpt.yaml", "is not an override", "write --config-dir . --config-name gpt"),
        ("/usr/lib", "is not an override", "write --config-dir /usr/lib --config-name NAME"),
    ],
)
def test_unreadable_overrides(typed: str, rule: str, fix: str) -> None:
    (problem,) = problems(typed).values()
    assert rule in problem.rule
    assert fix in problem.fix


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["trainer.max_steps: 10"], "trainer.max_steps=10"),
        (["trainer.max_steps:10"], "trainer.max_steps=10"),
        (["trainer.max_steps:", "10"], "trainer.max_steps=10"),
        (["+trainer.max_steps = 10"], "+trainer.max_steps=10"),
        (["trainer.max_steps", "=", "10"], "trainer.max_steps=10"),
        (["trainer.max_steps=", "10"], "trainer.max_steps=10"),
        (["trainer.max_steps", "=10"], "trainer.max_steps=10"),
        (["trainer.max_steps", "10"], "trainer.max_steps=10"),
        (["name", "=", "my run"], "'name=my run'"),
        (["my.password: hush"], "'my.password=***'"),
    ],
)
def test_words_that_are_an_override_only_together(words: list[str], meant: str) -> None:
    (problem,) = problems("model=gpt_tiny", *words, "model.seed=3").values()
    assert problem.fix == f"write {meant}"
    assert "hush" not in "".join(problem.lines())


def test_words_beside_a_broken_one_keep_their_meaning() -> None:
    found = problems("trainer.max_steps=", "model.seed=-1", "trainer.devices:", "~model.optim.lr", "model.tokenizer")
    assert set(found) == {"trainer.max_steps", "model.seed", "trainer.devices:", "model.tokenizer"}


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("abc", "such as trainer.max_steps=100000"),
        ("", "such as trainer.max_steps=100000"),
        ("10k", "write trainer.max_steps=10000"),
        ("'1,000'", "write trainer.max_steps=1000"),
        ("-1", "trainer.max_steps=100000, or trainer.max_epochs=1"),
    ],
)
def test_a_count_that_is_none_gets_the_word_to_write(value: str, fix: str) -> None:
    assert fix in problems(f"trainer.max_steps={value}")["trainer.max_steps"].fix


def test_file_of_a_group_without_its_package(tmp_path: Path) -> None:
    write(tmp_path, "data/mine", "data_impl: text\n")
    write(tmp_path, "experiment/mine", "model:\n  num_layers: 3\n")
    fix = problems("data=mine", directory=tmp_path)["data.data_impl"].fix
    assert "did you mean model.data.data_impl?" in fix
    assert "# @package model.data" in fix
    fix = problems("experiment=mine", directory=tmp_path)["experiment.model.num_layers"].fix
    assert "did you mean model.num_layers?" in fix
    assert "# @package _global_" in fix


def test_options_are_listed() -> None:
    assert Composer(None).options("data") == ["chat", "docstring", "jsonl", "mmap", "mock", "pystd", "sft", "text"]


def test_private_names_of_hydra_are_in_one_file_and_of_a_checked_version() -> None:
    """A newer Hydra: run this file with it (the private names are there, the answers are the same), then name it."""
    checked = {"1.3.8"}
    assert importlib.metadata.version("hydra-core") in checked
    package = PACKAGED_CONF.parent
    files = [path for room in ("kernels", "models", "trainer", "scripts") for path in (package / room).rglob("*.py")]
    private = {path.name for path in files if re.search(r"(from|import) hydra\._internal", path.read_text())}
    assert private == {"hydra_defaults.py"}


@pytest.mark.parametrize(
    ("files", "circle"),
    [
        ({"a": "[a]"}, "a -> a"),
        ({"a": "[x, b]", "b": "[x, c]", "c": "[x, a]", "x": "[]"}, "a -> b -> c -> a"),
        ({"a": "[{model: m}]", "model/m": "[/a]"}, "a -> model/m -> a"),
    ],
    ids=["itself", "three", "group"],
)
def test_a_circle_of_defaults_lists_is_named(files: dict[str, str], circle: str, tmp_path: Path) -> None:
    for name, defaults in files.items():
        write(tmp_path / "own", name, f"defaults: {defaults}\n")
    says = refusal(name="a", directory=tmp_path / "own")
    assert says == f"defaults list of a: is a circle: {circle}; remove one of these entries"


@pytest.mark.parametrize(
    "files", [{"a": f"[{', '.join(['b'] * 500)}]", "b": "[]"}, {"a": "[b, b, b, b]", "b": "[c, c, c, c, c, c, c]"}]
)
def test_defaults_lists_are_bounded(files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also lists of few files each that name one another: their number grows with each."""
    monkeypatch.setattr("stoker.trainer.config.hydra_defaults.MAX_FILES", 30)
    for name, defaults in ({"c": "[]"} | files).items():
        write(tmp_path / "own", name, f"defaults: {defaults}\n")
    says = refusal(name="a", directory=tmp_path / "own")
    assert says == "defaults list of a: names more than 30 files; remove repeated entries"


@pytest.mark.parametrize(
    "digits", cases(["9" * 5000, "0x" + "f" * 5000, "0b" + "1" * 20_000, "0" + "7" * 5000, "-0o" + "7" * 5000], fast=2)
)
def test_integers_of_thousands_of_digits(digits: str, tmp_path: Path) -> None:
    """Python neither reads nor prints them: in a file, on the command line, and in an interpolation."""
    write(tmp_path / "own", "a", f"model:\n  seed: {digits}\n")
    says = refusal(name="a", directory=tmp_path / "own")
    assert says.endswith("a.yaml:2: has an integer of more than 1000 digits; quote it if it is text")
    for value in (digits, f"[{digits}]", f"${{oc.decode:{digits}}}", f"${{sum:{digits},1}}", f"{digits}k"):
        says = refusal(f"model.seed={value}")
        assert says.endswith("1 error in the configuration; nothing was started")
        assert "int_max_str_digits" not in says


@pytest.mark.parametrize("value", ["${multiply:%s}", "a${multiply:%s}"])
def test_a_product_beyond_all_sizes(value: str) -> None:
    says = refusal("model.seed=" + value % ",".join(["18446744073709551615"] * 400))
    assert "`multiply` gives a number beyond 128 bits" in says


@pytest.mark.parametrize("word", ["name=\udcff", "env_vars.A=\udcff", "model.seed=\udcff", "\udcff=1"])
def test_bytes_that_are_not_text(word: str) -> None:
    assert "is not UTF-8 text" in refusal(word)


@pytest.mark.parametrize("word", ["a." * 3000 + "b=1", "~" + "a." * 3000 + "b"])
def test_keys_of_thousands_of_names(word: str) -> None:
    assert "is nested deeper than 64 levels" in refusal(word)


@pytest.mark.parametrize(
    "word",
    [
        "env_vars.HF_TOKEN=hunter2,b",
        "env_vars.HF_TOKEN.a=hunter2",
        "++env_vars.DB_PASS.a=hunter2",
        "env_vars.HF_TOKEN=a b,hunter2",
        "env_vars.SAS=sv=2020&sig=hunter2",
        "env_vars.URL=https://u:hunter2@host/a(b",
        "env_vars.URL=https://u:hunter2@host/a,b",
        "=https://u:hunter2@host",
    ],
)
def test_errors_show_no_secret(word: str) -> None:
    assert "hunter2" not in refusal(word)


def test_a_byte_order_mark_before_the_package(tmp_path: Path) -> None:
    write(tmp_path / "own" / "experiment", "a", "\ufeff# @package _global_\nname: marked\n")
    assert load_run_config(None, tmp_path / "own", ["experiment=a"], {}).root.name == "marked"


def test_names_longer_than_those_of_files() -> None:
    assert "there is no such key" in refusal("model." + "a" * 5000 + "=1")
    assert "there is no model" in refusal("model=" + "a" * 5000)


def test_origins_after_a_value_replaced_a_block(tmp_path: Path) -> None:
    write(tmp_path / "own", "b", "x: {y: {z: 1}}\nk: 1\n")
    write(tmp_path / "own", "a", "defaults: [b, _self_]\nx: 2\n")
    composition = Composer(tmp_path / "own").compose("a", [])
    assert list(composition.origins) == ["k", "x"]


def test_only_the_first_unknown_keys_get_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.trainer.config.nemo.key_states._MAX_SUGGESTIONS", 2)
    says = refusal("model.num_layerss=1", "model.hidden_sizee=1", "model.num_layersss=1")
    assert says.count("did you mean") == 2


@looped(
    "entry",
    [
        *(
            "1",
            "null",
            "true",
            "''",
            "[a]",
            "{}",
            "{model: 1}",
            "{model: {a: b}}",
            "{model: [1]}",
            "{model: a, data: b}",
        ),
        "_self_, _self_",
    ],
)
def test_an_entry_of_a_defaults_list_that_is_no_name_is_one_line(entry: str, tmp_path: Path) -> None:
    text = f"\ndefaults: [{entry}]\n"
    write(tmp_path / "conf", "bad", text)
    write(tmp_path / "conf" / "model", "bad", text)
    for name, choice, file in (("bad", [], "bad.yaml"), (None, ["model=bad"], "model/bad.yaml")):
        line = refusal(*choice, name=name)
        assert line.startswith(f"conf/{file}:2: the defaults list holds ")
        assert "\n" not in line


def test_an_override_in_a_defaults_list_without_its_group_is_named(tmp_path: Path) -> None:
    write(tmp_path, "bad", "defaults: [override model: gpt_tiny]\n")
    text = refusal(name="bad", directory=tmp_path)
    assert text.startswith("defaults list of bad: Could not override 'model'")
    assert "fix: name the group without `override`" in text


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("override /model: gpt_tinny", ["there is no model `gpt_tinny`", "did you mean model=gpt_tiny?"]),
        ("override /dta: mock", ["there is no group `dta`", "did you mean data?"]),
        ("/dta: mock", ["there is no group `dta`", "did you mean data?"]),
        ("/model: gpt_tiny", ["the group model is chosen already", "fix: - override /model: NAME"]),
    ],
)
def test_a_wrong_entry_of_a_defaults_list_is_found(tmp_path: Path, entry: str, says: list[str]) -> None:
    for text, line in ((f"defaults:\n  - {entry}\n", 3), (f"name: x\ndefaults: [{entry}]\n", 3)):
        write(tmp_path / "experiment", "bad", f"# @package _global_\n{text}")
        found = refusal("experiment=bad", directory=tmp_path)
        assert re.match(rf"\S*experiment/bad.yaml:{line}: ", found), found
        assert all(words in found for words in says), found


def test_unquoted_list_with_spaces_is_one_problem() -> None:
    found = problems("model.optim.betas=[0.9,", "0.95]", "name=x")
    assert [*found] == ["model.optim.betas=[0.9, 0.95]"]
    assert found["model.optim.betas=[0.9, 0.95]"].fix == "write 'model.optim.betas=[0.9,0.95]'"
    block = problems("model.data.data_prefix={train:", "[a],", "test:", "[b]}")
    assert [problem.fix for problem in block.values()] == ["write 'model.data.data_prefix={train: [a],test: [b]}'"]
    assert "name=x" not in problems("model.optim.betas=[0.9,", "name=x")


@looped("word", ["other", "other.yml", "experiment=other"])
def test_files_that_end_in_yml_are_to_be_renamed(word: str, tmp_path: Path) -> None:
    write(tmp_path, "experiment/one", "# @package _global_\nname: x\n")
    for name in ("other", "experiment/other"):
        (tmp_path / f"{name}.yml").write_text("name: x\n")
    choice = [word] if "=" in word else []
    with pytest.raises(UserError) as caught:
        load(*choice, name=None if choice else word, directory=tmp_path)
    assert re.search(r"rename \S*other.yml to other.yaml", str(caught.value))
