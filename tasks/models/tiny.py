"""A tiny Llama with its own tokenizer, built from scratch: no download, always the same bytes."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
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

_N_BYTES: Final = 256
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


@dataclass(frozen=True, slots=True)
class TinySpec:
    """Size of the tiny model.

    Attributes:
        hidden_size: width of the residual stream.
        n_layers: transformer blocks.
        n_heads: attention heads; each has keys and values of its own.
        vocab_size: byte-level BPE tokens at most, special ones included; texts with few distinct
            words have no more to merge before that.
        max_position_embeddings: longest sequence in tokens.
        rope_theta: base of the rotary position frequencies.
        initializer_range: standard deviation of the initial weights.
    """

    hidden_size: int = 128
    n_layers: int = 2
    n_heads: int = 4
    vocab_size: int = 512
    max_position_embeddings: int = 512
    rope_theta: float = 10_000.0
    initializer_range: float = 0.06

    def __post_init__(self) -> None:
        self._check_shape()
        if self.n_parameters > MAX_PARAMETERS:
            raise ConfigError(
                f"The tiny model would have {self.n_parameters} parameters",
                expected=f"at most {MAX_PARAMETERS}",
                fix="lower hidden_size, n_layers or vocab_size, or name a real model as source",
            )

    @property
    def intermediate_size(self) -> int:
        """Return the width of the gated feed-forward layer."""
        return 3 * self.hidden_size

    @property
    def n_parameters(self) -> int:
        """Count weights at the full vocabulary; the embeddings are tied, there are no biases."""
        attention = 4 * self.hidden_size**2
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        block = attention + feed_forward + 2 * self.hidden_size
        return self.vocab_size * self.hidden_size + self.n_layers * block + self.hidden_size

    def _check_shape(self) -> None:
        smallest_vocab = _N_BYTES + 3 + len(ROLES)
        if self.vocab_size < smallest_vocab:
            raise ConfigError(
                f"vocab_size is {self.vocab_size}",
                expected=f"at least {smallest_vocab}: every byte and the special tokens",
                fix="raise vocab_size",
            )
        if min(self.hidden_size, self.n_layers, self.n_heads, self.max_position_embeddings) < 1:
            raise ConfigError(f"A size in {self} is below 1", "positive sizes", "raise it")
        if self.hidden_size % (2 * self.n_heads):
            raise ConfigError(
                f"hidden_size {self.hidden_size} does not fit {self.n_heads} heads",
                expected="an even width per head, since rotary positions pair up dimensions",
                fix="make hidden_size a multiple of 2 * n_heads",
            )


def build_tiny_model(
    directory: str | Path, texts: Iterable[str], spec: TinySpec | None = None, seed: int = 0
) -> Path:
    """Write a randomly initialised Llama and a BPE tokenizer trained on ``texts``.

    The directory is in plain transformers format and appears whole or not at all. The same texts,
    spec and seed give the same bytes. The global random state is left as it was.

    Raises:
        ConfigError: the directory already holds something.
    """
    spec = spec or TinySpec()
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise _occupied(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        tokenizer = _train_tokenizer(texts, spec)
        tokenizer.save_pretrained(temporary)
        _initialise_model(spec, seed, tokenizer).save_pretrained(temporary)
        temporary.chmod(0o755)
        _move(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def _move(temporary: Path, target: Path) -> None:
    try:
        temporary.replace(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise _occupied(target) from error
        raise


def _occupied(target: Path) -> ConfigError:
    return ConfigError(
        f"{target} is not empty",
        expected="a new or empty directory for the tiny model",
        fix="remove it or name another",
    )


def _train_tokenizer(texts: Iterable[str], spec: TinySpec) -> PreTrainedTokenizerFast:
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
    spec: TinySpec, seed: int, tokenizer: PreTrainedTokenizerFast
) -> LlamaForCausalLM:
    token_ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.n_layers,
        num_attention_heads=spec.n_heads,
        num_key_value_heads=spec.n_heads,
        max_position_embeddings=spec.max_position_embeddings,
        rope_theta=spec.rope_theta,
        initializer_range=spec.initializer_range,
        tie_word_embeddings=True,
        dtype="float32",
        **token_ids,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(**token_ids)
    return model
