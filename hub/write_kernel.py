"""Writes the CPU kernel as a package for the Hub's library `kernels`: its sources, and what is built of them.

    python hub/write_kernel.py build/hub-kernel

The folder has `build.toml`, by which kernel-builder builds it anywhere, and `build`, from which
``kernels.get_local_kernel`` loads it. Nothing is published.
"""

import hashlib
import json
import platform
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from hatch_build import X86, compile_library  # noqa: E402

from diff_transformer.ops.attention_request import REQUEST_SCHEMA  # noqa: E402
from diff_transformer.ops.cpu.cpu_build import SOURCES, compiler_flags  # noqa: E402

NAME = "diff_transformer_cpu"
GENERAL = f"""\
[general]
edition = 5
name = "{NAME.replace("_", "-")}"
version = 1
license = "MIT"
backends = ["cpu"]

[torch]
stable-abi = "2.10"
include = ["csrc"]
"""
OPERATORS = """\
import torch

from . import {id}

ops = torch.ops.{id}


def add_op_namespace_prefix(name: str) -> str:
    return f"{id}::{{name}}"
"""


def section(name: str, sources: list[str], flags: tuple[str, ...]) -> str:
    """One instruction set of build.toml."""
    settings = {"backend": "cpu", "depends": ["torch"], "include": ["csrc"], "src": sources, "cxx-flags": list(flags)}
    return f"\n[kernel.{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


def write_sources(folder: Path) -> None:
    """Write the project of kernel-builder.

    A file has one set of flags there: each instruction set gets copies of its own.
    """
    csrc, package = folder / "csrc", folder / "torch-ext" / NAME
    shutil.copytree(SOURCES, csrc)
    package.mkdir(parents=True)
    shutil.copy(ROOT / "hub" / "module.cpp", folder / "torch-ext")
    text = (ROOT / "hub" / "package.py").read_text(encoding="utf-8").replace("REQUEST_SCHEMA", REQUEST_SCHEMA)
    (package / "__init__.py").write_text(text, encoding="utf-8")
    headers = [f"csrc/{path.name}" for path in sorted(csrc.glob("*.h"))]
    kernels = [path for path in sorted(csrc.glob("*.cpp")) if path.name != "register.cpp"]
    sources = [*headers, "csrc/register.cpp", "torch-ext/module.cpp"]
    build = f'{GENERAL}src = {json.dumps(sources)}\ncxx-flags = ["-O3", "-DDIFF_TRANSFORMER_ALL_OF_X86"]\n'
    for capability in X86:
        own = csrc / capability.lower()
        own.mkdir()
        copies = [Path(shutil.copy(kernel, own)).relative_to(folder).as_posix() for kernel in kernels]
        build += section(own.name, copies + headers, compiler_flags(capability))
    for kernel in kernels:
        kernel.unlink()
    (folder / "build.toml").write_text(build, encoding="utf-8")


def write_variant(folder: Path) -> Path:
    """Compile the sources for Linux on x86, for every torch from 2.10 on; returns the folder of the variant."""
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(path.read_bytes())
    name = f"_{NAME}_{digest.hexdigest()}"
    variant = folder / "build" / f"torch-stable-abi210-cpu-{platform.machine()}-linux"
    shutil.copytree(folder / "torch-ext" / NAME, variant)
    (variant / "_ops.py").write_text(OPERATORS.format(id=name), encoding="utf-8")
    metadata = {"id": name, "name": NAME.replace("_", "-"), "version": 1, "license": "MIT", "python-depends": []}
    (variant / "metadata.json").write_text(json.dumps(metadata | {"backend": {"type": "cpu"}}), encoding="utf-8")
    compile_library(variant / f"{name}.abi3.so", folder / "torch-ext" / "module.cpp", namespace=name)
    return variant


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    write_sources(folder)
    print(write_variant(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
