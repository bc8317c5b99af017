"""A tiny Llama with its own tokenizer, built from scratch: no download, always the same bytes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from tasks.artifacts import appearing_directory
from tasks.config.shared import TinyModelConfig
from tasks.errors import ConfigError

PAD: Final = "<|pad|>"
BOS: Final = "<|bos|>"
END_OF_TURN: Final = "<|im_end|>"
ROLES: Final = {
    "system": "<|im_system|>",
    "user": "<|im_user|>",
    "assistant": "<|im_assistant|>",
}
MAX_PARAMETERS: Final = 2_000_000

_ROPE_THETA: Final = 10_000.0
_INITIALIZER_RANGE: Final = 0.06
_SMALLEST_VOCABULARY: Final = 256 + 3 + len(ROLES)  # every byte and the special tokens
# One token marks a role and one ends a turn, so that a short dialogue stays short.
_CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|im_' + message['role'] + '|>' + message['content'] | trim + '<|im_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>' }}{% endif %}"
)


def _feed_forward_size(spec: TinyModelConfig) -> int:
    return 3 * spec.hidden_size


def count_tiny_parameters(spec: TinyModelConfig) -> int:
    """Count weights at the full vocabulary; the embeddings are tied, there are no biases."""
    attention = 4 * spec.hidden_size**2
    feed_forward = 3 * spec.hidden_size * _feed_forward_size(spec)
    block = attention + feed_forward + 2 * spec.hidden_size
    return spec.vocab_size * spec.hidden_size + spec.n_layers * block + spec.hidden_size


def build_tiny_model(
    directory: Path, texts: Iterable[str], spec: TinyModelConfig, seed: int = 0
) -> Path:
    """Write a randomly initialised Llama and a BPE tokenizer trained on ``texts``.

    The directory is in plain transformers format and appears whole or not at all. The same texts,
    spec and seed give the same bytes. The global random state is left as it was. Texts with few
    distinct words give fewer than ``vocab_size`` tokens.

    Raises:
        ConfigError: a size that is too small or too large.
    """
    if spec.vocab_size < _SMALLEST_VOCABULARY:
        raise ConfigError(
            f"vocab_size is {spec.vocab_size}",
            expected=f"at least {_SMALLEST_VOCABULARY}: every byte and the special tokens",
            fix="raise vocab_size",
        )
    n_parameters = count_tiny_parameters(spec)
    if n_parameters > MAX_PARAMETERS:
        raise ConfigError(
            f"The tiny model would have {n_parameters} parameters",
            expected=f"at most {MAX_PARAMETERS}",
            fix="lower hidden_size, n_layers or vocab_size, or name a real model as source",
        )
    with appearing_directory(directory) as temporary:
        tokenizer = _train_tokenizer(texts, spec)
        tokenizer.save_pretrained(temporary)
        _initialise_model(spec, seed, tokenizer).save_pretrained(temporary)
    return directory


def _train_tokenizer(texts: Iterable[str], spec: TinyModelConfig) -> PreTrainedTokenizerFast:
    bpe = Tokenizer(BPE())
    # Digits one by one, so that a number's tokens do not depend on the training texts.
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab_size,
        special_tokens=[PAD, BOS, END_OF_TURN, *ROLES.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=END_OF_TURN,
        additional_special_tokens=list(ROLES.values()),
        chat_template=_CHAT_TEMPLATE,
        model_max_length=spec.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )


def _initialise_model(
    spec: TinyModelConfig, seed: int, tokenizer: PreTrainedTokenizerFast
) -> LlamaForCausalLM:
    token_ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=_feed_forward_size(spec),
        num_hidden_layers=spec.n_layers,
        num_attention_heads=spec.n_heads,
        num_key_value_heads=spec.n_heads,
        max_position_embeddings=spec.max_position_embeddings,
        rope_theta=_ROPE_THETA,
        initializer_range=_INITIALIZER_RANGE,
        tie_word_embeddings=True,
        dtype="float32",
        **token_ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(**token_ids)
    return model
