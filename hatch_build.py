"""Compiles the CPU kernel into a wheel, for every processor of a family, where `make wheel` asks for it.

An ordinary build (`pip install .`) has no torch to compile for: its kernel is compiled on first use.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SRC = Path(__file__).parent / "src"

# In the order in which they are linked: of a function that several objects hold alike the linker keeps the first, which
# each processor must be able to run.
X86 = ("AVX2", "AVX512", "AVX512_BF16")


def compile_library(library: Path, *more: Path, namespace: str = "diff_transformer_cpu") -> str:
    """Compile the kernel for all instruction sets of a processor family, and link it.

    Args:
        library: the file to write.
        more: sources to be compiled with the registration.
        namespace: of the operators in torch.

    Returns:
        The family that the compiler (``CXX``, g++) is for, as Linux names it: of this machine, or of another.

    Raises:
        subprocess.CalledProcessError: where the compiler fails; it has said why.
    """
    sys.path.insert(0, str(SRC))
    import torch

    from diff_transformer.ops.cpu.cpu_build import SOURCES, compiler_flags

    compiler = os.environ.get("CXX", "g++")
    machine = subprocess.check_output([compiler, "-dumpmachine"], text=True).partition("-")[0]
    capabilities = X86 if machine == "x86_64" else ("DEFAULT",)
    includes = [f"-I{Path(torch.__file__).parent / 'include'}", f"-I{sysconfig.get_path('include')}"]
    common = ["-std=c++20", "-fPIC", f"-DTORCH_EXTENSION_NAME={namespace}", *includes]
    registration = "-DCPU_CAPABILITY=DEFAULT" if capabilities != X86 else "-DDIFF_TRANSFORMER_ALL_OF_X86"
    flags = ["-O3", "-ffp-contract=off", registration]
    sources = [path.name for path in sorted(SOURCES.glob("*.cpp")) if path.name != "register.cpp"]
    jobs = {f"{Path(source).name}.o": [str(source), *flags] for source in ("register.cpp", *more)}
    for capability in capabilities:
        for source in sources:
            jobs[f"{capability}.{source}.o"] = [source, *compiler_flags(capability)]
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = [[compiler, *common, "-c", *job, "-o", f"{work}/{name}"] for name, job in jobs.items()]
        for done in [pool.submit(subprocess.run, command, cwd=SOURCES, check=True) for command in commands]:
            done.result()
        objects = [f"{work}/{name}" for name in jobs]
        # torch is loaded before the library is: of it the name alone is stored, for any processor family.
        stub = f"{work}/libtorch_cpu.so"
        link = [compiler, "-shared", "-Wl,--no-as-needed"]
        subprocess.run([*link, "-Wl,-soname,libtorch_cpu.so", "-o", stub], check=True)
        subprocess.run([*link, *objects, stub, "-o", library], check=True)
    return machine


class CustomBuildHook(BuildHookInterface[Any]):
    """Puts the library into the wheel, and its platform into the wheel's name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        library = Path(self.root, "build", "diff_transformer_cpu.so")
        library.parent.mkdir(exist_ok=True)
        machine = compile_library(library)
        build_data["force_include"][str(library)] = f"diff_transformer/ops/cpu/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{machine}"
