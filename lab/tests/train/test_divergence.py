"""A step that goes wrong is noticed, and the layer where that began is named. Two ranks run this file as a script."""

import json
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ranks
from diff_lab.train.distributed import DistributedContext
from diff_lab.train.divergence import BadStep, Divergence, SpikeDetector, diagnose
from diff_lab.train.layer_statistics import measure_layers, reduced
from diff_lab.train.step import loss_of_rows
from diff_transformer import DiffTransformerConfig, DiffTransformerForCausalLM
from full_run import short_run
from tiny_model import KINDS, SIZES

ALONE = DistributedContext("single", torch.device("cpu"), 0, 1, "no")
IN_BFLOAT16 = DistributedContext("single", torch.device("cpu"), 0, 1, "bf16")
LAYERS = 4
NAN = BadStep("the loss became nan", math.nan, math.nan, None)
RISE = BadStep("the loss rose", 9.0, 1.0, 3.4)


def make(kind: str, **settings: Any) -> DiffTransformerForCausalLM:
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": LAYERS, "attention_type": kind} | settings
    return DiffTransformerForCausalLM(DiffTransformerConfig(**sizes)).train()


def batch(seed: int = 0) -> dict[str, Tensor]:
    """Four rows of a text that is easy to learn: each token is the one before it and one more."""
    starts = torch.randint(29, (4, 1), generator=torch.Generator().manual_seed(seed))
    input_ids = (starts + torch.arange(12)) % 29
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def step_of(model: Any, rows: dict[str, Tensor], context: DistributedContext = ALONE) -> tuple[float, float]:
    """Loss and gradient norm, with the gradients clipped as training does."""
    model.zero_grad()
    loss = loss_of_rows(model, rows, (rows["labels"][:, 1:] != -100).sum(), context)
    loss.backward()
    return loss.item(), context.clip(model.parameters(), 1.0)


def diagnosis(
    model: Any, context: DistributedContext = ALONE, rows: dict[str, Tensor] | None = None, **more: Any
) -> Divergence:
    """What is said of a step that is not finite; all weights and the state of the model are as before."""
    rows = rows or batch()
    loss, norm = step_of(model, rows, context)
    bad_step = SpikeDetector(None).check(loss, norm)
    assert bad_step is not None
    assert ("loss" in bad_step.reason) == (not math.isfinite(loss))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    divergence = diagnose(model, rows, context, bad_step, step=7, **more)
    after = model.state_dict()
    assert all(torch.equal(after[name].nan_to_num(1.5), before[name].nan_to_num(1.5)) for name in before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return divergence


def scale(module: Any, factor: float) -> None:
    with torch.no_grad():
        module.weight.mul_(factor)


def enlarge(module: Any, size: float) -> None:
    """Weights of one size, with the signs that they have."""
    with torch.no_grad():
        module.weight.sign_().mul_(size)


def overflow_backward(layer: Any) -> None:
    """Forward a tiny number meets huge weights; backward these meet an ordinary gradient."""
    scale(layer.mlp.up_proj, 1e-37)
    enlarge(layer.mlp.down_proj, 1e38)


# Detection


def verdict(detector: SpikeDetector, loss: float, norm: float = 1.0) -> str | None:
    bad_step = detector.check(loss, norm)
    assert bad_step is None or (bad_step.loss, bad_step.norm) == pytest.approx((loss, norm), nan_ok=True)
    return None if bad_step is None else bad_step.reason


def test_what_is_not_finite_is_a_fault() -> None:
    for loss in (math.nan, math.inf):
        assert verdict(SpikeDetector(2.0), loss) == f"the loss became {loss}"
        assert verdict(SpikeDetector(None, overflow_is_normal=True), loss) == f"the loss became {loss}"
    for norm in (math.nan, math.inf):
        assert verdict(SpikeDetector(None), 3.0, norm) == f"the gradient norm became {norm}"
    assert SpikeDetector(None).check(3.0, 1e30) is None


def test_a_gradient_may_overflow_in_fp16_but_not_for_ever() -> None:
    detector = SpikeDetector(2.0, overflow_is_normal=True)
    for _ in range(3):  # each success counts anew
        assert [verdict(detector, 3.0, math.inf) for _ in range(30)] == [None] * 30
        assert verdict(detector, 3.0) is None
    verdicts = [verdict(detector, 3.0, math.nan) for _ in range(31)]
    assert verdicts == [None] * 30 + ["the gradient norm became nan for 31 steps in a row"]


def noisy(step: int, spread: float) -> float:
    """Losses around 2, by a fixed rule, evenly spread."""
    return 2.0 + spread * (((step * 37) % 101) / 50 - 1)


def test_a_rise_above_the_median_is_a_fault() -> None:
    detector = SpikeDetector(1.5)
    assert all(verdict(detector, noisy(step, 0.05)) is None for step in range(150))
    assert verdict(detector, 3.49) is None
    assert verdict(detector, 3.51) == "the loss rose to 3.51, from 2.00 as the median of the last 100 steps"
    off = SpikeDetector(None)
    assert all(verdict(off, loss) is None for loss in [2.0] * 50 + [1e9])


def test_a_rise_needs_losses_to_compare_with() -> None:
    """The first steps may do what they like, and a loss that jumps by nature is no spike."""
    detector = SpikeDetector(2.0)
    assert [verdict(detector, loss) for loss in (5.0, 9.0, *[3.0] * 17, 9.0)] == [None] * 20
    assert verdict(detector, 9.0) is not None
    jumpy = SpikeDetector(2.0)  # by 0.74 from step to step: 25 such jumps count
    assert all(verdict(jumpy, noisy(step, 1.0)) is None for step in range(100))
    assert verdict(jumpy, 20.4) is None
    assert verdict(jumpy, 20.6) is not None
    falling = SpikeDetector(2.0)  # that it falls by 8 makes no jumps of it
    assert all(verdict(falling, 10 - step / 10) is None for step in range(81))
    assert verdict(falling, 8.4) is None
    assert verdict(falling, 8.6) is not None


def test_bad_losses_are_not_compared_with_and_are_left_out_so_often() -> None:
    detector = SpikeDetector(2.0)
    for _ in range(30):
        verdict(detector, 3.0)
    for number in range(1, 13):
        assert verdict(detector, 50.0) == "the loss rose to 50.00, from 3.00 as the median of the last 30 steps"
        assert detector.may_skip == (number <= 10)
    assert verdict(detector, 3.0) is None
    assert verdict(detector, math.nan) is not None
    assert detector.may_skip


def test_a_resumed_detector_decides_the_same() -> None:
    losses = [noisy(step, 0.3) for step in range(140)] + [9.0, 2.0, 9.0, 9.0, *[2.1] * 60, 4.3]
    norms = [math.inf if step % 7 else 1.0 for step in range(len(losses))]
    uninterrupted = SpikeDetector(2.0, overflow_is_normal=True)
    expected = [(verdict(uninterrupted, *pair), uninterrupted.may_skip) for pair in zip(losses, norms, strict=True)]
    assert sum(verdict is not None for verdict, _ in expected) == 4
    for at in (5, 60, 141, 143):
        first = SpikeDetector(2.0, overflow_is_normal=True)
        for pair in zip(losses[:at], norms[:at], strict=True):
            verdict(first, *pair)
        state = json.loads(json.dumps(first.state_dict()))
        assert len(state["losses"]) <= 100
        resumed = SpikeDetector(2.0, overflow_is_normal=True)
        resumed.load_state_dict(state)
        later = [(verdict(resumed, *pair), resumed.may_skip) for pair in zip(losses[at:], norms[at:], strict=True)]
        assert later == expected[at:]
        assert resumed.state_dict() == uninterrupted.state_dict()
        former = {"faults" if name == "bad_steps" else name: value for name, value in state.items()}
        of_former = SpikeDetector(2.0, overflow_is_normal=True)
        of_former.load_state_dict(former)  # as earlier versions wrote it
        assert of_former.state_dict() == state


# What is not finite


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [1, 3])
def test_a_broken_weight_is_named(kind: str, layer: int) -> None:
    model = make(kind)
    model.model.layers[layer - 1].mlp.up_proj.weight.data[3, 4] = math.nan
    divergence = diagnosis(model)
    assert (divergence.layer, divergence.module) == (layer, f"model.layers.{layer - 1}.mlp.up_proj")
    assert divergence.weights_are_broken
    assert str(divergence).startswith(f"At step 7 the loss became nan. It began in layer {layer} of 4 (model.layers.")
    assert "up_proj.weight held numbers that are not finite before the step" in str(divergence)


def overflow_in_mlp(layer: Any) -> str:
    scale(layer.mlp.gate_proj, 1e4)
    enlarge(layer.mlp.down_proj, 1e38)
    return "mlp.down_proj"


def overflow_in_logits(layer: Any) -> str:
    for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
        scale(projection, 1e21)
    return "self_attn"


def overflow_in_values(layer: Any) -> str:
    scale(layer.input_layernorm, 1e3)
    scale(layer.self_attn.v_proj, 1e38)
    return "self_attn.v_proj"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [2, 4])
@pytest.mark.parametrize("plant", [overflow_in_mlp, overflow_in_logits, overflow_in_values])
def test_an_activation_that_overflows_is_named(kind: str, layer: int, plant: Callable[[Any], str]) -> None:
    model = make(kind)
    module = plant(model.model.layers[layer - 1])
    divergence = diagnosis(model)
    assert (divergence.layer, divergence.module) == (layer, f"model.layers.{layer - 1}.{module}")
    assert not divergence.weights_are_broken
    assert "is not finite, although" in str(divergence)


@pytest.mark.parametrize("layer", [1, 2, 4])
def test_a_lambda_that_overflows_is_named(layer: int) -> None:
    model = make("diff")
    lam = model.model.layers[layer - 1].self_attn.lam
    lam.q1.data.fill_(10.0)
    lam.k1.data.fill_(10.0)
    divergence = diagnosis(model)
    assert (divergence.layer, divergence.module) == (layer, f"model.layers.{layer - 1}.self_attn.lam")


class Explode(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 0.0


def explode(module: nn.Module) -> None:
    """The module's own arithmetic has an infinite gradient, at the end of it."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: exploding(forward(*args, **kwargs))  # type: ignore[method-assign]  # meant


def exploding(output: Any) -> Any:
    return (Explode.apply(output[0]), *output[1:]) if isinstance(output, tuple) else Explode.apply(output)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("path", "begins"),
    [
        ("layers.2.mlp", "layers.2.mlp"),
        ("layers.1.mlp.gate_proj", "layers.1.mlp.gate_proj"),
        ("layers.3.self_attn", "layers.3.self_attn"),
        ("layers.0.self_attn.v_proj", "layers.0.self_attn.v_proj"),
        ("layers.2.input_layernorm", "layers.2.input_layernorm"),
        ("layers.1", "layers.1"),
        ("norm", "norm"),
    ],
)
def test_a_gradient_that_overflows_is_named(kind: str, path: str, begins: str) -> None:
    model = make(kind)
    explode(model.model.get_submodule(path))
    divergence = diagnosis(model)
    assert divergence.bad_step.reason == "the gradient norm became nan"
    assert divergence.module == f"model.{begins}"
    assert divergence.layer == (int(path.split(".")[1]) + 1 if "layers" in path else None)
    assert "gradient" in divergence.explanation


def test_gradients_too_large_for_their_norm_are_named() -> None:
    model = make("softmax")
    scale(model.lm_head, 1e22)
    divergence = diagnosis(model)
    assert divergence.bad_step.reason == "the gradient norm became inf"
    assert divergence.explanation.startswith("It began in ")
    assert "too large for their norm" in divergence.explanation
    assert divergence.explanation.endswith("the largest is that of model.embed_tokens.weight.")


def test_the_head_is_named() -> None:
    model = make("diff")
    enlarge(model.lm_head, 1e38)
    divergence = diagnosis(model)
    assert (divergence.layer, divergence.module) == (None, "lm_head")
    assert "It began in lm_head: what lm_head computes is not finite" in str(divergence)


def test_a_batch_without_targets_is_named() -> None:
    rows = batch()
    rows["labels"][:] = -100
    divergence = diagnosis(make("diff"), rows=rows)
    assert (divergence.layer, divergence.module) == (None, "")
    assert "It began in the loss: the loss is not finite, although all that it is computed from is." in str(divergence)


def test_what_does_not_happen_again_is_said() -> None:
    model = make("diff")
    divergence = diagnose(model, batch(), ALONE, NAN, step=7)
    assert divergence.layer is None
    assert "finite when it is repeated: suspect the hardware" in str(divergence)


# torch.compile looks at all tensors that it meets.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "way",
    short_run(
        ["plain", "accumulated", "checkpointed", "reentrant", "autocast", "packed", "compiled"],
        ["accumulated", "autocast"],
    ),
)
def test_however_the_model_is_run(way: str) -> None:
    """The gradient overflows in layer 3 alone, and in row 4 alone of those that are accumulated."""
    model, rows, processes, parts = make("diff"), batch(), ALONE, 1
    if way == "accumulated":
        parts = 4
    elif way in ("checkpointed", "reentrant"):
        for layer in model.model.layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=way == "reentrant")
    elif way == "autocast":
        processes = IN_BFLOAT16
    elif way == "packed":
        rows["position_ids"] = torch.arange(12).remainder(5).expand(4, 12).clone()
    elif way == "compiled":
        for layer in model.model.layers:
            layer.compile(backend="eager")
    overflow_backward(model.model.layers[2])
    scale(model.lm_head, 1e3)
    if way == "accumulated":
        rows["labels"][:3] = -100  # no gradient, none that overflows
    divergence = diagnosis(model, processes, rows, accumulation=parts)
    assert divergence.bad_step.reason.startswith("the gradient norm became ")
    assert (divergence.layer, divergence.module) == (3, "model.layers.2.mlp.down_proj")


def test_the_report_is_a_file(tmp_path: Path) -> None:
    model = make("diff")
    model.model.layers[1].mlp.up_proj.weight.data[0] = math.inf
    diagnosis(model).write(tmp_path / "divergence.json")
    text = (tmp_path / "divergence.json").read_text()
    written = json.loads(text)
    assert "NaN" not in text
    assert "Infinity" not in text
    assert (written["step"], written["layer"], written["bad_step"]["loss"]) == (7, 2, None)
    assert written["weights_are_broken"] is True
    assert [file.name for file in tmp_path.iterdir()] == ["divergence.json"]


def test_a_report_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    model = make("diff")
    model.model.layers[1].mlp.up_proj.weight.data[0] = math.inf
    with pytest.raises(OSError, match=r"At step 7 the loss .* layer 2 of 4 .* cannot be written to '.*/divergence"):
        diagnosis(model).write(tmp_path / "missing" / "divergence.json")


# Spikes


@pytest.fixture(scope="module")
def learnt() -> Callable[[str], dict[str, Tensor]]:
    """kind → weights of a model that has learnt the text; the detector had nothing to say meanwhile."""

    @cache
    def learn(kind: str) -> dict[str, Tensor]:
        model, detector = make(kind), SpikeDetector(2.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(120):
            assert detector.check(*step_of(model, batch(step))) is None
            optimizer.step()
        assert detector.losses[-1] < 0.5
        return model.state_dict()

    return learn


def spike(kind: str, learnt: Any, rows: dict[str, Tensor], plant: Callable[[Any], None]) -> Divergence:
    """What is said of a step with these rows after many with good ones, and after something has been planted."""
    model, detector = make(kind), SpikeDetector(2.0)
    model.load_state_dict(learnt(kind))
    assert [detector.check(*step_of(model, batch(200))) for _ in range(20)] == [None] * 20
    before = measure_layers(model, {"input_ids": batch(200)["input_ids"][:1]})
    plant(model)
    loss, norm = step_of(model, rows)
    bad_step = detector.check(loss, norm)
    assert bad_step is not None
    assert "the loss rose to" in bad_step.reason
    divergence = diagnose(model, rows, ALONE, bad_step, step=121, before=before)
    assert divergence.before == before
    assert divergence.now.keys() == before.keys()
    assert sum(divergence.gradient_shares) == pytest.approx(1)
    counts = (rows["labels"][:, 1:] != -100).sum(1)
    assert sum(divergence.rows[row] * int(counts[row]) for row in range(4)) / int(counts.sum()) == pytest.approx(loss)
    assert not divergence.weights_are_broken
    return divergence


@pytest.mark.parametrize("kind", short_run(KINDS, ["diff"]))
@pytest.mark.parametrize("row", [0, 2])
def test_a_poisoned_row_is_named(kind: str, row: int, learnt: Any) -> None:
    rows = batch(200)
    rows["input_ids"][row] = torch.randint(29, (12,), generator=torch.Generator().manual_seed(3))
    rows["labels"][row] = rows["input_ids"][row]
    divergence = spike(kind, learnt, rows, lambda model: None)
    assert f"Row {row + 1} of the batch makes " in str(divergence)
    assert divergence.rows.index(max(divergence.rows)) == row


@pytest.mark.parametrize("kind", short_run(KINDS, ["diff"]))
@pytest.mark.parametrize("layer", [1, 2, 4])
def test_a_layer_that_grew_is_named(kind: str, layer: int, learnt: Any) -> None:
    def plant(model: Any) -> None:
        scale(model.model.layers[layer - 1].mlp.down_proj, -200)  # and what was learnt is turned around

    divergence = spike(kind, learnt, batch(200), plant)
    assert (divergence.layer, divergence.module) == (layer, f"model.layers.{layer - 1}")
    assert f"It began in layer {layer} of 4: the RMS of its output went from" in str(divergence)
    assert "The rows of the batch are alike" in str(divergence)


def test_a_headwise_norm_s_input_that_grew_is_named(learnt: Any) -> None:
    """What V1's instability looks like; the norm hides it from all that comes after."""

    def plant(model: Any) -> None:
        scale(model.model.layers[1].self_attn.v_proj, 1e4)
        scale(model.model.layers[2].mlp.down_proj, 200)

    divergence = spike("diff", learnt, batch(200), plant)
    assert divergence.layer == 2
    assert "the RMS of its headwise norm's input went from" in str(divergence)


@pytest.mark.parametrize("layer", [1, 3])
def test_attention_logits_that_grew_are_named(layer: int, learnt: Any) -> None:
    model = make("softmax")
    model.load_state_dict(learnt("softmax"))
    before = measure_layers(model, {"input_ids": batch(200)["input_ids"][:1]})
    for each in (layer, 4):  # the other grows less
        scale(model.model.layers[each - 1].self_attn.q_proj, 1e4 if each == layer else 1e3)
    step_of(model, batch(200))
    divergence = diagnose(model, batch(200), ALONE, RISE, step=7, before=before)
    assert divergence.layer == layer
    assert "its largest attention logit went from" in str(divergence)


def test_a_spike_without_earlier_numbers_says_so(learnt: Any) -> None:
    model = make("diff")
    step_of(model, batch())
    divergence = diagnose(model, batch(), ALONE, RISE, step=1)
    assert divergence.layer is None
    assert "No numbers of the layers were logged before" in str(divergence)


# Two processes


def on_a_rank() -> None:
    """A device that computes nonsense in one layer, and a row of nonsense, in all ways to train together."""
    rank, folder = ranks.join()
    for way in ("ddp", "fsdp", "tensor"):
        context = DistributedContext(way, torch.device("cpu"), rank, ranks.RANKS, "no")  # type: ignore[arg-type]  # one of them
        model, call = context.parallelize(make("diff"), folder, lambda model: None)
        parameters = list(model.parameters())
        rows = batch()
        hook = None
        if rank == 1:
            down = model.model.layers[2].mlp.down_proj
            hook = down.register_forward_hook(lambda module, inputs, output: output / 0.0)
        wrong = diagnose(model, rows, context, NAN, step=7, accumulation=2)
        if hook is not None:
            hook.remove()
        finite = diagnose(model, rows, context, NAN, step=7)
        items = (rows["labels"][:, 1:] != -100).sum() / context.dp_size
        loss_of_rows(call, context.local_batch(rows), items, context).backward()
        before = reduced(measure_layers(model, {"input_ids": rows["input_ids"][:1]}))
        rows["input_ids"][3] = torch.randint(29, (12,), generator=torch.Generator().manual_seed(3))
        rows["labels"][3] = rows["input_ids"][3]
        with torch.no_grad():
            model.lm_head.weight.mul_(40)  # tells rows apart without any training
            model.model.layers[1].mlp.down_proj.weight.mul_(1e4)
        spike = diagnose(model, rows, context, RISE, step=7, before=before)
        for name, report in {"wrong": wrong, "finite": finite, "spike": spike}.items():
            report.write(folder / f"{way} {name} {rank}")
        # And training can go on, with the parameters that an optimizer knows.
        assert all(mine is theirs for mine, theirs in zip(parameters, model.parameters(), strict=True))
        loss_of_rows(call, context.local_batch(batch()), items, context).backward()


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    ranks.run(__file__, folder)
    return folder


@pytest.mark.parametrize("way", ["ddp", "fsdp", "tensor"])
def test_processes_find_the_same(way: str, by_ranks: Path) -> None:
    for name in ("wrong", "finite", "spike"):
        first, second = (json.loads((by_ranks / f"{way} {name} {rank}").read_text()) for rank in (0, 1))
        if name != "finite":
            del first["gradient_shares"], second["gradient_shares"]
        assert first == second
    wrong, finite, spike = (
        json.loads((by_ranks / f"{way} {name} 0").read_text()) for name in ("wrong", "finite", "spike")
    )
    assert wrong["layer"] == 3
    assert "Of 2 ranks these saw it: 1." in wrong["explanation"] or way == "tensor"
    assert finite["layer"] is None
    assert len(spike["rows"]) == 4
    assert spike["layer"] == 2


if __name__ == "__main__":
    on_a_rank()
