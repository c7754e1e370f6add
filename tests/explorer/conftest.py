"""Tiny models with peaked attention, in float64, and explorers of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.explorer import Answer, Example, ExploredModel, Explorer, Side, WordVocabulary, image_explorer
from diff_transformer.nn import DiffAttention, SoftmaxAttention
from tiny_model import SIZES, sizes_for
from tiny_vit import GRID, IMAGES, VisionTransformer

WORDS = tuple(f"w{number}" for number in range(SIZES["vocab_size"]))
TEXT = "w3 w7 w1 w12 w7 w9 w3 w7 w20 w11 w3"


def sharpened(model: Any) -> Any:
    """The model with weights that make attention uneven, in float64."""
    torch.manual_seed(17)
    model = model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                gain = 2.0 if name.endswith(("q_proj.weight", "k_proj.weight", "lm_head.weight")) else 1.0
                parameter.normal_().mul_(gain * parameter.shape[1] ** -0.5)
            elif "lam" in name:
                parameter.normal_().mul_(0.4)
            else:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.fixture(scope="session")
def make() -> Callable[..., DiffTransformerForCausalLM]:
    """(kind, **config) → one of our models."""
    return lambda kind="diff", **config: sharpened(
        DiffTransformerForCausalLM(DiffTransformerConfig(attention_type=kind, **sizes_for(kind, **{**SIZES, **config})))
    )


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    return sharpened(LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="sdpa")))


@pytest.fixture(scope="session")
def diffllama() -> DiffLlamaForCausalLM:
    return sharpened(DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES, attention_dropout=0.0)))


@pytest.fixture(scope="session")
def explorer(make: Callable[..., DiffTransformerForCausalLM]) -> Explorer:
    """DIFF beside the Transformer, with one example that has an answer."""
    words = WordVocabulary(WORDS)
    return Explorer(
        Side(ExploredModel(make("diff"), "tiny-diff"), words),
        Side(ExploredModel(make("softmax"), "tiny-softmax"), words),
        [Example("an example", TEXT, Answer(query=10, begin=1, end=2))],
        [Example(f"example {seed}", " ".join(WORDS[(seed + i) % len(WORDS)] for i in range(8))) for seed in range(9)],
    )


@pytest.fixture(scope="session")
def questions(explorer: Explorer) -> list[Example]:
    """Thirty questions of several lengths; the answer to most is the token that DIFF writes with its learned λ."""
    asked: list[Example] = []
    for number in range(200):
        words = [f"w{(7 * number + place * place) % 29}" for place in range(5 + number % 7)]
        piece = explorer.run({"text": " ".join(words)})["next"][0]["piece"]
        if piece in words or number % 20 == 0:
            begin = words.index(piece) if piece in words else 0
            asked.append(Example("", " ".join(words), Answer(len(words) - 1, begin, begin + 1)))
        if len(asked) == 30:
            break
    return asked


@pytest.fixture(scope="session")
def image_pair() -> Explorer:
    models = VisionTransformer(DiffAttention), VisionTransformer(SoftmaxAttention)
    return image_explorer(models[0], IMAGES, ["cat", "dog"], compare=models[1], grid=GRID)
