"""Finds out which optional dependencies of the package are missing, and says how to install them."""

from importlib.util import find_spec

from diff_transformer._version import CHECKOUT

# Extra → the packages it brings: the name to import → the name to install.
EXTRAS = {
    "onnx": {"onnx": "onnx", "onnxruntime": "onnxruntime", "onnxscript": "onnxscript"},
    "explore": {"starlette": "starlette", "uvicorn": "uvicorn", "anywidget": "anywidget"},
    "serve": {"jinja2": "jinja2", "pydantic": "pydantic", "starlette": "starlette", "uvicorn": "uvicorn"},
}


class MissingExtraError(ModuleNotFoundError):
    """A module is missing that a command's own extra brings; another extra may bring it too."""

    def __init__(self, name: str, extra: str) -> None:
        super().__init__(name=name)
        self.extra = extra


def require_extra(extra: str) -> None:
    """Raise MissingExtraError where a module of an extra is missing, before torch is imported."""
    for name in EXTRAS[extra]:
        if find_spec(name) is None:
            raise MissingExtraError(name, extra)


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """What to install where a package of an extra is missing; None if the module belongs to no extra."""
    name = (error.name or "").partition(".")[0]
    for extra, brings in EXTRAS.items():
        if name in brings and extra == getattr(error, "extra", extra):
            return f'This command needs {brings[name]}, which is not installed: pip install ".[{extra}]" {CHECKOUT}'
    return None
