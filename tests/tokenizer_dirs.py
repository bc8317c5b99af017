"""A byte-level tokenizer with a chat template, built in the test run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ["<pad>", "<bos>", "</s>", "<|start|>", "<|end|>"]
CORPUS = ["user assistant system", "the cat sat on the mat", "hello world, how are you?"]

MakeModelDir = Callable[..., Path]


def train_backend(vocab_size: int = 300) -> Tokenizer:
    """Train a byte-level BPE whose automatic special tokens would add a second BOS."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A </s>", special_tokens=[("<bos>", 1), ("</s>", 2)]
    )
    return backend


@pytest.fixture(scope="session")
def make_model_dir(tmp_path_factory: pytest.TempPathFactory) -> MakeModelDir:
    """Return a function that saves a tokenizer; ``chat_template=None`` leaves the template out."""

    def make(
        chat_template: str | None = CHAT_TEMPLATE, eos_token: str = "</s>", vocab_size: int = 300
    ) -> Path:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=train_backend(vocab_size),
            bos_token="<bos>",
            eos_token=eos_token,
            pad_token="<pad>",
        )
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        directory = tmp_path_factory.mktemp("model")
        tokenizer.save_pretrained(directory)
        return directory

    return make


@pytest.fixture(scope="session")
def model_dir(make_model_dir: MakeModelDir) -> Path:
    return make_model_dir()


@pytest.fixture(scope="session")
def chat_template() -> str:
    return CHAT_TEMPLATE
