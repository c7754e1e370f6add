"""Code in processes that have imported torch and transformers and nothing of this package.

A process of its own imports both once, which takes some seconds, and is forked for each piece of code.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any

PRELOADED = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)
SECONDS = 300  # a machine may be busy with other tests


def run(
    code: str,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    warnings_are_errors: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -c CODE ARGUMENTS`` in ``folder`` and in ``environment``.

    torch and transformers have read their variables already, but for ATEN_CPU_CAPABILITY and HF_MODULES_CACHE.
    """
    with tempfile.TemporaryDirectory() as temporary:
        out, err = (Path(temporary) / name for name in ("out", "err"))
        request = {
            "code": code,
            "arguments": ["-c", *map(str, arguments)],
            "environment": dict(os.environ if environment is None else environment),
            "folder": str(folder or Path.cwd()),
            "streams": [os.devnull, str(out), str(err)],
            "warnings_are_errors": warnings_are_errors,
        }
        requests, statuses = _server()
        requests.write(json.dumps(request) + "\n")
        requests.flush()
        status = statuses.readline()
        assert status, "the process that forks others has ended"
        texts = [stream.read_text(encoding="utf-8") for stream in (out, err)]
    return subprocess.CompletedProcess([code, *arguments], int(status), *texts)


@functools.cache
def _server() -> tuple[IO[str], IO[str]]:
    """The pipes of requests and of exit codes. The process ends when the first is closed, as this process ends."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # what libraries say as they are loaded
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    atexit.register(process.communicate)
    return process.stdin, process.stdout


def _serve() -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    assert "diff_transformer" not in sys.modules
    gc.freeze()  # so that the processes share the memory, and do not look through it
    while line := sys.stdin.readline():
        process = os.fork()
        if process == 0:
            _run(json.loads(line))
        _, status = os.waitpid(process, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _run(request: dict[str, Any]) -> None:
    """Run the code of one request and end the process."""
    from transformers import dynamic_module_utils

    signal.alarm(SECONDS)
    for descriptor, path in enumerate(request["streams"]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if "HF_MODULES_CACHE" in os.environ:
        dynamic_module_utils.HF_MODULES_CACHE = os.environ["HF_MODULES_CACHE"]
    if request["warnings_are_errors"]:
        warnings.simplefilter("error")
    sys.argv = request["arguments"]
    main = sys.modules["__main__"] = ModuleType("__main__")
    status = 0
    try:
        exec(compile(request["code"], "<string>", "exec"), main.__dict__)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)  # not through the end of the interpreter, which takes longer than most code


if __name__ == "__main__":
    _serve()
