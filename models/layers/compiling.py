"""What compiled layers need around them: room for their compilations, and to run as written where that is shorter."""

from __future__ import annotations

import contextlib
import warnings

import torch

MOST_COMPILATIONS = 256
"""Of one layer in one process: a few per model (training, validation), each for one shape."""


def layers_as_written(compiled: bool) -> contextlib.AbstractContextManager[object]:
    """Within it compiled layers run uncompiled, for generation: compiling for each length would take longer."""
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def prepare_compiler() -> None:
    """Let a process compile many layers, and hear nothing of what nobody can change.

    A limit of 8 counts the layers of all models of a process together, since they are one piece of code; the third
    configuration trained in one notebook would end in an error.
    """
    from torch._dynamo import config  # seconds of import, only where it is needed

    config.recompile_limit = max(config.recompile_limit, MOST_COMPILATIONS)
    # Inductor 2.11 says so of every softmax over fewer than 8 numbers, such as that of the gates of some experts.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
