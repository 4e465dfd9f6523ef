"""The `hydra:` block: directories, launchers and sweepers, values of `${hydra:...}` and `${now:...}`, and refusals."""

import time
from pathlib import Path

import pytest
from config_helpers import gpt, load, problems, write
from tiers import looped

import stoker
from stoker.models.config import extensions
from stoker.trainer.config.hydra_node import RunContext
from stoker.trainer.config.load import config_from_document, load_hydra_settings, load_run_config
from stoker.trainer.config.run_config import RunConfig
from stoker.trainer.config.schema import hydra as schema
from stoker.trainer.utils.errors import UserError

pytestmark = pytest.mark.usefixtures("in_tmp_path")
LOCAL, SLURM, OPTUNA = "hydra/launcher=submitit_local", "hydra/launcher=submitit_slurm", "hydra/sweeper=optuna"


def job(*overrides: str, number: int = 3, swept: tuple[str, ...] = (), name: str = "train") -> RunConfig:
    context = RunContext(is_multirun=True, job_number=number, swept=swept)
    return load_run_config(name, Path(), overrides, {}, context=context)


def settings(*overrides: str, name: str = "train"):
    return load_hydra_settings(name, Path(), overrides, context=RunContext(is_multirun=True))


def notes(config) -> list[str]:
    return [finding.message for finding in config.findings]


def test_run_directory_from_file_and_command_line(tmp_path: Path) -> None:
    write(tmp_path, "h", "defaults: [train, _self_]\nname: n\nhydra:\n  run: {dir: 'logs/${name}'}\n")
    config = load(name="h", directory=tmp_path)
    assert config.root.exp_manager.explicit_log_dir == "logs/n"
    assert config.origins["exp_manager.explicit_log_dir"].text == "h.yaml:4"
    config = load("hydra.run.dir=other", name="h", directory=tmp_path)
    assert config.root.exp_manager.explicit_log_dir == "other"
    assert load("hydra.run.dir=a", "exp_manager.explicit_log_dir=a").root.exp_manager.explicit_log_dir == "a"
    wrong = problems("exp_manager.explicit_log_dir=b", name="h", directory=tmp_path)["hydra.run.dir"]
    assert "both set the run directory" in wrong.rule
    assert wrong.origin == "h.yaml:4"
    assert "exp_manager.explicit_log_dir=b (command line)" in wrong.also[0]
    assert any("`hydra.run.dir: .` has no effect" in note for note in notes(load("hydra.run.dir=.")))


def test_values_of_hydra_are_fixed_when_composed(tmp_path: Path) -> None:
    words = [
        "model=t5_tiny",
        "name='${hydra:job.name}-${hydra.runtime.choices.model}'",
        "exp_manager.exp_dir='${hydra:runtime.cwd}/${now:%Y}'",
    ]
    config = load(*words)
    assert config.document["name"] == "train-t5_tiny"
    assert config.document["exp_manager"]["exp_dir"] == f"{tmp_path}/{time.strftime('%Y')}"
    inside = load("hydra.run.dir=r", "exp_manager.checkpoint_callback_params.dirpath='${hydra:runtime.output_dir}/c'")
    assert inside.root.exp_manager.checkpoint_callback_params.dirpath == "r/c"
    of_job = job("name='${hydra:job.num}-${hydra:job.override_dirname}'", swept=("+model.seed=2", "model=t5_tiny"))
    assert of_job.document["name"] == "3-model.seed=2,model=t5_tiny"
    separators = ["hydra.job.config.override_dirname={kv_sep: '-', item_sep: '+', exclude_keys: [model]}"]
    of_job = job("name='${hydra:job.override_dirname}'", *separators, swept=("model.seed=2", "model=x", "a=1"))
    assert of_job.document["name"] == "a-1+model.seed-2"


def test_text_with_a_variable_is_saved_without_the_time(tmp_path: Path) -> None:
    config = load("exp_manager.exp_dir='${oc.env:PLACE}/${now:%Y}-${hydra:job.name}'", environ={"PLACE": "p"})
    assert config.document["exp_manager"]["exp_dir"] == f"${{oc.env:PLACE}}/{time.strftime('%Y')}-train"
    assert config.root.exp_manager.exp_dir == f"p/{time.strftime('%Y')}-train"


@looped(
    ("word", "says"),
    [
        ("${hydra:job.num}", "has a value in the jobs of `stoker train -m` only"),
        ("${hydra:job.id}", "composed before it is submitted"),
        ("${hydra:runtime.output_dir}", "has a value only if hydra.run.dir"),
        ("${hydra:nothing}", "refers to `hydra:nothing`, which does not exist here"),
        ("${hydra:}", "takes one key"),
        ("${now:%Y,%m}", "takes one format"),
    ],
)
def test_values_that_hydra_does_not_have_are_refused(word: str, says: str) -> None:
    assert says in problems(f"name='x{word}'")["name"].rule


def test_several_processes_have_no_common_time() -> None:
    environ = {"WORLD_SIZE": "2", "RANK": "0"}
    wrong = problems("name='${now:%Y}'", environ=environ)["name"].rule
    assert "would differ between the processes that torchrun or srun started" in wrong
    assert load("name='${now:%Y}'", environ={"WORLD_SIZE": "1"}).root.name == time.strftime("%Y")
    saved = load("name=x").document
    with pytest.raises(UserError, match="does not exist here"):
        config_from_document({**saved, "name": "${hydra:job.name}"}, trusted=True)


@looped(
    ("words", "key", "says"),
    [
        (["hydra.job.chdir=True"], "hydra.job.chdir", "the working directory stays"),
        (["hydra.job.env_set={A: b}"], "hydra.job.env_set.A", "write env_vars"),
        (["+hydra.callbacks.x._target_=os.system"], "hydra.callbacks.x._target_", "files name no code"),
        (["hydra.runtime.cwd=x"], "hydra.runtime.cwd", "refer to it"),
        (["hydra.job.num=3"], "hydra.job.num", "refer to it as ${hydra:job.num}"),
        (["hydra.swep.dir=x"], "hydra.swep.dir", "did you mean hydra.sweep.dir?"),
        (["hydra.mode=MULTI"], "hydra.mode", "must be RUN or MULTIRUN"),
        (["hydra.launcher._target_=os.system"], "hydra.launcher._target_", "choose hydra/launcher="),
        (["hydra.launcher.partition=x"], "hydra.launcher.partition", "BasicLauncher has no such key"),
        (
            [SLURM, "hydra.launcher.partion=x"],
            "hydra.launcher.partion",
            "launcher.partition?",
        ),
        ([LOCAL, "hydra.launcher.timeout_min=x"], "hydra.launcher.timeout_min", "integer"),
        ([LOCAL, "hydra.launcher.nodes=2"], "hydra.launcher.nodes", "must be 1"),
        (
            [SLURM, "hydra.launcher.max_num_timeout=2"],
            "hydra.launcher.max_num_timeout",
            "repeat",
        ),
        (
            [OPTUNA, "hydra.sweeper.custom_search_space=a.b"],
            "hydra.sweeper.custom_search_space",
            "code",
        ),
        ([OPTUNA, "hydra.sweeper.direction=up"], "hydra.sweeper.direction", "'minimize' or 'maximize'"),
        ([OPTUNA, "hydra.sweeper.sampler.sed=1"], "hydra.sweeper.sampler.sed", "sampler.seed?"),
        (["hydra.sweep.dir=a,b"], "hydra.sweep.dir=a,b", "one configuration of Hydra"),
        (["hydra/nothing=x"], "hydra/nothing=x", "hydra/launcher, hydra/sweeper"),
    ],
)
def test_keys_that_do_not_act_are_refused(words: list[str], key: str, says: str) -> None:
    found = problems(*words)
    assert list(found) == [key]
    assert says in f"{found[key].rule}; {found[key].fix}"


@looped(
    ("word", "key"),
    [
        ("hydra.verbose=True", "hydra.verbose"),
        ("hydra.output_subdir=null", "hydra.output_subdir"),
        ("hydra.job_logging.root.level=DEBUG", "hydra.job_logging"),
        ("hydra/job_logging=none", "hydra/job_logging=none"),
        ("hydra/launcher=submitit_local", None),
    ],
)
def test_keys_without_effect_are_noted(word: str, key: str | None) -> None:
    found = [note for note in notes(load(word)) if "hydra" in note]
    assert found == [] if key is None else ("has no effect" in found[0] and f"`{key}`" in found[0])
    assert not [note for note in notes(load("hydra.job.chdir=False", "hydra.job.env_copy=[]")) if "chdir" in note]


def test_launcher_and_sweeper_of_files(tmp_path: Path) -> None:
    """In the manner of lightning-hydra-template: an experiment of sweeps that names Hydra's classes."""
    write(
        tmp_path,
        "search/optuna",
        "# @package _global_\ndefaults:\n  - override /hydra/sweeper: optuna\n  - override /hydra/launcher: mine\n"
        "  - override /hydra/job_logging: colorlog\nhydra:\n  mode: MULTIRUN\n  sweeper:\n"
        "    _target_: hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper\n    n_trials: 6\n"
        "    sampler: {_target_: optuna.samplers.RandomSampler, seed: 7}\n"
        "    params:\n      model: choice(gpt_tiny, t5_tiny)\n      model.optim.lr: interval(0.1, 1)\n",
    )
    write(tmp_path, "hydra/launcher/mine", "defaults: [submitit_slurm, _self_]\npartition: gpu\n")
    write(tmp_path, "h", "defaults: [train, _self_, {search: optuna}]\nname: n\n")
    found = settings("hydra.sweeper.n_jobs=3", "'hydra.sweeper.params.model.seed=range(3)'".strip("'"), name="h")
    sweeper = found.sweeper
    assert found.is_multirun
    assert isinstance(sweeper, schema.OptunaSweeper)
    assert (sweeper.n_trials, sweeper.n_jobs, sweeper.sampler) == (6, 3, schema.RandomSampler(seed=7))
    assert sweeper.params == {
        "model": "choice(gpt_tiny, t5_tiny)",
        "model.optim.lr": "interval(0.1, 1)",
        "model.seed": "range(3)",
    }
    assert found.launcher == schema.SlurmLauncher(partition="gpu")
    found = settings("hydra/sweeper/sampler=random", "hydra/sweeper=optuna").sweeper
    assert found == schema.OptunaSweeper(sampler=schema.RandomSampler())
    with pytest.raises(UserError, match="acts with hydra/sweeper=optuna only"):
        settings("hydra/sweeper/sampler=random")
    config = load(name="h", directory=tmp_path)
    assert config.hydra is not None
    assert config.hydra.is_multirun
    assert any("`hydra/job_logging` in the defaults list of search/optuna.yaml" in note for note in notes(config))
    with pytest.raises(UserError, match="there is no hydra/launcher `submitit`") as caught:
        load("hydra/launcher=submitit")
    assert "hydra/launcher can be: basic, submitit_local, submitit_slurm" in caught.value.lines[-1]


def test_config_path_replaces_conf(tmp_path: Path) -> None:
    write(tmp_path / "conf", "model/own", "family: gpt\n")
    write(tmp_path / "configs", "train", "defaults: [{model: gpt_tiny}, {data: mock}, _self_]\nname: mine\n")
    write(tmp_path / "more", "model/gpt_tiny", "family: gpt\nnum_layers: 7\n")

    def composed(*words: str, directory: Path | None = None):
        return load_run_config(None, directory, words, {}, config_path=Path("configs"))

    assert composed().root.name == "mine"
    assert gpt(composed().root).num_layers == 4
    assert gpt(composed(directory=Path("more")).root).num_layers == 7
    with pytest.raises(UserError, match="there is no model `own`"):
        composed("model=own")
    with pytest.raises(UserError, match="--config-path nowhere: there is no such folder"):
        load_run_config(None, None, [], {}, config_path=Path("nowhere"))


def test_resolvers_of_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extensions._registered, "resolver", {})
    extensions.register("resolver", "twice")(lambda value: 2 * value)
    extensions.register("resolver", "bad")(lambda _: object())
    extensions.register("resolver", "broken")(lambda _: 1 // 0)  # pyrefly: ignore[division-by-zero]
    assert gpt(load("model.num_layers=${twice:${trainer.devices}}", "trainer.devices=1").root).num_layers == 2
    assert "which returns object; it must return text" in problems("name=${bad:1}")["name"].rule
    assert "test_config_hydra:" in problems("name=${broken:1}")["name"].rule
    with pytest.raises(UserError, match=r"calls `thrice`, which is not supported; use one of .*twice"):
        load("model.num_layers=${thrice:1}")


def test_a_sweep_is_not_one_configuration() -> None:
    with pytest.raises(UserError, match="is MULTIRUN, a sweep"):
        stoker.load_config(["hydra.mode=MULTIRUN"])
    assert stoker.load_config(["hydra.mode=RUN", "hydra.run.dir=r"]).root.exp_manager.explicit_log_dir == "r"


@looped(
    ("word", "key", "fix"),
    [
        ("hydra.launcher.partition=gpu", "hydra.launcher.partition", "add hydra/launcher=submitit_slurm"),
        ("hydra.launcher.partitoin=gpu", "hydra.launcher.partitoin", "did you mean hydra.launcher.partition?"),
        ("hydra.launcher.timeout_min=9", "hydra.launcher.timeout_min", "hydra/launcher=submitit_local and hydra/"),
        ("hydra.launcher.qqqqqq=9", "hydra.launcher.qqqqqq", "it has no keys"),
        ("hydra.sweeper.n_trials=3", "hydra.sweeper.n_trials", "add hydra/sweeper=optuna"),
    ],
)
def test_key_of_another_launcher_or_sweeper_names_it(word: str, key: str, fix: str) -> None:
    assert fix in problems(word)[key].fix


@looped(
    ("word", "fix"),
    [
        ("hydra/launcher=joblib", "fix: hydra/launcher=submitit_local with hydra.launcher.array_parallelism"),
        ("hydra/sweeper=ax", "fix: hydra/sweeper=optuna"),
        ("hydra/sweeper=nevergrad", "fix: hydra/sweeper=optuna"),
    ],
)
def test_plugins_of_hydra_name_their_replacement(word: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        load(word)
    assert fix in str(caught.value)


def test_swept_values_in_one_block() -> None:
    assert settings('hydra.sweeper.params={model.seed:"1,2"}').sweeper.params == {"model.seed": "1,2"}
    found = problems("hydra.sweeper.params={model:{seed:[1,2]}}")
    assert [*found] == ["hydra.sweeper.params.model"]
    assert found["hydra.sweeper.params.model"].fix == "write 'hydra.sweeper.params.model.seed=\"1,2\"'"


def test_nearest_value_of_hydra() -> None:
    assert "did you mean ${hydra:job.name}?" in problems("name='${hydra:job.nme}'")["name"].rule
