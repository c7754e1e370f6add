"""How the kernel's library comes to be, with sources that compile fast and compilers that fail, and which is loaded."""

import contextlib
import ctypes
import functools
import os
import signal
import stat
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from diff_transformer import diff_attention
from diff_transformer.ops import backends, flex
from diff_transformer.ops.cpu import cpu_backend, cpu_build
from diff_transformer.ops.cpu.cpu_build import make_private, refusal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tests look at Linux's /proc and libraries")

KERNEL = 'extern "C" int two() { return 2; }\n'
BROKEN = "int first() { return 1; }\nint second() { return undeclared; }\nint third() { return also_undeclared; }\n"
ABORTS = "#include <cstdlib>\nstruct Aborts { Aborts() { abort(); } } aborts;\n"
UNDEFINED = 'extern "C" int nowhere();\nextern "C" int call() { return nowhere(); }\n'


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources and an empty cache; nothing is known of a kernel."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "kernel.cpp").write_text(KERNEL, encoding="utf-8")
    for name, path in (("SOURCES", folder), ("SHIPPED", tmp_path / "none.so")):
        monkeypatch.setattr(cpu_build, name, path)
    for name in ("_kernel_error", "_warn_of_fallback"):
        monkeypatch.setattr(cpu_backend, name, functools.cache(getattr(cpu_backend, name).__wrapped__))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(cpu_build.SWITCH, raising=False)
    return folder


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def pretend(monkeypatch: pytest.MonkeyPatch, machine: str, found: str, multiplies_bfloat16: bool = False) -> None:
    """Have another processor, as Python and torch see it."""
    for name, value in (
        ("platform.machine", machine),
        ("torch.backends.cpu.get_cpu_capability", found),
        ("torch.cpu._is_avx512_bf16_supported", multiplies_bfloat16),
    ):
        monkeypatch.setattr(name, lambda value=value: value)
    monkeypatch.setattr(cpu_build, "is_faster", getattr(cpu_build.is_faster, "__wrapped__", cpu_build.is_faster))


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape, dtype=dtype) for shape in [(1, 2, 2, 5, 4), (1, 2, 2, 5, 4), (1, 2, 5, 8)])


def forked(action: Callable[[], object]) -> int:
    """A process that need not import torch again, which takes seconds; ends with 1 after an error, 130 after Ctrl-C."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of any fork with threads; this one only compiles
        pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it for what runs in the background
        try:
            action()
        except KeyboardInterrupt:
            os._exit(130)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# A build that works.


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_compiled_once_then_loaded_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    built = cpu_build.describe()
    assert cpu_build.unavailable_reason() is None
    assert "not compiled yet" in cpu_build.status()
    environment = dict(os.environ)

    cpu_build.load()
    out, err = capfd.readouterr()
    assert out == ""
    first, last = err.splitlines()
    assert "compiling the CPU kernel" in first
    assert last.endswith(str(built.library))
    assert ctypes.CDLL(str(built.library)).two() == 2
    assert dict(os.environ) == environment
    assert {path.name for path in built.library.parent.iterdir()} == {"build.lock", built.library.name}
    # Nobody else can write them, whatever the umask.
    modes = {stat.S_IMODE(path.stat().st_mode) & 0o022 for path in (built.library, *built.library.parents[:2])}
    assert modes == {0}

    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    cpu_build.load()
    assert cpu_build.status() == f"compiled for {cpu_build.capability()}: {built.library}"
    assert capfd.readouterr() == ("", "")


def test_a_damaged_library_is_compiled_again() -> None:
    built = cpu_build.describe()
    built.library.parent.mkdir(parents=True)
    built.library.write_bytes(b"\x7fELF, and then the disk was full")
    cpu_build.load()
    assert ctypes.CDLL(str(built.library)).two() == 2


def test_parallel_processes_compile_once(capfd: pytest.CaptureFixture[str]) -> None:
    processes = [forked(cpu_build.load) for _ in range(4)]
    assert [exit_code(pid) for pid in processes] == [0] * 4
    stderr = capfd.readouterr().err
    assert stderr.count("compiling the CPU kernel") == 1
    assert stderr.count("compiled in") == 1


@pytest.fixture
def compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """The pids of a process that builds, and of its compiler, which does not come to an end."""
    started, compiler = tmp_path / "started", tmp_path / "slow-g++"
    compiler.write_text(
        f"""#!/bin/sh
        case "$*" in *" -c "*) echo $$ > {started}.new; mv {started}.new {started}; exec sleep 300;; esac
        exec c++ "$@"
        """
    )
    compiler.chmod(0o700)
    with monkeypatch.context() as context:
        context.setenv("CXX", str(compiler))
        builder = forked(cpu_build.load)
    while not started.is_file():
        assert os.waitpid(builder, os.WNOHANG) == (0, 0)
        time.sleep(0.02)
    pid = int(started.read_text())
    yield builder, pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_a_killed_build_does_not_block_the_next(compiling: tuple[int, int]) -> None:
    builder, _ = compiling
    os.kill(builder, signal.SIGKILL)
    assert exit_code(builder) == -signal.SIGKILL
    built = cpu_build.describe()
    assert not built.library.exists()
    assert list(built.library.parent.glob("work-*"))
    cpu_build.load()  # while the compiler of the killed process is still there
    assert built.library.is_file()
    assert not list(built.library.parent.glob("work-*"))


def test_an_interrupted_build_leaves_nothing_behind(compiling: tuple[int, int]) -> None:
    builder, compiler = compiling
    os.kill(builder, signal.SIGINT)
    assert exit_code(builder) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(compiler, 0)
    assert [path.name for path in cpu_build.describe().library.parent.iterdir()] == ["build.lock"]


# The name.


def test_everything_that_decides_the_code_is_in_the_name(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [cpu_build.describe().library]
    (sources / "kernel.cpp").write_text(KERNEL + "\n", encoding="utf-8")
    names.append(cpu_build.describe().library)
    (sources / "kernel.h").touch()
    names.append(cpu_build.describe().library)
    (sources / "notes.txt").touch()
    assert cpu_build.describe().library == names[-1]
    pretend(monkeypatch, "x86_64", "AVX2" if cpu_build.capability() == "DEFAULT" else "DEFAULT")
    names.append(cpu_build.describe().library)
    monkeypatch.setattr(torch, "__version__", "99.0.0")
    names.append(cpu_build.describe().library)
    assert len(set(names)) == len(names) == 5


@pytest.mark.parametrize(
    ("machine", "found", "multiplies_bfloat16", "capability"),
    [
        ("x86_64", "AVX512", True, "AVX512_BF16"),
        ("x86_64", "AVX512", False, "AVX512"),
        ("x86_64", "AVX2", True, "AVX2"),  # as ATEN_CPU_CAPABILITY=avx2 asks for
        ("x86_64", "DEFAULT", False, "DEFAULT"),
        ("aarch64", "SVE256", False, "DEFAULT"),
        ("aarch64", "DEFAULT", False, "DEFAULT"),
    ],
)
def test_what_a_processor_is_capable_of_and_whether_auto_takes_the_kernel(
    machine: str, found: str, multiplies_bfloat16: bool, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, machine, found, multiplies_bfloat16)
    assert cpu_build.capability() == capability
    assert cpu_build.is_faster() == ((machine, found) != ("x86_64", "DEFAULT"))


def test_flags_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cpu_build.describe()
    monkeypatch.setenv("CXXFLAGS", "-g '-DTWO WORDS'")
    assert cpu_build.describe().flags == (*before.flags, "-g", "-DTWO WORDS")
    assert cpu_build.describe().library != before.library
    monkeypatch.setenv("CXXFLAGS", "'unclosed")
    with pytest.raises(cpu_build.BuildError, match=r"CXXFLAGS cannot be read .*'unclosed"):
        cpu_build.describe()


# A library that was compiled elsewhere.


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of a wheel's library, with nothing in it that loads; compilers are not there."""
    path = tmp_path / "shipped.so"
    path.write_bytes(b"no library")
    monkeypatch.setattr(cpu_build, "SHIPPED", path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    pretend(monkeypatch, "x86_64", "AVX2")
    return path


def test_a_wheels_library_needs_no_compiler(shipped: Path) -> None:
    assert cpu_build.unavailable_reason() is None
    assert cpu_build.status() == f"compiled for AVX2: {shipped}"
    with pytest.raises(cpu_build.BuildError, match=rf"{shipped} does not load \(.*\): remove it"):
        cpu_build.load()
    assert not os.path.exists(os.environ["TORCH_EXTENSIONS_DIR"])


def use_nothing(capability: str) -> None:
    raise RuntimeError(f"the library has no kernels for {capability}")


@pytest.mark.parametrize("operators", [SimpleNamespace(use=use_nothing), SimpleNamespace()], ids=["ours", "another"])
def test_a_named_library_without_kernels_for_this_processor(
    operators: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a wheel's is with ATEN_CPU_CAPABILITY=default."""
    pretend(monkeypatch, "x86_64", "DEFAULT")
    monkeypatch.setattr(cpu_backend, "_operators", operators)
    monkeypatch.setenv(cpu_build.SWITCH, str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    with pytest.raises(ValueError, match=f"library that {cpu_build.SWITCH} names must have kernels for DEFAULT,"):
        diff_attention(*tensors(), 0.5, backend="cpu")  # type: ignore[call-overload]


def test_a_processor_that_the_wheel_does_not_know_compiles(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "x86_64", "DEFAULT")
    assert "needs a C++ compiler" in str(cpu_build.unavailable_reason())
    pretend(monkeypatch, "aarch64", "DEFAULT")
    assert cpu_build.unavailable_reason() is None


def test_a_torch_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(cpu_build.BuildError, match=r"needs torch 2\.10 or newer, this is 2\.9\.1\+cpu: pip install"):
        cpu_build.describe()


# A build that does not work.


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("compiled", [False, True])
def test_without_a_compiler_auto_warns_once_and_a_name_raises(compiled: bool) -> None:
    q, k, v = tensors()
    torch._dynamo.reset()
    attend = torch.compile(diff_attention, fullgraph=True, backend="aot_eager") if compiled else diff_attention
    with pytest.warns(UserWarning, match="fused CPU kernel") as caught:
        outputs = [attend(q, k, v, 0.5) for _ in range(3)]
    (warning,) = caught
    for part in ("'blockwise'", "needs a C++ compiler", "'no-such-compiler'", "apt install g++", cpu_build.SWITCH):
        assert part in str(warning.message)
    assert torch.equal(outputs[0], diff_attention(q, k, v, 0.5, backend="blockwise"))
    with pytest.raises(ValueError, match=r"'cpu' cannot run.*C\+\+ compiler"):
        diff_attention(q, k, v, 0.5, backend="cpu")
    reasons = backends.explain()
    assert reasons.pop("cpu") == cpu_backend.reason_against_cpu_kernel()
    without_vectors = set() if flex._cpu_has_vectors() else {"flex"}
    assert {name for name, reason in reasons.items() if reason} == {"fa2", "fa3", "fa4", *without_vectors}
    assert cpu_build.status().startswith("not used: it needs a C++ compiler")
    assert not os.path.exists(os.environ["TORCH_EXTENSIONS_DIR"])


@pytest.mark.usefixtures("no_compiler")
def test_what_the_kernel_cannot_do_does_not_look_for_it() -> None:
    """As it would warn that there is no compiler."""
    q, k, v = tensors(torch.float64)
    diff_attention(q, k, v, 0.5)
    with pytest.raises(ValueError, match=r"'cpu' cannot run this request: .*, got torch\.float64"):
        diff_attention(q, k, v, 0.5, backend="cpu")
    q, k, v = tensors()
    mask = torch.zeros(5, 5, requires_grad=True)
    diff_attention(q, k, v, 0.5, attn_mask=mask)
    with pytest.raises(ValueError, match=r"'cpu' cannot run.*no gradient for attn_mask"):
        diff_attention(q, k, v, 0.5, attn_mask=mask, backend="cpu")
    with pytest.raises(ValueError, match=r"'cpu' cannot run this request: .*got meta"):
        diff_attention(*(x.to("meta") for x in (q, k, v)), 0.5, backend="cpu")


def test_switched_off_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_build.SWITCH, "0")
    q, k, v = tensors()
    diff_attention(q, k, v, 0.5)
    with pytest.raises(ValueError, match=f"switched off by {cpu_build.SWITCH}=0"):
        diff_attention(q, k, v, 0.5, backend="cpu")
    assert f"{cpu_build.SWITCH}=0" in cpu_build.status()
    assert not os.path.exists(os.environ["TORCH_EXTENSIONS_DIR"])
    monkeypatch.setenv(cpu_build.SWITCH, "x" * 300)  # longer than a name can be
    with pytest.raises(cpu_build.BuildError, match=r"'x+', which is no file$"):
        cpu_build.describe()


def test_a_build_that_fails_is_remembered_until_it_is_asked_for(
    sources: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (sources / "kernel.cpp").write_text(BROKEN, encoding="utf-8")
    with pytest.raises(cpu_build.BuildError, match="error: 'undeclared' was not declared") as failed:
        cpu_build.load()
    built, reason = cpu_build.describe(), str(failed.value)
    assert f"{sources / 'kernel.cpp'}:2" in reason
    assert str(built.log) in reason
    assert "'also_undeclared' was not declared" in built.log.read_text()
    assert {path.name for path in built.library.parent.iterdir()} == {"build.lock", "build.log"}

    # As another process would find it.
    compiled_at = built.log.stat().st_mtime_ns
    assert str(cpu_build.unavailable_reason()) == reason
    q, k, v = tensors()
    with pytest.warns(UserWarning, match="'undeclared' was not declared"):
        diff_attention(q, k, v, 0.5)
    with pytest.raises(cpu_build.BuildError) as again:
        cpu_build.load()
    assert str(again.value) == reason
    assert built.log.stat().st_mtime_ns == compiled_at
    # Another compiler deserves a try.
    another = tmp_path / "other-g++"
    another.symlink_to("/bin/true")
    with monkeypatch.context() as context:
        context.setenv("CXX", str(another))
        assert cpu_build.unavailable_reason() is None

    (sources / "kernel.cpp").write_text(KERNEL, encoding="utf-8")
    cpu_build.describe().library.parent.mkdir()
    cpu_build.describe().log.write_text("a compiler that is gone\nold")
    cpu_build.load()
    assert not cpu_build.describe().log.exists()


@pytest.mark.parametrize(
    ("code", "reason"),
    [(UNDEFINED, r"does not load .*undefined symbol: nowhere"), (ABORTS, r"does not load \(no error in its output\)")],
    ids=["undefined", "aborts"],
)
def test_a_library_that_does_not_load_is_not_kept(sources: Path, code: str, reason: str) -> None:
    (sources / "kernel.cpp").write_text(code, encoding="utf-8")
    for _ in range(2):
        with pytest.raises(cpu_build.BuildError, match=reason):
            cpu_build.load()
    assert cpu_build.describe().log.exists()
    assert not cpu_build.describe().library.exists()


def test_a_compiler_with_its_own_umask_jobs_and_colours(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, running = tmp_path / "g++", tmp_path / "running"
    compiler.write_text(
        f'#!/bin/sh\numask 002\n[ "$1" = -shared ] || mkdir {running} || exit 1\ng++ "$@"; code=$?\n'
        f'[ "$1" = -shared ] || rmdir {running}\nexit $code\n',
        encoding="utf-8",
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MAX_JOBS", "1")
    (sources / "another.cpp").write_text("int another() { return 1; }", encoding="utf-8")
    cpu_build.load()
    assert cpu_build.unavailable_reason() is None
    monkeypatch.setenv("CXXFLAGS", "-fdiagnostics-color=always")
    (sources / "kernel.cpp").write_text("int f() { return undeclared; }", encoding="utf-8")
    with pytest.raises(cpu_build.BuildError, match=r"error: .*undeclared"):
        cpu_build.load()


def test_a_compiler_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("no program")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(cpu_build.BuildError, match=rf"compiler cannot be started \(.*{compiler}"):
        cpu_build.load()
    assert not cpu_build.describe().log.exists()


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(cpu_build.BuildError, match=r"cache cannot be used \(Not a directory: .*TORCH_EXTENSIONS_DIR"):
        cpu_build.load()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "new"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert f"cache cannot be used (not writable: {tmp_path}): make it" in cpu_build.status()


def test_no_sources_and_no_such_system(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sources / "kernel.cpp").unlink()
    with pytest.raises(cpu_build.BuildError, match="holds no sources"):
        cpu_build.load()
    monkeypatch.setattr(sys, "platform", "win32")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cpu_backend.available_to_auto()


def test_a_forked_process_does_not_wait_for_a_thread_that_it_does_not_have() -> None:
    def take_the_lock() -> None:
        assert cpu_backend._lock.acquire(timeout=5)

    with cpu_backend._lock:
        assert exit_code(forked(take_the_lock)) == 0


# Whose libraries are loaded: permissions and owners of the cache.


@pytest.fixture
def library() -> Path:
    """A library in a private cache, two folders below the test's own."""
    path = cpu_build.describe().library
    make_private(path.parent)
    path.write_bytes(b"not loaded")
    path.chmod(0o644)
    assert refusal(path) is None
    return path


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it somebody else's; of who is not root, all is then."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)


@pytest.mark.every_case
@pytest.mark.parametrize("mode", [0o775, 0o757, None])
@pytest.mark.parametrize("part", ["library", "folder", "cache"])
def test_what_others_own_or_may_write_is_refused_with_the_command_that_mends_it(
    part: str, mode: int | None, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = {"library": library, "folder": library.parent, "cache": library.parents[1]}[part]
    if mode is None:
        give_away(path, monkeypatch)
        assert "belongs to user" in str(refusal(library))
        return
    path.chmod(mode)
    reason = str(refusal(library))
    assert f"{path} belongs to user {os.geteuid()} with mode 0{mode:o}" in reason
    assert f"chmod go-w {path}`" in reason
    path.chmod(mode & ~0o022)
    assert refusal(library) is None


def test_links_and_sticky_folders(library: Path, tmp_path: Path) -> None:
    library.parents[1].chmod(0o1777)  # as /tmp is
    assert refusal(library) is None
    library.parent.chmod(0o1777)
    assert "1777" in str(refusal(library))
    library.parent.chmod(0o700)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    elsewhere = library.rename(tmp_path / "open" / "other.so")
    library.symlink_to(elsewhere)
    assert f"{elsewhere.parent} belongs" in str(refusal(library))
    library.unlink()
    library.symlink_to("/bin/sh")
    assert refusal(library) is None
    if os.geteuid() == 0:  # others could make it name a library of theirs
        os.lchown(library, 12345, 12345)
        assert f"{library} belongs to user 12345" in str(refusal(library))


def test_what_root_has_installed_for_all_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert refusal(Path("/bin/sh").resolve()) is None


@pytest.mark.parametrize("is_there", [True, False])
def test_a_refused_library_is_neither_loaded_nor_compiled(library: Path, is_there: bool) -> None:
    if not is_there:
        library.unlink()
    library.parent.chmod(0o777)
    with pytest.raises(cpu_build.BuildError, match=r"any code there.*TORCH_EXTENSIONS_DIR") as error:
        cpu_build.load()
    assert str(cpu_build.unavailable_reason()) == str(error.value)
    assert cpu_build.status() == f"not used: {error.value}"
    assert [*library.parent.iterdir()] == [library] * is_there
