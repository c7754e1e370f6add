"""The loss without whole logits: that of the logits, in float64, and every gradient of it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diff_transformer.model import chunked_loss as model_loss
from diff_transformer.model.chunked_loss import chunked_cross_entropy, is_plain_linear
from tiny_model import SIZES, answers, check_answers, make, tokens
from tiny_model import check_rounding as check

pytestmark = pytest.mark.usefixtures("poisoned_memory")

VOCABULARY = SIZES["vocab_size"]


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens at a time: of 18, the last chunk is a rest."""
    monkeypatch.setattr(model_loss, "CORE_LOGITS", 4 * VOCABULARY)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any step makes."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.size = max([self.size, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
        return out


class Wrapped(nn.Module):
    """A head that is no ordinary one, as PEFT makes them."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.head(x)
        return out


def some_labels(inputs: Tensor) -> Tensor:
    """A third of them not to be predicted, those of a whole chunk among them."""
    labels = inputs.masked_fill(torch.rand(inputs.shape) < 0.3, -100)
    labels[0, 4:9] = -100
    return labels


def exact(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum, in the dtype of the logits: transformers' own is in float32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


@pytest.mark.parametrize("head", ["ordinary", "wrapped"])
@pytest.mark.parametrize("items", [None, 13, torch.tensor(13)], ids=["mean", "a number", "a tensor"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_loss_and_gradients(tied: bool, items: Any, head: str) -> None:
    model, inputs = make(tie_word_embeddings=tied), tokens()
    labels = some_labels(inputs)
    count = (labels[:, 1:] != -100).sum() if items is None else items
    truth = answers(model, exact(model(inputs).logits, labels) / count)
    plain = model(inputs, labels=labels, num_items_in_batch=items).loss
    if head == "wrapped":
        ordinary_head = model.lm_head
        model.lm_head = Wrapped(ordinary_head)
    out = model(inputs, labels=labels, num_items_in_batch=items, chunked_loss=True)
    computed = answers(model, out.loss)
    assert head == "ordinary" or model.lm_head.calls == 10  # five chunks, computed twice
    assert out.logits is None
    assert out.loss.dtype == torch.float64
    assert ("lm_head.weight" in computed) is (not tied and head == "ordinary")
    check_answers({name.replace("lm_head.head", "lm_head"): value for name, value in computed.items()}, truth)
    check(plain.double(), truth["loss"], dtype=torch.float32)


def test_no_tensor_is_as_large_as_the_logits() -> None:
    """Neither in the forward pass nor in the backward pass; in the plain loss, both times."""
    model, inputs = make(vocab_size=2048), tokens(length=40)
    sizes = {}
    for chunked in (True, False):
        with Largest() as forward:
            loss = model(inputs, labels=inputs, use_cache=False, chunked_loss=chunked).loss
        with Largest() as backward:
            loss.backward()
        sizes[chunked] = forward.size, backward.size
    weight, logits = model.lm_head.weight.numel(), inputs.numel() * 2048
    assert max(sizes[True]) == weight < logits
    assert min(sizes[False]) >= logits


def test_labels_of_other_kinds() -> None:
    """Another label to leave out, labels that are shifted already, and none that counts."""
    model, inputs = make(), tokens()
    labels = some_labels(inputs)
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
    with torch.no_grad():
        expected = model(inputs, labels=labels, chunked_loss=True).loss
        check(model(inputs, labels=labels, shift_labels=shifted, chunked_loss=True).loss, expected)
        relabelled = labels.masked_fill(labels == -100, 7)
        check(
            model(inputs, labels=relabelled, ignore_index=7, chunked_loss=True).loss.float(),
            model(inputs, labels=relabelled, ignore_index=7).loss,
        )
        none = torch.full_like(labels, -100)
        assert model(inputs, labels=none, chunked_loss=True).loss.isnan()  # as of the mean of no numbers
        assert model(inputs, labels=none, num_items_in_batch=3, chunked_loss=True).loss == 0


def test_what_needs_no_gradient() -> None:
    """A frozen head, a frozen trunk, and no gradients at all: nothing else changes, and nothing more is computed."""
    model, inputs = make(), tokens()
    truth = answers(model, model(inputs, labels=inputs, chunked_loss=True).loss)
    model.lm_head.requires_grad_(False)
    model.zero_grad()
    computed = answers(model, model(inputs, labels=inputs, chunked_loss=True).loss)
    check_answers(computed, {name: value for name, value in truth.items() if name != "lm_head.weight"})
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    for parameter in model.parameters():
        parameter.grad = None
    computed = answers(model, model(inputs, labels=inputs, chunked_loss=True).loss)
    check_answers(computed, {name: truth[name] for name in ("loss", "lm_head.weight")})
    with torch.no_grad():
        loss = model(inputs, labels=inputs, chunked_loss=True).loss
    assert not loss.requires_grad
    check(loss, truth["loss"])


def test_gradients_twice() -> None:
    """Of a graph that is kept, scaled by what comes after the loss."""
    model, inputs = make(), tokens()
    loss = model(inputs, labels=inputs, chunked_loss=True).loss
    first = torch.autograd.grad(3 * loss, model.lm_head.weight, retain_graph=True)[0]
    second = torch.autograd.grad(loss, model.lm_head.weight)[0]
    check(first, 3 * second)


@pytest.mark.parametrize("head", ["ordinary", "wrapped"])
@pytest.mark.parametrize("precision", ["autocast", "the model", "the model, in float16"])
def test_in_half_precision(precision: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by no more than twice what the plain loss is, and added up in float32."""
    if head == "wrapped" and precision != "autocast":  # autograd adds up what the few chunks give, in the model's dtype
        monkeypatch.setattr(model_loss, "CORE_LOGITS", 300 * VOCABULARY)
    dtype = torch.float16 if "float16" in precision else torch.bfloat16
    width = 16
    inner = nn.Linear(width, VOCABULARY, bias=False)
    hidden, labels = torch.randn(2, 400, width), torch.randint(0, VOCABULARY, (2, 400))

    def losses(dtype: torch.dtype, way: str) -> dict[str, Tensor]:
        x, weight = hidden.to(dtype).requires_grad_(), inner.weight.detach().to(dtype).requires_grad_()
        copy = nn.Linear(width, VOCABULARY, bias=False)
        copy.weight = nn.Parameter(weight.detach())
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast" and dtype == torch.float32):
            if way == "plain":
                loss = exact(copy(x).float() if dtype != torch.float64 else copy(x), labels)
            else:
                module: nn.Module = copy if way == "ordinary" else Wrapped(copy)
                loss = chunked_cross_entropy(module, x, labels, VOCABULARY, num_items_in_batch=1)
        loss.backward()
        assert x.grad is not None
        assert copy.weight.grad is not None
        return {"loss": loss.detach(), "hidden": x.grad, "weight": copy.weight.grad}

    model_dtype = torch.float32 if precision == "autocast" else dtype
    truth, plain, computed = losses(torch.float64, "plain"), losses(model_dtype, "plain"), losses(model_dtype, head)
    assert computed["loss"].dtype == torch.float32
    for name, value in truth.items():
        assert computed[name].dtype == plain[name].dtype
        error, usual = ((outcome[name].double() - value).abs().max() for outcome in (computed, plain))
        assert 0 < error <= 2 * usual + 4 * torch.finfo(torch.float32).eps * value.abs().max(), name


def test_a_head_with_a_hook_or_another_forward_is_called() -> None:
    """As accelerate and PEFT ask for; the loss is the same."""
    model, inputs = make(), tokens()
    expected = model(inputs, labels=inputs, chunked_loss=True).loss
    head, calls = model.lm_head, list[str]()
    hook = head.register_forward_hook(lambda *_: calls.append("hook"))
    check(model(inputs, labels=inputs, chunked_loss=True).loss, expected)
    hook.remove()
    plain = head.forward
    head.forward = lambda x: (calls.append("forward"), plain(x))[1]
    check(model(inputs, labels=inputs, chunked_loss=True).loss, expected)
    assert calls == ["hook"] * 5 + ["forward"] * 5
    assert not is_plain_linear(nn.Linear(24, VOCABULARY, bias=False), VOCABULARY + 1)  # a part of the rows
    assert not is_plain_linear(nn.Linear(24, VOCABULARY), VOCABULARY)
