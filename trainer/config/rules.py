"""Rules between keys outside the stack: batching, schedule, data, directories, devices, environment.

Each rule is one small pure function from the facts to findings with full paths; `models/config/rules.py` has those of
the stack. They run on typed keys, outside pydantic, so that every problem is found at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ...kernels.attention.flags import KNOWN_FLAGS
from ...models.config.block import Finding
from ...models.config.rules import divisors, gpt_rules
from .schema import RootBlock
from .schema_index import show_value
from .suggest import closest


@dataclass(frozen=True)
class Facts:
    """What a rule may look at.

    Attributes:
        root: the typed keys.
        given: paths that a file or an override sets; the rest are defaults.
        variables: the caller's environment.
    """

    root: RootBlock
    given: frozenset[str]
    variables: Mapping[str, str]


Rule = Callable[[Facts], Iterator[Finding]]


def one_device(facts: Facts) -> Iterator[Finding]:
    """Several processes are not there yet."""
    trainer = facts.root.trainer
    if isinstance(trainer.devices, int) and trainer.devices > 1:
        yield Finding("error", ("trainer.devices",), "training on several devices is not yet", "trainer.devices=1")
    if trainer.num_nodes > 1:
        yield Finding("error", ("trainer.num_nodes",), "training on several machines is not yet", "trainer.num_nodes=1")


def batches_divide(facts: Facts) -> Iterator[Finding]:
    """Gradients accumulate over a whole number of micro batches."""
    model, trainer = facts.root.model, facts.root.trainer
    devices = (trainer.devices if isinstance(trainer.devices, int) else 1) * trainer.num_nodes
    micro, together = model.micro_batch_size, model.global_batch_size
    if together % (micro * devices):
        shares = "" if devices == 1 else f" * devices ({devices})"
        fitting = max(micro * devices, round(together / (micro * devices)) * micro * devices)
        per_device = together // devices if together % devices == 0 else together
        best = max(size for size in divisors(per_device) if size <= micro)
        other = f", or model.micro_batch_size={best}" if together % devices == 0 else ""
        yield Finding(
            "error",
            ("model.global_batch_size", "model.micro_batch_size"),
            f"`global_batch_size` ({together}) must be a multiple of `micro_batch_size` ({micro}){shares}",
            f"model.global_batch_size={fitting}{other}",
        )


def warmup_is_given_once(facts: Facts) -> Iterator[Finding]:
    """`_steps` and `_ratio` say the same thing."""
    sched = facts.root.model.optim.sched
    for name in ("warmup", "constant"):
        steps, ratio = getattr(sched, f"{name}_steps"), getattr(sched, f"{name}_ratio")
        if steps is not None and ratio is not None:
            yield Finding(
                "error",
                (f"model.optim.sched.{name}_ratio", f"model.optim.sched.{name}_steps"),
                f"`{name}_steps` ({steps}) and `{name}_ratio` ({ratio:g}) say the same thing; only one may be given",
                f"~model.optim.sched.{name}_ratio",
            )


def schedule_has_room(facts: Facts) -> Iterator[Finding]:
    """Warm-up, decay and constant part share the steps."""
    sched, trainer = facts.root.model.optim.sched, facts.root.trainer
    total = sched.max_steps or trainer.max_steps
    length = "model.optim.sched.max_steps" if sched.max_steps else "trainer.max_steps"
    warmup = sched.warmup_steps if sched.warmup_steps is not None else int((sched.warmup_ratio or 0) * total)
    constant = sched.constant_steps if sched.constant_steps is not None else int((sched.constant_ratio or 0) * total)
    first = "warmup_ratio" if sched.warmup_steps is None and sched.warmup_ratio is not None else "warmup_steps"
    second = "constant_ratio" if sched.constant_steps is None and sched.constant_ratio is not None else "constant_steps"
    if sched.name != "CosineAnnealing" and constant:
        yield Finding(
            "warning",
            (f"model.optim.sched.{second}", "model.optim.sched.name"),
            f"`{second}` has no effect with `{sched.name}`",
            f"~model.optim.sched.{second}",
        )
        constant = 0
    if (warmup or constant) and warmup + constant >= total:
        yield Finding(
            "error",
            (f"model.optim.sched.{first if warmup else second}", length),
            f"warm-up ({warmup} steps) and constant part ({constant} steps) must leave steps for the decay, "
            f"but the schedule has {total}",
            f"use fewer, or {length}={warmup + constant + max(1, total)}",
        )


def min_lr_is_smaller(facts: Facts) -> Iterator[Finding]:
    """A schedule ends below its peak."""
    optim = facts.root.model.optim
    if optim.sched.min_lr > optim.lr:
        yield Finding(
            "error",
            ("model.optim.sched.min_lr", "model.optim.lr"),
            f"`min_lr` ({optim.sched.min_lr:g}) must not be larger than `lr` ({optim.lr:g})",
            f"model.optim.sched.min_lr={optim.lr / 10:g}",
        )


def query_key_scaling_is_for_fp16(facts: Facts) -> Iterator[Finding]:
    """NeMo switches it off in every other precision, and so does stoker."""
    if facts.root.model.apply_query_key_layer_scaling:
        yield Finding(
            "warning",
            ("model.apply_query_key_layer_scaling", "trainer.precision"),
            "it is for fp16 and is switched off in every other precision, as in NeMo; it never changes the mathematics",
            "model.apply_query_key_layer_scaling=false",
        )


def main_weights_are_for_bf16(facts: Facts) -> Iterator[Finding]:
    """Only `bf16` has a choice between main weights and autocast."""
    trainer, model = facts.root.trainer, facts.root.model
    if not model.megatron_amp_O2 or trainer.precision is None or trainer.precision == "bf16":
        return
    if "model.megatron_amp_O2" in facts.given:
        yield Finding(
            "warning",
            ("model.megatron_amp_O2", "trainer.precision"),
            f"no effect with `precision` ({show_value(trainer.precision)}): main weights go with bf16",
            "trainer.precision=bf16, or ~model.megatron_amp_O2",
        )


def text_needs_a_path(facts: Facts) -> Iterator[Finding]:
    """`data_impl: text` reads a file or folder, the other sources none."""
    data = facts.root.model.data
    if data.data_impl == "text" and not data.path:
        yield Finding(
            "error",
            ("model.data.path", "model.data.data_impl"),
            "`data_impl: text` needs a file or folder to read",
            "model.data.path=FILE_OR_FOLDER, or data=pystd to train on the Python standard library",
        )
    elif data.data_impl != "text" and data.path is not None:
        yield Finding(
            "error",
            ("model.data.path", "model.data.data_impl"),
            f"`path` is read with `data_impl: text` only, but it is `{data.data_impl}`",
            "data=text, or ~model.data.path",
        )


def characters_need_text(facts: Facts) -> Iterator[Finding]:
    """A character tokenizer is made from the training text."""
    model = facts.root.model
    if model.tokenizer.library == "char" and model.data.data_impl == "mock":
        yield Finding(
            "warning",
            ("model.tokenizer.library", "model.data.data_impl"),
            "`char` has no effect with `data_impl: mock`: random tokens have no characters",
            "tokenizer=byte",
        )


def splits_hold_training_data(facts: Facts) -> Iterator[Finding]:
    """There must be something to train on, and to validate on if that is asked for."""
    data, trainer = facts.root.model.data, facts.root.trainer
    shares = [float(share) for share in data.splits_string.split(",")]
    if data.data_impl == "mock":
        return
    if shares[0] == 0:
        yield Finding(
            "error", ("model.data.splits_string",), "the first share, for training, must not be 0", "900,50,50"
        )
    elif trainer.limit_val_batches and (len(shares) < 2 or shares[1] == 0):
        yield Finding(
            "error",
            ("model.data.splits_string", "trainer.limit_val_batches"),
            "the second share, for validation, must not be 0 while validation is on",
            "model.data.splits_string='900,100,0', or trainer.limit_val_batches=0",
        )


def sample_fits_model(facts: Facts) -> Iterator[Finding]:
    """The model is built for samples of `encoder_seq_length` tokens."""
    model = facts.root.model
    length = model.data.seq_length
    if length is not None and length != model.encoder_seq_length:
        yield Finding(
            "error",
            ("model.data.seq_length", "model.encoder_seq_length"),
            f"`data.seq_length` ({length}) must equal `encoder_seq_length` ({model.encoder_seq_length}), "
            "the length the model is built for",
            f"model.encoder_seq_length={length}, or ~model.data.seq_length",
        )


def log_dir_is_given_once(facts: Facts) -> Iterator[Finding]:
    """`explicit_log_dir` is the run directory itself."""
    manager = facts.root.exp_manager
    if manager.explicit_log_dir is not None:
        for name in ("exp_dir", "name", "version"):
            path = f"exp_manager.{name}"
            if path in facts.given and getattr(manager, name) is not None:
                yield Finding(
                    "warning",
                    (path, "exp_manager.explicit_log_dir"),
                    f"`{name}` has no effect with `explicit_log_dir`",
                    f"~{path}",
                )
    elif manager.resume_if_exists and manager.version is not None:
        yield Finding(
            "warning",
            ("exp_manager.version", "exp_manager.resume_if_exists"),
            "`version` has no effect with `resume_if_exists`: all attempts share one directory",
            "~exp_manager.version",
        )


def checkpoint_keys_need_checkpoints(facts: Facts) -> Iterator[Finding]:
    """Without the callback nothing is saved."""
    manager = facts.root.exp_manager
    below = "exp_manager.checkpoint_callback_params."
    if manager.create_checkpoint_callback:
        return
    typed = sorted(path for path in facts.given if path.startswith(below))
    if typed:
        yield Finding(
            "warning",
            (typed[0], "exp_manager.create_checkpoint_callback"),
            "the keys of `checkpoint_callback_params` have no effect with `create_checkpoint_callback: false`",
        )


def checkpoints_need_validation(facts: Facts) -> Iterator[Finding]:
    """With neither a step interval nor validation, only the end is saved."""
    manager, trainer = facts.root.exp_manager, facts.root.trainer
    params = manager.checkpoint_callback_params
    if not manager.create_checkpoint_callback or params.every_n_train_steps is not None or trainer.max_steps < 1000:
        return
    if trainer.limit_val_batches == 0 or trainer.val_check_interval > trainer.max_steps:
        key = "trainer.limit_val_batches" if trainer.limit_val_batches == 0 else "trainer.val_check_interval"
        if key in facts.given:
            yield Finding(
                "info",
                ("exp_manager.checkpoint_callback_params.every_n_train_steps", key),
                "checkpoints follow validations, and there are none: only the end of the run is saved",
                "exp_manager.checkpoint_callback_params.every_n_train_steps=1000",
            )


def fused_names_mean_adamw(facts: Facts) -> Iterator[Finding]:
    """NeMo's names of its fused and distributed AdamW."""
    name = facts.root.model.optim.name
    if name != "adamw":
        yield Finding(
            "info", ("model.optim.name",), f"`{name}` is AdamW here, fused wherever the device allows it", "adamw"
        )


def environment_agrees(facts: Facts) -> Iterator[Finding]:
    """What the caller exported and what `env_vars` says must not differ."""
    for name, value in facts.root.env_vars.items():
        text = environment_text(value)
        present = facts.variables.get(name)
        if present is not None and present != text:
            yield Finding(
                "error",
                (f"env_vars.{name}",),
                f"`env_vars.{name}` ({text}) contradicts the environment, which has {name}={present}",
                f"unset {name}, or ~env_vars.{name}",
            )


def flags_are_known(facts: Facts) -> Iterator[Finding]:
    """A misspelt NVTE_* changes nothing, silently, everywhere else."""
    names = dict.fromkeys([*facts.root.env_vars, *facts.variables])
    for name in names:
        if name.upper().startswith("NVTE") and name not in KNOWN_FLAGS:
            near = closest(name, KNOWN_FLAGS)
            where = f"env_vars.{name}" if name in facts.root.env_vars else name
            yield Finding(
                "warning", (where,), f"`{name}` is not a flag of TransformerEngine that stoker knows", near or ""
            )


RULES: tuple[Rule, ...] = (
    one_device,
    batches_divide,
    warmup_is_given_once,
    schedule_has_room,
    min_lr_is_smaller,
    query_key_scaling_is_for_fp16,
    main_weights_are_for_bf16,
    text_needs_a_path,
    characters_need_text,
    splits_hold_training_data,
    sample_fits_model,
    log_dir_is_given_once,
    checkpoint_keys_need_checkpoints,
    checkpoints_need_validation,
    fused_names_mean_adamw,
    environment_agrees,
    flags_are_known,
)


def environment_text(value: str | int | float | bool) -> str:
    """A value of `env_vars` as the environment holds it: true and false are 1 and 0."""
    return str(int(value)) if isinstance(value, bool) else show_value(value) if not isinstance(value, str) else value


def run_rules(facts: Facts) -> list[Finding]:
    """Everything the keys have against each other, with full paths; a warning about defaults alone is left out."""
    found = [finding for rule in RULES for finding in rule(facts)]
    for finding in gpt_rules(facts.root.model):
        found.append(replace(finding, keys=tuple(f"model.{key}" for key in finding.keys)))
    return [finding for finding in found if finding.level == "error" or _concerns_user(finding, facts)]


def _concerns_user(finding: Finding, facts: Facts) -> bool:
    known = finding.keys[0] not in facts.variables
    return not known or any(key in facts.given for key in finding.keys)
