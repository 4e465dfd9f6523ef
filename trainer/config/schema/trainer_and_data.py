"""Keys of the trainer, the tokenizer and the data, with NeMo's names and meanings."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from ....models.config.key_block import (
    ComponentName,
    ConfigBlock,
    NonEmptyText,
    OpenBlock,
    block_default,
    extension_field,
)

Precision = Literal[
    64, "64", "64-true", 32, "32", "32-true", "bf16", "bf16-mixed", "bf16-true", 16, "16", "16-mixed", "16-true"
]
PositiveInt = Annotated[int, Field(ge=1)]


class TrainerBlock(ConfigBlock):
    """`trainer.*`: devices, precision and length of training."""

    devices: PositiveInt | Literal["auto"] = 1
    """Devices per node."""
    num_nodes: int = Field(1, ge=1)
    """Number of nodes (machines)."""
    min_nodes: int | None = extension_field(None, ge=1)
    """Fewest nodes with which the run starts, and goes on when nodes are lost; it grows again, up to `num_nodes`, as
    nodes join. The global batch stays, so numbers that do not divide it leave nodes idle. null: all of `num_nodes`."""
    max_restarts: int = extension_field(0, ge=0)
    """Restarts from the newest checkpoint, without a new one in between, after a process has died or hung or a disk was
    full; needs `exp_manager.resume_if_exists`. Bad input and divergence always end the run. `stoker train --restart N`
    sets it."""
    step_timeout: float | None = extension_field(300.0, gt=0)
    """Seconds after which a training step counts as hung, or 10 times the median of past steps if that is longer: the
    ranks write their stack traces to `stacks` in the run directory and end. Validation, saving and the first step of a
    process are not limited. null: never."""
    accelerator: Literal["auto", "gpu", "cuda", "cpu", "mps"] = "auto"
    """Device type; `auto` selects a CUDA GPU if one is available, else the CPU."""
    process_timeout: float = extension_field(600.0, gt=0)
    """Timeout of collective operations in seconds; the run ends when a process waits longer than this."""
    precision: Precision | None = None
    """`bf16` trains bf16 weights with fp32 main weights (see `model.megatron_amp_O2`), `16` likewise in fp16 with a
    dynamic loss scale, `32` trains in fp32, `64` in fp64; null: bf16 on GPUs with sm_80 or later, 32 elsewhere."""
    max_steps: PositiveInt | Literal[-1] = 100000
    """Number of optimizer steps; also the default length of the learning-rate schedule. -1: no limit but
    `max_epochs`."""
    max_epochs: PositiveInt | Literal[-1] | None = None
    """Passes over the training samples after which the run ends, in full global batches, if `max_steps` is not reached
    earlier; the default length of the learning-rate schedule is then theirs. null or -1: no limit."""
    max_time: str | None = Field(None, pattern=r"^\d{1,4}:\d\d:\d\d:\d\d$", examples=["00:04:00:00"])
    """Save a checkpoint and stop after this wall-clock time: `DD:HH:MM:SS`, quoted."""
    log_every_n_steps: int = Field(10, ge=1)
    """Steps between log lines; metrics stay on the device in between. On a GPU the line for a step is printed while
    the next step runs."""
    val_check_interval: PositiveInt | Annotated[float, Field(gt=0, le=1)] = 100
    """Optimizer steps between validation runs (int), or fraction of `max_steps` (float), with `max_epochs` of an
    epoch."""
    limit_val_batches: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] = 50
    """Global batches per validation run (int), or fraction of the validation samples (float; 1.0: all of them); 0
    disables validation."""
    validation_metrics: list[NonEmptyText] = extension_field([])
    """Metrics of your own (docs/extend.md), by name, measured in validation beside the loss and logged as `val_NAME`.
    """
    gradient_clip_val: float | None = Field(1.0, ge=0)
    """Clip the global gradient norm to this; 0 or null: off."""
    enable_progress_bar: bool = True
    """Show a live progress panel below the log lines when the output is a terminal."""
    enable_model_summary: bool = True
    """Print the table of modules and parameters before training."""
    num_sanity_val_steps: int = Field(0, ge=0)
    """Global validation batches to run before the first training step."""
    overfit_batches: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] = 0
    """Train and validate repeatedly on the first global batches only: their number (int), or a fraction of an epoch
    (float; 1.0: all full batches); 0: off."""
    fast_dev_run: bool | Annotated[int, Field(ge=0)] = False
    """Run this many training steps (True: 1) and validation batches as a smoke test, in the subdirectory `fast_dev_run`
    of the run directory, without checkpoints or loggers."""
    callbacks: list[NonEmptyText] | None = extension_field(None)
    """Lightning callbacks of your own, by the names they are registered under (docs/extend.md)."""
    profiler: Literal["simple", "pytorch"] | None = None
    """`simple`: wall-clock time per phase of the run. `pytorch`: a torch.profiler trace of `profile_steps` for
    chrome://tracing, a table of operators and, of a GPU, how long it waits and for what. They are written to `profile`
    in the run directory."""
    profile_steps: list[PositiveInt] = extension_field([5, 8], min_length=2, max_length=2)
    """First and last step traced by `profiler: pytorch`, counted from the start of the process."""
    deterministic: bool | Literal["warn"] = False
    """Use deterministic (bitwise reproducible) operations only; an operation without a deterministic implementation is
    an error (True) or a warning (`warn`). Attention uses a deterministic backend in both cases."""
    max_skipped_steps: int = extension_field(10, ge=0)
    """Maximum number of consecutive steps with infinite or NaN gradients. Such a step is skipped; when the limit is
    exceeded, the run stops at the next log line."""
    loss_spike_threshold: float | None = extension_field(4.0, gt=0)
    """Warn when the training loss exceeds its recent values by this many (robust) standard deviations; null: never."""


class MemoryProfileBlock(ConfigBlock):
    """`model.memory_profile.*`: record every GPU memory allocation during a range of steps."""

    enabled: bool = False
    """Record allocations (CUDA devices only)."""
    start_step: int = Field(10, ge=1)
    """First recorded step, counted from the start of the process."""
    end_step: int = Field(10, ge=1)
    """Last recorded step."""
    rank: int = Field(0, ge=0)
    """Global rank that records."""
    output_path: NonEmptyText | None = None
    """Output directory; null: `profile` in the run directory."""


class SpecialTokensBlock(ConfigBlock):
    """`model.tokenizer.special_tokens.*`: special tokens, given as text."""

    eos_token: NonEmptyText | None = None
    """End-of-document token, added if the vocabulary lacks it; null: the one named by tokenizer_config.json or the
    model, or a token with a common name."""
    pad_token: NonEmptyText | None = None
    """Padding token; null: looked up like `eos_token`, falling back to `eos_token`."""
    mask_token: NonEmptyText | None = None
    """BERT: mask token, added if the vocabulary lacks it; null: [MASK], <mask>, or the first sentinel."""


TokenizerLibrary = Literal["byte-level", "char", "huggingface", "megatron", "sentencepiece", "checkpoint"]
OwnTokenizerName = Annotated[str, Field(min_length=1), ComponentName("the name of a tokenizer of your own")]
TOKENIZERS: tuple[str, ...] = get_args(TokenizerLibrary)


class TokenizerBlock(ConfigBlock):
    """`model.tokenizer.*`."""

    library: TokenizerLibrary | OwnTokenizerName = "byte-level"
    """`byte-level`: UTF-8 bytes with ByT5's ids (pad 0, eos 1, unk 2, byte + 3). `char`: the characters of the
    training text. `huggingface`: a tokenizer.json. `megatron`: GPT-2's vocab.json and merges.txt. `sentencepiece`: a
    .model file. `checkpoint`: the tokenizer stored in a checkpoint. docs/extend.md has what a tokenizer of your own
    is."""
    kwargs: OpenBlock = extension_field({})
    """Settings of a tokenizer of your own."""
    type: NonEmptyText | None = None
    """huggingface: path of a tokenizer.json or its folder (nothing is downloaded). checkpoint: path of a checkpoint
    (`step-N`). megatron: GPT2BPETokenizer."""
    model: NonEmptyText | None = None
    """sentencepiece: path of the .model file. huggingface: the same as `type`."""
    vocab_file: NonEmptyText | None = None
    """megatron: path of vocab.json."""
    merge_file: NonEmptyText | None = None
    """megatron: path of merges.txt."""
    additional_special_tokens: list[NonEmptyText] = Field(default=[], max_length=10000)
    """Tokens to add to the vocabulary of a tokenizer file; missing ones get the ids after its last."""
    num_sentinel_tokens: int | None = Field(None, ge=0, le=10000)
    """T5, BERT: number of sentinel tokens <extra_id_0>, <extra_id_1>, ..., added if the vocabulary has fewer; null: 125
    for bytes (ByT5's 384 ids); for files those they have, or 100 (BERT: none if there is a mask token)."""
    special_tokens: SpecialTokensBlock = block_default(SpecialTokensBlock)
    """End-of-document, padding and mask tokens."""
    chat_template: NonEmptyText | None = None
    """Chat template: Jinja text, or the path of a Jinja file; null: the template in the tokenizer's files, or ChatML.
    It is saved in every checkpoint."""


class TrainSetBlock(ConfigBlock):
    """`model.data.train_ds.*`: fine-tuning data of a GPT, with NeMo's names; other splits are read the same way."""

    file_names: NonEmptyText | list[NonEmptyText] | None = None
    """JSONL files to train on, for `data_impl: jsonl`, instead of `path`."""
    concat_sampling_probabilities: list[Annotated[float, Field(gt=0)]] | None = Field(None, min_length=1)
    """Sampling weights of `file_names`; null: files are concatenated, so each counts by its size."""
    prompt_template: NonEmptyText | None = Field(None, examples=["{input} {output}"])
    """Template that joins the fields of a JSON object, answer last; spaces before the answer belong to the answer.
    null: `context_key` and `label_key` with a space between them."""
    truncation_field: NonEmptyText | None = None
    """Comma-separated template fields to truncate when prompt and answer exceed the sequence length; null: all fields
    but the answer."""
    truncation_method: Literal["right", "left"] = "right"
    """Side on which those fields are truncated."""
    add_bos: bool | None = None
    """Prepend the bos token; null: if the tokenizer does so by default, as in `stoker generate`."""
    add_eos: bool = True
    """Append the eos token, so that the model learns where an answer ends."""


class HeldOutSetBlock(ConfigBlock):
    """`model.data.validation_ds.*` and `test_ds.*`: files of held-out data."""

    file_names: NonEmptyText | list[NonEmptyText] | None = None
    """JSONL files; only together with `train_ds.file_names`."""


class DataBlock(ConfigBlock):
    """`model.data.*`."""

    data_impl: NonEmptyText = Field("pystd", examples=["pystd"])
    """`pystd`: this interpreter's standard library. `text`: the file or folder at `path`. `mmap`: the tokenized files
    at `data_prefix`. `mock`: random tokens. For fine-tuning, `jsonl`: prompt/answer pairs or chats in the file or
    folder at `path`; `huggingface`: pairs or chats of a dataset, given by folder or hub name; `pystd_docstring`:
    functions of the standard library and their docstrings. Any other name: a dataset of your own
    (docs/extend.md)."""
    path: str | None = extension_field(None)
    """`data_impl: text`: a text file or a folder of text files; `jsonl`: a JSONL file or folder; `huggingface`: folder
    or hub name of a dataset."""
    data_prefix: (
        NonEmptyText | list[NonEmptyText | float] | dict[str, NonEmptyText | list[NonEmptyText | float] | None] | None
    ) = None
    """`mmap`: datasets in Megatron's .bin/.idx format: a path without suffix, a list of paths, a list of alternating
    weights and paths, or one of these for each of `train`, `validation` and `test`. Weights apply to training samples
    (without weights datasets count by size); validation uses every token once."""
    index_mapping_dir: NonEmptyText | None = None
    """`mmap`: folder for the cached document and sample indices of each epoch; null: beside the data for large datasets
    (a million documents), in memory otherwise."""
    shuffle_documents: bool = True
    """`mmap`: shuffle documents in every epoch; False keeps the order of the file and shuffles samples only."""
    eod_mask_loss: bool = False
    """Mask the loss at positions whose input is the end-of-document token."""
    reset_position_ids: bool = False
    """Restart position ids at 0 after each end-of-document token in a sample."""
    reset_attention_mask: bool = False
    """Block attention across documents within a sample. An attention backend without variable-length support needs a
    mask of micro batch size x sequence x sequence, shared by all layers."""
    dataset_kwargs: OpenBlock = extension_field({})
    """`huggingface`: `name` and `revision` of the dataset, and `train`, `validation` and `test` if its splits have
    other names. Otherwise the settings of a dataset of your own."""
    splits_string: str = Field(
        "900,50,50", pattern=r"^\d{1,9}(\.\d{1,9})?(,\d{1,9}(\.\d{1,9})?){0,2}$", examples=["900,50,50"]
    )
    """Proportions of train, validation and test; no effect on data with predefined splits."""
    validation_drop_last: bool = False
    """Drop the last, incomplete global batch in validation during training; False (unlike NeMo's default) uses every
    sample."""
    dataset_type: Literal["gpt", "sft", "t5", "t5_prefix_lm", "seq2seq", "bert"] | None = None
    """Training objective. `gpt`: next-token prediction. `sft`: supervised fine-tuning on prompts and answers. `t5`:
    span corruption. `t5_prefix_lm`: prefix language modelling (the encoder reads the prefix). `seq2seq`: pairs of input
    and target. `bert`: masked language modelling. null: `gpt`, `t5` or `bert`, by `model.family`; with pairs
    (`data_impl: jsonl` or `pystd_docstring`) `sft` for a GPT and `seq2seq` for a T5."""
    seq_length: int | None = Field(None, ge=1)
    """Tokens per sample; null: `model.encoder_seq_length` (T5: `model.seq_length`, of the encoder)."""
    seq_length_dec: int | None = Field(None, ge=1)
    """Decoder tokens per sample of a T5; null: for span corruption the exact length needed (114 for 512; with NeMo's
    random span lengths 155), for a prefix the encoder's length, for pairs 128. With a smaller value NeMo's spans mask
    fewer tokens."""
    masked_lm_prob: float = Field(0.15, gt=0, lt=1)
    """Span corruption, BERT: fraction of masked tokens."""
    mean_ngram_size: float | None = Field(None, ge=1, le=1000)
    """Span corruption: mean span length in tokens; null: 3 (ByT5: 20). With `geometric_dist: True` (BERT too): mean in
    words (or tokens) before spans are truncated to `max_ngram_size`; null: 5, which truncation at 10 reduces to
    4.46."""
    geometric_dist: bool | None = None
    """Distribution of span lengths. null: T5's, with fixed numbers of masked tokens and spans, so that sequence lengths
    are constant and need no padding (BERT: single tokens). NeMo's: True samples each length from a geometric
    distribution with that mean, False with probability 1 / length; encoder sequences are then padded."""
    max_ngram_size: int = Field(10, ge=1, le=1000)
    """NeMo's spans: maximum length in words (or tokens)."""
    favor_longer_ngrams: bool = False
    """NeMo's spans with `geometric_dist: False`: reverse the probabilities, so that longer spans are likelier."""
    whole_word_masking: bool = True
    """NeMo's spans: align spans with word boundaries."""
    respect_document_boundaries: bool = False
    """Span corruption: True splits each document into chunks, and a sample holds one document unless it is packed;
    False splits the concatenation of all documents, separated by eos, as in T5's pre-training."""
    short_seq_prob: float = Field(0.0, ge=0, le=1)
    """With `respect_document_boundaries`: probability of a chunk of random shorter length."""
    packed_sequence: bool = extension_field(False)
    """Pack several pairs, chats or document chunks into one sequence, without attention between them, instead of
    padding."""
    chat: bool = False
    """`jsonl`, `huggingface`: objects hold `messages` (or `conversations`), which are formatted with the tokenizer's
    chat template."""
    train_ds: TrainSetBlock = block_default(TrainSetBlock)
    """Fine-tuning data of a GPT, with NeMo's names."""
    validation_ds: HeldOutSetBlock = block_default(HeldOutSetBlock)
    """Validation files."""
    test_ds: HeldOutSetBlock = block_default(HeldOutSetBlock)
    """Files for `stoker evaluate --split test`."""
    context_key: NonEmptyText = extension_field("input")
    """`jsonl`, `huggingface`: field of the input in each object."""
    label_key: NonEmptyText = extension_field("output")
    """`jsonl`, `huggingface`: field of the target in each object."""
    num_workers: int = Field(0, ge=0, le=256)
    """Dataloader worker processes; 0 prepares batches in a thread of the trainer."""
