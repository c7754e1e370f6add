"""Explorers of tiny models, and models of others."""

import pytest
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM

from diff_transformer.explorer import Answer, Example, ExploredModel, Explorer, Side, WordVocabulary, image_explorer
from diff_transformer.nn import DiffAttention, SoftmaxAttention
from explored_models import TEXT, WORDS, make, sharpened
from tiny_model import SIZES
from tiny_vit import GRID, IMAGES, VisionTransformer


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    return sharpened(LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="sdpa")))


@pytest.fixture(scope="session")
def diffllama() -> DiffLlamaForCausalLM:
    return sharpened(DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES, attention_dropout=0.0)))


@pytest.fixture(scope="session")
def explorer() -> Explorer:
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
