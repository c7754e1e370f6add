"""Configures torchtitan's trainer from a recipe, and adds to it what users of `diff-lab train` would miss.

That is a checkpoint when a run is stopped, SHA-256 of checkpoint files, an end when the loss rises, validation, λ of
each layer in the log, trackers, and a folder that ``from_pretrained`` loads.
"""

import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
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

from diff_lab.data.batches import IGNORED
from diff_lab.titan.data import NoTokenizer, RecipeDataLoader, in_one_row
from diff_lab.titan.model import Adapter, DiffModel
from diff_lab.train.distributed import all_gather_object, on_rank0, propagate_errors, reshard
from diff_lab.train.loop import Evaluate, Interrupt, TrainingInterrupted
from diff_lab.train.progress import Tracker, check_trackers
from diff_lab.train.recipe import Data, MaskedTextData, Recipe, TrainRecipe, build_config
from diff_lab.train.step import DivergenceError, SpikeDetector, learning_rate
from diff_transformer.nn import Lambda
from diff_transformer.parallel import Context, context_parallel, shard, tensor_parallel
from diff_transformer.utils.manifest import MANIFEST, digests, why_changed, write_manifest

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
        tensor_parallel(
            layers,
            parallel_dims.get_mesh("tp"),
            embedding=model.tok_embeddings,
            norm=model.norm,
            head=model.lm_head,
            sequence_parallel=parallelism.enable_sequence_parallel,
            gather_logits=False,
        )
    if ac_config is not None:
        ac_config.build(dump_folder=others["dump_folder"]).apply(model)
    if compile_config.enable and "model" in compile_config.components:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    shard(
        model,
        layers,
        parallel_dims.get_mesh(["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]),
        param_dtype=torch.bfloat16 if model.config.precision == "bf16" else None,
        reshard_after_forward=get_fsdp_reshard_after_forward_policy(
            parallelism.fsdp_reshard_after_forward, parallel_dims.pp_enabled
        ),
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss is divided by the targets of all ranks
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return model


class Schedule(LRSchedulersContainer):
    """The learning rates of a recipe."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        """The recipe's settings of training."""

        recipe: Any = None

        def build(self, *, optimizers: Any, training_steps: int) -> "Schedule":
            train: TrainRecipe = self.recipe
            return Schedule(
                optimizers, lambda done: learning_rate(min(done + 1, train.steps), train) / train.learning_rate
            )


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
            raise DivergenceError(
                f"Stopped at step {step}: {bad}. Losses are looked at every {self.config.log_freq} steps."
            )


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

    unchecked: Path | None = None  # a checkpoint that may be on its way to the disk

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        is_saved = super()._save(curr_step, last_step)
        if is_saved:
            self.unchecked = Path(self._create_checkpoint_id(curr_step))
            if self.save_future is None:
                self._write_digests()
        return is_saved

    def _wait_for_saving(self) -> None:
        super()._wait_for_saving()
        self._write_digests()

    def _write_digests(self) -> None:
        folder, self.unchecked = self.unchecked, None
        dist.barrier()
        if folder is not None and dist.get_rank() == 0:
            names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
            write_manifest(folder, digests(folder, names))
        dist.barrier()

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        folder = Path(checkpoint_id)
        if not from_hf and folder.parent != Path(self.folder):
            raise ValueError(
                f"--checkpoint.initial-load-path {checkpoint_id!r} is no checkpoint of this run, and torchtitan would "
                "unpickle it: a model in safetensors is loaded with --checkpoint.initial-load-in-hf."
            )
        changed = None if from_hf else on_rank0(lambda: why_changed(folder))
        if changed is not None:
            raise ValueError(f"The checkpoint {checkpoint_id!r} is damaged: {changed}.")
        super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)

    def _close(self) -> None:
        self.maybe_wait_for_saving()
        super()._close()


class Spread:
    """The model of all ranks, for a callback that asks a model of transformers for the summed loss of rows of text."""

    def __init__(self, trainer: "DiffTrainer") -> None:
        self.trainer, self.config = trainer, trainer.model_config.hf
        self.parameters = trainer.model_parts[0].parameters

    def __call__(self, **row: Any) -> SimpleNamespace:
        """Give each data-parallel rank its rows, as many at a time as in training, and add up their losses."""
        trainer, data = self.trainer, self.trainer.dataloader
        names = ("input_ids", "labels", "position_ids")
        batch = {name: row[name].view(-1, trainer.config.training.seq_len) for name in names if name in row}
        count, total = len(batch["labels"]), torch.zeros((), device=trainer.device)
        own = data.at_once * trainer.num_pipeline_parallel_microbatches
        for start in range(0, count, own * data.ranks):
            rows = torch.arange(own) + start + own * data.rank
            part = {name: x[rows.clamp(max=count - 1)] for name, x in batch.items()}
            part["labels"][rows >= count] = IGNORED  # as all ranks take part in every message
            parts = (slice(first, first + data.at_once) for first in range(0, own, data.at_once))
            total += trainer.loss_of([in_one_row({name: x[each] for name, x in part.items()}) for each in parts])
        dist.all_reduce(total)
        return SimpleNamespace(loss=total / trainer.parallel_dims.tp)  # whose ranks have the same loss each


class DiffTrainer(Trainer):
    """Trains a recipe. A signal ends it after its step, with a checkpoint."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """The recipe, the tokenizer that goes into the exported folder, if there is one, and what validates."""

        recipe: Any = None
        tokenizer_to_save: Any = None
        on_evaluate: Evaluate | None = None

    ntokens_seen: int

    def __init__(self, config: "DiffTrainer.Config") -> None:
        super().__init__(config)
        self.metrics_processor.spikes = SpikeDetector(config.recipe.train.max_loss_rise)
        logger, recipe, folder = self.metrics_processor.logger, config.recipe, Path(config.dump_folder)
        with propagate_errors():
            for library in recipe.train.trackers if isinstance(logger, LoggerContainer) else ():  # on one rank
                begun = min(path.name for path in (folder / config.metrics.save_tb_folder).iterdir())
                settings = recipe.model_dump(mode="json")
                logger.add_logger(Tracker(library, f"{folder.name}-{begun}", folder, settings))

    def train(self) -> None:
        with Interrupt() as self.interrupt:
            super().train()
        if self.step < self.config.training.steps:
            raise TrainingInterrupted(f"Stopped after step {self.step}, with a checkpoint: the same command resumes.")

    def should_continue_training(self) -> bool:
        stops = torch.tensor(float(self.interrupt.requested), device=self.device)
        dist.all_reduce(stops, dist.ReduceOp.MAX)
        if not stops or self.step == self.config.training.steps:
            return super().should_continue_training()
        self.checkpointer.interval = max(1, self.step)  # whatever the interval was, this step is saved
        self.checkpointer.save(self.step)
        return False

    def train_step(self, data_iterator: Any) -> None:
        # Dropout's random numbers, too, are a function of the step: a resumed run draws the same.
        stream = f"{self.config.debug.seed}/{self.step}/{dist.get_rank()}".encode()
        torch.manual_seed(int.from_bytes(hashlib.sha256(stream).digest()[:8], "big", signed=True))
        super().train_step(data_iterator)
        every, last = self.config.recipe.train.evaluate_every, self.config.training.steps
        if self.config.on_evaluate is not None and (self.step == last or (every and self.step % every == 0)):
            seen = self.ntokens_seen
            for part in self.model_parts:
                part.eval()
            with torch.no_grad():
                results = self.config.on_evaluate(Spread(self), self.step)
            for part in self.model_parts:
                reshard(part)
                part.train()
            self.ntokens_seen = seen
            self.metrics_processor.log_validation(results["validation/loss"], self.step, results)

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

    def post_dataloading_process(
        self, input_dict: dict[str, Any], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return this rank's tokens, labels, and the model's other arguments."""
        tokens, positions = input_dict["input"], input_dict["positions"]
        more = {"positions": positions, "cu_seqlens": input_dict["cu_seqlens"]}
        if self.parallel_dims.cp_enabled:
            context = Context(self.parallel_dims.get_mesh("cp"), tokens.shape[1], input_dict["documents"], self.device)
            tokens, labels = context.own(tokens), context.own(labels)
            more = {"positions": context.own(positions), "context": context}
        self.ntokens_seen += labels.numel()
        return tokens, labels, more

    def close(self) -> None:
        super().close()
        settings = self.config.checkpoint
        folder = Path(self.config.dump_folder, settings.folder, f"step-{self.config.training.steps}")
        if settings.last_save_in_hf and folder.is_dir() and dist.get_rank() == 0:
            shutil.rmtree(folder / "sharded", ignore_errors=True)  # the same weights, as the ranks had them
            self.model_config.hf.architectures = ["DiffTransformerForCausalLM"]
            self.model_config.hf.save_pretrained(folder)
            if self.config.tokenizer_to_save is not None:
                self.config.tokenizer_to_save.save_pretrained(folder)


def trainer_config(recipe: Recipe, data: Data, folder: Path, on_evaluate: Evaluate | None = None) -> DiffTrainer.Config:
    """Return torchtitan's configuration of a recipe, which its flags may change.

    Raises:
        ValueError: a setting that would be ignored here.
    """
    train = recipe.train
    check_trackers(train.trackers)
    ignored = {
        "train.optimizer=muon": train.optimizer == "muon",
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
    undecayed = UNDECAYED + ("|^lm_head" if hf.tie_word_embeddings else "")
    decays = {undecayed: 0.0, ".*": train.weight_decay}
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={**adamw, "weight_decay": decay})
        for pattern, decay in decays.items()
    ]
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
        tokenizer=NoTokenizer.Config(),
        recipe=recipe,
        tokenizer_to_save=data.tokenizer,
        on_evaluate=on_evaluate,
        dataloader=RecipeDataLoader.Config(batches=data.batches, rows=recipe.data.batch_size),
        optimizer=OptimizersContainer.Config(
            param_groups=groups, implementation="fused" if torch.cuda.is_available() else "for-loop"
        ),
        lr_scheduler=Schedule.Config(recipe=train, warmup_steps=train.warmup_steps),
        training=TrainingConfig(
            local_batch_size=1,
            global_batch_size=recipe.data.batch_size,
            seq_len=recipe.data.length,
            max_norm=train.max_grad_norm or float("inf"),
            steps=train.steps,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",  # the model's own autocast
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=Metrics.Config(log_freq=train.log_every, enable_tensorboard=True, disable_color_printing=True),
        checkpoint=CheckedCheckpoints.Config(
            enable=True,
            interval=train.checkpoint_every or train.steps,
            last_save_in_hf=True,
            last_save_model_only=True,
            keep_latest_k=max(2, train.keep_checkpoints),
        ),
        activation_checkpoint=FullAC.Config() if train.gradient_checkpointing else None,
        compile=CompileConfig(enable=train.compile, components=["model"]),
        debug=DebugConfig(seed=train.seed, enable_structured_logging=False),
    )
