"""Runs the generation of transformers' server: one request after another, or all that are waiting in one batch.

The threads, the streams of text and continuous batching are those of ``transformers.cli.serving``. Added is what its
own handlers of requests leave out: each request has its own sampling in a batch, too, a request can be given up at any
time, and all end when the server stops.
"""

import asyncio
import copy
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4
from weakref import WeakSet

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving.utils import CBGenerateManager, CBWorkerDeadError, GenerateManager, _StreamError
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingTemperatureLogitsWarper

from diff_transformer.serve.api_requests import RequestError, Sampling

# Of a batch on the CPU, where transformers would take 8192 and masks of that many rows.
CPU_BATCH_TOKENS = 512
SECONDS_TO_STOP = 10


class GenerationError(RuntimeError):
    """The model could not generate, through no fault of the request."""


class ServerStoppingError(RuntimeError):
    """The server stops before the request is answered."""

    def __init__(self) -> None:
        super().__init__("The server is stopping.")


class Engine(ABC):
    """Generates for many requests with one model. Its methods are called in the event loop."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._queues: WeakSet[asyncio.Queue[Any]] = WeakSet()
        self._stopping = False

    def check(self, sampling: Sampling) -> None:
        """Raise RequestError for sampling that this engine does not have, ServerStoppingError while it stops."""
        if self._stopping:
            raise ServerStoppingError

    async def generate_tokens(self, tokens: list[int], sampling: Sampling) -> list[int]:
        """The new tokens, as numbers."""
        self.check(sampling)
        # Whoever is not there any more for the answer leaves what computes it alone.
        _, _, generated = await asyncio.shield(self._generate_at_once(tokens, self._config(sampling), sampling))
        return [int(token) for token in generated]

    @property
    def is_alive(self) -> bool:
        """Whether it can generate: an error in a batch ends the thread of all batches."""
        return True

    def stop(self) -> None:
        """End all texts that are being generated, and begin none."""
        self._stopping = True
        for queue in self._queues:
            queue.put_nowait(ServerStoppingError())

    @abstractmethod
    def close(self) -> None:
        """Wait until nothing is generated any more."""

    @abstractmethod
    def _generate_at_once(self, tokens: list[int], config: GenerationConfig, sampling: Sampling) -> Any: ...

    @abstractmethod
    def _begin(self, tokens: list[int], config: GenerationConfig, sampling: Sampling) -> Any:
        """The queue that the pieces of the text will come from, and the streamer that fills it."""

    def begin(self, tokens: list[int], sampling: Sampling) -> Any:
        """Begin to generate: the queue that the pieces of the text will come from, and the streamer that fills it."""
        self.check(sampling)
        try:
            queue, streamer = self._begin(tokens, self._config(sampling), sampling)
        except CBWorkerDeadError as error:
            raise GenerationError(str(error)) from error
        self._queues.add(queue)
        return queue, streamer

    def _config(self, sampling: Sampling) -> GenerationConfig:
        """The model's own settings of generation, but for how tokens are chosen and how many."""
        config = copy.deepcopy(self.model.generation_config)
        config.max_length = None
        config.max_new_tokens = sampling.max_tokens
        config.do_sample = not sampling.greedy
        config.top_k = 0 if config.do_sample else None
        config.temperature, config.top_p = (sampling.temperature, sampling.top_p) if config.do_sample else (None, None)
        if config.eos_token_id is None:
            config.eos_token_id = self.tokenizer.eos_token_id
        if config.pad_token_id is None:
            config.pad_token_id = self.tokenizer.pad_token_id or 0
        return config


class Generation:
    """One request's text. Nothing is generated before it is asked for."""

    def __init__(self, engine: Engine, tokens: list[int], sampling: Sampling) -> None:
        self._engine, self._tokens, self._sampling = engine, tokens, sampling
        self.new_tokens = 0
        """How many tokens have been generated, once the text has ended."""

    @property
    def filled(self) -> bool:
        """Whether as many tokens have been generated as were asked for."""
        return self.new_tokens >= (self._sampling.max_tokens or 0)

    async def texts(self) -> AsyncGenerator[str, None]:
        """The pieces of the text. Whoever closes the iterator before its end gives the request up.

        Raises:
            GenerationError: generating failed.
            ServerStoppingError: the server stops.
        """
        queue, streamer = self._engine.begin(self._tokens, self._sampling)
        ended = False
        try:
            while (piece := await queue.get()) is not None:
                if isinstance(piece, ServerStoppingError):
                    raise piece
                if isinstance(piece, _StreamError):
                    ended = True
                    raise GenerationError(piece.msg)
                yield piece
            ended = True
        finally:
            self.new_tokens = streamer.total_tokens
            if not ended:
                streamer.cancel()


class SequentialEngine(Engine):
    """Answers one request after another, in the order in which they came."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        self._manager = GenerateManager()

    def close(self) -> None:
        """Wait until nothing is generated any more."""
        self._manager.submit(lambda: None).result(timeout=SECONDS_TO_STOP)

    def _inputs(self, tokens: list[int], sampling: Sampling) -> dict[str, torch.Tensor]:
        if sampling.seed is not None:
            self._manager.submit(torch.manual_seed, sampling.seed)  # the next that its thread does is this request
        ids = torch.tensor([tokens], device=self.model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _begin(self, tokens: list[int], config: GenerationConfig, sampling: Sampling) -> Any:
        inputs = self._inputs(tokens, sampling)
        return self._manager.generate_streaming(self.model, self.tokenizer, inputs, config, uuid4().hex)

    async def _generate_at_once(self, tokens: list[int], config: GenerationConfig, sampling: Sampling) -> Any:
        inputs = self._inputs(tokens, sampling)
        return await self._manager.generate_non_streaming(self.model, self.tokenizer, inputs, config, uuid4().hex)


class _Temperatures(ContinuousBatchingTemperatureLogitsWarper):
    """Divides logits by each request's temperature; temperature 0 leaves the first of the most likely tokens alone."""

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        temperatures = tensor_arg[: len(scores)].view(torch.float32).unsqueeze(-1)
        alone = torch.full_like(scores, -torch.inf).scatter(-1, scores.argmax(-1, keepdim=True), 0.0)
        return torch.where(temperatures == 0, alone, scores / temperatures)


class _SampledManager:
    """transformers' manager of a batch, for one request: it is told the request's temperature, too."""

    def __init__(self, manager: Any, temperature: float) -> None:
        self._manager, self._temperature = manager, temperature

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def add_request(self, *arguments: Any, **settings: Any) -> Any:
        return self._manager.add_request(*arguments, temperature=self._temperature, **settings)


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
        self._batches = CBGenerateManager(config)
        # A temperature other than 1 makes transformers divide by one at all; every request brings its own.
        self._batches.init_cb(model, self._config(Sampling(max_tokens=1, temperature=0.5)))
        processors = self._batches._cb.logit_processor.logits_processor
        processors[:] = [
            _Temperatures(each) if isinstance(each, ContinuousBatchingTemperatureLogitsWarper) else each
            for each in processors
        ]

    def check(self, sampling: Sampling) -> None:
        """Raise RequestError for sampling that this engine does not have, ServerStoppingError while it stops."""
        super().check(sampling)
        if sampling.top_p != 1 and not sampling.greedy:
            raise RequestError(f"top_p must be 1 with continuous batching, got {sampling.top_p}.", field="top_p")
        if sampling.seed is not None and not sampling.greedy:
            raise RequestError("A seed needs temperature 0 with continuous batching.", field="seed")

    @property
    def is_alive(self) -> bool:
        """Whether it can generate: an error in a batch ends the thread of all batches."""
        return self._batches.is_alive()

    def close(self) -> None:
        """Wait until nothing is generated any more."""
        self._batches.stop()

    def _config(self, sampling: Sampling) -> GenerationConfig:
        config = super()._config(sampling)
        config.use_cache = False  # the batch has a cache of its own
        if config.eos_token_id is None:
            config.eos_token_id = -1
        return config

    def _one(self, sampling: Sampling) -> CBGenerateManager:
        manager = CBGenerateManager()
        manager._cb = _SampledManager(self._batches._cb, sampling.temperature)
        return manager

    def _begin(self, tokens: list[int], config: GenerationConfig, sampling: Sampling) -> Any:
        inputs = {"input_ids": tokens}
        return self._one(sampling).generate_streaming(self.model, self.tokenizer, inputs, config, uuid4().hex)

    def _generate_at_once(self, tokens: list[int], config: GenerationConfig, sampling: Sampling) -> Any:
        inputs = {"input_ids": tokens}
        return self._one(sampling).generate_non_streaming(self.model, self.tokenizer, inputs, config, uuid4().hex)
