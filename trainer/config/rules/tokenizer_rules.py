"""Rules of `model.tokenizer`: files and keys of each library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ....models.config.key_block import Finding
from ..schema.trainer_and_data import TOKENIZERS, TokenizerBlock
from .rule_context import RuleContext, no_effect, unused


def tokenizer_needs_text_data(context: RuleContext) -> Iterator[Finding]:
    """The tokenizer has no effect with mock data."""
    model = context.root.model
    library = model.tokenizer.library
    if library != "byte-level" and model.data.data_impl == "mock":
        keys = ("type", "model", "vocab_file", "merge_file")
        files = [f"model.tokenizer.{name}" for name in keys if getattr(model.tokenizer, name) is not None]
        yield Finding.warning(
            ("model.tokenizer.library", "model.data.data_impl", *files),
            f"`{library}` has no effect with `data_impl: mock`: random tokens have no text",
            " ".join(["model.tokenizer.library=byte-level", *(f"~{path}" for path in files)]),
        )


_TOKENIZER_KEYS: Mapping[str, tuple[str, ...]] = {
    "type": ("huggingface", "megatron", "checkpoint"),
    "model": ("huggingface", "sentencepiece"),
    "vocab_file": ("megatron",),
    "merge_file": ("megatron",),
    "additional_special_tokens": ("huggingface", "megatron", "sentencepiece"),
    "special_tokens": ("huggingface", "megatron", "sentencepiece"),
}
"""Libraries for which each key of `model.tokenizer` acts."""


def _missing_files(at: str, keys: TokenizerBlock) -> Iterator[Finding]:
    library = keys.library
    needed = {"sentencepiece": ("model",), "megatron": ("vocab_file", "merge_file"), "checkpoint": ("type",)}.get(
        library, ()
    )
    if library == "megatron" and keys.type not in (None, "GPT2BPETokenizer"):  # another type has other files
        files = "".join(f" {at}.{name}=FILE" for name in needed)
        yield Finding.error(
            (f"{at}.type", f"{at}.library"),
            f"`library: megatron` supports one `type`, GPT2BPETokenizer, not {keys.type}",
            f"{at}.type=GPT2BPETokenizer{files}, or {at}.library=huggingface {at}.type=FILE_OR_FOLDER, "
            "of a tokenizer.json",
        )
        return
    for name in needed:
        if getattr(keys, name) is None:
            yield Finding.error(
                (f"{at}.{name}", f"{at}.library"),
                f"`library: {library}` needs `{name}`; stoker does not download tokenizers",
                f"{at}.{name}={'DIR/checkpoints/step-N' if library == 'checkpoint' else 'FILE'}",
            )
    if library == "huggingface" and (keys.type is None) == (keys.model is None):
        yield Finding.error(
            (f"{at}.type", f"{at}.library", f"{at}.model"),
            "`library: huggingface` needs the path of one tokenizer.json, in `type` or in `model`",
            f"{at}.type=FILE_OR_FOLDER" if keys.type is None else f"~{at}.model",
        )


def tokenizer_files_are_given(context: RuleContext) -> Iterator[Finding]:
    """Each library needs its own files, except for mock data, which reads none; other keys have no effect."""
    keys = context.root.model.tokenizer
    at, library = "model.tokenizer", keys.library
    if context.root.model.data.data_impl != "mock":
        yield from _missing_files(at, keys)
    defaults = type(keys).model_fields
    for name, libraries in _TOKENIZER_KEYS.items():
        value = getattr(keys, name)
        if library == "checkpoint" and name == "special_tokens":  # has the tokens; which is the mask, a key says
            value = value.model_copy(update={"mask_token": None})
        if library not in libraries and value != defaults[name].default:
            yield no_effect(f"{at}.{name}", f"{at}.library", f"with `library: {library}`")
    if library in TOKENIZERS and keys.kwargs:
        yield from unused(context, f"{at}.kwargs", f"{at}.library", f"with `library: {library}`")
