"""A server that runs a model of transformers as vLLM does, in so far as the model can notice.

It builds the base model without memory, puts layers of its own in the place of ``nn.Linear`` and of whatever is called
RMSNorm, sets the other parameters anew in the model's dtype, loads the checkpoint, and keeps the keys and values
itself, sized by ``config.get_text_config()``. Every forward pass is one row of tokens: prompts and single new tokens of
several requests end to end. No cache, no mask.
"""

from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModel, PreTrainedConfig


class Part(NamedTuple):
    """Tokens of one request in a forward pass."""

    request: int
    tokens: list[int]
    position: int


class ServersLinear(nn.Module):
    """What takes the place of an ``nn.Linear``, and is none."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(linear.weight.shape, float("nan"), dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


class ServersNorm(nn.Module):
    """What takes the place of a module called RMSNorm: weight and eps, nothing else of it."""

    def __init__(self, norm: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(norm.weight.shape, float("nan"), dtype=dtype), requires_grad=False)
        self.eps = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ServersAttention:
    """Keys and values of one layer, and attention over them. Everything comes and goes as (tokens, heads · width)."""

    def __init__(self, heads: int, width: int, kv_heads: int) -> None:
        self.name = str(id(self))
        INSTANCES[self.name] = self
        self.heads, self.width, self.kv_heads = heads, width, kv_heads
        self.scale = width**-0.5
        self.calls = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.parts: list[Part] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.calls += 1
        q = query.view(-1, self.heads, self.width)
        k, v = (x.view(-1, self.kv_heads, self.width) for x in (key, value))
        outputs, start = [], 0
        for part in self.parts:
            stop = start + len(part.tokens)
            before_k, before_v = self.keys.get(part.request, k[:0]), self.values.get(part.request, v[:0])
            assert len(before_k) == part.position
            self.keys[part.request] = torch.cat((before_k, k[start:stop]))
            self.values[part.request] = torch.cat((before_v, v[start:stop]))
            outputs.append(self.attend(q[start:stop], self.keys[part.request], self.values[part.request]))
            start = stop
        assert start == len(q)
        return torch.cat(outputs).view(-1, self.heads * self.width)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (k, v))
        visible = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        logits = torch.einsum("nhd,shd->hns", q, k) * self.scale
        return torch.einsum("hns,shd->nhd", logits.masked_fill(~visible, float("-inf")).softmax(-1), v)


def interface(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_instances: dict[int, ServersAttention] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The server's function of transformers' attention interface, for a batch of 1. Its output is (tokens, …)."""
    assert attention_mask is None
    assert attention_instances is not None
    instance = attention_instances[module.layer_idx]
    if scaling is not None:
        instance.scale = scaling
    tokens = query.shape[-2]
    query, key, value = (x.transpose(1, 2).reshape(tokens, -1) for x in (query, key, value))
    return attend(query, key, value, instance.name), None


AttentionInterface.register("server_stand_in", interface)

INSTANCES: WeakValueDictionary[str, ServersAttention] = WeakValueDictionary()


@torch.library.custom_op("server_stand_in::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, name: str) -> Tensor:
    """One operator to torch.compile, which finds its layer's keys and values by name."""
    return INSTANCES[name].forward(query, key, value)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, name: str) -> Tensor:
    return torch.empty_like(query)


class Server:
    """Several requests at once, greedily."""

    def __init__(self, config: PreTrainedConfig, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        text = config.get_text_config()
        assert config == text, "unequal configurations would be taken for a multimodal model"
        text._attn_implementation = "server_stand_in"
        with torch.device("meta"):
            self.model = AutoModel.from_config(config=config, dtype=dtype)
        assert self.model.is_backend_compatible()
        # Tables that are no parameters are not on the meta device in a server.
        self.model.rotary_emb = type(self.model.rotary_emb)(config)
        assert self.model.set_input_embeddings(nn.Embedding(text.vocab_size, text.hidden_size, dtype=dtype)) is None
        self.replace(self.model, dtype)
        with torch.no_grad():
            self.load(weights, dtype)
        self.head = weights["lm_head.weight"].to(dtype)
        self.attention = {
            layer: ServersAttention(text.num_attention_heads, text.head_dim, text.num_key_value_heads)
            for layer in range(text.num_hidden_layers)
        }

    def replace(self, module: nn.Module, dtype: torch.dtype) -> None:
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, ServersLinear(child, dtype))
            elif type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, ServersNorm(child, dtype))
            else:
                self.replace(child, dtype)

    def load(self, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        missing = set(weights) - {"lm_head.weight"}
        for path, module in self.model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    empty = torch.full(parameter.shape, float("nan"), dtype=dtype)
                    setattr(module, name, nn.Parameter(empty, requires_grad=False))
                full = ".".join(filter(None, ("model", path, name)))
                getattr(module, name).copy_(weights[full])
                missing.remove(full)
        assert not missing

    @torch.no_grad()
    def logits(self, parts: list[Part]) -> Tensor:
        """Of the last token of each part, (parts, vocabulary)."""
        for attention in self.attention.values():
            attention.parts = parts
        tokens = torch.tensor([[token for part in parts for token in part.tokens]])
        positions = torch.tensor([[part.position + i for part in parts for i in range(len(part.tokens))]])
        outputs = self.model(
            input_ids=tokens,
            inputs_embeds=None,
            use_cache=False,
            position_ids=positions,
            attention_instances=self.attention,
            return_dict=False,
        )
        ends = torch.tensor([len(part.tokens) for part in parts]).cumsum(0) - 1
        return nn.functional.linear(outputs[0][0, ...][ends], self.head)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Request i arrives at step i, in pieces of 4 tokens: prompts and new tokens of others meet in one pass."""
        done: list[list[int]] = [list(prompt) for prompt in prompts]
        seen = [0] * len(prompts)
        step = 0
        while any(len(done[i]) < len(prompts[i]) + new_tokens for i in range(len(prompts))):
            parts = [
                Part(i, done[i][seen[i] : seen[i] + 4], seen[i])
                for i in range(min(step + 1, len(prompts)))
                if len(done[i]) < len(prompts[i]) + new_tokens
            ]
            chosen = self.logits(parts).argmax(-1).tolist()
            for part, token in zip(parts, chosen, strict=True):
                seen[part.request] += len(part.tokens)
                if seen[part.request] == len(done[part.request]):
                    done[part.request].append(token)
            step += 1
        return [tokens[len(prompt) :] for tokens, prompt in zip(done, prompts, strict=True)]
