"""Two GPUs of one machine: every layout trains what one GPU trains, and one GPU goes on from what two have saved."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

MODEL = [
    "model=gpt_tiny",
    "data=mock",
    "model.compile=false",
    "model.optim.sched.max_steps=100",
    "trainer.accelerator=gpu",
    "trainer.precision=32",
    "model.global_batch_size=8",
    "trainer.limit_val_batches=0",
    "trainer.log_every_n_steps=1",
    "exp_manager.checkpoint_callback_params.save_last=true",
    "exp_manager.resume_if_exists=true",
]
LAYOUTS = {
    "ddp": [],
    "zero1": ["model.optim.name=distributed_fused_adam"],
    "grad": ["model.fsdp=true", "model.fsdp_sharding_strategy=grad"],
    "full": ["model.fsdp=true"],
}


def train(directory, *overrides, devices=1, steps=3, micro_batch=2):
    command = [sys.executable, "-m", "stoker", "train", *MODEL, f"trainer.max_steps={steps}"]
    command += [f"trainer.devices={devices}", f"model.micro_batch_size={micro_batch}", *overrides]
    command.append(f"exp_manager.explicit_log_dir={directory}")
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def weights(directory, step):
    found = {}
    for path in sorted((directory / "checkpoints" / f"step-{step}").glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                found.setdefault(name, []).append(file.get_tensor(name))
    return {name: torch.cat(parts) if parts[0].ndim else parts[0] for name, parts in found.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    directory = tmp_path_factory.mktemp("alone") / "run"
    return directory, train(directory, steps=6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("micro_batch", [2, 4])
def test_two_gpus_train_what_one_trains_and_one_goes_on(tmp_path, alone, layout, micro_batch):
    directory = tmp_path / "run"
    losses = train(directory, *LAYOUTS[layout], devices=2, micro_batch=micro_batch)
    _, expected = alone
    assert losses == pytest.approx({step: expected[step] for step in losses}, rel=2e-5)
    going_on = train(directory, devices=1, steps=6, micro_batch=micro_batch)
    assert going_on[6] == pytest.approx(expected[6], rel=1e-4)
    for name, weight in weights(directory, 6).items():
        torch.testing.assert_close(
            weight, weights(alone[0], 6)[name], rtol=1e-3, atol=2e-4, msg=lambda m, n=name: n + m
        )
