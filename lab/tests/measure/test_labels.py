"""Answers held to labels: greedy decoding along the trie, against every token by itself."""

from typing import Any

import pytest
import torch

from any_model import any_model
from diff_lab.measure.decoding import greedy_label

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
    model = any_model(request.param, 3, **SIZES, initializer_range=0.5)
    model.generation_config.eos_token_id = 9
    return model


def test_greedy_answers_along_the_labels(model: Any) -> None:
    """As each token by a forward pass without a cache gives, and where the model likes no label's token best."""
    for seed in range(5):
        prompt = torch.randint(12, (7,), generator=torch.Generator().manual_seed(seed))
        tokens: tuple[int, ...] = ()
        with torch.no_grad():
            if seed == 4:
                model.lm_head.weight[[1, 2, 3, 4, 5, 9]] *= 1e-3
            while tokens not in LABELS:
                allowed = [label[len(tokens)] for label in LABELS if label[: len(tokens)] == tokens]
                row = torch.cat((prompt, torch.tensor(tokens, dtype=torch.long)))
                scores = model(input_ids=row[None], use_cache=False).logits[0, -1]
                tokens += (allowed[int(scores[allowed].argmax())],)
            cache = model(input_ids=prompt[None, :5], use_cache=True).past_key_values
        assert greedy_label(model, LABELS, prompt) == greedy_label(model, LABELS, prompt, cache) == LABELS.index(tokens)
