"""Makes ``import diff_transformer`` enough for transformers' Auto classes, without importing transformers for it."""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _LoadThenRegister(Loader):
    def __init__(self, loader: Loader, finder: "_RegisterOnImport") -> None:
        self.loader, self.finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self.finder)
        self.loader.exec_module(module)
        try:
            importlib.import_module("diff_transformer.model")
        except ImportError as error:
            # The importer wanted transformers, perhaps without any use for this model: that must not fail for it.
            warnings.warn(
                f"transformers {getattr(module, '__version__', '')} does not suit diff_transformer, so its models are "
                f"not registered: {error}",
                stacklevel=2,
            )


class _RegisterOnImport(MetaPathFinder):
    """Waits for the first import of transformers, registers the model after it, and is gone.

    Looking transformers up without importing it, as checks for optional packages do, leaves it waiting.
    """

    looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "transformers" or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _LoadThenRegister(spec.loader, self)
        return spec


def register_with_transformers() -> None:
    """Register the model's Auto classes now if transformers is imported already, else as soon as it is."""
    if sys.modules.get("transformers") is not None:
        importlib.import_module("diff_transformer.model")
    else:
        sys.meta_path.insert(0, _RegisterOnImport())
