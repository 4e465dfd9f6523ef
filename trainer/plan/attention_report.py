"""Attention backends of a run: for each kind of call the choice, and why not the others; no device is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..config.resolved_run import ResolvedRun, resolve_run
from ..config.schema.root import RootBlock
from ..device.attention_software import assumed_software, run_flags
from ..device.bench_table import FoundTable, card_name, find_table
from ..utils.errors import UserError

if TYPE_CHECKING:
    from ...kernels.attention.call_spec import AttentionCall, InstalledSoftware
    from ...kernels.attention.dispatch import BackendCandidate, BackendSelection
    from ...kernels.attention.flags import AttentionFlags
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


@dataclass(frozen=True, slots=True)
class AttentionChoice:
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

    def __str__(self) -> str:
        from ...kernels.attention.dispatch import format_candidates

        if self.problem:
            rows = self.problem[1:] or (format_candidates(self.rows) if self.rows else ())
            return "\n".join(["", f"{self.kind}: {self.problem[0]}", *rows])
        head = f"{self.kind}: {self.backend}  ({self.call})"
        return "\n".join(["", head, *format_candidates(self.rows), *(f"  note: {note}" for note in self.notes)])


@dataclass(frozen=True, slots=True)
class AttentionReport:
    """Attention backends of a run.

    Attributes:
        where: the device and the software that they are chosen for.
        flags: notes on the environment variables and keys that restrict the choice, and on a table that is ignored.
        choices: one for each kind of call.
    """

    where: str
    flags: tuple[str, ...]
    choices: tuple[AttentionChoice, ...]

    def __str__(self) -> str:
        return "\n".join([*self.flags, *map(str, self.choices)])


def explain_attention(root: RootBlock, arch: str | None = None) -> AttentionReport:
    """Choose the attention backend of every kind of call of a run, without building its model.

    Args:
        root: the configuration.
        arch: a name in `ARCHITECTURES`, whose device need not be present; None: the device of the configuration.

    Raises:
        UserError: there is no such device, or the ranks cannot share the model so.
    """
    if arch is None:
        device, capability, software, where, card = this_machine(root.trainer)
        found = find_table(card, software, root.env_vars)
        software = replace(software, measured=found.times)
    else:
        capability, found = ARCHITECTURES[arch], FoundTable()
        device = "cpu" if capability is None else "cuda"
        software = assumed_software(root.model, device)
        where = f"for {arch}, assuming {_describe_software(software)}"
    run = resolve_run(root, capability=capability)
    flags = run_flags(run)
    notes = (*flags.notes(), *filter(None, [found.ignored]))
    software = replace(software, deterministic_algorithms=bool(run.trainer.deterministic))
    return AttentionReport(where, notes, tuple(_choices(run, flags, software, device, capability)))


def this_machine(keys: TrainerBlock) -> tuple[str, tuple[int, int] | None, InstalledSoftware, str, str]:
    """Return device type, compute capability, installed software, a description of it, and the name of the card."""
    from ...kernels.attention.installed_software import detect_installed_software
    from ..device.choose_device import choose_device, compute_capability

    try:
        device = choose_device(keys)
    except UserError as error:
        raise UserError([*error.lines, "    --arch explains for a device that is not present"]) from None
    software = detect_installed_software(device.type)
    where = f"on this machine, with {_describe_software(software)}"
    return device.type, compute_capability(device), software, where, card_name(device)


def _describe_software(software: InstalledSoftware) -> str:
    from ...kernels.attention.support_checks import format_version

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


def _choices(
    run: ResolvedRun,
    flags: AttentionFlags,
    software: InstalledSoftware,
    device: str,
    capability: tuple[int, int] | None,
) -> list[AttentionChoice]:
    from ...kernels.attention.dispatch import NoBackendError
    from ...models.config.families import name_stacks
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
    choices: list[AttentionChoice] = []
    for planned in attentions:
        for kind, call in planned.calls.items():
            label, description = planned.label(kind), str(call)
            try:
                decision: BackendSelection = choose_backends(planned.attention, {kind: call}, flags, software)[kind]
            except NoBackendError as error:
                problem = tuple(name_stacks(str(error), run.model).splitlines())
                choices.append(AttentionChoice(label, description, None, error.rows, (), problem))
            else:
                steps = (_generation_note(call),) if kind == "generation" and planned.uses_kv_cache else ()
                choices.append(
                    AttentionChoice(label, description, decision.backend, decision.rows, (*decision.notes, *steps), ())
                )
    return choices


def _generation_note(call: AttentionCall) -> str:
    """Return the note on incremental decoding, which uses no attention backend."""
    decoder = "the decode kernel" if call.device == "cuda" and call.dtype != "fp64" else "plain torch"
    return f"used for prefill only; each generated token goes through {decoder}, with a KV cache"
