"""The contract of servers that run transformers' models in kernels and caches of their own, vLLM's in the first place.

None of them is here: :mod:`server_stand_in` does to a model what vLLM's transformers backend does.
"""

import ast
import copy
import inspect
import textwrap

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.attention_types import ATTENTION_TYPES
from server_stand_in import Part, Server
from tiny_model import NOT_LATENT, kinds, make
from tiny_model import check_rounding as check

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7], [11, 1, 8, 3, 3], [16]]


def serve(model: DiffTransformerForCausalLM, dtype: torch.dtype = torch.float64) -> Server:
    return Server(copy.deepcopy(model.config), dict(model.state_dict()), dtype)


kind = kinds(NOT_LATENT)


def generated_alone(model: DiffTransformerForCausalLM, new_tokens: int) -> list[list[int]]:
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    out = [model.generate(torch.tensor([prompt]), **options)[0] for prompt in PROMPTS]
    return [tokens[len(prompt) :].tolist() for tokens, prompt in zip(out, PROMPTS, strict=True)]


def test_a_server_generates_the_same_tokens(kind: str) -> None:
    """Its store is as large as the Transformer's: of a layer and a token 4 heads of d = 4, for keys and for values."""
    model = make(kind)
    server = serve(model)
    assert server.generate(PROMPTS, 5) == generated_alone(model, 5)
    layers = list(server.attention.values())
    assert [layer.calls for layer in layers] == [8, 8]  # one in each pass
    assert all(layer.kv_heads * layer.width == 4 * model.config.num_key_value_heads for layer in layers)
    assert all(layer.keys[0].shape == (13, layer.kv_heads, layer.width) for layer in layers)


@pytest.mark.parametrize("kind", ATTENTION_TYPES)
def test_the_layer_shows_its_call_to_who_reads_the_source(kind: str) -> None:
    """vLLM looks for it so: a name that is looked up in the interface, called once, with a ``scaling`` of the layer."""
    layer = make(kind).model.layers[0].self_attn
    tree = ast.parse(textwrap.dedent(inspect.getsource(type(layer).forward)))
    names = {
        node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and ast.unparse(node.value).startswith("ALL_ATTENTION_FUNCTIONS.get_interface(")
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in names]
    assert len(calls) == 1
    assert {word.arg: ast.unparse(word.value) for word in calls[0].keywords}["scaling"] == "self.scaling"
    assert layer.scaling == layer.head_dim**-0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_lambda_stays_in_float32(dtype: torch.dtype) -> None:
    model = make("diff", torch.float32)
    loaded = serve(model, dtype=dtype).model
    assert loaded.layers[0].self_attn.q_proj.weight.dtype == dtype
    for ours, servers in zip(model.model.layers, loaded.layers, strict=True):
        for name, parameter in ours.self_attn.lam.named_parameters():
            assert torch.equal(servers.self_attn.lam.get_parameter(name), parameter), name


def test_the_headwise_norm_is_left_as_it_is() -> None:
    """A norm of the server's would lose the factor 1 − λ_init; those of the layers it may have."""
    layer = serve(make("diff")).model.layers[1]
    assert type(layer.input_layernorm).__name__ == type(layer.post_attention_layernorm).__name__ == "ServersNorm"
    assert layer.self_attn.head_norm.factor == pytest.approx(1 - (0.8 - 0.6 * 2.718281828459045**-0.3))


@pytest.mark.all
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, while it compiles
def test_a_server_compiles_the_model_once(kind: str) -> None:
    """As one graph, whatever the number of tokens."""
    torch.compiler.reset()
    server, counter = serve(make(kind)), CompileCounter()
    expected = [server.logits([Part(i, prompt, 0)]) for i, prompt in enumerate(PROMPTS[:3])]
    server.model = torch.compile(server.model, fullgraph=True, dynamic=True, backend=counter)
    for i, prompt in enumerate(PROMPTS[:3], start=len(PROMPTS)):
        check(server.logits([Part(i, prompt, 0)]), expected[i - len(PROMPTS)])
    assert counter.frame_count == 1
