"""Attention that shows its logits: what it computes, what it records, what it quantises, in our models and others'."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from any_model import THEIRS, any_model
from corpora import written
from diff_lab.data import RetrievalBatches, TextBatches, byte_tokenizer, prepare
from diff_lab.data.batches import ALL_ROWS
from diff_lab.measure.attention_logits import (
    BITS,
    GRANULARITIES,
    LOGITS,
    MEDIAN,
    MEDIAN_ERROR,
    TOPS,
    Magnitudes,
    changed_logits,
    quantised,
    whole,
)
from diff_lab.measure.measurement import EvalInput, MeasurementRequest
from diff_lab.measure.standard import first_tokens, language_loss
from diff_lab.record import Result
from diff_transformer.model.cache import CACHE_NAME
from diff_transformer.nn import DifferentialAttention
from tiny_model import KINDS, SIZES, check_rounding

# Two documents in the first row, three in the second.
POSITIONS = torch.tensor([[*range(7), *range(5)], [*range(2), *range(4), *range(6)]])


class Windows:
    """Validation data: batches of tokens, two documents and more in a row."""

    vocab_size = 29

    def __init__(self, batches: int = 2) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = [torch.randint(0, 29, POSITIONS.shape, generator=generator) for _ in range(batches)]

    def train_batch(self, step: int, rows: slice = ALL_ROWS) -> dict[str, Tensor]:
        raise NotImplementedError

    def validation_batches(self) -> Iterator[dict[str, Tensor]]:
        for tokens in self.tokens:
            yield {"input_ids": tokens, "labels": tokens, "position_ids": POSITIONS}


def build(kind: str) -> Any:
    model = any_model(kind, **SIZES, **({"attn_implementation": "eager"} if kind in THEIRS else {}))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(len(name)))
    return model.double()


def records_of(name: str, model: Any, batches: Any, **options: Any) -> dict[tuple[str, str], Result]:
    """What the measurement of this name says of a model called "ours", by name and label."""
    measured = EvalInput(model=model, variant="ours", batches=batches)
    records = MeasurementRequest(name=name, options=options).run(measured)
    return {(record.name, record.coordinates.label): record for record in records}


@pytest.fixture(params=[*KINDS, *THEIRS])
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


@torch.no_grad()
def test_whole_logits_are_ordinary_attention(model: Any) -> None:
    """Packed documents, padding, a causal row, and tokens after a cache: as torch's own attention answers."""
    tokens = Windows().tokens[0]
    padding = torch.ones_like(tokens)
    padding[0, :4] = 0
    situations: list[dict[str, Tensor]] = [{}, {"position_ids": POSITIONS}, {"attention_mask": padding}]
    model.set_attn_implementation("sdpa")
    expected = [model(tokens, use_cache=False, **situation).logits for situation in situations]
    with changed_logits(model, whole):
        assert model.config._attn_implementation == LOGITS
        for situation, output in zip(situations, expected, strict=True):
            answer = model(tokens, use_cache=False, **situation).logits
            shown = padding.bool() if "attention_mask" in situation else torch.ones_like(padding).bool()
            check_rounding(answer[shown], output[shown])
        cache = DynamicCache(config=model.config)
        parts = [model(part, use_cache=True, **{CACHE_NAME: cache}).logits for part in tokens.split([5, 6, 1], dim=1)]
        check_rounding(torch.cat(parts, dim=1), expected[0])
    assert model.config._attn_implementation == "sdpa"


def logits_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """All visible logits of our model, from its projections alone, and hidden states after each layer."""
    blocks = []

    def look(attention: Any, arguments: tuple[Any, ...], more: dict[str, Any]) -> None:
        hidden = more["hidden_states"] if "hidden_states" in more else arguments[0]
        queries, keys, _ = attention.resolve_latents(*attention.project(hidden, more["position_embeddings"]))
        if isinstance(attention, DifferentialAttention):
            q, k = attention.split_queries(queries), attention.split_keys(keys)
            if k.shape[2] == 2:  # the first key for all queries of a group but the last
                k = k[:, :, [0] * attention.ratio + [1]]
        else:
            q, k = queries.transpose(1, 2).unsqueeze(2), keys.unsqueeze(2)
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT / math.sqrt(attention.head_dim)
        document = (batch["position_ids"] == 0).cumsum(1)
        seen = (document[:, :, None] == document[:, None]) & torch.ones(12, 12).tril().bool()
        blocks.append(scores.permute(0, 3, 4, 1, 2)[seen].flatten())

    hooks = [layer.self_attn.register_forward_pre_hook(look, with_kwargs=True) for layer in model.model.layers]
    with torch.no_grad():
        model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat(blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_outliers_are_those_of_all_visible_logits(kind: str) -> None:
    model, data = build(kind), Windows()
    logits = torch.cat([logits_of(model, batch) for batch in data.validation_batches()]).abs().sort().values
    records = records_of("outliers", model, data)
    for rank in TOPS:
        record = records["outliers/attention_logits", f"top-{rank}"]
        assert record.value == pytest.approx(logits[-rank].item(), rel=1e-6)
        assert (record.n, record.better, record.variant) == (len(logits), "lower", "ours")
    median = logits[(len(logits) - 1) // 2].item()
    assert records["outliers/attention_logits", "median"].value == pytest.approx(median, rel=MEDIAN_ERROR + 1e-6)


@torch.no_grad()
def test_hidden_states_are_those_after_each_layer(model: Any) -> None:
    states: list[Tensor] = []
    # The last of transformers' hidden states is normed; what the final norm gets is not.
    hook = model.model.norm.register_forward_pre_hook(lambda _, arguments: states.append(arguments[0]))
    for batch in Windows().validation_batches():
        inputs = {"position_ids": batch["position_ids"], "use_cache": False}
        states += model(batch["input_ids"], output_hidden_states=True, **inputs).hidden_states[1:-1]
    hook.remove()
    expected = torch.cat([state.flatten() for state in states]).abs().sort().values
    records = records_of("outliers", model, Windows())
    for rank in TOPS:
        record = records["outliers/hidden_states", f"top-{rank}"]
        assert record.n == len(expected) == 2 * 2 * 24 * 24
        assert record.value == pytest.approx(expected[-rank].item(), rel=1e-5)


def test_llama_and_diffllama_have_the_logits_of_ours() -> None:
    """The softmax with Llama's weights shows Llama's logits. DiffLlama's second call by the same queries adds none."""
    source, softmax = build("llama"), build("softmax")
    softmax.load_state_dict(source.state_dict())
    ours, theirs, diffllama = (records_of("outliers", one, Windows()) for one in (softmax, source, build("diffllama")))
    for place, record in ours.items():
        assert (theirs[place].value, theirs[place].n) == (pytest.approx(record.value, rel=1e-3), record.n)
        assert diffllama[place].n == record.n


def test_so_many_tokens_and_no_more() -> None:
    lengths = [tuple(batch["input_ids"].shape) for batch in first_tokens(Windows(3), 40)]
    assert lengths == [(2, 12), (1, 12), (1, 4)]
    assert [tuple(b["position_ids"].shape) for b in first_tokens(Windows(3), 12)] == [(1, 12)]
    assert sum(batch["input_ids"].numel() for batch in first_tokens(Windows(3), 999)) == 72
    records = records_of("outliers", build("diff"), Windows(3), tokens=40)
    assert records["outliers/hidden_states", "median"].n == 40 * 2 * 24


@pytest.mark.parametrize("spread", [1.0, 1e-30, 1e30])
def test_magnitudes_in_parts_are_those_of_the_whole(spread: float) -> None:
    values = torch.randn(5001) * torch.logspace(-6, 6, 5001) * spread
    values[10:40] = 0
    values[50:60] = values[:10]
    magnitudes, sizes = Magnitudes(torch.device("cpu")), values.abs().sort().values
    for part in values.split(613):
        magnitudes.add(part)
    assert magnitudes.count == 5001
    ranks = magnitudes.ranks()
    assert ranks.pop(MEDIAN) == pytest.approx(sizes[2500].item(), rel=MEDIAN_ERROR)
    assert ranks == {rank: sizes[-rank].item() for rank in TOPS}


def test_magnitudes_of_what_is_seen_alone() -> None:
    magnitudes = Magnitudes(torch.device("cpu"))
    magnitudes.add(torch.tensor([[1.0, -5.0, 9.0], [2.0, 3.0, -9.0]]), torch.tensor([True, True, False]))
    assert magnitudes.count == 4
    assert magnitudes.ranks() == {1: 5.0, 2: 3.0, 3: 2.0, MEDIAN: pytest.approx(2.0, rel=MEDIAN_ERROR)}
    magnitudes.add(torch.tensor([math.nan, -math.inf]))
    with pytest.raises(ValueError, match=r"^2 of 6 values are not finite\.$"):
        magnitudes.ranks()


def expected_heads(attention: Any, batch: dict[str, Tensor], hidden: Tensor, tables: Any, axes: Any) -> Tensor:
    """The formula of a quantised layer of the first DIFF, with whole matrices, before its norm: (B, N, H, 2d)."""
    queries, keys, values = attention.project(hidden, tables)
    q, k = queries.unflatten(2, (-1, 2)).permute(0, 2, 3, 1, 4), attention.split_keys(keys)
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, dim=1).mT / math.sqrt(attention.head_dim)
    document = (batch["position_ids"] == 0).cumsum(1)
    seen = ((document[:, :, None] == document[:, None]) & torch.ones(12, 12).tril().bool())[:, None, None]
    sizes = scores.abs().masked_fill(~seen, 0)
    step = sizes.amax(axes, keepdim=True) / 7
    scores = torch.where(step > 0, (scores / step).round() * step, scores).masked_fill(~seen, -math.inf)
    first, second = scores.softmax(-1).unbind(2)
    return ((first - attention.lam() * second) @ values.repeat_interleave(groups, dim=1)).transpose(1, 2)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@torch.no_grad()
def test_four_bits_against_the_formula(granularity: Any) -> None:
    model = build("diff")
    layer, batch = model.model.layers[0], next(Windows().validation_batches())
    hidden = layer.input_layernorm(model.model.embed_tokens(batch["input_ids"]))
    outputs: list[Tensor] = []
    seen: list[Any] = []
    inner = layer.self_attn
    hooks = [
        inner.register_forward_pre_hook(lambda _, __, more: seen.append(more["position_embeddings"]), with_kwargs=True),
        inner.head_norm.register_forward_pre_hook(lambda _, args: outputs.append(args[0])),
    ]
    with changed_logits(model, partial(quantised, bits=4, granularity=granularity)):
        model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
    for hook in hooks:
        hook.remove()
    axes = {"tensor": (1, 2, 3, 4), "map": (3, 4), "row": -1}  # of (B, G, 2, N, S)
    expected = expected_heads(inner, batch, hidden, seen[0], axes.pop(granularity))
    check_rounding(outputs[0].reshape(expected.shape), expected)
    for others in axes.values():
        heads = expected_heads(inner, batch, hidden, seen[0], others)
        assert (expected - heads).abs().max() > 1e-3  # they are not the same thing


@pytest.mark.parametrize("name", ["outliers", "gradients", "quantised"])
def test_a_model_of_the_retrieval_task_is_measured(name: str) -> None:
    """With the defaults, of fewer sequences than they ask for."""
    batches = RetrievalBatches(num_pairs=2, length=24, batch_size=4, validation_sequences=8)
    model = any_model("diff", **{**SIZES, "vocab_size": batches.vocab_size})
    records = records_of(name, model, batches, **({"sequences": 8} if name == "quantised" else {}))
    assert {record.variant for record in records.values()} == {"ours"}
    if name == "quantised":
        assert len(records) == 1 + 2 * len(BITS) * len(GRANULARITIES)
        unquantised = records["quantised/accuracy", "whole"]
        four = records["quantised/accuracy", "4 bits, per row"]
        drop = records["quantised/accuracy_drop", "4 bits, per row"]
        assert drop.value == unquantised.value - four.value
        assert (unquantised.better, drop.better, unquantised.n) == ("higher", "lower", 16)


def test_records_of_text(tmp_path: Path) -> None:
    """With the logits as they are the loss is the language model's; with fewer bits it is another one."""
    text = ["some text to look at, and more of it. " * 20, "and another one, somewhat longer than that. " * 20]
    tokenizer = byte_tokenizer()
    cache = prepare(written(text, tmp_path), tokenizer)
    batches = TextBatches(cache, tokenizer, length=16, batch_size=3, validation_fraction=0.5)
    model = any_model("diff", **{**SIZES, "vocab_size": batches.vocab_size}, initializer_range=0.5)
    records = records_of("quantised", model, batches)
    unquantised, loss = records["quantised/loss", "whole"], language_loss(model, batches)
    assert unquantised.n == loss.targets
    assert unquantised.value == pytest.approx(loss.per_token, rel=1e-5)
    four = records["quantised/loss", "4 bits, per tensor"]
    increase = records["quantised/loss_increase", "4 bits, per tensor"]
    assert increase.value == four.value - unquantised.value != 0
    assert (four.better, increase.better, increase.unit) == ("lower", "lower", "nats/token")
    fewer = records_of("quantised", model, batches, tokens=40)["quantised/loss", "whole"]
    assert (fewer.n or 99) <= 40 - 3


def test_refusals() -> None:
    model, tokens = build("softmax"), Windows().tokens[0]
    softcap = r"^softcap .* 'changed_logits' does not compute it .*, got 30\.0\.$"
    with changed_logits(model, whole), pytest.raises(ValueError, match=softcap):
        model(tokens, use_cache=False, softcap=30.0)
    # What a model of transformers may say by itself.
    attention, q = build("llama").model.layers[0].self_attn, torch.randn(1, 4, 3, 6)
    with pytest.raises(ValueError, match=r"^'changed_logits' .* LlamaAttention asks for s_aux\.$"):
        ALL_ATTENTION_FUNCTIONS[LOGITS](attention, q, q, q, None, s_aux=torch.ones(4))
    model._supports_attention_backend = False
    with pytest.raises(ValueError, match=r"^DiffTransformerForCausalLM computes attention by itself"):
        records_of("outliers", model, Windows())
    with pytest.raises(ValueError, match=r"^This is measured on text, retrieval or recall"):
        records_of("quantised", build("diff"), Windows())
