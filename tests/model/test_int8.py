"""Linear layers in eight bits: the numbers they hold, products with them, and models that load, save and generate."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CompileConfig

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model import Int8Config
from diff_transformer.model.int8 import Int8Linear
from diff_transformer.ops.cpu.cpu_backend import available_to_auto, token_step
from tiny_model import make, tokens


@pytest.mark.every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "width", "offset", "suits"),
    [
        (1, 96, 0, True),
        (7, 96, 0, True),
        (16, 96, 0, True),
        (17, 96, 0, False),
        (1, 19, 0, True),
        (3, 96, 1, True),
        (8, 4200, 0, True),
    ],
)
def test_the_product_is_that_of_the_rounded_weights(
    rows: int, width: int, offset: int, suits: bool, dtype: torch.dtype
) -> None:
    linear = nn.Linear(width, 42, dtype=dtype)
    with torch.no_grad():
        linear.weight *= 1e-2  # so that scales are below the smallest normal number of float16
        linear.weight[3] = 0
    layer, x = Int8Linear.of(linear), torch.randn(offset + rows * width).to(dtype)[offset:].view(1, rows, width)
    scale = layer.weight_scale.double().unsqueeze(1)
    assert torch.equal(layer.weight_scale, layer.weight_scale.bfloat16().float())
    meant = layer.weight.double() * scale
    assert ((linear.weight.double() - meant).abs() <= scale / 2).all()
    assert (layer.weight.abs().amax(1) >= 126).sum() == 41
    exact = x.double() @ meant.T + layer.bias.double()
    size = x.double().abs() @ meant.T.abs() + layer.bias.double().abs()
    for reads_rows in (suits and dtype != torch.float16 and available_to_auto(), False):
        with torch.set_grad_enabled(not reads_rows):
            assert ((layer(x).double() - exact).abs() <= 2 * torch.finfo(dtype).eps * size).all()
            answer = token_step("multiplied_int8", x, layer.weight, layer.weight_scale, 16)
            assert (answer is not None) is reads_rows


@pytest.mark.every_case  # each type has its own layers that stay
def test_a_model_loads_saves_and_generates(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    model.save_pretrained(tmp_path / "float")
    settings: dict[str, Any] = {"quantization_config": Int8Config()}
    packed = DiffTransformerForCausalLM.from_pretrained(tmp_path / "float", **settings).eval()
    assert packed.dtype == torch.bfloat16
    assert packed.num_parameters() >= model.num_parameters()
    floats = DiffTransformerForCausalLM.from_pretrained(tmp_path / "float", dtype=torch.bfloat16).eval()
    modules = dict(packed.named_modules())
    for name, module in floats.named_modules():
        stay = ("lambda_proj", *(("k_proj", "v_proj") if kind == "gdla" else ()))
        if isinstance(module, nn.Linear) and not name.endswith(stay):
            held = modules[name]
            assert isinstance(held, Int8Linear), name
            with torch.no_grad():
                module.weight.copy_(held.weight.float() * held.weight_scale.float().unsqueeze(1))
        else:
            assert type(modules[name]) is type(module), name
    inputs = tokens()
    error = (packed(inputs).logits.float() - floats(inputs).logits.float()).abs().max()
    assert error <= 0.05 * floats(inputs).logits.float().abs().max()
    packed.save_pretrained(tmp_path / "int8")
    again, report = DiffTransformerForCausalLM.from_pretrained(tmp_path / "int8", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, parameter in packed.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(again.eval().generate(inputs, **options), packed.generate(inputs, **options))


def test_a_tied_head_becomes_a_copy(tmp_path: Path) -> None:
    make("diff", tie_word_embeddings=True).save_pretrained(tmp_path / "float")
    settings: dict[str, Any] = {"quantization_config": Int8Config()}
    packed = DiffTransformerForCausalLM.from_pretrained(tmp_path / "float", **settings).eval()
    packed.tie_weights(recompute_mapping=False)  # as transformers does after it has loaded weights
    packed.tie_weights()
    assert (packed.lm_head.weight.dtype, packed.model.embed_tokens.weight.dtype) == (torch.int8, torch.bfloat16)
    packed.save_pretrained(tmp_path / "int8")
    again = DiffTransformerForCausalLM.from_pretrained(tmp_path / "int8").eval()
    inputs = tokens()
    assert torch.equal(again(inputs).logits, packed(inputs).logits)


def test_any_strides_shapes_and_gradients() -> None:
    layer = Int8Linear.of(nn.Linear(64, 32, dtype=torch.bfloat16))
    x = torch.randn(4, 72).bfloat16()
    views = [x[:, :64], x[:1, :64].expand(3, 64), x.repeat(16, 1)[:64, :4].T, x[:0, :64], x.view(4, 1, 72)[:, :0, :64]]
    meant = layer.weight.double() * layer.weight_scale.double().unsqueeze(1)
    for view in views:
        with torch.no_grad():
            out = layer(view)
        assert out.shape == (*view.shape[:-1], 32)
        torch.testing.assert_close(out.double(), view.double() @ meant.T + layer.bias.double(), rtol=2**-6, atol=2**-6)
    huge = torch.full((1, 64), 300.0).half()
    assert layer(huge).isfinite().all()
    layer(x[:, :64].float().requires_grad_()).sum().backward()
    layer(x[:1, :64].clone().requires_grad_()).sum().backward()


@torch.no_grad()
def test_the_largest_sums_and_rows_beside_nan() -> None:
    weight, scales = torch.full((5, 40_003), 127, dtype=torch.int8), torch.full((5,), 2.0**-7)
    weight[1] *= -1
    x = torch.ones(5, 40_003, dtype=torch.bfloat16)
    x[1, 40_000], x[2, 7] = torch.nan, -torch.inf
    x[3], x[4] = 0, 2.0**-60
    out = token_step("multiplied_int8", x, weight, scales, 16)
    if out is not None:
        assert not out[1:3].isfinite().any()
        exact = torch.tensor([1.0, -1, 1, 1, 1]).double() * 127 * 40_003 * 2.0**-7
        for row, factor in ((0, 1.0), (3, 0.0), (4, 2.0**-60)):
            torch.testing.assert_close(out[row].double() / (factor or 1), exact * bool(factor), rtol=2**-8, atol=0)
    assert (out is not None) is available_to_auto()


def test_weights_that_are_no_numbers_are_refused() -> None:
    linear = nn.Linear(4, 4)
    nn.init.constant_(linear.weight, torch.inf)
    with pytest.raises(ValueError, match="NaN or infinity"):
        Int8Linear.of(linear)
    with pytest.raises(ValueError, match="weights on the disk cannot be held in eight bits"):
        Int8Linear.of(nn.Linear(4, 4, device="meta"))


@pytest.mark.filterwarnings("ignore:`torch.jit.script(_method)?` is deprecated")  # torch's own
@pytest.mark.all
def test_graphs_that_unpack_weights() -> None:
    """Where no gradient is needed although they are enabled, and in an exported program."""
    torch.compiler.reset()
    layer, x = Int8Linear.of(nn.Linear(64, 32, dtype=torch.bfloat16)), torch.randn(2, 64).bfloat16()
    torch.testing.assert_close(torch.compile(layer)(x), layer(x))  # by inductor, which has a pattern for the product
    torch.testing.assert_close(torch.compile(torch.export.export(layer, (x,)).module())(x), layer(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script(_method)?` is deprecated")  # torch's own
@torch.no_grad()
def test_a_compiled_product_has_a_forward_derivative() -> None:
    torch.compiler.reset()
    layer, x = Int8Linear.of(nn.Linear(64, 32, dtype=torch.bfloat16)), torch.randn(2, 64).bfloat16()
    product = torch.compile(lambda x: torch.func.jvp(layer, (x,), (x,))[1], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(product(x) + layer.bias.bfloat16(), layer(x), rtol=2**-6, atol=2**-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.all)])
def test_a_compiled_model_does_not_unpack_weights(compiler: str, tmp_path: Path) -> None:
    make("diff").save_pretrained(tmp_path)
    settings: dict[str, Any] = {"quantization_config": Int8Config()}
    model = DiffTransformerForCausalLM.from_pretrained(tmp_path, **settings).eval()
    linears = sum(isinstance(module, Int8Linear) for module in model.modules())
    graphs: list[torch.fx.GraphModule] = []

    def compile_graph(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(compiler)(graph, examples)

    compiled_model = torch.compile(model, backend=compile_graph, fullgraph=True)
    for inputs, own in ((tokens(), False), (tokens()[:1, :9], available_to_auto())):  # own: the kernel's, for few rows
        with torch.no_grad():
            compiled, eager = compiled_model(inputs).logits, model(inputs).logits
        assert (compiled.float() - eager.float()).abs().max() <= 0.05 * eager.float().abs().max()
        called = [str(node.target) for node in graphs[-1].graph.nodes if "int8_product" in str(node.target)]
        assert called == ["diff_transformer_cpu.int8_product"] * linears * own
    config = CompileConfig(backend=compile_graph, mode="default")
    config._compile_all_devices = True
    static: dict[str, Any] = {"cache_implementation": "static", "max_new_tokens": 3, "do_sample": False}
    before, plain = len(graphs), model.generate(inputs, **static)
    assert len(graphs) == before
    generated = model.generate(inputs, compile_config=config, **static)
    assert torch.equal(generated, plain) or compiler == "inductor"  # which rounds otherwise, in a tie, too
    assert len(graphs) > before
    if available_to_auto():
        product = torch.ops.diff_transformer_cpu.int8_product
        weight, scales = torch.ones(4, 8, dtype=torch.int8), torch.ones(4)
        torch.library.opcheck(product, (torch.randn(2, 1, 8), weight, scales))
        torch.testing.assert_close(product(weight.float().T[:, :8].T, weight, scales), torch.full((4, 4), 8.0))
        with pytest.raises(RuntimeError, match="x and its eight-bit weights do not fit"):
            product(torch.ones(1, 7), weight, scales)
