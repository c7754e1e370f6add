"""Reads requests of OpenAI's API, and says in one sentence what is wrong with one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diff_transformer.storage.files import parse_json
from diff_transformer.suggestions import did_you_mean, quoted

MOST_LOGPROBS = 5  # as in OpenAI's API
MOST_PROMPTS = 1024
MOST_STOPS = 16
LARGEST_SEED = (1 << 63) - 1
COMPLETION_TOKENS = 16  # of a completion that does not say how many: OpenAI's default
# Fields that change nothing in the answer.
WITHOUT_EFFECT = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")
# Fields that this server knows in one value alone, which is the value of a request without them.
ONLY_VALUE: dict[str, Any] = {"n": 1, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}}
ONLY_IN_COMPLETIONS: dict[str, Any] = {"best_of": 1, "suffix": ""}
ONLY_IN_CHATS: dict[str, Any] = {
    "logprobs": False,
    "top_logprobs": 0,
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "response_format": {"type": "text"},
    "modalities": ["text"],
}
SHARED = (
    *("model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "seed", "stop"),
    "generation_config",  # of `transformers chat`
)


class RequestError(ValueError):
    """A request that cannot be answered, because of what it says; the message is for whoever sent it."""

    def __init__(self, message: str, *, status: int = 400, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.field = status, field


# Below it the most likely token is taken: logits divided by less may be infinite.
LOWEST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Sampling:
    """How new tokens are chosen: the most likely ones where `temperature` is 0, or as good as 0, else at random."""

    max_tokens: int | None = None
    """The largest number of new tokens; None for as many as the context has space for."""
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < LOWEST_TEMPERATURE


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """What all requests for text say."""

    model: str | None
    sampling: Sampling
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    """Whether a stream ends with the numbers of tokens."""


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(ApiRequest):
    """A request for the continuations of prompts, each a text or a list of token numbers."""

    prompts: list[str | list[int]]
    echo: bool
    logprobs: int | None
    """How many of the most likely tokens are named at each place; None for no log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest(ApiRequest):
    """A request for the next message of a conversation."""

    messages: list[dict[str, str]]


def completion_request(body: Any) -> CompletionRequest:
    """The request that the JSON of ``POST /v1/completions`` makes. Raises RequestError."""
    fields = _known_fields(body, ("prompt", "echo", "logprobs"), ONLY_IN_COMPLETIONS)
    if fields.get("prompt") is None:
        raise RequestError("A completion needs a prompt.", field="prompt")
    request = CompletionRequest(
        prompts=_prompts(fields["prompt"]),
        echo=_boolean(fields, "echo"),
        logprobs=_integer(fields, "logprobs", 0, MOST_LOGPROBS),
        **_shared(fields, fewest_tokens=0, default_tokens=COMPLETION_TOKENS),
    )
    if request.sampling.max_tokens == 0 and not request.echo:
        raise RequestError("max_tokens must be 1 or more unless echo is true, got 0.", field="max_tokens")
    if request.stream and len(request.prompts) > 1:
        raise RequestError(f"A stream takes one prompt, got {len(request.prompts)}.", field="prompt")
    return request


def chat_request(body: Any) -> ChatRequest:
    """The request that the JSON of ``POST /v1/chat/completions`` makes. Raises RequestError."""
    fields = _known_fields(body, ("messages", "max_completion_tokens", "parallel_tool_calls"), ONLY_IN_CHATS)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages must be a list of one message or more, got {quoted(messages)}.", field="messages")
    if fields.get("max_completion_tokens") is not None:
        if fields.get("max_tokens") is not None:
            raise RequestError("Give max_completion_tokens or max_tokens, not both.", field="max_tokens")
        _integer(fields, "max_completion_tokens", 1)
        fields["max_tokens"] = fields["max_completion_tokens"]
    return ChatRequest(
        messages=[_message(number, message) for number, message in enumerate(messages)],
        **_shared(fields, fewest_tokens=1, default_tokens=None),
    )


def _known_fields(body: Any, own: Sequence[str], only: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request, after those that this server does not have are refused."""
    if not isinstance(body, dict):
        raise RequestError(f"The body must be a JSON object, got {quoted(body)}.")
    only = {**ONLY_VALUE, **only}
    known = {*SHARED, *own, *only, *WITHOUT_EFFECT}
    for name in body:
        if name not in known:
            raise RequestError(f"The field {quoted(name)} is not known{did_you_mean(name[:60], sorted(known))}")
    for name, value in only.items():
        given = body.get(name)
        if given is not None and (given != value or isinstance(given, bool) != isinstance(value, bool)):
            raise RequestError(f"{name} must be {value!r} or left out, got {quoted(given)}.", field=name)
    return dict(body)


def _shared(fields: dict[str, Any], *, fewest_tokens: int, default_tokens: int | None) -> dict[str, Any]:
    _add_generation_config(fields)
    max_tokens = _integer(fields, "max_tokens", fewest_tokens)
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise RequestError(f"stream_options must be an object, got {quoted(options)}.", field="stream_options")
    return {
        "model": _string(fields, "model"),
        "sampling": Sampling(
            max_tokens=default_tokens if max_tokens is None else max_tokens,
            temperature=_number(fields, "temperature", 0, 2),
            top_p=_number(fields, "top_p", 0, 1, above=True),
            seed=_integer(fields, "seed", 0, LARGEST_SEED),
        ),
        "stop": _stop(fields.get("stop")),
        "stream": _boolean(fields, "stream"),
        "include_usage": _boolean(options or {}, "include_usage"),
    }


def _add_generation_config(fields: dict[str, Any]) -> None:
    """Enter what ``generation_config`` says, which `transformers chat` sends as JSON in a string."""
    text = _string(fields, "generation_config")
    if text is None:
        return
    try:
        settings = parse_json(text, "generation_config")
    except ValueError as error:
        raise RequestError(str(error), field="generation_config") from None
    if not isinstance(settings, dict):
        raise RequestError(
            f"generation_config must be a JSON object, got {quoted(settings)}.", field="generation_config"
        )
    samples = settings.pop("do_sample", None)
    settings.pop("transformers_version", None)
    for theirs, ours in {"max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p"}.items():
        value = settings.pop(theirs, None)
        if value is not None:
            fields.setdefault(ours, value)
    if samples is False:
        fields["temperature"] = 0
    unknown = sorted(name for name, value in settings.items() if value is not None)
    if unknown:
        raise RequestError(
            f"generation_config may set do_sample, max_new_tokens, temperature and top_p, got {', '.join(unknown)}.",
            field="generation_config",
        )


def _prompts(prompt: Any) -> list[str | list[int]]:
    """A text, texts, a list of token numbers, or such lists."""
    if isinstance(prompt, str):
        return [_text(prompt, "prompt")]
    if isinstance(prompt, list) and prompt:
        if all(_is_integer(token) for token in prompt):
            return [prompt]
        if len(prompt) > MOST_PROMPTS:
            raise RequestError(f"A request takes at most {MOST_PROMPTS} prompts, got {len(prompt)}.", field="prompt")
        if all(isinstance(text, str) for text in prompt):
            return [_text(text, "prompt") for text in prompt]
        if all(isinstance(tokens, list) and all(_is_integer(token) for token in tokens) for tokens in prompt):
            return prompt
    raise RequestError(
        "prompt must be a text, a list of texts, a list of token numbers or a list of such lists, "
        f"got {quoted(prompt)}.",
        field="prompt",
    )


def _message(number: int, message: Any) -> dict[str, str]:
    """A message with its role and its text."""
    where = f"messages[{number}]"
    if not isinstance(message, dict):
        raise RequestError(f"{where} must be an object with role and content, got {quoted(message)}.", field="messages")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a text, got {quoted(role)}.", field="messages")
    if isinstance(content, list):
        of_text = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part["text"] for part in of_text if isinstance(part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) else None
    if not isinstance(content, str):
        raise RequestError(
            f"{where}.content must be a text or a list of parts of type text, got {quoted(message.get('content'))}.",
            field="messages",
        )
    return {"role": _text(role, "messages"), "content": _text(content, "messages")}


def _stop(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    right = isinstance(stops, list) and len(stops) <= MOST_STOPS and all(isinstance(text, str) for text in stops)
    if not right or "" in stops:
        raise RequestError(
            f"stop must be a text or a list of at most {MOST_STOPS} texts, none of them empty, got {quoted(stop)}.",
            field="stop",
        )
    return tuple(_text(text, "stop") for text in stops)


def _text(text: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can hold halves of characters
        raise RequestError(f"{field} must be valid Unicode, got {quoted(text)}.", field=field) from None
    return text


def _string(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{name} must be a text, got {quoted(value)}.", field=name)
    return value


def _boolean(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {quoted(value)}.", field=name)
    return bool(value)


def _integer(fields: Mapping[str, Any], name: str, least: int, most: int | None = None) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not _is_integer(value) or value < least or (most is not None and value > most):
        limits = f"{least} or more" if most is None else f"from {least} to {most}"
        raise RequestError(f"{name} must be a whole number, {limits}, got {quoted(value)}.", field=name)
    return int(value)


def _number(fields: Mapping[str, Any], name: str, least: float, most: float, *, above: bool = False) -> float:
    """A number, 1 where there is none; with `above` it must lie above `least`."""
    value = fields.get(name)
    if value is None:
        return 1.0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or (above and value == least):
        limits = f"above {least} and at most {most}" if above else f"from {least} to {most}"
        raise RequestError(f"{name} must be a number {limits}, got {quoted(value)}.", field=name)
    return float(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
