"""`hydra/sweeper=optuna`: what is searched, what a trial's objective is, failures, and how a search goes on."""

import json
from pathlib import Path

import pytest
import yaml
from tiers import extra, looped
from tiny_run import write_tiny_sweep

from stoker.trainer.cli import multirun
from stoker.trainer.cli.optuna_sweep import RESULTS_FILE, Parameter, Search
from stoker.trainer.config.run_config import HydraSettings
from stoker.trainer.config.schema import hydra as schema
from stoker.trainer.utils.errors import UserError

pytest.importorskip("optuna", minversion="4")

SEARCH = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=1"]
LR = "model.optim.lr=interval(0.1,1.0)"


class Jobs:
    """Stands in for the processes of a job, whose best validation loss is that of `loss`, and the last one worse."""

    def __init__(self, loss=lambda root: abs(root.model.optim.lr - 0.4), ends=()):
        self.loss = loss
        self.ends = dict(ends)
        self.roots = []
        self.said = []

    def __call__(self, config, placement):
        root = config.root
        self.roots.append(root)
        directory = Path(root.exp_manager.explicit_log_dir)
        directory.mkdir(parents=True, exist_ok=True)
        config.save(directory / "config.resolved.json")
        figures = [{"step": 4, "val_loss": self.loss(root)}, {"step": 8, "val_loss": self.loss(root) + 5}]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in figures))
        end = self.ends.get(len(self.roots) - 1, 0)
        if isinstance(end, BaseException):
            raise end
        return end

    def sweep(self, *words):
        return multirun.sweep("tiny", None, [*SEARCH, *words], self, self.said.append)


def numbers(jobs):
    return [int(Path(root.exp_manager.explicit_log_dir).name) for root in jobs.roots]


def space(*words):
    settings = HydraSettings(True, None, "", schema.BasicLauncher(), schema.OptunaSweeper())
    return Search(settings, words, lambda group: ["adamw", "muon"] if group == "optim" else [])._space


@looped(
    ("word", "parameter"),
    [
        ("a=1,2", Parameter(("1", "2"))),
        ("+a=choice(x,y,x)", Parameter(("x", "y"))),
        ("a=range(1,8,3)", Parameter(("1", "4", "7"), 1, 7, 3)),
        ("a=range(0.5,2,0.5)", Parameter(("0.5", "1.0", "1.5"), 0.5, 1.5, 0.5)),
        ("a=shuffle(range(1,2))", Parameter(("1",))),
        ("a=interval(1,8)", Parameter(low=1, high=8)),
        ("a=interval(0.1,8)", Parameter(low=0.1, high=8.0)),
        ("a=tag(log,interval(0.1,1))", Parameter(low=0.1, high=1.0, is_log=True)),
        ("optim=glob(*)", Parameter(("adamw", "muon"))),
    ],
)
def test_what_is_searched(word, parameter):
    found = space("b=1", word)[word.lstrip("+").partition("=")[0]]
    assert found == parameter or (found.low, found.high) == (parameter.low, parameter.high) == (0.1, 8)


def test_a_fixed_value_ends_the_search_of_a_key(here):
    assert list(space("a=1,2", "b=1,2", "a=3")) == ["b"]
    for words, says in (
        (["a=3"], "nothing to search"),
        (["a=interval(2,1)"], "is not an interval"),
        (["a=tag(log,interval(0,1))"], "is not an interval"),
        (["a=glob(z)"], "matches no file"),
    ):
        with pytest.raises(UserError, match=says):
            space(*words)


def test_the_best_job_is_told(here, capsys):
    jobs = Jobs()
    params = ["hydra.sweeper.params.model.optim.lr=interval(0.1,1.0)", "hydra.sweeper.params.model.seed=choice(1,2)"]
    assert jobs.sweep(*params, "hydra.sweeper.n_trials=6", "hydra.sweep.dir=s") == 0
    assert numbers(jobs) == list(range(6))
    best = min(range(6), key=lambda number: jobs.loss(jobs.roots[number]))
    results = yaml.safe_load((here / "s" / RESULTS_FILE).read_text())
    root = jobs.roots[best]
    assert results == {
        "name": "optuna",
        "best_params": {"model.optim.lr": root.model.optim.lr, "model.seed": root.model.seed},
        "best_value": jobs.loss(root),
    }
    assert len({other.model.optim.lr for other in jobs.roots}) == 6
    assert {other.model.seed for other in jobs.roots} == {1, 2}
    assert f"best: job {best}, val_loss {jobs.loss(root):.4f}: model.optim.lr={root.model.optim.lr!r}" in (
        capsys.readouterr().out
    )
    rows = json.loads((here / "s" / multirun.RECORD_FILE).read_text())["jobs"]
    assert [row["exit_code"] for row in rows] == [0] * 6


def test_failed_jobs_are_failed_trials(here):
    jobs = Jobs(ends={0: UserError("diverged", 2), 2: 1})
    assert jobs.sweep(LR, "hydra.sweeper.n_trials=4") == 0
    assert len(jobs.roots) == 4
    assert any("job 0 is a failed trial: diverged" in text for text in jobs.said)
    none = Jobs(loss=lambda root: float("nan"))
    assert none.sweep(LR, "hydra.sweeper.n_trials=2", "exp_manager.version=w") == 2
    assert "`val_loss` is nan" in none.said[0]
    early = Jobs(ends={0: 3})
    words = ["hydra.sweeper.max_failure_rate=0", "exp_manager.version=x"]
    assert early.sweep(LR, "hydra.sweeper.n_trials=4", *words) == 3
    assert len(early.roots) == 1


def test_an_invalid_job_is_a_failed_trial(here):
    """The ends of each parameter are checked before the first job; what is between them when it is chosen."""
    jobs = Jobs(loss=lambda root: float(root.model.seed))
    words = ["model.seed=choice(1,2)", "model.hidden_size=choice(8,9,16)", "hydra/sweeper/sampler=grid"]
    assert jobs.sweep("model.num_attention_heads=2", *words) == 0
    assert sorted((root.model.seed, root.model.hidden_size) for root in jobs.roots) == [
        *((1, 8), (1, 16), (2, 8), (2, 16)),
    ]
    assert sum("is not valid" in text for text in jobs.said) == 2
    for values in ("x,1", "1,x"):
        early = Jobs()
        with pytest.raises(UserError, match="must be"):
            early.sweep(f"model.seed=choice({values})", "exp_manager.version=w")
        assert early.roots == []
        assert not (here / "runs" / "tiny" / "multirun" / "w").exists()


@pytest.mark.parametrize("storage", [None, *extra("sqlite:///study.db")])
def test_a_search_goes_on(here, storage, capsys):
    words = [LR, "hydra.sweeper.n_trials=5", "hydra.sweep.dir=s"]
    words += [f"hydra.sweeper.storage={storage}"] if storage else []
    resume = "exp_manager.resume_if_exists=True"
    first = Jobs(ends={2: 143})
    assert first.sweep(*words, resume) == 143
    assert numbers(first) == [0, 1, 2]
    *_, stopped, count, to_resume = capsys.readouterr().out.splitlines()
    assert stopped.split()[:2] == ["2", "143"]
    assert (count, to_resume[:18]) == (f"3 jobs in {here / 's'}", "to resume: stoker ")
    with pytest.raises(UserError, match="already holds a sweep; resume it"):
        Jobs().sweep(*words)
    again = Jobs()
    assert again.sweep(*words, resume) == 0
    assert numbers(again) == [2, 3, 4]
    assert again.roots[0].model.optim.lr == first.roots[2].model.optim.lr
    assert len({root.model.optim.lr for root in [*first.roots, *again.roots]}) == 5
    rows = json.loads((here / "s" / multirun.RECORD_FILE).read_text())["jobs"]
    assert [row["exit_code"] for row in rows] == [0] * 5
    every = [*first.roots[:2], *again.roots]
    assert yaml.safe_load((here / "s" / RESULTS_FILE).read_text())["best_value"] == min(map(first.loss, every))
    done = Jobs()
    assert done.sweep(*words, resume) == 0
    assert done.roots == []


def test_a_search_goes_on_as_the_same_one_only(here):
    words = [LR, "hydra.sweeper.n_trials=2", "hydra.sweep.dir=s", "model.optim.name=adamw"]
    resume = "exp_manager.resume_if_exists=True"
    assert Jobs().sweep(*words) == 0
    before = (here / "s" / multirun.RECORD_FILE).read_bytes()
    for changed, says in (
        (["trainer.max_steps=400"], r"job 0: `trainer.max_steps` was \d+ and is 400 now; repeat its overrides"),
        (["model.num_layers=3"], "`model.num_layers` was"),
        (["model.optim.lr=interval(0.1,0.5)"], r"`model.optim.lr` in \[0.1, 1.0\], now \[0.1, 0.5\]; repeat"),
        (["model.seed=choice(1,2)"], r"`model.seed` in nothing, now {1, 2}; repeat"),
        (["exp_manager.checkpoint_callback_params.mode=max"], "was to minimize, and .*mode=max is to maximize; set"),
    ):
        jobs = Jobs()
        with pytest.raises(UserError, match=says) as error:
            jobs.sweep(*words, *changed, resume, "hydra.sweeper.n_trials=3")
        assert (jobs.roots, len(error.value.lines)) == ([], 1)
        assert (here / "s" / multirun.RECORD_FILE).read_bytes() == before
    more = Jobs()
    assert more.sweep(*words, resume, "hydra.sweeper.n_trials=3", "trainer.log_every_n_steps=3") == 0
    assert numbers(more) == [2]


@looped(
    ("words", "says"),
    [
        (["hydra.sweeper.direction=maximize"], "contradicts .*mode=min, by which `val_loss`.*set the mode to max"),
        (["hydra/sweeper/sampler=grid"], "`model.optim.lr` is an interval, which has no grid"),
        (["hydra.sweeper.storage=nowhere:///x"], "cannot open the study"),
        (["hydra.sweep.subdir=x"], "gives several jobs one directory"),
        (["exp_manager.checkpoint_callback_params.dirpath=c"], "would be shared by several jobs"),
    ],
)
def test_what_cannot_be_searched_is_refused(words, says, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("refused")
    write_tiny_sweep(folder)
    monkeypatch.chdir(folder)
    jobs = Jobs()
    with pytest.raises(UserError, match=says):
        jobs.sweep(LR, *words)
    assert jobs.roots == []


def test_an_unmeasured_metric_is_said(here):
    def unmeasured(config, placement):
        directory = Path(config.root.exp_manager.explicit_log_dir)
        directory.mkdir(parents=True)
        (directory / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0}) + "\n")
        return 0

    said = []
    assert multirun.sweep("tiny", None, [*SEARCH, LR, "hydra.sweeper.n_trials=1"], unmeasured, said.append) == 2
    assert "`val_loss` was not measured; set trainer.val_check_interval" in said[0]
