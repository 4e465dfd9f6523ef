"""Sweeps of jobs with two ranks each, one job failing: with a grid and with Optuna, in turn and at the same time."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml
from tiny_run import tiny_document

RATES = "0.01,1e30,0.02"
GRID = [f"model.optim.lr={RATES}"]
OPTUNA = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", f"hydra.sweeper.params.model.optim.lr=choice({RATES})"]
LOCAL = ["hydra/launcher=submitit_local", "hydra.launcher.array_parallelism=2"]
TRAIN = [sys.executable, "-m", "stoker", "train", "-m", "-cn", "tiny", "hydra.sweep.dir=s"]


@pytest.fixture
def here(tmp_path):
    """A folder with a tiny configuration."""
    document = tiny_document(tmp_path, exp_manager__explicit_log_dir=None, exp_manager__resume_if_exists=False)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "tiny.yaml").write_text(json.dumps(document))
    return tmp_path


def rows(here):
    return json.loads((here / "s" / "multirun.json").read_text())["jobs"]


@pytest.mark.parametrize(
    "words", [GRID, [*GRID, *LOCAL], OPTUNA, [*OPTUNA, *LOCAL]], ids=["grid", "grid-local", "optuna", "optuna-local"]
)
def test_two_ranks_three_jobs_one_failing(here, words):
    is_search = "hydra/sweeper=optuna" in words
    if is_search:
        pytest.importorskip("optuna", minversion="4")
    if "hydra/launcher=submitit_local" in words:
        pytest.importorskip("submitit")
    words = [*words, "trainer.devices=2", "trainer.max_skipped_steps=0", "trainer.max_steps=4"]
    words += ["trainer.val_check_interval=4", "trainer.limit_val_batches=1", "trainer.log_every_n_steps=1"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*TRAIN, *words], cwd=here, env=environ, capture_output=True, text=True, timeout=1800, check=False
    )
    found = rows(here)
    assert done.returncode == (0 if is_search else 2), done.stderr
    codes = {row["swept"][0]: row["exit_code"] for row in found}
    assert sorted(codes.values()) == [0, 0, 2], done.stderr
    assert next(code for word, code in codes.items() if "1e30" in word or "e+30" in word) == 2
    digests = set()
    for row in found:
        folder = here / "s" / str(row["number"])
        assert folder.is_dir()
        if row["exit_code"] == 0:
            environment = json.loads((folder / "environment.json").read_text())
            assert [process["rank"] for process in environment["processes"]] == [0, 1]
            assert {process["configuration"] for process in environment["processes"]} == {row["configuration"]}
        digests.add(row["configuration"])
    assert len(digests) == 3
    assert sorted(path.name for path in (here / "s").iterdir() if path.name.isdecimal()) == ["0", "1", "2"]
    assert not (here / "runs").exists()
    if is_search:
        best = min((row for row in found if row["exit_code"] == 0), key=lambda row: row["figures"]["best"])
        results = yaml.safe_load((here / "s" / "optimization_results.yaml").read_text())
        assert results["best_value"] == best["figures"]["best"]
        assert "failed trial" in done.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=["term", "int", "kill"]
)
def test_jobs_of_a_stopped_sweep_save_a_checkpoint(here, number, code):
    """SIGINT is that of a terminal, to all processes of the group; after SIGKILL the jobs end by themselves."""
    pytest.importorskip("submitit")
    words = ["model.seed=1,2", *LOCAL, "exp_manager.resume_if_exists=True", "trainer.log_every_n_steps=1"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (here / "out").open("w") as out:
        started = subprocess.Popen(
            [*TRAIN, *words, "trainer.max_steps=1000000"],
            cwd=here,
            env=environ,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 300
        files = [here / "s" / str(number) / "metrics.jsonl" for number in range(2)]
        while not all(file.is_file() and file.stat().st_size for file in files):
            assert time.monotonic() < deadline
            assert started.poll() is None
            time.sleep(0.2)
        (os.killpg if number == signal.SIGINT else os.kill)(started.pid, number)
        assert started.wait(300) == code
    finally:
        started.kill()
    exits = [here / "s" / ".submitit" / f"job_{number}.exit.json" for number in range(2)]
    while number == signal.SIGKILL and not all(file.is_file() for file in exits):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert [json.loads(file.read_text())["exit_code"] for file in exits] == [143, 143]
    if number != signal.SIGKILL:
        assert [row["exit_code"] for row in rows(here)] == [143, 143]
        said = (here / "out").read_text()
        assert "to resume: stoker train -m" in said.splitlines()[-1]
        assert "Traceback" not in said
    assert all(list((here / "s" / str(number) / "checkpoints").glob("step-*")) for number in range(2))
