"""Run from a bare checkout too: bind the repository root to the package name when it is not installed."""

import functools
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Generator, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import interpreter_speedups
import pytest
from fork_server import Forks
from hypothesis import settings
from tiers import TIER

# the same examples every time: a test that fails once in a hundred runs is noise to whoever is working on another part
settings.register_profile("stoker", derandomize=True, deadline=None)
settings.load_profile("stoker")

gc.disable()  # until everything is imported, see `pytest_collection_finish`
metadata.version = functools.cache(metadata.version)  # each run asks for a dozen, and reads a file for each
os.environ.setdefault("TRITON_INTERPRET", "1")
# a shell that runs the tests in the background has Ctrl-C ignored, and so would every process they start
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` run in the tier of that name only."""
    if TIER != "gpu":
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    if "triton.runtime.interpreter" in sys.modules:
        interpreter_speedups.install()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported is never garbage: to look through it again and again is a tenth of the time of the tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Some libraries say at the end of the process what is left of them."""
    gc.unfreeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """STOKER_TEST_FAILURES=FILE: what failed, at once, for a run that a time limit may end before its summary."""
    report = (yield).get_result()
    file = os.environ.get("STOKER_TEST_FAILURES")
    if file and report.failed:
        with open(file, "a") as out:
            out.write(f"{report.when} {report.nodeid}\n{report.longreprtext}\n\n")


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Runs functions in other processes, which have torch imported already."""
    starter = Forks()
    yield starter
    starter.close()


@pytest.fixture(scope="session")
def compilers() -> Iterator[Forks]:
    """The same where kernels are compiled: one that is imported under TRITON_INTERPRET=1 cannot be."""
    starter = Forks("stoker.models.build", TRITON_INTERPRET="0")
    yield starter
    starter.close()


@pytest.fixture
def lab(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What builds and runs tiny configurations."""
    from config_harness import Lab

    return Lab(tmp_path, capsys, monkeypatch)


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of experts draws none at its end, as where matplotlib is not installed: one takes longer than the run."""
    from stoker.trainer.callbacks import expert_load

    monkeypatch.setattr(expert_load, "can_draw", lambda: False)


@pytest.fixture
def little_pystd(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pystd` is a part of the standard library, all of which takes seconds to parse: what begins with a, b or c."""
    from stoker.trainer.data.sources import text_sources

    left_out = text_sources._left_out_of_pystd
    monkeypatch.setattr(text_sources, "_left_out_of_pystd", lambda name: left_out(name) or name[0] not in "abc")


@pytest.fixture
def seen_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps, from the third on, that ran without a wait for the device: a wait ends the run with an error."""
    from cuda_sync import waits_forbidden

    from stoker.trainer.data.dataloader import GlobalBatch
    from stoker.trainer.lightning.lightning_module import LanguageModule

    step = LanguageModule.training_step
    seen: list[int] = []

    def watched(self: LanguageModule, batch: GlobalBatch, batch_idx: int) -> None:
        if self.step < 2:  # the first steps compile and allocate
            step(self, batch, batch_idx)
            return
        with waits_forbidden():
            step(self, batch, batch_idx)
        seen.append(self.step)

    monkeypatch.setattr(LanguageModule, "training_step", watched)
    return seen
