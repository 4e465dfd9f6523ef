"""Tokenizer files of Hugging Face folders, and the `model.tokenizer` keys that load them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...models.config.model import Family
from ..checkpoint.hf_files import read_object, resolve_in_folder
from ..config.resolved_run import DataSpec
from ..config.schema.trainer_and_data import TokenizerBlock
from ..data.tasks.chat_files import CHAT_TEMPLATE_FILE, load_chat_template, special_tokens_map
from ..data.tasks.sentinels import USUAL_MASK_TOKENS
from ..data.tasks.task_samples import tokenizer_for_task
from ..data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from ..data.tokenizers.tokenizer_config import TOKENIZER_CONFIG_FILE, configured_tokens
from ..data.tokenizers.tokenizer_files import MERGES_FILE, TOKENIZER_JSON, VOCAB_FILE, tokenizer_from_config
from ..data.tokenizers.tokenizer_json import tokens_by_id
from ..data.tokenizers.vocabulary import configured_tokenizer
from ..utils.environment import user_path
from ..utils.errors import UserError
from ..utils.safetensors_io import DamagedFileError, read_json

TOKENIZER_FOLDER = "tokenizer"
_MODELS = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
_FILES = (
    *(TOKENIZER_JSON, TOKENIZER_CONFIG_FILE, VOCAB_FILE, MERGES_FILE, *_MODELS),
    *("special_tokens_map.json", "added_tokens.json", "vocab.txt", CHAT_TEMPLATE_FILE, "generation_config.json"),
)
"""Names of the files that are copied."""
_FILE_KEYS = ("library", "type", "model", "vocab_file", "merge_file")
"""Keys of `model.tokenizer` that locate its files."""
_MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """Tokenizer of a Hugging Face model.

    Attributes:
        files: name to path of the tokenizer files present.
        keys: `model.tokenizer` keys, with the placeholder `{folder}` for the folder of the files.
        folder: folder of the files; None if no files are needed.
    """

    files: Mapping[str, Path]
    keys: Mapping[str, Any]
    folder: Path | None = None

    def keys_for(self, folder: Path) -> dict[str, Any]:
        """Return the `model.tokenizer` keys for files in `folder`."""
        return {
            name: value.replace("{folder}", str(folder)) if isinstance(value, str) else value
            for name, value in self.keys.items()
        }

    def copy(self, folder: Path) -> None:
        """Copy the files to a folder."""
        folder.mkdir(exist_ok=True)
        for name, path in self.files.items():
            shutil.copyfile(path, folder / name)


def find_tokenizer(folder: Path, family: Family, vocab_size: Any) -> TokenizerFolder:
    """Find the tokenizer in a folder.

    Raises:
        UserError: there is no supported tokenizer.
    """
    files = {name: path for name in _FILES if (path := resolve_in_folder(folder, name)) is not None}
    for name, path in files.items():
        if path.stat().st_size > _MAX_BYTES:
            raise UserError(f"{folder / name} has more than {_MAX_BYTES >> 20} MiB, too large for a tokenizer file")
    if TOKENIZER_JSON in files:
        found = TokenizerFolder(files, {"library": "huggingface", "type": "{folder}"}, folder)
        mask = _named_mask(found, folder) if family == "bert" else None
        return found if mask is None else replace(found, keys={**found.keys, "special_tokens": {"mask_token": mask}})
    for model in _MODELS:
        if model in files:
            return TokenizerFolder(files, {"library": "sentencepiece", "model": f"{{folder}}/{model}"}, folder)
    if VOCAB_FILE in files and MERGES_FILE in files:
        keys = {"library": "megatron", "type": "GPT2BPETokenizer"}
        paths = {"vocab_file": f"{{folder}}/{VOCAB_FILE}", "merge_file": f"{{folder}}/{MERGES_FILE}"}
        return TokenizerFolder(files, keys | paths, folder)
    settings = read_object(folder, TOKENIZER_CONFIG_FILE) or {}
    if settings.get("tokenizer_class") == "ByT5Tokenizer" or (family == "t5" and vocab_size == 384):
        return TokenizerFolder(files, {"library": "byte-level"})
    raise UserError(
        f"{folder} holds no supported tokenizer ({TOKENIZER_JSON}, {', '.join(_MODELS)}, or {VOCAB_FILE} with "
        f"{MERGES_FILE}); give one with --tokenizer FOLDER, or --tokenizer byte-level"
    )


def _named_mask(found: TokenizerFolder, folder: Path) -> str | None:
    """Return the mask token if the folder's tokenizer_config.json gives an unusual one."""
    token = configured_tokens(read_object(folder, TOKENIZER_CONFIG_FILE) or {}, ["mask_token"]).get("mask_token")
    if token is None or token in USUAL_MASK_TOKENS:
        return None
    tokenizer = tokenizer_from_config(TokenizerBlock.model_validate(found.keys_for(folder)))
    return None if tokenizer.token_id(token) is None else token


def tokenizer_from_option(name: str, family: Family) -> TokenizerFolder:
    """Return the tokenizer given by `--tokenizer`: a folder, or `byte-level`."""
    if name == "byte-level":
        return TokenizerFolder({}, {"library": "byte-level"})
    folder = Path(name)
    if not folder.is_dir():
        raise UserError(f"--tokenizer {name}: there is no such folder")
    return find_tokenizer(folder, family, None)


def special_ids(settings: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return `bos_token_id`, `eos_token_id` and `pad_token_id` for a config.json.

    Args:
        settings: content of tokenizer_config.json, empty without one.
    """
    ids = {"bos_token": None, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    for name, token in configured_tokens(settings, ids).items():
        named = tokenizer.token_id(token)
        ids[name] = ids[name] if named is None else named
    return {f"{name}_id": id_ for name, id_ in ids.items()}


def build_tokenizer(spec: DataSpec) -> Tokenizer:
    """Return the tokenizer of a configuration, with the tokens its task adds; byte-level if none is configured.

    Raises:
        UserError: its files cannot be read.
    """
    return tokenizer_for_task(spec, configured_tokenizer(spec))


def tokenizer_for_vocabulary(spec: DataSpec, vocab_size: int) -> Tokenizer:
    """Return the same as `build_tokenizer`, checked against the model's vocabulary size.

    Raises:
        UserError: its files cannot be read, or it has more tokens than the model, alone or with those its task adds.
    """
    alone = configured_tokenizer(spec)
    if alone.vocab_size > vocab_size:
        raise UserError(
            f"the tokenizer has {alone.vocab_size:,} tokens, but `vocab_size` is {vocab_size:,}: it belongs to another "
            "model"
        )
    tokenizer = tokenizer_for_task(spec, alone)
    if tokenizer.vocab_size <= vocab_size:
        return tokenizer
    if spec.family == "bert":
        raise UserError(
            f"the tokenizer has no mask token: neither {' nor '.join(USUAL_MASK_TOKENS)}; set the one that it has with "
            f'"mask_token" in {TOKENIZER_CONFIG_FILE}, or give another tokenizer with --tokenizer FOLDER'
        )
    raise UserError(
        f"the tokenizer lacks {tokenizer.vocab_size - alone.vocab_size:,} of the sentinels <extra_id_0>, "
        f"<extra_id_1>, ..., and `vocab_size` ({vocab_size:,}) has no room for them; give the tokenizer that has them "
        "with --tokenizer FOLDER"
    )


def original_tokenizer_files(spec: DataSpec, document: Mapping[str, Any]) -> TokenizerFolder | None:
    """Return the files a run's tokenizer was loaded from, if they still exist and still give the same tokenizer."""
    keys = spec.tokenizer
    named = (keys.type or keys.model) if keys.library == "huggingface" else keys.model or keys.vocab_file
    if keys.library in ("byte-level", "char") or not named:
        return None
    try:
        path = user_path(named, "model.tokenizer")
        if not (path.is_dir() or path.is_file()) or build_tokenizer(spec).to_dict() != document:
            return None
        return find_tokenizer(path if path.is_dir() else path.parent, spec.family, None)
    except (UserError, OSError, ValueError):
        return None


def given_tokenizer_files(name: str, spec: DataSpec, document: Mapping[str, Any]) -> TokenizerFolder:
    """Return the files given by `--tokenizer` for a checkpoint; they must give the same tokenizer.

    Raises:
        UserError: there are no tokenizer files, or they give other tokens.
    """
    found = tokenizer_from_option(name, spec.family)
    kept = {key: value for key, value in spec.tokenizer.model_dump().items() if key not in _FILE_KEYS}
    keys = TokenizerBlock.model_validate(kept | found.keys_for(found.folder or Path(name)))
    if build_tokenizer(replace(spec, tokenizer=keys)).to_dict() != document:
        raise UserError(f"--tokenizer {name} differs from the tokenizer of the checkpoint")
    return found


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write tokenizer files for transformers from a checkpoint's tokenizer.

    Raises:
        UserError: transformers has no equivalent tokenizer.
    """
    document = tokenizer.to_dict()
    if isinstance(tokenizer, ByteTokenizer):
        settings: dict[str, Any] = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": tokenizer.sentinels}
    elif document["tokenizer"] == "huggingface":
        (folder / TOKENIZER_JSON).write_text(document["definition"], encoding="utf-8")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special_tokens_map(tokenizer)}
        names = tokens_by_id(document["definition"])
        for kind, id_ in (("eos", tokenizer.eos_id), ("pad", tokenizer.pad_id)):
            if id_ in names:
                settings[f"{kind}_token"] = names[id_]
    else:
        raise UserError(
            f"the tokenizer of this checkpoint ({document['tokenizer']}) cannot be written for transformers, and its "
            "files have moved; give them with --tokenizer FOLDER"
        )
    (folder / TOKENIZER_CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    write_template(folder, tokenizer)


def write_template(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the chat template of a tokenizer next to its files, unless they contain it."""
    beside = load_chat_template(folder, str(folder))
    if tokenizer.chat_template is not None and (beside is None or beside.source != tokenizer.chat_template.source):
        (folder / CHAT_TEMPLATE_FILE).write_text(tokenizer.chat_template.source, encoding="utf-8")


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the tokenizer_config.json of a written folder, empty if there is none."""
    path = folder / TOKENIZER_CONFIG_FILE
    try:
        settings = read_json(path) if path.is_file() else {}
    except DamagedFileError:
        return {}
    return settings if isinstance(settings, dict) else {}
