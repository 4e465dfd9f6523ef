"""`stoker bench` on a GPU: its backends and rates, and a run that takes what the table says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stoker.kernels.attention.installed_software import detect_installed_software
from stoker.kernels.attention.measure import calls_to_measure, measure_attention
from stoker.trainer.cli.main import main
from stoker.trainer.plan.measure_rates import measure_rates

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def test_every_backend_that_supports_a_shape_is_measured() -> None:
    software = detect_installed_software("cuda")
    for bias, causal in (("none", True), ("slopes", True), ("distance_with_gradient", False)):
        calls = calls_to_measure(torch.cuda.get_device_capability())
        call = next(call for call in calls if (call.bias, call.causal, call.head_dim) == (bias, causal, 64))
        small = replace(call, queries=256, keys=256, batch=2)
        found = measure_attention(small, GPU, software, rounds=1, round_ms=0.0)
        assert not found.refused
        assert {"triton", "sdpa_efficient", "unfused"} <= set(found.milliseconds)
        assert bias != "none" or {"sdpa_cudnn", "sdpa_flash"} <= set(found.milliseconds)


def test_rates_are_below_the_peaks_of_the_fastest_gpu() -> None:
    rates = measure_rates(GPU, {})
    assert all(1 < each.matmul < 5000 for each in rates.matmul)
    assert 100 < rates.memory < 20_000
    assert 0.5 < rates.launch < 500
    assert rates.host_link is not None


def test_explain_takes_the_fastest_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    monkeypatch.setenv("STOKER_BENCH", str(file))
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert main(["bench", "--minutes", "0.05"]) == 0
    document = json.loads(file.read_text())
    times = document["attention"][0]["milliseconds"]  # head width 128, 4096 tokens, causal, as of the experiment
    for winner in ("triton", "sdpa_flash"):
        times[winner] = [0.001, 0.001]
        file.write_text(json.dumps(document))
        capsys.readouterr()
        assert main(["explain", "attention", "experiment=llama_1b_bench"]) == 0
        assert f"training: {winner} " in capsys.readouterr().out
        times[winner] = [9.0, 9.0]
