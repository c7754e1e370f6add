"""A model as the server uses it: its names, its tokenizer, its context, and what generates and scores with it."""

from typing import Any

from diff_transformer.serve.api_requests import RequestError, Sampling
from diff_transformer.serve.generation_engine import BatchingEngine, Engine, Generation, SequentialEngine
from diff_transformer.serve.scored_tokens import Scorer
from diff_transformer.suggestions import quoted

# For so many requests that fill the context the cache of continuous batching has space, unless told otherwise.
CACHED_CONTEXTS = 16


class ServedModel:
    """A loaded model with its tokenizer.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        name: what requests call it.
        aliases: what they may call it, too, such as the folder that it came from.
        continuous_batching: whether requests share a batch.
        cache_tokens: of how many tokens a batch holds keys and values; 16 full contexts unless given.

    Raises:
        ValueError: the cache is smaller than one context.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        *,
        aliases: tuple[str, ...] = (),
        continuous_batching: bool = False,
        cache_tokens: int | None = None,
    ) -> None:
        self.name, self.aliases, self.tokenizer = name, aliases, tokenizer
        self.vocabulary: int = model.config.vocab_size
        self.context: int = model.config.max_position_embeddings
        self._start: int | None = model.config.bos_token_id
        if cache_tokens is not None and cache_tokens < self.context:
            raise ValueError(
                f"The cache must hold one context of {self.context} tokens or more, got a cache for {cache_tokens}."
            )
        self.scorer = Scorer(model, tokenizer)
        # The first forward pass builds the CPU kernel. It comes before the first request, and before the engine makes
        # the model attend otherwise.
        self.scorer.log_probabilities([0, 0])
        self.engine: Engine
        if continuous_batching:
            self.engine = BatchingEngine(model, tokenizer, cache_tokens or CACHED_CONTEXTS * self.context)
        else:
            self.engine = SequentialEngine(model, tokenizer)

    def require_name(self, name: str | None) -> None:
        """Raise RequestError where a request asks for another model."""
        if name is not None and name not in (self.name, *self.aliases):
            raise RequestError(
                f"The model {quoted(name)} is not here; this server has {self.name!r}.", status=404, field="model"
            )

    def tokens_of(self, prompt: str | list[int]) -> list[int]:
        """A prompt's tokens; of an empty prompt the token that begins a text. Raises RequestError."""
        tokens: list[int] = self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        if not tokens:
            if self._start is None:
                raise RequestError(
                    "The prompt is empty, and this model has no token that begins a text.", field="prompt"
                )
            return [self._start]
        wrong = [token for token in tokens if not 0 <= token < self.vocabulary]
        if wrong:
            raise RequestError(f"Tokens must lie in 0 … {self.vocabulary - 1}, got {wrong[0]}.", field="prompt")
        return tokens

    def tokens_of_messages(self, messages: list[dict[str, str]]) -> list[int]:
        """The tokens of a conversation, up to where the answer begins. Raises RequestError."""
        from jinja2 import TemplateError

        if self.tokenizer.chat_template is None:
            raise RequestError(
                f"The model {self.name!r} has no chat template, so it cannot answer messages; send its prompt to "
                "/v1/completions."
            )
        try:
            encoded = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except TemplateError as error:
            raise RequestError(f"The chat template refuses the messages: {error}.", field="messages") from None
        return self.tokens_of(list(encoded["input_ids"]))

    def fitted(self, tokens: list[int], sampling: Sampling) -> Sampling:
        """The sampling with its number of new tokens. Raises RequestError where the context cannot hold them."""
        free = self.context - len(tokens)
        wanted = sampling.max_tokens
        if free < (1 if wanted is None else wanted):
            new = "any" if wanted is None else wanted
            raise RequestError(
                f"The model's context of {self.context} tokens cannot hold the prompt's {len(tokens)} and {new} new "
                "ones.",
                field="max_tokens",
            )
        fitted = Sampling(free if wanted is None else wanted, sampling.temperature, sampling.top_p, sampling.seed)
        self.engine.require_running()
        return fitted

    def generation(self, tokens: list[int], sampling: Sampling) -> Generation:
        """The text after some tokens, to be generated; `fitted` has made the sampling."""
        return Generation(self.engine, tokens, sampling)
