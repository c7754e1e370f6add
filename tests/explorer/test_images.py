"""Vision Transformers in the explorer: maps over patches, classes, attention rollout, refusals."""

import base64
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from torch import Tensor, nn

from decoded_maps import decode_maps
from diff_transformer.explorer import Explorer, LambdaSettings, explore_images, image_explorer
from diff_transformer.explorer.images import ImageModel
from diff_transformer.explorer.page import recorded_page
from diff_transformer.explorer.trace import rollout
from diff_transformer.nn import DiffAttention, DiffAttentionV2, GroupedDiffAttention, RotaryEmbedding, SoftmaxAttention
from diff_transformer.ops import diff_attention_maps
from tiny_vit import GRID, IMAGES, VisionTransformer


def inputs_of(model: VisionTransformer, image: Tensor) -> list[Tensor]:
    """The input of each layer."""
    states = [torch.cat((model.others, model.patches(image[None]).flatten(2).transpose(1, 2)), 1)]
    states.append(states[0] + model.layers[0](states[0]))
    return states


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (DiffAttention, {}),
        (DiffAttentionV2, {}),
        (GroupedDiffAttention, {"num_noise_heads": 1}),
        (SoftmaxAttention, {}),
    ],
)
def test_a_map_is_that_of_the_layer_and_sees_all_patches(make: Any, options: dict[str, Any]) -> None:
    model = VisionTransformer(make, **options)
    explored = ImageModel(model, "tiny", IMAGES, GRID)
    trace = explored.trace(explored.tokens_of(1))
    attention, states = model.layers[1], inputs_of(model, IMAGES[1])[1]
    queries, keys, _ = attention.project(states, None)
    if make is SoftmaxAttention:
        expected = (queries.transpose(1, 2) @ keys.transpose(-1, -2) * attention.scaling).softmax(-1)
    else:
        q, k = attention.split_queries(queries), attention.split_keys(keys)
        expected = diff_attention_maps(q, k, attention.lambdas(states))[2]
    found = trace.maps.of(1, slice(None)).difference
    assert found.shape == (explored.heads, 8, 8)
    torch.testing.assert_close(found, expected[0], rtol=1e-9, atol=1e-12)
    assert (found[:, 0, 1:] != 0).all()  # no causality


def test_a_map_has_the_positions_that_its_layer_was_given() -> None:
    model = VisionTransformer(DiffAttention)
    tables = RotaryEmbedding(4).positions(torch.zeros(1, 8, 16, dtype=torch.float64))
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, inputs, named: ((*inputs, tables), named), with_kwargs=True)
    explored, attention, states = (
        ImageModel(model, "tiny", IMAGES, GRID),
        model.layers[1],
        inputs_of(model, IMAGES[1])[1],
    )
    queries, keys, _ = attention.project(states, tables)
    q, k = attention.split_queries(queries), attention.split_keys(keys)
    expected = diff_attention_maps(q, k, attention.lambdas(states))[2]
    found = explored.trace(explored.tokens_of(1)).maps.of(1, slice(None)).difference
    torch.testing.assert_close(found, expected[0], rtol=1e-9, atol=1e-12)


def test_the_explorer_answers_for_an_image(image_pair: Explorer) -> None:
    described, model = image_pair.describe(), image_pair.sides["left"].model.model
    assert described["models"]["left"]["grid"] == GRID
    assert [one["text"] for one in described["examples"]] == ["Image 1", "Image 2", "Image 3"]
    answer = image_pair.run({"text": "Image 2", "picture": 8})
    assert answer["pieces"] == ["extra 1", "extra 2", "1,1", "1,2", "2,1", "2,2", "3,1", "3,2"]
    known = model(IMAGES[1:2])[0].softmax(-1)
    names = {"cat": 0, "dog": 1, "class 2": 2, "class 3": 3, "class 4": 4}
    assert {one["piece"]: one["probability"] for one in answer["next"]} == pytest.approx(
        {name: known[place].item() for name, place in names.items()}
    )
    assert answer["loss"] is None
    right = image_pair.sides["right"].model.model(IMAGES[1:2])[0].softmax(-1)
    assert image_pair.run({"side": "right", "text": "Image 2"})["next"][0]["probability"] == pytest.approx(
        right.max().item()
    )
    maps, _ = decode_maps(image_pair.head_map({"text": "Image 2", "layer": 1, "head": 2}))
    assert maps.second is not None
    torch.testing.assert_close(maps.second[0].sum(-1), torch.ones(8), rtol=0, atol=5e-3)
    off = image_pair.run({"text": "Image 2", "lambdas": {"factor": 0}, "picture": 8})
    assert off["divergence"] > 0
    assert off["heads"]["removed"] == [[0, 0], [0, 0]]
    likeliest = max(answer["next"], key=lambda one: one["probability"])["piece"]
    (changed,) = (one["probability"] for one in off["next"] if one["piece"] == likeliest)
    assert image_pair.strip({"text": "Image 2", "factor": 0.0}) == {"value": pytest.approx(changed), "piece": likeliest}


def test_rollout_is_the_product_of_the_layers(image_pair: Explorer) -> None:
    model: Any = image_pair.sides["left"].model
    maps = model.trace(model.tokens_of(0)).maps
    expected = torch.eye(8, dtype=torch.float64)
    for layer in range(2):
        heads = maps.of(layer, slice(None)).difference.abs()
        mean = torch.stack([head / head.sum(1, keepdim=True) for head in heads]).mean(0)
        expected = (0.5 * mean + 0.5 * torch.eye(8)) @ expected
    found = rollout(maps, 2)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.sum(-1), torch.ones(8, dtype=torch.float64))
    answer = image_pair.run({"side": "left", "text": "Image 1", "picture": 8})
    torch.testing.assert_close(torch.tensor(answer["heads"]["rollout"], dtype=torch.float64), found, rtol=0, atol=6e-7)


def test_the_model_is_as_before_after_a_run(image_pair: Explorer) -> None:
    model: Any = image_pair.sides["left"].model
    before = model.model(IMAGES[:1])
    moved = model.trace(model.tokens_of(0), LambdaSettings(heads={(2, 1): 0.0}))
    assert moved.lambdas[1, 0] == 0
    assert torch.equal(model.model(IMAGES[:1]), before)
    assert not any(attention._forward_pre_hooks for attention in model.attentions)


def test_a_compiled_model_that_has_run_before(image_pair: Explorer) -> None:
    model: Any = image_pair.sides["left"].model.model
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(IMAGES[:1])
    asked = {"text": "Image 2", "lambdas": {"factor": 0}}
    assert (
        image_explorer(compiled, IMAGES, ["cat", "dog"], grid=GRID).run(asked)["next"] == image_pair.run(asked)["next"]
    )


def test_a_picture_is_the_image(image_pair: Explorer) -> None:
    _, _, data = image_pair.examples[2].picture.partition("base64,")
    pixels = torch.tensor(imread(io.BytesIO(base64.b64decode(data)), format="png"))
    image = IMAGES[2, 0]
    expected = (image - image.min()) / (image.max() - image.min())
    torch.testing.assert_close(pixels[..., 0].double(), expected, rtol=0, atol=0.5 / 255 + 1e-6)
    colours = torch.rand(1, 3, 4, 4)
    rows = nn.Flatten(2), DiffAttention(16, 4, 1), nn.Flatten()
    (shown,) = image_explorer(nn.Sequential(*rows), colours, grid=(1, 3)).examples
    pixels = torch.tensor(
        imread(io.BytesIO(base64.b64decode((shown.picture or "").partition("base64,")[2])), format="png")
    )
    expected = (colours[0] - colours.min()) / (colours.max() - colours.min())
    torch.testing.assert_close(pixels.permute(2, 0, 1)[:3], expected, rtol=0, atol=0.5 / 255 + 1e-6)


def test_the_grid_is_the_largest_square_unless_the_model_or_the_caller_says_so() -> None:
    square = IMAGES.repeat(1, 1, 1, 2)[..., :6]
    assert ImageModel(VisionTransformer(DiffAttention), "tiny", square).grid == (3, 3)  # of 9 patches and 2 others
    model = VisionTransformer(DiffAttention)
    model.patch_embed = SimpleNamespace(grid_size=(2, 3))
    assert ImageModel(model, "tiny", IMAGES).grid == (2, 3)


@pytest.mark.parametrize(
    "called_with",
    [{"is_causal": True}, {"attn_mask": torch.ones(8, 8).tril().bool()}, {"context": torch.ones(1, 8, 16).double()}],
)
def test_it_refuses_attention_that_is_not_of_all_patches_alone(called_with: dict[str, Any]) -> None:
    model = VisionTransformer(DiffAttention)
    model.called_with = called_with
    with pytest.raises(ValueError, match="without mask, causality, context or cache"):
        image_explorer(model, IMAGES, grid=GRID)


def test_it_refuses_layers_that_are_not_called_once_in_order() -> None:
    model = VisionTransformer(DiffAttention)
    model.layers = nn.ModuleList([model.layers[0], model.layers[1], model.layers[0]])
    with pytest.raises(ValueError, match="tiny must call each attention once in a run, in the order of its modules"):
        ImageModel(model, "tiny", IMAGES, GRID)
    model.layers = nn.ModuleList([DiffAttention(16, 4, 1), DiffAttention(16, 8, 2, head_dim=4)]).double()
    with pytest.raises(ValueError, match="one type of attention, with as many heads in each"):
        ImageModel(model, "tiny", IMAGES, GRID)


def test_what_it_refuses(image_pair: Explorer) -> None:
    differential = VisionTransformer(DiffAttention)
    with pytest.raises(ValueError, match="attention of this package in it, got Linear"):
        image_explorer(nn.Linear(2, 2), IMAGES)
    with pytest.raises(ValueError, match=r"\(B, C, H, W\) with B of 1 or more, got \(6, 4\)"):
        image_explorer(differential, IMAGES[0, 0])
    for grid in ((3, 3), (-3, -2), (6,)):
        with pytest.raises(ValueError, match=r"grid must be rows and columns, .* the 8 tokens of model, got"):
            image_explorer(differential, IMAGES, grid=grid)
    with pytest.raises(ValueError, match=r"grid must be given for images that are not square, got \(6, 4\)"):
        image_explorer(differential, IMAGES)
    with pytest.raises(ValueError, match=r"model must return logits \(B, classes\), got torch.Size"):
        image_explorer(nn.Sequential(nn.Flatten(1, 2), DiffAttention(4, 2, 1)), IMAGES.float(), grid=GRID)
    one_more = VisionTransformer(DiffAttention)
    one_more.others = nn.Parameter(torch.randn(1, 3, 16).double())
    with pytest.raises(ValueError, match="compare must have the model's 8 tokens, got 9"):
        image_explorer(differential, IMAGES, compare=one_more, grid=GRID)
    with pytest.raises(ValueError, match="subtracts nothing; give it as compare"):
        image_explorer(VisionTransformer(SoftmaxAttention), IMAGES, grid=GRID)
    with pytest.raises(ValueError, match="There are images 'Image 1' … 'Image 3', got 'Image 4'"):
        image_pair.run({"text": "Image 4"})
    with pytest.raises(ValueError, match="those of one of 3 images, got"):
        image_pair.run({"tokens": [0, 1]})
    with pytest.raises(ValueError, match="those of one of 3 images, got"):
        image_pair.run({"tokens": [float(token) for token in range(8)]})
    with pytest.raises(ValueError, match="An image has no answer"):
        image_pair.run({"text": "Image 1", "answer": {"query": 7, "begin": 1, "end": 2}})


def test_a_page_and_a_widget_show_them(image_pair: Explorer) -> None:
    page = recorded_page(image_pair)
    assert '"rollout": [[' in page
    pytest.importorskip("anywidget")
    widget = explore_images(VisionTransformer(DiffAttention), IMAGES, grid=GRID)
    assert widget.described["models"]["left"]["label"] == "DIFF"
