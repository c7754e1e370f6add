"""What hatchling puts into wheels and source distributions, and what these do in an environment of their own."""

import functools
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from budget import skip_unless_it_takes
from diff_transformer import diff_attention
from diff_transformer._version import __version__
from diff_transformer.ops.cpu import cpu_build

sdist = pytest.importorskip("hatchling.builders.sdist")
wheel = pytest.importorskip("hatchling.builders.wheel")

ROOT = Path(__file__).resolve().parents[1]


def included(builder: type, root: Path) -> set[str]:
    return {file.distribution_path for file in builder(str(root)).recurse_included_files()}


@pytest.mark.parametrize(
    ("builder", "root", "package"),
    [
        (wheel.WheelBuilder, ROOT, "diff_transformer"),
        (wheel.WheelBuilder, ROOT / "lab", "diff_lab"),
        (sdist.SdistBuilder, ROOT, "src/diff_transformer"),
    ],
)
def test_a_distribution_has_all_that_its_package_reads(builder: type, root: Path, package: str) -> None:
    """With the trained models, whatever .gitignore leaves out."""
    paths, folder = included(builder, root), root / "src" / Path(package).name
    read = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert {f"{package}/{path}" for path in read if "__pycache__" not in path} <= paths
    assert package.startswith("src/") or {path.partition("/")[0] for path in paths} == {package}


def test_recipes_are_in_the_wheel_and_all_sources_in_the_source_distribution() -> None:
    recipes = {f"diff_lab/recipes/{file.name}" for file in (ROOT / "lab" / "recipes").iterdir()}
    assert recipes
    assert recipes <= included(wheel.WheelBuilder, ROOT / "lab")
    sources = included(sdist.SdistBuilder, ROOT)
    assert {"web/build.mjs", "web/src/main.js", "lab/pyproject.toml", "lab/tests/small_runs.py"} <= sources
    assert not [path for path in sources if "node_modules" in path]


def test_both_distributions_have_one_version() -> None:
    text = (ROOT / "lab" / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{__version__}"\n' in text
    assert f'"diff-transformer=={__version__}"' in text


class FreshEnvironment:
    """An environment with the packages of this one, but for ours: of ours it has the wheels that are installed."""

    def __init__(self, folder: Path, *wheels: Path) -> None:
        venv.create(folder / "venv", with_pip=False)
        self.programs = folder / "venv" / "bin"
        packages = folder / "venv" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        others = folder / "others"
        others.mkdir()
        installed = [Path(path) for path in sys.path if path.endswith("site-packages")]
        for path in (path for folder in installed for path in folder.iterdir()):
            if not path.name.startswith(("diff_transformer", "diff_lab", "_editable", "__pycache__")):
                (others / path.name).symlink_to(path)
        (packages / "others.pth").write_text(str(others), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "--python", str(self.programs / "python"), "install", "--quiet"]
        subprocess.run([*command, "--no-deps", "--no-index", *map(str, wheels)], check=True)
        self.folder = folder

    def run(self, *command: str) -> str:
        """Run a program of the environment outside of the checkout; returns its stdout."""
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(self.programs / command[0]), *command[1:]],
            cwd=self.folder,
            env=variables,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout


IMPORT_ALL = """
import importlib, pkgutil, sys
import {package}
names = [module.name for module in pkgutil.walk_packages({package}.__path__, "{package}.")]
for name in names:
    # vLLM and torchtitan are not there.
    if not name.endswith(("__main__", ".vllm_model", "diff_lab.titan")):
        importlib.import_module(name)
print(len(names), "diff_lab" in sys.modules, {package}.__file__)
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Those of the library and of the laboratory."""
    folder = tmp_path_factory.mktemp("wheels")
    return [Path(next(wheel.WheelBuilder(str(root)).build(directory=str(folder)))) for root in (ROOT, ROOT / "lab")]


@pytest.mark.all
def test_the_library_alone(wheels: list[Path], tmp_path: Path) -> None:
    """Every module is imported, and the commands run, where the laboratory is not installed."""
    environment = FreshEnvironment(tmp_path, wheels[0])
    count, has_laboratory, file = environment.run("python", "-c", IMPORT_ALL.format(package="diff_transformer")).split()
    assert int(count) > 50
    assert has_laboratory == "False"
    assert file.startswith(str(tmp_path))
    assert "diff-transformer-lab not installed" in " ".join(environment.run("diff-transformer", "info").split())
    options = ["--prompt", "It was", "--max-new-tokens", "3"]
    assert environment.run("diff-transformer", "generate", *options)
    assert "model.safetensors" in environment.run("diff-transformer", "export", "needles-diff", "shared")
    assert "How it was trained is not recorded" in (tmp_path / "shared" / "README.md").read_text(encoding="utf-8")
    environment.run("diff-transformer", "explore", "--output", "page.html")
    assert "Needles" in (tmp_path / "page.html").read_text(encoding="utf-8")
    environment.run("diff-transformer", "convert", "shared", "llama", "--to", "microsoft")
    assert "--log-requests" in environment.run("diff-transformer", "serve", "--help")


@pytest.mark.all
def test_both_together(wheels: list[Path], tmp_path: Path) -> None:
    """A recipe of the laboratory's wheel is trained, and its card says how."""
    environment = FreshEnvironment(tmp_path, *wheels)
    code = IMPORT_ALL.format(package="diff_lab")
    _, has_laboratory, file = environment.run("python", "-c", code).split()
    assert has_laboratory == "True"
    assert file.startswith(str(tmp_path))
    settings = ["train.steps=1", "train.warmup_steps=0", "data.batch_size=2", "data.validation_sequences=4"]
    environment.run("diff-lab", "train", "retrieval", *settings, "--output", "run")
    environment.run("diff-transformer", "export", "run", "shared")
    assert "| steps | 1 |" in (tmp_path / "shared" / "README.md").read_text(encoding="utf-8")


# A digest of what the operator answers and of its gradients, and by how much the first call is slower than the second.
CALLS = """
import hashlib, time
import torch
from diff_transformer import diff_attention
torch.manual_seed(0)
torch.set_num_threads(1)
digest, seconds = hashlib.blake2b(), []
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for queries, keys, width in ((1, 700, 64), (70, 210, 20), (130, 130, 64)):
        shapes = (2, 4, 2, queries, width), (2, 2, 2, keys, width), (2, 2, keys, 2 * width)
        tensors = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        for context in (torch.no_grad, torch.enable_grad):
            start = time.perf_counter()
            with context():
                out = diff_attention(*tensors, 0.5, is_causal=True, backend="cpu")
            seconds.append(time.perf_counter() - start)
            results = [out, *torch.autograd.grad(out.sum(), tensors)] if out.requires_grad else [out]
            for result in results:
                digest.update(result.view(torch.uint8).numpy(force=True).tobytes())
print(digest.hexdigest(), seconds[0] - seconds[1])
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `make wheel` builds, before auditwheel has named the oldest Linux that it is for."""
    folder = tmp_path_factory.mktemp("compiled")
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    variables = os.environ | {"HATCH_BUILD_HOOK_ENABLE_CUSTOM": "true"}
    subprocess.run([sys.executable, "-m", "pip", *command], check=True, env=variables)
    return next(folder.glob("*.whl"))


@pytest.mark.all
def test_a_wheel_with_the_kernel_needs_no_compiler(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers at once, and with the bits of the kernel that is compiled at first use."""
    done = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True, check=True)
    environment = FreshEnvironment(tmp_path, compiled)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    digest, slower = environment.run("python", "-c", CALLS).split()
    assert digest == done.stdout.split()[0]
    assert float(slower) <= 1
    assert not (tmp_path / "cache").exists()
    assert f"compiled for {cpu_build.capability()}: {tmp_path}" in " ".join(
        environment.run("diff-transformer", "info").split()
    )


@pytest.mark.all
def test_what_every_processor_runs_is_for_every_processor(compiled: Path, tmp_path: Path) -> None:
    """Functions that objects of several instruction sets hold alike, of which the linker kept one, and initialisers."""
    with zipfile.ZipFile(compiled) as archive:
        library = archive.extract("diff_transformer/ops/cpu/diff_transformer_cpu.so", tmp_path)
    symbols = subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout
    shared = {name for kind, name in re.findall(r"^[0-9a-f]+ (\w) (\S+)$", symbols, re.MULTILINE) if kind in "TWuVi"}
    code = subprocess.run(["objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True)
    of_avx512 = re.compile(r"%zmm|%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])\b")
    seen = 0
    for name, body in re.findall(r"^[0-9a-f]+ <(\S+)>:\n((?:.+\n)*)", code.stdout, re.MULTILINE):
        if of_avx512.search(body) is None:
            continue
        seen += 1
        assert "AVX512" in name or not (name in shared or name.startswith("_GLOBAL__sub_I")), name
    assert seen > 10


@pytest.mark.all
@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_the_hubs_kernel_loads_from_disk(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the package's own, whose bits it computes. Python loads it where the Hub's library is not installed."""
    skip_unless_it_takes(backend, torch.float32)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write = runpy.run_path(str(ROOT / "hub" / "write_kernel.py"))
    folder = tmp_path / backend
    if backend == "cpu":
        write["write_sources"](folder)
    variant = write["write_variant" if backend == "cpu" else "write_triton"](folder)
    kernels = importlib.import_module("kernels") if importlib.util.find_spec("kernels") else None
    if kernels is not None:
        device = kernels._rust.Backend.CPU if backend == "cpu" else kernels._rust.Backend.CUDA
        assert kernels._rust.Build.open(folder).general.backends == [device]
    if kernels is not None and backend == "cpu":
        kernel = kernels.get_local_kernel(folder)
    else:
        (tmp_path / f"{backend}_of_the_hub").symlink_to(variant)
        monkeypatch.syspath_prepend(tmp_path)
        kernel = importlib.import_module(f"{backend}_of_the_hub")
    unique = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))["id"]
    assert hasattr(getattr(torch.ops, unique), {"cpu": "forward", "triton": "triton_forward"}[backend])
    shapes = (1, 2, 3, 30, 16), (1, 1, 2, 40, 16), (1, 1, 40, 32)
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    ours, its = (
        attend(*tensors, 0.3, is_causal=True, window=20)
        for attend in (functools.partial(diff_attention, backend=backend), kernel.diff_attention)
    )
    assert torch.equal(ours, its)
    gradients = [torch.autograd.grad(out.sum(), tensors) for out in (ours, its)]
    assert all(map(torch.equal, *gradients))
    with pytest.raises(ValueError, match=r"q, k and v must have 5, 5 and 4 axes, got q \(30, 16\)"):
        kernel.diff_attention(tensors[0][0, 0, 0], *tensors[1:], 0.3)
