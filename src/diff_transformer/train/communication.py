"""What the GPUs of a run send each other in a step, and how much of their peak that leaves to the computation."""

from dataclasses import dataclass

from diff_transformer.model import DiffTransformerConfig
from diff_transformer.model.parallel_plan import tensor_parallel_plan
from diff_transformer.train.hardware import NODE
from diff_transformer.train.memory_plan import Situation, Sizes
from diff_transformer.train.step_costs import FLOAT


@dataclass(frozen=True)
class Communication:
    """What a GPU receives in a step, by the fastest route that there is.

    A group of G GPUs in M nodes receives a gathered tensor of S bytes as S·(G − 1)/G on each GPU. Into a node the
    other nodes' part, S·(M − 1)/M, comes once, shared out over the network cards of its GPUs, and is passed on inside
    the node; NCCL's rings and trees, which leave a node through every card, come close to that. A reduce-scatter is
    the reverse, and an all-reduce is both; switches that add up on the way can save half of the latter.

    Attributes:
        received: bytes that a GPU receives.
        through_network: of them, the bytes that come through its network card.
        overlap: the share of the step's computation that can run meanwhile; 0 where the next operation waits for them.
        link: bytes/s that a GPU can receive from others of its node, or None where that is not known.
        network: bytes/s of a GPU's network card, or None where that is not known.
    """

    received: float
    through_network: float
    overlap: float
    link: float | None
    network: float | None

    @property
    def seconds(self) -> float | None:
        """The least time it takes, both ways in use at once; None where the bandwidth is not known."""
        times = []
        for size, bandwidth in (
            (self.received - self.through_network, self.link),
            (self.through_network, self.network),
        ):
            if size and bandwidth is None:
                return None
            times.append(size / bandwidth if bandwidth else 0.0)
        return max(times)

    def best(self, utilisation: float, computation: float) -> float:
        """The share of the peak that can be reached at best; `utilisation` where the bandwidth is not known.

        Args:
            utilisation: the share that the computation alone would reach.
            computation: seconds a step of it.
        """
        if self.seconds is None:
            return utilisation
        return utilisation * computation / (computation + max(0.0, self.seconds - self.overlap * computation))


def communication(
    config: DiffTransformerConfig, sizes: Sizes, s: Situation, link: float | None, network: float | None
) -> Communication | None:
    """What each GPU receives in a step; None for a GPU alone. Single numbers, as the loss, are left out.

    DDP adds up the float32 gradients once a step, while the last part's backward pass runs. FSDP2 does, for each part
    of the batch, what :func:`diff_transformer.train.distributed.shard` sets up: a layer's weights are gathered for the
    forward and again for the backward pass, those of the ends once, and float32 gradients are scattered; the next layer
    is on its way while one computes. Tensor parallelism adds up the layers' outputs and the gradients of their inputs,
    and gathers the logits, which the loss computes again in its backward pass; the next product waits for each.

    Args:
        config: the model's.
        sizes: the model's.
        s: where and how a step runs.
        link, network: as in :class:`Communication`.
    """
    gathered, overlap = 0.0, 1.0  # bytes of the tensors that are gathered or scattered once
    half = 2 if s.half else FLOAT
    if s.kind == "single":
        return None
    if s.kind == "ddp":
        gathered = 2 * FLOAT * sizes.total
        backward = 3 / 4 if s.checkpointing else 2 / 3  # of the computation; with checkpointing it repeats the forward
        overlap = backward / s.parts
    elif s.kind == "fsdp":
        gathered = s.parts * (sizes.layers * sizes.layer * (2 * half + FLOAT) + sizes.ends * 2 * FLOAT)
    else:
        gathered, overlap = s.parts * s.sequences * s.length * _of_a_token(config, s.checkpointing, half), 0.0
    nodes = -(-s.devices // NODE)
    received = gathered * (s.devices - 1) / s.devices
    through_network = gathered * (nodes - 1) / nodes / (s.devices / nodes)
    return Communication(received, through_network, overlap, link, network)


def _of_a_token(config: DiffTransformerConfig, checkpointing: bool, half: int) -> float:
    """Bytes for each token that tensor parallelism gathers or scatters."""
    styles = list(tensor_parallel_plan(config.attention_type, config.has_headwise_norm).values())
    outputs, inputs = styles.count("rowwise"), styles.count("colwise")
    outputs += (outputs - 1) * checkpointing  # computed again, but for the last, which no gradient needs
    reduced = config.num_hidden_layers * (outputs * half + inputs * FLOAT)
    reduced += 2 * FLOAT  # the embedding, and the gradient of the head's input
    return 2 * config.hidden_size * reduced + 2 * config.vocab_size * half
