"""Writes one of our models as a folder to share, with safetensors or as an ONNX graph, and its model card, README.md.

A graph is made of ONNX's operators, so our fused kernels cannot go into it. Of the implementations that can, the
reference is exported: it is Equation 1 itself, which subtracts the maps before the product with V. The one call that
"sdpa" makes of a DIFF layer would multiply zeros and cost twice as much. Each graph is compared with its model.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import DynamicCache

from diff_transformer._version import INSTALL, __version__
from diff_transformer.convert.conversion import MAX_SHARD_SIZE, shard_bytes
from diff_transformer.model.cache import CACHE_NAME
from diff_transformer.model.interface_attention import OPERATOR_IMPLEMENTATION, attention_implementation
from diff_transformer.utils.files import atomic_directory

CARD = "README.md"
GRAPH = "model.onnx"
EXPORTED_IMPLEMENTATION = f"{OPERATOR_IMPLEMENTATION}_reference"
# A protobuf file cannot be larger than 2 GiB: the weights of a model near that go into a file beside it.
LARGEST_IN_ONE_FILE = 1 << 30

# An entry point of this group makes of (folder, results files) an object whose ``text`` takes the `Exported`; there is
# one where diff-transformer-lab is installed.
CARDS = "diff_transformer.export_card"

# Auto class → the name of its task on the Hub. The base model has no task.
TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}

Inputs = tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]  # tokens, mask and positions; keys and values by layer


def export_folder(
    model: Any, tokenizer: Any | None, target: str | Path, *, card: str, max_shard_size: int | str = MAX_SHARD_SIZE
) -> list[Path]:
    """Write a model, in its dtype, as a folder that ``from_pretrained`` loads.

    Args:
        model: any of our models; it is left as it was.
        tokenizer: saved beside it, if there is one.
        target: the folder to make; it appears when all of it is there.
        card: the text of README.md.
        max_shard_size: most bytes of weights in a file, as a number or like "5GB".

    Returns:
        The files.

    Raises:
        FileExistsError: ``target`` exists.
        ValueError: ``max_shard_size`` is not a size.
        OSError: the folder cannot be written, e.g. because the disk is full.

    Examples:
        >>> config = DiffTransformerConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        >>> files = export_folder(DiffTransformerForCausalLM(config), None, "shared", card="# A model")
        >>> Path("shared/model.safetensors") in files
        True
    """
    target, largest = Path(target), shard_bytes(max_shard_size)
    with _folder_with(tokenizer, card, target) as folder:
        try:
            model.save_pretrained(folder, max_shard_size=largest)
        except SafetensorError as error:  # what safetensors makes of a full disk
            raise OSError(f"The weights cannot be written: {error}") from error
    return sorted(target.iterdir())


def export_onnx(model: Any, tokenizer: Any | None, target: str | Path, *, card: str) -> list[Path]:
    """Write a language model as a folder with an ONNX graph, which is compared with it, and all that onnxruntime needs.

    Inputs: ``input_ids`` and ``position_ids`` (B, N), ``attention_mask`` (B, P + N), 0 at padding, all int64, and for
    each layer from 0 ``past_key_values.L.key`` and ``.value`` (B, H_kv, P, width), float32; P may be 0. Outputs:
    ``logits`` (B, N, vocabulary), and ``present.L.key`` and ``.value`` (B, H_kv, P + N, width), which are the next
    call's past. B, N and P are open. Weights of more than 1 GiB go into ``model.onnx.data``.

    Args:
        model: a causal language model of ours in float32 on the CPU, in evaluation mode.
        tokenizer, target, card: as :func:`export_folder` has them.

    Returns:
        The files.

    Raises:
        FileExistsError, OSError: as :func:`export_folder`.
        ModuleNotFoundError: onnx, onnxruntime or onnxscript is missing.
        ValueError: the rotary embedding cannot be exported, or the graph's outputs differ from the model's.

    Examples:
        >>> files = export_onnx(model, tokenizer, "shared", card="# A model")  # doctest: +SKIP
    """
    import onnx
    import onnxruntime  # noqa: F401  # here, so that it is not missed only when the graph is there
    import onnxscript  # noqa: F401  # torch's exporter imports it

    if model.config.angles_follow_length:
        rope_type = model.config.rope_parameters["rope_type"]
        raise ValueError(
            f"A model with rope_type {rope_type!r} cannot become an ONNX graph: its angles depend on the length."
        )
    target = Path(target)
    with _folder_with(tokenizer, card, target) as folder:
        with attention_implementation(model, EXPORTED_IMPLEMENTATION):
            program = _trace(model)
        weights = sum(parameter.nbytes for parameter in model.parameters())
        program.save(folder / GRAPH, external_data=weights > LARGEST_IN_ONE_FILE)
        del program  # it holds the weights once more
        onnx.checker.check_model(folder / GRAPH)
        compare(model, folder / GRAPH)
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
    return sorted(target.iterdir())


@contextmanager
def _folder_with(tokenizer: Any | None, card: str, target: Path) -> Iterator[Path]:
    with atomic_directory(target) as folder:
        yield folder
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        (folder / CARD).write_text(card, encoding="utf-8")


class Step(nn.Module):
    """One call of the model as the graph makes it: keys and values go in and come out as tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Map tokens and positions (B, N), mask (B, P + N), P cached to logits (B, N, vocabulary), P + N cached."""
        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        outputs = self.model(input_ids, attention_mask, position_ids, cache, use_cache=True)
        return outputs.logits, *_cached_tensors(cache)


@torch.no_grad()
def _trace(model: Any) -> Any:
    """Return the graph, with batch and lengths left open."""
    ids = torch.zeros(2, 3, dtype=torch.int64)
    past = _cached_tensors(model(input_ids=ids, use_cache=True)[CACHE_NAME])  # as wide and as many as it caches
    batch, length, cached = map(torch.export.Dim, ("batch_size", "sequence_length", "past_sequence_length"))
    tokens, mask = {0: batch, 1: length}, {0: batch, 1: "total_sequence_length"}
    names = [f"{layer}.{part}" for layer in range(len(past) // 2) for part in ("key", "value")]
    with _quiet():
        return torch.onnx.export(
            Step(model).eval(),
            _inputs(ids, torch.ones(2, 6, dtype=torch.int64), past),
            dynamo=True,
            dynamic_shapes=(tokens, mask, tokens, ({0: batch, 2: cached},) * len(past)),
            input_names=["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{name}" for name in names)],
            output_names=["logits", *(f"present.{name}" for name in names)],
            verbose=False,
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch about its own affairs: optional packages, renamed axes, a class it deprecated."""
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
    """Run a graph and its model on the same random input: padding, an empty cache, a single token, a long cache.

    The model runs in its own attention implementation, in float32 and in float64. The graph may be off from the latter
    by four times as much as the former, and by a few roundings of the largest value.

    Raises:
        ValueError: it is off by more.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    probes = list(_probes(model))
    rough = [_run(model, probe) for probe in probes]
    try:
        model.double()
        exact = [_run(model, probe) for probe in probes]
    finally:
        model.float()
    for probe, *answers in zip(probes, rough, exact, strict=True):
        # What is computed for padding is nobody's, but it must stay finite: a weight of 0 does not hide NaN.
        mask = probe[1].bool()
        *tokens, past = probe
        feed = {slot.name: tensor.numpy() for slot, tensor in zip(session.get_inputs(), (*tokens, *past), strict=True)}
        for output, near, right in zip(map(torch.from_numpy, session.run(None, feed)), *answers, strict=True):
            if right.numel() == 0:  # values of a cache of latents, which have no width
                continue
            seen = mask[:, -right.shape[-2] :]
            seen = seen if right.dim() == 3 else seen.unsqueeze(1).expand(right.shape[:-1])
            band = 4 * (near - right)[seen].abs().max() + 32 * torch.finfo(torch.float32).eps * right[seen].abs().max()
            error = (output - right)[seen].abs().max()
            if not (error <= band and output.isfinite().all()):
                raise ValueError(
                    f"The ONNX graph's results differ from the model's: they are off by {error.item():.3g}, where "
                    f"rounding explains {band.item():.3g}; it is not shared."
                )


def _probes(model: Any) -> Iterator[Inputs]:
    """Yield random inputs to compare on; the last cache is longer than a layer looks back, if layers have a limit."""
    generator = torch.Generator().manual_seed(0)
    example = _cached_tensors(model(input_ids=torch.zeros(2, 1, dtype=torch.int64), use_cache=True)[CACHE_NAME])
    for count, cached in ((7, 0), (1, 7), (3, (model.config.sliding_window or 8) + 3)):
        ids = torch.randint(model.config.vocab_size, (2, count), generator=generator)
        mask = torch.ones(2, cached + count, dtype=torch.int64)
        mask[0, :2] = 0
        past = (torch.randn(2, like.shape[1], cached, like.shape[3], generator=generator) for like in example)
        yield _inputs(ids, mask, tuple(past))


def _run(model: Any, probe: Inputs) -> list[Tensor]:
    *tokens, past = probe
    return [output.double() for output in Step(model)(*tokens, tuple(tensor.to(model.dtype) for tensor in past))]


def _inputs(ids: Tensor, mask: Tensor, past: tuple[Tensor, ...]) -> Inputs:
    """Make inputs with positions counted from the first token that is no padding."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    return ids, mask, positions.contiguous(), past


def _cached_tensors(cache: Any) -> tuple[Tensor, ...]:
    """Return the keys and values of each layer in turn."""
    return tuple(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))


@dataclass(frozen=True)
class Exported:
    """A model that is shared.

    Attributes:
        name, model: the model, and its name on the card.
        tokenizer: its tokenizer, if it has one.
        auto_class: the class of transformers that loads it, such as "AutoModelForCausalLM".
        is_graph: whether it is shared as an ONNX graph, and not as a folder for transformers.
        license: the Hub's name of a licence, if it has one.
    """

    name: str
    model: Any
    tokenizer: Any
    auto_class: str
    is_graph: bool = False
    license: str | None = None

    @property
    def task(self) -> str | None:
        """The Hub's name of the model's task."""
        return TASKS.get(self.auto_class)

    @property
    def parameters(self) -> int:
        """How many weights the model has: the scales of eight-bit ones are none."""
        return sum(w.numel() for name, w in self.model.named_parameters() if not name.endswith("weight_scale"))


def export_card(folder: Path, results: list[Path]) -> Callable[[Exported], str]:
    """Return the writer of the card of the model in a folder: the laboratory's if it is installed, else the plain one.

    Args:
        folder: of the model.
        results: results files of the laboratory, which the card is to show.

    Raises:
        ValueError: results are named, and the laboratory is not installed, or they are not valid.
    """
    for entry in entry_points(group=CARDS):
        text: Callable[[Exported], str] = entry.load()(folder, results).text
        return text
    if results:
        raise ValueError("--results needs the package diff-transformer-lab, which reads results files.")
    return plain_card


def plain_card(exported: Exported) -> str:
    """Write a card that says how to load the model, repeats its configuration, and claims nothing else."""
    config = exported.model.config
    front = ModelCardData(
        license=exported.license,
        library_name="onnx" if exported.is_graph else "transformers",
        pipeline_tag=exported.task if exported.tokenizer is not None else None,
        tags=["diff-transformer", "arxiv:2410.05258", *(["onnx"] if exported.is_graph else [])],
    )
    method = getattr(getattr(config, "quantization_config", None), "quant_method", None)
    kind = "language model" if exported.task == "text-generation" else "Transformer"
    return f"""---
{front.to_yaml()}
---

# {exported.name}

A {kind} {config.spec.summary}

## Load it

{_loading(exported)}
## What it is

|  |  |
| --- | --- |
| attention | {config.attention_type} |
| parameters | {exported.parameters:,}{f", quantised: {method}" if method else ""} |
| layers | {config.num_hidden_layers} of width {config.hidden_size} |
| heads | {config.num_attention_heads} of width {config.head_dim} (as the Transformer counts them) |
| context | {config.max_position_embeddings:,} tokens |

How it was trained is not recorded, and nothing is claimed about how good it is.
"""


def _loading(exported: Exported) -> str:
    if exported.is_graph:
        return f"""```python
import onnxruntime

session = onnxruntime.InferenceSession("{exported.name}/model.onnx")
print([slot.name for slot in session.get_inputs()], [slot.name for slot in session.get_outputs()])
```
"""
    auto = exported.auto_class
    names = auto if exported.tokenizer is None else f"{auto}, AutoTokenizer"
    tokenizer = "" if exported.tokenizer is None else f'\ntokenizer = AutoTokenizer.from_pretrained("{exported.name}")'
    return f"""It needs the Python package diff-transformer, {__version__} or later: {INSTALL}.

```python
import diff_transformer  # which makes transformers know the model
from transformers import {names}

model = {auto}.from_pretrained("{exported.name}"){tokenizer}
```

Without that import, `trust_remote_code=True` loads it: the folder's two code files import the package.

"""
