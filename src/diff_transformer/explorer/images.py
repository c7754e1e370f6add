"""Shows vision Transformers in the explorer: an image is a text whose tokens are its patches."""

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diff_transformer.explorer.explored_model import LEARNED, ExploredModel, LambdaSettings, WordVocabulary
from diff_transformer.explorer.explorer import Example, Explorer, Side
from diff_transformer.explorer.trace import Trace
from diff_transformer.utils.suggestions import quoted


class ImageModel(ExploredModel):
    """A classifier of images of which the explorer shows the maps.

    Args:
        model: any module that maps images (B, C, H, W) to logits (B, classes) by attention of this package, of one
            type and without mask, causality or context: a model from :func:`diff_transformer.convert.from_timm`, or one
            of your own. It is set to ``eval()``. Of a compiled one the model inside runs.
        name: its name on the page.
        images: (B, C, H, W), of which a run takes one.
        grid: rows and columns of patches; timm's, or the largest square that the tokens hold, unless given. Other
            tokens, such as a class token or registers, come before the patches.

    Raises:
        ValueError: a model without such attention, images of another shape, or a grid with more patches than tokens.
    """

    grid: tuple[int, int]
    is_causal = False

    def __init__(self, model: nn.Module, name: str, images: Tensor, grid: tuple[int, int] | None = None) -> None:
        self.model, self.name, self.images = getattr(model, "_orig_mod", model).eval(), name, images  # not the compiled
        self._read_layers()
        if images.dim() != 4 or not len(images):
            raise ValueError(f"images must be (B, C, H, W) with B of 1 or more, got {tuple(images.shape)}.")
        logits, maps = self._run(self.model, LEARNED, images[:1])
        if not isinstance(logits, Tensor) or logits.dim() != 2:
            raise ValueError(f"{name} must return logits (B, classes), got {getattr(logits, 'shape', type(logits))}.")
        shapes = {tuple(states.shape[:2]) for states in maps.held}
        if len(shapes) > 1 or min(shapes)[0] != 1:
            raise ValueError(f"{name} must give each layer all tokens of an image, (1, N, D), got {sorted(shapes)}.")
        _, self.most_tokens = shapes.pop()
        side = math.isqrt(self.most_tokens)
        known = grid or getattr(getattr(model, "patch_embed", None), "grid_size", None)
        if known is None and images.shape[2] != images.shape[3]:
            raise ValueError(f"grid must be given for images that are not square, got {tuple(images.shape[2:])}.")
        self.grid = tuple(known or (side, side))
        if len(self.grid) != 2 or min(self.grid) < 1 or math.prod(self.grid) > self.most_tokens:
            most = f"at most the {self.most_tokens} tokens of {name}"
            raise ValueError(f"grid must be rows and columns, 1 or more of each, with {most}, got {grid}.")

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Refuse all but the patches of one image, as :class:`PatchVocabulary` numbers them."""
        of_images = ([*self.tokens_of(image)] for image in range(len(self.images)))
        if any(type(token) is not int for token in tokens) or [*tokens] not in of_images:
            raise ValueError(f"The tokens must be those of one of {len(self.images)} images, got {quoted(tokens, 40)}.")

    def tokens_of(self, image: int) -> range:
        """Return the numbers of the tokens of an image."""
        return range(image * self.most_tokens, (image + 1) * self.most_tokens)

    def trace(self, tokens: Sequence[int], settings: LambdaSettings = LEARNED) -> Trace:
        """Run the model over an image with the λ of the settings. No other thread may use the model meanwhile."""
        self.check(tokens, settings)
        image = tokens[0] // self.most_tokens
        logits, maps = self._run(self.model, settings, self.images[image : image + 1])
        known = logits[0].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1).cpu()
        return Trace(tuple(tokens), known, torch.empty(0), maps)

    def _layer_inputs(
        self, hidden_states: Tensor, position_embeddings: Any = None, *others: Any, **named: Any
    ) -> tuple[Tensor, Any]:
        if any(value is not None and value is not False for value in (*others, *named.values())):
            raise ValueError(
                f"{self.name} calls its attention with more than hidden_states and position_embeddings; the explorer "
                "shows images without mask, causality, context or cache."
            )
        return hidden_states.clone(), position_embeddings  # as the caller may add to it in place


class PatchVocabulary(WordVocabulary):
    """Names of a model's images, patches and classes. A text is the title of an image."""

    between = ""

    def __init__(self, model: ImageModel, classes: Sequence[str]) -> None:
        rows, columns = model.grid
        patches = [f"{row},{column}" for row in range(1, rows + 1) for column in range(1, columns + 1)]
        others = model.most_tokens - len(patches)
        super().__init__([*(f"extra {number}" for number in range(1, others + 1)), *patches])
        self.model, self.classes = model, tuple(map(str, classes))
        self.titles = [f"Image {number}" for number in range(1, len(model.images) + 1)]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of the image with a title. Raises ValueError, with a sentence, if there is none."""
        if text not in self.titles:
            raise ValueError(f"There are images {self.titles[0]!r} … {self.titles[-1]!r}, got {quoted(text, 40)}.")
        return [*self.model.tokens_of(self.titles.index(text))]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the row and column of each patch, counted from 1."""
        return [self.words[token % len(self.words)] for token in tokens]

    def piece_after(self, tokens: Sequence[int], token: int) -> str:
        """Return the name of a class."""
        return self.classes[token] if token < len(self.classes) else f"class {token}"


def image_explorer(
    model: nn.Module,
    images: Tensor,
    classes: Sequence[str] = (),
    *,
    compare: nn.Module | None = None,
    grid: tuple[int, int] | None = None,
) -> Explorer:
    """Make an explorer of one or two classifiers of images.

    Args:
        model, images, grid: of :class:`ImageModel`; the model must be differential.
        classes: the name of each class; its number unless given.
        compare: the model beside it.

    Returns:
        An explorer, whose `run` answers for the text "Image 1" and so on, and for which
        ``diff_transformer.explorer.page.recorded_page`` makes a page in one file.

    Raises:
        ValueError: as :class:`ImageModel`, or a model that subtracts nothing.

    Examples:
        >>> rows = torch.nn.Flatten(1, 2), DiffAttention(8, 2, 1), torch.nn.Flatten()  # each row of an image is a patch
        >>> explorer = image_explorer(torch.nn.Sequential(*rows), torch.rand(3, 1, 4, 8), grid=(4, 1))
        >>> len(explorer.run({"text": "Image 3", "picture": 4})["heads"]["rollout"])
        4
    """
    left = ImageModel(model, "model", images, grid)
    right = None if compare is None else ImageModel(compare, "compared", images, grid)
    if not left.subtracts:
        raise ValueError("model has ordinary attention, which subtracts nothing; give it as compare.")
    names = PatchVocabulary(left, classes)
    examples = [Example(title, title, None, _png(image)) for title, image in zip(names.titles, images, strict=True)]
    if right is not None and (right.most_tokens, right.grid) != (left.most_tokens, left.grid):
        raise ValueError(f"compare must have the model's {left.most_tokens} tokens, got {right.most_tokens}.")
    beside = None if right is None else Side(right, PatchVocabulary(right, classes))
    return Explorer(Side(left, names), beside, examples)


def _png(image: Tensor) -> str:
    """Return an image (C, H, W), its smallest number black and its largest white, as a PNG in a data URL."""
    levels = image.detach().float().cpu()
    low, high = levels.aminmax()
    levels = (255 * (levels - low) / (high - low).clamp(min=1e-12)).round().to(torch.uint8)
    pixels = (levels if len(levels) == 3 else levels[:1].expand(3, -1, -1)).permute(1, 2, 0)
    rows = b"".join(b"\0" + row.numpy().tobytes() for row in pixels.contiguous())
    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()
