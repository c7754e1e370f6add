"""Table 4's protocol from the document to the record: greedy answers, judges, and what was judged before."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from any_model import any_model
from diff_lab.data import byte_tokenizer
from diff_lab.measure.answers import greedy_answers, prompt_tokens
from diff_lab.measure.hallucination import (
    EndpointJudge,
    Hallucination,
    Judgement,
    Judgements,
    WordsJudge,
    answer_of,
    hallucination_record,
    prompt_of,
)
from diff_lab.measure.measurement import EvalInput, read_options
from diff_lab.measure.question_files import Source
from diff_lab.statistics import proportion_interval
from harness_tasks import write_lines
from tiny_model import SIZES

MODEL: dict[str, Any] = {**SIZES, "vocab_size": 270, "max_position_embeddings": 160, "initializer_range": 0.4}
SOURCES = [
    Source(document="It rains in Bergen.", question="Where?", reference="Bergen"),
    Source(document="It snows."),
    Source(document="The sun shines on Oslo, and it is warm.", question="What shines?"),
]
DIFF = EvalInput(model=None, variant="diff")


class Scripted:
    """A judge that says what a rule gives, and notes what it was asked."""

    name = "scripted"

    def __init__(self, rule: Any = lambda source, answer: True) -> None:
        self.rule, self.asked = rule, []  # type: ignore[var-annotated]

    def judge(self, source: Source, answer: str) -> Judgement:
        self.asked.append((source, answer))
        return Judgement(supported=self.rule(source, answer), reply="said", tokens=12)


@pytest.mark.parametrize(("kind", "pads"), [("diff", True), ("llama", False)])
def test_greedy_answers_are_the_likeliest_tokens(kind: str, pads: bool) -> None:
    """Prompts of different lengths in batches give what each gives alone, token by token without a cache."""
    model, tokenizer = any_model(kind, 3, **MODEL).double(), byte_tokenizer()
    if not pads:
        tokenizer.pad_token = None
    rows = prompt_tokens(model, tokenizer, ["a", "a longer prompt", "not so long"], 12)
    model.generation_config.do_sample = True  # the model's own habits do not count
    model.generation_config.temperature = 9.0
    ends = {tokenizer.eos_token_id}
    expected = [by_hand(model, row, 12, ends) for row in rows]
    # One of the tokens that come ends the text, so that a row stops before the others.
    stop = expected[1][4]
    for extra in (None, [stop]):
        model.generation_config.eos_token_id = extra
        if extra:
            expected = [by_hand(model, row, 12, {*ends, *extra}) for row in rows]
            assert len(expected[1]) <= 4
        for batch_size in (1, 2, 3):
            assert list(greedy_answers(model, tokenizer, rows, 12, batch_size)) == expected


@torch.no_grad()
def by_hand(model: Any, row: list[int], count: int, ends: set[int]) -> list[int]:
    tokens = list(row)
    while len(tokens) < len(row) + count:
        token = int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
        if token in ends:
            break
        tokens.append(token)
    return tokens[len(row) :]


def test_prompts_without_room_are_refused_before_any_work() -> None:
    model, tokenizer = any_model("diff", 3, **MODEL).double(), byte_tokenizer()
    with pytest.raises(ValueError, match=r"1 of 2 prompts are too long: the longest has 151 tokens, .* 160 .* 150 bef"):
        prompt_tokens(model, tokenizer, ["a", "b" * 151], 10)
    assert len(prompt_tokens(model, tokenizer, ["b" * 150], 10)[0]) == 150
    model.config.vocab_size = 100
    with pytest.raises(ValueError, match="tokenizer has 257 tokens, the model only 100"):
        prompt_tokens(model, tokenizer, ["a"], 10)


def test_an_answer_is_a_line_and_a_summary_a_paragraph() -> None:
    question, summary = SOURCES[0], SOURCES[1]
    assert answer_of(question, "  \n Bergen \nQuestion: more") == "Bergen"
    assert answer_of(summary, "\n It snows.\nA lot. \n\nDocument: more") == "It snows.\nA lot."
    assert answer_of(question, " \n") == answer_of(summary, "") == ""
    assert prompt_of(question).endswith("It rains in Bergen.\n\nQuestion about the document: Where?\nAnswer:")
    assert "question" not in prompt_of(summary).lower()


def test_silence_and_replies_without_a_verdict() -> None:
    """A silent answer is not supported; what holds no verdict is left out."""
    supported = {"Bergen": True, " …!": False, "The sun": None}
    judged = [(answer, Judgement(supported=verdict, reply="")) for answer, verdict in supported.items()]
    record = hallucination_record(DIFF, judged, "mine", "scripted")
    assert (record.name, record.variant, record.value, record.n) == ("hallucination/mine", "diff", 0.5, 2)
    assert record.interval == proportion_interval(1, 2)
    assert record.better == "higher"
    assert record.documents == ((1, 1), (0, 1), (0, 0))
    assert "judge: scripted; 1 answers state nothing" in record.method
    assert "1 replies without a verdict are left out" in record.method
    with pytest.raises(ValueError, match="None of the 1 replies of the judge 'scripted' holds a verdict"):
        hallucination_record(DIFF, judged[2:], "mine", "scripted")


def test_nothing_is_asked_twice(tmp_path: Path) -> None:
    path = tmp_path / "judgements.json"

    def failing(source: Source, answer: str) -> bool:
        if answer == "down":
            raise OSError("down")
        return answer == "Bergen"

    judgements = Judgements(Scripted(failing), path)  # type: ignore[arg-type]  # a stand-in
    assert judgements.of(SOURCES[0], "Bergen").supported
    assert not judgements.of(SOURCES[1], "tw\u2028o λ").supported
    with pytest.raises(OSError, match="down"):
        judgements.of(SOURCES[2], "down")
    kept = [(one["answer"], one["supported"], one["judge"]) for one in json.loads(path.read_text()).values()]
    assert kept == [("Bergen", True, "scripted"), ("tw\u2028o λ", False, "scripted")]
    # The same answer about the same document is not asked about again; another one, or of another judge, is.
    judge, other = Scripted(), Scripted()
    other.name = "another"
    again, of_other = Judgements(judge, path), Judgements(other, path)  # type: ignore[arg-type]  # stand-ins
    for source, answer in ((SOURCES[0], "Bergen"), (SOURCES[1], "tw\u2028o λ")):
        assert again.of(source, answer) == judgements.of(source, answer)
    assert judge.asked == []
    again.of(SOURCES[0], "Oslo")
    again.of(Source(document="Another", question="Where?", reference="Bergen"), "Bergen")
    assert len(judge.asked) == 2
    of_other.of(SOURCES[0], "Bergen")
    assert len(other.asked) == 1
    # `again` and `of_other` are two commands with one file: neither loses what the other paid for.
    assert len(json.loads(path.read_text())) == 5


@pytest.mark.parametrize("foreign", ["[1]", '{"text": "a"}', '{"key": {"supported": 1.5, "reply": "x"}}'])
def test_foreign_files_of_judgements_are_left_alone(foreign: str, tmp_path: Path) -> None:
    path = tmp_path / "j.json"
    path.write_text(foreign)
    with pytest.raises(ValueError, match=r"j\.json holds no judgements"):
        Judgements(WordsJudge(), path)
    assert path.read_text() == foreign


def test_words_are_looked_up() -> None:
    judge = WordsJudge()
    assert judge.judge(SOURCES[0], "bergen: it RAINS!").supported is True
    judgement = judge.judge(SOURCES[0], "It rains in Oslo, not Bergen, not ever.")
    assert (judgement.supported, judgement.reply) == (False, "not in the document: oslo, not, ever")


def test_judges_are_chosen_by_what_they_are_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def chosen(**options: Any) -> Any:
        judge, _ = read_options(Hallucination, {"sources": str(sources), **options}, "It").check(None, None)
        return judge

    sources = write_lines(tmp_path / "sources.jsonl", [{"document": "It rains."}])
    assert isinstance(chosen(), WordsJudge)
    monkeypatch.setenv("JUDGE_KEY", "sk-a")
    endpoint = chosen(judge="https://host/v1", judge_model="m", judge_key="JUDGE_KEY", judge_body={"seed": 1})
    assert isinstance(endpoint, EndpointJudge)
    assert (endpoint.url, endpoint.model) == ("https://host/v1", "m")
    assert endpoint.name == 'm {"max_tokens": 300, "seed": 1, "temperature": 0}'
    chosen(judge="http://host", judge_model="m", judge_key=None)  # as the command line reads "judge_key="
    with pytest.raises(FileNotFoundError, match="The folder of judgements='none/j' does not exist"):
        chosen(judgements="none/j")
    with pytest.raises(ValueError, match="A judge is 'words' or an address with http:// or https://, got 'nowhere'"):
        chosen(judge="nowhere")


@pytest.mark.parametrize("kind", ["diff", "llama"])
def test_the_measure_runs_on_any_checkpoint(kind: str, tmp_path: Path) -> None:
    for name in ("first", "second"):
        lines = [{"document": source.document, "question": source.question} for source in SOURCES]
        write_lines(tmp_path / f"{name}.jsonl", lines[: 2 if name == "first" else 3])
    options = {
        "sources": f"{tmp_path / 'first.jsonl'}, {tmp_path / 'second.jsonl'}",
        "judgements": str(tmp_path / "judgements.json"),
        "new_tokens": 8,
    }
    measured = EvalInput(model=any_model(kind, 3, **MODEL).double(), variant=kind, tokenizer=byte_tokenizer())
    records = Hallucination(**options).run(measured)
    shares = [record for record in records if record.name.count("/") == 1]
    assert [(record.name, record.n) for record in shares] == [("hallucination/first", 2), ("hallucination/second", 3)]
    assert Hallucination(**options).run(measured) == records
    kept = json.loads((tmp_path / "judgements.json").read_text()).values()
    tokenizer, answers = byte_tokenizer(), []
    for source in SOURCES:  # the answers are the model's own, and those that state nothing are not judged
        tokens = by_hand(measured.model, tokenizer(prompt_of(source))["input_ids"], 8, {tokenizer.eos_token_id})
        answers.append(answer_of(source, tokenizer.decode(tokens, skip_special_tokens=True)))
    assert [one["answer"] for one in kept] == [answer for answer in answers if any(map(str.isalnum, answer))]
    assert kept
    with pytest.raises(ValueError, match="has no tokenizer"):
        Hallucination(**options).run(replace(measured, tokenizer=None))
    for sources in ("", " , ", f"{tmp_path / 'first.jsonl'},{tmp_path / 'first.jsonl'}"):
        with pytest.raises(ValueError, match="files of documents, each once"):
            Hallucination(**{**options, "sources": sources}).run(measured)
