"""What clients of OpenAI's protocol send, checked. Fields that change an answer and are not built are refused, and so is
a misspelt one; others that are unknown are left aside."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tercet.data.chat import UnusableRow, tools_of
from tercet.data.formats.chats.messages import messages_of
from tercet.inference.sampling import Sampling

MOST_ANSWERS = 16
Share = Annotated[float, Field(ge=0, le=1)]


# Fields of OpenAI's protocol, and of servers like this one, that change an answer: with the values that do not.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json": ({}, ""),
    "guided_regex": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "stop_token_ids": ([],),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
}


# Fields of the protocol that change no answer: a name close to them is theirs, not another one misspelt.
ASIDE = frozenset(
    (
        "metadata",
        "parallel_tool_calls",
        "priority",
        "request_id",
        "service_tier",
        "skip_special_tokens",
        "store",
        "user",
    )
)

# What a template is told by the request itself.
TEMPLATES_OWN = frozenset(
    (
        "messages",
        "conversations",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
    )
)


class Refused(Exception):
    """A request that is answered with an error: HTTP status, sentence, code, the field at fault."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class StreamOptions(BaseModel):
    include_usage: bool = False


class Request(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str | None = None  # there is one
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_ANSWERS)] = 1
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value

    @model_validator(mode="before")
    @classmethod
    def _what_is_not_built(cls, value: Any) -> Any:
        """Refuse what would change the answer and does not here; at its neutral value it says nothing."""
        for name, seen in value.items() if isinstance(value, dict) else ():
            if name in NOT_BUILT and seen is not None and seen not in NOT_BUILT[name]:
                raise Refused(400, f"{name}: this server does not do that; seen: {str(seen)[:80]!r}", "not_built", name)
        return value

    @model_validator(mode="before")
    @classmethod
    def _misspelt(cls, value: Any) -> Any:
        known = [*cls.model_fields, *NOT_BUILT]
        for name in value if isinstance(value, dict) else ():
            if name not in known and name not in ASIDE and (meant := get_close_matches(name, known, 1, cutoff=0.8)):
                raise Refused(400, f"there is no field {name}; did you mean {meant[0]}?", "unknown_field", name)
        return value

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, suggested: Mapping[str, Any], number: int) -> Sampling:
        """Return the sampling of answer `number`: what is asked for, else the model's own, else temperature 1."""
        keys = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        own = {k: suggested[k] for k in keys if isinstance(suggested.get(k), (int, float))}
        given = {k: v for k in keys if (v := getattr(self, k)) is not None}
        seed = None if self.seed is None else (self.seed + number) % 2**63
        return Sampling(**{"temperature": 1.0, **own, **given, "seed": seed})


class Message(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None


def for_template(messages: list[Message], tools: list[Any] | None) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return (messages, tools) as training reads them from a row: names of roles, parts as one text, arguments of calls
    as objects. Raises Refused for what cannot be read.
    """
    turns = [{**(m.model_extra or {}), "role": m.role, "content": m.content} for m in messages]
    try:
        return messages_of(turns, "messages"), tools_of(tools)
    except UnusableRow as error:
        raise Refused(400, error.detail, "unsupported_content", error.column) from None


class ChatRequest(Request):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _of_the_template_alone(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in value or ():
            if name in TEMPLATES_OWN or name.endswith("_token"):
                raise Refused(400, f"chat_template_kwargs may not say {name}", "invalid_value", "chat_template_kwargs")
        return value

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def best(self) -> int:
        return self.top_logprobs if self.logprobs else -1


class CompletionRequest(Request):
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=64)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def limit(self) -> int:
        return self.max_tokens or 16

    @property
    def best(self) -> int:
        return -1 if self.logprobs is None else self.logprobs


def read_request(kind: type[Request], body: bytes) -> Any:
    """Return the checked request. Raises Refused, 400, that names the field, the value seen and what it must be."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(str(part) for part in fault["loc"]) or None
        seen = "" if fault["type"] in ("missing", "json_invalid") else f"; seen: {str(fault['input'])[:80]!r}"
        raise Refused(400, f"{field + ': ' if field else ''}{fault['msg']}{seen}", "invalid_value", field) from None
