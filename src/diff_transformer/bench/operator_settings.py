"""What `bench operator` measures, and what it takes where nothing was asked for."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from diff_transformer.bench.candidates import candidates
from diff_transformer.bench.problem import Shape
from diff_transformer.bench.records import BACKWARD, DECODE, FORWARD, TRAINING
from diff_transformer.bench.settings import check_choice, check_device, check_dtypes, check_sizes, with_defaults
from diff_transformer.bench.timing import check_rounds

PASSES = {"forward": FORWARD, "backward": BACKWARD, "forward+backward": TRAINING, "decode": DECODE}
ONE_HEAD_LENGTH = 2048
# What differs on a GPU. A constant number of tokens keeps it busy at short lengths.
CUDA = {
    "dtypes": ("bfloat16",),
    "tokens": 16384,
    "head_dims": (64, 128),
    "lengths": (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    "caches": (512, 2048, 8192, 32768, 65536),
    "passes": tuple(PASSES),
}


@dataclass(frozen=True, kw_only=True)
class OperatorSettings:
    """What to measure. The defaults are those of the CPU; `on` takes the device's.

    Args:
        batch: sequences at a time; `tokens`: or as many as have so many tokens together, at least one.
        heads: the twin's; two of them make a differential head.
        head_dims: widths of a query, one after the other.
        lengths: of a causal sequence. `caches`: keys that one query meets when decoding, for each of `decode_batches`.
        passes: of "forward", "backward", "forward+backward" and "decode".
        candidates: names besides the twin and "auto", which always run; None for all.
        memory_length: length at which peak memory is measured, 0 for none.

    Raises:
        ValueError: something that is not among what is allowed.
    """

    device: str = "cpu"
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    batch: int = 1
    tokens: int | None = None
    heads: int = 16
    head_dims: tuple[int, ...] = (64,)
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192)
    caches: tuple[int, ...] = (512, 2048, 8192)
    decode_batches: tuple[int, ...] = (1, 8)
    passes: tuple[str, ...] = ("forward", "forward+backward", "decode")
    candidates: tuple[str, ...] | None = None
    rounds: int | None = None
    one_head_length: int = ONE_HEAD_LENGTH
    memory_length: int = 16384

    @classmethod
    def on(cls, device: str, **given: Any) -> "OperatorSettings":
        """The device's defaults, but for what is given. A batch that is given holds at all lengths."""
        if "batch" in given:
            given = {"tokens": None, "decode_batches": (given["batch"],), **given}
        return cls(device=device, **with_defaults(device, CUDA, given))

    def __post_init__(self) -> None:
        check_device(self.device)
        check_dtypes(self.dtypes)
        check_rounds(self.rounds)
        check_choice("pass", self.passes, PASSES)
        check_choice("candidate", self.candidates or (), candidates(self.device))
        check_sizes(batch=self.batch, heads=self.heads, **({} if self.tokens is None else {"tokens": self.tokens}))
        check_sizes(head_dim=min(self.head_dims, default=1))
        for name in ("lengths", "caches", "decode_batches"):
            check_sizes(**{f"{name}: a value": min(getattr(self, name), default=1)})
        if self.heads % 2:
            raise ValueError(f"heads must be even, since two of the twin's make a differential head, got {self.heads}.")
        if self.memory_length < 0:
            raise ValueError(f"the length for the memory must be 1 or more, or 0 for none, got {self.memory_length}.")

    @property
    def causal(self) -> list[str]:
        """The passes that take a causal sequence."""
        return [name for name in self.passes if name != "decode"]

    @property
    def whole(self) -> list[str]:
        """Of these the ones that begin with the inputs alone, without what a forward pass left."""
        return [name for name in self.causal if name != "backward"]

    def cases(self) -> Iterator[tuple[Shape, list[str]]]:
        """Each shape, with the passes to run on it."""
        for width in self.head_dims:
            if self.causal:
                for length in self.lengths:
                    yield Shape(self._batch(length), self.heads, width, length, length), self.causal
            if "decode" in self.passes:
                for batch in self.decode_batches:
                    for length in self.caches:
                        yield Shape(batch, self.heads, width, 1, length), ["decode"]

    def memory_shapes(self) -> list[Shape]:
        """The shapes at which peak memory is measured."""
        length = self.memory_length
        return [Shape(self._batch(length), self.heads, width, length, length) for width in self.head_dims if length]

    def _batch(self, length: int) -> int:
        return self.batch if self.tokens is None else max(1, self.tokens // length)
