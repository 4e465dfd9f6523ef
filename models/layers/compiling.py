"""torch.compile settings for layers: recompile limit, and running compiled layers eagerly."""

from __future__ import annotations

import contextlib
import warnings

import torch

RECOMPILE_LIMIT = 256
"""Recompile limit of one layer in one process: each model needs a few (training, validation), one per shape."""


def eager_layers(compiled: bool) -> contextlib.AbstractContextManager[object]:
    """Run compiled layers eagerly in this context, for generation: compiling for each length would take longer."""
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def configure_dynamo(*, traces_counts: bool = False) -> None:
    """Raise Dynamo's recompile limit, keep autocast out of backward, and silence a warning that users cannot act on.

    The default limit of 8 applies to all models of a process together, since their layers share one code object: the
    third configuration trained in one notebook would raise an error.

    As eager PyTorch does, the backward pass runs in the dtypes of the forward pass, not under its autocast: traced
    under it, the matmuls of an fp32 router would have bf16 gradients (pytorch #153044, #179804).

    Args:
        traces_counts: the host reads numbers of rows in a graph, which has shapes that depend on them, and other
            operations between the start of an exchange of rows and the wait for it. Inductor would reorder them for
            less memory, to where nothing runs beside an exchange.
    """
    from torch._dynamo import config  # takes seconds to import
    from torch._functorch import config as autograd_config
    from torch._inductor import config as inductor_config

    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    config.capture_scalar_outputs = config.capture_scalar_outputs or traces_counts
    inductor_config.reorder_for_peak_memory = inductor_config.reorder_for_peak_memory and not traces_counts
    autograd_config.backward_pass_autocast = "off"
    # Inductor 2.11 warns for every softmax over fewer than 8 elements, such as the router's over a few experts.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
