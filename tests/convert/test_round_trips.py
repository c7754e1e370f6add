"""There and back again changes no bit, whatever the sizes, the dtypes and the number of files."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from diff_transformer import DiffTransformerConfig
from diff_transformer.convert import LAYOUTS, Layout, convert_from, convert_to
from diff_transformer.convert.layout import OUTPUT_HEAD, parameter_mappings
from layers_by_hand import tensors_in

# The parameters of DEX are folded into W_O on the way back, and do not return: test_dex.py.
BOTH_WAYS = (layout for choices in LAYOUTS.values() for layout in choices.values() if layout.write)
LAYOUTS_BOTH_WAYS = [layout for layout in BOTH_WAYS if layout.attention_type != "dex"]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
EPS = st.sampled_from([None, 1e-6])  # another than that of the other norms, or the same
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


# Layouts in which heads are as wide as the model divided by their number.
WIDTH_FROM_HEADS = ("microsoft", "llama", "motif")


@st.composite
def configs(draw: st.DrawFn, layout: Layout) -> DiffTransformerConfig:
    kind = layout.attention_type
    even = 1 if kind == "diff_v2" else 2
    kv_heads = even * draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    width = 2 * draw(st.integers(1, 3))
    ropes: list[Any] = [{"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}, None]
    more: dict[str, Any] = {}
    if layout.name.startswith("motif"):
        ropes = [{"rope_type": "default", "rope_theta": 7.0}, None]
        more = {"hidden_act": "poly_norm", "lambda_init_offset": -1, "attention_norm_eps": draw(EPS)}
    if kind == "softmax":
        more = {"attention_bias": draw(st.booleans()), "attention_dropout": draw(st.sampled_from([0.0, 0.25]))}
    if kind == "diff_grouped":
        more["num_noise_heads"] = kv_heads // 2 * draw(st.integers(1, 2))
        heads = more["num_noise_heads"] * draw(st.integers(2, 4))
    return DiffTransformerConfig(
        attention_type=kind,
        vocab_size=draw(st.integers(1, 5)),
        hidden_size=heads * width if layout.name in WIDTH_FROM_HEADS else heads * draw(st.integers(1, 4)),
        intermediate_size=draw(st.integers(1, 5)),
        num_hidden_layers=draw(st.integers(1, 2)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width,
        tie_word_embeddings=draw(st.booleans()),
        rope_parameters=draw(st.sampled_from(ropes)),
        max_position_embeddings=draw(st.integers(1, 99)),
        eos_token_id=draw(st.sampled_from([None, 0, [0, 1]])),
        dtype=draw(st.sampled_from([None, "bfloat16"])),
        **more,
    )


def any_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of every kind, infinities and NaN with a payload among them."""
    integer = INTEGERS[dtype.itemsize]
    bounds = torch.iinfo(integer)
    return torch.randint(bounds.min, bounds.max, shape, dtype=integer).view(dtype)


@contextmanager
def checkpoint(
    layout: Layout, config: DiffTransformerConfig, content: dict[str, Any], dtypes: list[torch.dtype], in_ours: bool
) -> Iterator[Path]:
    """A temporary folder with `source/`: random bits under the keys and shapes that the table says."""
    tensors = {}
    for number, mapping in enumerate(parameter_mappings(layout, config, backwards=in_ours)):
        if mapping.input is None or (mapping.input == OUTPUT_HEAD and config.tie_word_embeddings):
            continue
        dtype, shape = dtypes[number % len(dtypes)], mapping.input_shape
        tensors[mapping.input] = torch.ones(shape, dtype=dtype) if mapping.output is None else any_bits(shape, dtype)
    with TemporaryDirectory() as folder:
        (source := Path(folder, "source")).mkdir()
        save_file(tensors, source / "model.safetensors")
        (source / "config.json").write_text(json.dumps(content), encoding="utf-8")
        yield Path(folder)


def same_bits(one: Path, other: Path) -> None:
    first, second = tensors_in(one), tensors_in(other)
    assert first.keys() == second.keys()
    for key, x in first.items():
        y, integer = second[key], INTEGERS[x.dtype.itemsize]
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert torch.equal(x.view(integer), y.view(integer)), key


@pytest.mark.parametrize("layout", LAYOUTS_BOTH_WAYS, ids=lambda layout: layout.name)
@settings(max_examples=8)
@given(data=st.data())
def test_no_bit_changes(layout: Layout, data: st.DataObject) -> None:
    config = data.draw(configs(layout))
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
    size = data.draw(st.sampled_from([64, 1000, "5GB"]))
    in_ours = data.draw(st.booleans())
    assert layout.write is not None
    before = json.loads(config.to_json_string()) if in_ours else layout.write(config)
    there, back = (convert_to, convert_from) if in_ours else (convert_from, convert_to)
    with checkpoint(layout, config, before, dtypes, in_ours) as folder:
        there(layout.name, folder / "source", folder / "there", max_shard_size=size)
        back(layout.name, folder / "there", folder / "back", max_shard_size=size)
        same_bits(folder / "source", folder / "back")
        after = json.loads((folder / "back/config.json").read_text(encoding="utf-8"))
    if in_ours:
        before["architectures"] = ["DiffTransformerForCausalLM"]
    assert after == before
