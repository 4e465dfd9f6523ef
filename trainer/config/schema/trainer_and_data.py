"""The keys around the model: trainer, tokenizer and data, with NeMo's names and meanings."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import Field

from ....models.config.key_block import Block, own

Precision = Literal[64, "64", "64-true", 32, "32", "32-true", "bf16", "bf16-mixed", "bf16-true"]
PositiveInt = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
"""Text that is not empty: an empty path or name is an unset variable of somebody's shell, not a wish."""
BlockT = TypeVar("BlockT", bound=Block)


def nested(kind: type[BlockT]) -> BlockT:
    """The default of a key that is a block: the block with all its defaults."""
    return kind.model_validate({})


class TrainerBlock(Block):
    """`trainer.*`: where and how long to train."""

    devices: PositiveInt | Literal["auto"] = 1
    """Devices per node."""
    num_nodes: int = Field(1, ge=1)
    """Machines in the run."""
    accelerator: Literal["auto", "gpu", "cuda", "cpu", "mps"] = "auto"
    """Kind of device; `auto` takes a CUDA GPU where there is one, else the CPU."""
    process_timeout: float = own(600.0, gt=0)
    """Seconds after which a process that waits for another one gives up, which ends the run."""
    precision: Precision | None = None
    """`bf16` trains bf16 weights with fp32 main weights (see `model.megatron_amp_O2`), `32` in fp32, `64` in fp64;
    null: bf16 on a GPU from sm_80 on, 32 elsewhere."""
    max_steps: int = Field(100000, ge=1)
    """Optimizer steps to train; the schedules end here."""
    max_time: str | None = Field(None, pattern=r"^\d{1,4}:\d\d:\d\d:\d\d$", examples=["00:04:00:00"])
    """Stop (with a checkpoint) after this long: `DD:HH:MM:SS`, quoted."""
    log_every_n_steps: int = Field(10, ge=1)
    """Steps between two log lines; metrics stay on the device in between. On a GPU the line of a step is printed while
    the next one runs."""
    val_check_interval: int = Field(100, ge=1)
    """Optimizer steps between two validations."""
    limit_val_batches: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] = 50
    """Global batches per validation (int), or the part of the validation samples (float; 1.0 takes them all); 0 never
    validates."""
    gradient_clip_val: float | None = Field(1.0, ge=0)
    """Clip the global gradient norm to this; 0 or null: off."""
    enable_progress_bar: bool = True
    """Show the live panel when the output is a terminal; otherwise plain lines."""
    enable_model_summary: bool = True
    """Print the table of modules and parameters before training."""
    num_sanity_val_steps: int = Field(0, ge=0)
    """Global validation batches to run before the first step."""
    overfit_batches: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, le=1)] = 0
    """Train on the same first global batches again and again, and validate on them: how many (int), or which part of
    an epoch (float; 1.0 takes all its whole batches); 0: off."""
    fast_dev_run: bool | Annotated[int, Field(ge=0)] = False
    """A trial of so many steps (True: 1) and validation batches through everything, in `fast_dev_run` in the run
    directory, without checkpoints and loggers."""
    profiler: Literal["simple", "pytorch"] | None = None
    """`simple`: where the time of the run goes. `pytorch`: a trace of `profile_steps` for chrome://tracing and a table
    of its operations. Both are written to `profile` in the run directory."""
    profile_steps: list[PositiveInt] = own([5, 8], min_length=2, max_length=2)
    """First and last step that `profiler: pytorch` traces, counted from the start of the process."""
    deterministic: bool | Literal["warn"] = False
    """Only operations that give equal bits every time; where there is none: an error (True) or a warning (`warn`).
    Attention takes a backend that repeats in both."""
    max_skipped_steps: int = own(10, ge=0)
    """Steps in a row whose gradients may be infinite or NaN. Such a step changes nothing; after one more than this the
    run stops, at the next log line."""
    loss_spike_threshold: float | None = own(4.0, gt=0)
    """Warn when the training loss rises by so many (robust) standard deviations of its recent values; null: never."""


class MemoryProfileBlock(Block):
    """`model.memory_profile.*`: a record of every allocation on the GPU during some steps."""

    enabled: bool = False
    """Record, on a CUDA device."""
    start_step: int = Field(10, ge=1)
    """The first step recorded, counted from the start of the process."""
    end_step: int = Field(10, ge=1)
    """The last step recorded."""
    rank: int = Field(0, ge=0)
    """The process that records."""
    output_path: Text | None = None
    """Directory of the record; null: `profile` in the run directory."""


class SpecialTokensBlock(Block):
    """`model.tokenizer.special_tokens.*`: tokens with a part to play, by their text."""

    eos_token: Text | None = None
    """The token between documents, added where the vocabulary lacks it; null: the one that tokenizer_config.json or the
    model names, or one of a usual name."""
    pad_token: Text | None = None
    """The token that fills up sequences; null: found as `eos_token` is, or else that one."""
    mask_token: Text | None = None
    """BERT: the token that hides others, added where the vocabulary lacks it; null: [MASK], <mask>, or the first
    sentinel."""


class TokenizerBlock(Block):
    """`model.tokenizer.*`."""

    library: Literal["byte-level", "char", "huggingface", "megatron", "sentencepiece"] = "byte-level"
    """`byte-level`: UTF-8 bytes in ByT5's scheme (pad 0, eos 1, unk 2, byte + 3). `char`: the characters of the
    training text. `huggingface`: a tokenizer.json. `megatron`: GPT-2's two files. `sentencepiece`: a .model file."""
    type: Text | None = None
    """huggingface: path of a tokenizer.json or its folder (never a name to download). megatron: GPT2BPETokenizer."""
    model: Text | None = None
    """sentencepiece: path of the .model file. huggingface: the same as `type`."""
    vocab_file: Text | None = None
    """megatron: path of vocab.json."""
    merge_file: Text | None = None
    """megatron: path of merges.txt."""
    additional_special_tokens: list[Text] = Field(default=[], max_length=10000)
    """Tokens to add to the vocabulary of a file; those it lacks get the ids after its last."""
    num_sentinel_tokens: int | None = Field(None, ge=0, le=10000)
    """T5, BERT: tokens <extra_id_0>, <extra_id_1>, ... for hidden spans, added where the vocabulary has fewer; null:
    125 for bytes, which makes ByT5's 384 ids, and for files those they have, or 100 (BERT: none beside a mask)."""
    special_tokens: SpecialTokensBlock = nested(SpecialTokensBlock)
    """Which tokens end documents and fill up sequences."""
    chat_template: Text | None = None
    """How a conversation is written: a Jinja template, or the path of one; null: that of the tokenizer's files, or
    ChatML. It is kept in every checkpoint."""


class TrainSetBlock(Block):
    """`model.data.train_ds.*`: what a GPT is fine-tuned on, with NeMo's names; validation is read alike."""

    file_names: Text | list[Text] | None = None
    """JSONL files to train on, for `data_impl: jsonl`, instead of `path`."""
    concat_sampling_probabilities: list[Annotated[float, Field(gt=0)]] | None = Field(None, min_length=1)
    """Proportions in which samples come from `file_names`; null: one after the other, by their sizes."""
    prompt_template: Text | None = Field(None, examples=["{input} {output}"])
    """How the texts of an object make a prompt, with its answer at the end; spaces before that belong to it. null:
    `context_key` and `label_key` with a space between them."""
    truncation_field: Text | None = None
    """Names in the template, with commas between them, of the texts that are shortened where a prompt and its answer
    are longer than a row; null: all but the answer."""
    truncation_method: Literal["right", "left"] = "right"
    """At which end those texts are shortened."""
    add_bos: bool | None = None
    """Begin with the bos token; null: as the tokenizer itself begins a text, which is what `stoker generate` does."""
    add_eos: bool = True
    """End with the token that ends a text, so that the model learns where an answer is over."""


class HeldOutSetBlock(Block):
    """`model.data.validation_ds.*` and `test_ds.*`: where what is held out comes from."""

    file_names: Text | list[Text] | None = None
    """JSONL files, beside `train_ds.file_names`."""


class DataBlock(Block):
    """`model.data.*`."""

    data_impl: Text = Field("pystd", examples=["pystd"])
    """`pystd`: this interpreter's standard library. `text`: the file or folder at `path`. `mmap`: the tokens at
    `data_prefix`. `mock`: random tokens. For fine-tuning, `jsonl`: the pairs, or chats, in the file or folder at
    `path`; `huggingface`: those of a data set, by its folder or its name on the hub; `pystd_docstring`: functions of
    the standard library and their docstrings. Any other name: a data set of that name which an installed package
    offers as an entry point of the group stoker.datasets."""
    path: str | None = own(None)
    """Text file, or folder whose text files are read, for `data_impl: text`; JSONL files for `jsonl`; a folder or name
    for `huggingface`."""
    data_prefix: Text | list[Text | float] | dict[str, Text | list[Text | float] | None] | None = None
    """`mmap`: tokens in Megatron's .bin/.idx format: a path without suffix, a list of paths, a list of weights and
    paths in turn, or one of these for each of `train`, `validation` and `test`. Weights choose training samples
    (without them sets count by size); validation takes every token once."""
    index_mapping_dir: Text | None = None
    """`mmap`: folder for the order of documents and samples of each epoch; null: beside the data where they are large
    (a million documents), else in memory."""
    shuffle_documents: bool = True
    """`mmap`: a new order of documents in every epoch; False keeps that of the file and shuffles samples only."""
    eod_mask_loss: bool = False
    """No loss at positions whose input is the end of a document: what follows is another text."""
    reset_position_ids: bool = False
    """Count positions from 0 again after each end of a document in a sample."""
    reset_attention_mask: bool = False
    """A token sees no token of an earlier document in its sample. Where the attention backend takes no lengths of
    documents, that is a mask of micro batch size x length x length for all layers."""
    dataset_kwargs: dict[str, Text | int | float | bool | list[Text | int | float] | None] = own({})
    """`huggingface`: `name` and `revision` of the data set, and `train`, `validation` and `test` where its splits have
    other names. Otherwise whatever the data set of an installed package takes, free in form."""
    splits_string: str = Field(
        "900,50,50", pattern=r"^\d{1,9}(\.\d{1,9})?(,\d{1,9}(\.\d{1,9})?){0,2}$", examples=["900,50,50"]
    )
    """Proportions of train, validation, test; without effect where the data have splits of their own."""
    validation_drop_last: bool = False
    """Validation in training leaves the last samples out where they fill no global batch; False, unlike NeMo's default,
    takes every sample."""
    dataset_type: Literal["gpt", "sft", "t5", "t5_prefix_lm", "seq2seq", "bert"] | None = None
    """What is learnt. `gpt`: the next token. `sft`: answers to prompts. `t5`: span corruption. `t5_prefix_lm`: to go on
    with a text that the encoder reads. `seq2seq`: pairs of texts. `bert`: hidden tokens. null: `gpt`, `t5` or `bert`,
    as the family; from pairs (`data_impl: jsonl` or `pystd_docstring`) a GPT learns `sft` and a T5 `seq2seq`."""
    seq_length: int | None = Field(None, ge=1)
    """Tokens in a sample; null: `model.encoder_seq_length` (T5: `model.seq_length`, of the encoder)."""
    seq_length_dec: int | None = Field(None, ge=1)
    """Tokens of a sample on T5's decoder side; null: for span corruption as many as it needs (114 for 512; of NeMo's
    spans any number, 155), for a prefix as many as on the encoder's, for pairs 128. With less, NeMo's hide less."""
    masked_lm_prob: float = Field(0.15, gt=0, lt=1)
    """Span corruption, BERT: the part of the tokens that is hidden."""
    mean_ngram_size: float | None = Field(None, ge=1, le=1000)
    """Span corruption: tokens in a span on average; null: 3 (ByT5: 20). With `geometric_dist: True`, BERT too: words
    (or tokens) before longer spans are cut to `max_ngram_size`; null: 5, of which 4.46 are left with 10."""
    geometric_dist: bool | None = None
    """How spans are drawn. null: as T5 does, so many tokens in so many spans that lengths are fixed and no place is
    empty (BERT: single tokens). NeMo's: True draws each length from a geometric distribution with that mean, False
    with probability 1 / length; then the encoder's side is padded."""
    max_ngram_size: int = Field(10, ge=1, le=1000)
    """NeMo's spans: words (or tokens) in the longest one."""
    favor_longer_ngrams: bool = False
    """NeMo's spans with `geometric_dist: False`: probabilities the other way round, longer spans first."""
    whole_word_masking: bool = True
    """NeMo's spans: they begin and end with words."""
    respect_document_boundaries: bool = False
    """Span corruption: True cuts documents into pieces, and no sample holds two documents unless it is packed; False
    cuts the row of all documents, with an end token between them, as T5's own data were."""
    short_seq_prob: float = Field(0.0, ge=0, le=1)
    """With `respect_document_boundaries`: probability of a piece of a random shorter length."""
    packed_sequence: bool = own(False)
    """Put several pairs, chats or pieces of documents into one row, where none sees another, instead of padding."""
    chat: bool = False
    """`jsonl`, `huggingface`: objects hold `messages` (or `conversations`), which the tokenizer's chat template writes
    as text."""
    train_ds: TrainSetBlock = nested(TrainSetBlock)
    """What a GPT is fine-tuned on, with NeMo's names."""
    validation_ds: HeldOutSetBlock = nested(HeldOutSetBlock)
    """What it is validated on."""
    test_ds: HeldOutSetBlock = nested(HeldOutSetBlock)
    """What is held out for `stoker evaluate --split test`."""
    context_key: Text = own("input")
    """`jsonl`, `huggingface`: name of the input in each object."""
    label_key: Text = own("output")
    """`jsonl`, `huggingface`: name of the target in each object."""
    num_workers: int = Field(0, ge=0, le=256)
    """Processes that prepare batches; 0 prepares them in a thread of the trainer."""
