"""Writes one of our models as a folder to share, with safetensors or as an ONNX graph.

A graph is made of ONNX's operators, so our fused kernels cannot go into it. Of the implementations that can, the
reference is exported: it is Equation 1 itself, which subtracts the maps before the product with V. The one call that
"sdpa" makes of a DIFF layer would multiply zeros and cost twice as much. Each graph is compared with its model.
"""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import DynamicCache

from diff_transformer.convert.conversion import MAX_SHARD_SIZE
from diff_transformer.model.interface_attention import OWN_IMPLEMENTATION, attention_implementation
from diff_transformer.storage.atomic import atomic_directory

CARD = "README.md"
GRAPH = "model.onnx"
EXPORTED_IMPLEMENTATION = f"{OWN_IMPLEMENTATION}_reference"
# A protobuf file cannot be larger than 2 GiB: the weights of a model near that go into a file beside it.
LARGEST_IN_ONE_FILE = 1 << 30
# The frequencies of these depend on the length of the text, which a graph with open lengths cannot ask for.
CLOSED_ROPE_TYPES = {"dynamic", "longrope"}

Layers = tuple[tuple[Tensor, Tensor], ...]


def check_shard_size(size: str) -> None:
    """Raise ValueError if this is not a size as transformers reads it."""
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB|TB)", size):
        raise ValueError(f"The size of a shard must be like '500MB' or '5GB', got {size!r}.")


def export_folder(
    model: Any,
    tokenizer: Any | None,
    target: Path,
    *,
    card: str,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> list[Path]:
    """Write a model, in its dtype, as a folder that ``from_pretrained`` loads.

    Args:
        model: any of our models; it is left as it was.
        tokenizer: saved beside it, if there is one.
        target: the folder to make; it appears when all of it is there.
        card: the text of README.md.
        max_shard_size: most bytes of weights in a file, like "5GB".

    Returns:
        The files.

    Raises:
        FileExistsError: ``target`` exists.
        ValueError: ``max_shard_size`` is not a size.
        OSError: the folder cannot be written, e.g. because the disk is full.
    """
    check_shard_size(max_shard_size)
    with atomic_directory(target) as folder:
        try:
            model.save_pretrained(folder, max_shard_size=max_shard_size)
        except SafetensorError as error:  # what safetensors makes of a full disk
            raise OSError(f"The weights cannot be written: {error}") from error
        _save_tokenizer_and_card(folder, tokenizer, card)
    return sorted(target.iterdir())


def export_onnx(model: Any, tokenizer: Any | None, target: Path, *, card: str) -> list[Path]:
    """Write a language model as a folder with an ONNX graph and all that is needed to run it.

    Args: as :func:`export_folder`; and the model as :func:`export_graph` takes it.

    Returns:
        The files.

    Raises:
        FileExistsError, OSError: as :func:`export_folder`.
        ModuleNotFoundError, ValueError: as ``export_graph``.
    """
    with atomic_directory(target) as folder:
        export_graph(model, folder / GRAPH)
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        _save_tokenizer_and_card(folder, tokenizer, card)
    return sorted(target.iterdir())


def _save_tokenizer_and_card(folder: Path, tokenizer: Any | None, card: str) -> None:
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    (folder / CARD).write_text(card, encoding="utf-8")


class Step(nn.Module):
    """One call of the model as the graph makes it: keys and values go in and come out as tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: Layers
    ) -> tuple[Tensor, Layers]:
        """(B, N) tokens, (B, P + N) mask, (B, N) positions, P cached → logits (B, N, vocabulary), P + N cached."""
        cache = DynamicCache(past)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        return outputs.logits, _layers(cache)


def export_graph(model: Any, file: Path) -> None:
    """Write the model as an ONNX graph, after comparing the two.

    Inputs: ``input_ids`` and ``position_ids`` (B, N), ``attention_mask`` (B, P + N), 0 at padding, all int64, and for
    each layer from 0 ``past_key_values.L.key`` and ``.value`` (B, H_kv, P, width), float32, where P may be 0.
    Outputs: ``logits`` (B, N, vocabulary), and ``present.L.key`` and ``.value`` (B, H_kv, P + N, width), which are the
    next call's past. B, N and P are open.

    Args:
        model: a causal language model of ours in float32 on the CPU, in evaluation mode.
        file: the graph; weights of more than 1 GiB go into ``FILE.data`` beside it.

    Raises:
        ModuleNotFoundError: onnx, onnxruntime or onnxscript is missing.
        ValueError: the rotary embedding cannot be exported; or the graph computes something else than the model, and
            no file is left.
    """
    import onnx
    import onnxruntime  # noqa: F401  # here, so that it is not missed only when the graph is there
    import onnxscript  # noqa: F401  # torch's exporter imports it

    closed = _rope_types(model.config) & CLOSED_ROPE_TYPES
    if closed:
        raise ValueError(
            f"A model with rope_type {closed.pop()!r} cannot become an ONNX graph: its angles depend on the length."
        )
    with attention_implementation(model, EXPORTED_IMPLEMENTATION):
        program = _trace(model)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    program.save(file, external_data=weights > LARGEST_IN_ONE_FILE)
    del program  # it holds the weights once more
    try:
        onnx.checker.check_model(file)
        compare(model, file)
    except BaseException:
        file.unlink(missing_ok=True)
        file.with_name(f"{file.name}.data").unlink(missing_ok=True)
        raise


def _rope_types(config: Any) -> set[str]:
    """Of the rotary embedding, or of those of each type of layer."""
    settings = config.rope_parameters or {}
    return {
        each["rope_type"] for each in (settings, *settings.values()) if isinstance(each, dict) and "rope_type" in each
    }


@torch.no_grad()
def _trace(model: Any) -> Any:
    """The graph, with batch and lengths left open."""
    step = Step(model).eval()
    ids = torch.zeros(2, 3, dtype=torch.int64)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    past = _layers(cache)  # as wide and as many as this model caches
    arguments = _inputs(ids, torch.ones(2, 6, dtype=torch.int64), past)
    batch, length, cached = map(torch.export.Dim, ("batch_size", "sequence_length", "past_sequence_length"))
    tokens, layer = {0: batch, 1: length}, ({0: batch, 2: cached},) * 2
    shapes = (tokens, {0: batch, 1: "total_sequence_length"}, tokens, (layer,) * len(past))
    with _quiet():
        return torch.onnx.export(
            step,
            arguments,
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=["input_ids", "attention_mask", "position_ids", *_names("past_key_values", len(past))],
            output_names=["logits", *_names("present", len(past))],
            verbose=False,
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says about its own affairs: optional packages, renamed axes, a class it deprecated."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "# The axis name", UserWarning)
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
            yield
    finally:
        logger.setLevel(level)


@torch.no_grad()
def compare(model: Any, file: Path) -> None:
    """Run a graph and its model on the same random input: padding, an empty cache, single tokens, a long cache.

    The model runs in its own attention implementation, in float32 and in float64. The graph may be off from the latter
    by four times as much as the former, and by a few roundings of the largest value.

    Raises:
        ValueError: it is off by more.
    """
    session = _session(file)
    generator = torch.Generator().manual_seed(0)
    probes = list(_probes(model, session, generator))
    rough = [_run(model, probe) for probe in probes]
    try:
        model.double()
        exact = [_run(model, probe) for probe in probes]
    finally:
        model.float()
    for probe, first, truth in zip(probes, rough, exact, strict=True):
        computed = run_graph(session, *probe)
        # What is computed for padding is nobody's, but it must stay finite: a weight of 0 does not hide NaN.
        mask = probe[1].bool()
        for got, near, right in zip(_flat(*computed), _flat(*first), _flat(*truth), strict=True):
            seen = mask[:, -right.shape[-2] :]
            seen = seen if right.dim() == 3 else seen.unsqueeze(1).expand(right.shape[:-1])
            band = 4 * (near - right)[seen].abs().max() + 32 * torch.finfo(torch.float32).eps * right[seen].abs().max()
            error = (got - right)[seen].abs().max()
            if not (error <= band and got.isfinite().all()):
                raise ValueError(
                    f"The ONNX graph does not compute what the model computes: it is off by {error.item():.3g}, where "
                    f"rounding explains {band.item():.3g}; nothing has been written."
                )


def _probes(model: Any, session: Any, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Layers]]:
    """Tokens, mask and past of each comparison; the graph itself fills the cache, so that its errors would add up."""

    def tokens(count: int) -> Tensor:
        return torch.randint(model.config.vocab_size, (2, count), generator=generator)

    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[0, :2] = 0
    example = _layers(model(input_ids=tokens(1), use_cache=True).past_key_values)
    past: Layers = tuple((key[:, :, :0], value[:, :, :0]) for key, value in example)
    for count in (7, 1, 1):
        if count == 1:
            mask = torch.cat((mask, mask.new_ones(2, 1)), dim=1)
        probe = (tokens(count), mask, past)
        yield probe
        past = run_graph(session, *probe)[1]
    # A cache longer than a layer looks back, if layers have such a limit.
    length = (getattr(model.config, "sliding_window", None) or 8) + 3

    def cached(like: Tensor) -> Tensor:
        return torch.randn(2, like.shape[1], length, like.shape[3], generator=generator)

    past = tuple((cached(key), cached(value)) for key, value in example)
    yield tokens(3), torch.ones(2, length + 3, dtype=torch.int64), past


def _run(model: Any, probe: tuple[Tensor, Tensor, Layers]) -> tuple[Tensor, Layers]:
    ids, mask, past = probe
    of_its_dtype = tuple((key.to(model.dtype), value.to(model.dtype)) for key, value in past)
    logits, present = Step(model)(*_inputs(ids, mask, of_its_dtype))
    return logits.double(), tuple((key.double(), value.double()) for key, value in present)


def run_graph(session: Any, ids: Tensor, mask: Tensor, past: Layers) -> tuple[Tensor, Layers]:
    """One call of a graph in onnxruntime: logits and what is cached now."""
    tensors = [*_inputs(ids, mask, past)[:3], *(tensor for layer in past for tensor in layer)]
    feed = {slot.name: tensor.numpy() for slot, tensor in zip(session.get_inputs(), tensors, strict=True)}
    logits, *present = map(torch.from_numpy, session.run(None, feed))
    return logits, tuple(zip(present[::2], present[1::2], strict=True))


def _session(file: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _inputs(ids: Tensor, mask: Tensor, past: Layers) -> tuple[Tensor, Tensor, Tensor, Layers]:
    """With positions counted from the first token that is no padding."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return ids, mask, positions.contiguous(), past


def _layers(cache: Any) -> Layers:
    return tuple((layer.keys, layer.values) for layer in cache.layers)


def _flat(logits: Tensor, layers: Layers) -> list[Tensor]:
    return [logits, *(tensor for layer in layers for tensor in layer)]


def _names(prefix: str, layers: int) -> list[str]:
    return [f"{prefix}.{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
