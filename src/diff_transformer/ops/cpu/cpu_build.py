"""Finds the kernel's library: in the wheel, or compiled on first use into torch's extension cache.

The library of a wheel is for every torch from 2.10 on, every Python, and each instruction set of its processor family.
Elsewhere one is compiled in a work folder, tried by a process, and only then moved into the cache, in one step: nobody
can meet half a library. All that decides the machine code is in the name of its folder, so it is never out of date.
To load a library is to run it, so one that others could have written is not loaded, and none is compiled if they can.
"""

import contextlib
import functools
import hashlib
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
from pathlib import Path
from typing import NamedTuple

import torch
import torch._appdirs

LIBRARY = "diff_transformer_cpu"
SOURCES = Path(__file__).parent / "csrc"
SHIPPED = Path(__file__).parent / f"{LIBRARY}.so"  # of a wheel; a checkout has none
# In the environment: 0 switches the kernel off, a path names a compiled library to take.
SWITCH = "DIFF_TRANSFORMER_CPU_KERNEL"


class BuildError(RuntimeError):
    """The kernel cannot be had: a sentence without its full stop that says why, and how to repair it."""


class KernelDisabledError(BuildError):
    """The kernel is switched off, or not made for this system: nothing has to be repaired."""


class Build(NamedTuple):
    """A library that was compiled elsewhere, or one to be compiled from these sources with these flags."""

    library: Path
    capability: str
    sources: tuple[Path, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def log(self) -> Path:
        """The record of a build that failed, so that the next process does not wait for the same failure."""
        return self.library.with_name("build.log")


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


@functools.cache
def is_faster() -> bool:
    """Return whether the kernel is faster than ``blockwise``: not on x86 without AVX2, where at::vec has no vectors."""
    return capability() != "DEFAULT" or platform.machine() not in _X86


def compiler_flags(capability: str) -> tuple[str, ...]:
    """Return the flags of the kernels for a :func:`capability`."""
    # A maximum of rounded scores is subtracted from them: a product that the compiler fused into the difference would
    # not be rounded, and large scores would lie above their maximum.
    flags = ("-O3", "-fno-math-errno", "-ffp-contract=off", f"-DCPU_CAPABILITY={capability}")
    return (*flags, *_INSTRUCTIONS[capability])


def describe() -> Build:
    """Describe the build that this process needs. Raises BuildError if there can be none."""
    named = os.environ.get(SWITCH, "")
    if named == "0":
        raise KernelDisabledError(f"it is switched off by {SWITCH}=0")
    if sys.platform not in ("linux", "darwin"):
        raise KernelDisabledError(f"the fused kernel is for Linux and macOS, this is {platform.system()}")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):  # the first with the interface of register.cpp
        raise BuildError(f"it needs torch 2.10 or newer, this is {torch.__version__}: pip install --upgrade torch")
    is_path = named not in ("", "1")
    shipped = Path(named) if is_path else SHIPPED
    if is_path and not os.path.isfile(shipped):  # a name that is too long for one is an error of Path.is_file
        raise BuildError(f"{SWITCH} must be 0, 1 or the path of a compiled library, got {named!r}, which is no file")
    if shipped.is_file() and (is_path or is_faster()):
        return Build(shipped, capability())
    sources = tuple(sorted(path for path in SOURCES.glob("*") if path.suffix in (".cpp", ".h")))
    if not any(path.suffix == ".cpp" for path in sources):
        raise BuildError(f"{SOURCES} holds no sources: install diff-transformer again")
    flags = ("-std=c++20", "-fPIC", *compiler_flags(capability()), *_words("CXXFLAGS"))
    digest = hashlib.blake2b(digest_size=8)
    for part in (torch.__version__, platform.machine(), *flags):
        digest.update(os.fsencode(f"{part}\0"))
    for path in sources:
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    # Torch's extension cache; `torch.utils.cpp_extension`, which knows it too, takes long to import.
    cache = os.environ.get("TORCH_EXTENSIONS_DIR") or torch._appdirs.user_cache_dir(appname="torch_extensions")
    folder = os.path.realpath(Path(cache, f"{LIBRARY}_{digest.hexdigest()}"))
    return Build(Path(folder, f"{LIBRARY}.so"), capability(), sources, flags)


def find() -> Build:
    """Find the library, or what it takes to compile it. Raises BuildError if the kernel cannot be had."""
    build = describe()
    if build.sources:
        with _usable_cache(build):
            if (reason := refusal(build.library)) is not None:
                raise BuildError(f"torch's extension cache is not safe: {reason}")
            if not build.library.is_file():
                existing = next(path for path in build.library.parents if path.exists())
                if not os.access(existing, os.W_OK):
                    raise OSError(None, "not writable", str(existing))
                _find_compiler(build)
    return build


def unavailable_reason() -> BuildError | None:
    """Return why the kernel cannot be had, as far as that is known without compiling anything; or None."""
    try:
        find()
    except BuildError as error:
        return error
    return None


def status() -> str:
    """Describe the state of the kernel in words, without compiling anything."""
    if (error := unavailable_reason()) is not None:
        return f"not used: {error}"
    if (build := describe()).library.is_file():
        return f"compiled for {build.capability}: {build.library}"
    return "not compiled yet: the first call that uses it will do it"


def load() -> None:
    """Load the library into this process, compiling it first if the cache does not hold it.

    A BuildError says why it cannot be had. A build that failed before is not tried again with the same compiler.
    """
    build = find()
    fault = _load(build.library)
    if fault and not build.sources:
        raise BuildError(f"{build.library} does not load ({fault}): remove it, so that it is compiled again")
    if fault:  # it is absent, or as good as that: damaged, or made elsewhere
        with _usable_cache(build):
            make_private(build.library.parent)
            find()  # somebody else may have made the folder in the meantime
            with _lock(build.library.with_name("build.lock")):
                if _load(build.library):  # another process may have compiled it in the meantime
                    _compile(build)


@contextlib.contextmanager
def _usable_cache(build: Build) -> Iterator[None]:
    """Raise BuildError in place of OSError, which says why the cache cannot be used."""
    try:
        yield
    except OSError as error:
        raise BuildError(
            f"torch's extension cache cannot be used ({error.strerror or error}: {error.filename or build.library}): "
            "make it writable, or name another folder in the environment variable TORCH_EXTENSIONS_DIR"
        ) from error


def _load(library: Path) -> str:
    """Load a library into this process; return in one line why it does not load, or nothing."""
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return " ".join(str(error.__cause__ or error).split())
    return ""


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock among processes. The operating system takes it from a process that ends, however it ends."""
    import fcntl  # not there on Windows

    with open(path, "a") as file:
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
    """Compile the library, try it, put it in its place and load it. The caller holds the lock."""
    compiler, identity = _find_compiler(build)
    _announce("compiling the CPU kernel: twenty seconds to two minutes, once for this torch and this kind of processor")
    start = time.perf_counter()
    folder = build.library.parent
    for abandoned in folder.glob("work-*"):  # by a process that was killed
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="work-", dir=folder, ignore_cleanup_errors=True) as work:
        library, log = Path(work, build.library.name), Path(work, build.log.name)
        sources = [path for path in build.sources if path.suffix == ".cpp"]
        installed = os.path.dirname(torch.__file__)
        flags = [*build.flags, "-fdiagnostics-color=never", f"-isystem{installed}/include"]
        link = ["-shared", *(f"{path.stem}.o" for path in sources), f"-L{installed}/lib", "-ltorch_cpu", "-lc10"]
        suffix = "so"
        if sys.platform == "darwin":  # its linker leaves no symbol to the loader unasked
            link, suffix = [*link, "-undefined", "dynamic_lookup"], "dylib"
        paths = [f"{installed}/lib/libtorch_cpu.{suffix}", str(library)]
        trial = f"import ctypes; [ctypes.CDLL(path, ctypes.RTLD_GLOBAL) for path in {paths}]"  # may end its process
        is_compiled = _run([[*compiler, *flags, "-c", str(path)] for path in sources], log)
        is_compiled = is_compiled and _run([[*compiler, *link, "-o", library.name]], log)
        if not (is_compiled and _run([[sys.executable, "-c", trial]], log)):
            said = log.read_text(encoding="utf-8", errors="replace")
            error = re.search(r".*\berror: .*" if not is_compiled else r".*$", said.strip())
            fault = "the compiled library does not load" if is_compiled else "it does not compile"
            fault += f" ({error[0] if error and error[0] else 'no error in its output'})"
            fault += f"; all output is in {build.log}; another compiler can be named in the environment variable CXX; "
            fault += "to try again, remove that file"
            log.write_bytes(f"{identity}\n{fault}\n".encode("utf-8", "surrogateescape") + log.read_bytes())
            os.replace(log, build.log)
            raise BuildError(fault)
        library.chmod(0o755)  # a compiler that sets a umask of its own may let a group write
        with open(library, "rb") as file:
            os.fsync(file.fileno())  # the name must not reach the disk before the contents
        os.replace(library, build.library)
    torch.ops.load_library(build.library)
    build.log.unlink(missing_ok=True)
    _announce(f"compiled in {time.perf_counter() - start:.0f} s: {build.library}")


def _run(commands: list[list[str]], log: Path) -> bool:
    """Run commands beside the log, on all processors or MAX_JOBS of them; return whether none fails."""
    processes: list[subprocess.Popen[bytes]] = []
    named = os.environ.get("MAX_JOBS", "")  # as ninja takes it
    jobs = int(named) if named.isdecimal() and int(named) else os.cpu_count() or 1
    try:
        for command in commands:
            if len(processes) >= jobs:
                processes[-jobs].wait()
            with open(log, "ab") as output:
                process = subprocess.Popen(
                    command,
                    cwd=log.parent,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    # The log is searched for "error:"; what an ended compiler leaves behind goes with the folder.
                    env={**os.environ, "LC_ALL": "C", "TMPDIR": str(log.parent)},
                    start_new_session=True,  # a compiler is several processes, to be ended together
                )
            processes.append(process)
        return not any(process.wait() for process in processes)
    except OSError as error:
        raise BuildError(f"the compiler cannot be started ({error})") from error
    finally:  # after Ctrl-C, too
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(OSError):  # it ends just now
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _find_compiler(build: Build) -> tuple[list[str], str]:
    """Return the compiler's command and its identity. Raises BuildError if there is none, or it has failed before."""
    command = _words("CXX")
    candidates = command[:1] or ["c++", "g++", "clang++"]
    compilers = [path for path in map(shutil.which, candidates) if path is not None]
    if not compilers:
        lack = f"CXX names {command[0]!r}, which is not" if command else f"none of {', '.join(candidates)} is"
        raise BuildError(
            f"it needs a C++ compiler, and {lack} there: install g++ (Debian, Ubuntu: apt install g++; macOS: "
            "xcode-select --install) or name another compiler in the environment variable CXX"
        )
    command = command or compilers[:1]
    # Another compiler, or another version of it, deserves a try.
    identity = f"{shlex.join(command)} {os.path.realpath(compilers[0])} {os.stat(compilers[0]).st_mtime_ns}"
    if build.log.is_file():
        failed, reason, *_ = [*build.log.read_bytes().splitlines(), b"", b""]
        if failed == identity.encode("utf-8", "surrogateescape"):
            raise BuildError(reason.decode("utf-8", "surrogateescape"))
    return command, identity


def _words(variable: str) -> list[str]:
    """Split the content of an environment variable as a shell would."""
    value = os.environ.get(variable, "")
    try:
        return shlex.split(value)
    except ValueError as error:
        raise BuildError(f"the environment variable {variable} cannot be read ({error}): it is {value!r}") from None


def refusal(library: Path) -> str | None:
    """Return why ``library``, an absolute path without links to its folder, must be neither loaded nor written.

    It is a sentence without its full stop, with the remedy; an OSError if a folder on the way cannot be entered.

    The rule is ssh's for its keys: the file, its folder and all folders above belong to this user or to root, and
    nobody else may write to them. Above the library's own folder a sticky one, such as /tmp, may be open to everybody:
    there, nobody can rename or remove the files of others. A path that does not exist yet is left out.
    """
    trusted = {0, os.geteuid()}
    real = Path(os.path.realpath(library))
    innermost = (library, real, real.parent, library.parent)  # where the library is a link, both ends count
    for path in (*innermost, *library.parents, *real.parents):
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        mode = 0 if stat.S_ISLNK(status.st_mode) else status.st_mode  # a link's own permissions mean nothing
        is_above = path not in innermost
        # In a container without root's rights, the host's folders, "/" among them, belong to a user that stands for all
        # who are unknown there. It may own the way to the cache, not what lies in the library's folder.
        is_ours = status.st_uid in trusted or (is_above and status.st_uid == os.lstat("/").st_uid)
        if is_ours and (not mode & 0o022 or (is_above and mode & stat.S_ISVTX)):
            continue
        mend = f"run `chmod go-w {shlex.quote(str(path))}` and remove {library}, so that it is compiled again, or "
        return (
            f"{path} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}, so that others may "
            f"put any code there: {mend if is_ours else ''}name another folder in the environment variable "
            "TORCH_EXTENSIONS_DIR"
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
