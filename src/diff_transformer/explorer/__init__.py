"""Shows the attention maps of a model in a browser, with λ under the reader's hand (docs/explorer.md)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from diff_transformer._version import CHECKOUT
from diff_transformer.explorer.explored_model import (
    ExploredModel,
    LambdaSettings,
    TokenizerVocabulary,
    Vocabulary,
    WordVocabulary,
)
from diff_transformer.explorer.explorer import Example, Explorer, Side
from diff_transformer.explorer.images import image_explorer
from diff_transformer.explorer.trace import Answer

if TYPE_CHECKING:
    from diff_transformer.explorer.widget import ExplorerWidget

__all__ = [
    "Answer",
    "Example",
    "ExploredModel",
    "Explorer",
    "LambdaSettings",
    "Side",
    "TokenizerVocabulary",
    "Vocabulary",
    "WordVocabulary",
    "explore",
    "explore_images",
    "image_explorer",
]


def explore(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    compare: Any = None,
    compare_tokenizer: Any = None,
    answer: tuple[int, int, int] | None = None,
) -> "ExplorerWidget":
    """Show the attention maps of a model in a notebook (Jupyter, marimo), with λ under the reader's hand.

    Args:
        model: a DIFF or DIFF V2 model, or transformers' DiffLlama; also with adapters of PEFT's, or compiled. It is
            set to ``eval()`` and used, not copied: it must not be trained or moved while the widget computes.
        tokenizer: transformers' tokenizer, or for a model without one a list with the word of each token.
        text: the page's first text.
        compare: the model beside it, any causal language model of transformers; it is set to ``eval()``, too.
        compare_tokenizer: its tokenizer; that of ``model`` unless given.
        answer: the position of a question, and the first and the last + 1 of its answer, in tokens from 0: the page
            then shows the attention on the answer.

    Raises:
        ValueError: a model that subtracts nothing, or a text that it cannot read.
        ModuleNotFoundError: anywidget, of the extra ``explore``, is not installed.

    Examples:
        >>> explore(model, tokenizer, "Call me Ishmael.")  # doctest: +SKIP
    """
    widget = _widget()
    left = Side(ExploredModel(model, "model"), _vocabulary(tokenizer))
    if not left.model.subtracts:
        raise ValueError(
            f"{type(model).__name__} has ordinary attention here, which subtracts nothing; give it as compare."
        )
    tokens = left.vocabulary.encode(text)
    left.model.check_tokens(tokens)
    place = None if answer is None else dict(zip(("query", "begin", "end"), answer, strict=True))
    examples = [Example("The first text", text, Answer.read(place, len(tokens)))]
    right = None
    if compare is not None:
        right = Side(ExploredModel(compare, "compared"), _vocabulary(compare_tokenizer or tokenizer))
    return widget(Explorer(left, right, examples))


def explore_images(
    model: nn.Module,
    images: Tensor,
    classes: Sequence[str] = (),
    *,
    compare: nn.Module | None = None,
    grid: tuple[int, int] | None = None,
) -> "ExplorerWidget":
    """Show the attention maps of a vision Transformer in a notebook, over the patches, with λ under the reader's hand.

    The arguments and errors are those of :func:`image_explorer`. Without a notebook, ``explorer.page.recorded_page``
    makes a page of what it returns.

    Examples:
        >>> explore_images(from_timm(model), images)  # doctest: +SKIP
    """
    return _widget()(image_explorer(model, images, classes, compare=compare, grid=grid))


def _widget() -> "type[ExplorerWidget]":
    try:
        from diff_transformer.explorer.widget import ExplorerWidget
    except ModuleNotFoundError as error:
        message = f'explore needs {error.name}, which is not installed: pip install ".[explore]" {CHECKOUT}'
        raise ModuleNotFoundError(message, name=error.name) from None
    return ExplorerWidget


def _vocabulary(tokenizer: Any) -> Vocabulary:
    is_words = isinstance(tokenizer, Sequence) and all(isinstance(word, str) for word in tokenizer)
    return WordVocabulary(tokenizer) if is_words else TokenizerVocabulary(tokenizer)
