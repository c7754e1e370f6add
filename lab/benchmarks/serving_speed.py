"""Tokens per second of `diff-transformer serve`: one request after another, and in one batch.

    python lab/benchmarks/serving_speed.py                # random weights, 26M parameters; on an idle machine, minutes
    python lab/benchmarks/serving_speed.py --model FOLDER # a model folder with a tokenizer

Two servers of the same weights, each a process of its own, answer the same greedy requests through HTTP, in turns, so
that a drift of the machine meets both alike; the texts of both are compared. Prints a table in Markdown.
"""

import argparse
import asyncio
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import torch
import transformers

from diff_lab.data import byte_tokenizer
from diff_lab.results_files import command_line, device_name
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM

PROMPT_LENGTHS = (8, 40, 120, 240)  # characters


def save_random_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = DiffTransformerConfig(
        vocab_size=257,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        max_position_embeddings=512,
    )
    DiffTransformerForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


@contextmanager
def running(model: Path, *options: str) -> Iterator[str]:
    """The address of a server, which answers until the block ends."""
    command = [sys.executable, "-m", "diff_transformer.cli", "serve", str(model), "--port", "0", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            told = []
            for line in process.stderr:
                told.append(line)
                if ready := re.match(r"Serving \S+ at (\S+) ", line):
                    yield ready[1]
                    return
            raise SystemExit(f"The server has ended: {''.join(told)}")
        finally:
            process.terminate()


async def answers(url: str, requests: int, at_once: int, tokens: int) -> tuple[float, list[str]]:
    """Tokens per second, and the texts."""
    limit = asyncio.Semaphore(at_once)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=3600) as client:
        name = (await client.models.list()).data[0].id

        async def one(number: int) -> Any:
            prompt = ("to be, or not to be " * 12)[: PROMPT_LENGTHS[number % len(PROMPT_LENGTHS)]]
            async with limit:
                return await client.completions.create(model=name, prompt=prompt, max_tokens=tokens, temperature=0)

        start = time.perf_counter()
        given = await asyncio.gather(*map(one, range(requests)))
        seconds = time.perf_counter() - start
    return sum(answer.usage.completion_tokens for answer in given) / seconds, [
        answer.choices[0].text for answer in given
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = settings.model or Path(folder) / "model"
        if settings.model is None:
            save_random_model(model)
        print("| requests at once | one after another, tokens/s | in one batch, tokens/s | ratio | equal texts |")
        print("|---|---|---|---|---|")
        with running(model) as plain_url, running(model, "--continuous-batching") as batched_url:
            for at_once in settings.at_once:
                rates: list[list[float]] = [[], []]
                texts: list[list[str]] = [[], []]
                for turn in range(settings.rounds + 1):
                    for place, url in enumerate((plain_url, batched_url)):
                        rate, texts[place] = asyncio.run(answers(url, settings.requests, at_once, settings.tokens))
                        if turn:  # the first finds memory
                            rates[place].append(rate)
                plain_rate, batched_rate = map(statistics.median, rates)
                equal = sum(first == second for first, second in zip(*texts, strict=True))
                print(
                    f"| {at_once} | {plain_rate:.0f} | {batched_rate:.0f} | {batched_rate / plain_rate:.2f} "
                    f"| {equal} of {settings.requests} |",
                    flush=True,
                )
        size = sum(weight.numel() for weight in DiffTransformerForCausalLM.from_pretrained(model).parameters()) / 1e6
    print(
        f"\n{size:.1f}M parameters in float32, {settings.requests} requests of {settings.tokens} tokens, median of "
        f"{settings.rounds} rounds; {device_name()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, `{command_line()}`."
    )


if __name__ == "__main__":
    main()
