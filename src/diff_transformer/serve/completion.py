"""The text that follows a prompt: in pieces or whole, up to a stop string, with log-probabilities if asked for.

One thread generates, by `generate`, for those that wait and choose their tokens alike, in one batch.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import torch
from starlette.exceptions import HTTPException
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from diff_transformer.serve.requests import ChatRequest, CompletionRequest, TextRequest
from diff_transformer.utils.suggestions import quoted
from diff_transformer.utils.token_texts import READ_BEFORE, NewToken, TokenNames, TokenTexts, decoded

Logprobs = dict[str, list[Any]]
Put = Callable[[int | Exception | None], object]
# Below it the most likely token is taken: logits divided by less may be infinite.
LOWEST_TEMPERATURE = 1e-5
MOST_IN_A_BATCH = 16


class ServedModel:
    """A loaded model with its tokenizer, as the server uses it.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        name: its name in requests.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str) -> None:
        self.name, self.tokenizer = name, tokenizer
        self.context: int = model.config.max_position_embeddings
        self.angles_follow_length: bool = getattr(model.config, "angles_follow_length", False)
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)  # of all tokens, in characters
        of_model = model.generation_config.eos_token_id
        ends = tokenizer.eos_token_id if of_model is None else of_model
        self._ends: list[int] = ends if isinstance(ends, list) else [] if ends is None else [ends]
        # Requests say how tokens are chosen, and not a checkpoint's penalties, beams or suppressed tokens.
        model.generation_config = GenerationConfig()
        self._model = model
        self._is_stopping = False
        self._open: set[Completion] = set()
        self._waiting: list[Completion] = []
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "generate")
        self.log_probabilities([0, 0], 2)  # before the first request, as the first forward pass builds the CPU kernel

    def require_name(self, name: str | None) -> None:
        """Raise HTTPException if a request asks for another model."""
        if name not in (None, self.name):
            raise HTTPException(404, f"The model {quoted(name)} is not here; this server has {self.name!r}.")

    def prepare(self, request: CompletionRequest | ChatRequest) -> list["Completion"]:
        """Turn the prompts of a request, or its messages, into tokens. Raises HTTPException if they do not fit."""
        self.require_name(request.model)
        if isinstance(request, ChatRequest):
            return [self._completion(request, self._conversation(request), continues_prompt=False)]
        made = []
        for prompt in request.prompt:
            tokens = self._tokens_of(prompt) if isinstance(prompt, str) else prompt
            made.append(self._completion(request, tokens, logprobs=request.logprobs))
            if request.echo:
                made[-1].echo = prompt if isinstance(prompt, str) else decoded(self.tokenizer, prompt)
        return made

    def _tokens_of(self, text: str, **options: Any) -> list[int]:
        """Tokenise text. Raises HTTPException before that, which may take a minute, if its tokens cannot fit."""
        if len(text) > self.context * self._longest:
            raise HTTPException(
                400, f"The model's context of {self.context} tokens cannot hold {len(text):,} characters."
            )
        return list(self.tokenizer(text, **options)["input_ids"])

    def _conversation(self, request: ChatRequest) -> list[int]:
        if not self.tokenizer.chat_template:
            raise HTTPException(400, f"The model {self.name!r} has no chat template: send a prompt to /v1/completions.")
        messages = [message.model_dump() for message in request.messages]
        try:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program of the checkpoint's
            reason = " ".join(str(error).split()).rstrip(".")
            raise HTTPException(400, f"The chat template refuses the messages: {reason}.") from None
        return self._tokens_of(text, add_special_tokens=False)

    def _completion(self, request: TextRequest, prompt: list[int], **settings: Any) -> "Completion":
        of_model = self._model.config
        if not prompt and of_model.bos_token_id is None:
            raise HTTPException(400, "The prompt is empty, and this model has no token that begins a text.")
        prompt = prompt or [of_model.bos_token_id]
        if wrong := [token for token in prompt if not 0 <= token < of_model.vocab_size]:
            raise HTTPException(400, f"Tokens must lie in 0 … {of_model.vocab_size - 1}, got {quoted(wrong[0])}.")
        free = self.context - len(prompt)
        new = 1 if request.max_tokens is None else request.max_tokens
        if new > free:
            both = f"the prompt's {len(prompt)} and {new} new ones"
            raise HTTPException(400, f"The model's context of {self.context} tokens cannot hold {both}.")
        choice: dict[str, Any] = {"do_sample": False}
        if request.temperature >= LOWEST_TEMPERATURE:
            choice = {"do_sample": True, "top_k": 0, "temperature": request.temperature, "top_p": request.top_p}
        # A stop string that is a special token is not found in a text, which has none.
        names = {token.content: number for number, token in self.tokenizer.added_tokens_decoder.items()}
        config = GenerationConfig(
            max_new_tokens=free if request.max_tokens is None else max(new, 1),
            eos_token_id=[*self._ends, *(names[stop] for stop in request.stop if stop in names)] or None,
            pad_token_id=self.tokenizer.pad_token_id or 0,
            **choice,
        )
        return Completion(self, request, prompt, config, **settings)

    @torch.inference_mode()
    def log_probabilities(self, tokens: list[int], last: int) -> Tensor:
        """Compute the log-probabilities of all tokens after each of the last ones of a text: (last, vocabulary)."""
        ids = torch.tensor([tokens], device=self._model.device)
        logits = self._model(ids, use_cache=False, logits_to_keep=last).logits[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)

    async def tokens(self, job: "Completion") -> AsyncGenerator[int, None]:
        """Yield each generated token as it comes. Closing the iterator before its end cancels the request.

        Raises:
            HTTPException: generating failed, or the server stops.
        """
        if self._is_stopping:
            raise HTTPException(503, "The server is stopping.")
        loop = asyncio.get_running_loop()
        new: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        job.put = lambda item: loop.call_soon_threadsafe(new.put_nowait, item)
        with self._lock:
            self._waiting.append(job)
        # For this job, if no batch before has had it; soon, when the other prompts of its request wait, too.
        loop.call_soon(self._thread.submit, self._generate)
        self._open.add(job)
        try:
            while (token := await new.get()) is not None:
                if isinstance(token, Exception):
                    raise token
                yield token
        finally:
            self._open.discard(job)
            job.is_cancelled = True

    async def compute(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Compute something else in the thread that generates, when its turn has come."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def stop(self) -> None:
        """End all texts that are being generated; none may be begun afterwards."""
        self._is_stopping = True
        for job in self._open:
            job.put(HTTPException(503, "The server is stopping."))

    def close(self) -> None:
        """Wait until nothing is generated any more."""
        self._thread.shutdown()

    def _next_batch(self) -> "list[Completion]":
        """Take the job that has waited longest, and those that go with it in the model's context."""
        batch: list[Completion] = []
        with self._lock:
            waiting = [job for job in self._waiting if not job.is_cancelled]
            for job in waiting:
                jobs = [*batch, job]
                size = max(len(each.prompt) for each in jobs) + max(each.config.max_new_tokens for each in jobs)
                fits = len(jobs) <= MOST_IN_A_BATCH and size <= self.context and job.kind == jobs[0].kind
                batch = jobs if fits else batch
            self._waiting = [job for job in waiting if job not in batch]
        return batch

    def _generate(self) -> None:
        """Put the tokens of the next jobs, and None after the last of each."""
        batch = self._next_batch()
        if not batch:
            return
        goes_on, width = dict(enumerate(batch)), max(len(job.prompt) for job in batch)

        def after_token(ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            """Hand on the newest tokens, as one of the criteria by which `generate` stops."""
            for place, token in enumerate(ids[:, -1].tolist()):
                if (job := goes_on.get(place)) is not None:
                    job.put(token)
                    is_full = ids.shape[1] - width == job.config.max_new_tokens
                    if is_full or job.is_cancelled or token in (job.config.eos_token_id or []):
                        goes_on.pop(place).put(None)
            return torch.tensor([place not in goes_on for place in range(len(batch))], device=ids.device)

        try:
            if (seed := batch[0].request.seed) is not None:
                torch.manual_seed(seed)
            config = max((job.config for job in batch), key=lambda config: config.max_new_tokens)
            prompts = [torch.tensor(job.prompt, device=self._model.device) for job in batch]
            masks = [torch.ones_like(prompt) for prompt in prompts]
            ids, mask = (pad_sequence(x, batch_first=True, padding_side="left") for x in (prompts, masks))
            self._model.generate(ids, config, attention_mask=mask, stopping_criteria=[after_token])
        except Exception as error:  # whatever it is, the requests have to be told, and the next ones answered
            logging.getLogger(__name__).exception("Generating failed.")
            for job in goes_on.values():
                job.put(HTTPException(500, f"The server failed: {type(error).__name__}: {error}"))


@dataclass(eq=False)
class Completion:
    """A model's continuation of one prompt, and the job of generating it, which waits for its turn or is in it."""

    served: ServedModel
    request: TextRequest
    prompt: list[int]
    config: GenerationConfig
    echo: str | None = None
    """The prompt's text, if the answer begins with it."""
    logprobs: int | None = None
    """How many of the most likely tokens are named at each place; None for no log-probabilities."""
    continues_prompt: bool = True
    """Whether the text continues the prompt's, perhaps with a space. An answer in a chat begins anew."""
    new_tokens: list[NewToken] = field(default_factory=list)
    """All that are generated, those of a stop string too."""
    is_stopped: bool = False
    """Whether a stop string has ended the text."""
    rows: Tensor | None = None
    """Log-probabilities in the places of the tokens, once they are computed."""
    put: Put = field(init=False)
    """Hands on a generated token, an error, or None after the last token."""
    is_cancelled: bool = False

    @property
    def kind(self) -> object:
        """What the jobs of one batch have in common: how tokens are chosen. One stands alone with a seed, or where the
        length of others would turn its queries otherwise.
        """
        alone = self.request.seed is not None or self.served.angles_follow_length
        return self if alone else self.config.to_dict() | {"max_new_tokens": None}

    @property
    def reason(self) -> str:
        """Why the text has ended, in OpenAI's words."""
        last = self.new_tokens[-1].token if self.new_tokens else None
        return "stop" if self.is_stopped or last in (self.config.eos_token_id or []) else "length"

    async def pieces(self) -> AsyncGenerator[str, None]:
        """Generate the text, and hand on each piece once no stop string can begin in it. Raises HTTPException."""
        if self.echo:
            yield self.echo
        texts = TokenTexts(self.served.tokenizer, len(self.echo or ""), self.prompt if self.continues_prompt else [])
        held = ""
        async with aclosing(self._tokens()) as tokens:
            async for token in tokens:
                self.new_tokens.append(texts.read(token))
                piece, held, self.is_stopped = until_stop(held + self.new_tokens[-1].text, self.request.stop)
                if piece:
                    yield piece
                if self.is_stopped:
                    return
        piece, held, self.is_stopped = until_stop(held + texts.rest(), self.request.stop)
        if piece + held:
            yield piece + held

    async def _tokens(self) -> AsyncGenerator[int, None]:
        if self.logprobs is not None and self.request.max_tokens == 1 and not self.config.do_sample:
            # One greedy token, for which programs that score texts ask, comes from the pass that scores the prompt.
            kept = 1 if self.echo is None else len(self.prompt)
            self.rows = await self.served.compute(self.served.log_probabilities, self.prompt, kept)
            yield int(self.rows[-1].argmax())
        elif self.request.max_tokens != 0:
            async with aclosing(self.served.tokens(self)) as tokens:
                async for token in tokens:
                    yield token

    async def whole(self, is_disconnected: Callable[[], Awaitable[bool]]) -> tuple[str, Logprobs | None]:
        """Generate all of the text, with its log-probabilities; only a part if nobody waits for it any more."""
        text = ""
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                text += piece
                if await is_disconnected():
                    break
        return text, None if self.logprobs is None else await self.served.compute(self._scored, len(text))

    def _scored(self, size: int) -> Logprobs:
        """Return the field ``logprobs`` of OpenAI's completions, for the tokens that begin in a text of this size."""
        texts, names = TokenTexts(self.served.tokenizer), TokenNames(self.served.tokenizer)
        echoed = [] if self.echo is None else [texts.read(token) for token in self.prompt]
        new = [token for token in self.new_tokens if token.offset < size or not self.is_stopped]
        text, shown = [*self.prompt, *(token.token for token in new)], [*echoed, *new]
        expected = min(len(shown), len(text) - 1)  # nothing is expected in the place of a text's first token
        if self.rows is None:
            self.rows = self.served.log_probabilities(text[:-1], expected) if expected else torch.empty(0, 0)
        named = names.of(text, len(text) - len(shown))
        own: list[float | None] = [None] * (len(shown) - expected)
        top: list[dict[str, float] | None] = [None] * len(own)
        for place, row in zip(range(len(text) - expected, len(text)), self.rows, strict=False):
            before = text[max(0, place - READ_BEFORE) : place]
            own.append(float(row[text[place]]))
            # Several tokens can have the same name; the likeliest of them is named.
            likeliest = reversed(row.topk(min(self.logprobs or 0, len(row))).indices.tolist())
            others = {names.after(before, token): float(row[token]) for token in likeliest}
            top.append({named[len(own) - 1]: float(row[text[place]])} | others)
        offsets = [token.offset for token in shown]
        return {"tokens": named, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}


def until_stop(text: str, stops: list[str]) -> tuple[str, str, bool]:
    """Split a text before a stop string, or an ending that may begin one; and say whether one ends the text."""
    found = [place for stop in stops if (place := text.find(stop)) >= 0]
    if found:
        return text[: min(found)], "", True
    sizes = ((stop, size) for stop in stops for size in range(1, min(len(stop), len(text) + 1)))
    held = max((size for stop, size in sizes if text.endswith(stop[:size])), default=0)
    return text[: len(text) - held], text[len(text) - held :], False
