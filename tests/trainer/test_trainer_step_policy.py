"""Skipped steps, divergence, loss spikes, early stopping, trials: what a run decides by its own figures."""

import json
import math
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resolved import build_data, data_spec
from run_metrics import metric_rows
from tiers import cases, looped
from tiny_run import final_hashes, tiny_config, tiny_document
from worker_threads import worker_threads

from stoker.models.gpt import GPT
from stoker.trainer.callbacks.divergence import (
    MIN_REFERENCE_LOSSES,
    NUM_RECENT_LOSSES,
    NUM_REFERENCE_LOSSES,
    DivergedError,
    LossMonitor,
    loss_deviation,
)
from stoker.trainer.callbacks.early_stopping import EarlyStopping
from stoker.trainer.checkpoint.loop_state import EarlyStoppingState, LoopState
from stoker.trainer.checkpoint.reader import find_checkpoint
from stoker.trainer.config.load import config_from_document
from stoker.trainer.config.problems import ConfigError
from stoker.trainer.config.schema.exp_manager import EarlyStoppingParams
from stoker.trainer.config.schema.root import RootBlock
from stoker.trainer.core.debug_runs import fast_dev_run, overfit_batches
from stoker.trainer.data import dataloader
from stoker.trainer.data.batch_sampler import BatchSchedule, RankBatchSampler
from stoker.trainer.data.datasets.samples import MockSamples
from stoker.trainer.data.subsets import RepeatedSubset, validation_subset
from stoker.trainer.data.tokenizers.tokenizer import ByteTokenizer
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import EXIT_OK, UserError

NAN = float("nan")
FRESH = LoopState.model_validate({})
PLAIN: dict[str, Any] = {
    "trainer__limit_val_batches": 0,
    "model__hidden_dropout": 0.0,
    "model__attention_dropout": 0.0,
    "model__optim": {"lr": 1e-2, "sched": {"name": "CosineAnnealing", "min_lr": 1e-2, "warmup_steps": 0}},
}
EVERY_STEP = {"every_n_train_steps": 1, "save_top_k": -1}


@pytest.fixture
def poison(monkeypatch):
    """Makes the losses of some training micro batches not finite: those whose numbers, from 0, are given."""

    def install(numbers, factor=NAN):
        real, calls = GPT.loss, iter(range(10**9))

        def loss(self, *args, **kwargs):
            value = real(self, *args, **kwargs)
            return value * factor if self.training and next(calls) in numbers else value

        monkeypatch.setattr(GPT, "loss", loss)

    return install


def rows(directory, name="loss"):
    return {row["step"]: row for row in metric_rows(directory) if name in row}


# ---------------------------------------------------------------- the rules, by figures alone


def test_bad_steps_are_counted_told_and_left_out_of_the_mean():
    policy = LossMonitor(2, None, FRESH)
    assert policy.update(1, [(3.0, 1.0), (NAN, 1.0), (5.0, 1.0)]) == ["step 2 was skipped: loss nan, gradient norm 1.0"]
    assert (policy.skipped_steps, policy.consecutive_skipped_steps) == (1, 0)
    assert policy.update(4, [(1.0, math.inf), (NAN, NAN)]) == [
        "2 steps from 4 on were skipped: loss 1.0, gradient norm inf"
    ]
    assert (policy.skipped_steps, policy.consecutive_skipped_steps) == (3, 2)
    assert policy.mean_loss(restart=False) == 4.0
    assert policy.mean_loss(restart=True) == 4.0
    assert math.isnan(policy.mean_loss(restart=False))


def test_too_many_bad_steps_in_a_row_are_divergence():
    bad, good = (NAN, 1.0), (1.0, 1.0)
    policy = LossMonitor(2, None, FRESH)
    policy.update(1, [bad, bad, good, bad, bad, good])
    with pytest.raises(DivergedError, match=r"at step 9: loss nan, gradient norm 1\.0, number 3 in a row"):
        policy.update(7, [bad, bad, bad])
    with pytest.raises(DivergedError, match=r"at step 1: loss nan, gradient norm 1\.0$"):
        LossMonitor(0, None, FRESH).update(1, [bad])


def figures(count, seed=0, at=math.inf, by=0.0):
    chance = random.Random(seed)
    return [(3.0 + chance.gauss(0, 0.1) + by * (step >= at), 1.0) for step in range(1, count + 1)]


def test_every_cut_into_processes_gives_the_same_decisions():
    """The state is all there is to know: a policy that is made anew after any step says and counts the same."""
    steps = figures(200, at=120, by=2.0)
    steps[30:33] = [(NAN, 1.0)] * 3
    whole = LossMonitor(5, 4.0, FRESH)
    said = [whole.update(step, [figure]) for step, figure in enumerate(steps, 1)]
    assert sum(map(len, said)) == 4
    broken = LossMonitor(5, 4.0, FRESH)
    for step, figure in enumerate(steps, 1):
        assert broken.update(step, [figure]) == said[step - 1]
        state = LoopState.model_validate_json(broken.state().model_dump_json())
        assert state == broken.state()
        broken = LossMonitor(5, 4.0, state)
    assert broken.state() == whole.state()


def test_a_jump_of_the_loss_is_told_once_until_it_is_over():
    policy = LossMonitor(0, 4.0, FRESH)
    calm = figures(120)
    jump = [(loss + 3.0, 1.0) for loss, _ in figures(40, seed=1)]
    assert policy.update(1, calm) == []
    [warning] = policy.update(121, jump)
    assert warning.startswith("loss spike before step 125: ")
    assert warning.endswith("deviations above 2.9884 before")
    assert policy.update(161, figures(60, seed=2)) == []
    assert len(policy.update(221, jump)) == 1
    silent = LossMonitor(0, None, FRESH)
    assert silent.update(1, calm + jump) == []


def test_noise_single_bad_batches_and_falling_losses_are_no_spikes():
    for seed in range(20):
        assert LossMonitor(0, 4.0, FRESH).update(1, figures(400, seed)) == []
    with_outliers = [(99.0, 1.0) if step % 20 == 7 else figure for step, figure in enumerate(figures(400))]
    assert LossMonitor(0, 4.0, FRESH).update(1, with_outliers) == []
    falling = [(10 / (1 + step / 20) + figure[0], 1.0) for step, figure in enumerate(figures(400))]
    assert LossMonitor(0, 4.0, FRESH).update(1, falling) == []
    floor = [(0.001 * (1 + step % 2), 1.0) for step in range(200)] + [(0.008, 1.0)] * 20
    assert LossMonitor(0, 4.0, FRESH).update(1, floor) == []


def test_deviations_are_medians_against_medians():
    assert loss_deviation([1.0] * (MIN_REFERENCE_LOSSES + NUM_RECENT_LOSSES - 1)) is None
    losses = [1.0, 3.0] * (NUM_REFERENCE_LOSSES // 2) + [8.0] * NUM_RECENT_LOSSES
    found = loss_deviation([100.0] * 50 + losses)  # what is older does not count
    assert found is not None
    deviations, now, usual = found
    assert (now, usual) == (8.0, 2.0)
    assert deviations == pytest.approx((8.0 - 2.0) / 1.4826)


# ---------------------------------------------------------------- early stopping, by figures alone


def checks(values, state=None, **params):
    """After which value it stops and why; (None, "") where it does not."""
    stopping = EarlyStopping(EarlyStoppingParams.model_validate(params), state or EarlyStoppingState.model_validate({}))
    for number, value in enumerate(values, 1):
        reason, _ = stopping.check(value)
        if reason is not None:
            return number, reason
    return None, ""


@looped(
    ("values", "params", "stops_at", "because"),
    [
        ([5, 4, 3, 2, 1], {"patience": 1}, None, ""),
        ([5, 4, 4, 4, 4], {"patience": 2}, 4, "no better than 4.0000 in 2 checks"),
        ([5, 4, 4, 3, 3, 3], {"patience": 2}, 6, "no better than 3.0000 in 2 checks"),
        ([1, 2, 3, 3, 3], {"patience": 2, "mode": "max"}, 5, "no better than 3.0000 in 2 checks"),
        ([1, 2, 1], {"patience": 1, "mode": "max"}, 3, "no better than 2.0000 in 1 check"),
        ([5, 4.95, 4.92], {"patience": 2, "min_delta": 0.1}, 3, "no better than 5.0000"),
        ([5, 4.95, 4.85], {"patience": 2, "min_delta": 0.1}, None, ""),
        ([5, 5], {"patience": 0}, 2, "no better"),
        ([5, 1.9], {"patience": 9, "stopping_threshold": 2.0}, 2, "1.9000 has passed stopping_threshold=2"),
        ([1, 3], {"patience": 9, "stopping_threshold": 2.0, "mode": "max"}, 2, "has passed stopping_threshold"),
        ([5, 9], {"patience": 9, "divergence_threshold": 8.0}, 2, "is worse than divergence_threshold=8"),
        ([5, NAN], {"patience": 9}, 2, "val_loss is nan"),
        ([5, NAN, math.inf], {"patience": 2, "check_finite": False}, 3, "no better than 5.0000 in 2 checks"),
        ([5, NAN, 4, NAN, 3], {"patience": 2, "check_finite": False}, None, ""),
    ],
)
def test_when_a_metric_ends_a_run(values, params, stops_at, because):
    number, reason = checks(values, **params)
    assert number == stops_at
    assert because in reason


@pytest.mark.parametrize(("patience", "counts"), [(0, "1 check"), (2, "2 checks")])
def test_the_log_counts_checks_without_improvement(patience, counts):
    stopping = EarlyStopping(
        EarlyStoppingParams.model_validate({"patience": patience}), EarlyStoppingState.model_validate({})
    )
    *_, (reason, line) = map(stopping.check, [5.0] * (1 + max(patience, 1)))
    assert line == f"val_loss 5.0000 is no better than 5.0000: {counts} without improvement, patience {patience}"
    assert reason is not None


def test_patience_is_remembered():
    params = EarlyStoppingParams.model_validate({"patience": 3})
    first = EarlyStopping(params, EarlyStoppingState.model_validate({}))
    for value in (5.0, 4.0, 4.5, 4.5):
        assert first.check(value)[0] is None
    state = EarlyStoppingState.model_validate_json(first.state.model_dump_json())
    assert state == EarlyStoppingState(best=4.0, last=4.5, waited=2)
    second = EarlyStopping(params, state)
    assert second.stop_reason is None
    assert second.check(4.2)[0] is not None
    assert EarlyStopping(params, second.state).stop_reason is not None


# ---------------------------------------------------------------- whole runs: skipped steps and divergence


@pytest.mark.parametrize("factor", [NAN, math.inf])
def test_a_bad_step_changes_nothing_and_is_counted(tmp_path, poison, factor):
    poison({5}, factor)  # the second micro batch of step 3
    result = run_training(tiny_config(tmp_path, exp_manager__checkpoint_callback_params=EVERY_STEP, **PLAIN))
    assert (result.step, result.exit_code) == (8, EXIT_OK)
    hashes = [final_hashes(tmp_path, step) for step in range(1, 9)]
    assert hashes[2] == hashes[1]
    assert len({json.dumps(found) for found in hashes}) == 7
    assert [row["skipped_steps"] for row in rows(tmp_path).values()] == [0, 0, 1, 1, 1, 1, 1, 1]
    log = (tmp_path / "run.log").read_text()
    assert log.count("warning: step 3 was skipped: loss") == 1
    loss = rows(tmp_path)[3]["loss"]
    assert loss is None or math.isfinite(loss)
    assert find_checkpoint(tmp_path)[0].state.loop.skipped_steps == 1


@pytest.mark.parametrize(("bad", "first_bad"), [({0}, 0), ({4, 5}, 8)], ids=["first step", "third step"])
@pytest.mark.parametrize(
    "optimizer", cases([{}, {"name": "adafactor"}, {"name": "sgd", "momentum": 0.9}], fast=1), ids=str
)
def test_a_skipped_batch_is_as_if_it_had_not_been_there(tmp_path, poison, monkeypatch, optimizer, bad, first_bad):
    """Equal to the bit where a step is nothing but its batch: no dropout and a constant rate."""
    with_bad, without = tmp_path / "with", tmp_path / "without"
    settings = {**PLAIN, "model__optim": {**PLAIN["model__optim"], **optimizer}}
    poison(bad)
    run_training(tiny_config(with_bad, trainer__max_steps=6, **settings))
    monkeypatch.undo()
    real = MockSamples.batch
    monkeypatch.setattr(
        MockSamples, "batch", lambda self, first, count: real(self, first + 4 * (first >= first_bad), count)
    )
    run_training(tiny_config(without, trainer__max_steps=5, **settings))
    assert final_hashes(with_bad, 6) == final_hashes(without, 5)


def test_a_run_resumed_after_a_bad_step_is_the_unbroken_one(tmp_path, poison, monkeypatch):
    settings = {"trainer__log_every_n_steps": 5, "exp_manager__checkpoint_callback_params": {"every_n_train_steps": 4}}
    poison({5})
    run_training(tiny_config(tmp_path / "whole", **settings))
    monkeypatch.undo()
    poison({5})
    run_training(tiny_config(tmp_path / "halves", trainer__max_steps=4, **settings))
    run_training(tiny_config(tmp_path / "halves", **settings))
    assert final_hashes(tmp_path / "whole", 8) == final_hashes(tmp_path / "halves", 8)
    whole, halves = (rows(tmp_path / name)[5] for name in ("whole", "halves"))
    assert find_checkpoint(tmp_path / "halves")[0].state.updates == 7
    assert (whole["loss"], whole["skipped_steps"]) == (halves["loss"], halves["skipped_steps"]) == (whole["loss"], 1)


def test_the_last_good_checkpoint_is_named_when_it_is_too_much(tmp_path, poison):
    poison(range(8, 100))
    settings = {"trainer__max_steps": 30, "trainer__max_skipped_steps": 2, "trainer__log_every_n_steps": 1}
    with pytest.raises(UserError, match=r"training diverged at step 7: .*number 3 in a row") as error:
        run_training(tiny_config(tmp_path, **settings))
    assert error.value.lines[1] == f"the last good checkpoint is {tmp_path / 'checkpoints' / 'step-4'}"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-4"]


def test_skipped_steps_in_a_row_are_counted_over_a_resume(tmp_path, poison):
    params = {"every_n_train_steps": 3}
    settings = {"trainer__max_skipped_steps": 3, "exp_manager__checkpoint_callback_params": params, **PLAIN}
    poison(range(2, 100))
    run_training(tiny_config(tmp_path, trainer__max_steps=3, **settings))  # steps 2 and 3 are bad
    with pytest.raises(UserError, match="diverged at step 5"):
        run_training(tiny_config(tmp_path, **settings))


# ---------------------------------------------------------------- whole runs: early stopping, kept checkpoints


def test_early_stopping_ends_a_run_well_and_for_good(tmp_path):
    settings = {
        "trainer__val_check_interval": 1,
        "exp_manager__create_early_stopping_callback": True,
        "exp_manager__early_stopping_callback_params": {"patience": 1, "min_delta": 9.0},
    }
    for _ in range(2):  # started again it ends at once
        result = run_training(tiny_config(tmp_path, **settings))
        assert (result.step, result.exit_code) == (2, EXIT_OK)
        assert "early stopping (val_loss was no better" in (result.stop_reason or "")
        assert find_checkpoint(tmp_path)[0].state.step == 2
        last = (tmp_path / "run.log").read_text().splitlines()[-1]
        assert "exp_manager.create_early_stopping_callback=False or" in last
        assert last.endswith("exp_manager.early_stopping_callback_params.patience above 1")
    assert "early stopping: val_loss" in (tmp_path / "run.log").read_text()
    settings["exp_manager__early_stopping_callback_params"]["patience"] = 2  # as the last line says
    assert run_training(tiny_config(tmp_path, **settings)).step == 3


@looped(
    ("values", "params", "cures"),
    [
        ([5.0], {"stopping_threshold": 6.0}, {"stopping_threshold": None}),
        ([5.0], {"divergence_threshold": 4.0}, {"divergence_threshold": None}),
        ([5.0, 6.0, 6.0], {"stopping_threshold": 1.0, "patience": 2}, {"patience": 3}),
        ([5.0, 6.0], {"divergence_threshold": 5.5, "patience": 1}, {"divergence_threshold": None, "patience": 2}),
        ([5.0, 6.0, 6.0, 6.0], {"patience": 2}, {"patience": 4}),
        ([math.nan], {}, {"check_finite": False}),
        ([5.0, math.nan], {"check_finite": False, "patience": 1, "stopping_threshold": 1.0}, {"patience": 2}),
    ],
)
def test_the_cures_of_a_run_that_stopped_early_let_it_go_on(values, params, cures):
    stopping = EarlyStopping(EarlyStoppingParams.model_validate(params), EarlyStoppingState.model_validate({}))
    reasons = [stopping.check(value)[0] for value in values]
    assert reasons[-1] is not None
    block = "exp_manager.early_stopping_callback_params."
    said = {"patience": f"patience above {len(values) - 1}"}
    ways = (block + said.get(name, f"{name}={'null' if value is None else value}") for name, value in cures.items())
    assert stopping.continue_hint == f"exp_manager.create_early_stopping_callback=False or {' and '.join(ways)}"
    assert EarlyStopping(EarlyStoppingParams.model_validate(params | cures), stopping.state).stop_reason is None


def manifest(directory, step):
    files = json.loads((directory / "checkpoints" / f"step-{step}" / "manifest.json").read_text())["files"]
    return {name: file["sha256"] for name, file in files.items() if name != "config.json"}


def test_a_resumed_run_has_the_figures_averages_and_patience_of_the_unbroken_one(tmp_path):
    settings = {
        "exp_manager__ema": {"enable": True, "decay": 0.9},
        "exp_manager__create_early_stopping_callback": True,
        "exp_manager__early_stopping_callback_params": {"monitor": "loss", "patience": 50, "min_delta": 0.0},
        "exp_manager__checkpoint_callback_params": {"every_n_train_steps": 5},
        "trainer__val_check_interval": 2,
        "trainer__log_every_n_steps": 3,
    }
    run_training(tiny_config(tmp_path / "whole", trainer__max_steps=10, **settings))
    for steps in (5, 10):
        run_training(tiny_config(tmp_path / "halves", trainer__max_steps=steps, **settings))
    assert manifest(tmp_path / "whole", 10) == manifest(tmp_path / "halves", 10)
    for name in ("loss", "val_loss"):
        whole, halves = rows(tmp_path / "whole", name), rows(tmp_path / "halves", name)
        common = whole.keys() & halves.keys()
        assert len(common) >= 5
        assert {step: whole[step][name] for step in common} == {step: halves[step][name] for step in common}
    assert find_checkpoint(tmp_path / "halves")[0].state.loop.patience.best is not None


def test_the_best_by_a_metric_that_should_be_large_is_kept(tmp_path):
    params = {"monitor": "grad_norm", "mode": "max", "save_top_k": 1, "every_n_train_steps": 1, "save_last": False}
    result = run_training(tiny_config(tmp_path, exp_manager__checkpoint_callback_params=params))
    best = max((row["grad_norm"], step) for step, row in rows(tmp_path).items())[1]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{best}"]
    assert best < result.step
    assert result.checkpoint == tmp_path / "checkpoints" / f"step-{best}", "it is there, and not the deleted last one"


def test_an_interval_that_has_passed_saves_at_once_on_one_process(tmp_path):
    """Zero seconds always have; the rules refuse it to users."""
    params = {"train_time_interval": "00:00:00:00", "save_top_k": -1}
    run_training(tiny_config(tmp_path, trainer__max_steps=4, exp_manager__checkpoint_callback_params=params))
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {f"step-{step}" for step in range(1, 5)}


def test_bits_per_byte_that_a_tokenizer_does_not_give_decide_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "token_byte_counts", lambda tokenizer: np.zeros(tokenizer.vocab_size, np.int64))
    (tmp_path / "text.txt").write_text("to be or not to be " * 200)
    data = {"data_impl": "text", "path": str(tmp_path / "text.txt")}
    keys = {"model__data": data, "trainer__max_steps": 4}
    stopping = {"monitor": "bits_per_byte", "strict": True}
    stops = {
        "exp_manager__create_early_stopping_callback": True,
        "exp_manager__early_stopping_callback_params": stopping,
    }
    run = tmp_path / "run"
    with pytest.raises(UserError, match=r"early_stopping_callback_params.monitor. \(bits_per_byte\) is never measured"):
        run_training(tiny_config(run, **keys, **stops))
    assert not run.exists()
    watched = {"monitor": "bits_per_byte", "save_top_k": 1}
    run_training(tiny_config(run, **keys, exp_manager__checkpoint_callback_params=watched))
    assert "checkpoint_callback_params.monitor` (bits_per_byte) is never measured" in (run / "run.log").read_text()


# ---------------------------------------------------------------- development


def test_a_trial_touches_nothing_of_the_run(tmp_path):
    run_training(tiny_config(tmp_path, trainer__max_steps=4))
    before = final_hashes(tmp_path, 4), (tmp_path / "metrics.jsonl").read_text()
    result = run_training(tiny_config(tmp_path, trainer__fast_dev_run=2, trainer__max_steps=4))
    assert result.step == 2
    assert result.validation is not None
    assert result.directory == tmp_path / "fast_dev_run"
    assert not (result.directory / "checkpoints").exists()
    assert (final_hashes(tmp_path, 4), (tmp_path / "metrics.jsonl").read_text()) == before


def test_a_trial_is_not_kept_off_by_checkpoints_of_the_run_elsewhere(tmp_path):
    keys = {"exp_manager__checkpoint_callback_params": {"dirpath": str(tmp_path / "kept")}, "trainer__max_steps": 4}
    run_training(tiny_config(tmp_path / "run", **keys))
    assert run_training(tiny_config(tmp_path / "run", **keys, trainer__fast_dev_run=1)).step == 1


def test_a_trial_that_does_not_reach_the_profiled_steps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="step 5 is never reached: `fast_dev_run` is 2"):
        config_from_document(
            tiny_document(tmp_path, trainer__fast_dev_run=2, trainer__max_steps=50, trainer__profiler="pytorch")
        )


def test_a_trial_has_the_schedule_of_the_run_and_its_place():
    config = config_from_document(
        {
            **tiny_document(Path("."), exp_manager__explicit_log_dir=None),
            "trainer": {"max_steps": 500, "fast_dev_run": True},
        }
    )
    trial = fast_dev_run(config).root
    assert (trial.trainer.max_steps, trial.trainer.log_every_n_steps) == (1, 1)
    assert trial.model.optim.sched.max_steps == 100
    assert trial.exp_manager.explicit_log_dir == "runs/tiny/fast_dev_run"
    plain = config_from_document(tiny_document(Path(".")))
    assert fast_dev_run(plain) is plain


def test_a_few_batches_are_learned_by_heart(tmp_path):
    calm = {"model__hidden_dropout": 0.0, "model__attention_dropout": 0.0}
    result = run_training(tiny_config(tmp_path, trainer__overfit_batches=1, trainer__max_steps=60, **calm))
    assert result.validation is not None
    assert result.validation.loss < 4.0 < math.log(259)  # random tokens: nothing to learn but these


def test_the_first_samples_come_again_and_again():
    few = RepeatedSubset(MockSamples(100, 8, seed=1, samples=1000), 3)
    first = few.batch(0, 3).tokens
    assert few.samples == 3
    assert few.batch(2, 5).tokens.tolist() == first[[2, 0, 1, 2, 0]].tolist()
    assert few.batch(6, 2).labels.tolist() == few.batch(0, 2).labels.tolist()


def test_more_batches_by_heart_than_there_are_is_one_line(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("all there is " * 30)
    data = {"data_impl": "text", "path": str(text)}
    settings = {"model__data": data, "trainer__overfit_batches": 50, "trainer__limit_val_batches": 0}
    with pytest.raises(UserError, match=r"`trainer\.overfit_batches` \(50\) needs 200 samples.*use at most") as error:
        run_training(tiny_config(tmp_path / "run", **settings))
    assert len(error.value.lines) == 1


@looped(("samples", "batches"), [(3, 1), (4, 1), (14, 3), (15, 3), (16, 4), (19, 4)])
def test_an_epoch_by_heart_is_all_its_whole_batches(samples, batches):
    root = RootBlock.model_validate(tiny_document(Path("."), trainer__overfit_batches=1.0))
    data, keys = build_data(root), (root.trainer.overfit_batches, root.model.global_batch_size)
    few = replace(data, train=RepeatedSubset(data.train, samples))
    if samples < 4:
        with pytest.raises(UserError, match="have 3; use a smaller `model"):
            overfit_batches(few, *keys)
    else:
        assert overfit_batches(few, *keys).train.samples == 4 * batches


@looped(
    ("limit", "drops", "counts"),
    [
        (1.0, False, {1: 1, 5: 5, 9: 9, 10: 10, 13: 13}),
        (0.5, False, {1: 1, 5: 3, 9: 5, 10: 5, 13: 7}),
        (7, False, {1: 1, 5: 5, 13: 13}),
        (1.0, True, {4: 4, 5: 4, 9: 8, 13: 12}),
        (0.5, True, {9: 4, 13: 4, 16: 8}),
        (7, True, {5: 4, 13: 12}),
    ],
)
def test_a_part_of_the_validation_samples_is_counted_in_samples(limit, drops, counts):
    keys = {"trainer__limit_val_batches": limit, "model__data": {"data_impl": "mock", "validation_drop_last": drops}}
    root = RootBlock.model_validate(tiny_document(Path("."), **keys))
    found = {n: validation_subset(data_spec(root), MockSamples(100, 8, seed=1, samples=n)).samples for n in counts}
    assert found == counts


@pytest.mark.parametrize(("limit", "left"), [(5, "3 samples, less"), (0.25, r"1 sample \(`trainer.limit_val_batches`")])
def test_no_whole_batch_to_validate_on_is_one_line(limit, left, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("all there is " * 30)
    data = {"data_impl": "text", "path": str(text), "splits_string": "80,20", "validation_drop_last": True}
    settings = {"model__data": data, "trainer__limit_val_batches": limit, "model__encoder_seq_length": 32}
    with pytest.raises(UserError, match=f"nothing to validate on: {left}"):
        run_training(tiny_config(tmp_path / "run", **settings))
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- errors of loader workers


class Damaged:
    """Samples of which the second batch cannot be read."""

    sequence_length, samples = 8, 100

    def batch(self, first, count):
        if first >= 4:
            raise UserError(["data.bin: is damaged", "make it again"], 74)
        return MockSamples(10, 8, 1, 100).batch(first, count)


def test_what_a_loader_worker_finds_is_told_without_its_traceback(monkeypatch):
    """As from a thread; what crosses the process is pickled, here as well."""
    worker_threads(monkeypatch)
    for workers in (0, 1):
        batches = dataloader.PrefetchingDataLoader(
            Damaged(), RankBatchSampler(BatchSchedule(4), 2), torch.device("cpu"), num_workers=workers
        )
        with closing(batches):
            items = iter(batches)
            assert next(items).labels.shape == (4, 8)
            with pytest.raises(UserError) as error:
                next(items)
        assert error.value.lines == ["data.bin: is damaged", "make it again"]
        assert error.value.exit_code == 74
