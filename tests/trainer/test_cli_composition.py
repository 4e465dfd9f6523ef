"""Hydra's options of the verbs that compose: `--cfg`, `--resolve`, `--package`, `--info`, `-cn`, `-cd`, `-cp`."""

from pathlib import Path

import pytest
import yaml
from config_helpers import write

from stoker.trainer.cli.main import main


@pytest.fixture
def shown(tmp_path, monkeypatch, capsys):
    """Return a function that runs a command line and returns its output, or its error."""
    monkeypatch.chdir(tmp_path)

    def run(line, code=0):
        assert main(line.split()) == code
        out, err = capsys.readouterr()
        return err if code else out

    return run


def test_cfg_prints_what_is_composed(shown):
    job = yaml.safe_load(shown("train --cfg job model=gpt_125m trainer.max_steps=7 trainer.max_steps=8"))
    assert "hydra" not in job
    assert (job["model"]["num_layers"], job["trainer"]["max_steps"]) == (12, 8)
    assert job["model"]["optim"]["sched"]["min_lr"] == "${divide:${..lr},10}"
    assert yaml.safe_load(shown("train trainer.max_steps=8 -c hydra"))["hydra"]["runtime"]["choices"]["data"] == "pystd"
    assert set(yaml.safe_load(shown("plan --cfg all"))) > {"hydra", "model", "trainer"}
    assert yaml.safe_load(shown("train -m --cfg hydra"))["hydra"]["mode"] == "MULTIRUN"


def test_of_a_sweep_the_first_job_is_shown(shown, capsys):
    words = "model.seed=2,3 model.optim.lr=interval(0.1,0.5) model=glob(gpt_1*m) model.num_layers=3"
    job = yaml.safe_load(shown(f"train -m --cfg job --resolve name=n${{hydra:job.num}} {words}"))
    model = job["model"]
    assert (model["seed"], model["optim"]["lr"], model["num_layers"], job["name"]) == (2, 0.1, 3, "n0")
    assert "model/gpt_125m" in shown(f"train -m --info defaults {words}")
    assert main(["train", "-m", "--cfg", "hydra", "model.seed=2,3"]) == 0
    out, err = capsys.readouterr()
    assert (yaml.safe_load(out)["hydra"]["mode"], err) == ("MULTIRUN", "note: as in the first job, with model.seed=2\n")


def test_resolve_and_package(shown, monkeypatch):
    optim = shown("config --resolve --cfg job --package model.optim model.optim.lr=0.5")
    assert optim.startswith("# @package model.optim\nname: adamw\n")
    assert yaml.safe_load(optim)["sched"]["min_lr"] == 0.05
    assert shown("finetune --cfg job -p trainer.max_steps trainer.max_steps=3") == "3\n"
    assert "did you mean model.optim" in shown("config --cfg job -p model.optm", 2)
    assert shown("train --resolve", 2) == "--resolve acts with --cfg only; write --cfg job --resolve\n"
    assert "`model.nothing`, which does not exist" in shown("train -c job --resolve name=${model.nothing}", 2)
    for name, value in {"MY_TOKEN": "s3cret", "PLACE": "here"}.items():
        monkeypatch.setenv(name, value)
    text = shown("train -c job --resolve exp_manager.exp_dir=${oc.env:PLACE}/${oc.env:MY_TOKEN} name=${oc.env:PLACE}")
    assert "s3cret" not in text
    assert "name: here" in text


def test_unknown_keys_and_parts_are_refused(shown):
    assert "did you mean model.num_layers?" in shown("train --cfg job model.num_layer=3", 2)
    assert "must be one of all, config, defaults" in shown("train --info nothing", 2)
    assert "did you mean --cfg job?" in shown("train --cfg jobs", 2)


def test_info(shown, tmp_path):
    write(tmp_path / "own", "h", "defaults: [train, {override hydra/launcher: submitit_local}, _self_]\n")
    whole = shown("train --info -cd own -cn h data=mock")
    assert [line for line in whole.splitlines() if line.startswith("# ")] == [
        *("# searchpath", "# defaults", "# defaults-tree", "# plugins", "# config"),
    ]
    assert shown("train -cp own --info searchpath") == "# searchpath\nown\nstoker/conf\n"
    tree = shown("explain -cn h -cd own --info defaults-tree").splitlines()
    assert tree[2] == "  hydra/launcher/submitit_local"
    assert tree[tree.index("h") + 1] == "  train"
    rows = [line.split() for line in shown("config --info defaults -cn h -cd own").splitlines()]
    assert ["data/pystd", "model.data", "stoker/conf"] in rows
    assert rows[-1] == ["h", "_global_", "own"]
    assert "data/mock" in shown("train --info data=mock")
    assert "hydra/launcher=submitit_slurm" in shown("train --info plugins")


def test_flags_stand_before_or_after_overrides(shown):
    first = shown("train -c job trainer.max_steps=3 -p trainer model.seed=4")
    assert first == shown("train trainer.max_steps=3 model.seed=4 -p trainer -c job")
    assert yaml.safe_load(first)["max_steps"] == 3


def test_a_mode_of_files_starts_a_sweep(shown, tmp_path, monkeypatch):
    write(tmp_path, "h", "defaults: [train, _self_]\nhydra: {mode: MULTIRUN}\n")
    started = []
    monkeypatch.setattr("stoker.trainer.cli.multirun.sweep", lambda *given, **options: started.append(given[:3]) or 7)
    shown("train -cn h -cd . model.seed=3", 7)
    assert started == [("h", Path(), ["model.seed=3"])]
    shown("train -cn h -cd . model.seed=3,4", 7)
    shown("train model.seed=3,4 hydra.mode=MULTIRUN", 7)
    shown("finetune model.seed=3,4 hydra.mode=MULTIRUN model.restore_from_path=x", 7)
    assert [words[0] for _, _, words in started[1:]] == ["model.seed=3,4"] * 3
    assert "train with each: stoker train -m" in shown("train model.seed=3,4", 2)
    assert "train with each: stoker train -m" in shown("train -cn h -cd . hydra.mode=RUN model.seed=3,4", 2)
