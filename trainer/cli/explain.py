"""`stoker explain TOPIC`: explain decisions of a run without starting it; the target device is not needed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..plan.attention_report import ARCHITECTURES
from ..utils.errors import EXIT_BAD_INPUT, EXIT_OK, UserError
from ..utils.text import pluralize
from .common_arguments import add_config_arguments, load_config

if TYPE_CHECKING:
    from ...models.config.families import FamilyKeys
    from ...models.config.parallel import ParallelKeys


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


def explain_attention(args: argparse.Namespace) -> int:
    """Print the dispatcher's table for each kind of attention call of the configured run."""
    root = load_config(args).root
    from ..plan.attention_report import explain_attention as explain

    report = explain(root, args.arch)
    if args.json:
        shown = {
            "where": report.where,
            "flags": list(report.flags),
            "kinds": [asdict(choice) for choice in report.choices],
        }
        print(json.dumps(shown, indent=2))
    else:
        print(f"attention of {_layers(root.model)}{_share(root.model)} {report.where}")
        print(report)
    return EXIT_OK if all(choice.backend for choice in report.choices) else EXIT_BAD_INPUT


def explain_fp8(args: argparse.Namespace) -> int:
    """Print which matrices of the configured run multiply in fp8, and why the others do not."""
    root = load_config(args).root
    from ..plan.fp8_report import explain_fp8 as explain

    report = explain(root, args.arch)
    print(json.dumps(asdict(report), indent=2) if args.json else report)
    return EXIT_BAD_INPUT if report.problem else EXIT_OK


def explain_exchange(args: argparse.Namespace) -> int:
    """Print which collectives exchange weights and gradients of data-parallel ranks, and why.

    Raises:
        UserError: `--arch` is given.
    """
    if args.arch is not None:
        raise UserError("`--arch` does not say how GPUs are linked; use `stoker plan --device` for other ones")
    root = load_config(args).root
    import torch

    from ..plan.exchange_kind import data_exchange
    from ..plan.planned_target import planned_target
    from ..plan.run_plan import local_target

    run, target = planned_target(root)
    if root.trainer.accelerator == "cpu":
        target = local_target(run, torch.device("cpu"))
    exchange = data_exchange(run, target)
    if args.json:
        print(json.dumps({"device": target.name, "exchange": exchange and exchange._asdict()}, indent=2))
    else:
        text = exchange or "not exchanged: no two ranks have the same part of the model"
        assumed = " (assumed: there is no GPU here)" if target.gpu and not torch.cuda.is_available() else ""
        beside = "; updated weights are gathered while the next forward pass runs" if run.overlaps_param_sync else ""
        print(
            f"weights and gradients on {pluralize(run.mesh.world_size, 'rank')}, {target.name}{assumed}: {text}{beside}"
        )
    return EXIT_OK


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


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic of `stoker explain`: one-line description, and the function that explains it."""

    summary: str
    run: Callable[[argparse.Namespace], int]


TOPICS = {
    "attention": Topic("the backend of each kind of attention call, and why not the others", explain_attention),
    "fp8": Topic("the matrices that multiply in fp8, and why not the others", explain_fp8),
    "exchange": Topic("the collectives of weights and gradients of data-parallel ranks, and why", explain_exchange),
}
