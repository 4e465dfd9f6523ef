"""Whole runs: resumed bit for bit, stopped and killed at any time, and written where they should be."""

import json
from pathlib import Path

import pytest
import torch
from run_metrics import metric_rows
from tiers import extra, full_only
from tiny_run import assert_resume_is_exact, final_hashes, tiny_config

from stoker.trainer.checkpoint.reader import find_checkpoint
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import EXIT_INTERRUPTED, EXIT_IO, EXIT_OK, EXIT_TERMINATED, UserError

# ---------------------------------------------------------------- resume


@pytest.mark.parametrize("precision", ["bf16", *extra("32")])
def test_train_2n_equals_train_n_resume_train_n(tmp_path, precision):
    whole, halves = assert_resume_is_exact(tmp_path, 8, trainer__precision=precision)
    figures = [
        [{k: v for k, v in line.items() if k in ("step", "lr", "loss", "val_loss", "consumed_samples")} for line in run]
        for run in (metric_rows(whole), metric_rows(halves))
    ]
    # Losses are means since the last report: only what a resumed process reports first covers fewer steps.
    by_step = [{(f["step"], "val_loss" in f): f for f in run} for run in figures]
    for key in by_step[0].keys() & by_step[1].keys():
        assert by_step[0][key].get("lr") == by_step[1][key].get("lr")
        assert by_step[0][key].get("val_loss") == by_step[1][key].get("val_loss")
    assert find_checkpoint(halves)[0].state.consumed_samples == 8 * 4


def test_dropout_makes_steps_differ_from_evaluation(tmp_path):
    with_dropout = run_training(tiny_config(tmp_path / "a"))
    without = run_training(tiny_config(tmp_path / "b", model__hidden_dropout=0.0, model__attention_dropout=0.0))
    assert final_hashes(with_dropout.directory, 8) != final_hashes(without.directory, 8)


def test_a_finished_run_does_nothing_more(tmp_path):
    run_training(tiny_config(tmp_path))
    again = run_training(tiny_config(tmp_path))
    assert (again.step, again.exit_code) == (8, EXIT_OK)
    assert again.checkpoint == tmp_path / "checkpoints" / "step-8"


def test_a_damaged_newest_checkpoint_costs_one_interval(tmp_path, capsys):
    run_training(tiny_config(tmp_path))
    expected = final_hashes(tmp_path, 8)
    weights = tmp_path / "checkpoints" / "step-8" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (tmp_path / "checkpoints" / "step-9.tmp-1").mkdir()
    capsys.readouterr()
    run_training(tiny_config(tmp_path))
    output = capsys.readouterr().out
    assert "step-8 is damaged (model.safetensors has" in output
    assert "resuming from" in output
    assert "removed" in output
    assert final_hashes(tmp_path, 8) == expected


def test_resume_from_another_run(tmp_path):
    run_training(tiny_config(tmp_path / "a", trainer__max_steps=4))
    whole = run_training(tiny_config(tmp_path / "b"))
    path = tmp_path / "a" / "checkpoints" / "step-4"
    run_training(
        tiny_config(tmp_path / "c", exp_manager__resume_from_checkpoint=str(path), exp_manager__resume_if_exists=False)
    )
    assert final_hashes(tmp_path / "c", 8) == final_hashes(whole.directory, 8)


def test_what_changed_since_the_checkpoint_is_said(tmp_path, capsys):
    run_training(tiny_config(tmp_path, trainer__max_steps=4))
    capsys.readouterr()
    result = run_training(
        tiny_config(tmp_path, model__seed=7, model__global_batch_size=8, model__optim={"lr": 0.5, "betas": [0.9, 0.9]})
    )
    output = capsys.readouterr().out
    assert "`model.seed` was 1234 in step-4 and is 7 now" in output
    assert "`model.global_batch_size` was 4 in step-4 and is 8 now" in output
    assert "`model.optim.lr` was 0.01 in step-4 and is 0.5 now" in output
    assert find_checkpoint(result.directory)[0].state.consumed_samples == 4 * 4 + 4 * 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__hidden_size": 64}, "does not fit the model of this configuration"),
        ({"model__num_layers": 2}, r"decoder\.layers\.1\..* is missing"),
        ({"trainer__precision": "bf16"}, "the model needs bf16"),
        ({"model__override_vocab_size": 300}, "was trained on other data: fingerprint mock-259, now mock-300"),
    ],
)
def test_what_cannot_go_on_is_refused(tmp_path, changes, message):
    run_training(tiny_config(tmp_path, trainer__max_steps=4))
    with pytest.raises(UserError, match=message):
        run_training(tiny_config(tmp_path, **changes))


def test_no_checkpoint_to_resume(tmp_path):
    with pytest.raises(UserError, match="there is no checkpoint in"):
        run_training(tiny_config(tmp_path, exp_manager__resume_ignore_no_checkpoint=False))


def test_only_damaged_checkpoints_are_no_reason_to_start_over(tmp_path):
    run_training(tiny_config(tmp_path, trainer__max_steps=4))
    (tmp_path / "checkpoints" / "step-4" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged") as error:
        run_training(tiny_config(tmp_path))
    assert "using the one before it" not in str(error.value)


# ---------------------------------------------------------------- signals and kills


@pytest.fixture(scope="module")
def two_kills(tmp_path_factory, forks):
    return forks.call("tiny_run", "interrupted", str(tmp_path_factory.mktemp("kills")), 2, 0)


@full_only
def test_killed_runs_end_with_the_same_bits(two_kills):
    assert two_kills["kills"] == 2
    assert all(final == two_kills["peace"] for final in two_kills["killed"])


@full_only
@pytest.mark.parametrize("seed", [1, 2])
def test_runs_killed_five_times_end_with_the_same_bits(tmp_path, forks, seed):
    result = forks.call("tiny_run", "interrupted", str(tmp_path), 5, seed)
    assert result["kills"] == 5
    assert all(final == result["peace"] for final in result["killed"])


@full_only
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", EXIT_TERMINATED), ("SIGINT", EXIT_INTERRUPTED)])
def test_a_signal_saves_the_step_and_exits_with_its_code(two_kills, name, code):
    assert two_kills[f"{name} exit"] == code
    assert two_kills[f"{name} saved"] == [two_kills[f"{name} stopped"]]
    assert two_kills[name] == two_kills["peace"]


@full_only
def test_max_time_saves_and_ends_well(tmp_path):
    result = run_training(tiny_config(tmp_path, trainer__max_time="00:00:00:01", trainer__max_steps=100_000))
    assert result.exit_code == EXIT_OK
    assert result.stop_reason == "trainer.max_time=00:00:00:01"
    assert result.checkpoint == tmp_path / "checkpoints" / f"step-{result.step}"
    line = (tmp_path / "run.log").read_text().splitlines()[-1]
    assert "stopped by trainer.max_time" in line
    assert f"exp_manager.explicit_log_dir={tmp_path} exp_manager.resume_if_exists=True" in line


# ---------------------------------------------------------------- divergence and the disk


def test_a_diverged_run_names_the_step_and_the_last_good_checkpoint(tmp_path, monkeypatch):
    from stoker.models.gpt import GPT

    real, calls = GPT.loss, 0

    def loss(self, *inputs):
        nonlocal calls
        calls += self.training
        value = real(self, *inputs)
        return value * float("nan") if calls == 11 and self.training else value  # the first half of step 6

    monkeypatch.setattr(GPT, "loss", loss)
    with pytest.raises(UserError) as error:
        run_training(tiny_config(tmp_path, trainer__log_every_n_steps=100, trainer__max_skipped_steps=0))
    assert error.value.lines[0].startswith("training diverged at step 6: loss nan")
    assert error.value.lines[1] == f"the last good checkpoint is {tmp_path / 'checkpoints' / 'step-4'}"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-4"]
    assert "training diverged at step 6" in (tmp_path / "run.log").read_text()


def test_a_validation_that_is_not_finite_is_divergence_and_saves_nothing(tmp_path, monkeypatch):
    from stoker.models.gpt import GPT

    real = GPT.loss

    def loss(self, *inputs):
        value = real(self, *inputs)
        return value if self.training else value * float("nan")

    monkeypatch.setattr(GPT, "loss", loss)
    with pytest.raises(UserError, match="training diverged at step 4: validation loss nan") as error:
        run_training(tiny_config(tmp_path))
    assert error.value.lines[1] == "there is no checkpoint yet"
    assert not (tmp_path / "checkpoints").exists()


def test_a_full_disk_ends_the_run_with_exit_code_74(tmp_path, monkeypatch):
    import errno
    import os

    from stoker.trainer.utils import safetensors_io

    real, written = os.write, 0

    def write(descriptor, data):
        nonlocal written
        written += len(data)
        if written > 400_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(safetensors_io.os, "write", write)
    with pytest.raises(UserError, match="No space left on device") as error:
        run_training(tiny_config(tmp_path))
    assert error.value.exit_code == EXIT_IO
    monkeypatch.undo()
    assert run_training(tiny_config(tmp_path)).step == 8


def test_a_directory_that_cannot_be_made_is_exit_code_74(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the run directory") as error:
        run_training(tiny_config(tmp_path / "file" / "run"))
    assert error.value.exit_code == EXIT_IO


def test_a_file_in_place_of_the_checkpoints_is_refused_before_training(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match=r"checkpoints is not a directory; remove it"):
        run_training(tiny_config(tmp_path))


# ---------------------------------------------------------------- what is written, and where


def test_a_run_directory_holds_everything(tmp_path, capsys):
    result = run_training(tiny_config(tmp_path, exp_manager__create_tensorboard_logger=True))
    files = {"config.resolved.json", "environment.json", "events.jsonl", "metrics.jsonl", "run.lock", "run.log"}
    assert {path.name for path in tmp_path.iterdir()} == files | {"checkpoints", "tensorboard"}
    assert json.loads((tmp_path / "config.resolved.json").read_text())["name"] == "tiny"
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert environment["device"] == "cpu"
    steps = [line for line in metric_rows(tmp_path) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 4, 6, 8]
    assert {"lr", "grad_norm", "tokens_per_second", "memory_gib", "consumed_samples"} <= steps[-1].keys()
    assert [line["step"] for line in metric_rows(tmp_path) if "val_loss" in line] == [4, 8]
    assert result.validation
    assert result.validation.loss == metric_rows(tmp_path)[-1]["val_loss"]
    output = capsys.readouterr().out
    assert "val loss" in output
    assert "lightning" not in output.lower()
    assert any((tmp_path / "tensorboard").iterdir())


def test_a_resumed_run_has_one_line_per_step(tmp_path):
    run_training(tiny_config(tmp_path, trainer__max_steps=6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0}\n{"step": 8, "lo')
    run_training(tiny_config(tmp_path))
    steps = [line["step"] for line in metric_rows(tmp_path) if "loss" in line]
    assert steps == sorted(set(steps))
    assert steps[-1] == 8


def versions(tmp_path, **changes):
    settings = {
        "exp_manager__explicit_log_dir": None,
        "exp_manager__resume_if_exists": False,
        "exp_manager__exp_dir": str(tmp_path),
        "exp_manager__create_checkpoint_callback": False,
        "trainer__max_steps": 1,
        "trainer__limit_val_batches": 0,
        **changes,
    }
    return run_training(tiny_config(tmp_path, **settings)).directory.relative_to(tmp_path)


def test_directories_are_named_as_in_nemo(tmp_path):
    assert versions(tmp_path, exp_manager__use_datetime_version=False) == Path("tiny/version_0")
    assert versions(tmp_path, exp_manager__use_datetime_version=False) == Path("tiny/version_1")
    assert versions(tmp_path, exp_manager__version=7, exp_manager__name="other") == Path("other/version_7")
    assert versions(tmp_path, exp_manager__version="v") == Path("tiny/v")
    assert versions(tmp_path, exp_manager__resume_if_exists=True) == Path("tiny")
    stamped = {versions(tmp_path) for _ in range(2)}
    assert len(stamped) == 2
    assert not any((tmp_path / path / "checkpoints").exists() for path in stamped)


def test_checkpoints_of_another_run_are_not_mixed_with_ours(tmp_path):
    run_training(tiny_config(tmp_path, trainer__max_steps=4))
    with pytest.raises(UserError, match=r"already holds checkpoints up to step-4.*resume_if_exists=True"):
        run_training(tiny_config(tmp_path, exp_manager__resume_if_exists=False))
    # The refused call holds no lock: the same process may do as it was told.
    assert run_training(tiny_config(tmp_path)).step == 8


def test_checkpoints_of_a_run_that_saves_none_are_in_nobodys_way(tmp_path):
    params = {"exp_manager__checkpoint_callback_params": {"dirpath": str(tmp_path / "kept")}}
    run_training(tiny_config(tmp_path / "a", trainer__max_steps=4, **params))
    without = {"exp_manager__create_checkpoint_callback": False, "exp_manager__resume_if_exists": False}
    assert run_training(tiny_config(tmp_path / "b", trainer__max_steps=4, **params, **without)).step == 4


def test_two_processes_cannot_train_in_one_directory(tmp_path):
    from stoker.trainer.checkpoint.run_directory import open_run_directory

    config = tiny_config(tmp_path)
    with open_run_directory(config), pytest.raises(UserError, match="another process trains in"):
        open_run_directory(config)
    with open_run_directory(config):
        pass


def test_what_is_kept_follows_the_keys(tmp_path):
    params = {"save_top_k": 1, "every_n_train_steps": 2}
    run_training(tiny_config(tmp_path, exp_manager__checkpoint_callback_params=params))
    states = [find_checkpoint(path)[0].state for path in (tmp_path / "checkpoints").iterdir()]
    assert len(states) <= 2
    assert max(state.step for state in states) == 8
    losses = {line["step"]: line["val_loss"] for line in metric_rows(tmp_path) if "val_loss" in line}
    best = min(losses, key=lambda step: losses[step])
    assert best in {state.step for state in states}


def test_numbers_of_one_are_in_the_singular(tmp_path, capsys):
    one = {"trainer__max_steps": 1, "trainer__num_sanity_val_steps": 1, "model__micro_batch_size": 1}
    run_training(tiny_config(tmp_path, **one, model__global_batch_size=1))
    told = capsys.readouterr().out
    assert ", 1 layer, hidden size" in told
    assert "1 step of 1 sample in 1 micro batch, " in told
    assert "(1 batch)" in told


def test_a_missing_device_is_one_error(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match=r"`trainer\.accelerator` \(gpu\)"):
        run_training(tiny_config(tmp_path, trainer__accelerator="gpu"))


def test_validation_before_the_first_step(tmp_path, capsys):
    run_training(tiny_config(tmp_path, trainer__num_sanity_val_steps=1, trainer__max_steps=1))
    assert "validation loss before the first step" in capsys.readouterr().out
