"""From a GGUF file to a model directory in transformers format with safetensors weights."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tasks.errors import ModelError
from tasks.models.loading import load_causal_lm

# Raised when the same file gives another model.
CONVERSION_VERSION: Final = 1

_PRE_TOKENIZER_FIELD: Final = "tokenizer.ggml.pre"
# GGUF names a pre-tokenizer by a word. This one takes digits one by one before the byte level,
# which transformers leaves out; it decides the tokens of blanks before a number.
_SINGLE_DIGITS: Final = "smollm"
_CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def convert_gguf(file: Path, directory: Path, end_of_turn: str, pad_token: str) -> dict[str, str]:
    """Write the model and tokenizer of a GGUF file; quantised weights become fp32.

    The file's own chat template is kept, ChatML put where it has none.

    Args:
        file: the GGUF file.
        directory: an existing, empty directory.
        end_of_turn: special token that ends a turn; the eos of tokenizer, config and generation.
        pad_token: special token that pads.

    Returns:
        Version by package of what made the conversion.

    Raises:
        ModelError: the file does not convert to a whole model, or lacks one of the tokens.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model, info = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
        )
        pre_tokenizer = _read_pre_tokenizer(file)
    # transformers and gguf raise ImportError, ValueError, KeyError or RuntimeError here.
    except Exception as error:
        detail = str(error).strip().partition("\n")[0][:300]
        raise _unconvertible(file, f"{type(error).__name__}: {detail}") from error
    if info["missing_keys"] or info["unexpected_keys"]:
        raise _unconvertible(file, "its tensors are not those of its architecture")
    _correct_tokenizer(tokenizer, pre_tokenizer, file, (end_of_turn, pad_token))
    tokenizer.model_max_length = model.config.max_position_embeddings
    _correct_config(model, tokenizer)
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    load_causal_lm(directory)  # what was written is what transformers reads back, tensor by tensor
    names = ("transformers", "tokenizers", "gguf", "torch")
    return {name: importlib.metadata.version(name) for name in names}


def _read_pre_tokenizer(file: Path) -> str:
    from gguf import GGUFReader

    field = GGUFReader(file).get_field(_PRE_TOKENIZER_FIELD)
    return "" if field is None else str(field.contents())


def _correct_tokenizer(
    tokenizer: Any, pre_tokenizer: str, file: Path, tokens: tuple[str, str]
) -> None:
    """Name the right special tokens, and set what the conversion of transformers leaves out."""
    known = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    for token in tokens:
        if token not in known:
            raise _unconvertible(file, f"it has no special token {token}")
    end_of_turn, pad_token = tokens
    # A plain string would be added once more where the vocabulary has it with other flags.
    tokenizer.eos_token = AddedToken(end_of_turn, special=True, normalized=False)
    tokenizer.pad_token = AddedToken(pad_token, special=True, normalized=False)
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.chat_template = tokenizer.chat_template or _CHATML
    backend = tokenizer.backend_tokenizer
    if pre_tokenizer == _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
        )
        # The converted decoder would also turn the text "<0x41>" into a byte.
        backend.decoder = decoders.ByteLevel()


def _correct_config(model: Any, tokenizer: Any) -> None:
    token_ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for name, token_id in token_ids.items():
        setattr(model.config, name, token_id)
    model.generation_config = GenerationConfig(**token_ids)


def _unconvertible(file: Path, detail: str) -> ModelError:
    return ModelError(
        f"{file.name} cannot be converted: {detail}",
        expected="a GGUF file of a language model that transformers converts",
        fix="install the versions in requirements.lock, gguf among them, or name a directory in "
        "transformers format as model.source",
    )
