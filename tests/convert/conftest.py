"""Tiny models whose attention is peaked, and the authors' forward written down from their description.

At the usual initial weights attention is nearly uniform and most wrong orders of rows pass; here logits of the
attention have a standard deviation of about 4, and λ and the norm weights are far from where they start.
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from tiny_model import SIZES, check_rounding

transformers.utils.logging.disable_progress_bar()

# Also a Llama's, which has no groups.
MODEL: dict[str, Any] = {name: size for name, size in SIZES.items() if name != "num_noise_heads"}
MODEL |= {"hidden_size": 32, "num_hidden_layers": 3, "rms_norm_eps": 1e-5}
VOCABULARY = SIZES["vocab_size"]
AUTHORS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e3,
}


def sharpen(model: nn.Module) -> None:
    """Give every parameter a value that shows where it went."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                gain = 2.0 if name.endswith(("q_proj.weight", "k_proj.weight", "lm_head.weight")) else 1.0
                parameter.normal_(std=gain if "embed" in name else gain * parameter.shape[1] ** -0.5)
            elif "lam" in name:
                parameter.normal_(std=0.8 * parameter.numel() ** -0.25)
            else:
                parameter.uniform_(0.5, 1.5)


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


@pytest.fixture
def check() -> Callable[[Tensor, Tensor], None]:
    """(answer, expected) → fails if they differ by more than rounding in float32 explains."""
    return partial(check_rounding, dtype=torch.float32)


@pytest.fixture
def tensors() -> Callable[[Path], dict[str, Tensor]]:
    """Every tensor of a folder."""

    def read(folder: Path) -> dict[str, Tensor]:
        return {key: x for file in sorted(folder.glob("*.safetensors")) for key, x in load_file(file).items()}

    return read


def rms(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def interleaved_rotary(x: Tensor, theta: float) -> Tensor:
    """x (B, N, heads, d): channels (2i, 2i + 1) are a complex number, turned by the angle n·θ^(−2i/d)."""
    n, d = x.shape[1], x.shape[-1]
    angles = torch.arange(n)[:, None] * theta ** (-torch.arange(0, d, 2) / d)
    turned = (
        torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(1.0 + 0 * angles, angles)[:, None]
    )
    return torch.view_as_real(turned).flatten(-2)


def one_map(q: Tensor, k: Tensor) -> Tensor:
    """q, k (B, N, d) → the causal map (B, N, N)."""
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)


def authors_first(x: Tensor, weights: Mapping[str, Tensor], settings: Mapping[str, Any], layer: int) -> Tensor:
    """Their first attention, head by head: half the heads, each with queries and keys 2h and 2h + 1."""
    heads, kv_heads = settings["num_heads"], settings["num_kv_heads"]
    d = settings["hidden_size"] // heads // 2
    q, k, v = (x @ weights[f"{name}_proj.weight"].T for name in "qkv")
    q, k = (interleaved_rotary(y.unflatten(-1, (-1, d)), settings["rope_theta"]) for y in (q, k))
    v = v.unflatten(-1, (kv_heads, 2 * d))
    init = 0.8 - 0.6 * math.exp(-0.3 * (settings.get("first_depth", 0) + layer))
    products = (weights[f"lambda_q{i}"] @ weights[f"lambda_k{i}"] for i in (1, 2))
    lam = next(products).exp() - next(products).exp() + init
    out = []
    for head in range(heads):
        shared = head // (heads // kv_heads)
        first = one_map(q[:, :, 2 * head], k[:, :, 2 * shared])
        second = one_map(q[:, :, 2 * head + 1], k[:, :, 2 * shared + 1])
        mixed = (first - lam * second) @ v[:, :, shared]
        out.append(rms(mixed, weights.get("subln.weight", 1.0), 1e-5) * (1 - init))
    return torch.cat(out, -1) @ weights["out_proj.weight"].T


def authors_second(x: Tensor, weights: Mapping[str, Tensor], settings: Mapping[str, Any], layer: int) -> Tensor:
    """Their second attention: twice the query heads, λ for each token and head, keys and values of the group."""
    heads, kv_heads, d = settings["num_heads"], settings["num_kv_heads"], settings["head_dim"]
    q, k, v = ((x @ weights[f"{name}_proj.weight"].T).unflatten(-1, (-1, d)) for name in "qkv")
    q, k = (interleaved_rotary(y, settings["rope_theta"]) for y in (q, k))
    attended = []
    for head in range(2 * heads):
        shared = head // (2 * heads // kv_heads)
        attended.append(one_map(q[:, :, head], k[:, :, shared]) @ v[:, :, shared])
    lam = 1 / (1 + (-(x @ weights["lambda_proj.weight"].T)).exp())
    out = [attended[2 * head] - lam[..., head, None] * attended[2 * head + 1] for head in range(heads)]
    return torch.cat(out, -1) @ weights["o_proj.weight"].T


@pytest.fixture
def authors(tmp_path: Path) -> Callable[..., Path]:
    """(second, norm_weight, **settings) → a folder in one of the authors' layouts, with large random weights."""

    def save(second: bool = False, norm_weight: bool = True, **settings: Any) -> Path:
        settings = {**AUTHORS, **settings}
        width, hidden, heads = settings["hidden_size"], settings["intermediate_size"], settings["num_heads"]
        d = settings["head_dim"] if second else width // heads // 2
        kv = settings["num_kv_heads"] * d * (1 if second else 2)
        matrices = {
            "self_attn.q_proj.weight": (2 * heads * d, width, 2.0),
            "self_attn.k_proj.weight": (kv, width, 2.0),
            "self_attn.v_proj.weight": (kv, width, 1.0),
            "mlp.gate_proj.weight": (hidden, width, 1.0),
            "mlp.up_proj.weight": (hidden, width, 1.0),
            "mlp.down_proj.weight": (width, hidden, 1.0),
        }
        norms = {"input_layernorm.weight": width, "post_attention_layernorm.weight": width}
        vectors = {}
        if second:
            matrices["self_attn.o_proj.weight"] = (width, heads * d, 1.0)
            matrices["self_attn.lambda_proj.weight"] = (heads, width, 2.0)
        else:
            matrices["self_attn.out_proj.weight"] = (width, 2 * heads * d, 1.0)
            vectors = {f"self_attn.lambda_{name}": d for name in ("q1", "k1", "q2", "k2")}
            norms |= {"self_attn.subln.weight": 2 * d} if norm_weight else {}
        weights = {
            "model.embed_tokens.weight": torch.randn(VOCABULARY, width),
            "model.norm.weight": torch.rand(width) + 0.5,
            "lm_head.weight": torch.randn(VOCABULARY, width) * 2 * width**-0.5,
        }
        for layer in range(settings["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            for name, (rows, columns, gain) in matrices.items():
                weights[prefix + name] = torch.randn(rows, columns) * gain * columns**-0.5
            weights |= {prefix + name: torch.rand(size) + 0.5 for name, size in norms.items()}
            weights |= {prefix + name: torch.randn(size) * 0.8 * size**-0.25 for name, size in vectors.items()}
        folder = tmp_path / "theirs"
        folder.mkdir()
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        return folder

    return save


@pytest.fixture
def authors_logits(tokens: Tensor, tensors: Callable[[Path], dict[str, Tensor]]) -> Callable[[Path], Tensor]:
    """The logits of the model in a folder in one of the authors' layouts, by a forward of our own."""

    def forward(folder: Path) -> Tensor:
        weights, settings = tensors(folder), json.loads((folder / "config.json").read_text(encoding="utf-8"))
        settings.setdefault("rope_theta", settings.get("rope_parameters", {}).get("rope_theta"))
        attend = authors_second if "head_dim" in settings else authors_first
        eps = settings["rms_norm_eps"]
        x = weights["model.embed_tokens.weight"][tokens]
        for layer in range(settings["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            here = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
            inside = {key.removeprefix("self_attn."): value for key, value in here.items() if "self_attn." in key}
            x = x + attend(rms(x, here["input_layernorm.weight"], eps), inside, settings, layer)
            y = rms(x, here["post_attention_layernorm.weight"], eps)
            gate, up = y @ here["mlp.gate_proj.weight"].T, y @ here["mlp.up_proj.weight"].T
            x = x + (gate * gate.sigmoid() * up) @ here["mlp.down_proj.weight"].T
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        return rms(x, weights["model.norm.weight"], eps) @ head.T

    return forward
