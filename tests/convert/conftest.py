"""Tiny models whose attention is peaked, and the authors' forward written down from their description.

At the usual initial weights attention is nearly uniform and most wrong orders of rows pass; here logits of the
attention have a standard deviation of about 4, and λ and the norm weights are far from where they start.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from layers_by_hand import decoder_logits, lambda_of, one_map, rms, save_checkpoint, turned
from tiny_model import SIZES, sharpen

transformers.utils.logging.disable_progress_bar()

# Also a Llama's, which has no groups.
MODEL: dict[str, Any] = {name: size for name, size in SIZES.items() if name != "num_noise_heads"}
MODEL |= {"hidden_size": 32, "num_hidden_layers": 3, "rms_norm_eps": 1e-5}
VOCABULARY = SIZES["vocab_size"]
OF_AUTHORS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
AUTHORS: dict[str, Any] = {name: MODEL[name] for name in (*OF_AUTHORS, "rms_norm_eps")} | {"rope_theta": 1e3}


@pytest.fixture
def ours(tmp_path: Path) -> Callable[..., Path]:
    """(kind, **config) → the folder of one of our models with large weights."""

    def save(kind: str, **config: Any) -> Path:
        model = DiffTransformerForCausalLM(DiffTransformerConfig(attention_type=kind, **{**MODEL, **config}))
        sharpen(model)
        model.save_pretrained(tmp_path / "ours")
        return tmp_path / "ours"

    return save


@pytest.fixture
def theirs(tmp_path: Path) -> Callable[..., Path]:
    """(class, shard size, **config) → the folder of a model of transformers with large weights."""

    def save(model_class: Any, shard_size: str = "5GB", **config: Any) -> Path:
        model = model_class(model_class.config_class(**{**MODEL, **config}))
        sharpen(model)
        model.save_pretrained(tmp_path / "theirs", max_shard_size=shard_size)
        return tmp_path / "theirs"

    return save


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 11))


@pytest.fixture
def logits(tokens: Tensor) -> Callable[..., Tensor]:
    """(folder, class=ours) → the logits of the model in it."""

    @torch.no_grad()
    def compute(folder: Path, model_class: Any = DiffTransformerForCausalLM) -> Tensor:
        model, report = model_class.from_pretrained(folder, local_files_only=True, output_loading_info=True)
        assert type(model) is model_class
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        return model.eval()(tokens).logits

    return compute


def authors_first(x: Tensor, weights: Mapping[str, Tensor], settings: Mapping[str, Any], layer: int) -> Tensor:
    """Their first attention, head by head: half the heads, each with queries and keys 2h and 2h + 1."""
    heads, kv_heads = settings["num_heads"], settings["num_kv_heads"]
    d = settings["hidden_size"] // heads // 2
    q, k, v = (x @ weights[f"{name}_proj.weight"].T for name in "qkv")
    theta = theta_of(settings)
    q, k = ([turned(head, theta, interleaved=True) for head in y.split(d, dim=-1)] for y in (q, k))
    init = 0.8 - 0.6 * math.exp(-0.3 * (settings.get("first_depth", 0) + layer))
    out = []
    for head in range(heads):
        shared = head // (heads // kv_heads)
        first, second = (one_map(q[2 * head + i], k[2 * shared + i]) for i in range(2))
        mixed = (first - lambda_of(weights, init) * second) @ v.split(2 * d, dim=-1)[shared]
        out.append(rms(mixed, weights.get("subln.weight", 1.0), 1e-5) * (1 - init))
    return torch.cat(out, -1) @ weights["out_proj.weight"].T


def authors_second(x: Tensor, weights: Mapping[str, Tensor], settings: Mapping[str, Any], layer: int) -> Tensor:
    """Their second attention: twice the query heads, λ for each token and head, keys and values of the group."""
    heads, kv_heads, d = settings["num_heads"], settings["num_kv_heads"], settings["head_dim"]
    q, k, v = ((x @ weights[f"{name}_proj.weight"].T).split(d, dim=-1) for name in "qkv")
    theta = theta_of(settings)
    q, k = ([turned(head, theta, interleaved=True) for head in y] for y in (q, k))
    attended = []
    for head in range(2 * heads):
        shared = head // (2 * heads // kv_heads)
        attended.append(one_map(q[head], k[shared]) @ v[shared])
    lam = 1 / (1 + (-(x @ weights["lambda_proj.weight"].T)).exp())
    out = [attended[2 * head] - lam[..., head, None] * attended[2 * head + 1] for head in range(heads)]
    return torch.cat(out, -1) @ weights["o_proj.weight"].T


def theta_of(settings: Mapping[str, Any]) -> float:
    return settings.get("rope_theta") or settings["rope_parameters"]["rope_theta"]


@pytest.fixture
def authors(tmp_path: Path) -> Callable[..., Path]:
    """(second, norm_weight, **settings) → a folder in one of the authors' layouts, with large random weights."""

    def save(second: bool = False, norm_weight: bool = True, **settings: Any) -> Path:
        settings = {**AUTHORS, **settings}
        width, heads = settings["hidden_size"], settings["num_heads"]
        d = settings["head_dim"] if second else width // heads // 2
        kv = settings["num_kv_heads"] * d * (1 if second else 2)
        of_layer: dict[str, Any] = {
            "self_attn.q_proj.weight": (2 * heads * d, width, 2.0),
            "self_attn.k_proj.weight": (kv, width, 2.0),
            "self_attn.v_proj.weight": (kv, width, 1.0),
        }
        if second:
            of_layer["self_attn.o_proj.weight"] = (width, heads * d, 1.0)
            of_layer["self_attn.lambda_proj.weight"] = (heads, width, 2.0)
        else:
            of_layer["self_attn.out_proj.weight"] = (width, 2 * heads * d, 1.0)
            of_layer |= {f"self_attn.lambda_{name}": d for name in ("q1", "k1", "q2", "k2")}
            of_layer |= {"self_attn.subln.weight": 2 * d} if norm_weight else {}
        return save_checkpoint(tmp_path / "theirs", settings, of_layer, tied=False)

    return save


@pytest.fixture
def authors_logits(tokens: Tensor) -> Callable[[Path], Tensor]:
    """The logits of the model in a folder in one of the authors' layouts, by a forward of our own."""

    def attend(x: Tensor, weights: Mapping[str, Tensor], settings: Mapping[str, Any], layer: int) -> Tensor:
        return (authors_second if "head_dim" in settings else authors_first)(x, weights, settings, layer)

    return lambda folder: decoder_logits(folder, tokens, attend)
