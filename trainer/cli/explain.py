"""`stoker explain TOPIC`: explain decisions of a run without starting it; the target device is not needed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from ..config.resolved_run import ResolvedRun, resolve_run
from ..device.attention_software import assumed_software, run_flags
from ..utils.errors import EXIT_BAD_INPUT, EXIT_OK, UserError
from ..utils.text import pluralize
from .common_arguments import add_config_arguments, load_config

if TYPE_CHECKING:
    from ...kernels.attention.call_spec import AttentionCall, InstalledSoftware
    from ...kernels.attention.dispatch import BackendCandidate, BackendSelection
    from ...kernels.attention.flags import AttentionFlags
    from ...models.config.families import FamilyKeys
    from ...models.config.parallel import ParallelKeys
    from ..config.schema.trainer_and_data import TrainerBlock

ARCHITECTURES: dict[str, tuple[int, int] | None] = {
    "sm75": (7, 5),
    "sm80": (8, 0),
    "sm86": (8, 6),
    "sm89": (8, 9),
    "sm90": (9, 0),
    "sm100": (10, 0),
    "sm120": (12, 0),
    "cpu": None,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `stoker explain`."""
    topics = "; ".join(f"{name}: {topic.summary}" for name, topic in TOPICS.items())
    parser.add_argument("topic", nargs="?", help=f"what to explain ({topics}; default: attention)")
    add_config_arguments(parser)
    parser.set_defaults(finetune=False)
    parser.add_argument(
        "--arch", choices=ARCHITECTURES, help="explain for another device architecture, which need not be present"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Explain one topic; return 0, or 2 if the run could not start.

    Raises:
        UserError: unknown topic, or invalid configuration.
    """
    if args.topic is None and args.arch is None:
        for name, topic in TOPICS.items():
            print(f"stoker explain {name:<11} {topic.summary}")
        return EXIT_OK
    if args.topic is None or "=" in args.topic:
        args.overrides = [*([args.topic] if args.topic else []), *args.overrides]
        args.topic = "attention"
    if args.topic not in TOPICS:
        from ..config.suggest import closest

        suggestion = closest(args.topic, TOPICS)
        hint = f"did you mean `stoker explain {suggestion}`?" if suggestion else f"topics are {', '.join(TOPICS)}"
        raise UserError(f"stoker explain {args.topic}: there is no such topic; {hint}")
    return TOPICS[args.topic].run(args)


# ---------------------------------------------------------------- attention


@dataclass(frozen=True, slots=True)
class Answer:
    """Backend choice for one kind of attention call.

    Attributes:
        kind: kind of call, for T5 prefixed with the name of the attention.
        rows: all backends in order of preference, accepted or rejected with the reason.
        notes: costs of the choice.
        problem: lines that explain why no backend supports the call; empty otherwise.
    """

    kind: str
    call: str
    backend: str | None
    rows: tuple[BackendCandidate, ...]
    notes: tuple[str, ...]
    problem: tuple[str, ...]


def explain_attention(args: argparse.Namespace) -> int:
    """Print the dispatcher's table for each kind of attention call of the configured run."""
    root = load_config(args).root
    if args.arch is None:
        device, capability, software, where = _this_machine(root.trainer)
    else:
        capability = ARCHITECTURES[args.arch]
        device = "cpu" if capability is None else "cuda"
        software = assumed_software(root.model, device)
        where = f"for {args.arch}, assuming {_describe_software(software)}"
    run = resolve_run(root, capability=capability)
    flags = run_flags(run)
    software = replace(software, deterministic_algorithms=bool(run.trainer.deterministic))
    answers = _answers(run, flags, software, device, capability)
    if args.json:
        shown = {
            "where": where,
            "flags": list(flags.notes()),
            "kinds": [asdict(answer) for answer in answers],
        }
        print(json.dumps(shown, indent=2))
    else:
        print(f"attention of {_layers(run.model)}{_share(run.model)} {where}")
        for text in (*flags.notes(), *(_format_answer(answer) for answer in answers)):
            print(text)
    return EXIT_OK if all(answer.backend for answer in answers) else EXIT_BAD_INPUT


def _share(keys: ParallelKeys) -> str:
    """Return a phrase that these are the calls of one of the ranks that share a layer; empty for one."""
    names = {"tensor": keys.tensor_model_parallel_size, "context": keys.context_parallel_size}
    axes = " and ".join(f"{size} {name}-parallel" for name, size in names.items() if size > 1)
    return f", on each of {axes} ranks," if axes else ""


def _layers(keys: FamilyKeys) -> str:
    """Return a phrase with the number of layers of each stack."""
    from ...models.config.families import keys_by_stack

    stacks = {name.rstrip("."): stack.num_layers for name, stack in keys_by_stack(keys).items()}
    if len(stacks) == 1:
        return pluralize(next(iter(stacks.values())), "layer")
    return " and ".join(pluralize(layers, f"{name} layer") for name, layers in stacks.items())


def _this_machine(keys: TrainerBlock) -> tuple[str, tuple[int, int] | None, InstalledSoftware, str]:
    """Return device type, compute capability, installed software and a description of it."""
    from ...kernels.attention.installed_software import detect_installed_software
    from ..device.choose_device import choose_device, compute_capability

    try:
        device = choose_device(keys)
    except UserError as error:
        raise UserError([*error.lines, "    --arch explains for a device that is not present"]) from None
    software = detect_installed_software(device.type)
    return device.type, compute_capability(device), software, f"on this machine, with {_describe_software(software)}"


def _describe_software(software: InstalledSoftware) -> str:
    from ...kernels.attention.backend_support import format_version

    parts = [f"PyTorch {format_version(software.torch)}"]
    if software.cudnn is not None:
        parts.append(f"cuDNN {software.cudnn // 10000}.{software.cudnn // 100 % 100}.{software.cudnn % 100}")
    versions = {
        "Triton": software.triton,
        "TransformerEngine": software.te,
        "flash-attn": software.flash_attn,
    }
    parts += [f"{name} {format_version(version)}" if version else f"no {name}" for name, version in versions.items()]
    parts += [
        name
        for name, is_installed in (("flash-attn-3", software.flash_attn_3), ("flash-attn-4", software.flash_attn_4))
        if is_installed
    ]
    return ", ".join(parts)


def _answers(
    run: ResolvedRun,
    flags: AttentionFlags,
    software: InstalledSoftware,
    device: str,
    capability: tuple[int, int] | None,
) -> list[Answer]:
    from ...kernels.attention.dispatch import NoBackendError
    from ...models.dispatch.attention_calls import CallContext, choose_backends
    from ...models.dispatch.attention_choices import plan_attentions
    from ...models.tensor_parallel import rank_slice
    from ..config.parameter_layout import context_split

    facts: CallContext = {
        "device": device,
        "capability": capability,
        "dtype": run.precision.compute,
        "batch": run.model.micro_batch_size,
        "deterministic": not flags.allow_nondeterministic,
    }
    try:
        split = context_split(run.model)
        family = rank_slice(run.family, run.model.tensor_model_parallel_size)
        attentions = list(plan_attentions(family, run.layer_batch_spec, facts, split))
    except ValueError as error:
        raise UserError(str(error)) from None
    answers: list[Answer] = []
    for planned in attentions:
        for kind, call in planned.calls.items():
            label, description = planned.label(kind), str(call)
            try:
                decision: BackendSelection = choose_backends(planned.attention, {kind: call}, flags, software)[kind]
            except NoBackendError as error:
                answers.append(Answer(label, description, None, error.rows, (), tuple(str(error).splitlines())))
            else:
                steps = (_generation_note(call),) if kind == "generation" and planned.uses_kv_cache else ()
                answers.append(
                    Answer(label, description, decision.backend, decision.rows, (*decision.notes, *steps), ())
                )
    return answers


def _generation_note(call: AttentionCall) -> str:
    """Return the note on incremental decoding, which uses no attention backend."""
    decoder = "the decode kernel" if call.device == "cuda" and call.dtype != "fp64" else "plain torch"
    return f"used for prefill only; each generated token goes through {decoder}, with a KV cache"


def _format_answer(answer: Answer) -> str:
    from ...kernels.attention.dispatch import format_candidates

    if answer.problem:
        return "\n".join(["", f"{answer.kind}: {answer.problem[0]}", *answer.problem[1:]])
    head = f"{answer.kind}: {answer.backend}  ({answer.call})"
    return "\n".join(["", head, *format_candidates(answer.rows), *(f"  note: {note}" for note in answer.notes)])


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic of `stoker explain`: one-line description, and the function that explains it."""

    summary: str
    run: Callable[[argparse.Namespace], int]


TOPICS = {
    "attention": Topic("the backend of each kind of attention call, and why not the others", explain_attention),
}
