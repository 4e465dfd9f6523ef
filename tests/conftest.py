"""Shared fixtures and hooks; if stoker is not installed, the repository root is imported as the package."""

import atexit
import gc
import importlib.util
import inspect
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import interpreter_speedups
import pytest
from fork_server import ForkServer
from tiers import TIER

gc.disable()  # until everything is imported, see `pytest_collection_finish`
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["STOKER_BENCH"] = "none"  # what has been measured on this machine decides nothing in tests
# a shell ignores SIGINT for background jobs, and the processes started by tests would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
ROOT = Path(__file__).resolve().parents[1]
collect_ignore = ["data", "helpers", *(tier for tier in ("full", "gpu") if tier != TIER)]  # but where they are named

if importlib.util.find_spec("stoker") is None:
    spec = importlib.util.spec_from_file_location(
        "stoker", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["stoker"] = module
    spec.loader.exec_module(module)


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: Any) -> list[pytest.Item] | None:
    """Skip functions marked `gpu` unless STOKER_TEST_TIER=gpu, before their thousands of cases are made."""
    if TIER == "gpu" or not inspect.isfunction(obj):
        return None
    marks = [*collector.iter_markers(), *getattr(obj, "pytestmark", [])]
    return [] if any(mark.name == "gpu" for mark in marks) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect parameters marked `gpu` too."""
    if TIER != "gpu":
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    if "triton.runtime.interpreter" in sys.modules:
        interpreter_speedups.install()
    if "stoker.trainer.config.compose" in sys.modules:
        import hydra_speedups

        hydra_speedups.install()
    if (run_report := sys.modules.get("stoker.trainer.core.run_report")) is not None:
        run_report._SAMPLE_SECONDS = 0.05  # pyrefly: ignore[missing-attribute]


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, which would take a tenth of the test time."""
    gc.freeze()
    gc.set_threshold(10_000)  # young objects ten times less often, which takes a twentieth
    gc.enable()
    atexit.register(gc.unfreeze)  # some libraries report leaked objects at exit


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Append each failure at once to the file STOKER_TEST_FAILURES, for runs that may be killed before the summary."""
    report = (yield).get_result()
    file = os.environ.get("STOKER_TEST_FAILURES")
    if file and report.failed:
        with open(file, "a") as out:
            out.write(f"{report.when} {report.nodeid}\n{report.longreprtext}\n\n")


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[ForkServer]:
    """Run functions in child processes that have torch imported already."""
    server = ForkServer()
    if TIER != "gpu":  # children of a process that has asked for a GPU can use none
        server.fork()
    yield server
    server.close()


@pytest.fixture(scope="session")
def compilers() -> Iterator[ForkServer]:
    """Run functions in child processes that can compile kernels, which were not imported under TRITON_INTERPRET=1."""
    server = ForkServer("stoker.models.build", TRITON_INTERPRET="0")
    yield server
    server.close()


@pytest.fixture
def harness(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Build and run tiny configurations."""
    from config_harness import ConfigHarness

    return ConfigHarness(tmp_path, capsys, monkeypatch)


@pytest.fixture(autouse=True)
def registered_components(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a test registers."""
    from stoker.models.config import extensions

    monkeypatch.setattr(extensions, "_registered", {kind: dict(of) for kind, of in extensions._registered.items()})


@pytest.fixture
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what other tests' modules have registered."""
    from stoker.models.config import extensions

    monkeypatch.setattr(extensions, "_registered", {kind: {} for kind in extensions.KINDS})


@pytest.fixture
def own_components(nothing_registered: None) -> None:
    """Register those of `own_components`, and no others, for this test."""
    from own_components import register_all

    register_all()


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work away from the checkout, whose conf would be found as the user's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def here(in_tmp_path: None, tmp_path: Path) -> Path:
    """A folder with a tiny configuration of a sweep, the current one."""
    from tiny_run import write_tiny_sweep

    write_tiny_sweep(tmp_path, exp_manager__version="v")
    return tmp_path


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the expert load figure of MoE runs, as if matplotlib were missing: drawing takes longer than the run."""
    from stoker.trainer.callbacks import expert_load

    monkeypatch.setattr(expert_load, "has_matplotlib", lambda: False)


@pytest.fixture
def small_pystd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce `pystd` to modules that begin with a, b or c: parsing the whole standard library takes seconds."""
    from stoker.trainer.data.sources import text_sources

    excluded = text_sources._is_excluded_from_pystd
    monkeypatch.setattr(text_sources, "_is_excluded_from_pystd", lambda name: excluded(name) or name[0] not in "abc")


@pytest.fixture
def steps_without_sync(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make device synchronization in training steps an error from the third step on; return the steps that ran so."""
    from cuda_sync import forbid_device_sync

    from stoker.trainer.data.dataloader import GlobalBatch
    from stoker.trainer.lightning.lightning_module import LanguageModule

    training_step = LanguageModule.training_step
    steps: list[int] = []

    def checked_step(self: LanguageModule, batch: GlobalBatch, batch_idx: int) -> None:
        if self.step < 2:  # the first steps compile and allocate
            training_step(self, batch, batch_idx)
            return
        with forbid_device_sync():
            training_step(self, batch, batch_idx)
        steps.append(self.step)

    monkeypatch.setattr(LanguageModule, "training_step", checked_step)
    return steps
