"""Attention types are described in one file: no other one asks for a type's name, and a type added there works."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diff_lab.record import Result
from diff_lab.report.figures import variant_style
from diff_lab.report.wording import variant_label, variants_of
from diff_lab.train import build_config, load_recipe
from diff_lab.train.plan import Plan, flops_per_token
from diff_transformer import attention_types
from diff_transformer.attention_types import ATTENTION_TYPES, AttentionType
from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.model.interface_attention import layer_settings
from diff_transformer.nn import Attention, DiffAttentionV2
from tiny_model import SIZES, sizes_for

PACKAGE = Path(attention_types.__file__).parent


def named_types(tree: ast.AST) -> Iterator[ast.Constant]:
    """Names of attention types that a file compares with, matches, looks up or has entries for."""
    for node in ast.walk(tree):
        operands: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            operands = list(node.keys)
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        for operand in operands:
            parts = operand.elts if isinstance(operand, ast.Tuple | ast.List | ast.Set) else [operand]
            yield from (part for part in parts if isinstance(part, ast.Constant) and part.value in ATTENTION_TYPES)


def test_no_file_asks_for_a_types_name() -> None:
    comparisons = [
        f"{path.relative_to(PACKAGE)}:{name.lineno} {name.value!r}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != PACKAGE / "attention_types.py"
        for name in named_types(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not comparisons
    assert len(list(named_types(ast.parse('kind in ("diff", "dex") or {"softmax": 1} or "diff" * 2')))) == 3


@pytest.mark.parametrize("name", ATTENTION_TYPES)
def test_a_description_is_that_of_its_layer(name: str) -> None:
    spec = ATTENTION_TYPES[name]
    config = DiffTransformerConfig(attention_type=name, **sizes_for(name))
    model = DiffTransformerForCausalLM(config)
    layer = model.model.layers[0].self_attn
    assert isinstance(layer, spec.layer_class())
    assert set(spec.settings) <= layer_settings(config, 1).keys()
    arguments = inspect.signature(spec.layer_class()).parameters.keys()
    if "options" in arguments:  # which go to the base
        arguments |= inspect.signature(Attention).parameters.keys()
    assert set(spec.settings) <= arguments
    call = config.get_text_config()
    assert layer.q_proj.out_features == call.num_attention_heads * config.head_dim
    assert layer.project(torch.zeros(1, 2, 24), None)[1].shape == (1, call.num_key_value_heads, 2, call.head_dim)
    assert (layer.cache_width, layer.value_width) == (call.head_dim, spec.value_width(config))
    assert (layer.lambdas(torch.zeros(1, 2, 24)) is not None) == spec.differential
    names = {parameter for parameter, _ in layer.named_parameters()} | {buffer for buffer, _ in layer.named_buffers()}
    assert all(any(f".{name}".endswith(f".{last}") for name in names) for last in spec.float32_parameters)
    modules = {part for module, _ in layer.named_modules() for part in module.split(".")}
    assert spec.styles_of(config).keys() <= modules
    if "token_lambda" in spec.settings:  # which exchanges one module of λ for another
        other = DiffTransformerForCausalLM(DiffTransformerConfig(attention_type=name, token_lambda=True, **SIZES))
        modules |= {part for module, _ in other.named_modules() for part in module.split(".")}
    assert {*spec.lambda_modules, *spec.parallel_styles} <= modules


class TripledAttention(DiffAttentionV2):
    """A fifth type: DIFF V2 with λ three times as large."""

    def lambdas(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 3 * super().lambdas(hidden_states)


@pytest.fixture
def fifth(monkeypatch: pytest.MonkeyPatch) -> AttentionType:
    spec = replace(
        ATTENTION_TYPES["diff_v2"],
        layer=f"{__name__}:TripledAttention",
        label="DIFF, tripled",
        colour=("#123456", "#abcdef"),
        marker="v",
    )
    monkeypatch.setitem(ATTENTION_TYPES, "tripled", spec)
    return spec


@pytest.mark.parametrize("implementation", ["diff_attention", "sdpa", "eager"])
def test_a_fifth_type_trains_and_generates(fifth: AttentionType, implementation: str) -> None:
    config = DiffTransformerConfig(attention_type="tripled", **SIZES)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(config)
    assert isinstance(model.model.layers[0].self_attn, TripledAttention)
    tokens = torch.arange(12).view(1, -1)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    model.eval()
    cached, computed = (model.generate(tokens, use_cache=cache, **options) for cache in (True, False))
    assert torch.equal(cached, computed)


def test_a_fifth_type_is_planned(fifth: AttentionType) -> None:
    second, tripled = (DiffTransformerConfig(attention_type=name, **SIZES) for name in ("diff_v2", "tripled"))
    assert flops_per_token(tripled, 8) == flops_per_token(second, 8)
    assert tripled.base_model_tp_plan == second.base_model_tp_plan
    recipe = load_recipe("tiny", overrides=["model.attention_type=tripled"])
    assert Plan(recipe).parameters > 0
    assert build_config(recipe, vocab_size=1).spec.differential


def test_a_fifth_type_is_reported(fifth: AttentionType) -> None:
    records = [Result(name="a/b", variant=name, value=1.0) for name in ("another", "tripled", "diff")]
    assert variants_of(records) == ["diff", "tripled", "another"]
    assert variant_label("tripled, half the heads") == "DIFF, tripled, half the heads"
    assert variant_style("tripled") == {"colour": fifth.colour[0], "marker": "v"}
