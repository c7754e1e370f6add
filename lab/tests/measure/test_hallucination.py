"""Table 4's protocol from the document to the record: greedy answers, judges, and what was judged before."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from diff_lab.data import byte_tokenizer
from diff_lab.measure import hallucination
from diff_lab.measure.decoding import greedy_answers, prompt_tokens
from diff_lab.measure.hallucination import (
    Account,
    Hallucination,
    Judgements,
    answer_of,
    hallucination_records,
    judged_answers,
    prompt_of,
)
from diff_lab.measure.judge import (
    TASK,
    EndpointJudge,
    JudgeError,
    Judgement,
    JudgeOptions,
    LocalJudge,
    WordsJudge,
    evidence,
    judge_of,
)
from diff_lab.measure.measurement import EvalInput, read_options
from diff_lab.measure.question_files import Source
from diff_lab.statistics import proportion_interval
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from harness_tasks import write_lines
from tiny_model import SIZES

MODEL: dict[str, Any] = {**SIZES, "vocab_size": 270, "max_position_embeddings": 160, "initializer_range": 0.4}
SOURCES = [
    Source(document="It rains in Bergen.", question="Where?", reference="Bergen"),
    Source(document="It snows."),
    Source(document="The sun shines on Oslo, and it is warm.", question="What shines?"),
]
DIFF = EvalInput(model=None, variant="diff")


def make(kind: str, seed: int = 3) -> Any:
    torch.manual_seed(seed)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**MODEL)).double().eval()
    return DiffTransformerForCausalLM(DiffTransformerConfig(attention_type=kind, **MODEL)).double().eval()


class Scripted:
    """A judge that says what a rule gives, and notes what it was asked."""

    name = "scripted"

    def __init__(self, rule: Any = lambda source, answer: True) -> None:
        self.rule, self.asked = rule, []  # type: ignore[var-annotated]

    def judge(self, source: Source, answer: str) -> Judgement:
        self.asked.append((source, answer))
        return Judgement(supported=self.rule(source, answer), reply="said", prompt_tokens=10, reply_tokens=2)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the model is made to write, in place of what weights without training do."""
    texts = ["Bergen\nQuestion: next", "Snow falls.\n\nDocument:", "The sun"]

    def write(model: Any, tokenizer: Any, rows: Any, *args: Any) -> Iterator[list[int]]:
        for text in texts[: len(rows)]:
            yield tokenizer(text)["input_ids"]

    monkeypatch.setattr(hallucination, "greedy_answers", write)
    return texts


@pytest.mark.parametrize("kind", ["diff", "llama"])
@pytest.mark.parametrize("pads", [True, False])
def test_greedy_answers_are_the_likeliest_tokens(kind: str, pads: bool) -> None:
    """Prompts of different lengths in batches give what each gives alone, token by token without a cache."""
    model, tokenizer = make(kind), byte_tokenizer()
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
    model, tokenizer = make("diff"), byte_tokenizer()
    with pytest.raises(ValueError, match=r"1 of 2 prompts are too long: the longest has 151 tokens, .* 160 .* 150 bef"):
        prompt_tokens(model, tokenizer, ["a", "b" * 151], 10)
    assert len(prompt_tokens(model, tokenizer, ["b" * 150], 10)[0]) == 150
    with pytest.raises(ValueError, match="A prompt has no tokens"):
        prompt_tokens(model, tokenizer, ["a", ""], 10)
    model.config.vocab_size = 100
    with pytest.raises(ValueError, match="tokenizer has 257 tokens, the model only 100"):
        prompt_tokens(model, tokenizer, ["a"], 10)
    judge = Scripted()
    long = Source(document="x" * 200)
    with pytest.raises(ValueError, match="too long"):
        list(judged_answers(make("diff"), tokenizer, [*SOURCES, long], Judgements(judge), new_tokens=16))
    assert judge.asked == []


def test_an_answer_is_a_line_and_a_summary_a_paragraph() -> None:
    question, summary = SOURCES[0], SOURCES[1]
    assert answer_of(question, "  \n Bergen \nQuestion: more") == "Bergen"
    assert answer_of(summary, "\n It snows.\nA lot. \n\nDocument: more") == "It snows.\nA lot."
    assert answer_of(question, " \n") == answer_of(summary, "") == ""
    assert prompt_of(question).endswith("It rains in Bergen.\n\nQuestion about the document: Where?\nAnswer:")
    assert "question" not in prompt_of(summary).lower()


def test_silence_is_not_support(written: list[str], tmp_path: Path) -> None:
    written[1] = " …!\n\nSnow"
    judge = Scripted(lambda source, answer: None if answer == "The sun" else True)
    for _ in "12":  # a reply without a verdict is kept as well
        judgements = Judgements(judge, tmp_path / "judgements.jsonl")
        judged = list(judged_answers(make("diff"), byte_tokenizer(), SOURCES, judgements, new_tokens=8))
        assert [judgement.supported for _, judgement in judged] == [True, False, None]
        assert [answer for _, answer in judge.asked] == ["Bergen", "The sun"]
    (record,) = hallucination_records(DIFF, judged, "mine", judge.name)[:1]
    assert (record.name, record.variant, record.value, record.n) == ("hallucination/mine", "diff", 0.5, 2)
    assert record.interval == proportion_interval(1, 2)
    assert record.better == "higher"
    assert record.documents == ((1, 1), (0, 1), (0, 0))
    silent = hallucination_records(DIFF, judged, "mine", judge.name)[1]
    assert (silent.name, silent.value, silent.n) == ("hallucination/mine/silent_answers", 1 / 3, 3)
    cost = hallucination_records(DIFF, judged, "mine", judge.name)[2]
    assert (cost.name, cost.value, cost.unit) == ("hallucination/mine/judge_tokens", 24, "tokens")
    assert "judge: scripted; 1 answers state nothing" in record.method
    assert "1 replies without a verdict are left out" in record.method
    with pytest.raises(ValueError, match="None of the 2 replies of the judge 'scripted' holds a verdict"):
        hallucination_records(DIFF, [("a", Judgement(supported=None, reply="said"))] * 2, "mine", "scripted")


def test_nothing_is_asked_twice(tmp_path: Path, written: list[str]) -> None:
    path = tmp_path / "judgements.jsonl"
    arguments = (make("diff"), byte_tokenizer(), SOURCES)

    def failing(source: Source, answer: str) -> bool:
        if answer == "The sun":
            raise JudgeError("down")
        return answer == "Bergen"

    judge = Scripted(failing)
    with pytest.raises(JudgeError, match="down"):
        list(judged_answers(*arguments, Judgements(judge, path), new_tokens=8))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["answer"], line["supported"], line["judge"]) for line in lines] == [
        ("Bergen", True, "scripted"),
        ("Snow falls.", False, "scripted"),
    ]
    judge = Scripted()
    judgements = Judgements(judge, path)
    judged = list(judged_answers(*arguments, judgements, new_tokens=8))
    assert [judgement.supported for _, judgement in judged] == [True, False, True]
    assert [answer for _, answer in judge.asked] == ["The sun"]
    assert judgements.account == Account(1, 2, 10, 2, judgements.account.seconds)
    summary = "1 judgements asked for and 2 kept from before; 10 tokens read and 2 written in 0 s"
    assert str(judgements.account) == summary
    # The same answer about the same document is not asked about again; another one, or of another judge, is.
    judgements.of(SOURCES[0], "Bergen")
    assert len(judge.asked) == 1
    judgements.of(SOURCES[0], "Oslo")
    judgements.of(Source(document="Another", question="Where?", reference="Bergen"), "Bergen")
    assert len(judge.asked) == 3
    other = Scripted()
    other.name = "another"
    Judgements(other, path).of(SOURCES[0], "Bergen")
    assert len(other.asked) == 1


def test_half_a_line_is_asked_again_and_foreign_files_are_left_alone(tmp_path: Path) -> None:
    path, answers = tmp_path / "j.jsonl", ["one", "tw\u2028o", "\ud83d"]
    judgements = Judgements(Scripted(), path)
    for answer in answers:
        judgements.of(SOURCES[0], answer)
    complete = path.read_bytes()
    path.write_bytes(complete[:-20])
    judge = Scripted()
    again = Judgements(judge, path)
    for answer in answers:
        again.of(SOURCES[0], answer)
    assert [answer for _, answer in judge.asked] == ["\ud83d"]
    assert [json.loads(line)["key"] for line in path.read_bytes().splitlines()] == [
        json.loads(line)["key"] for line in complete.splitlines()
    ]
    for foreign in ('{"text": "a"}', "hello", "[1]", '{"key": "a", "supported": 1.5, "reply": "x"}'):
        path.write_text(f"{foreign}\n")
        with pytest.raises(ValueError, match="line 1 is no judgement"):
            Judgements(judge, path)
        assert path.read_text() == f"{foreign}\n"
    with pytest.raises(FileNotFoundError, match=r"^The folder of the file of judgements .* does not exist"):
        Judgements(judge, tmp_path / "none" / "j.jsonl")


def test_a_local_judge_compares_two_words() -> None:
    model, tokenizer = make("llama"), byte_tokenizer()
    model.config.max_position_embeddings = 1000
    judge = LocalJudge(model, tokenizer, "mine")
    assert judge.name == "mine (yes or no by likelihood)"
    judgement = judge.judge(SOURCES[0], "Bergen")
    question = (
        f"{TASK}\n\n{evidence(SOURCES[0], 'Bergen')}\n\nDoes everything in the answer follow from the document? "
        "Reply with yes or no.\nReply:"
    )
    scores = {}
    for word in ("yes", "no"):
        tokens = tokenizer(f"{question} {word}")["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        positions = range(len(tokens) - len(word) - 1, len(tokens))
        scores[word] = sum(float(logits[position - 1, tokens[position]]) for position in positions)
    assert judgement.supported == (scores["yes"] > scores["no"])
    assert float(judgement.reply.rpartition("=")[2]) == pytest.approx(scores["yes"] - scores["no"], abs=1e-3)
    assert judgement.prompt_tokens == len(question.encode())


def test_a_local_judge_that_chats_is_asked_in_its_own_form() -> None:
    model, tokenizer = make("llama"), byte_tokenizer()
    model.config.max_position_embeddings = 1000
    tokenizer.chat_template = (
        "{% for message in messages %}<u>{{ message.content }}</u>{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    read: list[Any] = []
    model.register_forward_pre_hook(lambda _, args, named: read.append(named["input_ids"]), with_kwargs=True)
    LocalJudge(model, tokenizer, "mine").judge(SOURCES[0], "Bergen")
    question, replies = read
    assert tokenizer.decode(question[0]).startswith("<u>You compare")
    assert tokenizer.decode(question[0]).endswith("</u><a>")
    # The last letter of "yes" is predicted, never read.
    assert [tokenizer.decode(row) for row in replies] == ["ye", "no"]


def test_a_local_judge_with_a_short_context_says_so() -> None:
    judge = LocalJudge(make("llama"), byte_tokenizer(), "mine")
    with pytest.raises(JudgeError, match="has room for 160; have the documents cut"):
        judge.judge(SOURCES[0], "Bergen")


def test_words_are_looked_up() -> None:
    judge = WordsJudge()
    assert judge.judge(SOURCES[0], "bergen: it RAINS!").supported is True
    judgement = judge.judge(SOURCES[0], "It rains in Oslo, not Bergen, not ever.")
    assert (judgement.supported, judgement.reply) == (False, "not in the document: oslo, not, ever")


def test_judges_are_chosen_by_what_they_are_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def chosen(**options: Any) -> Any:
        return judge_of(read_options(JudgeOptions, options, "It"))

    assert isinstance(chosen(), WordsJudge)
    monkeypatch.setenv("JUDGE_KEY", "sk-a")
    endpoint = chosen(judge="https://host/v1", judge_model="m", judge_key="JUDGE_KEY", judge_body={"seed": 1})
    assert isinstance(endpoint, EndpointJudge)
    assert (endpoint.url, endpoint.model) == ("https://host/v1", "m")
    assert endpoint.name == 'm {"max_tokens": 300, "seed": 1, "temperature": 0}'
    for none in ("", None):  # the command line reads nothing behind "judge_key=" as null
        chosen(judge="http://host", judge_model="m", judge_key=none)
    with pytest.raises(ValueError, match="cannot take 'x' for judge_body"):
        chosen(judge="http://host", judge_model="m", judge_key="", judge_body="x")
    with pytest.raises(ValueError, match="nowhere' is neither an address, nor 'words', nor the folder of a model"):
        chosen(judge=str(tmp_path / "nowhere"))
    make("llama").float().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    local = chosen(judge=str(tmp_path))
    assert isinstance(local, LocalJudge)
    local.model.config.max_position_embeddings = 1000
    assert local.judge(SOURCES[0], "Bergen").supported in (True, False)


@pytest.mark.parametrize("kind", ["diff", "llama"])
def test_the_measure_runs_on_any_checkpoint(kind: str, tmp_path: Path) -> None:
    for name in ("first", "second"):
        lines = [{"document": source.document, "question": source.question} for source in SOURCES]
        write_lines(tmp_path / f"{name}.jsonl", lines[: 2 if name == "first" else 3])
    options = {
        "sources": f"{tmp_path / 'first.jsonl'}, {tmp_path / 'second.jsonl'}",
        "judgements": str(tmp_path / "judgements.jsonl"),
        "new_tokens": 8,
    }
    measured = EvalInput(model=make(kind), variant=kind, tokenizer=byte_tokenizer())
    records = Hallucination(**options).run(measured)
    shares = [record for record in records if record.name.count("/") == 1]
    assert [(record.name, record.n) for record in shares] == [("hallucination/first", 2), ("hallucination/second", 3)]
    assert Hallucination(**options).run(measured) == records
    lines = [json.loads(line) for line in (tmp_path / "judgements.jsonl").read_text().splitlines()]
    assert len({line["key"] for line in lines}) == len(lines)
    tokenizer, answers = byte_tokenizer(), []
    for source in SOURCES:  # the answers are the model's own, and those that state nothing are not judged
        tokens = by_hand(measured.model, tokenizer(prompt_of(source))["input_ids"], 8, {tokenizer.eos_token_id})
        answers.append(answer_of(source, tokenizer.decode(tokens, skip_special_tokens=True)))
    assert [line["answer"] for line in lines] == [answer for answer in answers if any(map(str.isalnum, answer))]
    assert lines
    with pytest.raises(ValueError, match="has no tokenizer"):
        Hallucination(**options).run(replace(measured, tokenizer=None))
    for sources in ("", " , ", f"{tmp_path / 'first.jsonl'},{tmp_path / 'first.jsonl'}"):
        with pytest.raises(ValueError, match="Name documents, each once"):
            Hallucination(**{**options, "sources": sources}).run(measured)
