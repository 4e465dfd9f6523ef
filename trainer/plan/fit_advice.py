"""Plan of a run that is about to start, and advice for a run that ran out of memory."""

from __future__ import annotations

import torch

from ..config.schema.root import RootBlock
from .inputs import Target
from .report import change_lines, gib
from .run_plan import Plan, local_target, make_plan
from .search import suggestions


def plan_run(root: RootBlock, device: torch.device, *, world_size: int, vocab_size: int | None) -> Plan | None:
    """Plan a run on this machine; None if its attention or compilation is not supported, reported elsewhere.

    Args:
        root: validated configuration.
        device: of this process.
        world_size: number of processes.
        vocab_size: of the tokenizer.
    """
    target = local_target(root, device, world_size)
    try:
        return make_plan(root, target, vocab_size=vocab_size)
    except ValueError:
        return None


def out_of_memory_lines(root: RootBlock, plan: Plan | None) -> list[str]:
    """Return lines that list the keys that lower memory, and by how much.

    Args:
        root: validated configuration.
        plan: of the run that failed; None if there is none.
    """
    if plan is None or plan.facts.target.device != "cuda":
        return ["use a smaller model.micro_batch_size, shorter samples or a smaller model"]
    target: Target = plan.facts.target
    lines = [f"the plan estimated {gib(plan.needed)} of {gib(plan.available or 0)} device memory"]
    if plan.facts.uses_cuda_graph:
        lines.append(
            "CUDA graphs use a memory pool of their own, not shared with other tensors; "
            "`model.enable_cuda_graph=False` frees it"
        )
    changes = suggestions(root, target, plan)
    if not changes:
        return [*lines, "use shorter samples or a smaller model"]
    return [*lines, "changes that need less memory:", *change_lines(plan, changes)]
