"""vLLM writes what `generate` writes, offline and through `vllm serve`: greedy tokens of models with grouped queries.

Keys are cached 32 wide, the least that vLLM's kernels for the CPU have.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from vllm import LLM, SamplingParams

from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from diff_transformer.data import byte_tokenizer

HEAD_DIM = {"diff": 16, "diff_v2": 32, "softmax": 32}
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
def vllm_serve(folder: Path, log: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = [f"--{name.replace('_', '-')}" for name, value in SETTINGS.items() if value is True]
    for name, value in SETTINGS.items():
        settings += [] if value is True else [f"--{name.replace('_', '-')}", str(value)]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(folder), "--port", str(port), *settings]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ)
    try:
        end = time.monotonic() + 600
        while "Application startup complete" not in log.read_text():
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


def test_a_width_without_a_kernel_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As the model is loaded. vLLM's own error came with the first request."""
    saved(tmp_path, "diff", 4)
    with pytest.raises(RuntimeError):  # vLLM's: the process of the engine has failed
        LLM(str(tmp_path), **SETTINGS)
    output = "".join(capfd.readouterr())
    assert "with head_dim 4 caches heads of width 8." in output


def test_served(tmp_path: Path) -> None:
    """By a program that imports nothing of ours: its entry point makes the model known to it."""
    folder = tmp_path / "model"
    model = saved(folder, "diff", HEAD_DIM["diff"])
    with vllm_serve(folder, tmp_path / "log") as url, openai.OpenAI(base_url=url, api_key="none") as client:
        for prompt in PROMPTS:
            answer = client.completions.create(
                model=str(folder), prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, extra_body={"ignore_eos": True}
            )
            assert answer.choices[0].text == byte_tokenizer().decode(generated(model, prompt))
