import argparse
import json
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from config_helpers import gpt
from resolved import build_data
from tiers import looped

from stoker.trainer import train
from stoker.trainer.cli import quickstart, thread_tuning
from stoker.trainer.cli.main import main
from stoker.trainer.cli.thread_tuning import StepTiming, median_step_time, tune_num_threads
from stoker.trainer.config.load import load_run_config
from stoker.trainer.config.run_config import RunConfig
from stoker.trainer.data.datasets.samples import EvaluationWindows
from stoker.trainer.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


class _Clock:
    """Steps that take a known time, by the number of threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> None:
        self.now = 0.0
        self.threads = max(seconds)
        self.seconds = seconds
        self.steps: list[int] = []
        monkeypatch.setattr(thread_tuning.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(thread_tuning.torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(thread_tuning.torch, "set_num_threads", self._set)

    def _set(self, threads: int) -> None:
        self.threads = threads

    def step(self) -> None:
        self.steps.append(self.threads)
        self.now += self.seconds[self.threads]


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 0.1, 2: 0.05, 4: 0.02}, 4),
        ({1: 0.1, 2: 0.05, 4: 0.06}, 2),
        ({1: 0.1, 2: 0.095}, 1),
        ({1: 0.1}, 1),
        ({1: 0.1, 3: 0.01}, 3),
    ],
)
def test_threads_are_taken_where_they_pay(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float], best: int
) -> None:
    clock = _Clock(monkeypatch, seconds)
    found = tune_num_threads(clock.step, 1.0)
    assert found.threads == clock.threads == best
    assert found.step_seconds == pytest.approx(seconds[best])


def test_threads_that_stall_each_other_are_left_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch, {1: 0.1, 2: 4.0, 4: 8.0, 8: 16.0})
    assert tune_num_threads(clock.step, 1.0).threads == 1
    assert clock.steps.count(2) == 1
    assert 4 not in clock.steps


def test_a_hiccup_does_not_change_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch, {1: 0.1})
    durations = iter([0.1, 0.1, 3.0] + [0.1] * 100)

    def step() -> None:
        clock.now += next(durations)

    assert median_step_time(step, 4.0) == pytest.approx(0.1)


def test_length_fills_the_budget() -> None:
    config = load_run_config(overrides=["experiment=quickstart", "trainer.limit_val_batches=15"])
    overrides = quickstart._length_overrides(config, StepTiming(0.05, 1, {}), 100.0)
    steps = round(0.95 * 100 / 0.05 - 4 * 15 / 3)
    assert overrides == [
        f"trainer.max_steps={steps}",
        f"trainer.val_check_interval={steps // 4}",
        f"trainer.log_every_n_steps={steps // 20}",
        "trainer.max_time='00:00:03:50'",
    ]
    changed = load_run_config(overrides=["experiment=quickstart", "trainer.max_steps=7", "~trainer.max_time"])
    kept = quickstart._length_overrides(changed, StepTiming(0.05, 1, {}), 100.0)
    assert [word.partition("=")[0] for word in kept] == [
        "trainer.val_check_interval",
        "trainer.log_every_n_steps",
        "trainer.max_time",
    ]
    slow = quickstart._length_overrides(config, StepTiming(60.0, 1, {}), 10.0)
    assert slow[:2] == ["trainer.max_steps=4", "trainer.val_check_interval=1"]


@pytest.mark.parametrize("path", ["runs/a b", "it's", "a=b,c", "ü[1]", "C:\\runs\\x", "50%", "a\\'b", "end\\"])
def test_any_directory_can_be_named(path: str) -> None:
    config = load_run_config(overrides=["experiment=quickstart", *quickstart._directory_overrides(path)])
    assert config.root.exp_manager.explicit_log_dir == path


@pytest.mark.parametrize("experiment", ["quickstart", "quickstart_gpu"])
def test_experiments_are_for_a_minute(experiment: str) -> None:
    root = load_run_config(overrides=[f"experiment={experiment}"]).root
    assert root.model.data.data_impl == "pystd"
    assert gpt(root).hidden_dropout == gpt(root).attention_dropout == 0
    assert gpt(root).hidden_size % gpt(root).num_attention_heads == 0


def test_first_labels_are_what_the_first_windows_predict() -> None:
    data = build_data(load_run_config(overrides=["experiment=quickstart"]).root)
    assert isinstance(data.validation, EvaluationWindows)
    labels = data.validation.batch(0, 7).labels
    found = torch.from_numpy(data.validation.first_labels(7).astype("int64"))
    assert sorted(found.tolist()) == sorted(labels.flatten().tolist())
    assert all(any(torch.equal(row, other) for other in labels) for row in found.split(labels.shape[1]))
    whole = data.validation.first_labels(data.validation.samples)
    assert whole.tolist() == data.validation.stream[1:].tolist()


@looped("value", ["4", "nan", "inf", "-1", "1e9", "soon"])
def test_bad_seconds_are_refused(value: str) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    quickstart.add_arguments(parser)
    with pytest.raises(argparse.ArgumentError, match="number of seconds from 5 to 86400"):
        parser.parse_args(["--seconds", value])


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    quickstart.add_arguments(parser)
    return quickstart.run(parser.parse_args(list(arguments)))


def test_a_typo_ends_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trainer\.max_steps"):
        _run("--dir", str(tmp_path / "run"), "trainer.max_step=3")
    assert not (tmp_path / "run").exists()


def test_quickstart_beats_unigram_and_says_where_everything_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model and a text that is easy to learn, so that a few seconds are enough."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(quickstart.shutil, "which", lambda name: name)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of a text\n" for number in range(4000)))
    run = tmp_path / "run"
    try:
        code = _run(
            *("--seconds", "5", "--dir", str(run), "data=text", f"model.data.path={text}", "trainer.max_steps=60"),
            *("trainer.accelerator=cpu", "model.num_layers=1", "model.encoder_seq_length=32"),
            *("model.data.splits_string='90,10'", "exp_manager.create_tensorboard_logger=false"),
        )
    finally:
        torch.set_num_threads(threads)
    assert code == 0
    document = json.loads((run / "quickstart.json").read_text())
    bits = document["bits_per_byte"]
    assert document["steps"] == 60
    assert 0 < bits["xz"] < bits["unigram"]
    assert bits["model"] < bits["unigram"]
    assert 6000 < bits["bytes"] < 12000
    printed = capsys.readouterr().out
    for word in ["sdpa_flash", "needs a CUDA device", "ms per step", "bits per byte", f"{bits['model']:.3f}", str(run)]:
        assert word in printed
    assert "import " in printed
    assert (run / "checkpoints" / "step-60" / "model.safetensors").exists()
    monkeypatch.chdir(tmp_path)
    more = {
        "generate": ["--max-new-tokens", "2"],
        "evaluate": ["--limit-batches", "1"],
        "quickstart": ["--help"],
        "train": [
            "trainer.fast_dev_run=True",
            "model.num_layers=1",
            "model.encoder_seq_length=32",
            "trainer.accelerator=cpu",
        ],
    }
    suggested = [shlex.split(line, comments=True) for line in printed.partition("next:\n")[2].splitlines()]
    assert [words[1] for words in suggested] == ["generate", "evaluate", "quickstart", "train", "config"]
    for command, *words in suggested:
        assert command == "stoker"
        try:
            assert main([*words, *more.get(words[0], [])]) == 0, f"{words}\n{capsys.readouterr().err}"
        except SystemExit as end:
            assert end.code == 0  # noqa: PT017


@pytest.mark.parametrize(("overrides", "seconds"), [([], 19.0), (["trainer.max_steps=7"], None)])
def test_training_has_the_time_that_is_left_unless_its_length_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, overrides: list[str], seconds: float | None
) -> None:
    given: list[float | None] = []

    class StartedError(Exception):
        pass

    def run_training(config: RunConfig, *, seconds: float | None = None) -> None:
        given.append(seconds)
        raise StartedError

    model = types.SimpleNamespace(attention_decisions={"training": types.SimpleNamespace(table=str)})
    monkeypatch.setattr(thread_tuning, "measure_step_time", lambda *_: (StepTiming(0.05, 1, {}), model))
    monkeypatch.setattr(train, "run_training", run_training)
    with pytest.raises(StartedError):
        _run("--seconds", "20", "--dir", str(tmp_path), "data=mock", "trainer.accelerator=cpu", *overrides)
    assert given == [seconds]


@pytest.mark.parametrize("code", [0, 130])
def test_the_script_names_the_environment_in_which_its_suggestions_run(tmp_path: Path, code: int) -> None:
    here = tmp_path / "a checkout"
    (here / "scripts").mkdir(parents=True)
    for name in ("quickstart.sh", "environment.sh"):
        (here / "scripts" / name).write_text((ROOT / "scripts" / name).read_text())
    for name in ("pyproject.toml", "constraints.txt", ".venv/bin/stoker", ".venv/.stoker-installed-base"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(f"#!/bin/sh\necho next: $*\nexit {code}\n")
    (here / ".venv" / "bin" / "stoker").chmod(0o755)
    (here / ".venv" / "bin" / "activate").write_text(f'PATH="{here}/.venv/bin:$PATH"')
    plain = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    script = ["bash", str(here / "scripts" / "quickstart.sh"), "--seconds", "5"]
    ended = subprocess.run(script, cwd=tmp_path, env=plain, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    assert "next: quickstart --seconds 5\n" in ended.stdout
    suggestion = ended.stdout.partition("first:")[2].strip()
    assert bool(suggestion) == (code == 0)
    if suggestion:
        again = ["bash", "-c", f"{suggestion} && stoker generate"]
        done = subprocess.run(again, cwd=tmp_path, env=plain, capture_output=True, text=True, check=True)
        assert done.stdout == "next: generate\n"
