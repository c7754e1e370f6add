"""Finds the kernel's library: in the wheel, or compiled on first use into torch's extension cache.

The library of a wheel is for every torch from 2.10 on, every Python, and each instruction set of its processor family.
Elsewhere a separate process compiles one in a work folder, and loads the result to try it. Only then is the library
moved into the cache, in one step: no process can meet half a library, and the calling process keeps its environment
and warnings. All that decides the machine code is in the name of the folder, so a library in it is never out of date.
To load a library is to run it, so one that others could have written is not loaded, and none is compiled if they can.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._appdirs

LIBRARY = "diff_transformer_cpu"
SOURCES = Path(__file__).parent / "csrc"
SHIPPED = Path(__file__).parent / f"{LIBRARY}.so"  # of a wheel; a checkout has none
# In the environment: 0 switches the kernel off, a path names a compiled library to take.
SWITCH = "DIFF_TRANSFORMER_CPU_KERNEL"

# What the compiling process runs: isolated from the environment, with the caller's import path, so that it finds the
# caller's torch. It ignores SIGINT, so that it does not kill ninja before ninja has ended the compilers.
_COMPILE = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
path, arguments = json.loads(sys.argv[1])
sys.path[:] = path
from torch.utils import cpp_extension
cpp_extension.load(**arguments, is_python_module=False)
"""


class BuildError(RuntimeError):
    """The kernel cannot be had: a sentence without its full stop that says why, and how to repair it."""


class KernelDisabledError(BuildError):
    """The kernel is switched off, or not made for this system: nothing has to be repaired."""


@dataclass(frozen=True)
class Build:
    """One build: these sources with these flags, for this torch."""

    folder: Path
    sources: tuple[Path, ...]
    flags: tuple[str, ...]
    capability: str
    shipped: Path | None = None  # compiled elsewhere

    @property
    def library(self) -> Path:
        return self.shipped or self.folder / f"{LIBRARY}.so"

    @property
    def log(self) -> Path:
        return self.folder / "build.log"

    @property
    def failure(self) -> Path:
        """The record of a build that failed, so that the next process does not wait for the same failure."""
        return self.folder / "failure.json"


_X86 = ("x86_64", "AMD64")
_AVX512 = ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw")
# Every processor that multiplies bfloat16 multiplies bytes (VNNI).
_INSTRUCTIONS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX2"),
    "AVX512": (*_AVX512, "-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX512"),
    "AVX512_BF16": (*_AVX512, "-mavx512bf16", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX512"),
    "DEFAULT": ("-DCPU_CAPABILITY_DEFAULT",),  # on ARM that is NEON
}


def capability() -> str:
    """Return the instructions that this processor has, of those the kernel is made for: a key of ``_INSTRUCTIONS``."""
    found = torch.backends.cpu.get_cpu_capability()
    if platform.machine() not in _X86 or found not in _INSTRUCTIONS:
        return "DEFAULT"
    return "AVX512_BF16" if found == "AVX512" and torch.cpu._is_avx512_bf16_supported() else found


def compiler_flags(capability: str) -> tuple[str, ...]:
    """Return the flags of the kernels for a :func:`capability`.

    The C++ standard is left to ``cpp_extension``, which knows that of its torch.
    """
    # A maximum of rounded scores is subtracted from them: a product that the compiler fused into the difference would
    # not be rounded, and large scores would lie above their maximum.
    flags = ("-O3", "-fno-math-errno", "-ffp-contract=off", f"-DCPU_CAPABILITY={capability}")
    return (*flags, *_INSTRUCTIONS[capability])


def describe() -> Build:
    """Describe the build that this process needs. Raises BuildError if there can be none."""
    if sys.platform not in ("linux", "darwin"):
        raise KernelDisabledError(f"the fused kernel is for Linux and macOS, this is {platform.system()}")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):  # the first with the interface of register.cpp
        raise BuildError(f"it needs torch 2.10 or newer, this is {torch.__version__}: pip install --upgrade torch")
    found = capability()
    named = os.environ.get(SWITCH, "")
    is_path = named not in ("", "0", "1")
    shipped = Path(named) if is_path else SHIPPED
    if is_path and not shipped.is_file():
        raise BuildError(f"{SWITCH} must be 0, 1 or the path of a compiled library, got {named!r}, which is no file")
    if shipped.is_file() and (is_path or found != "DEFAULT" or platform.machine() not in _X86):
        return Build(shipped.parent, (), (), found, shipped)
    sources = tuple(sorted(path for path in SOURCES.glob("*") if path.suffix in (".cpp", ".h")))
    if not any(path.suffix == ".cpp" for path in sources):
        raise BuildError(f"{SOURCES} holds no sources: install diff-transformer again")
    flags = (*compiler_flags(found), *_words("CXXFLAGS"))
    digest = hashlib.blake2b(digest_size=8)
    for part in (torch.__version__, sys.implementation.cache_tag, platform.machine(), *flags):
        digest.update(f"{part}\0".encode())
    for path in sources:
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    # Torch's extension cache; `torch.utils.cpp_extension`, which knows it too, takes long to import.
    cache = os.environ.get("TORCH_EXTENSIONS_DIR") or torch._appdirs.user_cache_dir(appname="torch_extensions")
    return Build(Path(os.path.realpath(cache), f"{LIBRARY}_{digest.hexdigest()}"), sources, flags, found)


def unavailable_reason() -> BuildError | None:
    """Return why the kernel cannot be had, as far as that is known without compiling anything; or None."""
    if os.environ.get(SWITCH) == "0":
        return KernelDisabledError(f"it is switched off by {SWITCH}=0")
    try:
        build = describe()
        if not _is_there(build):
            _find_tools()
            _raise_earlier_failure(build)
    except BuildError as error:
        return error
    except OSError as error:
        return _cannot_use(build, error)
    return None


def status() -> str:
    """Describe the state of the kernel in words, without compiling anything."""
    reason = unavailable_reason()
    if reason is not None:
        return f"not used: {reason}"
    build = describe()
    if _is_there(build):
        return f"compiled for {build.capability}: {build.library}"
    return "not compiled yet: the first call that uses it will do it"


def load() -> None:
    """Load the library into this process, compiling it first if the cache does not hold it.

    A BuildError says why it cannot be had. A build that failed before is not tried again with the same compiler.
    """
    build = describe()
    if build.shipped is None and not _compile_if_missing(build):
        return
    try:
        torch.ops.load_library(build.library)
    except OSError as error:
        cause = error.__cause__ or error
        raise BuildError(f"{build.library} does not load ({cause}): remove it, so that it is compiled again") from error


def _compile_if_missing(build: Build) -> bool:
    """Compile if need be; return False if the library was there, and is loaded now."""
    try:
        if _loads(build):
            return False
        with _build_lock(build):
            if _loads(build):  # another process has compiled it in the meantime
                return False
            _raise_earlier_failure(build)
            _compile(build)
            return True
    except OSError as error:
        raise _cannot_use(build, error) from error


def _is_there(build: Build) -> bool:
    """Return whether the library is in the cache, or a wheel's. Raises as :func:`_refuse_unsafe` does."""
    if build.shipped is None:
        _refuse_unsafe(build)
    return build.library.is_file()


def _refuse_unsafe(build: Build) -> None:
    """Raise BuildError if somebody else could have written the library, or could replace one written now."""
    if (reason := refusal(build.library)) is not None:
        raise BuildError(f"torch's extension cache is not safe: {reason}")


def _loads(build: Build) -> bool:
    """Load the library if it is there. One that does not load (damaged, or made elsewhere) is as good as absent."""
    if not _is_there(build):
        return False
    try:
        torch.ops.load_library(build.library)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _build_lock(build: Build) -> Iterator[None]:
    """Hold a lock among processes. The operating system takes it from a process that ends, however it ends."""
    import fcntl  # not there on Windows

    _refuse_unsafe(build)
    make_private(build.folder)
    _refuse_unsafe(build)  # somebody else may have made the folder in the meantime
    with open(build.folder / "build.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _announce("waiting for another process that compiles the CPU kernel")
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:  # said and not left to close(): a child that was forked meanwhile holds the same lock
            fcntl.flock(file, fcntl.LOCK_UN)


def _compile(build: Build) -> None:
    """Compile, and put the library in its place. The caller holds the lock."""
    compiler, environment = _find_tools()
    _announce("compiling the CPU kernel: twenty seconds to two minutes, once for this torch and this kind of processor")
    start = time.perf_counter()
    for abandoned in build.folder.glob("work-*"):  # by a process that was killed
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="work-", dir=build.folder, ignore_cleanup_errors=True) as work:
        library = Path(work) / build.library.name
        exit_code = _run_compiler(build, library.parent, environment)
        os.replace(library.with_name(build.log.name), build.log)
        if exit_code != 0:
            reason = _reason(build, library.is_file())
            failure = json.dumps({"compiler": _identity(compiler), "reason": reason})
            build.failure.write_text(failure, encoding="utf-8")
            raise BuildError(reason)
        with open(library, "rb") as file:
            os.fsync(file.fileno())  # the name must not reach the disk before the contents
        library.chmod(library.stat().st_mode & ~0o022)  # the compiler's umask may let a group write
        os.replace(library, build.library)
    build.failure.unlink(missing_ok=True)
    _announce(f"compiled in {time.perf_counter() - start:.0f} s: {build.library}")


def _run_compiler(build: Build, work: Path, environment: dict[str, str]) -> int:
    """Return the exit code of the compiling process. All that it and the compiler say goes to the log in ``work``."""
    arguments = {
        "name": LIBRARY,
        "sources": [str(path) for path in build.sources if path.suffix == ".cpp"],
        "extra_cflags": build.flags,
        "build_directory": str(work),
    }
    job = json.dumps([[str(entry) for entry in sys.path], arguments])
    with open(work / build.log.name, "wb") as log:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-W", "ignore", "-c", _COMPILE, job],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # one group with ninja, to be ended together
            )
        except OSError as error:
            raise BuildError(f"no process to compile it in can be started ({error})") from error
        try:
            return process.wait()
        except BaseException:  # Ctrl-C above all
            _stop(process)
            raise


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End the compiling process. Only ninja can end the compilers, which it does at SIGINT, once it has started."""
    for _ in range(100):
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
            return
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _find_tools() -> tuple[Path, dict[str, str]]:
    """Return the compiler, and the environment to compile in; a BuildError names the tool that is missing."""
    from importlib.util import find_spec

    environment = {**os.environ, "LC_ALL": "C"}  # the log is searched for "error:"
    environment.pop("MAKEFLAGS", None)  # under `make -j` it names a job server that only make's own commands can reach
    chosen = _words("CXX")
    candidates = chosen[:1] or ["c++", "g++", "clang++"]
    compilers = [path for path in map(shutil.which, candidates) if path is not None]
    if not compilers:
        lack = f"CXX names {chosen[0]!r}, which is not there" if chosen else f"none of {', '.join(candidates)} is there"
        raise BuildError(
            f"it needs a C++ compiler, and {lack}: install g++ (Debian, Ubuntu: apt install g++; macOS: "
            "xcode-select --install) or name another compiler in the environment variable CXX"
        )
    if not chosen:
        environment["CXX"] = compilers[0]
    if find_spec("ninja") is not None:
        import ninja

        if ninja.BIN_DIR:  # not on PATH where the virtual environment is not activated
            environment["PATH"] = os.pathsep.join([ninja.BIN_DIR, environment.get("PATH", os.defpath)])
    if shutil.which("ninja", path=environment.get("PATH")) is None:
        raise BuildError("ninja, which runs the compiler, is not installed: pip install ninja")
    if find_spec("setuptools") is None:
        raise BuildError("setuptools, which torch.utils.cpp_extension needs, is not installed: pip install setuptools")
    return Path(compilers[0]), environment


def _words(variable: str) -> list[str]:
    """Split the content of an environment variable as a shell would."""
    value = os.environ.get(variable, "")
    try:
        return shlex.split(value)
    except ValueError as error:
        raise BuildError(f"the environment variable {variable} cannot be read ({error}): it is {value!r}") from None


def _reason(build: Build, linked: bool) -> str:
    """Return why a build failed, from its log."""
    lines = [line.strip() for line in build.log.read_text(encoding="utf-8", errors="replace").splitlines()]
    errors = [line for line in lines if re.search(r"\berror: ", line)] or [  # the compiler's, or else Python's
        line for line in lines if re.match(r"[\w.]+Error: ", line)
    ]
    line = errors[0] if errors else "no error in its output"
    fault = "the compiled library does not load" if linked else "it does not compile"
    return (
        f"{fault} ({line}); all output is in {build.log}; another compiler can be named in the environment variable "
        f"CXX; to try again, remove {build.failure.name} beside it"
    )


def _raise_earlier_failure(build: Build) -> None:
    """Raise BuildError if this build has failed before, with the compiler that it would have now."""
    try:
        failure = json.loads(build.failure.read_text(encoding="utf-8"))
        if failure["compiler"] == _identity(_find_tools()[0]):
            raise BuildError(str(failure["reason"]))
    except (OSError, ValueError, TypeError, KeyError):  # no record, or none that can be read
        return


def _identity(compiler: Path) -> str:
    """Identify the compiler: another one, or another version of it, deserves a try."""
    return f"{os.environ.get('CXX', '')} {compiler.resolve()} {compiler.stat().st_mtime_ns}"


def _cannot_use(build: Build, error: OSError) -> BuildError:
    return BuildError(
        f"torch's extension cache cannot be used ({error.strerror or error}: {error.filename or build.folder}): "
        "make it writable, or name another folder in the environment variable TORCH_EXTENSIONS_DIR"
    )


def refusal(library: Path) -> str | None:
    """Return why ``library``, an absolute path without links to its folder, must be neither loaded nor written.

    It is a sentence without its full stop, with the remedy; an OSError if a folder on the way cannot be entered.

    The rule is ssh's for its keys: the file, its folder and all folders above belong to this user or to root, and
    nobody else may write to them. Above the library's own folder a sticky one, such as /tmp, may be open to everybody:
    there, nobody can rename or remove the files of others. A path that does not exist yet is left out.
    """
    trusted = {0, os.geteuid()}
    real = Path(os.path.realpath(library))  # where the library is a link, both ends of it count
    innermost = {library, library.parent, real, real.parent}
    for path in (library, *library.parents, real, *real.parents):
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        # In a container without root's rights, the host's folders, "/" among them, belong to a user that stands for all
        # who are unknown there. It may own the way to the cache, not what lies in the library's folder.
        owners = trusted if path in innermost else trusted | {os.lstat("/").st_uid}
        is_sticky = path not in innermost and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky
        if stat.S_ISLNK(status.st_mode):  # its permissions mean nothing; those of the path that it names count
            is_open = False
        if status.st_uid in owners and not is_open:
            continue
        mend = f"run `chmod go-w {shlex.quote(str(path))}` and remove {library}, so that it is compiled again, or "
        return (
            f"{path} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}, so that others may "
            f"put any code there: {mend if status.st_uid in owners else ''}name another folder in the environment "
            "variable TORCH_EXTENSIONS_DIR"
        )
    return None


def make_private(folder: Path) -> None:
    """Make a folder and those above it that are missing, for this user alone, whatever the umask."""
    for path in (*reversed(folder.parents), folder):
        if not os.path.lexists(path):
            path.mkdir(mode=0o700, exist_ok=True)  # another process may be as far


def _announce(message: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"diff_transformer: {message}\n")
        sys.stderr.flush()
