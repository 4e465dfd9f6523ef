"""`stoker plan`: estimate memory and step time of a run without starting it and without its GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.errors import EXIT_BAD_INPUT, EXIT_OK, UserError
from .common_arguments import add_config_arguments, add_finetune_argument, load_config

if TYPE_CHECKING:
    from ...models.config.key_block import Finding
    from ..config.draft import Draft
    from ..config.run_config import RunConfig
    from ..config.schema.root import RootBlock
    from ..config.schema.trainer_and_data import TrainerBlock
    from ..plan.run_plan import Plan
    from ..plan.search import Change, CurrentOverrides
    from ..plan.target import Target

_GPUS_PER_NODE = 8
"""GPUs of a machine for `--gpus`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `stoker config`, the device, and the output format."""
    add_config_arguments(parser)
    parser.add_argument(
        "--device",
        metavar="GPU",
        help="h100, h200, a100 and so on, a memory size like 80GiB (of an H100), or both like a100:40GiB; default: the "
        "GPU of this machine, or an H100 if there is none",
    )
    add_finetune_argument(parser)
    parser.add_argument("--fit", action="store_true", help="search for the fastest overrides that fit")
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="plan for this number of GPUs, in machines of 8, instead of trainer.devices and trainer.num_nodes; with "
        "--fit also search for their layout: tensor, context, pipeline, expert and data parallelism",
    )
    parser.add_argument(
        "--network",
        type=float,
        metavar="GB/S",
        help="bandwidth of each GPU to other machines, instead of the measured one or that of hardware.yaml",
    )
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE.svg",
        help="draw the planned step of a pipeline: what each of its ranks computes when",
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the verb.

    Returns:
        0, or 2 if `--fit` finds nothing that fits.

    Raises:
        UserError: an invalid configuration or an unknown GPU, or nothing to draw.
    """
    if args.fit and args.timeline is not None:
        raise UserError("`--timeline` draws one plan, not a search; remove --fit, and add the overrides that it prints")
    config = load_config(args, None if args.gpus is None else partial(_set_machines, args.gpus, is_set=not args.fit))
    # these import torch, which takes seconds: only after the configuration has been validated
    from ...models.config.families import name_stacks
    from ..core.run_summary import host_offload_keys
    from ..plan.planned_target import known_vocabulary, planned_target
    from ..plan.report import plan_document, report_lines
    from ..plan.run_plan import make_plan, own_block_notes, useless_recompute_notes
    from ..plan.search import search, suggest_changes

    root, given = config.root, _given(config, args.overrides)
    if args.fit and args.gpus is not None:
        return _fit_layouts(args, root, given)
    resolved, target = planned_target(root, args.device, args.network)
    vocab_size, unknown = known_vocabulary(resolved.data)
    try:
        plan = make_plan(resolved, target, vocab_size=vocab_size)
    except ValueError as error:
        raise UserError(name_stacks(str(error), resolved.model).splitlines()) from None
    if args.timeline is not None:
        _draw(plan, args.timeline)
    offloaded = host_offload_keys(resolved) if target.gpu is not None else ()
    # On the planned GPU these act: that they do nothing on the accelerator of the configuration is part of a note.
    findings = [
        found for found in config.findings if found.keys not in {(key, "trainer.accelerator") for key in offloaded}
    ]
    notes = [
        *_notes(root.trainer, args.device, target, offloaded),
        *own_block_notes(plan),
        *useless_recompute_notes(plan),
        *filter(None, [unknown]),
    ]
    if args.fit:
        if plan.time is None:
            notes.append(
                "step times are not known for this device: the result copies the least to the host, "
                "and changes the fewest keys"
            )
        best, least = search(root, target, plan)
        return _print_fit(args, given, plan, best, least, findings, notes)
    changes = [] if plan.fits else suggest_changes(root, target, plan)
    if args.json:
        print(json.dumps(plan_document(plan, changes, given) | _notes_document(findings, notes), indent=2))
        return EXIT_OK
    for line in report_lines(plan, changes, given):
        print(line)
    _print_notes(findings, notes)
    return EXIT_OK


def _draw(plan: Plan, path: Path) -> None:
    """Write a drawing of the planned step.

    Raises:
        UserError: there is no pipeline, its times are not known, or the file cannot be written.
    """
    from ..loggers.pipeline_timeline import draw_timeline, write_timeline

    schedule, ranks = plan.schedule, len(plan.ranks)
    if schedule is None:
        cure = "set model.pipeline_model_parallel_size" if ranks == 1 else "choose a GPU with --device, and 16 bits"
        lacking = "is no pipeline" if ranks == 1 else "are no times of the schedule"
        raise UserError(f"there {lacking} to draw with `--timeline`; {cure}")
    try:
        write_timeline(path, draw_timeline(schedule.events(), ranks, f"planned step on {plan.inputs.target.name}"))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def _given(config: RunConfig, overrides: Sequence[str]) -> CurrentOverrides:
    """Return the keys set by files and the command line."""
    from ..plan.search import CurrentOverrides

    typed = {override.lstrip("+").partition("=")[0]: override for override in overrides}
    return CurrentOverrides(frozenset(key for key, origin in config.origins.items() if origin.kind != "default"), typed)


def _notes(keys: TrainerBlock, device: str | None, target: Target, offloaded: Sequence[str]) -> Iterator[str]:
    """Yield notes on what the plan assumes about devices."""
    import torch

    from ..core.run_summary import no_effect_on_host

    if target.ignored_bench:
        yield target.ignored_bench
    accelerator, nodes = keys.accelerator, keys.num_nodes
    if target.gpu is None:
        return
    name = f"an {target.gpu.name}"
    without = f", where {no_effect_on_host(offloaded)}" if offloaded else ""
    if accelerator in ("cpu", "mps"):
        yield f"`trainer.accelerator` ({accelerator}) trains on the host{without}; this plan is for {name} instead"
    elif device is None and not torch.cuda.is_available():
        here = f": a run here uses the CPU{without}" if without and accelerator == "auto" else ""
        yield f"no CUDA device is available{here}; this plan is for {name}; choose another with --device"
    if device is not None and device[:1].isdigit():
        yield f"`--device` ({device}) is a memory size alone: this plan is for {name} with that much memory"
    if nodes > 1:
        yield f"the network between {nodes} nodes has {target.gpu.network / 1e9:g} GB/s for each GPU; --network sets it"


def _notes_document(findings: Sequence[Finding], notes: Sequence[str]) -> dict[str, Any]:
    from ..config.render import findings_document

    return {"findings": findings_document(findings), "notes": list(notes)}


def _print_notes(findings: Sequence[Finding], notes: Sequence[str]) -> None:
    from ..config.render import finding_lines

    lines = [*finding_lines(findings), *(f"note: {note}" for note in notes)]
    if lines:
        print("\n" + "\n".join(lines))


def _set_machines(gpus: int, draft: Draft, *, is_set: bool) -> None:
    """Set the keys for `--gpus`, if `is_set`, and check that the command line does not contradict them.

    Raises:
        UserError: it does, or they do not fill machines of 8.
    """
    from ..config.dotted_paths import get
    from ..config.overrides import ValueOverride

    for key, value in _machines(gpus).items():
        if draft.kind_of(key) == "override" and get(draft.tree, key) != value:
            typed = draft.origin_text(key)
            raise UserError(f"`--gpus` ({gpus}) plans for {key}={value}, but {typed} is given too; remove one of them")
        if is_set:
            draft.apply(ValueOverride(key, value, is_reset=False, typed=f"--gpus {gpus}"))


def _machines(gpus: int) -> dict[str, int]:
    """Return the values of the keys for a number of GPUs.

    Raises:
        UserError: they do not fill machines of 8.
    """
    if gpus < 1 or (gpus > _GPUS_PER_NODE and gpus % _GPUS_PER_NODE):
        raise UserError(f"`--gpus` ({gpus}) must be from 1 to {_GPUS_PER_NODE}, or a multiple of {_GPUS_PER_NODE}")
    nodes = -(-gpus // _GPUS_PER_NODE)
    return {"trainer.devices": gpus // nodes, "trainer.num_nodes": nodes}


def _fit_layouts(args: argparse.Namespace, root: RootBlock, given: CurrentOverrides) -> int:
    """Search for the layout of `--gpus`, and print the fastest ones that fit."""
    from ..plan.layout_search import on_machines, search_layouts
    from ..plan.planned_target import known_vocabulary, planned_target
    from ..plan.report import layout_document, layout_lines

    keys = _machines(args.gpus)
    machines = [f"{key}={value}" for key, value in keys.items()]
    root = on_machines(root, *keys.values())
    resolved, target = planned_target(on_machines(root, 1, 1), args.device, args.network)
    vocab_size, unknown = known_vocabulary(resolved.data)
    found = search_layouts(root, target, vocab_size)
    if args.json:
        print(json.dumps({"layouts": [layout_document(change, machines, given) for change in found]}, indent=2))
        return EXIT_OK if found else EXIT_BAD_INPUT
    print("\n".join(layout_lines(found, args.gpus, machines, given)))
    _print_notes([], [*_notes(root.trainer, args.device, target, ()), *filter(None, [unknown])])
    return EXIT_OK if found else EXIT_BAD_INPUT


def _print_fit(
    args: argparse.Namespace,
    given: CurrentOverrides,
    plan: Plan,
    best: Change | None,
    least: Change,
    findings: Sequence[Finding],
    notes: Sequence[str],
) -> int:
    from ..plan.report import change_document, change_lines
    from ..utils.text import format_gib

    if args.json:
        found = {"fits": best is not None, "best": best and change_document(best, given)}
        found["least"] = change_document(least, given)
        print(json.dumps(found | _notes_document(findings, notes), indent=2))
        return EXIT_OK if best else EXIT_BAD_INPUT
    if best is not None:
        if not best.values:
            print(f"it fits as it is: {format_gib(plan.needed)} of {format_gib(plan.available or 0)}")
        for line in change_lines(plan, [best] if best.values else [], given):
            print(line.lstrip())
        _print_notes(findings, notes)
        return EXIT_OK
    missing = least.plan.needed - (plan.available or 0)
    print(f"nothing fits; nearest, {format_gib(missing if missing > 0 else least.plan.missing_host_memory)} too much:")
    for line in change_lines(plan, [least], given):
        print(line)
    _print_notes(findings, notes)
    return EXIT_BAD_INPUT
