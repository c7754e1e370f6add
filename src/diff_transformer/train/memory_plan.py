"""How much memory a training step takes on each device, moment by moment, and where it is most."""

from dataclasses import dataclass, fields

import torch
from torch import nn

from diff_transformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.train.distributed import Kind
from diff_transformer.train.recipe_schema import TrainRecipe
from diff_transformer.train.step import build_optimizers
from diff_transformer.train.step_costs import FLOAT, ends_bytes, layer_backward_bytes, layer_bytes, loss_bytes

ADAMW, MUON = 8, 4  # bytes of an optimizer's state for each parameter: two moments, or one


@dataclass(frozen=True)
class Memory:
    """What a device holds at one moment, in bytes.

    Attributes:
        weights: its float32 weights, and copies in half precision that stay from forward to backward.
        gradients: of the weights.
        optimizer: the optimizer's state.
        activations: what autograd keeps for the backward pass.
        workspace: what is there for a moment: the loss, a layer computed again, gathered weights.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Sizes:
    """Parameters of a model, counted by building it on the meta device, where nothing takes memory.

    Attributes:
        layer: of one decoder layer; layer_linear: of them, those of matrix products.
        ends: embedding, output head and last norm; head: the output head alone, also where it is the embedding.
        largest: of the largest tensor; largest_of_layer: of the largest in a layer.
        layers: how many layers there are.
        state: bytes of the optimizer's state.
    """

    layer: int
    layer_linear: int
    ends: int
    head: int
    largest: int
    largest_of_layer: int
    layers: int
    state: int

    @property
    def total(self) -> int:
        """All parameters; tied ones count once."""
        return self.layers * self.layer + self.ends


def meta_model(config: DiffTransformerConfig) -> DiffTransformerForCausalLM:
    """The model without numbers."""
    with torch.device("meta"):
        return DiffTransformerForCausalLM(config)


def sizes_of(model: DiffTransformerForCausalLM, recipe: TrainRecipe) -> Sizes:
    """The sizes of a model, which may be on the meta device, and of the optimizers of a recipe for it."""
    total = sum(parameter.numel() for parameter in model.parameters())
    layer = model.model.layers[0]
    of_layer = sum(parameter.numel() for parameter in layer.parameters())
    state = 0
    for optimizer in build_optimizers(model, recipe):
        each = MUON if isinstance(optimizer, torch.optim.Muon) else ADAMW
        state += each * sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return Sizes(
        layer=of_layer,
        layer_linear=sum(module.weight.numel() for module in layer.modules() if isinstance(module, nn.Linear)),
        ends=total - len(model.model.layers) * of_layer,
        head=model.lm_head.weight.numel(),
        largest=max(parameter.numel() for parameter in model.parameters()),
        largest_of_layer=max(parameter.numel() for parameter in layer.parameters()),
        layers=len(model.model.layers),
        state=state,
    )


@dataclass(frozen=True)
class Situation:
    """Where and how a step runs.

    Attributes:
        kind: what several devices do together, or "single".
        devices: how many there are.
        sequences, length: what goes through the model at a time on one device.
        parts: how many such parts make a step (accumulation).
        half: whether autocast computes in half precision.
        checkpointing: whether a layer is computed again in the backward pass.
        backend: what computes attention, see :func:`diff_transformer.train.step_costs.layer_bytes`.
        on_cpu: whether the device is a CPU, whose optimizers make tensors of their own; a GPU's run in one kernel.
    """

    kind: Kind
    devices: int
    sequences: int
    length: int
    parts: int
    half: bool
    checkpointing: bool
    backend: str
    on_cpu: bool


def peak_memory(config: DiffTransformerConfig, sizes: Sizes, situation: Situation) -> Memory:
    """The moment of a training step, of those in which most is held, in which a device holds most of all."""
    return max(_moments(config, sizes, situation), key=lambda moment: moment.total)


def _moments(config: DiffTransformerConfig, sizes: Sizes, s: Situation) -> list[Memory]:
    tokens = s.sequences * s.length
    ranks = s.devices if s.kind == "tensor" else 1
    weights, gathered = _weights(sizes, s)
    layer_gradient, head_gradient, kept_gradients = _gradients(sizes, s)
    state = sizes.state * _share(sizes, s)
    whole_layer = tokens * layer_bytes(config, s.backend, s.half, ranks)
    kept_layer = tokens * config.hidden_size * FLOAT if s.checkpointing else whole_layer
    ends = tokens * ends_bytes(config)

    def moment(gradients: float, activations: float, workspace: float) -> Memory:
        return Memory(weights, kept_gradients + gradients, state, activations, workspace)

    in_layer = tokens * layer_backward_bytes(config, s.half, ranks) + sizes.largest_of_layer * FLOAT / ranks
    in_layer += gathered + whole_layer - kept_layer  # what checkpointing computes again
    moments = [moment(0, sizes.layers * kept_layer + ends, loss_bytes(config, tokens, s.half, s.on_cpu))]
    # The backward pass goes through the layers from the last to the first: gradients come, activations go.
    for done in range(sizes.layers):
        gradients = head_gradient + done * layer_gradient
        moments.append(moment(gradients, (sizes.layers - done) * kept_layer, in_layer))
    all_gradients = kept_gradients + sizes.layers * layer_gradient + head_gradient
    if s.kind == "fsdp":  # by then a device has nothing but its share
        weights = all_gradients = sizes.total * FLOAT * _share(sizes, s)
    step = 2 * sizes.largest * FLOAT if s.on_cpu else 0
    moments.append(Memory(weights, all_gradients, state, 0, step))
    return moments


def _share(sizes: Sizes, s: Situation) -> float:
    """Which part of all parameters a device has."""
    if s.kind == "fsdp":
        return 1 / s.devices
    if s.kind == "tensor":
        return (sizes.layers * sizes.layer / s.devices + sizes.ends) / sizes.total
    return 1.0


def _weights(sizes: Sizes, s: Situation) -> tuple[float, float]:
    """Bytes of weights that stay, and of weights that are gathered for a moment.

    With FSDP2 the ends stay gathered in float32 from forward to backward, and of the layers there are two (the next
    one is on its way) and the buffer they come in, in the products' dtype; the gradient of one, and its sum in float32
    on its way out. Otherwise autocast keeps a half-precision copy of every matrix in the layers.
    """
    weights = sizes.total * FLOAT * _share(sizes, s)
    size = 2 if s.half else FLOAT
    if s.kind == "fsdp":
        return weights + sizes.ends * FLOAT, sizes.layer * (3 * size + size + FLOAT)
    if s.half:
        weights += 2 * sizes.layers * sizes.layer_linear / (s.devices if s.kind == "tensor" else 1)
    return weights, 0.0


def _gradients(sizes: Sizes, s: Situation) -> tuple[float, float, float]:
    """Bytes of gradients: that a layer adds, that the ends add, and that are there from the parts before.

    DDP's gradients lie in the buckets that it sends, which are always there. With FSDP2 a device keeps its share, but
    of the output head all until the backward pass is through; the embedding's comes when the layers have gone.
    """
    share = _share(sizes, s)
    if s.kind == "fsdp":
        kept = sizes.total * FLOAT * share if s.parts > 1 else 0.0
        return 0.0 if kept else sizes.layer * FLOAT * share, sizes.head * FLOAT, kept
    if s.parts > 1 or s.kind == "ddp":
        return 0.0, 0.0, sizes.total * FLOAT * share
    ranks = s.devices if s.kind == "tensor" else 1
    return sizes.layer * FLOAT / ranks, sizes.ends * FLOAT, 0.0
