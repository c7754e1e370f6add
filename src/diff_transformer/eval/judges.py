"""A judge from settings: a model behind an address, a local model, or a rule that needs neither."""

import re
from collections.abc import Mapping
from typing import Any

from diff_transformer.eval.judge import Judge, Judgement, LocalJudge
from diff_transformer.eval.judge_endpoint import EndpointJudge
from diff_transformer.eval.sources import Source

WORDS = "words"
# How a judge is chosen, with defaults; see `judge_of`.
JUDGE_OPTIONS: dict[str, Any] = {
    "judge": WORDS,
    "judge_model": "",
    "judge_key": "OPENAI_API_KEY",
    "judge_timeout": 60.0,
    "judge_body": {},
}
_WORD = re.compile(r"\w+")


class WordsJudge:
    """Supports an answer all of whose words stand in the document: a stand-in where there is no model to judge.

    Words are compared without their case. It sees no meaning: a copy is always supported, a fair paraphrase is not.
    """

    name = WORDS

    def judge(self, source: Source, answer: str) -> Judgement:
        """Look up every word of the answer."""
        known = set(_WORD.findall(source.document.lower()))
        missing = [word for word in dict.fromkeys(_WORD.findall(answer.lower())) if word not in known]
        return Judgement(supported=not missing, reply=f"not in the document: {', '.join(missing) or 'nothing'}")


def judge_of(options: Mapping[str, Any], device: str | None = None) -> Judge:
    """The judge that options ask for.

    Args:
        options: "judge" is an address that begins with http:// or https:// (an OpenAI-compatible endpoint, with
            "judge_model", the variable "judge_key" that holds its key or "" for none, the seconds "judge_timeout" and
            more fields of the request in "judge_body"), "words" (`WordsJudge`), or a local model's folder.
        device: of a local model; the CPU unless given.

    Raises:
        ValueError: settings that cannot be used, or no such model.
    """
    name = str(options["judge"])
    if name == WORDS:
        return WordsJudge()
    if name.startswith(("http://", "https://")):
        body = options["judge_body"]
        if not isinstance(body, Mapping):
            raise ValueError(f"judge_body is a mapping of fields of the request, got {body!r}.")
        return EndpointJudge(
            name,
            str(options["judge_model"]),
            key_variable=str(options["judge_key"] or "") or None,
            timeout=float(options["judge_timeout"]),
            body=body,
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", use_safetensors=True, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The judge {name!r} is neither an address, nor {WORDS!r}, nor the folder of a model with its tokenizer: "
            f"{' '.join(str(error).split())}"
        ) from None
    return LocalJudge(model.eval().to(device or "cpu"), tokenizer, name)
