"""What a judge has said, kept line by line, so that nothing is asked twice."""

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diff_transformer.eval.judge import FORM, TASK, Judge, Judgement, evidence
from diff_transformer.eval.sources import Source
from diff_transformer.files import parse_json


@dataclass
class Account:
    """What the judging cost so far.

    Attributes:
        asked: judgements that were asked for.
        kept: judgements that an earlier run had asked for, or that were asked for about the same answer before.
        prompt_tokens, reply_tokens: what the judge read and wrote for those that were asked for, if it tells.
        seconds: how long they took.
    """

    asked: int = 0
    kept: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.asked:,} judgements asked for and {self.kept:,} kept from before; {self.prompt_tokens:,} tokens "
            f"read and {self.reply_tokens:,} written in {self.seconds:,.0f} s"
        )


class Judgements:
    """A judge with a memory.

    Args:
        judge: who is asked.
        path: the .jsonl file of all judgements, which may exist: each is added, and on the disk, as soon as it is
            made. A line holds the judge's name, what the judgement is of, the reply and what it cost. None keeps
            nothing. Two processes that use one file at once lose nothing but may ask the same.
        tell: is told the account after each judgement.

    Raises:
        FileNotFoundError: the file's folder does not exist.
        ValueError: the file holds something else; names the line.
    """

    def __init__(self, judge: Judge, path: Path | None = None, tell: Callable[[Account], None] | None = None) -> None:
        self.judge, self.path, self.account = judge, path, Account()
        self._tell = tell
        self._known = {} if path is None else _read(path)

    def of(self, source: Source, answer: str) -> Judgement:
        """The judgement of one answer, asked for where it is not known.

        Raises:
            JudgeError: as the judge.
        """
        key = _key(self.judge.name, source, answer)
        known = self._known.get(key)
        if known is not None:
            self.account.kept += 1
        else:
            begun = time.monotonic()
            known = self._known[key] = self.judge.judge(source, answer)
            seconds = time.monotonic() - begun
            self.account.asked += 1
            self.account.prompt_tokens += known.prompt_tokens
            self.account.reply_tokens += known.reply_tokens
            self.account.seconds += seconds
            if self.path is not None:
                self._append(key, source, answer, known, seconds)
        if self._tell is not None:
            self._tell(self.account)
        return known

    def _append(self, key: str, source: Source, answer: str, judgement: Judgement, seconds: float) -> None:
        line = {
            "key": key,
            "judge": self.judge.name,
            "question": source.question,
            "answer": answer,
            **vars(judgement),
            "seconds": round(seconds, 3),
        }
        assert self.path is not None
        with self.path.open("ab") as file:
            file.write(json.dumps(line, ensure_ascii=True).encode() + b"\n")


def _key(judge: str, source: Source, answer: str) -> str:
    """Names one judgement: who is asked, and all that is shown."""
    return hashlib.sha256(json.dumps([judge, TASK, FORM, evidence(source, answer)]).encode()).hexdigest()


def _read(path: Path) -> dict[str, Judgement]:
    if not path.parent.is_dir():
        raise FileNotFoundError(f"The judgements {str(path)!r} have no folder to lie in.")
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):  # a kill in the middle of a line: that judgement is asked for again
        with path.open("r+b") as file:
            file.truncate(whole)
    lines = data[:whole].split(b"\n")[:-1]
    return dict(_judgement_of_line(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1))


def _judgement_of_line(line: bytes, where: str) -> tuple[str, Judgement]:
    try:
        fields: dict[str, Any] = parse_json(line, where)
        supported, reply = fields["supported"], fields["reply"]
        if supported not in (True, False, None) or not isinstance(reply, str):
            raise TypeError
        judgement = Judgement(
            supported=supported,
            reply=reply,
            prompt_tokens=int(fields["prompt_tokens"]),
            reply_tokens=int(fields["reply_tokens"]),
        )
        return str(fields["key"]), judgement
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{where} is no judgement; name a new file, or one that this command has written.") from None
