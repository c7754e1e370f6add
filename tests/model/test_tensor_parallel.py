"""Tensor parallelism: two ranks with half of the heads each give what one process gives, gradients included.

Everything is compared in float64, where rounding leaves a mistake nowhere to hide. The ranks run this file as a script.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModel
from transformers import distributed as transformers_distributed

import ranks
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM, DiffTransformerModel
from diff_transformer.attention_types import ATTENTION_TYPES
from tiny_model import KINDS, NOT_LATENT, PAIRED, kinds, make
from tiny_model import check_rounding as check

# tests/model/test_parallel.py divides heads in `make test`.
pytestmark = pytest.mark.all

SIZES = {"vocab_size": 30}  # some releases of transformers split the head into equal parts only
NORMED = "softmax with the headwise norm"
POLY_NORM = "diff with PolyNorm"  # whose feed-forward network is whole on each rank
kind = kinds(NOT_LATENT)
SPREAD = {
    **{kind: {"kind": kind, **SIZES} for kind in KINDS if kind in NOT_LATENT},
    NORMED: {"kind": "softmax", "headwise_norm": True, **SIZES},
    POLY_NORM: {"kind": "diff", "hidden_act": "poly_norm", **SIZES},
    "diff with options": {"kind": "diff", "attention_bias": True, "qk_norm": True, "output_gate": True, **SIZES},
}
TOKENS = torch.arange(1, 19).view(2, 9)
MASK = torch.ones_like(TOKENS)
MASK[0, :3] = 0


def answers(model: DiffTransformerForCausalLM, unsharded: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """Logits, loss, gradients, tokens and the parameters after two steps; ``unsharded`` joins a tensor's parts."""
    # Two backward passes before the gradients are read: what they add up to has to be right as well.
    for labels in (TOKENS, TOKENS.flip(1)):
        out = model(TOKENS, attention_mask=MASK, labels=labels)
        out.loss.backward()
    computed = {"logits": out.logits, "loss": out.loss}
    computed |= {f"gradient of {name}": unsharded(name, p.grad) for name, p in model.named_parameters()}
    options = {"attention_mask": MASK, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for cache in ("dynamic", "static"):
        with_cache = {"cache_implementation": cache, "disable_compile": True}
        computed[f"tokens with a {cache} cache"] = model.generate(TOKENS, **options, **with_cache)
    # One tensor at a time: torch's grouped steps refuse parameters of which some are spread and some are not.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        model(TOKENS, attention_mask=MASK, labels=TOKENS).loss.backward()
        optimizer.step()
    computed |= {f"stepped {name}": unsharded(name, parameter) for name, parameter in model.named_parameters()}
    return {name: value.detach().contiguous() for name, value in computed.items()}


def on_a_rank() -> None:
    """What a rank finds: all answers, its own parameters after the two steps, and what it was refused."""
    rank, folder = ranks.join()
    plan: dict[str, Any] = {"tp_plan": "auto"}
    if "tp_size" in inspect.signature(transformers_distributed.DistributedConfig).parameters:
        plan = {"distributed_config": transformers_distributed.DistributedConfig(tp_size=ranks.RANKS)}
    for kind in SPREAD:
        shapes = {name: value.shape for name, value in load_file(folder / kind / "model.safetensors").items()}

        def unsharded(name: str, part: Tensor, shapes: dict[str, torch.Size] = shapes) -> Tensor:
            if isinstance(part, DTensor):
                return part.full_tensor()
            dims = [dim for dim, size in enumerate(shapes[name]) if size != part.shape[dim]]
            if not dims:
                return part
            parts = [torch.empty_like(part) for _ in range(ranks.RANKS)]
            torch.distributed.all_gather(parts, part.contiguous())
            return torch.cat(parts, dims[0])

        model = DiffTransformerForCausalLM.from_pretrained(folder / kind, dtype=torch.float64, **plan)
        model.save_pretrained(folder / f"{kind} saved")
        save_file(answers(model, unsharded), folder / f"{kind} {rank}.safetensors")
        local_parameters = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
        parts = {name: p.detach().contiguous() for name, p in local_parameters.items()}
        save_file(parts, folder / f"{kind} own {rank}.safetensors")
    with pytest.raises(ValueError, match="cannot share") as refused:
        DiffTransformerForCausalLM.from_pretrained(folder / "odd", **plan)
    (folder / f"refused {rank}").write_text(str(refused.value))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which both ranks have written what they found."""
    folder = tmp_path_factory.mktemp("ranks")
    for kind, settings in SPREAD.items():
        make(**settings).save_pretrained(folder / kind)
    make("diff", num_key_value_heads=2).save_pretrained(folder / "odd")
    ranks.run(__file__, folder)
    return folder


@pytest.mark.parametrize("kind", SPREAD)
def test_two_ranks_give_what_one_process_gives(kind: str, spread: Path) -> None:
    """Logits, loss, every gradient, greedy tokens, and the parameters after two steps, with grouped queries."""
    computed = [load_file(spread / f"{kind} {rank}.safetensors") for rank in range(ranks.RANKS)]
    model = make(**SPREAD[kind])
    expected = answers(model, lambda name, tensor: tensor)
    gradients = [name for name in expected if "gradient" in name]
    assert len(gradients) == len(list(model.parameters()))
    for of_rank in computed:
        assert of_rank.keys() == expected.keys()
        for name, value in expected.items():
            if value.is_floating_point():
                assert value.abs().max() > 0, name
                check(of_rank[name], value)
            else:
                assert torch.equal(of_rank[name], value), name


@pytest.mark.parametrize("kind", SPREAD)
def test_each_rank_has_half_of_the_heads_and_the_same_of_the_rest(kind: str, spread: Path) -> None:
    """After two steps what is not split still is bit for bit the same on both ranks: λ and the norms among it."""
    first, second = (load_file(spread / f"{kind} own {rank}.safetensors") for rank in range(ranks.RANKS))
    names = dict(make(**SPREAD[kind]).named_parameters())
    split = {name for name, parameter in names.items() if first[name].shape != parameter.shape}
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    projections |= {"lambda_proj"} if kind in ATTENTION_TYPES and ATTENTION_TYPES[kind].lambda_per_token else set()
    projections -= {"gate_proj", "up_proj", "down_proj"} if kind == POLY_NORM else set()
    assert {name.split(".")[-2] for name in split} >= projections
    for name in split:
        if name.split(".")[-2] in projections:
            assert first[name].numel() == second[name].numel() == names[name].numel() // 2, name
    replicated = names.keys() - split
    shared = {
        **{paired: {"lam", "head_norm"} for paired in PAIRED},
        NORMED: {"head_norm"},
        POLY_NORM: {"down_proj", "act_fn"},
    }.get(kind, {"norm"})
    assert {name.split(".")[-2] for name in replicated} >= shared
    for name in replicated:
        assert torch.equal(first[name], second[name]), name


def test_saving_from_two_ranks(kind: str, spread: Path) -> None:
    """The checkpoint is the one that was loaded, bit for bit."""
    ranks.check_saved_alike(spread, kind)


def test_heads_that_the_ranks_cannot_share(spread: Path) -> None:
    """8 query heads over 2 key/value heads: one head of keys and values in DIFF, and two ranks."""
    for rank in range(ranks.RANKS):
        assert (spread / f"refused {rank}").read_text() == (
            "tensor parallelism gives each rank whole key/value heads, and a model of attention_type 'diff' with "
            "num_key_value_heads 2 has 1, which 2 ranks cannot share evenly."
        )


@pytest.mark.parametrize("norm", [None, False, True])
def test_the_plan_names_what_the_model_has(kind: str, norm: bool | None) -> None:
    """Every rule is for a module, every projection has one, and λ's parameters have theirs, in the base model too."""
    model = make(kind, headwise_norm=norm)
    for each in (model, AutoModel.from_config(model.config)):
        modules = {
            ".".join("*" if part.isdigit() else part for part in name.split(".")) for name, _ in each.named_modules()
        }
        assert each.tp_plan.keys() <= modules
        prefix = "" if isinstance(each, DiffTransformerModel) else "model."
        planned = {name.removeprefix(f"{prefix}layers.*.") for name in each.tp_plan}
        owners = {
            name.split(".", 3 if prefix else 2)[-1].rpartition(".")[0]
            for name, _ in each.named_parameters()
            if "layers.0." in name
        }
        assert owners - planned == {"input_layernorm", "post_attention_layernorm"}


def test_the_plan_takes_what_transformers_adds_for_tied_embeddings() -> None:
    """As transformers 5.17 does when it makes a model."""
    config = DiffTransformerConfig(tie_word_embeddings=True)
    before = config.base_model_tp_plan
    config.base_model_tp_plan = {**config.base_model_tp_plan, "embed_tokens": "embedding_rowwise"}
    assert config.base_model_tp_plan == {**before, "embed_tokens": "embedding_rowwise"}
    config.attention_type = "diff_v2"
    assert "layers.*.self_attn.lam" not in config.base_model_tp_plan
    assert config.base_model_tp_plan["embed_tokens"] == "embedding_rowwise"
    assert "base_model_tp_plan" not in config.to_dict()


if __name__ == "__main__":
    on_a_rank()
