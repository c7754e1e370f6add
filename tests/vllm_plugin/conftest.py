"""vLLM has an environment of its own, which `make test-vllm` sets up; anywhere else there is nothing to test."""

from importlib.util import find_spec

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
