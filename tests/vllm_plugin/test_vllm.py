"""vLLM writes what `generate` writes, offline and through its server: greedy tokens of models with grouped queries.

Keys are cached 32 wide, the least that vLLM's kernels for the CPU have.
"""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from vllm import LLM, SamplingParams

from diff_lab.data import byte_tokenizer
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM

HEAD_DIM = {"diff": 16, "diff_grouped": 16, "diff_v2": 32, "softmax": 32}
NEW_TOKENS = 20
CONTEXT = 128
# The longest takes several passes of 48 tokens (chunked prefill); two begin alike, and all are asked for twice (prefix
# caching, which keeps blocks of 32 tokens or more).
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2], [11, 1, 8, 3, 3] * 19, [*[11, 1, 8, 3, 3] * 15, 7, 7], [65, 66])
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": CONTEXT,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 4,
    "block_size": 32,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def saved(folder: Path, kind: str, head_dim: int) -> Any:
    torch.manual_seed(1)
    config = DiffTransformerConfig(
        attention_type=kind,
        vocab_size=257,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_noise_heads=2,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
    )
    model = DiffTransformerForCausalLM(config).eval()
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


def generated(model: Any, prompt: list[int]) -> list[int]:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", HEAD_DIM)
def test_offline(kind: str, tmp_path: Path) -> None:
    model = saved(tmp_path, kind, HEAD_DIM[kind])
    expected = [generated(model, prompt) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) > 3
    engine = LLM(str(tmp_path), **SETTINGS)
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for _ in range(2):
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert max(output.num_cached_tokens for output in outputs) >= 32


@contextmanager
def vllm_server(folder: Path, log: Path) -> Iterator[openai.OpenAI]:
    """A client of vLLM's server, in a process that is told of the folder alone: the entry point brings the model.

    This module is what the command `vllm serve` runs. That command itself asks for the version of a package "vllm", and
    does not start where the package is called vllm-cpu.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in SETTINGS.items()
    ]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}", f"--port={port}"]
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--enable-prompt-tokens-details", *settings], stdout=out, stderr=out)
    try:
        end = time.monotonic() + 600
        while "Application startup complete" not in log.read_text():
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.5)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            yield client
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


@pytest.mark.parametrize("kind", HEAD_DIM)
def test_served(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = saved(folder, kind, HEAD_DIM[kind])
    expected = [generated(model, prompt) for prompt in PROMPTS]
    with vllm_server(folder, tmp_path / "log") as client, ThreadPoolExecutor(len(PROMPTS)) as pool:

        def asked(prompt: list[int]) -> Any:
            answer: Any = client.completions.create(
                model=str(folder),
                prompt=prompt,
                max_tokens=NEW_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            return answer

        for _ in range(2):
            answers = list(pool.map(asked, PROMPTS))
            assert [answer.choices[0].token_ids for answer in answers] == expected
        details = [answer.usage.prompt_tokens_details for answer in answers]
        assert max(detail.cached_tokens for detail in details if detail is not None) >= 32


def test_a_width_without_a_kernel_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As the model is loaded. vLLM's own error came with the first request."""
    saved(tmp_path, "diff", 4)
    with pytest.raises(RuntimeError):  # vLLM's: the process of the engine has failed
        LLM(str(tmp_path), **SETTINGS)
    output = "".join(capfd.readouterr())
    assert "with head_dim 4 caches heads of width 8." in output
