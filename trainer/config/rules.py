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
from ..data.installed import BUILT_IN
from ..data.prefixes import is_per_split
from ..distributed.layout import DISTRIBUTED_OPTIMIZERS
from ..environment import environment_text
from .blocks import DataBlock
from .data_rules import DATA_RULES
from .exp_manager_rules import EXP_MANAGER_RULES
from .optim import optimizer_kind
from .optim_rules import optim_rules
from .schema import RootBlock
from .schema_index import show_value
from .suggest import closest


@dataclass(frozen=True)
class Facts:
    """What a rule may look at.

    Attributes:
        root: the typed keys.
        given: paths that a file or an override sets; the rest are defaults.
        own: those of them that the user set, not one of the packaged files.
        variables: the caller's environment.
        from_environment: paths whose values refer to it (`${oc.env:NAME}`); on disk they stay unresolved.
    """

    root: RootBlock
    given: frozenset[str]
    own: frozenset[str]
    variables: Mapping[str, str]
    from_environment: frozenset[str] = frozenset()


Rule = Callable[[Facts], Iterator[Finding]]


def processes(facts: Facts) -> int:
    """Processes of the run; those of `devices: auto` are counted when it starts."""
    trainer = facts.root.trainer
    return (trainer.devices if isinstance(trainer.devices, int) else 1) * trainer.num_nodes


def mps_is_alone(facts: Facts) -> Iterator[Finding]:
    """Apple's GPUs come one to a machine and do not talk to each other."""
    trainer = facts.root.trainer
    if trainer.accelerator == "mps" and processes(facts) > 1:
        yield Finding(
            "error",
            ("trainer.devices", "trainer.accelerator"),
            f"`mps` runs one process, not {processes(facts)}",
            "trainer.devices=1 trainer.num_nodes=1",
        )


def sharding_has_processes(facts: Facts) -> Iterator[Finding]:
    """Settings of several processes, where there is one, or of another layout."""
    model, trainer = facts.root.model, facts.root.trainer
    world = processes(facts)
    several = world > 1 or trainer.devices == "auto"
    names = ("fsdp_sharding_strategy", "fsdp_shard_size")
    if model.fsdp and not several:
        yield _no_effect("model.fsdp", "trainer.devices", "with one process")
    if not model.fsdp:
        for name in names:
            if f"model.{name}" in facts.given:
                yield _no_effect(f"model.{name}", "model.fsdp", "without `model.fsdp`")
    elif model.fsdp_sharding_strategy != "hybrid" and model.fsdp_shard_size is not None:
        yield _no_effect(
            "model.fsdp_shard_size",
            "model.fsdp_sharding_strategy",
            f"with `fsdp_sharding_strategy` {model.fsdp_sharding_strategy}",
        )
    elif model.fsdp_shard_size is not None and several and world % model.fsdp_shard_size:
        yield Finding(
            "error",
            ("model.fsdp_shard_size", "trainer.devices"),
            f"`fsdp_shard_size` ({model.fsdp_shard_size}) must divide the {world} processes",
            f"model.fsdp_shard_size={max(d for d in divisors(world) if d <= model.fsdp_shard_size)}",
        )
    if model.fsdp and several and model.fsdp_sharding_strategy == "hybrid":
        size = model.fsdp_shard_size
        if trainer.num_nodes == 1 and size in (None, world):
            half = next((divisor for divisor in reversed(divisors(world)) if 1 < divisor < world), None)
            yield Finding(
                "warning",
                ("model.fsdp_sharding_strategy", "model.fsdp_shard_size", "trainer.num_nodes"),
                "`fsdp_sharding_strategy: hybrid` is `full` on one machine that shares one copy of the parameters",
                f"model.fsdp_shard_size={half}" if half else "model.fsdp_sharding_strategy=full",
            )
    for path in ("model.fsdp_grad_reduce_dtype", "trainer.process_timeout"):
        if path in facts.given and not several:
            yield _no_effect(path, "trainer.devices", "with one process")


def ramp_up_divides(facts: Facts) -> Iterator[Finding]:
    """A growing batch is a whole number of micro batches on every process, and arrives at the full size."""
    model = facts.root.model
    if not model.rampup_batch_size:
        return
    start, increment, _ = model.rampup_batch_size
    unit = model.micro_batch_size * processes(facts)
    path = "model.rampup_batch_size"
    if start > model.global_batch_size:
        yield Finding(
            "error",
            (path, "model.global_batch_size"),
            f"`rampup_batch_size` starts at {start}, above `global_batch_size` ({model.global_batch_size})",
            f"model.global_batch_size={start}",
        )
    elif (model.global_batch_size - start) % increment:
        yield Finding(
            "error",
            (path, "model.global_batch_size"),
            f"`global_batch_size` ({model.global_batch_size}) is not reached from {start} in steps of {increment}",
            f"model.global_batch_size={start + (model.global_batch_size - start) // increment * increment + increment}",
        )
    for what, value in (("start", start), ("increment", increment)):
        if value % unit:
            yield Finding(
                "error",
                (path, "model.micro_batch_size"),
                f"the {what} of `rampup_batch_size` ({value}) must be a multiple of `micro_batch_size` times the "
                f"processes ({unit})",
                f"{unit * max(1, round(value / unit))}",
            )


def batches_divide(facts: Facts) -> Iterator[Finding]:
    """Gradients accumulate over a whole number of micro batches."""
    model = facts.root.model
    devices = processes(facts)
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
    if trainer.precision is None or trainer.precision == "bf16":
        return
    # False asks for what fp32 and bf16-mixed do anyway; bf16-true does neither.
    unheard = model.megatron_amp_O2 or trainer.precision == "bf16-true"
    if unheard and "model.megatron_amp_O2" in facts.given:
        yield Finding(
            "warning",
            ("model.megatron_amp_O2", "trainer.precision"),
            f"no effect with `precision` ({show_value(trainer.precision)}): "
            "the choice between main weights and autocast goes with bf16",
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
    elif data.data_impl in BUILT_IN and data.data_impl != "text" and data.path is not None:
        yield Finding(
            "error",
            ("model.data.path", "model.data.data_impl"),
            f"`path` is read with `data_impl: text` only, but it is `{data.data_impl}`",
            "data=text, or ~model.data.path",
        )


def tokenizer_needs_text(facts: Facts) -> Iterator[Finding]:
    """Random tokens have no text."""
    model = facts.root.model
    library = model.tokenizer.library
    if library != "byte-level" and model.data.data_impl == "mock":
        yield Finding(
            "warning",
            ("model.tokenizer.library", "model.data.data_impl"),
            f"`{library}` has no effect with `data_impl: mock`: random tokens have no text",
            "tokenizer=byte",
        )


_TOKENIZER_KEYS: Mapping[str, tuple[str, ...]] = {
    "type": ("huggingface", "megatron"),
    "model": ("huggingface", "sentencepiece"),
    "vocab_file": ("megatron",),
    "merge_file": ("megatron",),
    "additional_special_tokens": ("huggingface", "megatron", "sentencepiece"),
    "special_tokens": ("huggingface", "megatron", "sentencepiece"),
}
"""The libraries that a key of `model.tokenizer` means something to."""


def tokenizer_files_are_given(facts: Facts) -> Iterator[Finding]:
    """Each library reads its own files."""
    keys = facts.root.model.tokenizer
    at, library = "model.tokenizer", keys.library
    needed = {"sentencepiece": ("model",), "megatron": ("vocab_file", "merge_file")}.get(library, ())
    for name in needed:
        if getattr(keys, name) is None:
            yield Finding(
                "error",
                (f"{at}.{name}", f"{at}.library"),
                f"`library: {library}` reads `{name}`; stoker downloads no tokenizers",
                f"{at}.{name}=FILE",
            )
    if library == "huggingface" and (keys.type is None) == (keys.model is None):
        yield Finding(
            "error",
            (f"{at}.type", f"{at}.model"),
            "`library: huggingface` needs the path of one tokenizer.json, in `type` or in `model`",
            f"{at}.type=FILE_OR_FOLDER" if keys.type is None else f"~{at}.model",
        )
    if library == "megatron" and keys.type not in (None, "GPT2BPETokenizer"):
        yield Finding(
            "error",
            (f"{at}.type", f"{at}.library"),
            f"`library: megatron` knows one `type`, GPT2BPETokenizer, not {keys.type}",
            f"{at}.type=GPT2BPETokenizer, or {at}.library=huggingface with the path of a tokenizer.json",
        )
    defaults = type(keys).model_fields
    for name, libraries in _TOKENIZER_KEYS.items():
        if library not in libraries and getattr(keys, name) != defaults[name].default:
            yield _no_effect(f"{at}.{name}", f"{at}.library", f"with `library: {library}`")


def splits_hold_training_data(facts: Facts) -> Iterator[Finding]:
    """There must be something to train on, and to validate on if that is asked for; random tokens are not split."""
    data, trainer = facts.root.model.data, facts.root.trainer
    shares = [float(share) for share in data.splits_string.split(",")]
    key = "model.data.splits_string"
    uncut = ""
    if data.data_impl == "mock":
        uncut = "with `data_impl: mock`: each split is random tokens"
    elif data.data_impl not in BUILT_IN:
        return  # the package that has the data cuts them
    elif data.data_impl == "mmap" and is_per_split(data.data_prefix):
        uncut = "with a `data_prefix` for each split"
    if uncut:
        if key in facts.own and data.splits_string != DataBlock.model_fields["splits_string"].default:
            yield _no_effect(key, "model.data.data_impl", uncut)
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


def directories_stay_below(facts: Facts) -> Iterator[Finding]:
    """`name` and `version` name directories below `exp_dir`."""
    root = facts.root
    for path, value in (
        ("name", root.name),
        ("exp_manager.name", root.exp_manager.name),
        ("exp_manager.version", root.exp_manager.version),
    ):
        if isinstance(value, str) and (value.startswith("/") or ".." in value.split("/") or "\0" in value):
            yield Finding(
                "error",
                (path,),
                f"`{path}` must be a name below `exp_manager.exp_dir`, without `..`",
                "use a plain name, or exp_manager.explicit_log_dir=DIRECTORY",
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
    namers = {
        "explicit_log_dir": manager.explicit_log_dir is not None,
        "resume_if_exists": manager.resume_if_exists,
        "version": manager.version is not None,
    }
    path = "exp_manager.use_datetime_version"
    if not manager.use_datetime_version and any(namers.values()) and path in facts.own:
        namer = next(name for name, names in namers.items() if names)
        yield _no_effect(path, f"exp_manager.{namer}", f"with `{namer}`, which names the directory")


def missing_checkpoint_needs_resume(facts: Facts) -> Iterator[Finding]:
    """Only a run that looks for a checkpoint of its own can miss it."""
    manager = facts.root.exp_manager
    path = "exp_manager.resume_ignore_no_checkpoint"
    if not manager.resume_ignore_no_checkpoint and not manager.resume_if_exists and path in facts.own:
        yield _no_effect(path, "exp_manager.resume_if_exists", "without `resume_if_exists`")


def checkpoint_keys_need_checkpoints(facts: Facts) -> Iterator[Finding]:
    """Without the callback nothing is saved."""
    manager = facts.root.exp_manager
    below = "exp_manager.checkpoint_callback_params."
    if manager.create_checkpoint_callback:
        return
    typed = sorted(path for path in facts.given if path.startswith(below))
    if manager.resume_if_exists and f"{below}dirpath" in typed:
        typed.remove(f"{below}dirpath")  # where the checkpoint to go on from lies
    if typed:
        yield Finding(
            "warning",
            (typed[0], "exp_manager.create_checkpoint_callback"),
            "the keys of `checkpoint_callback_params` have no effect with `create_checkpoint_callback: false`",
        )


def some_checkpoint_is_kept(facts: Facts) -> Iterator[Finding]:
    """Checkpoints that are switched on, but never due or never kept, are not written."""
    manager, steps = facts.root.exp_manager, facts.root.trainer.max_steps
    params = manager.checkpoint_callback_params
    if not manager.create_checkpoint_callback or params.save_last:
        return
    below = "exp_manager.checkpoint_callback_params"
    if params.save_top_k == 0:
        yield Finding(
            "warning",
            (f"{below}.save_top_k", f"{below}.save_last"),
            "no checkpoint is written, not even at a signal: `save_top_k` (0) and `save_last` (False) keep none",
            f"{below}.save_last=true, or exp_manager.create_checkpoint_callback=false",
        )
    elif (
        params.every_n_train_steps is not None
        and params.every_n_train_steps > steps
        and params.train_time_interval is None
    ):
        yield Finding(
            "warning",
            (f"{below}.every_n_train_steps", f"{below}.save_last", "trainer.max_steps"),
            f"no checkpoint is due in {steps} steps: `every_n_train_steps` is {params.every_n_train_steps} and "
            "`save_last` False",
            f"{below}.save_last=true, or {below}.every_n_train_steps={steps}",
        )


def validation_keys_need_validation(facts: Facts) -> Iterator[Finding]:
    """`limit_val_batches: 0` never validates."""
    manager, trainer = facts.root.exp_manager, facts.root.trainer
    if trainer.limit_val_batches:
        return
    if trainer.num_sanity_val_steps and "trainer.num_sanity_val_steps" in facts.own:
        yield _no_effect("trainer.num_sanity_val_steps", "trainer.limit_val_batches", "with `limit_val_batches` (0)")
    params = manager.checkpoint_callback_params
    times_checkpoints = (
        manager.create_checkpoint_callback and params.every_n_train_steps is None and params.train_time_interval is None
    ) or manager.create_early_stopping_callback
    if "trainer.val_check_interval" in facts.own and not times_checkpoints:
        yield _no_effect("trainer.val_check_interval", "trainer.limit_val_batches", "with `limit_val_batches` (0)")


def centred_norms_are_centred(facts: Facts) -> Iterator[Finding]:
    """`layernorm1p` is the zero-centred layer norm."""
    model = facts.root.model
    path = "model.layernorm_zero_centered_gamma"
    if model.normalization == "layernorm1p" and not model.layernorm_zero_centered_gamma and path in facts.own:
        yield Finding(
            "warning",
            (path, "model.normalization"),
            "`layernorm_zero_centered_gamma` (False) has no effect with `layernorm1p`, whose weight is zero-centred",
            "model.normalization=layernorm",
        )


def checkpoints_come_in_time(facts: Facts) -> Iterator[Finding]:
    """With intervals longer than the run only the end is saved."""
    manager, trainer = facts.root.exp_manager, facts.root.trainer
    params = manager.checkpoint_callback_params
    is_timed = params.every_n_train_steps is not None or params.train_time_interval is not None
    if not manager.create_checkpoint_callback or is_timed or trainer.max_steps < 1000:
        return
    key = "trainer.val_check_interval"
    if trainer.val_check_interval > trainer.max_steps and key in facts.given:
        yield Finding(
            "info",
            ("exp_manager.checkpoint_callback_params.every_n_train_steps", key),
            f"checkpoints come every `val_check_interval` ({trainer.val_check_interval}) steps: only the end of the "
            "run is saved",
            "exp_manager.checkpoint_callback_params.every_n_train_steps=1000",
        )


def fused_names_mean_adamw(facts: Facts) -> Iterator[Finding]:
    """NeMo's names of its fused and distributed AdamW."""
    model = facts.root.model
    name = model.optim.name
    if name in DISTRIBUTED_OPTIMIZERS:
        what = (
            "`fsdp` cuts its state already" if model.fsdp else "its state is cut over the processes, where several run"
        )
        yield Finding("info", ("model.optim.name",), f"`{name}` is AdamW here; {what}", "adamw")
    elif name != optimizer_kind(name):
        yield Finding(
            "info", ("model.optim.name",), f"`{name}` is AdamW here, fused wherever the device allows it", "adamw"
        )


def optimizer_and_schedule(facts: Facts) -> Iterator[Finding]:
    """What the keys of `model.optim` need of each other."""
    yield from optim_rules(facts.root.model.optim, facts.own, facts.root.trainer.max_steps)


def variables_can_be_set(facts: Facts) -> Iterator[Finding]:
    """What an operating system takes as a variable."""
    for name, value in facts.root.env_vars.items():
        if not name or "=" in name or "\0" in name or "\0" in environment_text(value):
            yield Finding(
                "error",
                (f"env_vars.{name}",),
                f"`env_vars` ({show_value(name)}) must not be empty, and neither name nor value may hold a null byte, "
                "nor the name a `=`",
                "write env_vars.NAME=VALUE",
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
    mps_is_alone,
    sharding_has_processes,
    ramp_up_divides,
    batches_divide,
    optimizer_and_schedule,
    query_key_scaling_is_for_fp16,
    main_weights_are_for_bf16,
    text_needs_a_path,
    tokenizer_needs_text,
    tokenizer_files_are_given,
    splits_hold_training_data,
    sample_fits_model,
    directories_stay_below,
    log_dir_is_given_once,
    missing_checkpoint_needs_resume,
    checkpoint_keys_need_checkpoints,
    some_checkpoint_is_kept,
    validation_keys_need_validation,
    centred_norms_are_centred,
    checkpoints_come_in_time,
    fused_names_mean_adamw,
    variables_can_be_set,
    environment_agrees,
    flags_are_known,
    *DATA_RULES,
    *EXP_MANAGER_RULES,
)


def _no_effect(path: str, other: str, when: str) -> Finding:
    name = path.rpartition(".")[2]
    return Finding("warning", (path, other), f"`{name}` has no effect {when}", f"~{path}")


def run_rules(facts: Facts) -> list[Finding]:
    """Everything the keys have against each other, with full paths; a warning about defaults alone is left out."""
    found = [finding for rule in RULES for finding in rule(facts)]
    for finding in gpt_rules(facts.root.model):
        found.append(replace(finding, keys=tuple(f"model.{key}" for key in finding.keys)))
    return [finding for finding in found if finding.level == "error" or _concerns_user(finding, facts)]


def _concerns_user(finding: Finding, facts: Facts) -> bool:
    known = finding.keys[0] not in facts.variables
    return not known or any(key in facts.given for key in finding.keys)
