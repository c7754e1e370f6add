"""The server: the routes of OpenAI's API, and how it stops."""

import asyncio
import hmac
import json
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any
from uuid import uuid4

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from diff_transformer.serve.completion import ServedModel
from diff_transformer.serve.requests import ChatRequest, CompletionRequest, parse_request

LARGEST_BODY = 16 << 20  # bytes
# So long a signal waits for answers; texts that are being generated end at once.
SECONDS_TO_END = 10


def make_application(served: ServedModel, api_key: str | None = None) -> Starlette:
    """Make the application that answers requests with a model.

    With an API key, every route but ``/health`` asks for it.
    """
    described = {"id": served.name, "object": "model", "created": int(time.time()), "owned_by": "diff-transformer"}
    described["max_model_len"] = served.context

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [described]})

    async def model(request: Request) -> Response:
        served.require_name(request.path_params["name"])
        return JSONResponse(described)

    def guarded(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            right = scheme.lower() == "bearer" and hmac.compare_digest(key.strip().encode(), (api_key or "").encode())
            if api_key is not None and not right:
                message = "This server needs its API key: Authorization: Bearer KEY."
                raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})
            return await handler(request)

        return answer

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", guarded(models)),
            Route("/v1/models/{name:path}", guarded(model)),
            Route("/v1/completions", guarded(partial(_reply, served, CompletionRequest)), methods=["POST"]),
            Route("/v1/chat/completions", guarded(partial(_reply, served, ChatRequest)), methods=["POST"]),
        ],
        exception_handlers={HTTPException: _error, ClientDisconnect: _error, Exception: _error},
    )


async def _reply(served: ServedModel, kind: type[CompletionRequest | ChatRequest], request: Request) -> Response:
    """Generate the answer to one request, as a whole or as a stream. The texts end when the client hangs up."""
    asked, is_chat = parse_request(kind, await _body(request)), kind is ChatRequest
    named = "chat.completion" if is_chat else "text_completion"
    head = {"id": f"cmpl-{uuid4().hex}", "object": named, "created": int(time.time()), "model": served.name}
    completions = await asyncio.to_thread(served.prepare, asked)

    def usage() -> dict[str, int]:
        prompt = sum(len(completion.prompt) for completion in completions)
        new = sum(len(completion.new_tokens) for completion in completions)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def event(said: Any, reason: str | None = None) -> str:
        choice = {"index": 0, "delta" if is_chat else "text": said, "logprobs": None, "finish_reason": reason}
        return _event({**head, "object": f"{named}.chunk" if is_chat else named, "choices": [choice]})

    async def events() -> AsyncGenerator[str, None]:
        (completion,) = completions
        try:
            if is_chat:
                yield event({"role": "assistant", "content": ""})
            async with aclosing(completion.pieces()) as pieces:
                async for piece in pieces:
                    yield event({"content": piece} if is_chat else piece)
            yield event({} if is_chat else "", completion.reason)
            if asked.stream_options.get("include_usage"):
                yield _event({**head, "choices": [], "usage": usage()})
        except HTTPException as error:
            yield _event(_error_body(error.status_code, error.detail))
        yield "data: [DONE]\n\n"

    if asked.stream:
        return StreamingResponse(events(), media_type="text/event-stream")
    choices: list[dict[str, Any]] = []
    texts = await asyncio.gather(*[each.whole(request.is_disconnected) for each in completions])
    for (text, logprobs), completion in zip(texts, completions, strict=True):
        said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        choices.append({"index": len(choices), **said, "logprobs": logprobs, "finish_reason": completion.reason})
    return JSONResponse({**head, "choices": choices, "usage": usage()})


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def _body(request: Request) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page in a browser may send other kinds to any server
        raise HTTPException(415, f"The content type must be application/json, got {kind!r}.")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise HTTPException(413, f"The body must be at most {LARGEST_BODY >> 20} MiB.")
    return bytes(body)


def _error_body(status: int, message: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


async def _error(request: Request, error: Exception) -> Response:
    """Answer with a sentence. A mistake of the server goes to its own log, with the traceback."""
    if not isinstance(error, HTTPException):
        return JSONResponse(_error_body(500, f"The server failed: {type(error).__name__}."), 500)
    is_starlettes = error.detail in ("Not Found", "Method Not Allowed")
    message = f"{request.method} {request.url.path} is not served." if is_starlettes else error.detail
    return JSONResponse(_error_body(error.status_code, message), error.status_code, error.headers)


class ModelServer(uvicorn.Server):
    """uvicorn's server, which cancels generation before it waits for answers."""

    def __init__(self, served: ServedModel, api_key: str | None = None, *, log_requests: bool = False) -> None:
        config = uvicorn.Config(
            make_application(served, api_key),
            lifespan="off",
            log_config=uvicorn.config.LOGGING_CONFIG if log_requests else None,
            access_log=log_requests,
            timeout_graceful_shutdown=SECONDS_TO_END,
        )
        super().__init__(config)
        self.served = served

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.served.stop()
        await super().shutdown(sockets)
        await asyncio.to_thread(self.served.close)
