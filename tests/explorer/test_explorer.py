"""Questions of the page and their answers: numbers, refusals, and two readers at once."""

import base64
import json
import threading
from typing import Any

import pytest
import torch

from decoded_maps import decode_maps
from diff_lab.data import byte_tokenizer
from diff_transformer import attention_maps
from diff_transformer.explorer import Example, ExploredModel, Explorer, Side, TokenizerVocabulary, WordVocabulary
from explored_models import ANSWER, TEXT, TOKENS, make


def probabilities(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0, -1].detach().softmax(-1)


def test_what_the_page_reads_first(explorer: Explorer) -> None:
    described = explorer.describe()
    assert json.loads(json.dumps(described)) == described
    left = described["models"]["left"]
    assert (left["label"], left["layers"], left["heads"], left["kv_heads"]) == ("DIFF", 2, 4, 2)
    assert described["models"]["right"]["label"] == "Transformer"
    assert {model["noise_heads"] for model in described["models"].values()} == {None}
    assert described["shared_vocabulary"]
    assert described["examples"] == [{"title": "an example", "text": TEXT, "answer": ANSWER}]
    assert explorer.example({"seed": 2})["title"] == "example 2"


def test_a_run_with_the_learned_lambda(explorer: Explorer) -> None:
    answer = explorer.run({"text": TEXT})
    assert answer["tokens"] == TOKENS
    assert answer["pieces"] == TEXT.split()
    assert answer["divergence"] == 0
    assert answer["loss"] == answer["learned_loss"]
    expected = probabilities(make("diff"), TOKENS)
    assert len(answer["next"]) == 10
    for entry, token in zip(answer["next"], expected.topk(10).indices.tolist(), strict=True):
        assert (entry["token"], entry["piece"]) == (token, f"w{token}")
        assert entry["probability"] == entry["learned_probability"] == pytest.approx(expected[token].item(), rel=1e-6)
    assert "heads" not in answer
    assert "answer_share" not in answer


def test_a_run_with_another_lambda(explorer: Explorer) -> None:
    question = {"tokens": TOKENS, "lambdas": {"layers": {"1": 0.1}}, "answer": ANSWER, "picture": 8}
    answer = explorer.run(question)
    model = make("diff")
    learned = probabilities(model, TOKENS)
    for vector in model.model.layers[0].self_attn.lam.parameters():
        torch.nn.init.zeros_(vector)
    model.model.layers[0].self_attn.lam.lambda_init = 0.1
    now = probabilities(model, TOKENS)
    assert answer["divergence"] == pytest.approx((learned * (learned / now).log()).sum().item(), rel=1e-6)
    assert len(answer["next"]) >= 10
    for entry in answer["next"]:
        assert entry["probability"] == pytest.approx(now[entry["token"]].item(), rel=1e-6)
        assert entry["learned_probability"] == pytest.approx(learned[entry["token"]].item(), rel=1e-6)
    rows = torch.stack([maps.difference[0, :, 10].abs() for maps in attention_maps(model, torch.tensor([TOKENS]))])
    shares = rows[..., 1] / rows.sum(-1)
    assert answer["answer_share"] == pytest.approx(shares.mean().item(), rel=1e-5)
    assert answer["answer_share"] != pytest.approx(answer["learned_answer_share"])
    assert torch.tensor(answer["heads"]["on_answer"]) == pytest.approx(shares, rel=1e-5)
    assert answer["heads"]["picture_size"] == 6
    assert len(base64.b64decode(answer["heads"]["pictures"])) == 2 * 4 * 6 * 6
    assert json.loads(json.dumps(answer)) == answer


def test_the_map_of_a_head(explorer: Explorer) -> None:
    question = {"text": TEXT, "layer": 2, "head": 3}
    maps, _ = decode_maps(explorer.head_map(question))
    expected = attention_maps(make("diff"), torch.tensor([TOKENS]))[1]
    torch.testing.assert_close(maps.difference[0].double(), expected.difference[0, 2], rtol=0, atol=1e-3)
    row, first = decode_maps(explorer.head_map({**question, "first_row": 9}))
    assert first == 9
    torch.testing.assert_close(row.first, maps.first[:, 9:])
    single, _ = decode_maps(explorer.head_map({**question, "side": "right"}))
    assert single.second is None


def test_generation(explorer: Explorer) -> None:
    """The most likely token; a drawn one is the same for the same seed."""
    tokens = list(TOKENS)
    for _ in range(3):
        tokens.append(explorer.next_token({"side": "left", "tokens": tokens})["token"])
    model = make("diff")
    expected = model.generate(torch.tensor([TOKENS]), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert tokens == expected[0].tolist()
    drawn = [explorer.next_token({"tokens": TOKENS, "temperature": 3.0, "seed": seed}) for seed in range(20)]
    assert drawn == [explorer.next_token({"tokens": TOKENS, "temperature": 3.0, "seed": seed}) for seed in range(20)]
    assert len({each["token"] for each in drawn}) > 3


REFUSED_RUNS: list[tuple[Any, str]] = [
    ([], "must be a JSON object"),
    ({"text": TEXT, "tokens": [1]}, 'either "text" or "tokens"'),
    ({"text": 7}, "text must be a string, got int"),
    ({"text": " "}, "no tokens"),
    ({"text": "w3 <script>alert(1)</script>"}, "no token '<script>alert"),
    ({"text": "w3 " * 65}, "65 tokens, and the context of tiny-diff holds 64"),
    ({"tokens": "w3"}, "must be lists of numbers"),
    ({"tokens": [-1]}, "numbers in 0 … 28, got -1"),
    ({"tokens": [True]}, "numbers in 0 … 28, got True"),
    ({"text": TEXT, "side": ["left"]}, r"side must be 'left' or 'right', got \['left'\]"),
    ({"text": TEXT, "lambdas": {"heads": {"2": 0}}}, r"lambdas must be like .*got {'heads': {'2': 0}}"),
    ({"text": TEXT, "lambdas": {"layers": [0.5]}}, "lambdas must be like"),
    ({"text": TEXT, "lambdas": {"factor": float("nan")}}, "lambdas must be like"),
    ({"text": TEXT, "lambdas": {"factor": 11}}, "at most 10 in size; got {'factor': 11}"),
    ({"text": TEXT, "lambdas": {"every": 1}}, "lambdas must be like"),
    ({"text": TEXT, "lambdas": {"layers": {"3": 1}}}, "head 1 of layer 3, but the model has layers 1 … 2"),
    ({"text": TEXT, "lambdas": {"heads": {"1.5": 1}}}, "head 5 of layer 1"),
    ({"text": TEXT, "side": "right", "lambdas": {"factor": 0.5}}, "tiny-softmax subtracts nothing"),
    ({"text": TEXT, "picture": 1000}, "picture must be a whole number in 1 … 128"),
    ({"text": TEXT, "answer": {"query": 99, "begin": 0, "end": 1}}, "as the text has 11 tokens"),
    ({"text": TEXT, "answer": {"query": 3, "begin": True, "end": 2}}, "answer must have"),
    ({"text": TEXT, "answer": {"query": 3, "begin": 2, "end": 2}}, "begin < end ≤ query"),
]
REFUSED_MAPS: list[tuple[Any, str]] = [
    ({"layer": 0, "head": 1}, "layer must be a whole number in 1 … 2, got 0"),
    ({"layer": 1}, "head must be a whole number in 1 … 4, got None"),
    ({"layer": 1, "head": 1, "first_row": 11}, "first_row must be a whole number in 0 … 10"),
]
REFUSED_TOKENS: list[tuple[Any, str]] = [({"temperature": -1}, "in 0 … 10"), ({"seed": -1}, "seed must be")]


@pytest.mark.parametrize(
    ("name", "question", "message"),
    [
        *(("run", *case) for case in REFUSED_RUNS),
        *((name, [], "must be a JSON object") for name in ("strip", "example", "head_map", "next_token")),
        *(("head_map", {"text": TEXT, **question}, message) for question, message in REFUSED_MAPS),
        *(("next_token", {"text": TEXT, **question}, message) for question, message in REFUSED_TOKENS),
    ],
)
def test_what_is_refused(explorer: Explorer, name: str, question: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(explorer, name)(question)


def test_readers_at_once_do_not_disturb_each_other(explorer: Explorer) -> None:
    settings = [None, {"factor": 0.0}, {"layers": {"2": 0.7}}, {"heads": {"1.1": -0.3}}]
    expected = [explorer.run({"text": TEXT, "lambdas": each})["loss"] for each in settings]
    assert len(set(expected)) == len(expected)
    for number in range(70):  # few are kept
        explorer.run({"tokens": [number % 29, number // 29]})
    assert len(explorer._kept) == 64
    seen: dict[int, list[float]] = {index: [] for index in range(len(settings))}

    def read(index: int) -> None:
        for _ in range(5):
            seen[index].append(explorer.run({"text": TEXT, "lambdas": settings[index]})["loss"])
            with explorer._running:
                explorer._kept.clear()

    threads = [threading.Thread(target=read, args=(index,)) for index in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [set(losses) for losses in seen.values()] == [{loss} for loss in expected]


@pytest.mark.parametrize("text", ["<script>alert('é')</script>", "a\x00\x07\x1b[31m\u202e", "\U0001f600 ¿", "\ufffd"])
def test_hostile_text_comes_back_as_it_was(text: str) -> None:
    tokenizer = byte_tokenizer()
    model = ExploredModel(make("diff", vocab_size=len(tokenizer)), "bytes")
    answer = Explorer(Side(model, TokenizerVocabulary(tokenizer))).run({"text": text})
    assert tokenizer.decode(answer["tokens"]) == text
    assert len(answer["pieces"]) == len(answer["tokens"])
    assert all(answer["pieces"])


def test_vocabularies() -> None:
    tokenizer = byte_tokenizer()
    bytes_ = TokenizerVocabulary(tokenizer)
    assert "".join(bytes_.pieces(bytes_.encode("two words"))) == "two words"
    assert bytes_.pieces(bytes_.encode("é☃x")) == ["<0xC3>", "é", "<0xE2>", "<0x98>", "☃", "x"]
    for vocabulary in (bytes_, WordVocabulary(["a", "b"])):  # a model may have more tokens
        assert vocabulary.piece_after([0], 500) == "#500"
    assert WordVocabulary(["a", "b"]).decode([1, 0]) == "b a"
    assert bytes_.decode(bytes_.encode("é ☃")) == "é ☃"
    with pytest.raises(ValueError, match="no token 'key'"):
        WordVocabulary(["?", "k1"]).encode("key")


def test_a_model_that_gives_nan_is_refused_with_a_sentence() -> None:
    model = make("diff")
    with torch.no_grad():
        model.lm_head.weight[3, 2] = torch.nan
    explorer = Explorer(Side(ExploredModel(model, "broken"), WordVocabulary([f"w{number}" for number in range(29)])))
    with pytest.raises(ValueError, match="broken gives NaN for this text"):
        explorer.run({"text": "w1 w2"})


def test_the_strip_of_a_text_is_the_probability_of_its_answer(explorer: Explorer) -> None:
    """Of what is likeliest as learned, where no answer is marked."""
    for factor in explorer.describe()["strip"]["factors"]:
        run = explorer.run({"text": TEXT, "answer": ANSWER, "lambdas": {"factor": factor}})
        point = explorer.strip({"text": TEXT, "answer": ANSWER, "factor": factor})
        assert point == {"value": run["answer_probability"], "piece": "w7"}
        likeliest = max(run["next"], key=lambda entry: entry["learned_probability"])
        assert explorer.strip({"text": TEXT, "factor": factor}) == {
            "value": likeliest["probability"],
            "piece": likeliest["piece"],
        }
    with pytest.raises(ValueError, match="lambdas must be like"):
        explorer.strip({"text": TEXT, "factor": "2"})


def test_the_strip_of_a_task_is_the_models_accuracy(explorer: Explorer, questions: list[Example]) -> None:
    """With the factor in all layers; no text is asked for."""
    task, accuracies = Explorer(explorer.sides["left"], questions=questions, floor=0.25), []
    assert task.describe()["strip"]["task"] == {"sequences": 30, "floor": 0.25}
    for factor in (0.0, 1.0):
        right = 0
        for one in questions:
            run = explorer.run({"text": one.text, "answer": vars(one.answer), "lambdas": {"factor": factor}})
            right += one.answer is not None and run["next"][0]["token"] == run["tokens"][one.answer.begin]
        accuracies.append(right / 30)
        assert task.strip({"factor": factor}) == {"value": accuracies[-1]}
    assert accuracies[0] < accuracies[1]


def test_what_would_take_long_is_not_measured(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diff_transformer.explorer.explored_model.LONG_WORK", 1000)
    assert explorer.describe()["opening"] is not None
    large = Explorer(explorer.sides["left"], examples=explorer.examples)
    assert large.describe()["opening"] is None
    assert large.strip({"text": TEXT, "factor": 0.5}) == {"value": None}
