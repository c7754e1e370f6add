"""The widget of notebooks: what it shows, answers and refuses, without a notebook."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import diff_transformer
from decoded_maps import decode_maps
from diff_transformer import attention_maps
from explored_models import make

pytest.importorskip("anywidget")

TEXT = "w3 w7 w1 w12 w7 w9"
WORDS = [f"w{number}" for number in range(29)]


def opened(model: Any, **settings: Any) -> tuple[Any, list[Any]]:
    """A widget, and what it sends."""
    widget, sent = diff_transformer.explore(model, WORDS, TEXT, **settings), list[Any]()
    widget.send = lambda content, buffers=None: sent.append((content, buffers or []))
    return widget, sent


@pytest.fixture
def asked() -> Callable[[str, Any], tuple[dict[str, Any], list[bytes]]]:
    """(name, question) → what the widget sends back."""
    widget, sent = opened(make("diff"), compare=make("softmax"), answer=(5, 1, 2))

    def ask(name: str, question: Any) -> Any:
        widget._handle_custom_msg({"id": "7", "name": name, "question": question}, [])
        return sent.pop()

    assert widget.described["examples"][0]["text"] == TEXT
    assert widget.described["examples"][0]["answer"] == {"query": 5, "begin": 1, "end": 2}
    assert widget.described["models"]["right"]["label"] == "Transformer"
    assert "render" in widget._esm
    return ask


def test_it_answers_as_the_server_does(asked: Any) -> None:
    content, buffers = asked("run", {"text": TEXT, "picture": 6})
    assert content["id"] == "7"
    assert content["answer"]["pieces"] == TEXT.split()
    assert not buffers
    content, buffers = asked("map", {"text": TEXT, "layer": 2, "head": 1})
    assert content == {"id": "7"}
    maps, _ = decode_maps(buffers[0])
    tokens = [int(word[1:]) for word in TEXT.split()]
    expected = attention_maps(make("diff"), torch.tensor([tokens]))[1].difference[0, 0]
    torch.testing.assert_close(maps.difference[0].double(), expected, rtol=0, atol=1e-3)


def test_it_refuses_with_a_sentence(asked: Any) -> None:
    assert "no token 'x'" in asked("run", {"text": "x"})[0]["error"]
    assert asked("open", {})[0]["error"] == "There is no question 'open'."


@pytest.mark.parametrize("error", [MemoryError("no space"), KeyboardInterrupt()])
def test_it_answers_whatever_goes_wrong(error: BaseException) -> None:
    """The page waits for an answer to each question, and asks no other before."""
    model = make("diff")
    widget, sent = opened(model)

    def fail(*_: Any) -> Any:
        raise error

    model.model.norm.register_forward_pre_hook(fail)
    with pytest.raises(type(error)):
        widget._answer(widget, {"id": "3", "name": "run", "question": {"text": "w1"}}, [])
    assert sent == [({"id": "3", "error": f"The explorer failed at this: {type(error).__name__} {error}".rstrip()}, [])]


def test_it_says_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "diff_transformer.explorer.widget", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r'explore needs anywidget, .* pip install "\.\[explore\]"'):
        diff_transformer.explore(make("diff"), WORDS, TEXT)


def test_what_explore_refuses() -> None:
    with pytest.raises(ValueError, match="subtracts nothing; give it as compare"):
        diff_transformer.explore(make("softmax"), WORDS, TEXT)
    with pytest.raises(ValueError, match="no token 'x'"):
        diff_transformer.explore(make("diff"), WORDS, "x")
    with pytest.raises(ValueError, match="as the text has 6 tokens"):
        diff_transformer.explore(make("diff"), WORDS, TEXT, answer=(9, 1, 2))
