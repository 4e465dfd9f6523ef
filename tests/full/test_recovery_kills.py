"""Runs of the command line killed at random instants and started again until done: same bits, no orphans."""

import os
import random
import signal
import time

import pytest
from interrupted_runs import Command, arguments, figures, last_step
from tiny_run import final_hashes

from stoker.trainer.checkpoint.reader import checkpoint_paths

STEPS = 150


def train(directory, tmp_path, *changes, micro_batch=2, environ=None):
    words = arguments(directory, STEPS, *changes, micro_batch=micro_batch)
    return Command(*words, cwd=tmp_path, environ=environ)


def kill_at(command, directory, instant):
    """Kill it when it has logged so many steps more, or so many seconds after its start; False: it had ended before."""
    if instant < 0:
        time.sleep(-instant)
    else:
        goal = last_step(directory) + instant
        command.wait_until(lambda: last_step(directory) >= goal)
    alive = command.process.poll() is None
    command.process.kill()
    command.process.wait()
    return alive


def killed_run(tmp_path, kills, chance, workers, micro_batch, is_async, start_seconds):
    """A run that is killed so many times and then left in peace; returns its directory and its kills."""
    directory = tmp_path / f"workers{workers}-micro{micro_batch}-async{is_async}"
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    changes = (
        f"model.data.num_workers={workers}",
        f"exp_manager.checkpoint_callback_params.async_save={is_async}",
    )
    done = 0
    for _ in range(kills):
        with train(directory, tmp_path, *changes, micro_batch=micro_batch, environ={"TMPDIR": str(scratch)}) as command:
            # two of three in training, at any of its lines; the rest from the first import to about the first step
            is_by_step = chance.random() < 0.67
            instant = chance.randrange(1, STEPS // kills) if is_by_step else -chance.uniform(0, start_seconds)
            done += kill_at(command, directory, instant)
            assert not command.wait_for_no_process()
    with train(directory, tmp_path, *changes, micro_batch=micro_batch) as command:
        code, error = command.ended()
        assert code == 0, error
    left = {path.name for path in (directory / "checkpoints").iterdir()}
    assert left == {path.name for path in checkpoint_paths(directory / "checkpoints")}
    assert not [path for path in scratch.rglob("*") if path.is_file()]
    return directory, done


def peaceful_run(tmp_path, micro_batch):
    directory = tmp_path / f"peace{micro_batch}"
    start = time.monotonic()
    with train(directory, tmp_path, micro_batch=micro_batch) as command:
        command.wait_until(lambda: last_step(directory) >= 1)
        seconds = time.monotonic() - start
        code, error = command.ended()
    assert code == 0, error
    return directory, seconds


def assert_equal_runs(killed, peace):
    assert final_hashes(killed, STEPS) == final_hashes(peace, STEPS)
    assert figures(killed) == figures(peace)


@pytest.mark.parametrize("micro_batch", [4, 1])
@pytest.mark.parametrize("workers", [0, 2])
def test_runs_killed_at_random_instants_end_with_the_same_bits(tmp_path, workers, micro_batch):
    """Eight kills for each pair of loader workers and accumulation, half of them with saves beside training."""
    chance = random.Random(10 * workers + micro_batch)
    peace, start_seconds = peaceful_run(tmp_path, micro_batch)
    total = 0
    for is_async in (False, True):
        killed, kills = killed_run(tmp_path, 4, chance, workers, micro_batch, is_async, start_seconds)
        assert_equal_runs(killed, peace)
        total += kills
    print(f"{total} kills")
    assert total == 8


def test_a_killed_run_with_loader_workers_leaves_no_process_and_goes_on_exactly(tmp_path):
    with train(tmp_path / "killed", tmp_path, "model.data.num_workers=1") as command:
        assert kill_at(command, tmp_path / "killed", 8)
        assert len(command.processes()) > 0, "the workers should outlive their parent for a moment"
        assert not command.wait_for_no_process()
    assert [path.name for path in checkpoint_paths(tmp_path / "killed" / "checkpoints")][:1] == ["step-5"]
    with train(tmp_path / "killed", tmp_path) as command:
        assert command.ended()[0] == 0
    assert_equal_runs(tmp_path / "killed", peaceful_run(tmp_path, 2)[0])


def test_a_run_that_is_killed_starts_again_by_itself(tmp_path):
    directory = tmp_path / "run"
    words = arguments(directory, STEPS)
    with Command(*words, "--restart", "1", cwd=tmp_path) as command:
        for goal in (8, 30):  # a kill after new checkpoints does not count against the number
            assert command.wait_until(lambda goal=goal: last_step(directory) >= goal)
            (worker,) = [pid for pid in command.processes() if pid != command.process.pid]
            os.kill(worker, signal.SIGKILL)
        code, error = command.ended()
    assert code == 0, error
    assert error.count("was killed by SIGKILL") == 2
    assert error.count("restarting from the newest checkpoint") == 2
    assert_equal_runs(directory, peaceful_run(tmp_path, 2)[0])
