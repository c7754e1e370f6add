"""Writes the CPU kernel and those of Triton as packages for the Hub's library `kernels`: sources, and what is built.

    python hub/write_kernel.py build/hub-kernel

The folders `cpu` and `triton` there have a `build.toml`, by which kernel-builder builds them anywhere, and `build`,
from which ``kernels.get_local_kernel`` loads them. Nothing is published.
"""

import hashlib
import json
import platform
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from hatch_build import X86, compile_library  # noqa: E402

from diff_transformer.ops.attention_request import REQUEST_SCHEMA  # noqa: E402
from diff_transformer.ops.cpu.cpu_build import SOURCES, compiler_flags  # noqa: E402

NAME, TRITON_NAME = "diff_transformer_cpu", "diff_transformer_triton"
GENERAL = """\
[general]
edition = 5
name = "{name}"
version = 1
license = "MIT"
backends = ["{backend}"]
"""
STABLE = """
[torch]
stable-abi = "2.10"
include = ["csrc"]
"""
OPERATORS = """\
import torch

ops = torch.ops.{id}


def add_op_namespace_prefix(name: str) -> str:
    return f"{id}::{{name}}"
"""
OPS = SOURCES.parents[1]
# What the kernels in Triton need, of the library's files in `ops`.
TRITON_FILES = (
    "attention_request.py",
    *(f"triton/{name}.py" for name in ("backward", "forward", "kernel_arguments", "launch", "tiles", "triton_backend")),
    "triton/measured_blocks.json",
)


def general(name: str, backend: str) -> str:
    return GENERAL.format(name=name.replace("_", "-"), backend=backend)


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
    shutil.copy(ROOT / "hub" / "package.py", package / "__init__.py")
    text = (ROOT / "hub" / "by_cpp.py").read_text(encoding="utf-8").replace("REQUEST_SCHEMA", REQUEST_SCHEMA)
    (package / "backend.py").write_text(text, encoding="utf-8")
    headers = [f"csrc/{path.name}" for path in sorted(csrc.glob("*.h"))]
    kernels = [path for path in sorted(csrc.glob("*.cpp")) if path.name != "register.cpp"]
    sources = [*headers, "csrc/register.cpp", "torch-ext/module.cpp"]
    build = f"{general(NAME, 'cpu')}{STABLE}src = {json.dumps(sources)}\n"
    build += 'cxx-flags = ["-O3", "-DDIFF_TRANSFORMER_ALL_OF_X86"]\n'
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
    variant, name = copy_package(folder, NAME, f"torch-stable-abi210-cpu-{platform.machine()}-linux", "cpu")
    with open(variant / "_ops.py", "a", encoding="utf-8") as file:
        file.write(f"\n\nfrom . import {name}\n")
    compile_library(variant / f"{name}.abi3.so", folder / "torch-ext" / "module.cpp", namespace=name)
    return variant


def copy_package(folder: Path, name: str, variant_name: str, backend: str) -> tuple[Path, str]:
    """Copy the package to where it is built, beside what kernel-builder adds; returns that folder and a unique name."""
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(path.read_bytes())
    unique, variant = f"_{name}_{digest.hexdigest()}", folder / "build" / variant_name
    shutil.copytree(folder / "torch-ext" / name, variant)
    (variant / "_ops.py").write_text(OPERATORS.format(id=unique), encoding="utf-8")
    metadata = {"id": unique, "name": name.replace("_", "-"), "version": 1, "license": "MIT", "python-depends": []}
    (variant / "metadata.json").write_text(json.dumps(metadata | {"backend": {"type": backend}}), encoding="utf-8")
    return variant, unique


def write_triton(folder: Path) -> Path:
    """Write the library's kernels in Triton as a package that imports nothing of the library; returns the variant.

    Its operators have a namespace of their own, so that it can be loaded beside the library.
    """
    package = folder / "torch-ext" / TRITON_NAME
    package.mkdir(parents=True)
    for name in TRITON_FILES:
        text = (OPS / name).read_text(encoding="utf-8")
        text = re.sub(r"from diff_transformer\.ops\.(?:triton\.)?(\w+) import", r"from .\1 import", text)
        text, count = re.subn(r'"diff_transformer::(\w+)"', r'add_op_namespace_prefix("\1")', text)
        if count:
            text = text.replace("import torch\n", "import torch\n\nfrom ._ops import add_op_namespace_prefix\n", 1)
        (package / Path(name).name).write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "hub" / "package.py", package / "__init__.py")
    shutil.copy(ROOT / "hub" / "by_triton.py", package / "backend.py")
    noarch = '\n[torch-noarch]\npyext = ["py", "json"]\n'
    (folder / "build.toml").write_text(general(TRITON_NAME, "cuda") + noarch, encoding="utf-8")
    return copy_package(folder, TRITON_NAME, "torch-cuda", "cuda")[0]


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    print(write_triton(folder / "triton"))
    write_sources(folder / "cpu")
    print(write_variant(folder / "cpu"))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
