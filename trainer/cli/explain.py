"""`stoker explain TOPIC`: why a run would do what it does, without starting it and without its device."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils import environment
from ..utils.errors import EXIT_BAD_INPUT, EXIT_DONE, UserError
from ..utils.text import counted

if TYPE_CHECKING:
    from ...kernels.attention.call_spec import AttentionCall, Installed
    from ...kernels.attention.dispatch import Decision, Row
    from ...kernels.attention.flags import AttentionFlags
    from ..config.schema.root import RootBlock

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
ASSUMED_CUDNN, ASSUMED_TRITON, ASSUMED_TE, ASSUMED_FLASH_ATTN = 91900, (3, 6), (2, 20), (2, 8, 3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The topic, and what `stoker config` takes."""
    topics = "; ".join(f"{name}: {topic.about}" for name, topic in TOPICS.items())
    parser.add_argument("topic", nargs="?", help=f"what to explain ({topics}; default: attention)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="choices of groups and values of keys")
    parser.add_argument("--config-dir", type=Path, metavar="D", help="a folder of your own configuration files")
    parser.add_argument("--config-name", metavar="N", help="the primary file, without .yaml (default: train)")
    parser.add_argument(
        "--arch", choices=ARCHITECTURES, help="explain for another device than this machine's; none is needed"
    )
    parser.add_argument("--json", action="store_true", help="everything as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Explain one topic; 0, or 2 where the run could not be had.

    Raises:
        UserError: no such topic, or a configuration that is wrong.
    """
    if args.topic is None and args.arch is None:
        for name, topic in TOPICS.items():
            print(f"stoker explain {name:<11} {topic.about}")
        return EXIT_DONE
    if args.topic is None or "=" in args.topic:
        args.overrides = [*([args.topic] if args.topic else []), *args.overrides]
        args.topic = "attention"
    if args.topic not in TOPICS:
        from ..config.suggest import closest

        near = closest(args.topic, TOPICS)
        did = f"did you mean `stoker explain {near}`?" if near else f"topics are {', '.join(TOPICS)}"
        raise UserError(f"stoker explain {args.topic}: there is no such topic; {did}")
    return TOPICS[args.topic].run(args)


# ---------------------------------------------------------------- attention


@dataclass(frozen=True, slots=True)
class Answer:
    """The choice for one kind of call.

    Attributes:
        kind: of call; in a T5 after the name of the attention.
        call: its facts in words.
        backend: the choice, None where nothing is left.
        rows: every backend in the order of preference, accepted or refused with the reason.
        notes: what the choice costs.
        problem: why there is no choice, in lines; empty where there is one.
    """

    kind: str
    call: str
    backend: str | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    problem: tuple[str, ...]


def explain_attention(args: argparse.Namespace) -> int:
    """Print the dispatcher's table for each kind of call of the configured run."""
    from ..config.load import load_run_config

    root = load_run_config(args.config_name, args.config_dir, args.overrides).root
    flags = run_flags(root)
    if args.arch is None:
        device, capability, software, where = _this_machine(root)
    else:
        capability = ARCHITECTURES[args.arch]
        device = "cpu" if capability is None else "cuda"
        software = assumed_software(root, device)
        where = f"for {args.arch}, assuming {_in_words(software)}"
    software = replace(software, deterministic_algorithms=bool(root.trainer.deterministic))
    answers = _answers(root, flags, software, device, capability)
    if args.json:
        shown = {
            "where": where,
            "flags": list(flags.notes()),
            "kinds": [asdict(answer) for answer in answers],
        }
        print(json.dumps(shown, indent=2))
    else:
        print(f"attention of {_layers(root)} {where}")
        for text in (*flags.notes(), *(_in_lines(answer) for answer in answers)):
            print(text)
    return EXIT_DONE if all(answer.backend for answer in answers) else EXIT_BAD_INPUT


def _layers(root: RootBlock) -> str:
    """How many layers there are, in words."""
    from ...models.config.family_rules import stacks_of_keys

    stacks = {name.rstrip("."): stack.num_layers for name, stack in stacks_of_keys(root.model).items()}
    if len(stacks) == 1:
        return counted(next(iter(stacks.values())), "layer")
    return " and ".join(counted(layers, f"{name} layer") for name, layers in stacks.items())


def run_flags(root: RootBlock) -> AttentionFlags:
    """The NVTE_* variables of the caller and of `env_vars`, as the run would see them."""
    from ..device.determinism import attention_flags

    own = {name: environment.environment_text(value) for name, value in root.env_vars.items()}
    try:
        return attention_flags(root, {**environment.snapshot(), **own})
    except ValueError as error:
        raise UserError(str(error)) from None


def _this_machine(root: RootBlock) -> tuple[str, tuple[int, int] | None, Installed, str]:
    """Kind of device, capability, software, and all of it in words."""
    import torch

    from ...kernels.attention.backends.registry import installed
    from ..core.factory import choose_device

    try:
        device = choose_device(root)
    except UserError as error:
        raise UserError([*error.lines, "    --arch explains for a device that is not here"]) from None
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    software = installed(device.type)
    return device.type, capability, software, f"on this machine, with {_in_words(software)}"


def assumed_software(root: RootBlock, device: str) -> Installed:
    """The software of this machine, as it would be beside another device.

    A GPU comes with cuDNN and Triton. What a key asks for by name is taken to be installed there.
    """
    from ...kernels.attention.backends.registry import installed
    from ...models.config.family_rules import stacks_of_keys

    here, stacks = installed(), stacks_of_keys(root.model).values()
    if device == "cpu":
        return here
    asked_te = any(stack.transformer_engine or stack.attention_backend.startswith("te_") for stack in stacks)
    asked_flash = any(stack.attention_backend in ("flash_attn", "te_flash") for stack in stacks)
    return replace(
        here,
        cudnn=here.cudnn or ASSUMED_CUDNN,
        triton=here.triton or ASSUMED_TRITON,
        interpreted=False,
        te=here.te or (ASSUMED_TE if asked_te else None),
        flash_attn=here.flash_attn or (ASSUMED_FLASH_ATTN if asked_flash else None),
    )


def _in_words(software: Installed) -> str:
    from ...kernels.attention.backend_support import dotted

    parts = [f"PyTorch {dotted(software.torch)}"]
    if software.cudnn is not None:
        parts.append(f"cuDNN {software.cudnn // 10000}.{software.cudnn // 100 % 100}.{software.cudnn % 100}")
    versions = {
        "Triton": software.triton,
        "TransformerEngine": software.te,
        "flash-attn": software.flash_attn,
    }
    parts += [f"{name} {dotted(version)}" if version else f"no {name}" for name, version in versions.items()]
    parts += [
        name
        for name, there in (("flash-attn-3", software.flash_attn_3), ("flash-attn-4", software.flash_attn_4))
        if there
    ]
    return ", ".join(parts)


def _answers(
    root: RootBlock, flags: AttentionFlags, software: Installed, device: str, capability: tuple[int, int] | None
) -> list[Answer]:
    from ...kernels.attention.dispatch import NoBackendError
    from ...models.build import DTYPE_NAMES
    from ...models.config.families import family_slice
    from ...models.dispatch.attention_calls import decide
    from ...models.dispatch.attention_choices import CallFacts, planned_attentions
    from ..config.batch_spec import sample_form

    form = sample_form(root)
    facts: CallFacts = {
        "device": device,
        "capability": capability,
        "dtype": DTYPE_NAMES[_dtype(root, device, capability)],
        "batch": root.model.micro_batch_size,
        "deterministic": not flags.allow_nondeterministic,
    }
    answers: list[Answer] = []
    for planned in planned_attentions(family_slice(root.model, vocab_size=1, form=form), form, facts):
        for kind, call in planned.calls.items():
            label, told = planned.label(kind), str(call)
            try:
                decision: Decision = decide(planned.attention, {kind: call}, flags, software)[kind]
            except NoBackendError as error:
                answers.append(Answer(label, told, None, error.rows, (), tuple(str(error).splitlines())))
            else:
                steps = (_of_steps(call),) if kind == "generation" and planned.grows else ()
                answers.append(Answer(label, told, decision.backend, decision.rows, (*decision.notes, *steps), ()))
    return answers


def _of_steps(call: AttentionCall) -> str:
    """What computes the tokens of a text that is generated, which no backend does."""
    how = "the decode kernel" if call.device == "cuda" and call.dtype != "fp64" else "plain torch"
    return f"this reads prompts; each token after them goes through {how}, over keys and values that are kept"


def _dtype(root: RootBlock, device: str, capability: tuple[int, int] | None) -> Any:
    """The torch dtype of the arithmetic; a device that is not here is not asked."""
    import torch

    from ..device.precision import plan_precision

    trainer = root.trainer
    if trainer.precision is None:
        has_bf16 = device == "cuda" and (capability or (0, 0)) >= (8, 0)
        trainer = trainer.model_copy(update={"precision": "bf16" if has_bf16 else "32"})
    plan = plan_precision(trainer, root.model.megatron_amp_O2, torch.device(device))
    return plan.autocast or plan.weights


def _in_lines(answer: Answer) -> str:
    from ...kernels.attention.dispatch import table_lines

    if answer.problem:
        return "\n".join(["", f"{answer.kind}: {answer.problem[0]}", *answer.problem[1:]])
    head = f"{answer.kind}: {answer.backend}  ({answer.call})"
    return "\n".join(["", head, *table_lines(answer.rows), *(f"  note: {note}" for note in answer.notes)])


@dataclass(frozen=True, slots=True)
class Topic:
    """Something to explain: one line about it, and the function that does."""

    about: str
    run: Callable[[argparse.Namespace], int]


TOPICS = {
    "attention": Topic("the backend of each kind of attention call, and why not the others", explain_attention),
}
