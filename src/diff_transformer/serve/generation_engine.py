"""Generates for requests: one after another, or all that are waiting in one batch.

transformers generates: by `generate`, or by its continuous batching. Added is what a server needs: tokens arrive as
they are generated, each request has its own sampling in a batch, too, a request can be given up at any time, and all
end when the server stops.
"""

import asyncio
import contextlib
import copy
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4
from weakref import WeakSet

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from diff_transformer.serve.api_requests import Sampling
from diff_transformer.serve.batch_sampling import sampling_steps

# Of a batch on the CPU, where transformers would take 8192 and masks of that many rows.
CPU_BATCH_TOKENS = 512
SECONDS_TO_STOP = 10


class GenerationError(RuntimeError):
    """The model could not generate, through no fault of the request."""


class ServerStoppingError(RuntimeError):
    """The server stops before the request is answered."""

    def __init__(self) -> None:
        super().__init__("The server is stopping.")


class TokenQueue:
    """New tokens of one request, in their order. All methods but `get` may be called in any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[list[int] | Exception | None] = asyncio.Queue()

    def put(self, tokens: list[int]) -> None:
        """Add the next tokens."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, tokens)

    def end(self, error: Exception | None = None) -> None:
        """Say that no tokens will come any more, and why, where it is no end that was asked for."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, error)

    async def get(self) -> list[int] | None:
        """The next tokens, None at the end. Raises the error that has ended them."""
        tokens = await self._queue.get()
        if isinstance(tokens, Exception):
            raise tokens
        return tokens


class Engine(ABC):
    """Generates for many requests with one model. Its methods are called in the event loop."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        # How tokens are chosen is said by the requests. What else a checkpoint's generation_config.json may hold,
        # penalties, beams or suppressed tokens, one way of generating would obey and another one not.
        of_checkpoint = model.generation_config
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        model.generation_config = GenerationConfig(**{name: getattr(of_checkpoint, name) for name in names})
        self._queues: WeakSet[TokenQueue] = WeakSet()
        self._stopping = False

    @property
    def is_alive(self) -> bool:
        """Whether it can generate: an error in a batch ends the thread of all batches."""
        return True

    def require_running(self) -> None:
        """Raise ServerStoppingError once `stop` was called."""
        if self._stopping:
            raise ServerStoppingError

    def ends_text(self, token: int) -> bool:
        """Whether the model ends its text with this token."""
        ends = self._end_of_text()
        return token in ends if isinstance(ends, list) else token == ends

    def begin(self, tokens: list[int], sampling: Sampling) -> tuple[TokenQueue, Callable[[], None]]:
        """Begin to generate: the new tokens, and what gives the request up. Raises GenerationError."""
        self.require_running()
        new = TokenQueue()
        self._queues.add(new)
        return new, self._begin(tokens, self._config(sampling), sampling, new)

    def stop(self) -> None:
        """End all texts that are being generated, and begin none."""
        self._stopping = True
        for new in self._queues:
            new.end(ServerStoppingError())

    @abstractmethod
    def close(self) -> None:
        """Wait until nothing is generated any more."""

    @abstractmethod
    def _begin(
        self, tokens: list[int], config: GenerationConfig, sampling: Sampling, new: TokenQueue
    ) -> Callable[[], None]: ...

    def _end_of_text(self) -> int | list[int] | None:
        of_model: int | list[int] | None = self.model.generation_config.eos_token_id
        return self.tokenizer.eos_token_id if of_model is None else of_model

    def _config(self, sampling: Sampling) -> GenerationConfig:
        config = copy.deepcopy(self.model.generation_config)
        config.max_length = None
        config.max_new_tokens = sampling.max_tokens
        config.do_sample = not sampling.greedy
        config.top_k = 0 if config.do_sample else None
        config.temperature, config.top_p = (sampling.temperature, sampling.top_p) if config.do_sample else (None, None)
        config.eos_token_id = self._end_of_text()
        if config.pad_token_id is None:
            config.pad_token_id = self.tokenizer.pad_token_id or 0
        return config


class Generation:
    """The new tokens of one request. None is generated before it is asked for."""

    def __init__(self, engine: Engine, tokens: list[int], sampling: Sampling) -> None:
        self._engine, self._tokens, self._sampling = engine, tokens, sampling

    async def tokens(self) -> AsyncGenerator[int, None]:
        """The tokens as they come. Whoever closes the iterator before its end gives the request up.

        Raises:
            GenerationError: generating failed.
            ServerStoppingError: the server stops.
        """
        new, give_up = self._engine.begin(self._tokens, self._sampling)
        try:
            while (tokens := await new.get()) is not None:
                for token in tokens:
                    yield token
        finally:
            give_up()


class _GivenUpError(Exception):
    """Ends `generate`: nobody waits for its text any more."""


class _Streamer:
    """What `generate` calls a streamer: gets the prompt, and then each new token."""

    def __init__(self, new: TokenQueue, given_up: threading.Event) -> None:
        self._new, self._given_up = new, given_up
        self._is_prompt = True

    def put(self, tokens: torch.Tensor) -> None:
        if self._given_up.is_set():
            raise _GivenUpError
        if not self._is_prompt:
            self._new.put(tokens.tolist())
        self._is_prompt = False

    def end(self) -> None:
        """The queue is ended where `generate` was called, which also sees errors."""


class SequentialEngine(Engine):
    """Answers one request after another, in the order in which they came."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        self._thread = ThreadPoolExecutor(1, "generate")

    def close(self) -> None:
        """Wait until nothing is generated any more."""
        self._thread.shutdown()

    def _begin(
        self, tokens: list[int], config: GenerationConfig, sampling: Sampling, new: TokenQueue
    ) -> Callable[[], None]:
        given_up = threading.Event()

        def generate() -> None:
            try:
                if sampling.seed is not None:
                    torch.manual_seed(sampling.seed)
                ids = torch.tensor([tokens], device=self.model.device)
                self.model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=config,
                    streamer=_Streamer(new, given_up),
                )
                new.end()
            except _GivenUpError:
                pass
            except Exception as error:  # whatever it is, the request has to be told, and the next one answered
                new.end(GenerationError(f"{type(error).__name__}: {error}"))

        self._thread.submit(generate)
        return given_up.set


class BatchingEngine(Engine):
    """Answers all requests in one batch, by continuous batching: keys and values lie in a cache that they share.

    Args:
        cache_tokens: for how many tokens of all requests together the cache has space.
    """

    def __init__(self, model: Any, tokenizer: Any, cache_tokens: int) -> None:
        super().__init__(model, tokenizer)
        config = ContinuousBatchingConfig(per_request_processors=True)
        page = getattr(config, "page_size", config.block_size)  # transformers 5.17 calls pages blocks
        config.num_blocks = -(-cache_tokens // page)
        if model.device.type == "cpu":
            config.max_batch_tokens = CPU_BATCH_TOKENS
        # With a temperature other than 1 transformers plans for steps between logits and tokens.
        settings = self._config(Sampling(max_tokens=1, temperature=0.5))
        self._batches = model.init_continuous_batching(generation_config=settings, continuous_batching_config=config)
        self._batches.logit_processor = sampling_steps()
        self._batches.start()

    @property
    def is_alive(self) -> bool:
        """Whether it can generate: an error in a batch ends the thread of all batches."""
        return self._batches.background_thread_status.fatal_error is None

    def close(self) -> None:
        """Wait until nothing is generated any more."""
        self._batches.stop(block=True, timeout=SECONDS_TO_STOP)

    def _config(self, sampling: Sampling) -> GenerationConfig:
        config = super()._config(sampling)
        config.use_cache = False  # the batch has a cache of its own
        if config.eos_token_id is None:
            config.eos_token_id = -1
        return config

    def _begin(
        self, tokens: list[int], config: GenerationConfig, sampling: Sampling, new: TokenQueue
    ) -> Callable[[], None]:
        if not self.is_alive:
            raise GenerationError(f"The batch has failed: {self._batches.background_thread_status.fatal_error}")
        name = uuid4().hex
        passed_on = 0
        ended = False

        def receive(output: Any) -> None:
            nonlocal passed_on, ended
            new.put(output.generated_tokens[passed_on:])
            passed_on = len(output.generated_tokens)
            ended = output.error is not None or output.is_finished()
            if ended:
                new.end(None if output.error is None else GenerationError(output.error))

        def give_up() -> None:
            if ended:
                return
            self._batches.cancel_request(name)
            # transformers keeps whatever is registered, and whatever has no taker, until somebody takes it away.
            router = self._batches.output_router
            router.result_handlers.pop(name, None)
            with contextlib.suppress(queue.Empty):
                while True:
                    router.output_queue.get_nowait()

        settings = {} if sampling.seed is None else {"seed": sampling.seed}
        self._batches.register_result_handler(name, receive)
        self._batches.add_request(
            tokens,
            name,
            max_new_tokens=config.max_new_tokens,
            streaming=True,
            eos_token_id=config.eos_token_id,
            temperature=sampling.temperature,
            top_p=1.0 if sampling.greedy else sampling.top_p,
            **settings,
        )
        return give_up
