"""Requests of OpenAI's API, and the sentence that refuses a wrong one."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException

from diff_transformer.utils.suggestions import did_you_mean, quoted

# Fields that change nothing in the answer.
WITHOUT_EFFECT = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")
# What this server leaves to others: the values that ask for nothing.
NEUTRAL: dict[str, Any] = {"n": 1, "best_of": 1, "suffix": "", "frequency_penalty": 0, "presence_penalty": 0}
NEUTRAL |= {"logit_bias": {}, "tools": [], "functions": [], "tool_choice": "none", "top_logprobs": 0}
NEUTRAL |= {"parallel_tool_calls": True, "modalities": ["text"], "response_format": {"type": "text"}}


def _as_list(value: Any) -> Any:
    """Make a list of one of a text, or a list of tokens, that is alone."""
    is_one = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
    return [value] if is_one else value


def _joined_parts(content: Any) -> Any:
    """Join the text of a message that comes in parts."""
    if not isinstance(content, list):
        return content
    of_text = all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    texts: list[Any] = [part.get("text") for part in content] if of_text else [None]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content


Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[int], Field(fail_fast=True)]


class TextRequest(BaseModel):
    """Fields of all requests for text: null counts as left out, and no value is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stop: Annotated[list[Text], Field(max_length=16), BeforeValidator(_as_list)] = []
    stream: bool = False
    stream_options: dict[str, bool] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_neutral_fields(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        said = {name: value for name, value in fields.items() if value is not None and name not in WITHOUT_EFFECT}
        return {name: value for name, value in said.items() if name not in NEUTRAL or value != NEUTRAL[name]}


class CompletionRequest(TextRequest):
    """A request for the continuations of prompts, each a text or a list of token numbers."""

    prompt: Annotated[list[str | Tokens], Field(min_length=1, max_length=1024), BeforeValidator(_as_list)]
    max_tokens: int = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=5)

    @model_validator(mode="after")
    def _is_possible(self) -> "CompletionRequest":
        if self.stream and (len(self.prompt) > 1 or self.logprobs is not None):
            raise ValueError("A stream takes one prompt and has no logprobs: ask without stream")
        return self


class Message(BaseModel, strict=True):
    """A message of a conversation; other fields than these are for other servers."""

    role: Text
    content: Annotated[str, BeforeValidator(_joined_parts)]


class ChatRequest(TextRequest):
    """A request for the next message of a conversation."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens"))
    logprobs: Literal[False] = False


Request = TypeVar("Request", bound=TextRequest)


def parse_request(kind: type[Request], body: bytes) -> Request:
    """Read the JSON of a request.

    Raises:
        HTTPException: it is none, or not such a request; one sentence names pydantic's first error.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first: Any = error.errors(include_url=False)[0]
    what, place, message, got = first["type"], ".".join(map(str, first["loc"])), first["msg"], quoted(first["input"])
    if what == "extra_forbidden" and place in NEUTRAL:
        sentence = f"{place} must be {NEUTRAL[place]!r} or left out, got {got}."
    elif what == "extra_forbidden" and place in kind.model_fields:
        sentence = f"Give max_completion_tokens or {place}, not both."
    elif what == "extra_forbidden":
        sentence = f"The field {quoted(place)} is not known here{did_you_mean(place[:60], sorted(kind.model_fields))}"
    elif what in ("missing", "json_invalid", "value_error"):
        sentence = f"{place or 'The request'}: {message.removeprefix('Value error, ')}."
    else:
        sentence = f"{place or 'The request'}: {message}, got {got}."
    raise HTTPException(400, sentence)
