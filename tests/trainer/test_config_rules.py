"""Each rule between keys: one configuration that it accepts, one that it refuses or warns of, naming the keys."""

import random
from pathlib import Path
from typing import Any

import pytest
from config_helpers import load, problems, write
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples, full_only, looped

from stoker.kernels.attention.flags import KNOWN_FLAGS
from stoker.trainer.config.load import config_from_document, load_run_config
from stoker.trainer.config.problems import ConfigError
from stoker.trainer.config.rules import all_rules
from stoker.trainer.config.run_config import RunConfig
from stoker.trainer.config.schema.key_index import schema_keys
from stoker.trainer.utils.environment import format_variable

BEST, STOPPING = "exp_manager.checkpoint_callback_params", "exp_manager.early_stopping_callback_params"
SCHED = "model.optim.sched"
KWARGS = "model.data.dataset_kwargs"


DATA_RESET = "model.data.reset_position_ids"
HYBRID = [
    "model.fsdp=true",
    "model.fsdp_sharding_strategy=hybrid",
    "model.micro_batch_size=2",
    "model.global_batch_size=8",
]


@looped(
    ("overrides", "key", "says"),
    [
        (["trainer.devices=2", "trainer.accelerator=mps"], "trainer.devices", "one process"),
        (
            [
                "trainer.devices=3",
                "model.global_batch_size=12",
                "model.fsdp=True",
                "model.fsdp_sharding_strategy=hybrid",
                "model.fsdp_shard_size=2",
            ],
            "model.fsdp_shard_size",
            "divide",
        ),
        (
            [*HYBRID, "trainer.devices=4", "model.fsdp_shard_size=2", "model.copy_engine_collectives=true"],
            "model.copy_engine_collectives",
            "(2) copies of each shard",
        ),
        (
            [*HYBRID, "trainer.devices=2", "trainer.num_nodes=2", "model.copy_engine_collectives=true"],
            "model.copy_engine_collectives",
            "(2) copies of each shard",
        ),
        (["model.rampup_batch_size=[3,4,100]", "model.micro_batch_size=1"], "model.rampup_batch_size", "not reached"),
        (["model.rampup_batch_size=[2,2,100]"], "model.rampup_batch_size", "multiple of"),
        (["model.global_batch_size=10", "model.micro_batch_size=4"], "model.global_batch_size", "multiple"),
        ([f"{SCHED}.warmup_steps=1", f"{SCHED}.warmup_ratio=0.1"], f"{SCHED}.warmup_ratio", "only one"),
        ([f"{SCHED}.constant_steps=1", f"{SCHED}.constant_ratio=0.1"], f"{SCHED}.constant_ratio", "only one"),
        ([f"{SCHED}.min_lr=0.1"], f"{SCHED}.min_lr", "larger"),
        (["model.data.data_impl=text"], "model.data.path", "needs a file"),
        (["data=text"], "model.data.path", "must be given"),
        (["model.data.path=x"], "model.data.path", "data_impl: text`, `jsonl`, `huggingface` only"),
        (["model.data.splits_string=0,50,50"], "model.data.splits_string", "training"),
        (["model.data.splits_string='1'"], "model.data.splits_string", "validation"),
        (
            ["model.data.seq_length=4096", "model.position_embedding_type=learned_absolute"],
            "model.data.seq_length",
            "must equal",
        ),
        (["model.num_query_groups=3"], "model.num_query_groups", "multiple"),
        (["env_vars.A=2"], "env_vars.A", "contradicts"),
        (["name=../x"], "name", "below"),
        (["name=" + "a" * 256], "name", "longer than 255 bytes"),
        (["name='a\x1b[31m'"], "name", "printable"),
        (["env_vars.PGPASSWORD=abc"], "env_vars.PGPASSWORD", "secret"),
        (
            ["exp_manager.mlflow_logger_kwargs.tracking_uri=https://me:abc@host"],
            "exp_manager.mlflow_logger_kwargs.tracking_uri",
            "password",
        ),
        (["exp_manager.name=/x"], "exp_manager.name", "below"),
        (["exp_manager.version=a/../../x"], "exp_manager.version", "below"),
        (["trainer.max_time=00:00:00:00"], "trainer.max_time", "at least one second"),
        (["exp_manager.max_time_per_run=00:00:00:00"], "exp_manager.max_time_per_run", "at least one second"),
        (["env_vars.HF_TOKEN=abc"], "env_vars.HF_TOKEN", "secret"),
        ([f"{KWARGS}.password=abc"], f"{KWARGS}.password", "secret"),
        ([f"{KWARGS}.token=hf_0123456789abcdef"], f"{KWARGS}.token", "secret"),
        ([f"{KWARGS}.url=https://me:abc@host/x"], f"{KWARGS}.url", "secret"),
        ([f"{KWARGS}.urls=[https://host/x,https://me:abc@host/x]"], f"{KWARGS}.urls", "secret"),
    ],
)
def test_refused(overrides: list[str], key: str, says: str) -> None:
    problem = problems(*overrides, environ={"A": "1"})[key]
    assert says in problem.rule
    assert problem.fix


@looped(
    "overrides",
    [
        ["model.global_batch_size=12", "model.micro_batch_size=4"],
        [f"{SCHED}.warmup_steps=1999"],
        [f"{SCHED}.min_lr=1e-3"],
        ["data=text", "model.data.path=x"],
        ["model.data.splits_string='1'", "trainer.limit_val_batches=0"],
        ["model.data.splits_string='0,1'", "data=mock"],
        ["model.data.seq_length=128", "model.encoder_seq_length=128"],
        ["env_vars.A=1"],
        ["env_vars.A=true"],
        ["trainer.devices=auto"],
        [*HYBRID, "trainer.devices=4", "model.fsdp_shard_size=2", "model.copy_engine_collectives=false"],
        [*HYBRID, "trainer.devices=4", "model.fsdp_shard_size=4", "model.copy_engine_collectives=true"],
        [f"{KWARGS}.text_key=text", f"{KWARGS}.eos_token='</s>'", f"{KWARGS}.max_token=16"],
        [f"{KWARGS}.password=${{oc.env:A}}", f"{KWARGS}.url=https://host/x", "env_vars.HF_TOKEN=${oc.env:A}"],
    ],
)
def test_accepted(overrides: list[str]) -> None:
    load(*overrides, environ={"A": "1"})


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model.apply_query_key_layer_scaling=true"], "model.apply_query_key_layer_scaling"),
        (["model.megatron_amp_O2=true", "trainer.precision=32"], "model.megatron_amp_O2"),
        ([f"{SCHED}.name=WarmupAnnealing", f"{SCHED}.constant_steps=10"], f"{SCHED}.constant_steps"),
        (["exp_manager.explicit_log_dir=a", "exp_manager.name=b"], "exp_manager.name"),
        (["exp_manager.resume_if_exists=true", "exp_manager.version=b"], "exp_manager.version"),
        (
            ["exp_manager.create_checkpoint_callback=false", "exp_manager.checkpoint_callback_params.save_top_k=1"],
            "exp_manager.checkpoint_callback_params.save_top_k",
        ),
        ([f"{BEST}.mode=max"], f"{BEST}.mode"),
        ([f"{BEST}.mode=max", f"{BEST}.monitor=bits_per_byte"], f"{BEST}.mode"),
        ([f"{BEST}.mode=max", f"{BEST}.monitor=grad_norm"], "nothing"),
        ([f"{STOPPING}.mode=max", "exp_manager.create_early_stopping_callback=true"], f"{STOPPING}.mode"),
        (["model.position_embedding_type=none", "model.rotary_base=5000"], "model.rotary_base"),
        (["model.position_embedding_type=Kerple"], "model.position_embedding_type"),
        *(
            ([f"model.position_embedding_type={kind}", "model.data.reset_position_ids=true"], DATA_RESET)
            for kind in ("alibi", "relative", "learned_parameters", "none")
        ),
        (["model.position_embedding_type=xpos", "model.data.reset_position_ids=true"], "nothing"),
        (["model.window_size=[3,1]"], "model.window_size"),
        (["model.position_embedding_type=rope", "model.rotary_high_turns=9"], "model.rotary_high_turns"),
        (["env_vars.NVTE_FLASH_ATN=0"], "env_vars.NVTE_FLASH_ATN"),
        (["data=mock", "tokenizer=char"], "model.tokenizer.library"),
        (["env_vars.NVTE_FUSED_ATTN=0"], "nothing"),
        ([*HYBRID, "trainer.devices=4"], "model.fsdp_sharding_strategy"),
        ([*HYBRID, "trainer.devices=4", "model.fsdp_shard_size=4"], "model.fsdp_sharding_strategy"),
        ([*HYBRID, "trainer.devices=4", "model.fsdp_shard_size=2"], "nothing"),
        ([*HYBRID, "trainer.devices=2", "trainer.num_nodes=2"], "nothing"),
    ],
)
def test_warned(overrides: list[str], key: str) -> None:
    warned = [finding.keys[0] for finding in load(*overrides).findings if finding.level == "warning"]
    assert warned == ([] if key == "nothing" else [key])


PLACES = [
    "exp_dir",
    "explicit_log_dir",
    "name",
    "version",
    "resume_from_checkpoint",
    "checkpoint_callback_params.dirpath",
]


@looped("override", ["name=", *(f"exp_manager.{key}=" for key in PLACES)])
def test_empty_text_is_not_null(override: str) -> None:
    assert "is empty text" in problems(override)[override[:-1]].rule


@pytest.mark.parametrize("text", ['"A=B": 1', 'A: "x\\0"', '"A\\0": 1'])
def test_variables_that_cannot_be_set(text: str, tmp_path: Path) -> None:
    write(tmp_path, "mine", f"defaults: [train, _self_]\nenv_vars: {{{text}}}\n")
    (problem,) = problems(name="mine", directory=tmp_path).values()
    assert "null byte" in problem.rule


def test_a_value_of_the_environment_is_not_shown() -> None:
    (problem,) = problems("name=${oc.env:SECRET}", environ={"SECRET": "/hidden"}).values()
    assert "hidden" not in str(problem)


def test_an_army_of_workers_is_refused() -> None:
    load("model.data.num_workers=256")
    assert "<= 256" in problems("model.data.num_workers=257")["model.data.num_workers"].rule


def test_defaults_alone_warn_of_nothing() -> None:
    assert not load("model=null", "optim=null", "data=mock").findings


def test_unknown_flags_of_the_environment() -> None:
    (warning,) = load(environ={"NVTE_FLASH_ATTEN": "0", "NVTE_FLASH_ATTN": "0"}).findings
    assert warning.level == "warning"
    assert warning.fix == "NVTE_FLASH_ATTN"
    assert not load(environ=dict.fromkeys(KNOWN_FLAGS, "1")).findings


@looped(("value", "text"), [(True, "1"), (False, "0"), (3, "3"), ("on", "on"), (0.5, "0.5"), ("", "")])
def test_environment_text(value: Any, text: str) -> None:
    assert format_variable(value) == text


@examples(40)
@given(st.integers(1, 64), st.integers(1, 64))
def test_the_fix_of_a_batch_size_works(together: int, micro: int) -> None:
    if together % micro == 0:
        return
    problem = problems(f"model.global_batch_size={together}", f"model.micro_batch_size={micro}")[
        "model.global_batch_size"
    ]
    for fix in problem.fix.split(", or "):
        keys = {"model.global_batch_size": together, "model.micro_batch_size": micro}
        key, _, value = fix.partition("=")
        keys[key] = int(value)
        load(*(f"{key}={value}" for key, value in keys.items()))


JUNK = ["null", "true", "-1", "0", "1", "3", "7", "1e-3", "0.5", "nan", "word", "''", "[1,2]", "{a:1}", "???", "1e400"]
JUNK += ["-inf", "[[[]]]", "9" * 20, "${model.seed}", "${nope}", "${multiply:2,${model.num_layers}}"]


def junk(count: int, seed: int) -> None:
    """Random values at random keys: a typed configuration, or lines that name the keys. Nothing else."""
    chance = random.Random(seed)
    paths = list(schema_keys())
    refused = 0
    for _ in range(count):
        overrides = [
            f"{chance.choice(['', '+', '++'])}{path}={_value(path, chance)}"
            for path in chance.sample(paths, chance.randint(1, 3))
        ]
        config = _config_or_error(overrides)
        if isinstance(config, ConfigError):
            refused += 1
            assert config.problems
            assert all(problem.key and problem.rule and problem.origin for problem in config.problems), overrides
            assert any(override.lstrip("+").partition("=")[0] in str(config) for override in overrides), overrides
        else:
            assert config_from_document(config.document).root == config.root
    assert count // 10 < refused < count


def _config_or_error(overrides: list[str]) -> RunConfig | ConfigError:
    try:
        return load(*overrides)
    except ConfigError as error:
        return error


def _value(path: str, chance: random.Random) -> str:
    choices = schema_keys()[path].choices
    return str(chance.choice(choices)) if choices and chance.random() < 0.5 else chance.choice(JUNK)


def test_random_configurations() -> None:
    junk(40, 1)


@full_only
def test_many_random_configurations() -> None:
    junk(3000, 2)


def test_shares_of_a_batch_are_not_judged_beside_a_refused_way_to_cut_the_model() -> None:
    """Llama 3.1 405B of NeMo: 4,608 GPUs, of which 32 have samples of their own."""
    asked = ["model.global_batch_size=2016", "model.micro_batch_size=1", "trainer.devices=8", "trainer.num_nodes=576"]
    sizes = {"tensor_model": 8, "pipeline_model": 9, "context": 2}
    cut = [f"model.{name}_parallel_size={size}" for name, size in sizes.items()]
    found = problems(*asked, *cut)
    assert "model.pipeline_model_parallel_size" in found
    assert "model.global_batch_size" not in found
    assert problems(*asked).keys() == {"model.global_batch_size"}


def test_a_batch_is_shared_by_the_data_parallel_ranks() -> None:
    devices, batch = ["trainer.devices=8", "model.micro_batch_size=1"], "model.global_batch_size"
    assert load(*devices, f"{batch}=2", "model.tensor_model_parallel_size=4").root.model.global_batch_size == 2
    (problem,) = problems(*devices, f"{batch}=3", "model.tensor_model_parallel_size=4").values()
    assert "data-parallel ranks (2)" in problem.rule
    assert (problem.key, problem.fix) == (batch, f"{batch}=4")


def test_every_module_of_rules_is_run() -> None:
    files = {path.stem for path in Path(all_rules.__file__).parent.glob("*_rules.py")} - {"all_rules"}
    assert {rule.__module__.rpartition(".")[2] for rule in all_rules.RULES} == files


@looped("key", ["name", "exp_manager.name", "exp_manager.exp_dir", "exp_manager.explicit_log_dir"])
def test_a_secret_is_no_name_of_a_directory(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(None, None, [f"{key}='a-${{oc.env:MY_TOKEN}}'"], {"MY_TOKEN": "hush1234"})
    text = "\n".join(caught.value.lines)
    assert f"`{key.rpartition('.')[2]}` holds the value of MY_TOKEN, a secret" in text
    assert "hush1234" not in text
    load_run_config(None, None, [f"{key}='a-${{oc.env:MY_NAME}}'"], {"MY_NAME": "hush1234"})
