"""The plan of a run that is about to start, or that has just run out of memory."""

from __future__ import annotations

import torch

from ..config.schema.root import RootBlock
from .inputs import Target
from .report import change_lines, gib
from .run_plan import Plan, make_plan, target_here
from .search import suggestions


def plan_here(root: RootBlock, device: torch.device, *, world_size: int, vocab_size: int | None) -> Plan | None:
    """The plan of a run on this machine; None where its attention or compilation cannot be had, which others tell.

    Args:
        root: the keys.
        device: of this process.
        world_size: processes of the run.
        vocab_size: tokens of the tokenizer.
    """
    target = target_here(root, device, world_size)
    try:
        return make_plan(root, target, vocab_size=vocab_size)
    except ValueError:
        return None


def out_of_memory_lines(root: RootBlock, plan: Plan | None) -> list[str]:
    """Which keys would have helped, and by how much.

    Args:
        root: the keys.
        plan: of the run that failed; None where there is none.
    """
    if plan is None or plan.facts.target.device != "cuda":
        return ["use a smaller model.micro_batch_size, shorter samples or a smaller model"]
    target: Target = plan.facts.target
    lines = [f"planned were {gib(plan.needed)}, of {gib(plan.available or 0)} that the device has"]
    if plan.facts.is_recorded:
        lines.append(
            "micro batches run as CUDA graphs, whose memory nothing else can use: model.enable_cuda_graph=False"
        )
    changes = suggestions(root, target, plan)
    if not changes:
        return [*lines, "use shorter samples or a smaller model"]
    return [*lines, "what would need less:", *change_lines(plan, changes)]
