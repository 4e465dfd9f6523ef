"""`stoker train -m`: which jobs there are, that all are checked first, and that each ends for itself."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiers import extra, full_only, looped

from stoker.trainer.cli import multirun
from stoker.trainer.config.sweep_overrides import Job, expand_jobs
from stoker.trainer.utils.errors import UserError

GROUPS = {"optim": ["adamw", "muon", "sgd"]}


def jobs(*overrides):
    return [job.overrides for job in expand_jobs(overrides, lambda group: GROUPS.get(group, []))]


# ---------------------------------------------------------------- from overrides to jobs


def test_jobs_are_the_product_of_the_values_the_last_one_fastest():
    assert jobs("a=1,2", "b=x", "c=3,4") == [
        ("a=1", "b=x", "c=3"),
        ("a=1", "b=x", "c=4"),
        ("a=2", "b=x", "c=3"),
        ("a=2", "b=x", "c=4"),
    ]
    assert expand_jobs(["a=1,2", "b=x"], lambda group: [])[1] == Job(1, ("a=2", "b=x"), ("a=2",))
    assert jobs("a=1") == [("a=1",)]
    assert jobs() == [()]


@looped(
    ("override", "values"),
    [
        ("lr=1e-3,2e-3", ["lr=0.001", "lr=0.002"]),
        ("+lr=1,2", ["+lr=1", "+lr=2"]),
        ("lr=choice(1,2)", ["lr=1", "lr=2"]),
        ("n=range(1,4)", ["n=1", "n=2", "n=3"]),
        ("n=range(0,1,0.5)", ["n=0.0", "n=0.5"]),
        ("n=sort(3,1)", ["n=1", "n=3"]),
        ("b=[1,2],[3]", ["b=[1,2]", "b=[3]"]),
        ("b=true,null", ["b=True", "b=null"]),
        ("t='a b','c,d'", ["t='a b'", "t='c,d'"]),
        ("t='a,b'", ["t='a,b'"]),
        ("~k", ["~k"]),
        ("optim=glob(*)", ["optim=adamw", "optim=muon", "optim=sgd"]),
        ("optim=glob([m*,s*])", ["optim=muon", "optim=sgd"]),
        ("optim=glob(*,exclude=s*)", ["optim=adamw", "optim=muon"]),
        ("not an override", ["not an override"]),
    ],
)
def test_values_in_hydras_grammar(override, values):
    assert [job[0] for job in jobs(override)] == values


def test_what_cannot_be_counted_out_is_refused_all_at_once():
    with pytest.raises(UserError) as error:
        jobs("a=interval(0,1)", "optim=glob(z*)", "data=glob(*)", "n=range(4,1)")
    text = str(error.value)
    assert "a=interval(0,1)" in text
    assert "write a=range(...)" in text
    assert text.count("matches no file") == 2
    assert "has no values" in text
    assert error.value.lines[-1].startswith("4 errors")
    for twice in (["a=1,2", "+a=3"], ["a=1,2", "a=1,2"], ["optim=sgd,muon", "optim=adamw"]):
        with pytest.raises(UserError, match=re.escape(f"is given more than once: {twice[0]} and {twice[1]}")):
            jobs(*twice)
    for override in ("a=range(0,1e12)", "a=range(0,9999999)"):
        with pytest.raises(UserError, match="at most 10,000"):
            jobs(override, "b=1,2")


# ---------------------------------------------------------------- a sweep, with jobs that only pretend


class Starts:
    """Stands in for the processes of a job; `ends` gives what each comes to."""

    def __init__(self, *ends, may_exist=False):
        self.may_exist = may_exist
        self.ends = list(ends)
        self.configs = []
        self.said = []

    def __call__(self, config, placement):
        self.configs.append(config)
        directory = Path(config.root.exp_manager.explicit_log_dir)
        directory.mkdir(parents=True, exist_ok=self.may_exist)
        config.save(directory / "config.resolved.json")
        figures = [{"step": 1, "loss": 9.0}, {"step": 4, "val_loss": 3.0}, {"step": 8, "val_loss": 4.0}]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in figures) + '{"step"')
        end = self.ends.pop(0) if self.ends else 0
        if isinstance(end, BaseException):
            raise end
        return end

    def sweep(self, *overrides):
        return multirun.sweep("tiny", None, overrides, self, self.said.append)


def record(directory):
    return json.loads((directory / multirun.RECORD_FILE).read_text())["jobs"]


def test_each_job_has_its_directory_and_the_rest_of_the_configuration(here, capsys):
    starts = Starts()
    assert starts.sweep("model.seed=1,2", "model.optim.lr=0.5", "trainer.max_steps=8,9") == 0
    sweep = here / "runs" / "tiny" / "multirun" / "v"
    roots = [config.root for config in starts.configs]
    assert [root.exp_manager.explicit_log_dir for root in roots] == [str(sweep / str(number)) for number in range(4)]
    assert [(root.model.seed, root.trainer.max_steps) for root in roots] == [(1, 8), (1, 9), (2, 8), (2, 9)]
    assert {root.model.optim.lr for root in roots} == {0.5}
    rows = record(sweep)
    assert [row["configuration"] for row in rows] == [config.digest for config in starts.configs]
    assert rows[3]["swept"] == ["model.seed=2", "trainer.max_steps=9"]
    assert rows[3]["overrides"] == ["model.seed=2", "model.optim.lr=0.5", "trainer.max_steps=9"]
    assert rows[3]["figures"] == {"step": 8, "metric": "val_loss", "last": 4.0, "best": 3.0}
    *_, head, _, _, _, last, _ = capsys.readouterr().out.splitlines()
    assert head.split() == ["job", "exit", "step", "last", "val_loss", "best", "val_loss", "directory", "overrides"]
    assert last.split() == ["3", "0", "8", "4.0000", "3.0000", "3", "model.seed=2", "trainer.max_steps=9"]


def test_a_training_loss_is_not_shown_in_a_column_of_validation_losses(here, capsys):
    def ended(number, *figures):
        def start(config, placement):
            starts.configs.append(config)
            directory = Path(config.root.exp_manager.explicit_log_dir)
            directory.mkdir(parents=True)
            (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in figures))
            return number

        return start

    starts = Starts()
    jobs = [ended(2, {"step": 1, "loss": 0.5}), ended(0, {"step": 1, "loss": 6.0}, {"step": 4, "val_loss": 3.0})]
    multirun.sweep("tiny", None, ["model.seed=1,2"], lambda *job: jobs[len(starts.configs)](*job), starts.said.append)
    *_, head, diverged, whole, _ = capsys.readouterr().out.splitlines()
    assert head.split()[3:7] == ["last", "val_loss", "best", "val_loss"]
    assert diverged.split()[:5] == ["0", "2", "1", "-", "-"]
    assert whole.split()[:5] == ["1", "0", "4", "3.0000", "3.0000"]
    starts, jobs = Starts(), jobs[:1] * 2
    multirun.sweep("tiny", None, ["model.seed=3,4", "exp_manager.version=w"], lambda *job: jobs[0](*job), print)
    *_, head, one, _, _ = capsys.readouterr().out.splitlines()
    assert head.split()[3:7] == ["last", "loss", "best", "loss"]
    assert one.split()[3:5] == ["0.5000", "0.5000"]


def test_a_failing_job_stops_no_other_and_the_first_gives_the_exit_code(here, capsys):
    starts = Starts(0, UserError(["no luck", "more"], 74), 0, UserError("rank 1 was killed", 1))
    assert starts.sweep("model.seed=range(5)") == 74
    assert len(starts.configs) == 5
    rows = record(here / "runs" / "tiny" / "multirun" / "v")
    assert [row["exit_code"] for row in rows] == [0, 74, 0, 1, 0]
    assert rows[1]["problem"] == "no luck"
    assert starts.said == ["no luck\nmore", "rank 1 was killed"]
    assert "74" in capsys.readouterr().out.splitlines()[-5]


@pytest.mark.parametrize("code", [130, 143])
def test_a_signal_ends_the_sweep(here, code, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["stoker", "train", "-m", "model.seed=1,2,3", "name=a b"])
    starts = Starts(UserError("before", 2), code)
    assert starts.sweep("model.seed=1,2,3") == code
    rows = record(here / "runs" / "tiny" / "multirun" / "v")
    assert [row["exit_code"] for row in rows] == [2, code, None]
    *_, last, count, resume = capsys.readouterr().out.splitlines()
    assert last.split()[1] == "-"
    sweep = here / "runs" / "tiny" / "multirun" / "v"
    assert count == f"3 jobs in {sweep}"
    words = f"exp_manager.resume_if_exists=True hydra.sweep.dir={sweep}"
    assert resume == f"to resume: stoker train -m model.seed=1,2,3 'name=a b' {words}"
    again = Starts(may_exist=True)
    assert again.sweep("model.seed=1,2,3", *words.split()) == 0
    assert [config.root.model.seed for config in again.configs] == [1, 2, 3]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_between_two_jobs_ends_the_sweep(here, number, code):
    def start(config, placement):
        os.kill(os.getpid(), number)
        time.sleep(5)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    assert multirun.sweep("tiny", None, ["model.seed=1,2"], start, print) == code
    assert signal.getsignal(signal.SIGTERM) is before


def test_every_job_is_checked_before_the_first_starts(here):
    starts = Starts()
    with pytest.raises(UserError) as error:
        starts.sweep("model.seed=1,-2", "model.num_layers=1,x", "trainer.max_stps=5")
    assert starts.configs == []
    assert not (here / "runs").exists()
    lines = error.value.lines
    assert lines[0] == "trainer.max_stps=5 (command line)"
    assert "jobs 2, 3:" in lines
    assert "jobs 1, 3:" in lines
    assert lines[-1] == "3 errors in the configurations of 4 jobs; nothing was started"
    with pytest.raises(UserError, match=r"job 1 \(model.num_layers=x\):"):
        starts.sweep("model.num_layers=1,x")


def test_warnings_are_told_once(here):
    starts = Starts()
    starts.sweep("model.seed=1,2", "exp_manager.max_time_per_run='00:00:09:00'", "trainer.max_time='00:00:05:00'")
    assert len(starts.said) == 1
    assert "max_time_per_run" in starts.said[0]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["exp_manager.exp_dir=a,b"], "`exp_manager.exp_dir` differs between the jobs"),
        (["model.seed=1,2", "exp_manager.checkpoint_callback_params.dirpath=c"], "would be shared by several jobs"),
        (["model.seed=1,2", "hydra.sweep.subdir=x"], "gives several jobs one directory"),
        (["model.seed=1,2", "hydra.sweep.subdir=../${hydra.job.num}"], "must name a directory below"),
        (["model.seed=1,2", "hydra.sweep.subdir=${hydra.job.id}"], "composed before it is submitted"),
        (["hydra.sweep.dir=a", "exp_manager.explicit_log_dir=b"], "both set the directory"),
        (["hydra.sweep.dir="], "is empty"),
        (["model.seed=1,2", "trainer.num_nodes=2", "trainer.devices=1"], "MASTER_ADDR"),
    ],
)
def test_what_makes_no_sense_in_a_sweep_is_refused(here, overrides, says):
    starts = Starts()
    with pytest.raises(UserError, match=says):
        starts.sweep(*overrides)
    assert starts.configs == []
    assert [path.name for path in here.iterdir()] == ["conf"]


def test_a_sweep_starts_its_processes_itself(here, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="without torchrun and srun"):
        Starts().sweep("model.seed=1,2", "trainer.devices=2", "model.micro_batch_size=1")


def test_hydras_names_for_the_directories(here):
    starts = Starts()
    place = ["hydra.sweep.dir='sweeps/${now:%Y}'", "hydra.sweep.subdir=${hydra.job.num}-${hydra.job.override_dirname}"]
    assert starts.sweep("+model.seed=1,2", "name=a/b", *place) == 0
    sweep = here / "sweeps" / time.strftime("%Y")
    assert sorted(path.name for path in sweep.iterdir()) == ["0-model.seed=1", "1-model.seed=2", multirun.RECORD_FILE]


def test_values_of_the_sweeper_give_way_to_the_command_line(here):
    params = ["hydra.sweeper.params.model.seed=1,2", "hydra.sweeper.params.name='choice(a,b)'"]
    for given, seeds in (([], [1, 1, 2, 2]), (["model.seed=7"], [7, 7])):
        starts = Starts()
        assert starts.sweep(*params, *given, f"hydra.sweep.dir=s{len(given)}") == 0
        assert [config.root.model.seed for config in starts.configs] == seeds
        assert [config.root.name for config in starts.configs[:2]] == ["a", "b"]
    with pytest.raises(UserError, match="a sweep has one configuration of Hydra"):
        Starts().sweep("hydra.mode=RUN,MULTIRUN")


def test_a_sweep_over_names_has_one_directory(here):
    assert Starts().sweep("name=a,b") == 0
    assert (here / "runs" / "multirun" / "v" / "1").is_dir()


# ---------------------------------------------------------------- going on


def test_a_sweep_goes_on_with_the_jobs_that_are_not_done(here, capsys):
    resume = "exp_manager.resume_if_exists=true"
    first = Starts(0, UserError("no", 2), 143)
    assert first.sweep("model.seed=range(4)", resume) == 143
    assert [config.root.model.seed for config in first.configs] == [0, 1, 2]
    again = Starts()
    for number in (1, 2):
        os.rename(here / f"runs/tiny/multirun/{number}", here / f"old-{number}")
    assert again.sweep("model.seed=range(4)", resume) == 0
    assert [config.root.model.seed for config in again.configs] == [1, 2, 3]
    assert "job 0 (1 of 4): model.seed=0: already finished" in capsys.readouterr().out
    assert [row["exit_code"] for row in record(here / "runs/tiny/multirun")] == [0, 0, 0, 0]
    longer = Starts()
    longer.ends = [143]
    with pytest.raises(FileExistsError):  # the directory is the same: the pretended job makes it again
        longer.sweep("model.seed=range(4)", resume, "trainer.max_steps=9")
    assert longer.configs[0].root.trainer.max_steps == 9


def test_other_jobs_are_not_mixed_into_a_sweep(here):
    assert Starts().sweep("model.seed=1,2") == 0
    with pytest.raises(UserError, match="already holds a sweep; resume it"):
        Starts().sweep("model.seed=1,2")
    resume = "exp_manager.resume_if_exists=true"
    assert Starts().sweep("model.seed=1,2", resume) == 0
    with pytest.raises(UserError, match="holds a sweep of other jobs"):
        Starts().sweep("model.seed=1,3", resume)
    (here / "runs/tiny/multirun" / multirun.RECORD_FILE).write_text("[]")
    with pytest.raises(UserError, match="cannot be read"):
        Starts().sweep("model.seed=1,2", resume)


def test_a_grid_goes_on_for_longer_but_with_no_other_model(here):
    resume = ["model.seed=1,2", "exp_manager.resume_if_exists=true"]
    assert Starts().sweep(*resume) == 0
    recorded = (here / "runs/tiny/multirun" / multirun.RECORD_FILE).read_bytes()
    other = Starts()
    with pytest.raises(
        UserError, match=r"job 0: `model.num_layers` was \d+ and is 5 now; repeat .* elsewhere"
    ) as error:
        other.sweep(*resume, "model.num_layers=5", "trainer.max_steps=9")
    assert len(error.value.lines) == 1
    assert other.configs == []
    assert (here / "runs/tiny/multirun" / multirun.RECORD_FILE).read_bytes() == recorded
    longer = Starts(may_exist=True)
    assert longer.sweep(*resume, "trainer.max_steps=9", "trainer.log_every_n_steps=3") == 0
    assert [config.root.trainer.max_steps for config in longer.configs] == [9, 9]


def test_a_failed_job_may_start_again_with_what_mends_it(here):
    resume = ["model.seed=1,2", "exp_manager.resume_if_exists=true"]
    assert Starts(UserError("no", 2), UserError("no", 2)).sweep(*resume) == 2
    again = Starts(may_exist=True)
    assert again.sweep(*resume, "model.num_layers=5") == 0
    assert len(again.configs) == 2


@pytest.mark.parametrize("key", ["exp_manager.exp_dir", "exp_manager.explicit_log_dir", "hydra.sweep.dir"])
def test_a_place_that_cannot_be_written(here, key):
    (here / "file").write_text("")
    place = [f"{key}=file/x"]
    says = f"cannot write the directory of the sweep .*; set {key} to a directory that can be written"
    with pytest.raises(UserError, match=says) as error:
        Starts().sweep("model.seed=1,2", *place)
    assert error.value.exit_code == 74


@pytest.mark.parametrize(
    ("place", "elsewhere"),
    [
        ([], "exp_manager.name or exp_dir"),
        (["exp_manager.explicit_log_dir=s"], "exp_manager.explicit_log_dir"),
        (["hydra.sweep.dir=s"], "hydra.sweep.dir"),
    ],
)
def test_the_key_that_leads_elsewhere_is_the_one_in_use(here, place, elsewhere):
    assert Starts().sweep("model.seed=1,2", *place) == 0
    with pytest.raises(UserError, match=f"already holds a sweep; .* write elsewhere with another {elsewhere}$"):
        Starts().sweep("model.seed=1,2", *place)


# ---------------------------------------------------------------- real jobs


DATA = """
import stoker
from stoker.trainer.data.datasets.samples import MockSamples

@stoker.register("dataset", "dice")
def samples(data, split, sequence_length, tokenizer, seed):
    return MockSamples(6, sequence_length, seed, 1000, ("train", "validation", "test").index(split))
"""


def train(here, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "stoker", "train", "--config-name", "tiny", *arguments],
        cwd=here,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


@full_only
@pytest.mark.parametrize("rates", ["0.01", *extra("0.01,1e30,0.01")])
def test_jobs_are_processes_of_their_own_and_have_the_users_data_set(here, rates):
    (here / "my_data.py").write_text(DATA)
    overrides = [f"model.optim.lr={rates}", "trainer.max_skipped_steps=0", "model.data.data_impl=dice"]
    done = train(here, "-m", *overrides, "--import", "my_data", "trainer.max_steps=4", "trainer.log_every_n_steps=1")
    fails = "1e30" in rates
    assert done.returncode == (2 if fails else 0), done.stderr
    assert ("training diverged at step" in done.stderr) == fails
    sweep = here / "runs" / "tiny" / "multirun" / "v"
    rows = record(sweep)
    assert [row["exit_code"] for row in rows] == ([0, 2, 0] if fails else [0])
    for number in (0, 2) if fails else (0,):
        assert rows[number]["figures"]["last"] < 5.0
        assert (sweep / str(number) / "checkpoints" / "step-4").is_dir()


@full_only
def test_two_processes_three_jobs_one_failing(here):
    overrides = ["model.optim.lr=0.01,1e30,0.02", "trainer.max_skipped_steps=0", "trainer.devices=2"]
    done = train(here, "-m", *overrides, "trainer.max_steps=4", "trainer.log_every_n_steps=1")
    assert done.returncode == 2, done.stderr
    sweep = here / "runs" / "tiny" / "multirun" / "v"
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "1", "2", multirun.RECORD_FILE]
    assert [path.name for path in (here / "runs").iterdir()] == ["tiny"]
    rows = record(sweep)
    assert [row["exit_code"] for row in rows] == [0, 2, 0]
    for number in (0, 2):
        environment = json.loads((sweep / str(number) / "environment.json").read_text())
        assert [process["rank"] for process in environment["processes"]] == [0, 1]
        assert {process["configuration"] for process in environment["processes"]} == {rows[number]["configuration"]}
        resolved = json.loads((sweep / str(number) / "config.resolved.json").read_text())
        assert resolved["exp_manager"]["explicit_log_dir"] == str(sweep / str(number))
    assert len({row["configuration"] for row in rows}) == 3
