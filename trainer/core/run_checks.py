"""Checks that need the device or the data of a run, before its model is built."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from ...kernels.attention.backend_support import BACKENDS_BY_NAME
from ...kernels.attention.call_spec import MeasuredTimes
from ...kernels.attention.dispatch import BackendSelection
from ...kernels.attention.installed_software import detect_installed_software
from ...kernels.fp8.te_linear import check_transformer_engine
from ...models.build import ALL_CALL_KINDS, TORCH_DTYPES, ModelPlan, call_context, plan_model
from ...models.config.families import family_slice, keys_by_stack, name_stacks
from ...models.dispatch.attention_calls import CallKind
from ...models.tensor_parallel import rank_slice
from ..checkpoint.reader import Checkpoint
from ..config.resolved_run import DataSpec, ResolvedRun
from ..config.run_config import DEFAULT_ORIGIN, RunConfig
from ..config.schema.exp_manager import ExpManagerBlock
from ..config.schema.trainer_and_data import DataBlock
from ..data.build_datasets import Data
from ..data.subsets import validation_subset
from ..device.bench_table import FoundTable, card_name, find_table, parse_table
from ..device.determinism import attention_flags
from ..distributed.process_group import DistributedContext
from ..utils.errors import UserError


def choose_attention(run: ResolvedRun, device: torch.device, times: MeasuredTimes | None = None) -> ModelPlan:
    """Choose the attention backends of a run and decide on compilation, before anything is built or written.

    Args:
        run: the run.
        device: device of this process.
        times: measured times of its card, which decide within a family; None leaves the order of the dispatcher.

    Raises:
        UserError: no attention backend is available, `model.compile` is not supported, the model cannot be split over
            the tensor-parallel ranks, or an NVTE_* variable is neither 0 nor 1.
    """
    try:
        flags = attention_flags(run.trainer.deterministic)
        software = replace(detect_installed_software(device.type), measured=times)
        plan = plan_model(
            rank_slice(run.family, run.mesh.tensor),
            run.batch_spec,
            call_context(device, TORCH_DTYPES[run.precision.compute], run.model.micro_batch_size, flags),
            flags=flags,
            software=software,
            kinds=call_kinds(run),
            peft=run.peft,
            context_parallel=run.context_split,
        )
        for fp8 in (stack.fp8 for stack in run.family.stacks):
            if fp8 is not None and fp8.uses_transformer_engine and device.type == "cuda":
                check_transformer_engine(fp8.recipe, software)
    except ValueError as error:
        raise UserError(name_stacks(str(error), run.model).splitlines()) from None
    return plan


def find_run_table(device: torch.device, ranks: DistributedContext) -> FoundTable:
    """Return what `stoker bench` has measured on this rank's card, in the file that rank 0 reads; a collective."""
    card, software, shared = card_name(device), detect_installed_software(device.type), ["", "", ""]
    with ranks.raise_on_all_ranks():
        if ranks.is_rank_zero:
            found = find_table(card, software)
            shared = ["" if found.table is None else found.table.model_dump_json(), found.file, found.ignored]
    text, file, ignored = json.loads(ranks.broadcast_text(json.dumps(shared)))
    return parse_table(text, file, card, software) if text else FoundTable(ignored=ignored)


def recorded_table(checkpoint: Checkpoint, found: FoundTable, device: torch.device) -> FoundTable:
    """Return the table of a resumed run: the one its checkpoint records, on the same card; else what was found."""
    table = checkpoint.state.attention_times
    if table is None:
        return FoundTable()
    why = table.why_ignored(card_name(device), detect_installed_software(device.type))
    return (
        found._replace(ignored=f"times of attention in {checkpoint.path.name} are ignored: {why}")
        if why
        else (FoundTable(table, f"the table in {checkpoint.path.name}"))
    )


def attention_changes(before: ModelPlan, after: ModelPlan) -> list[str]:
    """Return one text for each kind of call whose attention backend differs."""
    return [
        f"{label} {decision.backend} instead of {before.decisions[label].backend}"
        for label, decision in after.decisions.items()
        if decision.backend != before.decisions[label].backend
    ]


def call_kinds(run: ResolvedRun) -> tuple[CallKind, ...]:
    """Return the kinds of call that the model of a run is built for.

    Ranks that share sequences or layers cannot generate.
    """
    return ALL_CALL_KINDS if run.mesh.context == run.mesh.pipeline == 1 else ("training", "evaluation")


def attention_warnings(model_plan: ModelPlan) -> list[str]:
    """Return one warning for each requirement on attention that this device cannot meet."""
    return list(dict.fromkeys(chosen.warning for chosen in model_plan.decisions.values() if chosen.warning))


def check_default_dropout(
    config: RunConfig, run: ResolvedRun, device: torch.device, plan: ModelPlan, times: MeasuredTimes | None = None
) -> list[str]:
    """Return a warning if the default `attention_dropout` alone leaves training with unfused attention."""
    defaults = {
        at.rstrip("."): stack.attention_dropout
        for at, stack in keys_by_stack(run.model).items()
        if stack.attention_dropout
        and (origin := config.origins.get(f"model.{at}attention_dropout")) is not None
        and origin == DEFAULT_ORIGIN
    }
    unfused = [label for label, chosen in plan.decisions.items() if _is_unfused(chosen) and chosen.call.dropout]
    if not defaults or not unfused:
        return []
    without = {"attention_dropout": 0.0}
    changes = {stack: getattr(run.model, stack).model_copy(update=without) for stack in defaults if stack} or without
    model = run.model.model_copy(update=changes)
    family = family_slice(model, vocab_size=run.data.vocab_size or 1, batch_spec=run.batch_spec)
    other = choose_attention(replace(run, model=model, family=family), device, times).decisions
    faster = sorted({other[label].backend for label in unfused if not _is_unfused(other[label])})
    if not faster:
        return []
    keys = [f"model.{stack}{'.' * bool(stack)}attention_dropout" for stack in defaults]
    return [
        f"{' and '.join(f'`{key}`' for key in keys)} ({', '.join(f'{value:g}' for value in defaults.values())}, the "
        f"default) {'rules' if len(keys) == 1 else 'rule'} out {' and '.join(faster)}, so training uses unfused "
        f"attention; if you need no dropout there: {' '.join(f'{key}=0' for key in keys)}"
    ]


def _is_unfused(chosen: BackendSelection) -> bool:
    return BACKENDS_BY_NAME[chosen.backend].family == "unfused"


def check_metrics(manager: ExpManagerBlock, spec: DataSpec, data: Data) -> list[str]:
    """Check that the monitored metrics can be measured on the data.

    Returns:
        One warning for each metric that is never measured.

    Raises:
        UserError: early stopping monitors such a metric with `strict`.
    """
    if data.token_byte_counts.any() or spec.keys.data_impl == "mock":  # of mock data the configuration's rules warn
        return []
    at = "exp_manager"
    params, stopping = manager.checkpoint_callback_params, manager.early_stopping_callback_params
    why = "is never measured: the byte lengths of this tokenizer's tokens do not add up to that of the text"
    warnings: list[str] = []
    if manager.create_early_stopping_callback and stopping.monitor == "bits_per_byte":
        line = f"`{at}.early_stopping_callback_params.monitor` (bits_per_byte) {why}; use val_loss"
        if stopping.strict:
            raise UserError(line)
        warnings.append(line)
    if manager.create_checkpoint_callback and params.save_top_k > 0 and params.monitor == "bits_per_byte":
        warnings.append(f"`{at}.checkpoint_callback_params.monitor` (bits_per_byte) {why}; use val_loss")
    return warnings


def check_splits(spec: DataSpec, data: Data) -> list[str]:
    """Check the validation split.

    Returns:
        A warning if `model.data.splits_string` has no effect.

    Raises:
        UserError: no validation samples would be left.
    """
    if spec.limit_val_batches and data.validation is not None:
        validation_subset(spec, data.validation)
    keys = spec.keys
    if not data.has_predefined_splits or keys.splits_string == DataBlock.model_fields["splits_string"].default:
        return []
    if keys.train_ds.file_names is not None:
        return []  # reported by a configuration rule
    return [
        f"`model.data.splits_string` ({keys.splits_string}) has no effect: {keys.path} has its own splits; leave it out"
    ]
