"""Ranks that share a model generate and evaluate as one process does."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from tiers import extra, full_only
from tiny_run import tiny_config

from stoker.trainer.cli.main import main
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import EXIT_BAD_INPUT

MODEL: dict[str, Any] = {
    "trainer__max_steps": 2, "trainer__val_check_interval": 2, "model__num_attention_heads": 4, "model__bias": False,
    "model__hidden_dropout": 0.0, "model__attention_dropout": 0.0,
}  # fmt: skip
GROUPED = {"model__num_query_groups": 1, "model__position_embedding_type": "rope", "model__activation": "fast-swiglu"}
MODELS: dict[str, dict[str, Any]] = {
    "grouped": MODEL | GROUPED,
    **dict(
        extra(
            ("experts", MODEL | {"model__num_moe_experts": 4, "model__position_embedding_type": "kerple"}),
            ("alibi", MODEL | {"model__position_embedding_type": "alibi", "model__logits_soft_cap": 4.0}),
            ("lora", MODEL | {"model__peft__peft_scheme": "lora"}),
        )
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in MODELS.items():
        run_training(tiny_config(folder / name, **changes))
    return {name: folder / name for name in MODELS}


def test_ranks_answer_as_one_process(checkpoints: dict[str, Path], forks: ForkServer, tmp_path: Path) -> None:
    paths = [str(path) for path in checkpoints.values()]
    alone, together = (forks.call("inference_ranks_runs", "results", str(tmp_path), paths, size) for size in (1, 2))
    for name, one, two in zip(checkpoints, alone, together, strict=True):
        assert two.pop("loss") == pytest.approx(one.pop("loss"), rel=1e-5), name
        assert two.pop("weights") < 0.9 * one.pop("weights"), name
        assert two == one, name


@pytest.mark.parametrize(
    ("variables", "command", "said"),
    [
        (
            {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "generate",
            "RANK (x) must be a number",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "generate", "MASTER_ADDR and MASTER_PORT must name"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "evaluate --tasks arc_easy",
            "start stoker evaluate without torchrun",
        ),
    ],
)
def test_ranks_that_cannot_be_are_told(
    checkpoints: dict[str, Path],
    variables: dict[str, str],
    command: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    verb, *options = command.split()
    assert main([verb, str(checkpoints["grouped"]), *options]) == EXIT_BAD_INPUT
    assert said in capsys.readouterr().err


@full_only
def test_torchrun_starts_them(checkpoints: dict[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    given = [str(checkpoints["grouped"]), "--device", "cpu"]
    for verb in (["generate", "--prompt", "To be", "--temperature", "0", "--max-new-tokens", "8"], ["evaluate"]):
        command = ["-m", "stoker", verb[0], *given, *verb[1:]]
        alone = subprocess.run([sys.executable, *command], capture_output=True, check=True)
        several = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
        together = subprocess.run([*several, *command], capture_output=True, check=True)
        assert together.stdout == alone.stdout
