"""Makes ``import diff_transformer`` enough for transformers' Auto classes and for PEFT, without importing either."""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


class _AfterImport(MetaPathFinder, Loader):
    """Waits for the first import of a module, does something with it afterwards, and is gone.

    Looking the module up without importing it, as checks for optional packages do, leaves it waiting.
    """

    def __init__(self, name: str, action: Action) -> None:
        self.name, self.action, self.looking = name, action, False
        self.loader: Loader | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.looking = False
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        assert self.loader is not None  # find_spec
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert self.loader is not None
        sys.meta_path.remove(self)
        self.loader.exec_module(module)
        self.action(module)


def _after_import(name: str, action: Action) -> None:
    """Do something with a module: now if it is imported already, else as soon as it is."""
    if (module := sys.modules.get(name)) is not None:
        action(module)
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


def _register_models(transformers: ModuleType) -> None:
    try:
        importlib.import_module("diff_transformer.model")
    except ImportError as error:
        # The importer wanted transformers, perhaps without any use for this model: that must not fail for it.
        warnings.warn(
            f"transformers {getattr(transformers, '__version__', '')} does not suit diff_transformer, so its models "
            f"are not registered: {error}",
            stacklevel=2,
        )


def _name_layers(constants: ModuleType) -> None:
    """Enter the model into PEFT's tables of the layers that each method adapts, if they have Llama's names."""
    for name, table in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict) and "llama" in table:
            table.setdefault("diff_transformer", table["llama"])


def register_with_other_packages() -> None:
    """Register the model with transformers and PEFT, with each now or as soon as it is imported."""
    _after_import("transformers", _register_models)
    _after_import("peft.utils.constants", _name_layers)
