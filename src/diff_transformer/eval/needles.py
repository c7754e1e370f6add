"""Multi-needle retrieval (Table 2, Figure 5) and attention meanwhile (Table 3), of tokens and in text."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from diff_transformer.data import NeedleDocument, NeedleTask, RetrievalBatches
from diff_transformer.data.needle_batches import padded
from diff_transformer.eval.greedy import greedy_answers
from diff_transformer.eval.retrieval import AttentionMass, AttentionSpans, attention_of_spans, retrieval_answers
from diff_transformer.eval.shares import joint, share_record
from diff_transformer.results import Result, mean_interval

# Where the first queried needle lies, as in the paper.
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
ACCURACY, JOINT, BY_DEPTH = "needles/accuracy", "needles/joint_accuracy", "needles/accuracy_by_depth"
ATTENTION_METHOD = "Student's t over sequences; mean over heads, layers and queries"

Cell = tuple[int, int]  # needles in the context, and how many of them are asked for


def cell_name(cell: Cell) -> str:
    """The group of a cell's records: "N4 R2"."""
    return f"N{cell[0]} R{cell[1]}"


def depth_name(depth: float) -> str:
    """The group of a depth's records: "depth 25 %"."""
    return f"depth {depth:.0%}".replace("%", " %")


def needle_answers(
    model: Any, tokenizer: Any, documents: Sequence[NeedleDocument], batch_size: int = 16
) -> list[list[bool]]:
    """Which numbers stand in the greedy answers: for each document, one for each queried city.

    An answer has as many tokens as the right one and a few more: no room to list what was not asked for.

    Args:
        model: a causal language model of transformers in evaluation mode.
        tokenizer: what the documents were tokenised with.
        documents: with prompts that the model is to go on from.
        batch_size: prompts at a time.

    Raises:
        ValueError: a document is longer than the model's positions.
    """
    longest = max(len(document.tokens) for document in documents)
    if longest > model.config.max_position_embeddings:
        raise ValueError(
            f"A document has {longest} tokens and the model {model.config.max_position_embeddings} positions; "
            "ask for shorter ones."
        )
    room = max(len(document.tokens) - document.prompt_length for document in documents) + 4
    prompts = [document.tokens[: document.prompt_length] for document in documents]
    answers = greedy_answers(model, tokenizer, prompts, room, batch_size)
    texts = (tokenizer.decode(answer) for answer in answers)
    return [[number in text for number in document.numbers] for document, text in zip(documents, texts, strict=True)]


def needle_records(
    model: Any,
    tokenizer: Any,
    task: NeedleTask,
    arm: str,
    *,
    samples: int = 50,
    depths: Sequence[float] = DEPTHS,
    group: str | None = None,
    seed: int = 0,
    batch_size: int = 16,
) -> list[Result]:
    """Accuracy over all depths, for each city and for all of a question's jointly, and by depth.

    Args:
        model: a causal language model of transformers in evaluation mode.
        tokenizer: what `task` was made with.
        task: draws the documents.
        arm: what to call the model in the records.
        samples: documents at each depth.
        depths: where the first queried needle lies.
        group: of the records; "N4 R2" by default.
        seed: of the documents.
        batch_size: documents at a time.
    """
    named = group or cell_name((task.needles, task.queried))
    by_depth = {
        depth: torch.tensor(needle_answers(model, tokenizer, task.sample(samples, seed, depth), batch_size))
        for depth in depths
    }
    return _table_records(torch.cat(list(by_depth.values())), named, arm, seed) + [
        share_record(BY_DEPTH, right, arm=arm, group=f"{named}, {depth_name(depth)}", seed=seed)
        for depth, right in by_depth.items()
    ]


def token_needle_records(
    model: Any, task: RetrievalBatches, arm: str, *, sequences: int = 512, group: str | None = None, seed: int = 0
) -> list[Result]:
    """As `needle_records`, of tokens: needles lie anywhere, and each depth is the fifth of the context around it.

    Given the right answers before it, an answer is right under teacher forcing exactly if greedy decoding gives it; the
    joint accuracy is therefore that of greedy decoding.
    """
    named = group or cell_name((task.num_pairs, task.num_queries))
    sample = task.sample(sequences, seed)
    right = retrieval_answers(model, sample)
    records = _table_records(right, named, arm, seed)
    fifth = (sample.depth[:, 0] * len(DEPTHS)).long().clamp(max=len(DEPTHS) - 1)
    for number, depth in enumerate(DEPTHS):
        here = right[fifth == number, :1]
        if len(here):
            records.append(share_record(BY_DEPTH, here, arm=arm, group=f"{named}, {depth_name(depth)}", seed=seed))
    return records


def _table_records(right: Tensor, group: str, arm: str, seed: int) -> list[Result]:
    return [
        share_record(ACCURACY, right, arm=arm, group=group, seed=seed),
        share_record(JOINT, joint(right), arm=arm, group=group, seed=seed),
    ]


def document_attention(model: Any, documents: Sequence[NeedleDocument], batch_size: int = 4) -> AttentionMass:
    """Attention of the tokens that predict the first token of each number, the right answer before them given.

    On the answer is the attention on all tokens of the number; the needle's other words are neither answer nor noise.

    Args:
        model: as `applied_maps` takes it, in evaluation mode.
        documents: with answers.
        batch_size: documents at a time; all maps of a batch are held at once.
    """
    length = max(len(document.tokens) for document in documents)
    spans = AttentionSpans(
        input_ids=padded(documents, length)["input_ids"],
        query_positions=torch.tensor([document.query_positions for document in documents]),
        answer_spans=torch.tensor([document.answer_spans for document in documents]),
        needle_spans=torch.tensor([document.needle_spans for document in documents]),
        context_lengths=torch.tensor([document.context_length for document in documents]),
    )
    return attention_of_spans(model, spans, batch_size)


def attention_records(masses: Iterable[tuple[str, AttentionMass]], arm: str, seed: int) -> list[Result]:
    """Table 3's two measures by both definitions, for each group: "needles/attention_to_answer_share" and so on."""
    records = []
    for group, mass in masses:
        for kind, part, better in (("attention_to_answer", "answer", "higher"), ("attention_noise", "noise", "lower")):
            for definition in ("signed", "share"):
                values = getattr(mass, f"{part}_{definition}").double().mean(1)
                records.append(
                    Result(
                        name=f"needles/{kind}_{definition}",
                        arm=arm,
                        value=values.mean().item(),
                        interval=mean_interval(values.tolist()),
                        n=len(values),
                        seed=seed,
                        better=better,  # type: ignore[arg-type]  # mypy sees a str
                        group=group,
                        method=ATTENTION_METHOD,
                    )
                )
    return records
