"""The ONNX graph with its cache in onnxruntime, against the model in another attention implementation."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.convert import shared_folder as exporting
from layers_by_hand import check
from tiny_model import PAIRED, SIZES, sharpen, sizes_for

pytestmark = pytest.mark.all

LAYERS = SIZES["num_hidden_layers"]
# Type → what makes it a special case; all have grouped queries.
KINDS: dict[str, dict[str, Any]] = {
    "diff": {},
    "diff_grouped": {},
    "diff_v2": {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
    "softmax": {"tie_word_embeddings": True},
}
# What a layer multiplies: four projections, two products of attention, three of the feed-forward network; DIFF V2 has a
# projection for λ. One product with V and not two says that the maps were subtracted before it.
# One of them marks the queries that see a key or a value which is not finite.
PRODUCTS = {"diff": 10, "diff_grouped": 10, "diff_v2": 11, "softmax": 9}


class Exported(NamedTuple):
    kind: str
    model: Any
    file: Path
    session: Any


# Each export takes 13 s of a processor.
@pytest.fixture(scope="module", params=KINDS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exported]:
    torch.manual_seed(3)
    config = DiffTransformerConfig(attention_type=request.param, **SIZES, **KINDS[request.param])
    model = DiffTransformerForCausalLM(config).eval()
    sharpen(model)
    folder = tmp_path_factory.mktemp(request.param) / "shared"
    exporting.export_onnx(model, None, folder, card="")
    file = folder / "model.onnx"
    assert model.config._attn_implementation == "diff_attention"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    yield Exported(request.param, model, file, session)
    model.set_attn_implementation("diff_attention")


def nothing_cached(session: Any, batch: int) -> dict[str, np.ndarray]:
    """The past of the first call, made from what the graph itself says of its inputs."""
    slots = [slot for slot in session.get_inputs() if slot.name.startswith("past_key_values.")]
    return {slot.name: np.zeros((batch, slot.shape[1], 0, slot.shape[3]), np.float32) for slot in slots}


def call(session: Any, ids: np.ndarray, mask: np.ndarray, past: dict[str, np.ndarray]) -> tuple[Any, dict[str, Any]]:
    positions = np.maximum(mask.cumsum(-1) - 1, 0)[:, -ids.shape[1] :]
    named = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, **past}
    logits, *present = session.run(None, named)
    return logits, dict(zip(past, present, strict=True))


def test_its_inputs_and_outputs(exported: Exported) -> None:
    graph = onnx.load(exported.file).graph
    axes = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    heads, width = (2, 8) if exported.kind in PAIRED else (4, 4)
    batch, length, past = "batch_size", "sequence_length", "past_sequence_length"
    cached = {
        f"past_key_values.{layer}.{part}": [batch, heads, past, width]
        for layer in range(LAYERS)
        for part in ("key", "value")
    }
    assert {name: axes.pop(name) for name in cached} == cached
    for name in cached:
        present = axes.pop(name.replace("past_key_values", "present"))
        assert (present[0], present[1], present[3]) == (batch, heads, width)
        assert set(present[2].split(" + ")) == {past, length}
    assert axes == {
        "input_ids": [batch, length],
        "attention_mask": [batch, "total_sequence_length"],
        "position_ids": [batch, length],
        "logits": [batch, length, SIZES["vocab_size"]],
    }


def test_it_is_onnx_alone_and_the_maps_meet_the_values_once(exported: Exported) -> None:
    proto = onnx.load(exported.file)
    onnx.checker.check_model(proto, full_check=True)
    assert {node.domain for node in proto.graph.node} == {""}
    kinds = Counter(node.op_type for node in proto.graph.node)
    # And the output head; some versions of transformers multiply positions and frequencies as matrices.
    assert kinds["MatMul"] - PRODUCTS[exported.kind] * LAYERS in (1, 2)
    assert kinds["Softmax"] == LAYERS


@torch.no_grad()
def test_prefill_and_single_steps_equal_the_model(exported: Exported) -> None:
    """One forward of all tokens, through transformers' eager attention and without a cache, is what is expected."""
    ids, mask = torch.randint(SIZES["vocab_size"], (3, 13)), torch.ones(3, 13, dtype=torch.int64)
    mask[0, :4], mask[2, :1] = 0, 0
    exported.model.set_attn_implementation("eager")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = exported.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    exported.model.set_attn_implementation("diff_attention")
    parts, past, done = [], nothing_cached(exported.session, 3), 0
    for count in (7, 1, 1, 3, 1):
        step = slice(done, done + count)
        logits, past = call(exported.session, ids[:, step].numpy(), mask[:, : step.stop].numpy(), past)
        parts.append(torch.from_numpy(logits))
        done = step.stop
    assert done == ids.shape[1]
    seen = mask.bool()
    check(torch.cat(parts, dim=1)[seen], expected[seen])


@pytest.mark.parametrize("tokens", [1, 6])
def test_one_text_alone(exported: Exported, tokens: int) -> None:
    ids = torch.randint(SIZES["vocab_size"], (1, tokens))
    logits, _ = call(exported.session, ids.numpy(), np.ones((1, tokens), np.int64), nothing_cached(exported.session, 1))
    with torch.no_grad():
        check(torch.from_numpy(logits), exported.model(ids).logits)


def test_greedy_generation_equals_generate(exported: Exported) -> None:
    ids, mask = torch.randint(SIZES["vocab_size"], (2, 6)), torch.ones(2, 6, dtype=torch.int64)
    mask[1, :3] = 0
    new = 16
    expected = exported.model.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
    )
    written, seen, past = [ids.numpy()], mask.numpy(), nothing_cached(exported.session, 2)
    for _ in range(new):
        logits, past = call(exported.session, written[-1], seen, past)
        written.append(logits[:, -1].argmax(-1, keepdims=True))
        seen = np.concatenate((seen, np.ones((2, 1), np.int64)), axis=1)
    assert np.concatenate(written, axis=1).tolist() == expected.tolist()
    assert len(set(expected[0, 6:].tolist())) > 1  # not one token over and over


@pytest.mark.parametrize("change", [1e-3, float("nan")])
def test_a_wrong_graph_is_refused_and_not_left(
    exported: Exported, change: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with other numbers in its largest weight."""
    proto = onnx.load(exported.file)
    weight = max(proto.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    numbers = onnx.numpy_helper.to_array(weight) * np.float32(1 + change)
    weight.CopyFrom(onnx.numpy_helper.from_array(numbers, weight.name))
    altered = SimpleNamespace(save=lambda file, external_data: onnx.save(proto, file))
    monkeypatch.setattr(exporting, "_trace", lambda model: altered)
    with pytest.raises(ValueError, match=r"results differ from the model's: they are off by"):
        exporting.export_onnx(exported.model, None, tmp_path / "shared", card="")
    assert not list(tmp_path.iterdir())


def test_weights_beside_a_large_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "LARGEST_IN_ONE_FILE", 0)
    model = DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES)).eval()
    files = exporting.export_onnx(model, None, tmp_path / "shared", card="")
    sizes = {file.name: file.stat().st_size for file in files}
    assert sizes.keys() >= {"model.onnx", "model.onnx.data"}
    assert sizes["model.onnx.data"] > 0.9 * 4 * sum(parameter.numel() for parameter in model.parameters())


def test_an_embedding_whose_angles_depend_on_the_length_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = DiffTransformerForCausalLM(DiffTransformerConfig(**SIZES, rope_parameters=rope))
    with pytest.raises(ValueError, match="rope_type 'dynamic' cannot become an ONNX graph"):
        exporting.export_onnx(model, None, tmp_path / "shared", card="")
    assert not list(tmp_path.iterdir())


def test_what_is_missing_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModuleNotFoundError) as error:
        exporting.export_onnx(None, None, tmp_path / "shared", card="")
    assert error.value.name == "onnxruntime"


def test_latents_are_cached_once(tmp_path: Path) -> None:
    model = DiffTransformerForCausalLM(DiffTransformerConfig(attention_type="gdla", **sizes_for("gdla"))).eval()
    exporting.export_onnx(model, None, tmp_path / "shared", card="")  # which compares the two
    session = onnxruntime.InferenceSession(str(tmp_path / "shared/model.onnx"), providers=["CPUExecutionProvider"])
    assert [array.shape for array in nothing_cached(session, 1).values()] == [(1, 1, 0, 12), (1, 1, 0, 0)] * 2
