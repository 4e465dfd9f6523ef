"""`stoker bench`: its file, and what attention, plans and resumed runs take from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_helpers import LLAMA
from tiny_run import tiny_config

from stoker.kernels.attention import measure
from stoker.kernels.attention.call_spec import AttentionCall, InstalledSoftware, MeasuredCall
from stoker.kernels.attention.installed_software import detect_installed_software
from stoker.trainer.checkpoint.reader import open_checkpoint
from stoker.trainer.cli.main import main
from stoker.trainer.core.run_checks import find_run_table, recorded_table
from stoker.trainer.device.bench_table import (
    BenchTable,
    MatmulRate,
    Rates,
    card_name,
    find_table,
    versions,
    write_table,
)
from stoker.trainer.distributed.process_group import DistributedContext
from stoker.trainer.plan import measure_rates
from stoker.trainer.plan.hardware import EFFICIENCY, adjust_to_measured, parse_gpu
from stoker.trainer.train import run_training
from stoker.trainer.utils.errors import UserError

CPU = torch.device("cpu")
NOW = InstalledSoftware(torch=(2, 13), triton=(3, 6))
HOPPER = AttentionCall(
    device="cuda", capability=(9, 0), dtype="bf16", batch=4, heads=16, groups=4, head_dim=128, queries=4096, keys=4096,
    training=True,
)  # fmt: skip
TINY = AttentionCall(device="cpu", dtype="fp32", batch=2, heads=2, groups=2, head_dim=16, queries=16, keys=16)
RATES = Rates(
    matmul=(MatmulRate(tokens=512, matmul=300.0, fp8=500.0), MatmulRate(tokens=16384, matmul=360.0, fp8=500.0)),
    memory=1450.0, launch=8.0, host_link=25.0, network=10.0,
)  # fmt: skip


def written(
    file: Path, card: str, times: dict[str, float], software: InstalledSoftware, call: AttentionCall = HOPPER
) -> None:
    """Write a table with the times of one call."""
    both = {name: (time / 2, time / 2) for name, time in times.items()}
    measured = MeasuredCall(call=call, milliseconds=both, refused={"sdpa_math": "no: memory"})
    table = BenchTable(card=card, **versions(software), date="2026-11-27", rates=RATES, attention=(measured,))
    write_table(table, file)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOKER_BENCH", str(tmp_path / "bench.json"))
    return tmp_path / "bench.json"


def test_file_and_when_it_holds(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=rf"STOKER_BENCH.* cannot be read: No such file.*`stoker bench {file}`"):
        find_table("A", NOW)
    written(file, "A", {"triton": 1.0}, NOW)
    found = find_table("A", NOW)
    assert found.table is not None
    assert found.table.rates == RATES
    assert found.times is not None
    assert found.times.calls[0].milliseconds == {"triton": (0.5, 0.5)}
    assert found.source == f"{file} of 2026-11-27"
    assert (
        find_table("B", NOW).ignored == f"{file} is ignored: measured with card A, not B; `stoker bench` measures again"
    )
    for version, other in (("torch", (2, 14)), ("triton", None)):
        change: dict[str, Any] = {version: other}
        ignored = find_table("A", replace(NOW, **change)).ignored
        assert f"measured with {version} {'2.13, not 2.14' if other else '3.6, not none;'}" in ignored
    assert find_table("A", NOW, {"STOKER_BENCH": "none"}).table is None, "env_vars of the configuration come first"
    text = file.read_text()
    file.write_text(text.replace("0.5]", "0.0]"))
    assert "attention: Value error, sizes and times must be positive" in find_table("A", NOW).ignored
    file.write_text(text.replace('"memory"', '"menory"'))
    assert "no table of `stoker bench` of this version (rates.memory: Field required)" in find_table("A", NOW).ignored
    monkeypatch.delenv("STOKER_BENCH")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(file.parent))
    assert find_table("A 80GB", NOW) == (None, "", "")
    written(file.parent / "stoker" / "bench" / "A-80GB.json", "A 80GB", {}, NOW)
    assert find_table("A 80GB", NOW).table is not None


def test_bench_measures_a_cpu(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first = next(measure.calls_to_measure(None))
    monkeypatch.setattr(measure, "calls_to_measure", lambda capability: [replace(first, queries=16, keys=16)] * 2)
    for name, size in {"_COPIED": {"cpu": 1 << 16}, "_CPU_TOKENS": (2, 8), "_CPU_WIDTH": 32}.items():
        monkeypatch.setattr(measure_rates, name, size)
    assert main(["bench", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("no GPU is measured: only PyTorch's and unfused attention on this CPU")
    assert f"wrote {file}" in printed
    document = json.loads(file.read_text())
    assert document["card"] == card_name(CPU)
    assert [list(row["milliseconds"]) for row in document["attention"]] == [["sdpa_flash", "unfused", "sdpa_math"]] * 2
    assert [row["tokens"] for row in document["rates"]["matmul"]] == [2, 8]
    assert main(["bench", str(file.parent / "other.json"), "--device", "cpu", "--minutes", "0"]) == 0
    assert "2 shapes were not measured within 0 minutes" in (printed := capsys.readouterr().out)
    assert f"STOKER_BENCH={file.parent / 'other.json'} makes runs use it" in printed


@pytest.mark.parametrize(("ranks", "per_node", "expected"), [(4, 4, {"peer_link": 0.4}), (4, 2, {"network": 0.2})])
def test_links(ranks: int, per_node: int, expected: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of 4 ranks moves 1.5 times the bytes; between machines, those of both GPUs of one share the network."""
    monkeypatch.setattr(measure_rates, "_REDUCED_BYTES", 1000)
    monkeypatch.setattr(measure_rates, "_seconds", lambda call, device: call() or 3.75e-6)
    monkeypatch.setattr(measure_rates.dist, "all_reduce", lambda tensor: None)
    assert measure_rates.measure_links(CPU, ranks, per_node) == pytest.approx(expected)


def test_rates_adjust_a_plan(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = parse_gpu("h100")
    same = measured_h100()
    assert adjust_to_measured(gpu, same, "T").efficiency == pytest.approx(EFFICIENCY)
    slow = same.model_copy(
        update={
            "matmul": tuple(each.model_copy(update={"matmul": each.matmul / 2}) for each in same.matmul),
            "memory": same.memory / 2,
            "launch": same.launch * 2,
            "host_link": 25.0,
        }
    )
    found = adjust_to_measured(gpu, slow, "T")
    changed = {name: rate / EFFICIENCY[name] for name, rate in found.efficiency.items() if rate != EFFICIENCY[name]}
    doubled = ("fp8_speed", "host_seconds_compiled", "host_seconds_eager")
    assert changed == pytest.approx({"matmul": 0.5, "bandwidth": 0.5, **dict.fromkeys(doubled, 2.0)})
    assert (found.host_link, found.peer_link) == (2.5e10, gpu.peer_link)

    def plan(*words: str) -> dict[str, Any]:
        assert main(["plan", LLAMA, "--device", "h100", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    written(file, "another", {}, torch_here())
    before = plan()
    assert before["device"]["bench"] == ""
    assert f"{file} is ignored: measured with card another, not {gpu.name}" in before["notes"][0]
    written(file, gpu.name, {"triton_atomic": 20.0}, torch_here())
    after = plan()
    assert after["device"]["bench"] == f"{file} of 2026-11-27"
    slower = after["time"]["parts"]["matrix products"] / before["time"]["parts"]["matrix products"]
    assert slower == pytest.approx(measured_h100().matmul[-1].matmul / 360, rel=0.01)
    attention = 24 * 0.02 / EFFICIENCY["attention_in_step"]  # layers, seconds of the measured call, which is theirs
    assert after["time"]["parts"]["attention"] / after["micro_batches"] == pytest.approx(attention, rel=0.01)
    assert main(["plan", LLAMA, "--device", "h100"]) == 0
    assert f"rates as `stoker bench` measured them: {file} of 2026-11-27" in capsys.readouterr().out
    two = ("trainer.num_nodes=2", "trainer.devices=1", "model.global_batch_size=8")
    assert "network between 2 nodes has 10 GB/s" in "".join(plan(*two)["notes"])
    assert "network between 2 nodes has 7 GB/s" in "".join(plan(*two, "--network", "7")["notes"])


def measured_h100() -> Rates:
    from stoker.trainer.plan import hardware

    return Rates.model_validate_json(json.dumps(hardware._DATA["bench"]))


def torch_here() -> InstalledSoftware:
    """Return the versions that a plan for a GPU assumes here."""
    return replace(detect_installed_software(), triton=detect_installed_software().triton or (3, 6))


def test_a_resumed_run_keeps_its_kernels(file: Path, tmp_path: Path) -> None:
    """Of unfused attention, the only family of which a CPU has two backends."""
    here = detect_installed_software()
    own, torchs = {"unfused": 1.0, "sdpa_math": 2.0}, {"unfused": 2.0, "sdpa_math": 1.0}

    def run(steps: int, folder: str = "run") -> tuple[str, str]:
        """Return the backend of training attention in the report, and the log of this start."""
        directory, before = tmp_path / folder, 0
        if (directory / "run.log").exists():
            before = len((directory / "run.log").read_text())
        keys = {
            "model__use_flash_attention": False,
            "model__attention_dropout": 0.0,
            "exp_manager__create_report": True,
        }
        run_training(tiny_config(directory, trainer__max_steps=steps, trainer__limit_val_batches=0, **keys))
        record = json.loads((directory / "report.json").read_text())
        (training,) = (row for row in record["attention"] if row["kind"] == "training")
        assert f"attention training {training['backend']}" in (directory / "run.log").read_text()[before:]
        return training["backend"], (directory / "run.log").read_text()[before:]

    written(file, card_name(CPU), torchs, here, TINY)
    backend, log = run(1)
    assert backend == "sdpa_math"
    assert f"by {file} of 2026-11-27, head width 16, group size 1, 16 tokens, causal: unfused takes 2.00" in log
    written(file, card_name(CPU), own, here, TINY)
    assert run(1, "other")[0] == "unfused"
    backend, log = run(2)
    assert backend == "sdpa_math", "not what has been measured since"
    assert "attention stays as before step-1: training sdpa_math instead of unfused" in log
    assert f"by {file} of 2026-11-27" in log
    assert run(3)[0] == "sdpa_math", "of a checkpoint of a resumed run too"
    written(file, "another card", own, here, TINY)
    backend, log = run(1, "without")
    assert f"{file} is ignored: measured with card another card, not {card_name(CPU)}" in log
    assert backend == "unfused"
    written(file, card_name(CPU), torchs, here, TINY)
    backend, log = run(2, "without")
    assert backend == "unfused", "a run that began without a table stays without"
    assert "attention stays as before step-1: training unfused instead of sdpa_math" in log


def test_all_ranks_take_the_table_that_rank_0_reads(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, sent = detect_installed_software(), [""]

    class Rank(DistributedContext):
        def broadcast_text(self, text: str = "") -> str:
            sent[0] = text if self.is_rank_zero else sent[0]
            return sent[0]

        @contextmanager
        def raise_on_all_ranks(self) -> Iterator[None]:
            yield

    written(file, card_name(CPU), {"unfused": 1.0}, here)
    found = find_run_table(CPU, Rank(0, 2))
    assert found.table is not None
    file.unlink()
    assert find_run_table(CPU, Rank(1, 2)) == found


def test_other_software_than_of_the_checkpoint(file: Path, tmp_path: Path) -> None:
    """Kernels change there anyway: the table of this machine holds, and the log says so."""
    here = detect_installed_software()
    written(file, card_name(CPU), {"unfused": 1.0}, here, TINY)
    run_training(tiny_config(tmp_path, trainer__max_steps=1, trainer__limit_val_batches=0))
    checkpoint = open_checkpoint(tmp_path / "checkpoints" / "step-1")
    table = checkpoint.state.attention_times
    assert table is not None
    assert table.rates is None
    found = find_table(card_name(CPU), here)
    assert recorded_table(checkpoint, found, CPU).times != found.times, "of the checkpoint"
    moved = table.model_copy(update={"card": "another"})
    checkpoint = replace(checkpoint, state=checkpoint.state.model_copy(update={"attention_times": moved}))
    kept = recorded_table(checkpoint, found, CPU)
    assert kept.times == found.times
    assert kept.ignored == f"times of attention in step-1 are ignored: measured with card another, not {card_name(CPU)}"
