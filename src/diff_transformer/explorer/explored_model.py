"""Runs a causal language model over a text and leaves a trace, whichever model it is.

Ours can run with another λ. transformers' DiffLlama is converted to ours first, so that it can, too. Any other causal
language model of transformers gives the attention weights that it returns.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from diff_transformer.convert import as_our_model
from diff_transformer.explorer.lambda_settings import LEARNED, LambdaSettings, replaced_lambdas
from diff_transformer.explorer.trace import RecomputedMaps, ReturnedMaps, Trace
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.model.interface_attention import attention_implementation
from diff_transformer.utils.suggestions import quoted

MOST_TOKENS = 2048
LONG_WORK = 1 << 38  # runs × tokens × parameters: more take a processor ten seconds or longer
_LOGITS_AT_ONCE = 256  # positions; the logits of all would be many times as large as all else
_LARGEST_RETURNED = 4 << 30  # bytes of maps that a model of transformers may return at once


def subtracts(config: Any) -> bool:
    """Whether each head of a model with this configuration has two maps, one of which is taken from the other."""
    if isinstance(config, DiffTransformerConfig):
        return config.described.differential
    return config.model_type == "diffllama"


class ExploredModel:
    """A model of which the explorer shows the maps.

    Args:
        model: a causal language model of this package or of transformers.
        name: how the page calls it, such as the name of its folder.

    Attributes:
        label: what kind of model it is, such as "DIFF"; of one with groups also how many heads share a noise head.
        layers, heads, kv_heads: how many there are, heads as the layer computes them: a DIFF layer has half as many
            as the Transformer.
        subtracts: whether each head has two maps.
        noise_heads: how many second maps a layer has, where groups of heads share them; None where they do not. The
            signal heads of noise head 1 are heads 1 … r.
        lambda_per_token: whether the learned λ differs from token to token (DIFF V2, token_lambda).
        most_tokens: the longest text.
    """

    def __init__(self, model: Any, name: str) -> None:
        if model.config.model_type == "diffllama":
            model = as_our_model(model)
        self.model, self.name = model.eval(), name
        config = model.config.get_text_config()
        self.is_ours = isinstance(model, DiffTransformerForCausalLM)
        described = model.config.described if self.is_ours else None
        self.label = described.label if described else type(model).__name__.removesuffix("ForCausalLM")
        self.layers = config.num_hidden_layers
        self.subtracts = subtracts(config)
        self.lambda_per_token = described is not None and model.config.has_token_lambda
        self.heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads  # GPT-2's has no such setting
        self.noise_heads = described.noise_heads(model.config) if described else None
        if described:
            if self.noise_heads is not None:
                ratio = described.heads(model.config) // self.noise_heads
                self.label += f", {ratio} signal heads to a noise head"
            self.heads, self.kv_heads = described.heads(model.config), described.key_heads(model.config)
        self.vocab_size = config.vocab_size
        longest = getattr(config, "max_position_embeddings", None) or MOST_TOKENS
        self.most_tokens = min(MOST_TOKENS, longest)

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Refuse, with a sentence, no tokens, more than the model or the explorer takes, and unknown ones."""
        if not tokens:
            raise ValueError("The text has no tokens; write something.")
        if len(tokens) > self.most_tokens:
            why = "the explorer takes" if self.most_tokens == MOST_TOKENS else f"the context of {self.name} holds"
            raise ValueError(f"The text has {len(tokens):,} tokens, and {why} {self.most_tokens:,}.")
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"Tokens of {self.name} are numbers in 0 … {self.vocab_size - 1}, got {quoted(token, 40)}."
                )

    @torch.no_grad()
    def trace(self, tokens: Sequence[int], settings: LambdaSettings = LEARNED) -> Trace:
        """Run the model over N tokens with the λ of the settings. No other thread may use the model meanwhile.

        Raises:
            ValueError: tokens that :meth:`check_tokens` refuses; settings of heads that there are not; a λ for a model
                that has none.
        """
        self.check_tokens(tokens)
        if settings and not self.subtracts:
            raise ValueError(f"{self.name} subtracts nothing, so it has no λ to set.")
        settings.check(self.layers, self.heads)
        input_ids = torch.tensor([list(tokens)], device=self.model.device)
        return self._traced(input_ids, settings) if self.is_ours else self._returned(input_ids)

    def takes_long(self, runs: int, tokens: Sequence[int]) -> bool:
        """Whether so many runs over a text are too much work for somebody who waits for an answer."""
        return runs * len(tokens) * self.model.num_parameters() > LONG_WORK

    def most_changed_head(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """The layer, and in it the head, both counted from 1, where λ = 0 changes most what the model predicts next.

        It takes a run for each layer and for each head of one; None where so many would take long.
        """
        if self.takes_long(1 + self.layers + self.heads, tokens):
            return None
        learned = self.trace(tokens)

        def change(settings: LambdaSettings) -> float:
            return learned.divergence(self.trace(tokens, settings))

        layer = max(range(1, self.layers + 1), key=lambda layer: change(LambdaSettings(layers={layer: 0.0})))
        head = max(range(1, self.heads + 1), key=lambda head: change(LambdaSettings(heads={(layer, head): 0.0})))
        return layer, head

    def _traced(self, input_ids: Tensor, settings: LambdaSettings) -> Trace:
        decoder = self.model.model
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        with replaced_lambdas(self.model, settings, self.heads):
            output = decoder(input_ids=input_ids, position_ids=positions, use_cache=False, output_hidden_states=True)
            attentions = [layer.self_attn for layer in decoder.layers]
            normed = [
                layer.input_layernorm(states)
                for layer, states in zip(decoder.layers, output.hidden_states, strict=False)  # and one after the last
            ]
            lambdas = [attention.lambdas(x) for attention, x in zip(attentions, normed, strict=True)]
        tables = decoder.rotary_emb(normed[0], position_ids=positions)
        maps = RecomputedMaps(attentions, normed, lambdas, tables)
        following, losses = self._predictions(output.last_hidden_state[0], input_ids[0])
        values = None
        if self.subtracts:
            shape = (1, self.heads, input_ids.shape[1])
            values = torch.stack([lam.expand(shape).mean((0, 2)) for lam in lambdas if lam is not None]).cpu()
        return Trace(tuple(input_ids[0].tolist()), following, losses, values, maps)

    def _predictions(self, hidden_states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Log probabilities after the last token, (V,), and the losses of all but the first token."""
        losses, following = [], hidden_states.new_empty(0)
        for states, answers in zip(
            hidden_states.split(_LOGITS_AT_ONCE), tokens.roll(-1).split(_LOGITS_AT_ONCE), strict=True
        ):
            logits = self.model.lm_head(states)
            known = log_probabilities(logits)
            losses.append(-known.gather(1, answers.unsqueeze(1)).squeeze(1))
            following = known[-1]
        return following.cpu(), torch.cat(losses)[:-1].cpu()

    def _returned(self, input_ids: Tensor) -> Trace:
        size = self.layers * self.heads * input_ids.shape[1] ** 2 * self.model.dtype.itemsize
        if size > _LARGEST_RETURNED:
            raise ValueError(
                f"The maps of {input_ids.shape[1]:,} tokens of {self.name} take {size / 1e9:.0f} GB at once, as "
                "transformers returns them all; show a shorter text."
            )
        with attention_implementation(self.model, "eager"):  # the others compute no maps
            output = self.model(input_ids=input_ids, use_cache=False, output_attentions=True)
        if not output.attentions or any(layer is None for layer in output.attentions):
            raise ValueError(f"{self.name} cannot be shown: {type(self.model).__name__} returns no attentions.")
        known = log_probabilities(output.logits[0])
        losses = -known[:-1].gather(1, input_ids[0, 1:].unsqueeze(1)).squeeze(1)
        maps = ReturnedMaps([layer[0] for layer in output.attentions])
        return Trace(tuple(input_ids[0].tolist()), known[-1].cpu(), losses.cpu(), None, maps)


def log_probabilities(logits: Tensor) -> Tensor:
    """In float32 at least, over the last axis."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
