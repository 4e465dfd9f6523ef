"""Backend for torch.compile that runs the graphs it gets, and records them."""

from __future__ import annotations

from typing import Any

import torch


class CompiledGraphs:
    """Forward and backward graphs, split as inductor splits them; functorch is imported where one is made.

    Attributes:
        backend: to be given to torch.compile.
        forwards: graph of each forward pass.
        backwards: graph of each backward pass.
        num_outputs: number of outputs of each forward pass; what follows them is kept for the backward pass.
    """

    def __init__(self) -> None:
        from functorch.compile import make_boxed_compiler
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        torch.compiler.reset()
        self.forwards: list[torch.fx.Graph] = []
        self.backwards: list[torch.fx.Graph] = []
        self.num_outputs: list[int] = []
        self.backend = aot_autograd(
            fw_compiler=make_boxed_compiler(lambda graph, _: graph.forward),
            partition_fn=self._split,
            decompositions=select_decomp_table(),
        )

    def _split(self, *given: Any, **options: Any) -> Any:
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        forward, backward = min_cut_rematerialization_partition(*given, **options)
        self.forwards.append(forward.graph)
        self.backwards.append(backward.graph)
        self.num_outputs.append(options["num_fwd_outputs"])
        return forward, backward
