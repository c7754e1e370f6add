"""Configures torchtitan's trainer from a recipe, and adds to it what users of `diff-lab train` would miss."""

import hashlib
import math
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import LoggerContainer, MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import get_fsdp_reshard_after_forward_policy
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from diff_lab.data import TextBatches
from diff_lab.data.batches import IGNORED
from diff_lab.titan.data import RecipeDataLoader, RecipeTokenizer, in_one_row
from diff_lab.titan.model import Adapter, DiffModel
from diff_lab.train.distributed import all_gather_object, on_rank0, propagate_errors, reshard
from diff_lab.train.loop import Interrupt, TrainingInterrupted
from diff_lab.train.progress import Tracker, check_trackers
from diff_lab.train.recipe import Data, MaskedTextData, Recipe, build_config
from diff_lab.train.step import DivergenceError, SpikeDetector, learning_rate
from diff_transformer.nn import Lambda
from diff_transformer.parallel import Context, context_parallel, shard, tensor_parallel
from diff_transformer.utils.manifest import MANIFEST, digests, sizes_in, why_changed, write_manifest

# Names of parameters without weight decay: norms, λ and its projection, biases, embeddings.
UNDECAYED = r"norm\.weight|\.lam\.|lambda_proj|\.bias$|^tok_embeddings"


def parallelize(
    model: DiffModel, *, parallel_dims: Any, parallelism: Any, compile_config: Any, ac_config: Any, **others: Any
) -> nn.Module:
    """Spread a model, or a pipeline's stage, over the meshes of torchtitan."""
    layers = tuple(model.layers.values())
    if parallel_dims.cp_enabled:
        context_parallel(layers)
    if parallel_dims.tp_enabled:
        parts: dict[str, Any] = {"embedding": model.tok_embeddings, "norm": model.norm, "head": model.lm_head}
        parts |= {"sequence_parallel": parallelism.enable_sequence_parallel, "gather_logits": False}
        tensor_parallel(layers, parallel_dims.get_mesh("tp"), **parts)
    if ac_config is not None:
        ac_config.build(dump_folder=others["dump_folder"]).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    mesh = parallel_dims.get_mesh(["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"])
    dtype = torch.bfloat16 if model.config.precision == "bf16" else None
    after = get_fsdp_reshard_after_forward_policy(parallelism.fsdp_reshard_after_forward, parallel_dims.pp_enabled)
    shard(model, layers, mesh, param_dtype=dtype, reshard_after_forward=after)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is divided by the targets of all ranks
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return model


@dataclass(kw_only=True, slots=True)
class Schedule(LRSchedulersContainer.Config):
    """The learning rates of a recipe: a step's, over the highest, as a function of the steps before it."""

    factor: Any = None

    def build(self, *, optimizers: Any, training_steps: int) -> LRSchedulersContainer:
        return LRSchedulersContainer(optimizers, self.factor)


class Metrics(MetricsProcessor):
    """Logs λ of each layer beside torchtitan's numbers, and stops when the loss rises."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """No more settings."""

    spikes: SpikeDetector  # of the recipe

    def log(self, step: int, mean: float, largest: float, norm: float, extra_metrics: Any = None) -> None:
        own = {name: x for part in self.model_parts for name, x in lambdas_of(part)}
        stages = all_gather_object(own) if self.parallel_dims.pp_enabled else [own]
        named = {name: x for stage in stages for name, x in stage.items()}
        super().log(step, mean, largest, norm, {**(extra_metrics or {}), **named})
        loss = torch.tensor(mean, device=self.device_memory_monitor.device.type)
        dist.all_reduce(loss, dist.ReduceOp.MAX)  # a stage without a loss has a negative number in its place
        if (bad := self.spikes.check(loss.item(), norm)) is not None:
            raise DivergenceError(f"Stopped at step {step}: {bad}. Losses of every {self.config.log_freq} steps count.")


def lambdas_of(part: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield λ of each layer of a stage, as `diff-lab train` names its curve, on every rank."""
    for name, module in part.named_modules():
        if isinstance(module, Lambda):
            vectors = {key: x.full_tensor() if isinstance(x, DTensor) else x for key, x in module.named_parameters()}
            yield f"lambda/layer_{int(name.split('.')[1]) + 1:02d}", torch.func.functional_call(module, vectors).item()


class CheckedCheckpoints(CheckpointManager):
    """Checkpoints whose files' SHA-256 are written beside them, last, and compared when one is loaded."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """No more settings."""

    def _find_load_step(self, folder: str = "") -> int:
        """Return the newest step whose digests are there, which are written last; −1 without one."""
        complete = Path(folder or self.folder).glob(f"step-*/{MANIFEST}")
        return max((int(file.parent.name.removeprefix("step-")) for file in complete), default=-1)

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, to_hf: bool = False, **how: Any) -> Any:
        saving = super().dcp_save(state_dict, checkpoint_id, to_hf=to_hf, **how)
        folder, trainer = Path(checkpoint_id), self.states["train_state"]

        def complete(done: Any = None) -> None:
            if done is None or done.exception() is None:
                write_manifest(folder, digests(folder, sizes_in(folder)))

        # The first rank has saved when all have.
        if dist.get_rank() == 0 and to_hf:
            shutil.rmtree(folder / "sharded", ignore_errors=True)  # the same weights, as the ranks had them
            trainer.model_config.hf.architectures = ["DiffTransformerForCausalLM"]
            for part in filter(None, (trainer.model_config.hf, trainer.tokenizer)):
                part.save_pretrained(folder)
        elif dist.get_rank() == 0 and isinstance(saved := getattr(saving, "upload_completion", saving), Future):
            saved.add_done_callback(complete)
        elif dist.get_rank() == 0:
            complete()
        return saving

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        changed = None if from_hf else on_rank0(lambda: why_changed(Path(checkpoint_id)))
        if changed is not None:
            raise ValueError(f"The checkpoint {checkpoint_id!r} is damaged: {changed}.")
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)


class DiffTrainer(Trainer):
    """Trains a recipe. A signal ends it after its step, with a checkpoint."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """The recipe."""

        recipe: Any = None

    def __init__(self, config: "DiffTrainer.Config") -> None:
        super().__init__(config)
        self.metrics_processor.spikes = SpikeDetector(config.recipe.train.max_loss_rise)
        logger, recipe, folder = self.metrics_processor.logger, config.recipe, Path(config.dump_folder)
        with propagate_errors():
            for library in recipe.train.trackers if isinstance(logger, LoggerContainer) else ():  # on one rank
                begun = min(path.name for path in (folder / config.metrics.save_tb_folder).iterdir())
                logger.add_logger(Tracker(library, f"{folder.name}-{begun}", folder, recipe.model_dump(mode="json")))

    def train(self) -> None:
        with Interrupt() as self.interrupt:
            super().train()

    def should_continue_training(self) -> bool:
        stops = torch.tensor(float(self.interrupt.requested), device=self.device)
        dist.all_reduce(stops, dist.ReduceOp.MAX)
        if stops and self.step < self.config.training.steps:
            self.checkpointer.interval = 1  # whatever it was, this step is saved
            self.checkpointer.save(self.step)
            raise TrainingInterrupted(f"Stopped after step {self.step}, with a checkpoint: the same command resumes.")
        return super().should_continue_training()

    def train_step(self, data_iterator: Any) -> None:
        # Dropout's random numbers, too, are a function of the step: a resumed run draws the same.
        stream = f"{self.config.debug.seed}/{self.step}/{dist.get_rank()}".encode()
        torch.manual_seed(int.from_bytes(hashlib.sha256(stream).digest()[:8], "big", signed=True))
        data, step, train = self.dataloader, self.step, self.config.recipe.train
        data.step = step
        self.ntokens_seen += len(data.own) * self.config.training.seq_len // self.parallel_dims.cp
        super().train_step(data_iterator)
        is_due = step == train.steps or (train.evaluate_every is not None and step % train.evaluate_every == 0)
        if is_due and isinstance(data.batches, TextBatches):
            for part in self.model_parts:
                part.eval()
            results = self.validate(data.batches)
            for part in self.model_parts:
                reshard(part)
                part.train()
            self.metrics_processor.log_validation(results["validation/loss"], step, results)

    @torch.no_grad()
    def validate(self, text: TextBatches) -> dict[str, float]:
        """Measure loss and bits per byte: each data-parallel rank has some rows, as many at a time as in training."""
        data, targets, nats = self.dataloader, 0, torch.zeros((), dtype=torch.float64, device=self.device)
        own = data.at_once * self.num_pipeline_parallel_microbatches
        for batch in text.validation_batches():
            batch = {name: x.to(self.device) for name, x in batch.items()}
            count = len(batch["labels"])
            targets += int((batch["labels"][:, 1:] != IGNORED).sum())
            for start in range(0, count, own * data.ranks):
                rows = torch.arange(own) + start + own * data.rank
                part = {name: x[rows.clamp(max=count - 1)] for name, x in batch.items()}
                part["labels"][rows >= count] = IGNORED  # as all ranks take part in every message
                parts = (slice(first, first + data.at_once) for first in range(0, own, data.at_once))
                nats += self.loss_of([in_one_row({name: x[each] for name, x in part.items()}) for each in parts])
        dist.all_reduce(nats)
        total = nats.item() / self.parallel_dims.tp  # whose ranks have the same loss each
        by_byte = total / math.log(2) / text.validation_bytes
        return {"validation/loss": total / targets, "validation/bits_per_byte": by_byte}

    def loss_of(self, microbatches: list[tuple[dict[str, Any], Tensor]]) -> Tensor:
        """Add up a rank's losses, without gradients: as many parts as the pipeline takes at once, or one."""
        tokens, labels, more = zip(*(self.post_dataloading_process(*each) for each in microbatches), strict=True)
        if not self.parallel_dims.pp_enabled:
            with self.train_context():
                return self.loss_fn(self.model_parts[0](tokens[0], **more[0]), labels[0])[0]
        losses: list[Tensor] = []
        self.pp_schedule.eval(
            arg_mbs=[(each,) for each in tokens] if self.pp_has_first_stage else None,
            kwarg_mbs=list(more),
            target_mbs=list(labels) if self.pp_has_last_stage else None,
            losses=losses if self.pp_has_last_stage else None,
        )
        return sum(losses, torch.zeros((), device=self.device))

    def post_dataloading_process(self, input_dict: dict[str, Any], labels: Tensor) -> tuple[Any, ...]:
        """Return this rank's tokens, labels, and the model's other arguments."""
        tokens, positions, documents = (input_dict[name] for name in ("input", "positions", "documents"))
        more = {"positions": positions, "cu_seqlens": torch.tensor(documents, dtype=torch.int32, device=self.device)}
        if self.parallel_dims.cp_enabled:
            context = Context(self.parallel_dims.get_mesh("cp"), tokens.shape[1], documents, self.device)
            tokens, labels = context.own(tokens), context.own(labels)
            more = {"positions": context.own(positions), "context": context}
        return tokens, labels, more

    def close(self) -> None:
        self.checkpointer.maybe_wait_for_saving()
        super().close()


def trainer_config(recipe: Recipe, data: Data, folder: Path) -> DiffTrainer.Config:
    """Return torchtitan's configuration of a recipe, which its flags may change.

    Raises:
        ValueError: a setting that would be ignored here.
    """
    train = recipe.train
    check_trackers(train.trackers)
    ignored = {
        f"train.optimizer={train.optimizer}": train.optimizer != "adamw",
        "train.precision=fp16": train.precision == "fp16",
        f"train.device={train.device}": train.device != "auto",
        "train.parallel=ddp": train.parallel == "ddp",
        "train.on_divergence=skip": train.on_divergence == "skip",
        "model.init_from (torchtitan has --checkpoint.initial-load-path)": recipe.model.init_from is not None,
        "model.fixed_lambda": recipe.model.fixed_lambda,
        f"data.kind={recipe.data.kind}": isinstance(recipe.data, MaskedTextData),
    }
    if found := [setting for setting, is_set in ignored.items() if is_set]:
        raise ValueError(f"diff_lab.titan does not know {', '.join(found)}: leave it out, or take diff-lab train.")
    hf = build_config(recipe, data.batches.vocab_size, data.tokenizer)
    hf._attn_implementation = "diff_attention"
    adamw = {"lr": train.learning_rate, "betas": tuple(train.betas), "eps": train.eps}
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={**adamw, "weight_decay": decay})
        for pattern, decay in ((UNDECAYED, 0.0), (".*", train.weight_decay))
    ]

    def factor(done: int) -> float:
        return learning_rate(min(done + 1, train.steps), train) / train.learning_rate

    loss = CrossEntropyLoss.Config(global_vocab_size=hf.vocab_size)
    return DiffTrainer.Config(
        model_spec=ModelSpec(
            name="diff_transformer",
            flavor=recipe.name,
            model=DiffModel.Config(hf=hf, seed=train.seed, precision=train.precision),
            parallelize_fn=parallelize,
            pipelining_fn=pipeline_llm,
            post_optimizer_build_fn=None,
            state_dict_adapter=Adapter,
        ),
        hf_assets_path=str(folder),
        dump_folder=str(folder),
        loss=ChunkedLossWrapper.Config(loss_fn=loss),  # the logits of a large vocabulary are never all in memory
        tokenizer=RecipeTokenizer(tokenizer=data.tokenizer),
        recipe=recipe,
        dataloader=RecipeDataLoader.Config(batches=data.batches, rows=recipe.data.batch_size),
        optimizer=OptimizersContainer.Config(param_groups=groups),
        lr_scheduler=Schedule(factor=factor, warmup_steps=train.warmup_steps),
        training=TrainingConfig(
            local_batch_size=1,
            global_batch_size=recipe.data.batch_size,
            seq_len=recipe.data.length,
            max_norm=train.max_grad_norm or float("inf"),
            steps=train.steps,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=Metrics.Config(log_freq=train.log_every, enable_tensorboard=True, disable_color_printing=True),
        checkpoint=CheckedCheckpoints.Config(
            enable=True,
            interval=train.checkpoint_every or train.steps,
            last_save_in_hf=True,
            keep_latest_k=max(2, train.keep_checkpoints),
        ),
        activation_checkpoint=FullAC.Config() if train.gradient_checkpointing else None,
        compile=CompileConfig(enable=train.compile, components=["model"]),
        debug=DebugConfig(seed=train.seed, enable_structured_logging=False),
    )
