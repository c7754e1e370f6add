"""Answers held to labels: greedy decoding along the trie and exact likelihoods, on models whose answers are known."""

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from diff_lab.measure.decoding import LabelTrie, greedy_label, label_log_likelihoods
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM

# Four labels: one is another's beginning but for its last token, 9, which ends them all.
LABELS = [(1, 2, 9), (1, 3, 9), (4, 9), (1, 2, 5, 9)]
SIZES: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture(params=["diff", "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(3)
    if request.param == "diff":
        transformer = DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES, initializer_range=0.5))
    else:
        transformer = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.5))
    transformer.generation_config.eos_token_id = 9
    return transformer.eval()


def by_hand(model: Any, prompt: Tensor) -> tuple[Tensor, Tensor, int]:
    """Free and constrained likelihoods and the greedy label, each token by a forward pass without a cache."""
    trie, free, constrained = LabelTrie(LABELS), [], []

    @torch.no_grad()
    def after(tokens: tuple[int, ...]) -> Tensor:
        row = torch.cat((prompt, torch.tensor(tokens, dtype=torch.long)))
        return model(input_ids=row[None], use_cache=False).logits[0, -1].float().log_softmax(-1)

    for label in LABELS:
        steps = [(after(label[:depth]), trie.following(label[:depth]), token) for depth, token in enumerate(label)]
        free.append(torch.stack([scores[token] for scores, _, token in steps]).sum())
        allowed_steps = [scores[allowed].log_softmax(0)[allowed.index(token)] for scores, allowed, token in steps]
        constrained.append(torch.stack(allowed_steps).sum())
    label_tokens: tuple[int, ...] = ()
    while allowed := trie.following(label_tokens):
        scores = after(label_tokens)
        label_tokens += (allowed[int(scores[allowed].argmax())],)
    return torch.stack(free), torch.stack(constrained), LABELS.index(label_tokens)


@torch.no_grad()
def test_likelihoods_and_greedy_answers(model: Any) -> None:
    trie = LabelTrie(LABELS)
    for seed in range(4):
        prompt = torch.randint(12, (7,), generator=torch.Generator().manual_seed(seed))
        free, constrained, greedy = by_hand(model, prompt)
        for batch_size, known in itertools.product((1, 3, 4), (0, 5)):
            cache = None
            if known:
                cache = model(input_ids=prompt[None, :known], use_cache=True).past_key_values
            likelihoods = label_log_likelihoods(model, trie, prompt, cache, batch_size)
            torch.testing.assert_close(likelihoods[0], free, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(likelihoods[1], constrained, atol=1e-5, rtol=1e-5)
        assert constrained.exp().sum().item() == pytest.approx(1, abs=1e-5)
        assert free.exp().sum().item() < 1
        cache = model(input_ids=prompt[None, :5], use_cache=True).past_key_values
        assert greedy_label(model, trie, prompt) == greedy
        assert greedy_label(model, trie, prompt, copy.deepcopy(cache)) == greedy


def test_greedy_may_miss_the_likeliest() -> None:
    """The first token of two unlikely labels is likelier than that of the likeliest."""

    class Made(torch.nn.Module):
        """After (1,), 2 and 3 are equally likely; 1 is likelier than 4 at first."""

        device = torch.device("cpu")

        def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
            del use_cache
            logits = torch.full((*input_ids.shape, 12), -20.0)
            logits[..., 1], logits[..., 4] = 0.2, 0.0
            after_one = input_ids == 1
            logits[after_one] = torch.full((12,), -20.0).index_fill(0, torch.tensor([2, 3]), 0.0)
            logits[..., 9] = torch.where((input_ids == 1) | (input_ids == 7), -20.0, 3.0)
            cache = past_key_values or SimpleNamespace(get_seq_length=int, batch_repeat_interleave=lambda n: None)
            return SimpleNamespace(logits=logits, past_key_values=cache)

    trie = LabelTrie([(1, 2, 9), (1, 3, 9), (4, 9)])
    free, constrained = label_log_likelihoods(Made(), trie, torch.tensor([7]))
    assert int(constrained.argmax()) == 2
    assert int(free.argmax()) == 2
    first = trie.following(())
    assert first[int(Made()(torch.tensor([[7]])).logits[0, -1, first].argmax())] == 1


def test_only_a_label_s_tokens_may_follow(model: Any) -> None:
    trie = LabelTrie(LABELS)
    beginnings: list[tuple[int, ...]] = [(), (1,), (1, 2), (1, 3), (4, 9)]
    assert [trie.following(tokens) for tokens in beginnings] == [[1, 4], [2, 3], [9, 5], [9], []]
    allowed: list[list[int]] = []

    class Noting(LabelTrie):
        def following(self, tokens: tuple[int, ...]) -> list[int]:
            allowed.append(super().following(tokens))
            return allowed[-1]

    # A model that likes no label's token best: the others are impossible, however likely they are.
    with torch.no_grad():
        model.lm_head.weight[[1, 2, 3, 4, 5, 9]] *= 1e-3
    assert 0 <= greedy_label(model, Noting(LABELS), torch.tensor([7, 8])) < len(LABELS)
    assert allowed[0] == [1, 4]
    assert len(allowed) == trie.depth


@pytest.mark.parametrize("labels", [[()], [(1, 2), (1,)], [(1,), (1, 2)], [(3,), (3,)]], ids=str)
def test_labels_that_make_no_trie(labels: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"^Label \d must not be empty, equal to another"):
        LabelTrie(labels)
