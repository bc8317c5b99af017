"""Evaluation: questions, who answers them, who judges, and what is good enough."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from tasks.config.shared import (
    GenerationConfig,
    PositiveFloat,
    PositiveInt,
    PromotionConfig,
    RenderingConfig,
    RuntimeConfig,
    Section,
    StageConfig,
    setting,
)

CHAIN_MODELS = ("base", "policy", "student")
PAIR_FILE: Final = "pair"
_LONGEST_NAME_BYTES: Final = 200
_SET_BY_THE_STAGE: Final = frozenset(
    {
        *("--model", "--served-model-name", "--generation-config", "--config"),
        *("--host", "--port", "--uds", "--root-path"),
        *("--api-key", "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs"),
    }
)


def checked_address(value: str) -> str:
    """Return an address without a slash at its end.

    Raises:
        ValueError: no http(s) address, or one with a password in it.
    """
    try:
        parts = urlsplit(value)
        has_secret = parts.username is not None or parts.password is not None
        is_complete = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"is no address: {error}") from None
    if has_secret:
        raise ValueError("holds a user name or password; give the key by api_key_env")
    if not is_complete:
        raise ValueError(f"{value!r} is not http://host/... or https://host/...")
    return value.rstrip("/")


def _is_file_name(name: str) -> bool:
    """Tell whether answers and judgments of a model can be in files of its name."""
    is_plain = name.isprintable() and not {"/", "\\"} & set(name)
    is_named = bool(name.strip()) and name not in (".", "..")
    return is_plain and is_named and len(name.encode()) <= _LONGEST_NAME_BYTES


class EndpointConfig(Section):
    """A server that speaks OpenAI's chat completions."""

    base_url: str = setting(
        "https://api.openai.com/v1", description="Address up to and without /chat/completions."
    )
    model: str = Field("", description="Name of the model on the server.")
    api_key_env: str | None = setting(
        "OPENAI_API_KEY", description="Environment variable with the key; null where none is asked."
    )
    max_concurrency: PositiveInt = setting(16, description="Requests at the same time.")
    timeout_seconds: PositiveFloat = setting(
        120.0, description="Of one attempt, from its start to the last byte."
    )
    attempts: PositiveInt = setting(6, description="Of one request, the first one included.")
    backoff_seconds: PositiveFloat = setting(
        0.5, description="Before the second attempt; doubled for each one after it."
    )
    max_wait_seconds: PositiveFloat = setting(
        300.0, description="Longest wait that the server may ask for with Retry-After."
    )
    max_requests: PositiveInt | None = setting(None, description="Budget, all attempts counted.")
    max_tokens: PositiveInt | None = setting(
        None, description="Budget of prompt and completion tokens together."
    )

    @field_validator("api_key_env")
    @classmethod
    def _check_variable(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("names no variable; null is for a server that asks for no key")
        return value

    @field_validator("base_url")
    @classmethod
    def _check_address(cls, value: str) -> str:
        return checked_address(value)


class VllmConfig(Section):
    """`vllm serve`, started on loopback for one model after the other."""

    command: tuple[str, ...] = setting(
        ("vllm", "serve"),
        description="What comes before the model's directory; vLLM may live in an environment of "
        "its own: [/opt/vllm/bin/vllm, serve].",
    )
    arguments: tuple[str, ...] = Field(
        ("--gpu-memory-utilization=0.6",),
        description="Further ones, like --tensor-parallel-size=2. The reward model stays on the "
        "first GPU meanwhile.",
    )
    start_seconds: PositiveFloat = setting(900.0, description="Longest wait for the server.")

    @field_validator("command")
    @classmethod
    def _check_command(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or not value[0].strip():
            raise ValueError("names no program; the usual one is [vllm, serve]")
        return value

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        given = {argument.split("=")[0].replace("_", "-") for argument in value}
        taken = sorted(given & _SET_BY_THE_STAGE)
        if taken:
            raise ValueError(
                f"{taken} would change how the stage reaches the server or samples; leave them out"
            )
        return value


class JudgingConfig(Section):
    """How a language model judges; the reward model needs none of it."""

    endpoint: EndpointConfig = EndpointConfig()
    model: str | None = Field(
        None, description="Judge `transformers`: a model directory, hub id or package:..."
    )
    prompts: str = Field("own", description="'own', or a judge_prompts.jsonl in FastChat's format.")
    references: str | None = Field(
        None,
        description="reference_answer/*.jsonl in FastChat's format, for questions without their "
        "own reference.",
    )
    reference_categories: tuple[str, ...] = Field(
        ("math", "reasoning", "coding"), description="Categories that are judged with a reference."
    )
    pairwise: bool = Field(False, description="Also compare with the base model, in both orders.")
    repeats: PositiveInt = Field(1, description="Judgments of each answer.")
    rating_attempts: PositiveInt = Field(2, description="Asked again where no rating is found.")
    temperature: float = Field(0.0, ge=0.0, description="Of the judge; 0 is greedy.")
    max_new_tokens: PositiveInt = Field(1024, description="Longest judgment.")
    max_prompt_tokens: PositiveInt = Field(
        4096, description="Judge `transformers`: an answer that does not fit is not judged."
    )
    batch_size: PositiveInt = setting(8, description="Judge `transformers`: judgments at a time.")


class AnswersConfig(Section):
    """Who writes the answers to the questions."""

    backend: Literal["transformers", "vllm", "openai"] = Field(
        "transformers",
        description="The chain's own models in this process or by vLLM, or any servers.",
    )
    vllm: VllmConfig = VllmConfig()
    endpoint: EndpointConfig = EndpointConfig()
    served: dict[str, str] = Field(
        {},
        description="Backend `openai`: the server's model for base, policy and student, and for "
        "any further name.",
    )
    addresses: dict[str, str] = setting(
        {}, description="Backend `openai`: where a name is served, if not at endpoint.base_url."
    )
    files: dict[str, str] = Field(
        {}, description="Further models by their model_answer/*.jsonl in FastChat's format."
    )
    batch_questions: PositiveInt = Field(
        32, description="Questions generated together; what a kill loses at most."
    )

    @field_validator("served", "files")
    @classmethod
    def _check_names(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not _is_file_name(name):
                raise ValueError(f"the name {name!r} cannot be the name of a file, without slashes")
        return value

    @field_validator("addresses")
    @classmethod
    def _check_addresses(cls, value: dict[str, str]) -> dict[str, str]:
        return {name: checked_address(address) for name, address in value.items()}

    def endpoint_at(self, address: str, name: str) -> EndpointConfig:
        """Return the endpoint of a server that the stage started; it asks for no key."""
        changes = {"model": name, "base_url": address, "api_key_env": None}
        return self.endpoint.model_copy(update=changes)

    def endpoint_of(self, name: str) -> EndpointConfig:
        """Return the endpoint that answers for a name of `served`."""
        address = self.addresses.get(name, self.endpoint.base_url)
        changes = {"model": self.served[name], "base_url": address}
        return self.endpoint.model_copy(update=changes)


class GateConfig(Section):
    """What the student must reach; without limits there is no verdict."""

    min_score: float | None = Field(None, description="Mean score on the questions.")
    min_win_rate: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        description="Against the base, ties half: by the judge where it compared pairs, else by "
        "the reward model on the held-out prompts.",
    )
    max_regression: float | None = Field(
        None, ge=0.0, description="How far below the base the score may be on the same questions."
    )
    min_coverage: float = Field(
        0.9,
        ge=0.0,
        le=1.0,
        description="Share of the judgments behind each compared figure that have a score.",
    )


class EvaluateConfig(StageConfig):
    """Two-turn questions in MT-Bench format, scored by the reward model or a language model."""

    questions: str = Field(
        "demo",
        description="'demo', a question.jsonl in FastChat's format, or the hub data set "
        "HuggingFaceH4/mt_bench_prompts.",
    )
    judge: Literal["reward_model", "openai", "transformers"] = Field(
        "reward_model", description="Who scores the answers."
    )
    judging: JudgingConfig = JudgingConfig()
    answers: AnswersConfig = AnswersConfig()
    gate: GateConfig = GateConfig()
    promotion: PromotionConfig = setting(PromotionConfig())
    max_questions: PositiveInt | None = Field(None, description="Only the first ones.")
    generation: GenerationConfig = GenerationConfig()
    category_temperatures: dict[str, Annotated[float, Field(ge=0.0)]] = Field(
        {
            "writing": 0.7,
            "roleplay": 0.7,
            "extraction": 0.0,
            "math": 0.0,
            "coding": 0.0,
            "reasoning": 0.0,
            "stem": 0.1,
            "humanities": 0.1,
        },
        description="Temperature by question category; others use generation.temperature.",
    )
    held_out_prompts: PositiveInt = Field(
        400, description="Test prompts for win rates and the demo's oracle."
    )
    rendering: RenderingConfig = RenderingConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _check_judge(self) -> Self:
        if self.judge == "openai" and not self.judging.endpoint.model:
            raise ValueError("judge 'openai' needs judging.endpoint.model")
        if self.judge == "transformers" and self.judging.model is None:
            raise ValueError("judge 'transformers' needs judging.model")
        if self.judging.pairwise and self.judge == "reward_model":
            raise ValueError("judging.pairwise needs the judge 'openai' or 'transformers'")
        return self

    @model_validator(mode="after")
    def _check_answers(self) -> Self:
        answers = self.answers
        absent = [name for name in CHAIN_MODELS if name not in answers.served]
        if answers.backend == "openai" and absent:
            raise ValueError(f"answers.backend 'openai' needs answers.served for {absent}")
        unserved = sorted(set(answers.addresses) - set(answers.served))
        if unserved:
            raise ValueError(f"answers.addresses names {unserved}, which answers.served does not")
        if answers.backend != "openai" and answers.served:
            raise ValueError("answers.served needs answers.backend 'openai'")
        if self.judging.pairwise and PAIR_FILE in {*answers.files, *answers.served}:
            raise ValueError(f"a model is named {PAIR_FILE!r}, which is the file of comparisons")
        taken = sorted(set(answers.files) & {*CHAIN_MODELS, *answers.served})
        if taken:
            raise ValueError(f"answers.files names {taken}, which answer for themselves")
        return self
