"""How messages read."""

from __future__ import annotations

import pytest

from tasks.errors import ConfigError, sentence


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one", "one."),
        ("one.", "one."),
        ("one.. ", "one."),
        ("did you mean `x`?", "did you mean `x`?"),
        ("stop!", "stop!"),
        ("SHA-256 0123...", "SHA-256 0123..."),
    ],
)
def test_sentence_ends_with_one_mark(text: str, expected: str) -> None:
    assert sentence(text) == expected


def test_message_has_three_sentences() -> None:
    error = ConfigError("No key 'sed'. Did you mean 'seed'?", "a key.", "correct it")
    assert str(error) == "No key 'sed'. Did you mean 'seed'? Expected: a key. Fix: correct it."
    assert str(ConfigError("It is gone.")) == "It is gone."
