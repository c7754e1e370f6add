"""The routes of the server, as OpenAI's API has them."""

import asyncio
import hmac
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from diff_transformer.serve.api_requests import ApiRequest, RequestError, chat_request, completion_request
from diff_transformer.serve.continuation import Continuation, Part
from diff_transformer.serve.generation_engine import GenerationError, ServerStoppingError
from diff_transformer.serve.served_model import ServedModel
from diff_transformer.storage.files import parse_json
from diff_transformer.suggestions import quoted
from diff_transformer.token_texts import decoded

LARGEST_BODY = 16 << 20  # bytes
_NOTHING = Part("", None)
Handler = Callable[[Request], Awaitable[Response]]
# OpenAI's names of kinds of errors; other statuses of 400 and above are errors of the request.
ERROR_TYPES = {401: "authentication_error", 500: "server_error", 503: "server_error"}


def make_application(served: ServedModel, api_key: str | None = None) -> Starlette:
    """The application that answers requests with a model.

    Where there is an API key, every route but ``/health`` asks for it.
    """
    routes = _Routes(served)
    handlers: dict[str, tuple[str, Handler]] = {
        "/health": ("GET", routes.health),
        "/v1/models": ("GET", routes.models),
        "/v1/models/{name:path}": ("GET", routes.model),
        "/v1/completions": ("POST", routes.completions),
        "/v1/chat/completions": ("POST", routes.chat_completions),
        "/load_model": ("POST", routes.load_model),  # `transformers chat` begins with it
    }

    def guarded(path: str, handler: Handler) -> Handler:
        async def answer(request: Request) -> Response:
            if api_key is not None and path != "/health":
                _require_key(request, api_key)
            return await handler(request)

        return answer

    async def unknown_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = ", ".join(f"{method} {path}" for path, (method, _) in handlers.items()).replace("{name:path}", "NAME")
        sent = f"{request.method} {request.url.path}"
        return _error(error.status_code, f"{sent} is not served; there are {known}.")

    return Starlette(
        routes=[Route(path, guarded(path, handler), methods=[method]) for path, (method, handler) in handlers.items()],
        exception_handlers={
            HTTPException: unknown_route,
            RequestError: _bad_request,
            ServerStoppingError: _stopping,
            ClientDisconnect: _gone,
            Exception: _failed,
        },
    )


class _Routes:
    """The handlers of requests."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.started = int(time.time())

    async def health(self, request: Request) -> Response:
        if not self.served.engine.is_alive:
            return JSONResponse({"status": "failed"}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def model(self, request: Request) -> Response:
        self.served.require_name(request.path_params["name"])
        return JSONResponse(self._described())

    async def load_model(self, request: Request) -> Response:
        """The model is loaded: a stream of events that says so at once."""
        body = await _read_json(request)
        name = body.get("model") if isinstance(body, dict) else None
        if not isinstance(name, str):
            raise RequestError("The body must be a JSON object with the name of a model.", field="model")
        self.served.require_name(name)
        event = json.dumps({"status": "ready", "model": name, "cached": True})
        return Response(f"data: {event}\n\n", media_type="text/event-stream")

    async def completions(self, request: Request) -> Response:
        asked = completion_request(await _read_json(request))
        self.served.require_name(asked.model)
        prompts = await asyncio.to_thread(lambda: [self.served.tokens_of(prompt) for prompt in asked.prompts])
        samplings = [self.served.fitted(tokens, asked.sampling) for tokens in prompts]
        answer = _Answer("text_completion", f"cmpl-{uuid4().hex}", self.served.name)
        continuations = [
            Continuation(
                self.served,
                tokens,
                sampling,
                stop=asked.stop,
                echo=self._text(prompt) if asked.echo else None,
                logprobs=asked.logprobs,
            )
            for prompt, tokens, sampling in zip(asked.prompts, prompts, samplings, strict=True)
        ]
        if asked.stream:
            return _EventStream(self._stream(answer, asked, continuations[0], len(prompts[0])))
        return await _unless_hung_up(request, self._whole(answer, continuations, sum(map(len, prompts))))

    async def chat_completions(self, request: Request) -> Response:
        asked = chat_request(await _read_json(request))
        self.served.require_name(asked.model)
        tokens = await asyncio.to_thread(self.served.tokens_of_messages, asked.messages)
        sampling = self.served.fitted(tokens, asked.sampling)
        continuation = Continuation(self.served, tokens, sampling, stop=asked.stop, goes_on=False)
        answer = _Answer("chat.completion", f"chatcmpl-{uuid4().hex}", self.served.name)
        if asked.stream:
            return _EventStream(self._stream(answer, asked, continuation, len(tokens)))
        return await _unless_hung_up(request, self._whole(answer, [continuation], len(tokens)))

    def _described(self) -> dict[str, Any]:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self.started,
            "owned_by": "diff-transformer",
            "max_model_len": self.served.context,
        }

    def _text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return decoded(self.served.tokenizer, prompt)

    async def _whole(self, answer: "_Answer", continuations: list[Continuation], prompt_tokens: int) -> Response:
        """The answer whose choices are all there."""
        parts = await _all_or_none([continuation.whole() for continuation in continuations])
        choices = [
            answer.choice(number, part, continuation.reason)
            for number, (part, continuation) in enumerate(zip(parts, continuations, strict=True))
        ]
        usage = _usage(prompt_tokens, sum(continuation.new_tokens for continuation in continuations))
        return JSONResponse(answer.with_choices(choices) | {"usage": usage})

    async def _stream(
        self, answer: "_Answer", asked: ApiRequest, continuation: Continuation, prompt_tokens: int
    ) -> AsyncGenerator[str, None]:
        """The events of an answer that comes in parts."""
        try:
            if answer.is_chat:
                yield answer.event(answer.piece(_NOTHING, role="assistant"))
            async with aclosing(continuation.parts()) as parts:
                async for part in parts:
                    yield answer.event(answer.piece(part))
            yield answer.event(answer.piece(None, finish_reason=continuation.reason))
            if asked.include_usage:
                yield answer.event(None, usage=_usage(prompt_tokens, continuation.new_tokens))
        except (GenerationError, ServerStoppingError) as error:
            yield f"data: {json.dumps(_error_body(500, str(error)))}\n\n"
        yield "data: [DONE]\n\n"


class _Answer:
    """What all parts of one answer say."""

    def __init__(self, kind: str, name: str, model: str) -> None:
        self.is_chat = kind == "chat.completion"
        self._kind = kind
        self._same = {"id": name, "created": int(time.time()), "model": model}

    def with_choices(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._same, "object": self._kind, "choices": choices}

    def choice(self, number: int, part: Part, reason: str) -> dict[str, Any]:
        """A choice that has ended."""
        said = {"message": {"role": "assistant", "content": part.text}} if self.is_chat else {"text": part.text}
        return {"index": number, **said, "logprobs": part.logprobs, "finish_reason": reason}

    def piece(self, part: Part | None, *, role: str | None = None, finish_reason: str | None = None) -> dict[str, Any]:
        """The choice of an event; the last one has no part and a reason."""
        shared = {"index": 0, "logprobs": part and part.logprobs, "finish_reason": finish_reason}
        if not self.is_chat:
            return {**shared, "text": part.text if part else ""}
        delta = {"content": part.text} if part else {}
        return {**shared, "delta": {"role": role, **delta} if role else delta}

    def event(self, choice: dict[str, Any] | None, **fields: Any) -> str:
        kind = "chat.completion.chunk" if self.is_chat else self._kind
        content = {**self._same, "object": kind, "choices": [choice] if choice else [], **fields}
        return f"data: {json.dumps(content)}\n\n"


class _EventStream(StreamingResponse):
    """A stream of events, whose generation ends with the response, also where the client has gone."""

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().__call__(scope, receive, send)


async def _all_or_none(parts: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of all parts, which run at the same time; when one fails or all are given up, the others end."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _unless_hung_up(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response, unless the client goes before it is there: then the work ends."""

    async def hang_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answering, gone = asyncio.ensure_future(work), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return answering.result()
    finally:
        for task in (answering, gone):
            task.cancel()
        await asyncio.gather(answering, gone, return_exceptions=True)


async def _read_json(request: Request) -> Any:
    """The body of a request. Raises RequestError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(f"The content type must be application/json, got {quoted(kind)}.", status=415)
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > LARGEST_BODY:
            raise RequestError(f"The body must be at most {LARGEST_BODY >> 20} MiB.", status=413)
    try:
        return parse_json(b"".join(parts), "The body")
    except ValueError as error:
        raise RequestError(str(error)) from None


def _require_key(request: Request, api_key: str) -> None:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if not key:
        raise RequestError("This server needs an API key: Authorization: Bearer KEY.", status=401)
    if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), api_key.encode()):
        raise RequestError("The API key is not the server's.", status=401)


def _usage(prompt: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _error_body(status: int, message: str, field: str | None = None) -> dict[str, Any]:
    kind = ERROR_TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}


def _error(status: int, message: str, field: str | None = None) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(_error_body(status, message, field), status_code=status, headers=headers)


async def _bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _error(error.status, str(error), error.field)


async def _stopping(request: Request, error: Exception) -> Response:
    return _error(503, str(error))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _failed(request: Request, error: Exception) -> Response:
    """A mistake of the server: what it was stands in its own log, with where it happened."""
    return _error(500, f"The server failed: {type(error).__name__}.")
