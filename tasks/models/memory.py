"""How much memory a decoder needs to be trained and to answer, by arithmetic on its shape.

For decoders with RMSNorm and a gated feed-forward layer (Llama, Qwen2, Mistral and the like), as
the workers run them: master weights, gradients and AdamW's two moments in fp32, sharded over the
ranks (FSDP2); computation in fp32 or bf16; attention without a stored matrix of scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

# Bytes of a number.
FP32: Final = 4
COMPUTE_BYTES: Final = {"fp32": 4, "bf16": 2}

KNOWN_TYPES: Final = frozenset({"llama", "mistral", "qwen2", "qwen3", "smollm3"})
# Attention with a bias in its input matrices and none in the output one.
_QKV_BIAS_TYPES: Final = frozenset({"qwen2"})
_GATHERED_LAYERS: Final = 2  # the one in work and the one that is fetched meanwhile


@dataclass(frozen=True)
class ModelShape:
    """What decides the size of a decoder.

    Args:
        width: h, of the residual stream.
        layers: L.
        heads: attention heads.
        kv_heads: heads of keys and values.
        head_width: d, of each head.
        feed_forward: f, width of the gated feed-forward layer.
        vocabulary: V, rows of the embedding.
        tied: the vocabulary head is the embedding.
        qkv_bias: queries, keys and values have a bias.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    feed_forward: int
    vocabulary: int
    tied: bool
    qkv_bias: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape | None:
        """Return the shape that a model's config.json tells; None for another kind of model."""
        if config.get("model_type") not in KNOWN_TYPES:
            return None
        heads = int(config["num_attention_heads"])
        width = int(config["hidden_size"])
        return cls(
            width=width,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_width=int(config.get("head_dim") or width // heads),
            feed_forward=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(config.get("attention_bias", config["model_type"] in _QKV_BIAS_TYPES)),
        )

    @property
    def layer_parameters(self) -> int:
        """Weights of a layer: four attention matrices, three of the feed-forward layer, two norms,
        biases."""
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        attention = self.width * (2 * queries + 2 * keys)
        bias = queries + 2 * keys if self.qkv_bias else 0
        return attention + bias + 3 * self.width * self.feed_forward + 2 * self.width

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding, V h; the vocabulary head has as many."""
        return self.vocabulary * self.width

    @property
    def n_parameters(self) -> int:
        """All weights of the language model, tied ones once."""
        ends = self.embedding_parameters * (1 if self.tied else 2) + self.width
        return self.layers * self.layer_parameters + ends

    @property
    def n_value_parameters(self) -> int:
        """All weights with one score per token (and its bias) instead of the vocabulary head."""
        ends = self.embedding_parameters + self.width
        return self.layers * self.layer_parameters + ends + self.width + 1

    def adapter_parameters(self, rank: int, targets: str | tuple[str, ...]) -> int:
        """Return the weights of a low-rank adapter: rank (in + out) for each matrix it adapts.

        Args:
            targets: names such as ``q_proj``; ``all-linear`` is all seven of a layer.
        """
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        sizes = {
            "q_proj": self.width + queries,
            "k_proj": self.width + keys,
            "v_proj": self.width + keys,
            "o_proj": queries + self.width,
            "gate_proj": self.width + self.feed_forward,
            "up_proj": self.width + self.feed_forward,
            "down_proj": self.feed_forward + self.width,
        }
        names = (targets,) if isinstance(targets, str) else targets
        if targets == "all-linear":
            names = tuple(sizes)
        return self.layers * rank * sum(sizes.get(name, 0) for name in names)

    def saved_bytes_per_token(self, dtype: str) -> int:
        """Return what one layer keeps of a token for the backward pass.

        With b bytes a number: each norm its fp32 input, its normalised input and its result
        (2 (4 + 2 b) h), attention queries, keys, values and result (4 b heads d), the feed-forward
        layer its gate, the gate's activation, the other half and their product (4 b f).
        """
        b = COMPUTE_BYTES[dtype]
        norms = 2 * (FP32 + 2 * b) * self.width
        return norms + 4 * b * self.heads * self.head_width + 4 * b * self.feed_forward

    def activation_bytes(self, tokens: int, dtype: str, *, checkpointing: bool) -> int:
        """Return what a micro-batch keeps for the backward pass: all layers, or with checkpointing
        the input of each (b h) and one layer whole."""
        layer = self.saved_bytes_per_token(dtype)
        if checkpointing:
            return tokens * (self.layers * COMPUTE_BYTES[dtype] * self.width + layer)
        return tokens * self.layers * layer

    def logits_bytes(self, tokens: int, dtype: str, *, soft_labels: bool = False) -> int:
        """Return what a micro-batch needs at the vocabulary head: logits, log-probabilities and
        their gradient (3 b V a token), and for soft labels two more in fp32 (8 V)."""
        per_entry = 3 * COMPUTE_BYTES[dtype] + (2 * FP32 if soft_labels else 0)
        return tokens * per_entry * self.vocabulary

    def gathered_bytes(self, dtype: str) -> int:
        """Return the whole weights that FSDP2 has in hand, and gradients before they are shared.

        Embedding or head, which stay whole during a pass, and two layers in b bytes; the larger of
        the two as gradients in b bytes and, to be summed, in fp32.
        """
        b = COMPUTE_BYTES[dtype]
        layers = _GATHERED_LAYERS * self.layer_parameters
        whole = b * (self.embedding_parameters + layers)
        return whole + (b + FP32) * max(self.embedding_parameters, layers)

    def generation_bytes(self, prompts: int, prompt_tokens: int, new_tokens: int) -> int:
        """Return what transformers needs to answer prompts together, in fp32: weights (4 N), keys
        and values of all tokens (8 L kv_heads d each), and either reading the prompts, which takes
        three widths of the feed-forward layer and four of the residual stream a token, or the
        logits of the last token and their softmax.
        """
        cached = 2 * FP32 * self.layers * self.kv_heads * self.head_width
        reading = prompts * prompt_tokens * FP32 * (3 * self.feed_forward + 4 * self.width)
        last = prompts * 2 * FP32 * self.vocabulary
        cache = prompts * (prompt_tokens + new_tokens) * cached
        return FP32 * self.n_parameters + cache + max(reading, last)


# The models that configs/ names, so that an estimate needs no download.
KNOWN_MODELS: Final = {
    "Qwen/Qwen2.5-0.5B-Instruct": ModelShape(
        width=896, layers=24, heads=14, kv_heads=2, head_width=64, feed_forward=4864,
        vocabulary=151_936, tied=True, qkv_bias=True,
    ),
    "Qwen/Qwen2.5-7B-Instruct": ModelShape(
        width=3584, layers=28, heads=28, kv_heads=4, head_width=128, feed_forward=18_944,
        vocabulary=152_064, tied=False, qkv_bias=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class RoleBytes:
    """Memory of a model's state on one rank.

    Args:
        weights, gradients, optimizer: in bytes.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0

    def __add__(self, other: RoleBytes) -> RoleBytes:
        return RoleBytes(
            self.weights + other.weights,
            self.gradients + other.gradients,
            self.optimizer + other.optimizer,
        )

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


def frozen_bytes(n_parameters: int, ranks: int) -> RoleBytes:
    """Return the state of a model that only computes: 4 N / ranks."""
    return RoleBytes(weights=FP32 * n_parameters // ranks)


def trained_bytes(n_parameters: int, ranks: int) -> RoleBytes:
    """Return the state of a model of which all weights learn: 4 N of weights, 4 N of gradients and
    8 N of AdamW's moments, each over the ranks."""
    share = FP32 * n_parameters // ranks
    return RoleBytes(share, share, 2 * share)


def adapted_bytes(n_parameters: int, n_trained: int, ranks: int) -> RoleBytes:
    """Return the state of a model with N frozen weights and an adapter that learns."""
    return frozen_bytes(n_parameters, ranks) + trained_bytes(n_trained, ranks)
