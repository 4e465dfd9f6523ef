"""A network that breaks between two nodes, each in a network namespace: both sides end or go on, and say why."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_distributed_launcher import HANGS, Job, arguments

from stoker.trainer.loggers.run_events import read_events

ADDRESSES = ("10.213.77.1", "10.213.77.2")
TIMEOUT = 20.0


def ip(*words: str) -> bool:
    done = subprocess.run(["ip", *words], capture_output=True, check=False)
    return done.returncode == 0


def interfaces() -> tuple[str, str]:
    return f"st{os.getpid()}a", f"st{os.getpid()}b"


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces, joined by a cable."""
    names = (f"stoker-{os.getpid()}-a", f"stoker-{os.getpid()}-b")
    ends = interfaces()
    if shutil.which("ip") is None or not ip("netns", "add", names[0]):
        pytest.skip("needs root, to create network namespaces")
    try:
        assert ip("netns", "add", names[1])
        assert ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            assert ip("link", "set", end, "netns", name)
            for device in (end, "lo"):
                assert ip("-n", name, "link", "set", device, "up")
            assert ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def agents(directory: Path, namespaces: tuple[str, str], **changes: object) -> list[Job]:
    keys = {"trainer__num_nodes": 2, "trainer__devices": 1, "trainer__process_timeout": TIMEOUT, **changes}
    environ = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
    ends = interfaces()
    return [
        Job(
            directory,
            ["ip", "netns", "exec", name, sys.executable, "-m", "stoker", *arguments(keys)],
            environ | {"NODE_RANK": str(node), "GLOO_SOCKET_IFNAME": ends[node]},  # not what the host name means
        )
        for node, name in enumerate(namespaces)
    ]


def cut(namespaces: tuple[str, str]) -> float:
    """Take the link down on the first side; return when."""
    assert ip("-n", namespaces[0], "link", "set", interfaces()[0], "down")
    return time.monotonic()


def seconds_until_end(run: Job, start: float) -> float:
    assert run.process.wait(HANGS) == 1, run.error
    return time.monotonic() - start


def test_without_restarts_both_sides_end_and_say_why(tmp_path, namespaces):
    with_first, with_second = agents(tmp_path, namespaces)
    with with_first as first, with_second as second:
        first.until_step(3)
        start = cut(namespaces)
        print(f"ended after {seconds_until_end(second, start):.1f} s (second), {seconds_until_end(first, start):.1f} s")
        assert re.search(r"lost node 1 \(\S+, rank 1\)", first.error), first.error
        assert f"lost the connection to the first machine at {ADDRESSES[0]}:29500" in second.error


def test_the_side_of_the_rendezvous_goes_on_alone(tmp_path, namespaces):
    params = {"exp_manager__checkpoint_callback_params__every_n_train_steps": 2}
    changes = {"trainer__min_nodes": 1, "trainer__max_restarts": 1, "trainer__max_steps": 400, **params}
    with_first, with_second = agents(tmp_path, namespaces, **changes)
    with with_first as first, with_second as second:
        first.until_step(6)
        start = cut(namespaces)
        print(f"the second ended after {seconds_until_end(second, start):.1f} s")
        first.until(lambda: "going on with 1 node in place of 2" in first.error)
        print(f"the first went on after {time.monotonic() - start:.1f} s")
        assert first.end() == 0
        kinds = [event["event"] for event in read_events(first.run)]
        assert kinds.count("shrink") == kinds.count("failure") == kinds.count("restart") == 1
        (failure,) = [event for event in read_events(first.run) if event["event"] == "failure"]
        assert "lost node 1" in failure["reason"]
