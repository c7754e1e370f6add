"""Encoders and heads for tasks: in an encoder a token sees its whole text and nothing else, whatever attends.

The truth is a causal model with the same weights and a mask (B, 1, N, N) that shows everything, through the reference.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
)

from diff_lab.data.batches import flattened
from diff_transformer import (
    DiffTransformerConfig,
    DiffTransformerForCausalLM,
    DiffTransformerForMaskedLM,
    DiffTransformerForQuestionAnswering,
    DiffTransformerForSequenceClassification,
    DiffTransformerForTokenClassification,
    text_embeddings,
)
from diff_transformer.model import language_model_class, pooled
from tiny_model import COMPUTES_IN, SIZES, answers, check_answers, make, sizes_for, tokens
from tiny_model import check_rounding as check

pytestmark = pytest.mark.usefixtures("poisoned_memory")

IMPLEMENTATIONS = ("diff_attention", "diff_attention_blockwise", "diff_attention_sdpa", "sdpa", "eager")


def encoder(kind: str, dtype: torch.dtype = torch.float64, **config: Any) -> DiffTransformerForMaskedLM:
    """The encoder with the weights of ``make``'s causal model."""
    causal = make(kind, dtype, **config)
    settings = {**sizes_for(kind, **config), "attention_type": kind, "is_causal": False}
    model = DiffTransformerForMaskedLM(DiffTransformerConfig(**settings)).to(dtype).eval()
    model.load_state_dict(causal.state_dict())
    return model


def unmasked(model: DiffTransformerForCausalLM, tokens: Tensor) -> Tensor:
    """Logits of a causal model that is shown everything."""
    n = tokens.shape[1]
    everything = torch.ones(len(tokens), 1, n, n, dtype=torch.bool)
    return model(tokens, attention_mask=everything, use_cache=False).logits


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sees_everything(kind: str, implementation: str, ran: Counter[str]) -> None:
    """Logits and every gradient, in float64, with one call of attention in each layer."""
    truth, inputs = make(kind, attn_implementation="diff_attention_reference"), tokens()
    model = encoder(kind, attn_implementation=implementation)
    expected = unmasked(truth, inputs)
    ran.clear()
    logits = model(inputs).logits
    if implementation == "sdpa":
        assert ran == {"torch": SIZES["num_hidden_layers"]}
    check(logits, expected, dtype=COMPUTES_IN.get(implementation))
    direction = torch.randn_like(expected)
    computed = answers(model, (logits * direction).sum())
    check_answers(computed, answers(truth, (expected * direction).sum()), COMPUTES_IN.get(implementation))
    causal = truth(inputs).logits
    assert (causal[:, :-1] - expected[:, :-1]).abs().max() > 0.1, "the mask does not matter in this test"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding(kind: str, implementation: str, side: str) -> None:
    """A padded text gives what it gives alone; what stands at padding does not matter."""
    dtype = COMPUTES_IN.get(implementation, torch.float64)
    model, inputs = encoder(kind, dtype, attn_implementation=implementation), tokens()
    mask = torch.ones_like(inputs)
    hidden = slice(0, 3) if side == "left" else slice(6, 9)
    mask[0, hidden] = 0
    real = mask[0].bool()
    alone = model(inputs[:1, real]).logits[0]
    for filling in (inputs[0, hidden], torch.tensor([0, 7, 7])):
        inputs[0, hidden] = filling
        logits = model(inputs, attention_mask=mask).logits
        # Positions are counted over the padding as well: only distances matter, up to the tables' float32.
        check(logits[0, real], alone, dtype=torch.float32)
        check(logits[1], model(inputs[1:]).logits[0], dtype=torch.float32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_documents_of_a_row_do_not_see_each_other(kind: str, implementation: str) -> None:
    """By positions, and by transformers' names for packed documents; logits and gradients."""
    dtype = COMPUTES_IN.get(implementation, torch.float64)
    model, inputs = encoder(kind, dtype, attn_implementation=implementation), tokens(2, 9)
    lengths = ((4, 5), (1, 8))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    alone = [
        torch.cat([model(document).logits for document in row.unsqueeze(0).split(ends, dim=1)], dim=1)
        for row, ends in zip(inputs, lengths, strict=True)
    ]
    expected = torch.cat(alone)
    direction = torch.randn_like(expected)
    truth = answers(model, (expected * direction).sum())
    row = flattened({"input_ids": inputs, "labels": inputs, "position_ids": positions})
    del row["labels"]
    for packed in ({"input_ids": inputs, "position_ids": positions}, row):
        logits = model(**packed).logits.view_as(expected)
        check(logits, expected, dtype=torch.float32)
        check_answers(answers(model, (logits * direction).sum()), truth, torch.float32)


def test_the_loss_is_that_of_masked_tokens(kind: str) -> None:
    """Nothing is shifted; in chunks without logits it is the same, with the same gradients."""
    model, inputs = encoder(kind), tokens()
    labels = torch.full_like(inputs, -100)
    labels[0, 0], labels[0, 4], labels[1, 8] = 3, 5, 7
    out = model(inputs, labels=labels)
    logs = out.logits.log_softmax(-1)
    expected = -(logs[0, 0, 3] + logs[0, 4, 5] + logs[1, 8, 7])
    check(out.loss, expected / 3, dtype=torch.float32)  # transformers takes it in float32
    summed = model(inputs, labels=labels, num_items_in_batch=torch.tensor(2.0)).loss
    check(summed, expected / 2, dtype=torch.float32)
    chunked = model(inputs, labels=labels, chunked_loss=True)
    assert chunked.logits is None
    check(chunked.loss, expected / 3)
    truth = answers(model, expected / 3)
    check_answers(answers(model, model(inputs, labels=labels, chunked_loss=True).loss), truth)
    with pytest.raises(ValueError, match=r"chunked_loss=True .* labels must be given, got None"):
        model(inputs, chunked_loss=True)


def test_what_an_encoder_has_not_is_refused() -> None:
    model = encoder("diff")
    with pytest.raises(ValueError, match=r"takes no cache, got a DynamicCache"):
        model.model(tokens(), past_key_values=DynamicCache(config=model.config))
    assert model.model(tokens(), use_cache=True).past_key_values is None
    with pytest.raises(ValueError, match=r"must have is_causal True, got False"):
        DiffTransformerForCausalLM(model.config)
    with pytest.raises(ValueError, match=r"must have is_causal False, got True"):
        DiffTransformerForMaskedLM(DiffTransformerConfig(**SIZES))
    window = "sliding_window must be None, got 3"
    with pytest.raises(ValueError, match=window):
        DiffTransformerConfig(**SIZES, is_causal=False, sliding_window=3)
    mixed = ["full_attention", "sliding_attention"]
    config = DiffTransformerConfig(**SIZES, sliding_window=3, layer_types=mixed)
    config.is_causal = False  # as from_pretrained(…, is_causal=False) does
    with pytest.raises(
        ValueError, match=r"sliding_window must be None, and layer_types None, got \['full_attention', "
    ):
        DiffTransformerForMaskedLM(config)


def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    """A causal model's folder makes an encoder, whose own folder names the class that loads it."""
    causal, inputs = make(kind, torch.float32), tokens()
    causal.save_pretrained(tmp_path / "causal")
    assert "AutoModelForMaskedLM" not in causal.config.auto_map
    model, report = DiffTransformerForMaskedLM.from_pretrained(
        tmp_path / "causal", is_causal=False, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    check(model(inputs).logits, unmasked(causal, inputs))
    model.save_pretrained(tmp_path / "encoder")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "encoder")
    assert type(again) is language_model_class(again.config) is DiffTransformerForMaskedLM
    assert "AutoModelForMaskedLM" in again.config.auto_map
    assert "AutoModelForCausalLM" not in again.config.auto_map
    assert torch.equal(again(inputs).logits, model(inputs).logits)
    base = AutoModel.from_pretrained(tmp_path / "encoder")
    assert torch.equal(base(inputs).last_hidden_state, model.model(inputs).last_hidden_state)
    with pytest.raises(ValueError, match="must have is_causal True, got False"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "encoder")
    with pytest.raises(ValueError, match="must have is_causal False, got True"):
        AutoModelForMaskedLM.from_pretrained(tmp_path / "causal")


HIDDEN = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 7.0]], [[2.0, 0.0], [4.0, 8.0], [torch.nan, 1.0]]])
SHOWN = torch.tensor([[0, 1, 1], [1, 1, 0]])  # padding on the left, and on the right


def test_pooling() -> None:
    assert pooled(HIDDEN, SHOWN).tolist() == [[4.0, 5.5], [3.0, 4.0]]
    assert pooled(HIDDEN, SHOWN, "first").tolist() == [[3.0, 4.0], [2.0, 0.0]]
    assert pooled(HIDDEN, SHOWN, "last").tolist() == [[5.0, 7.0], [4.0, 8.0]]
    assert pooled(HIDDEN[:1]).tolist() == [[3.0, pytest.approx(13 / 3)]]
    assert pooled(HIDDEN[:1], pooling="last").tolist() == [[5.0, 7.0]]
    assert pooled(HIDDEN, torch.zeros(2, 3)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    # A mean of many numbers in half precision is rounded once.
    many = torch.full((1, 3000, 1), 1.0, dtype=torch.bfloat16)
    assert pooled(many).dtype == torch.bfloat16
    assert pooled(many).item() == 1.0
    with pytest.raises(ValueError, match=r"one of 'mean', 'first', 'last', got 'max'"):
        pooled(HIDDEN, SHOWN, "max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(B, N\) = \(2, 3\), got \(2, 1, 3, 3\)"):
        pooled(HIDDEN, torch.ones(2, 1, 3, 3))


@pytest.mark.parametrize("side", ["left", "right"])
def test_embeddings(kind: str, side: str) -> None:
    """Padding on either side leaves them alone; an encoder's are means, a causal model's the last token's."""
    inputs, model = tokens(), encoder(kind)
    sides = (3, 0) if side == "left" else (0, 3)
    padded, mask = F.pad(inputs, sides), F.pad(torch.ones_like(inputs), sides)
    hidden = model.model(inputs).last_hidden_state.mean(1)
    check(text_embeddings(model, padded, mask, normalize=False), hidden, dtype=torch.float32)
    vectors = text_embeddings(model.model, padded, mask)
    check(vectors, hidden / hidden.norm(dim=-1, keepdim=True), dtype=torch.float32)
    last = model.model(inputs).last_hidden_state[:, -1]
    check(text_embeddings(model, padded, mask, pooling="last", normalize=False), last, dtype=torch.float32)
    causal = make(kind)
    last = causal.model(inputs).last_hidden_state[:, -1]
    check(text_embeddings(causal, padded, mask, normalize=False), last, dtype=torch.float32)
    vectors.sum().backward()
    assert model.model.embed_tokens.weight.grad.any()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_classifier_takes_the_mean_or_the_last_token(kind: str, is_causal: bool, side: str) -> None:
    """An encoder's of the tokens that the mask shows, without a padding token in the configuration; a causal model's
    the last that is no padding, wherever the padding stands. Losses are the usual ones.
    """
    language_model = make(kind, num_labels=3, pad_token_id=0) if is_causal else encoder(kind, num_labels=3)
    model, inputs = DiffTransformerForSequenceClassification(language_model.config).double().eval(), tokens()
    model.model.load_state_dict(language_model.model.state_dict())
    hidden = model.model(inputs).last_hidden_state
    expected = (hidden[:, -1] if is_causal else hidden.mean(1)) @ model.score.weight.T
    check(model(inputs).logits, expected)
    check(model(inputs_embeds=model.model.embed_tokens(inputs)).logits, expected)
    sides = (3, 0) if side == "left" else (0, 3)
    padded, mask = F.pad(inputs, sides), F.pad(torch.ones_like(inputs), sides)
    labels = torch.tensor([2, 0])
    out = model(padded, attention_mask=mask, labels=labels)
    # Positions are counted over the padding as well: only distances matter, up to the tables' float32.
    check(out.logits, expected, dtype=torch.float32)
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits, labels))
    out.loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    model.config.problem_type = "multi_label_classification"
    several = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]).double()
    out = model(inputs, labels=several)
    torch.testing.assert_close(out.loss, F.binary_cross_entropy_with_logits(out.logits, several))


HEADS: dict[str, tuple[Any, Any]] = {
    "sequence": (DiffTransformerForSequenceClassification, AutoModelForSequenceClassification),
    "token": (DiffTransformerForTokenClassification, AutoModelForTokenClassification),
    "question": (DiffTransformerForQuestionAnswering, AutoModelForQuestionAnswering),
}


@pytest.mark.parametrize("head", HEADS)
def test_a_head_from_a_language_model(head: str, kind: str, tmp_path: Path) -> None:
    """Its base model is taken over and the new head is initialised; saved and loaded, it is the same model again."""
    language_model, inputs = make(kind, torch.float32, num_labels=3, pad_token_id=0), tokens()
    language_model.save_pretrained(tmp_path)
    head_class, auto_class = HEADS[head]
    model, info = auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model) is head_class
    assert {name.split(".")[0] for name in info["missing_keys"]} == {"qa_outputs" if head == "question" else "score"}
    assert {*info["unexpected_keys"]} <= {"lm_head.weight"}
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    check(model.model(inputs).last_hidden_state, language_model.model(inputs).last_hidden_state)
    assert model(inputs)[0].isfinite().all()
    model.save_pretrained(tmp_path / "head")
    again = auto_class.from_pretrained(tmp_path / "head", dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        expected = parameter if ".lam." in name else parameter.bfloat16()
        assert torch.equal(again.get_parameter(name), expected), name
