"""Rows of the key table: optimizer, schedule, data and tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

from .key_row import COMMUNICATION_NOTE, KeyState, Row, history, off, refused, rows

_FP32 = ("float32", "torch.float32", 32, "32", "32-true")


def rows_of_training() -> Iterator[Row]:
    """Yield rows of the optimizer, the data and the tokenizer."""
    yield from _optim()
    yield from _data()
    yield from _fine_tuning_datasets()
    yield from _tokenizer()


def _optim() -> Iterator[Row]:
    at = "model.optim"
    yield from history(
        at,
        "bucket_cap_mb overlap_grad_sync overlap_param_sync "
        "contiguous_grad_buffer contiguous_param_buffer "
        "lock_timeout nccl_ub average_in_collective align_param_gather fused foreach "
        "overlap_grad_reduce overlap_param_gather overlap_param_gather_with_optimizer_step",
        COMMUNICATION_NOTE,
    )
    reduce_dtype = "model.fsdp_grad_reduce_dtype"
    fix = f"~{{path}}, with {reduce_dtype}=fp32 or bf16"
    yield refused(at, "grad_sync_dtype", f"use {reduce_dtype}", None, same_as=reduce_dtype, fix=fix)
    sync = "parameters are communicated in their own dtype, which follows from trainer.precision"
    yield refused(at, "param_sync_dtype", sync, None, same_as="trainer.precision", fix="~{path}")
    yield refused(at, "dtype", "the optimizer's state is fp32 (fp64 with precision 64)", "fp32", *_FP32)
    yield refused(at, "amsgrad", "AdamW is used without AMSGrad", False)
    yield refused(at, "dampening", "momentum is used without dampening", 0, 0.0)
    yield refused(at, "min_step", "Adafactor's relative step is at most 0.01", 1e-2)
    yield off(at, "capturable", "CUDA graphs", False)
    sched = f"{at}.sched"
    yield refused(sched, "cycle", "the decay ends at max_steps, in NeMo too, so there is no second cycle", False)
    yield refused(sched, "last_epoch", "the schedule follows the step count, resumed or not", -1)
    yield refused(
        sched, "max_steps_for_lr_sched", "use model.optim.sched.max_steps", None, same_as=f"{sched}.max_steps"
    )
    yield refused(sched, "monitor", "schedules depend on the configuration only", None, "val_loss")
    yield refused(sched, "reduce_on_plateau", "schedules depend on the configuration only", None, False)
    yield refused(sched, "decay_steps", "the decay takes the steps left by warm-up, hold and constant phase", None)


def _data() -> Iterator[Row]:
    at = "model.data"
    yield from history(
        at,
        "skip_warmup delay_data_init "
        "delay_data_mmap mmap_bin_files num_dataset_builder_threads "
        "exchange_indices_distributed legacy_dataset pin_memory persistent_workers prefetch_factor",
        "about NeMo's readers of .bin/.idx data",
    )
    yield refused(
        at, "dataloader_type", "each sample is used once per epoch, in an order shuffled with model.seed", "single"
    )
    yield refused(at, "drop_last", "training uses full batches only", True)
    yield refused(at, "no_seqlen_plus_one_input_tokens", "a sample is sequence + 1 tokens: input and target", False)
    yield refused(at, "pad_samples_to_global_batch_size", "batches are always full", False)
    yield refused(
        at, "data_cache_generation_only", "the first process that needs an index builds it, in vectorized code", False
    )
    yield refused(at, "mock_dataset", "use model.data.data_impl=mock", False)
    yield off(at, "add_fim", "fill-in-the-middle", False)
    yield from rows(
        KeyState.NOT_YET,
        f"{at}.fim",
        "rate spm_rate split_sample fragment_rate no_prefix",
        "fill-in-the-middle",
        switch=f"{at}.add_fim",
    )
    yield from rows(
        KeyState.NOT_YET,
        f"{at}.fim.extra_tokens",
        "prefix middle suffix pad eod",
        "fill-in-the-middle",
        switch=f"{at}.add_fim",
    )
    yield from rows(
        KeyState.REFUSED,
        f"{at}.chat_prompt_tokens",
        "system_turn_start turn_start label_start end_of_turn end_of_name",
        "the chat template defines the format of turns; use model.tokenizer.chat_template",
    )
    yield refused(at, "permutation", "permuting encoder tokens is not a supported objective", False)
    yield refused(at, "ngram_span_length_distribution", "use model.data.geometric_dist", None)
    yield from rows(
        KeyState.REFUSED,
        at,
        "extreme_masked_lm_prob extreme_max_ngram_size extreme_mean_ngram_size extreme_min_ngram_size "
        "extreme_ngram_span_length_distribution prefix_lm_pivot_mean delete_mask_prob",
        "UL2 and BART are not supported; model.data.dataset_type is t5 or t5_prefix_lm",
        switch=f"{at}.dataset_type",
    )
    yield from history(at, "ceil_to_power_2 pad_to_max_length", "about padding: rows have fixed lengths")
    yield from history(at, "get_attention_mask_from_fusion", "about a mask that is not built")


def _fine_tuning_datasets() -> Iterator[Row]:
    own = "model.data.train_ds"
    alike = "validation and test data are read like training data; leave it out"
    for name in ("train_ds", "validation_ds", "test_ds"):
        yield Row(f"model.{name}.*", KeyState.REFUSED, "use model.data.train_ds, validation_ds and test_ds")
        at, trains = f"model.data.{name}", name == "train_ds"
        yield from history(
            at,
            "pin_memory memmap_workers index_mapping_dir ceil_to_power_2 pad_to_max_length global_sample_mapping "
            "get_attention_mask_from_fusion packed_sequence_return_cu_seqlen hf_dataset tokens_to_generate "
            "output_original_text",
            "about NeMo's readers, or its own generation",
        )
        yield from history(at, "num_workers", "see model.data.num_workers, which is for all datasets")
        sizes = "all datasets use the batch sizes of the model; leave it out"
        for size in ("micro_batch_size", "global_batch_size"):
            fix = None if trains else "~{path}"
            yield Row(f"{at}.{size}", KeyState.REFUSED, sizes, same_as=f"model.{size}", fix=fix)
        length = "samples have the model's sequence length; use model.encoder_seq_length"
        yield Row(f"{at}.max_seq_length", KeyState.REFUSED, length, same_as="model.encoder_seq_length")
        yield refused(at, "max_src_seq_length", "use model.seq_length", None)
        longest = "use model.data.seq_length_dec"
        yield Row(f"{at}.max_tgt_seq_length", KeyState.REFUSED, longest, same_as="model.data.seq_length_dec")
        for key, default in (("label_key", "output"), ("context_key", "input"), ("packed_sequence", False)):
            replacement = f"model.data.{key}"
            yield Row(f"{at}.{key}", KeyState.REFUSED, f"use {replacement}", default=default, same_as=replacement)
        yield Row(f"{at}.seed", KeyState.REFUSED, "use model.seed", same_as="model.seed")
        yield refused(at, "add_sep", "write the separator between prompt and answer into prompt_template", False)
        newline = "write the line break into prompt_template, as in '{input}\\n{output}'"
        yield refused(at, "separate_prompt_and_response_with_newline", newline, False)
        yield refused(at, "min_seq_length", "an example is skipped only if it has no tokens to train on", 1, 0)
        yield refused(at, "concat_sampling_technique", "use concat_sampling_probabilities", None)
        yield refused(at, "concat_sampling_temperature", "use concat_sampling_probabilities", None)
        yield refused(at, "file_path", "use file_names", None)
        yield refused(at, "task_name", "use a JSONL file with an input and an output", None)
        yield refused(at, "src_file_name", "use a JSONL file with an input and an output", None)
        yield refused(at, "tgt_file_name", "use a JSONL file with an input and an output", None)
        yield refused(at, "add_bos_to_input", "the input of a T5 begins with its text", False)
        yield refused(at, "add_eos_to_input", "the input of a T5 ends with eos", True)
        yield refused(at, "replace_bos_with_pad", "a T5 decoder always starts with the padding token", False, True)
        if trains:
            order = "each sample is used once per epoch, in an order shuffled with model.seed"
            yield refused(at, "shuffle", order, True)
            yield refused(at, "drop_last", "training uses full batches only", True)
            continue
        yield from history(at, "shuffle drop_last names output_file_path_prefix prediction_file_path_prefix", alike)
        yield from history(at, "concat_sampling_probabilities", "every held-out example is used once")
        for key, default in (
            ("prompt_template", "{input} {output}"),
            ("truncation_field", "input"),
            ("truncation_method", "right"),
            ("add_bos", False),
            ("add_eos", True),
        ):
            yield Row(f"{at}.{key}", KeyState.REFUSED, alike, default=default, same_as=f"{own}.{key}", fix="~{path}")
        scores = "use stoker evaluate, which measures exact match and ROUGE-L, or --json"
        yield refused(at, "write_predictions_to_file", scores, False)
        yield refused(f"{at}.metric", "name", scores, "loss")
        yield from history(f"{at}.metric", "average num_classes class_labels labels_are_strings", scores)


def _tokenizer() -> Iterator[Row]:
    at = "model.tokenizer"
    yield from rows(KeyState.REFUSED, at, "tokenizer_model tokenizer_name", "use model.tokenizer.model and library")
    yield from rows(
        KeyState.REFUSED, at, "training_sample_size", "tokenizers are trained by stoker preprocess --train-tokenizer"
    )
    yield from rows(
        KeyState.REFUSED,
        f"{at}.special_tokens",
        "bos_token cls_token sep_token",
        "samples are token windows without bos, cls or sep tokens",
    )
    yield refused(f"{at}.special_tokens", "unk_token", "the tokenizer's file defines how unknown text is handled", None)
    yield off(at, "delimiter", "tokenizers for tabular data", None)
    yield from history(at, "sentencepiece_legacy use_fast", "about how NeMo loads tokenizers", False)
    yield refused(at, "trust_remote_code", "tokenizers never run code of their own", False)
