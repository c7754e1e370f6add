"""Shows the attention maps of a model in a browser, where the reader moves λ (docs/explorer.md)."""

from diff_transformer.explorer.explored_model import ExploredModel
from diff_transformer.explorer.explorer import Example, Explorer, Side, Task
from diff_transformer.explorer.head_numbers import Answer
from diff_transformer.explorer.lambda_settings import LambdaSettings
from diff_transformer.explorer.notebook import explore
from diff_transformer.explorer.vocabulary import TokenizerVocabulary, Vocabulary, WordVocabulary

__all__ = [
    "Answer",
    "Example",
    "ExploredModel",
    "Explorer",
    "LambdaSettings",
    "Side",
    "Task",
    "TokenizerVocabulary",
    "Vocabulary",
    "WordVocabulary",
    "explore",
]
