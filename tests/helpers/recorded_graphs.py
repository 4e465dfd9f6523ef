"""Substitute for CUDA graphs of layers, for tests without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stoker.models.layer_graphs import Capture, Graph


class Recorded:
    """Runs a function again, under autocast if it was at first, and writes what it returns where it was.

    As in the memory that CUDA graphs have in common, a forward pass overwrites what those captured later have returned:
    gradients may be where it has had its intermediate values.

    Args:
        run: the function.
        together: those captured before with the same memory; this one is added.
    """

    def __init__(self, run: Callable[[], list[Tensor]], together: list[Recorded]) -> None:
        self.run, self.tensors, self.replays = run, run(), 0
        self._autocast = torch.is_autocast_enabled("cpu")
        self._number, self._together = len(together), together
        together.append(self)

    def replay(self) -> None:
        self.replays += 1
        is_forward = any(tensor.requires_grad for tensor in self.tensors)
        for later in self._together[self._number + 1 :] if is_forward else ():
            for tensor in later.tensors:
                tensor.data.fill_(torch.nan if tensor.is_floating_point() else -1)
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            found = self.run()
        for tensor, now in zip(self.tensors, found, strict=True):
            tensor.data.copy_(now)  # without a new version of the tensor, as a graph does


def recorder(captured: list[Recorded]) -> Capture:
    """Return a substitute for what captures graphs with memory in common; they are added to the list."""
    together: list[Recorded] = []

    def capture(run: Callable[[], list[Tensor]]) -> tuple[Graph, list[Tensor]]:
        captured.append(Recorded(run, together))
        return captured[-1], captured[-1].tensors

    return capture


def use_recorded_graphs() -> None:
    """Let all runs of this process capture their layers, and check in the end that they have been replayed."""
    from stoker.trainer.core import run_context, training_loop
    from stoker.trainer.lightning.lightning_module import LanguageModule

    captured: list[Recorded] = []
    release = LanguageModule.release_graphs

    def release_graphs(self: LanguageModule) -> None:
        release(self)
        assert captured
        assert all(each.replays for each in captured)

    def raise_failure(error: Exception, on_failure: object) -> None:
        raise error

    run_context.uses_cuda_graph = lambda *_, **__: True
    training_loop.layer_capture = lambda: recorder(captured)
    training_loop.report_failure = raise_failure
    LanguageModule.release_graphs = release_graphs
