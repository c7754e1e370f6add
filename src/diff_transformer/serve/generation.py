"""Generates for requests: one after another by `generate`, or all in one batch by transformers' continuous batching."""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import torch
from starlette.exceptions import HTTPException
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, TemperatureLogitsWarper, TopPLogitsWarper
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingTemperatureLogitsWarper,
    ContinuousBatchingTopPLogitsWarper,
)

# Of a batch on the CPU, where transformers would take 8192 and masks of that many rows.
CPU_BATCH_TOKENS = 512
SECONDS_TO_STOP = 10
Put = Callable[[int | Exception | None], None]


class Engine:
    """Generates for many requests, one after another in the order in which they came. Called in the event loop."""

    def __init__(self, model: Any) -> None:
        self._is_stopping = False
        self._model = model
        self._open: set[Put] = set()
        self._thread = ThreadPoolExecutor(1, "generate")

    async def tokens(self, prompt: list[int], config: GenerationConfig, seed: int | None) -> AsyncGenerator[int, None]:
        """Yield each generated token as it comes. Closing the iterator before its end cancels the request.

        Raises:
            HTTPException: generating failed, or the server stops.
        """
        if self._is_stopping:
            raise HTTPException(503, "The server is stopping.")
        loop = asyncio.get_running_loop()
        new: asyncio.Queue[int | Exception | None] = asyncio.Queue()

        def put(item: int | Exception | None) -> None:
            loop.call_soon_threadsafe(new.put_nowait, item)

        cancel = self._begin(prompt, config, seed, put)
        self._open.add(put)
        try:
            while (token := await new.get()) is not None:
                if isinstance(token, Exception):
                    raise token
                yield token
        finally:
            self._open.discard(put)
            cancel()

    def stop(self) -> None:
        """End all texts that are being generated; none may be begun afterwards."""
        self._is_stopping = True
        for put in self._open:
            put(HTTPException(503, "The server is stopping."))

    def failure(self) -> str | None:
        """Say why nothing can be generated any more: an error in a batch ends the thread of all batches."""
        return None

    def close(self) -> None:
        """Wait until nothing is generated any more."""
        self._thread.shutdown()

    def _begin(self, prompt: list[int], config: GenerationConfig, seed: int | None, put: Put) -> Callable[[], None]:
        """Begin to put tokens, and None after the last, from any thread. Return a function that cancels the request."""
        cancelled = threading.Event()

        def after_token(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            """Hand on the newest token, as one of the criteria by which `generate` stops."""
            put(int(ids[0, -1]))
            return torch.tensor([cancelled.is_set()], device=ids.device)

        def generate() -> None:
            if cancelled.is_set():
                return
            try:
                if seed is not None:
                    torch.manual_seed(seed)
                ids = torch.tensor([prompt], device=self._model.device)
                mask = torch.ones_like(ids)
                self._model.generate(ids, config, attention_mask=mask, stopping_criteria=[after_token])
                put(None)
            except Exception as error:  # whatever it is, the request has to be told, and the next one answered
                logging.getLogger(__name__).exception("Generating failed.")
                put(HTTPException(500, f"The server failed: {type(error).__name__}: {error}"))

        self._thread.submit(generate)
        return cancelled.set


class BatchingEngine(Engine):
    """Generates for all requests in one batch, by continuous batching: they share a cache for so many tokens."""

    def __init__(self, model: Any, cache_tokens: int) -> None:
        super().__init__(model)
        batching = ContinuousBatchingConfig(per_request_processors=True)
        page = getattr(batching, "page_size", batching.block_size)  # transformers 5.17 calls pages blocks
        batching.num_blocks = -(-cache_tokens // page)
        if model.device.type == "cpu":
            batching.max_batch_tokens = CPU_BATCH_TOKENS
        # transformers plans for those steps between logits and tokens alone that these settings ask for.
        settings = GenerationConfig(do_sample=True, temperature=0.5, top_p=0.5, top_k=0, use_cache=False)
        self._batches = model.init_continuous_batching(settings, continuous_batching_config=batching)
        steps = [_Temperature(TemperatureLogitsWarper(1.0)), _TopP(TopPLogitsWarper(1.0))]
        self._batches.logit_processor.logits_processor[:] = steps
        self._batches.start()

    def failure(self) -> str | None:
        error = self._batches.background_thread_status.fatal_error
        return None if error is None else f"The server failed: {error}"

    def close(self) -> None:
        self._batches.stop(block=True, timeout=SECONDS_TO_STOP)

    def _begin(self, prompt: list[int], config: GenerationConfig, seed: int | None, put: Put) -> Callable[[], None]:
        if failure := self.failure():
            raise HTTPException(500, failure)
        name = uuid4().hex
        handed_on = 0

        def receive(output: Any) -> None:
            nonlocal handed_on
            for token in output.generated_tokens[handed_on:]:
                put(token)
            handed_on = len(output.generated_tokens)
            if output.error is not None:
                put(HTTPException(500, f"The server failed: {output.error}"))
            elif output.is_finished():
                put(None)

        def cancel() -> None:
            # transformers keeps whatever is registered, and outputs without a taker, until somebody takes them.
            if self._batches.output_router.result_handlers.pop(name, None) is not None:
                self._batches.cancel_request(name)
                self._batches.output_router.output_queue.queue.clear()

        self._batches.register_result_handler(name, receive)
        self._batches.add_request(
            prompt,
            name,
            max_new_tokens=config.max_new_tokens,
            streaming=True,
            eos_token_id=config.eos_token_id or -1,
            temperature=config.temperature if config.do_sample else 0.0,
            top_p=config.top_p if config.do_sample else 1.0,
        )
        return cancel


class _Temperature(ContinuousBatchingTemperatureLogitsWarper):
    """Divides logits by each request's temperature; at 0 it leaves the first of the most likely tokens."""

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        is_greedy = tensor_arg[: len(scores)].view(torch.float32)[:, None] == 0
        most_likely = torch.full_like(scores, -torch.inf).scatter(-1, scores.argmax(-1, keepdim=True), 0.0)
        return torch.where(is_greedy, most_likely, super().__call__(scores, tensor_arg))


class _TopP(ContinuousBatchingTopPLogitsWarper):
    """Leaves each request's most likely tokens, which together have the probability top_p."""

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        # Sorting a large vocabulary takes long on a CPU. On a GPU looking first would wait for it.
        if scores.device.type == "cpu" and bool((tensor_arg[: len(scores)].view(torch.float32) == 1).all()):
            return scores
        return super().__call__(scores, tensor_arg)
