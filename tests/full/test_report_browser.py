"""The pages in a real browser, without a network: every chart and map is drawn, no error occurs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from run_files import write_run

from stoker.trainer.cli.main import main

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--virtual-time-budget=4000"),
    "--dump-dom",
]


def opened(page: Path, profile: Path, *flags: str) -> str:
    """Open a page; return the document after its scripts have run. An error in the console fails."""
    assert BROWSER is not None
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", *flags, page.absolute().as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in result.stderr, result.stderr
    return result.stdout


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed")
@pytest.mark.parametrize("scheme", [0, 1])  # dark, light
def test_pages_draw_themselves(scheme: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = write_run(Path("a"), metrics=2), write_run(Path("b"), steps=3000)
    flags = (f"--blink-settings=preferredColorScheme={scheme}", "--window-size=390,800")
    assert main(["report", str(first)]) == main(["compare", str(first), str(second)]) == 0
    document = opened(first / "report.html", tmp_path / "profile", *flags)
    assert 'data-drawn="8 charts, 1 maps"' in document
    assert len(re.findall(r'<div class="u-wrap"', document)) == 8
    compared = opened(Path("compare.html"), tmp_path / "profile", *flags)
    drawn = re.search(r'data-drawn="(\d+) charts, 0 maps"', compared)
    assert drawn
    assert int(drawn[1]) == len(re.findall(r'<div class="u-wrap"', compared)) >= 7
    assert document.count("<img ") == 1  # the timeline, and none from the name of the run
