"""Decodes a Llama by CTranslate2."""

import copy
import functools
import tempfile
import time
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor

WARM = 16  # tokens of a model in a row that are not timed: the processor's caches come to hold its weights


class CTranslate2Decoding:
    """Run of CTranslate2 that decodes the last of tokens (B, N) to logits (B, 1, V), behind a cache of those before.

    It converts a float32 Llama itself. Raises ModuleNotFoundError if it is not installed, ValueError for a dtype in
    which it is not fast here.
    """

    def __init__(self, llama: Any, tokens: Tensor, dtype: str) -> None:
        if find_spec("ctranslate2") is None:
            raise ModuleNotFoundError("it is not installed: pip install ctranslate2")
        from ctranslate2 import Generator
        from ctranslate2.converters.transformers import LlamaLoader

        name_of = "<extra_id_{}>".format  # as CTranslate2 calls a token without a name
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), name_of(0))
        with torch.no_grad():  # the loader takes the model apart
            spec = LlamaLoader()(copy.deepcopy(llama).cpu(), SimpleNamespace(get_vocab=dict, **special))
        spec.validate()
        spec.optimize(quantization=dtype)
        with tempfile.TemporaryDirectory() as folder:
            spec.save(folder)
            threads = torch.get_num_threads()
            generator = Generator(folder, llama.device.type, compute_type=dtype, intra_threads=threads)
        self._prompts = [list(map(name_of, row)) for row in tokens.tolist()]
        self._generate = functools.partial(generator.generate_batch, include_prompt_in_result=False)

    def __call__(self) -> Tensor:
        results = self._generate(self._prompts, max_length=1, return_logits_vocab=True)
        logits = [numpy.asarray(result.logits[0]) for result in results]
        return torch.from_numpy(numpy.stack(logits)).view(len(logits), 1, -1)

    def seconds(self, tokens: int) -> float:
        """Return the seconds of a token: of so many behind WARM of them, with N keys in the middle."""
        times: list[float] = []
        prompts = [prompt[: max(1, len(prompt) - WARM - tokens // 2)] for prompt in self._prompts]
        lengths = dict.fromkeys(("min_length", "max_length"), WARM + tokens)
        self._generate(prompts, **lengths, callback=lambda step: times.append(time.perf_counter()))
        return (times[-1] - times[WARM - 1]) / tokens
