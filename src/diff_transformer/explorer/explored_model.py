"""Runs a causal language model over a text with any λ and leaves a trace, whichever model it is; and reads its text."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from diff_transformer.attention_types import ATTENTION_TYPES
from diff_transformer.convert import as_our_model
from diff_transformer.explorer.trace import Maps, RecomputedMaps, ReturnedMaps, Trace
from diff_transformer.model import DiffTransformerForCausalLM
from diff_transformer.model.interface_attention import attention_implementation
from diff_transformer.nn import Attention
from diff_transformer.utils.suggestions import did_you_mean, quoted
from diff_transformer.utils.token_texts import TokenNames

LARGEST_LAMBDA = 10.0  # of either sign; learned ones lie near 0 … 1
MOST_TOKENS = 2048
LONG_WORK = 1 << 38  # runs × tokens × parameters: more take a processor ten seconds or longer
_LARGEST_RETURNED = 4 << 30  # bytes of maps that a model of transformers may return at once

_LOGITS_AT_ONCE = 256  # positions


@dataclass(frozen=True)
class LambdaSettings:
    """Values of λ in place of the learned ones. A head's value comes before its layer's; others follow the factor.

    Attributes:
        factor: multiplier of the learned λ of all heads.
        layers: by the layer's number, counted from 1.
        heads: by the layer's number and the head's, both counted from 1.
    """

    factor: float = 1.0
    layers: Mapping[int, float] = field(default_factory=dict)
    heads: Mapping[tuple[int, int], float] = field(default_factory=dict)

    @classmethod
    def read(cls, raw: Any) -> "LambdaSettings":
        """Read JSON: {"factor": 0.5, "layers": {"2": 0.3}, "heads": {"2.1": 0}}, each part of it optional.

        Raises:
            ValueError: another key, or a value that is not a number of at most ``LARGEST_LAMBDA`` in size.
        """
        parts = {} if raw is None else raw
        try:
            layers = {int(layer): value for layer, value in (parts.get("layers") or {}).items()}
            places = {place.partition("."): value for place, value in (parts.get("heads") or {}).items()}
            heads = {(int(layer), int(head)): value for (layer, _, head), value in places.items()}
            factor = 1.0 if parts.get("factor") is None else parts["factor"]
            values = [factor, *layers.values(), *heads.values()]
            is_right = all(type(value) in (int, float) and abs(value) <= LARGEST_LAMBDA for value in values)
        except (AttributeError, TypeError, ValueError):
            is_right = False
        if not is_right or not parts.keys() <= {"factor", "layers", "heads"}:
            raise ValueError(
                'lambdas must be like {"factor": 0.5, "layers": {"2": 0.3}, "heads": {"2.1": 0}}, counted from 1, with '
                f"numbers of at most {LARGEST_LAMBDA:g} in size; got {quoted(raw)}."
            )
        return cls(factor, layers, heads)

    def of_layer(self, layer: int, heads: int) -> list[float | None]:
        """Return λ of each head of a layer, counted from 1; None for the learned one times the factor."""
        of_layer = self.layers.get(layer)
        return [self.heads.get((layer, head), of_layer) for head in range(1, heads + 1)]

    def __bool__(self) -> bool:
        return self.factor != 1 or bool(self.layers) or bool(self.heads)


LEARNED = LambdaSettings()


def attentions_of(model: nn.Module) -> list[Any]:
    """Return the attention of each layer, of a model with that of this package."""
    return [module for module in model.modules() if isinstance(module, Attention)]


@contextmanager
def replaced_lambdas(model: nn.Module, settings: LambdaSettings, heads: int) -> Iterator[None]:
    """Make a differential model compute with the λ of the settings, in all of its attention implementations.

    The model is changed while this lasts, so no other thread may use it.
    """
    attentions = attentions_of(model) if settings else []
    try:
        for number, attention in enumerate(attentions, start=1):
            values = settings.of_layer(number, heads)
            # An attribute of the module comes before the method of its class.
            attention.lambdas = partial(_mixed_lambda, attention.lambdas, values, settings.factor)
        yield
    finally:
        for attention in attentions:
            vars(attention).pop("lambdas", None)


def _mixed_lambda(learned: Any, values: Sequence[float | None], factor: float, hidden_states: Tensor) -> Tensor:
    """Return λ of a layer, (B, H, N): each head's given value, or for None the learned one times the factor."""
    own = learned(hidden_states)
    given = own.new_tensor([math.nan if value is None else value for value in values]).view(1, -1, 1)
    own = (factor * own).expand(hidden_states.shape[0], len(values), hidden_states.shape[1])
    return torch.where(given.isnan(), own, given)


class ExploredModel:
    """A model of which the explorer shows the maps.

    Args:
        model: a causal language model of this package or of transformers.
        name: its name on the page, such as the name of its folder.

    Attributes:
        label: the kind of model, such as "DIFF"; of one with groups also how many heads share a noise head.
        layers, heads, kv_heads: how many there are, heads as the layer computes them: a DIFF layer has half as many
            as the Transformer.
        subtracts: whether each head has two maps.
        noise_heads: how many second maps a layer has, if groups of heads share them; else None.
        lambda_per_token: whether the learned λ differs from token to token (DIFF V2, token_lambda).
        most_tokens: the longest text.
        grid: rows and columns of the patches of an image; None for a model that reads text.
    """

    grid: tuple[int, int] | None = None
    is_causal = True
    noise_heads: int | None = None
    attentions: Sequence[Any] = ()  # of which the maps are recomputed; else the model returns them

    def __init__(self, model: Any, name: str) -> None:
        adapter = getattr(model, "active_peft_config", None)
        if adapter is not None and (adapter.is_prompt_learning or model.config.model_type == "diffllama"):
            raise ValueError(f"{name} is not shown with PEFT's {adapter.peft_type.value}: merge it or remove it first.")
        model = getattr(model, "get_base_model", lambda: model)()  # of PEFT's, whose adapters stay in its layers
        model = getattr(model, "_orig_mod", model)  # of torch.compile's
        if model.config.model_type == "diffllama":
            model = as_our_model(model)
        self.model, self.name = model.eval(), name
        config = model.config.get_text_config()
        self.vocab_size = config.vocab_size
        self.most_tokens = min(MOST_TOKENS, getattr(config, "max_position_embeddings", None) or MOST_TOKENS)
        if isinstance(model, DiffTransformerForCausalLM):
            self._read_layers()
            return
        # A state-space model has no heads, and an encoder, or a model with another output layer, writes no text.
        if not model.can_generate() or config.is_encoder_decoder or not hasattr(config, "num_attention_heads"):
            raise ValueError(f"{name} must be a causal language model with attention, got {type(model).__name__}.")
        self.label = type(model).__name__.removesuffix("ForCausalLM")
        self.layers, self.heads = config.num_hidden_layers, config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads  # GPT-2's has no such setting
        self.subtracts = self.lambda_per_token = False

    def _read_layers(self) -> None:
        """Take kind and number of heads from the layers' attention, which must be this package's."""
        self.attentions = attentions_of(self.model)
        if not self.attentions:
            raise ValueError(f"model must have attention of this package in it, got {type(self.model).__name__}.")
        first = self.attentions[0]
        if len({(type(one), one.o_proj.in_features, one.num_key_value_groups) for one in self.attentions}) > 1:
            raise ValueError(f"the layers of {self.name} must have one type of attention, with as many heads in each.")
        kinds = {kind.layer_class(): kind for kind in ATTENTION_TYPES.values()}
        spec = next((kinds[each] for each in type(first).__mro__ if each in kinds), None)
        if spec is None:
            raise ValueError(f"the attention must be of one of this package's types, got {type(first).__name__}.")
        self.label, self.subtracts = spec.label, spec.differential
        self.lambda_per_token = spec.differential and hasattr(first, "lambda_proj")
        self.layers, self.heads = len(self.attentions), first.o_proj.in_features // first.value_width
        noise_heads = self.heads // first.ratio if spec.differential else 0
        self.kv_heads = (self.heads + noise_heads) // first.num_key_value_groups
        if spec.grouped:
            self.noise_heads = noise_heads
            self.label += f", {first.ratio} signal heads to a noise head"

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Refuse, with a sentence, no tokens, more than the model or the explorer takes, and unknown ones."""
        if not tokens:
            raise ValueError("The text has no tokens; write something.")
        if len(tokens) > self.most_tokens:
            why = "the explorer takes" if self.most_tokens == MOST_TOKENS else f"the context of {self.name} holds"
            raise ValueError(f"The text has {len(tokens):,} tokens, and {why} {self.most_tokens:,}.")
        for token in tokens:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"Tokens of {self.name} are numbers in 0 … {self.vocab_size - 1}, got {quoted(token, 40)}."
                )

    def check(self, tokens: Sequence[int], settings: LambdaSettings) -> None:
        """Refuse, with a sentence, tokens and a λ that the model cannot be run with."""
        self.check_tokens(tokens)
        if settings and not self.subtracts:
            raise ValueError(f"{self.name} subtracts nothing, so it has no λ to set.")
        for layer, head in [*((layer, 1) for layer in settings.layers), *settings.heads]:
            if not (1 <= layer <= self.layers and 1 <= head <= self.heads):
                raise ValueError(
                    f"λ is set for head {head} of layer {layer}, but the model has layers 1 … {self.layers} with heads "
                    f"1 … {self.heads}."
                )

    @torch.no_grad()
    def trace(self, tokens: Sequence[int], settings: LambdaSettings = LEARNED) -> Trace:
        """Run the model over N tokens with the λ of the settings. No other thread may use the model meanwhile.

        Raises:
            ValueError: tokens or settings that :meth:`check` refuses.
        """
        self.check(tokens, settings)
        input_ids = torch.tensor([list(tokens)], device=self.model.device)
        if not self.attentions:
            return self._returned(input_ids)
        output, maps = self._run(self.model.model, settings, input_ids=input_ids, use_cache=False)
        # A part at a time: the logits of all positions would be many times as large as all else.
        logits = map(self.model.lm_head, output.last_hidden_state[0].split(_LOGITS_AT_ONCE))
        return _trace_of(input_ids[0], logits, maps)

    def takes_long(self, runs: int, tokens: Sequence[int]) -> bool:
        """Return whether so many runs over a text are too much work for somebody who waits for an answer."""
        return runs * len(tokens) * sum(weights.numel() for weights in self.model.parameters()) > LONG_WORK

    def most_changed_head(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Return the layer, and in it the head, counted from 1, whose λ = 0 changes the next prediction most.

        It takes a run for each layer and for each head of one; None if so many would take long.
        """
        if self.takes_long(1 + self.layers + self.heads, tokens):
            return None
        learned = self.trace(tokens)

        def change(settings: LambdaSettings) -> float:
            return learned.divergence(self.trace(tokens, settings))

        layer = max(range(1, self.layers + 1), key=lambda layer: change(LambdaSettings(layers={layer: 0.0})))
        head = max(range(1, self.heads + 1), key=lambda head: change(LambdaSettings(heads={(layer, head): 0.0})))
        return layer, head

    def most_changed_length(self, tokens: Sequence[int]) -> int:
        """Return after how many tokens, past the first third, λ = 0 takes most probability from the next.

        All of them if that would take long, or λ = 0 takes none.
        """
        first = len(tokens) // 3
        if len(tokens) < 3 or self.takes_long(2, tokens):
            return len(tokens)
        learned, off = (
            self.trace(tokens, lambdas).token_losses.neg().exp() for lambdas in (LEARNED, LambdaSettings(factor=0.0))
        )
        taken = (learned - off)[first:]
        return first + int(taken.argmax()) + 1 if taken.max() > 0 else len(tokens)

    @torch.no_grad()
    def _run(
        self, module: nn.Module, settings: LambdaSettings, *inputs: Tensor, **named: Any
    ) -> tuple[Any, RecomputedMaps]:
        """Return the output of the model, or of the part with its layers, with the λ of the settings; and the maps."""
        calls: list[tuple[nn.Module, Tensor, Any]] = []

        def keep(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            calls.append((module, *self._layer_inputs(*inputs, **named)))

        with ExitStack() as hooks, replaced_lambdas(self.model, settings, self.heads):
            for attention in self.attentions:
                hooks.enter_context(attention.register_forward_pre_hook(keep, with_kwargs=True))
            output = module(*inputs, **named)
            if [attention for attention, *_ in calls] != self.attentions:
                raise ValueError(f"{self.name} must call each attention once in a run, in the order of its modules.")
            _, normed, positions = zip(*calls, strict=True)
            pairs = zip(self.attentions, normed, strict=True) if self.subtracts else ()
            lambdas = [attention.lambdas(x).expand(1, self.heads, x.shape[1]) for attention, x in pairs]
        return output, RecomputedMaps(self.attentions, normed, positions, lambdas, self.is_causal)

    def _layer_inputs(
        self, hidden_states: Tensor, position_embeddings: Any = None, *_: Any, **__: Any
    ) -> tuple[Tensor, Any]:
        """Return the arguments of an attention's call from which it projects queries and keys."""
        return hidden_states, position_embeddings

    def _returned(self, input_ids: Tensor) -> Trace:
        size = self.layers * self.heads * input_ids.shape[1] ** 2 * self.model.dtype.itemsize
        if size > _LARGEST_RETURNED:
            raise ValueError(
                f"The maps of {input_ids.shape[1]:,} tokens of {self.name} take {size / 1e9:.0f} GB at once, as "
                "transformers returns them all; show a shorter text."
            )
        with attention_implementation(self.model, "eager"):  # the others compute no maps
            output = self.model(input_ids=input_ids, use_cache=False, output_attentions=True)
        found = getattr(output, "attentions", None) or ()
        if len(found) != self.layers or any(layer is None or layer.triu(1).any() for layer in found):
            kind = type(self.model).__name__
            raise ValueError(
                f"{self.name} cannot be shown: {kind} does not return a causal map of every head and layer."
            )
        maps = ReturnedMaps([layer[0] for layer in found])
        return _trace_of(input_ids[0], output.logits[0].split(_LOGITS_AT_ONCE), maps)


def _trace_of(tokens: Tensor, logits: Iterable[Tensor], maps: Maps) -> Trace:
    losses, following = [], torch.empty(0)
    for part, answers in zip(logits, tokens.roll(-1).split(_LOGITS_AT_ONCE), strict=True):
        known = part.to(torch.promote_types(part.dtype, torch.float32)).log_softmax(-1)
        losses.append(-known.gather(1, answers.unsqueeze(1)).squeeze(1))
        following = known[-1]
    return Trace(tuple(tokens.tolist()), following.cpu(), torch.cat(losses)[:-1].cpu(), maps)


class TokenizerVocabulary:
    """A tokenizer of transformers."""

    between = ""  # of the pieces of a text, which are the tokens' own
    note = ""  # a hint on how to write a text

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.words = tokenizer, tokenizer.get_vocab()  # the tokens by their names
        self._names = TokenNames(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text. Raises ValueError, with a sentence, for one that has none."""
        _check_text(text)
        return list(self.tokenizer(text)["input_ids"])

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the name of each token of a text."""
        return [self.piece_after(tokens[:place], token) for place, token in enumerate(tokens)]

    def piece_after(self, tokens: Sequence[int], token: int) -> str:
        """Return the text that a token adds to others, else its name, or its number where that is unknown."""
        return self._names.after(tokens, token) or str(self.tokenizer.convert_ids_to_tokens(token) or f"#{token}")

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class WordVocabulary:
    """Words with white space between them, one for each token, for a model without a tokenizer.

    Args:
        words: the word of each token, all different and without white space.
        note: a hint on how to write such a text.
    """

    between = " "

    def __init__(self, words: Sequence[str], note: str = "") -> None:
        self.words, self.note = tuple(words), note
        self._tokens = {word: token for token, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        _check_text(text)
        words = text.split()
        for word in words:
            if word not in self._tokens:
                hint = did_you_mean(word[:40], self.words)
                raise ValueError(
                    f"The model has no token {quoted(word)}: it reads words of {self.words[0]!r} … {self.words[-1]!r}, "
                    f"{len(self.words)} in all, with spaces between them{hint}"
                )
        return [self._tokens[word] for word in words]

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.pieces(tokens))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        return [self.words[token] for token in tokens]

    def piece_after(self, tokens: Sequence[int], token: int) -> str:
        # The output layer may have more rows than the task has tokens.
        return self.words[token] if token < len(self.words) else f"#{token}"


Vocabulary: TypeAlias = TokenizerVocabulary | WordVocabulary


def _check_text(text: object) -> None:
    """Refuse a value that is no text, and text that is no Unicode, each with a sentence."""
    if not isinstance(text, str):
        raise ValueError(f"text must be a string, got {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"The text has half of a surrogate pair at character {error.start + 1}, which is no Unicode."
        ) from None
