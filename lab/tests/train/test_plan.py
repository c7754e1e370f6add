"""Plans: what they say, and what they refuse; nothing is read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import distributed as transformers_distributed

from diff_lab.data import byte_tokenizer
from diff_lab.train import build_data, load_recipe, shipped_recipes, train
from diff_lab.train.distributed import DistributedContext, shard
from diff_lab.train.flops import GPUS
from diff_lab.train.plan import CONTEXT, GIB, USABLE, Plan, vocabulary
from diff_lab.train.recipe import Recipe, build_config
from diff_lab.train.step import build_optimizers, loss_of_rows
from diff_transformer.model import language_model_class


@pytest.fixture(scope="module")
def paper() -> Plan:
    """The paper's text and tokenizer are not here, and nobody misses them."""
    return Plan(load_recipe("paper-3b"), "h200", 64)


def test_numbers_of_the_3b_model(paper: Plan) -> None:
    assert paper.kind == "fsdp"
    assert paper.parameters == 3_479_175_168
    assert (paper.steps, paper.tokens_per_step, paper.micro_batch) == (83447, 4 << 20, 4)
    assert paper.peak == GPUS["h200"].half
    flops = paper.steps * paper.tokens_per_step * paper.flops_per_token
    assert paper.days == pytest.approx(flops / (64 * 0.4 * 989.5e12) / 86400)
    assert 3 < paper.days < 5
    assert paper.device_memory == (GPUS["h200"].memory_gib * GIB - CONTEXT) * USABLE


def test_checkpointing_saves_activations_and_lets_larger_parts_fit(paper: Plan) -> None:
    without, checkpointing = paper.way(False), paper.way(True)
    assert (without.checkpointing, checkpointing.checkpointing) == (False, True)
    assert without.memory.activations > 10 * checkpointing.memory.activations
    assert without.fits
    assert checkpointing.fits
    assert (without.accumulation, without.micro_batch) == (4, 4)
    assert (checkpointing.accumulation, checkpointing.micro_batch) == (1, 16)


def test_the_accumulation_that_is_named_is_the_smallest_that_fits() -> None:
    recipe = load_recipe("paper-1.4b", ["train.accumulation=16"])
    way = Plan(recipe, "a100-40", 1).way(True)
    assert way.accumulation is not None
    as_named = Plan(load_recipe("paper-1.4b", [f"train.accumulation={way.accumulation}"]), "a100-40").fits(True)
    halved = Plan(load_recipe("paper-1.4b", [f"train.accumulation={way.accumulation // 2}"]), "a100-40").fits(True)
    assert as_named
    assert not halved
    assert way.micro_batch == recipe.data.batch_size // way.accumulation


def test_what_fits_nowhere() -> None:
    planned = Plan(load_recipe("paper-13.1b"), "l4")
    for way in (planned.way(False), planned.way(True)):
        assert (way.fits, way.accumulation, way.micro_batch) == (False, None, None)


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if name.startswith("paper")])
def test_each_paper_recipe_fits_what_its_comment_names(name: str) -> None:
    """Both twins; on the GPUs of the command in the recipe's heading."""
    heading = shipped_recipes()[name].read_text().partition("\nname:")[0]
    command = next(line for line in heading.splitlines() if "diff-lab plan" in line).split()
    gpus, gpu = int(command[command.index("--gpus") + 1]), command[command.index("--gpu") + 1]
    for attention_type in ("diff", "softmax"):
        planned = Plan(load_recipe(name, [f"model.attention_type={attention_type}"]), gpu, gpus)
        assert planned.fits(planned.checkpointing), name


def test_communication_bounds_the_utilisation() -> None:
    recipe = load_recipe("paper-13.1b")
    standard, slow = Plan(recipe, "h200", 64), Plan(recipe, "h200", 64, network=6.25e9)
    assert standard.communication is not None
    assert slow.communication is not None
    # The eight GPUs of a machine share what comes from other machines, a ninth of all.
    assert standard.communication.through_network == pytest.approx(standard.communication.received / 9)
    assert standard.communication.seconds == pytest.approx(standard.communication.through_network / 50e9)
    assert slow.communication.seconds == pytest.approx(slow.communication.through_network / 6.25e9)
    assert (standard.assumed, standard.utilisation) == (0.4, 0.4)
    assert slow.utilisation == pytest.approx(0.18, rel=0.02)
    assert standard.days is not None
    assert slow.days == pytest.approx(standard.days * 0.4 / slow.utilisation)
    alone = Plan(load_recipe("small"), "h200")
    assert (alone.communication, alone.utilisation) == (None, 0.4)
    one_machine = Plan(recipe, "h200", 8).communication
    assert one_machine is not None
    assert (one_machine.through_network, one_machine.seconds) == (0, pytest.approx(one_machine.received / 450e9))
    ddp = Plan(load_recipe("paper-1.4b"), "l4", 16, parallel="ddp")
    assert ddp.communication is not None
    assert (ddp.communication.seconds, ddp.utilisation) == (None, 0.4)
    assert ddp.communication.received == 2 * 4 * ddp.parameters * 15 / 16
    assert ddp.communication.overlap == pytest.approx(2 / 3 / ddp.accumulation)


def test_the_disk_of_checkpoints_is_that_of_real_ones(tmp_path: Path) -> None:
    for optimizer in ("adamw", "muon"):
        settings = ["model.hidden_size=160", f"train.optimizer={optimizer}", "train.steps=2", "train.warmup_steps=0"]
        recipe = load_recipe("tiny", [*settings, "train.checkpoint_every=1"])
        train(recipe, tmp_path / optimizer)
        (newest, older) = (tmp_path / optimizer / "checkpoints").iterdir()
        planned = Plan(recipe)
        for folder in (newest, older):
            real = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            assert planned.checkpoint_bytes == pytest.approx(real, rel=0.03)
        assert planned.checkpoints_bytes == 3 * planned.checkpoint_bytes  # two stay, one is written


def test_the_disk_of_tokens() -> None:
    recipe = load_recipe("paper-3b")
    assert Plan(recipe, "h200", 64).token_cache_bytes == 4 * recipe.train.steps * (4 << 20)
    assert Plan(load_recipe("tiny")).token_cache_bytes == 2 * 20 * 512
    assert Plan(load_recipe("retrieval")).token_cache_bytes is None


def test_how_many_train_together() -> None:
    small = load_recipe("small")
    assert Plan(small, "l4").kind == "single"
    assert Plan(small, "l4", 4).kind == "ddp"
    assert Plan(small, "l4", 4, parallel="fsdp").kind == "fsdp"
    assert Plan(small, "l4", 4, parallel="tensor").kind == "tensor"
    assert Plan(small, "l4", 4, parallel="tensor").micro_batch == 4 * Plan(small, "l4", 4).micro_batch


def test_a_plan_for_this_machine() -> None:
    planned = Plan(load_recipe("retrieval"))
    assert (planned.device, planned.kind) == ("cpu", "single")
    assert planned.device_memory is not None
    assert planned.fits(False)
    assert planned.peak is not None


RANKS = 4


@contextmanager
def ranks() -> Iterator[None]:
    """The first of four ranks whose messages go nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def small(*overrides: str) -> Recipe:
    sizes = ["hidden_size=128", "intermediate_size=352", "num_hidden_layers=4", "head_dim=16", "vocab_size=8192"]
    sequences = ["data.length=64", f"data.batch_size={2 * RANKS}", "train.precision=no", "train.accumulation=1"]
    return load_recipe("small", [*(f"model.{size}" for size in sizes), *sequences, *overrides])


def model_of(recipe: Recipe) -> Any:
    config = build_config(recipe, vocabulary(recipe))
    model = language_model_class(config)(config).train()
    if recipe.train.gradient_checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def rows(recipe: Recipe, count: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(count, recipe.data.length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def measured(tracker: MemTracker, model: Any, optimizers: list[Any], recipe: Recipe, count: int) -> int:
    """The most that real tensors hold in the second step of training, in which the optimizer has its state."""
    context = DistributedContext("single", torch.device("cpu"), 0, 1, recipe.train.precision)
    with tracker:
        for _ in range(2):
            for _ in range(recipe.train.accumulation):
                tracker.reset_mod_stats()
                loss_of_rows(model, rows(recipe, count), torch.tensor(8), context).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.attention_type=diff"],
        ["model.attention_type=softmax", "train.gradient_checkpointing=true"],
        ["model.attention_type=diff_v2", "train.precision=bf16", "train.accumulation=2"],
        ["train.optimizer=muon", "data.length=4"],
    ],
    ids=["diff", "checkpointing", "half", "optimizer"],
)
def test_a_step_holds_what_the_plan_says(overrides: list[str]) -> None:
    recipe = small(*overrides)
    model = model_of(recipe)
    optimizers, tracker = build_optimizers(model, recipe.train), MemTracker()
    tracker.track_external(model)
    held = measured(tracker, model, optimizers, recipe, Plan(recipe).micro_batch)
    assert Plan(recipe).memory(recipe.train.gradient_checkpointing).total == pytest.approx(held, rel=0.05)


@pytest.mark.parametrize("overrides", [[], ["train.precision=bf16", "train.gradient_checkpointing=true"]])
def test_a_rank_of_fsdp_holds_and_receives_what_the_plan_says(overrides: list[str]) -> None:
    recipe = small(*overrides)
    plan = Plan(recipe, "h200", RANKS, parallel="fsdp")
    planned = plan.memory(recipe.train.gradient_checkpointing).total
    with ranks(), Collectives() as collectives:
        model = model_of(recipe)
        shard(model, "cpu", RANKS, recipe.train.precision)
        optimizers = build_optimizers(model, recipe.train)
        held = measured(FSDPMemTracker(model, optimizers[0]), model, optimizers, recipe, 2)
    assert plan.communication is not None
    assert 2 * plan.communication.received == pytest.approx(collectives.gathered * (RANKS - 1) / RANKS, rel=0.01)
    assert planned == pytest.approx(held, rel=0.1)


@pytest.mark.parametrize("attention_type", ["diff", "softmax"])
def test_tensor_parallel_layers_add_up_what_the_plan_says(
    attention_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "tp_size" not in getattr(transformers_distributed.DistributedConfig, "__dataclass_fields__", {}):
        pytest.skip("tensor parallelism needs a later release of transformers")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(RANKS)}.items():
        monkeypatch.setenv(name, value)
    recipe = small(f"model.attention_type={attention_type}", "train.precision=bf16")
    model_of(recipe).save_pretrained(tmp_path)
    split: Any = transformers_distributed.DistributedConfig(tp_size=RANKS)
    kind: Any = language_model_class(build_config(recipe, vocabulary(recipe)))
    context = DistributedContext("single", torch.device("cpu"), 0, 1, "bf16")
    with ranks():
        model = kind.from_pretrained(tmp_path, dtype=torch.float32, distributed_config=split).train()
        with Collectives() as collectives:
            loss_of_rows(model, rows(recipe, 2 * RANKS), torch.tensor(8), context).backward()
    plan = Plan(recipe, "h200", RANKS, parallel="tensor").communication
    assert plan is not None
    assert plan.received == pytest.approx(collectives.gathered * (RANKS - 1) / RANKS, rel=0.01)


class Collectives(TorchDispatchMode):
    """Adds up the bytes of the whole tensors that are gathered or scattered; an all-reduce is both."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "c10d" in name and any(part in name for part in ("all_reduce", "allreduce", "gather", "scatter")):
            tensors = [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if torch.is_tensor(t)]
            full_size = max(t.numel() * t.element_size() for t in tensors)
            if "_c10d_functional" in name and "gather" in name:  # its one tensor is a rank's part
                full_size *= RANKS
            self.gathered += full_size * (2 if "reduce" in name and "scatter" not in name else 1)
        return func(*args, **(kwargs or {}))


def test_the_vocabulary_is_the_datas() -> None:
    recipe = load_recipe("retrieval")
    assert vocabulary(recipe) == build_data(recipe).batches.vocab_size


def test_the_vocabulary_of_a_tokenizer(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "bytes")
    assert vocabulary(load_recipe("tiny", [f"data.tokenizer={tmp_path / 'bytes'}"])) == 257
    assert vocabulary(load_recipe("tiny")) == 257
    assert vocabulary(load_recipe("small")) == 8192
    with pytest.raises(ValueError, match=r"downloads nothing, and data\.tokenizer 'gpt2' is no folder"):
        vocabulary(load_recipe("tiny", ["data.tokenizer=gpt2"]))


@pytest.mark.parametrize("content", [None, "{", "{}"], ids=["absent", "no JSON", "empty"])
@pytest.mark.parametrize("recipe", ["tiny", "masked"])
def test_a_folder_without_a_readable_tokenizer(tmp_path: Path, recipe: str, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    settings = [f"data.tokenizer={tmp_path}", "data.vocab_size=null"]
    with pytest.raises(ValueError, match=rf'^data\.tokenizer is "bytes", .* and {str(tmp_path)!r} cannot be loaded: '):
        vocabulary(load_recipe(recipe, settings))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "v100"}, "GPU 'v100' is not known; known ones are b200, h200"),
        ({"gpu": "h200", "gpus": 0}, "the number of GPUs must be 1 or more, got 0"),
        ({"gpus": 2}, "several processes are planned for GPUs, got 2"),
        ({"gpu": "h200", "utilisation": 0.0}, "the utilisation must lie above 0 and not above 1, got 0.0"),
        ({"gpu": "h200", "utilisation": 40.0}, "the utilisation must lie above 0 and not above 1, got 40.0"),
        ({"gpu": "h200", "network": 0.0}, "network's bandwidth must be above 0, got 0.0"),
        ({"gpu": "h200", "parallel": "zero"}, "parallel must be one of 'ddp', 'fsdp', 'tensor', got 'zero'"),
        ({"gpu": "h200", "gpus": 3}, r"data\.batch_size=32 cannot be divided among 3 processes"),
        ({"gpu": "h200", "gpus": 3, "parallel": "tensor"}, "which 3 ranks cannot share evenly"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(load_recipe("small"), **arguments)  # type: ignore[arg-type]  # the wrong ones are meant


def test_what_training_refuses_is_not_planned() -> None:
    recipe = load_recipe("small", ["train.precision=fp16"])
    with pytest.raises(ValueError, match="'fp16' needs a GPU"):
        Plan(recipe)
    assert Plan(recipe, "h200", 2).precision == "fp16"
    with pytest.raises(ValueError, match=r"'fp16' runs in one process or with .* 'ddp', not with 'fsdp'"):
        Plan(recipe, "h200", 2, parallel="fsdp")
