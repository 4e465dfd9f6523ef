"""A key that is not known is always refused, with the key that was meant first."""

import random
import string
from collections.abc import Iterator
from pathlib import Path

import pytest
from config_helpers import load, problems, write
from tiers import extra, full_only, looped

from stoker.trainer.config.nemo.key_states import is_known_key, key_state, known_keys, suggest_keys
from stoker.trainer.config.nemo.key_table import KeyState
from stoker.trainer.config.nemo.other_frameworks import foreign_names
from stoker.trainer.config.problems import Problem
from stoker.trainer.config.schema.key_index import schema_keys
from stoker.trainer.config.suggest import closest, edit_distance

LETTERS = string.ascii_lowercase + "_"
LEAVES = list(schema_keys())


def typos(path: str, chance: random.Random, rounds: int) -> Iterator[str]:
    """One-letter mistakes in the last name of `path`: a letter gone, added, wrong, or two swapped."""
    parent, dot, name = path.rpartition(".")
    for _ in range(rounds):
        at = chance.randrange(len(name))
        letter = chance.choice(LETTERS)
        swapped = name[:at] + name[at : at + 2][::-1] + name[at + 2 :]
        for wrong in (
            name[:at] + name[at + 1 :],
            name[:at] + letter + name[at:],
            name[:at] + letter + name[at + 1 :],
            swapped,
        ):
            typo = parent + dot + wrong
            if wrong and wrong[0] != "_" and not is_known_key(typo):
                yield typo


def count(pairs: list[tuple[str, str]]) -> tuple[int, list[tuple[str, str]]]:
    """How many typos there were, and those whose first suggestion is another key."""
    wrong = [(path, typo) for path, typo in pairs if suggest_keys(typo)[:1] != (path,)]
    return len(pairs), wrong


def check_first_suggestions(seed: int, of_each: int, leaves: list[str]) -> None:
    chance = random.Random(seed)
    total, wrong = count([(path, typo) for path in leaves for typo in typos(path, chance, of_each)])
    assert total > 2 * of_each * len(leaves)
    assert len(wrong) <= 0.05 * total, wrong


def test_a_typo_names_the_right_key_first() -> None:
    check_first_suggestions(1, 1, LEAVES[::8])


@full_only
def test_many_typos_name_the_right_key_first() -> None:
    check_first_suggestions(2, 4, LEAVES)


ROUTES = ("k=v", "+k=v", "++k=v", "experiment", "user's file")


def through(route: str, typo: str, tmp_path: Path) -> dict[str, Problem]:
    """The problems of a configuration that has `typo` in one of the places a key can be."""
    if route in ROUTES[:3]:
        return problems(route[:-3] + typo + "=1")
    *blocks, name = typo.split(".")
    text = (
        "".join("  " * depth + f"{block}:\n" for depth, block in enumerate(blocks))
        + "  " * len(blocks)
        + f"{name}: 1\n"
    )
    if route == "experiment":
        write(tmp_path, "experiment/typo", "# @package _global_\n" + text)
        return problems("experiment=typo", directory=tmp_path)
    write(tmp_path, "typo", text)
    return problems(name="typo", directory=tmp_path)


def check_routes(rounds: int, share: float, tmp_path: Path) -> None:
    chance = random.Random(2)
    for route in ROUTES:
        total = right = 0
        for path in LEAVES:
            for typo in typos(path, chance, rounds):
                if chance.random() > share:
                    continue
                problem = through(route, typo, tmp_path)[typo]
                assert "there is no such key" in problem.rule
                assert problem.origin
                total += 1
                right += f"did you mean {path}?" in problem.fix
        assert total
        assert right >= 0.95 * total, (route, right, total)


def test_typos_are_refused_on_every_route(tmp_path: Path) -> None:
    check_routes(1, 0.01, tmp_path)


@full_only
def test_all_typos_are_refused_on_every_route(tmp_path: Path) -> None:
    check_routes(2, 1.0, tmp_path)


def test_typos_in_the_name_of_a_block() -> None:
    for typo, right in (
        ("modle.num_layers", "model.num_layers"),
        ("trainr.max_steps", "trainer.max_steps"),
        ("model.optm.lr", "model.optim.lr"),
        ("exp_manger.exp_dir", "exp_manager.exp_dir"),
        ("model.optim.schd.min_lr", "model.optim.sched.min_lr"),
    ):
        assert suggest_keys(typo)[0] == right


@looped(
    ("wrong", "right"),
    [
        ("lr", "model.optim.lr"),
        ("max_steps", "trainer.max_steps"),
        ("model.lr", "model.optim.lr"),
        ("model.max_steps", "trainer.max_steps"),
        ("num_layers", "model.num_layers"),
        ("data.path", "model.data.path"),
        ("trainer.num_layers", "model.num_layers"),
        ("model.moe_router_top_k", "model.moe_router_topk"),
        ("model.num_querry_groups", "model.num_query_groups"),
        ("model.optim.sched.warmup", "model.optim.sched.warmup_steps"),
    ],
)
def test_right_name_in_the_wrong_place(wrong: str, right: str) -> None:
    assert right in suggest_keys(wrong)[:2]


def test_no_historical_key_is_suggested() -> None:
    historical = [path for path, acts in known_keys() if not acts and key_state(path) is KeyState.HISTORICAL]
    assert len(historical) > 100
    for path in (*historical[::7], "resume", "exp_manager.checkpoint_callback_params.n_resum"):
        for near in suggest_keys(f"{path}x" if is_known_key(path) else path):
            assert key_state(near) is not KeyState.HISTORICAL, (path, near)


def test_of_equal_names_the_one_nearest_to_the_top_comes_first() -> None:
    assert suggest_keys("max_steps")[0] == "trainer.max_steps"


def test_foreign_names_are_many_and_lead_to_known_keys() -> None:
    assert len(foreign_names()) >= 80
    known = {path for path, _ in known_keys()}
    last_names = {path.rpartition(".")[2] for path in schema_keys()}
    # Names of ours that mean something else where other tools write them.
    elsewhere = {"d_model", "decay", "beta1", "run_name", "experiment_name", "cpu_offload", "init_std", "norm_type"}
    for name, target in foreign_names().items():
        assert target in known, name
        assert name not in last_names or name in elsewhere, name


@pytest.mark.parametrize("places", [1, *extra(2)])
def test_a_foreign_name_is_suggested_and_never_accepted(places: int) -> None:
    """In the block of the model and outside of all; by turns in the fast tests."""
    for number, (name, target) in enumerate(foreign_names().items()):
        below = (f"model.{name}", name)[:: -1 if number % 2 else 1][:places]
        for path in (name,) if "." in name else below:
            if not is_known_key(path):
                assert target in suggest_keys(path)[:2], (path, suggest_keys(path))


def test_foreign_names_through_the_front_door() -> None:
    for typed, right in (
        ("model.n_kv_heads=2", "model.num_query_groups"),
        ("+model.num_experts_per_tok=2", "model.moe_router_topk"),
        ("++model.gradient_checkpointing=true", "model.activations_checkpoint_granularity"),
        ("learning_rate=1e-3", "model.optim.lr"),
        ("model.fp8_format=hybrid", "model.fp8_hybrid"),
        ("model.cpu_offload=true", "model.cpu_offloading"),
        ("model.optim.cpu_offload=true", "model.cpu_offloading_optimizer"),
    ):
        (problem,) = problems(typed).values()
        assert f"did you mean {right}?" in problem.fix


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("modules=[core_attn,layernorm]", "layernorm is norm: {key}modules=[core_attention,norm]"),
        ("modules=norm", "write {key}modules=[norm]"),
        ("granularity=none", "write {key}granularity=null"),
    ],
)
@pytest.mark.parametrize("stack", ["", "encoder."])
def test_words_of_megatron_for_recomputation(given: str, fix: str, stack: str) -> None:
    key = f"model.{stack}activations_checkpoint_"
    (problem,) = problems("model=t5_tiny" if stack else "model=gpt_tiny", key + given).values()
    assert problem.fix.endswith(fix.format(key=key))


def test_an_empty_list_is_said_to_be_empty() -> None:
    (problem,) = problems("model.activations_checkpoint_modules=[]").values()
    assert problem.rule.endswith("or null, but is empty")


@looped(
    ("a", "b", "edits"),
    [
        ("abc", "abc", 0),
        ("abc", "acb", 1),
        ("abc", "ab", 1),
        ("abc", "abxc", 1),
        ("abc", "xyz", 3),
        ("", "ab", 2),
        ("ca", "abc", 3),
    ],
)
def test_distance(a: str, b: str, edits: int) -> None:
    assert edit_distance(a, b, 5) == edit_distance(b, a, 5) == edits
    assert edit_distance(a, b, 1) == min(edits, 2)


def test_closest_value() -> None:
    assert closest("Layer-Norm", ["layernorm", "rmsnorm"]) == "layernorm"
    assert closest("gpt", ["gpt_tiny", "llama"]) == "gpt_tiny"
    assert closest("zzz", ["layernorm"]) is None


def test_what_is_known_is_not_refused() -> None:
    for path in LEAVES:
        assert is_known_key(path)
    assert load("env_vars.ANY_NAME=1").root.env_vars == {"ANY_NAME": 1}


TEMPLATE = """\
defaults: [train, {debug: default}, _self_]
task_name: demo
tags: [dev]
train: true
callbacks: {a: {_target_: x.Y}, b: {patience: 1}}
paths:
  root_dir: ${oc.env:PROJECT_ROOT}
  log_dir: ${paths.root_dir}/logs
exp_manager: {exp_dir: "${paths.log_dir}", explicit_log_dir: "${paths.log_dir}/x"}
mine: {place: /tmp}
name: ${mine.place}
seed: 1
optimized_metric: val_loss
ckpt_path: null
model: {scheduler: {_target_: x.Z, factor: 0.1}}
"""


def test_files_of_lightning_hydra_template_are_told_what_becomes_of_each_block(tmp_path: Path) -> None:
    write(tmp_path, "debug/default", "# @package _global_\ndata: {num_workers: 0}\n")
    write(tmp_path, "data/mine", "num_workers: 0\n")
    write(tmp_path, "tmpl", TEMPLATE)
    found = problems(name="tmpl", directory=tmp_path)
    for key, fix in (
        ("task_name", "did you mean name?"),
        ("seed", "did you mean model.seed?"),
        ("optimized_metric", "did you mean exp_manager.checkpoint_callback_params.monitor?"),
        ("ckpt_path", "did you mean exp_manager.resume_from_checkpoint?"),
        ("tags", "leave it out; "),
        ("train", "leave it out; the verb"),
        ("callbacks.a._target_", "leave it out; exp_manager.checkpoint_callback_params"),
        ("model.scheduler._target_", "model.optim.sched"),
        ("mine.place", "go below `run:`"),
    ):
        assert fix in found[key].fix, (key, found[key])
    assert "callbacks.b.patience" not in found
    not_set = [problem for problem in found.values() if "`PROJECT_ROOT`" in problem.rule]
    assert [problem.key for problem in not_set] == ["paths.root_dir"]
    assert len(not_set[0].also) == 3
    assert found["data.num_workers"].fix == "did you mean model.data.num_workers?"
    of_group = problems("data=mine", "~debug", name="tmpl", directory=tmp_path)["data.num_workers"]
    assert "needs the line `# @package model.data`" in of_group.fix


def test_reference_to_nothing_names_the_block_for_values_of_ones_own() -> None:
    assert "go below `run:`" in problems("name='${zzzz.qqqq}'")["name"].fix
    assert load("+run.zzzz=a", "name='${run.zzzz}'").root.name == "a"


def test_variables_of_ones_own_in_a_file_of_a_group(tmp_path: Path) -> None:
    """The example of docs/hydra.md."""
    write(
        tmp_path, "paths/default", "# @package run\nroot_dir: ${oc.env:PROJECT_ROOT,.}\nlog_dir: ${run.root_dir}/logs\n"
    )
    write(tmp_path, "mine", 'defaults: [train, {paths: default}, _self_]\nexp_manager: {exp_dir: "${run.log_dir}"}\n')
    assert load(name="mine", directory=tmp_path).root.exp_manager.exp_dir == "./logs"
