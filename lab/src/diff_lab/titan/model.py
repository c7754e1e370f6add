"""Our language model as torchtitan sees one: embedding, layers by number, norm and head, which pipelines take apart."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import ModuleDict
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from diff_lab.train.plan import flops_per_token
from diff_lab.train.run_setup import draw_weights
from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.parallel_plan import check_ranks
from diff_transformer.parallel import Context


def hf_name(name: str) -> str:
    """Return the name of a module or parameter in the model of transformers."""
    name = re.sub(r"\._checkpoint_wrapped_module\b", "", name).replace("tok_embeddings", "embed_tokens")
    return name if name.startswith("lm_head") else f"model.{name}"


class DiffModel(BaseModel):
    """The model, or a stage of it: modules that a stage lacks are None."""

    _skip_lm_head = False  # set for a loss that applies the head itself

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """A configuration of the library, and the seed of the first weights."""

        hf: Any
        seed: int = 0
        precision: str = "no"

        @property
        def layers(self) -> range:
            return range(self.hf.num_hidden_layers)

        def update_from_config(self, *, config: Any, **_: Any) -> None:
            """Refuse degrees of parallelism that the model does not take, before anything is built."""
            degrees = config.parallelism
            check_ranks(degrees.tensor_parallel_degree, self.hf)
            if self.hf.tie_word_embeddings and degrees.pipeline_parallel_degree > 1:
                raise ValueError(
                    "tied embeddings are on the first and the last stage at once: with pipeline parallelism "
                    "model.tie_word_embeddings must be false."
                )

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            return sum(p.numel() for p in model.parameters()), int(flops_per_token(self.hf, seq_len))

    def __init__(self, config: "DiffModel.Config") -> None:
        super().__init__()
        self.config = config
        model = DiffTransformerForCausalLM(config.hf)
        model.tie_weights()
        self.tok_embeddings: Any = model.model.embed_tokens
        self.layers: Any = ModuleDict({str(i): layer for i, layer in enumerate(model.model.layers)})
        self.norm: Any = model.model.norm
        self.lm_head: Any = model.lm_head
        self._model = (model,)  # for its rule of first weights, and rotary tables; in a tuple, as it is no part

    def verify_module_protocol(self) -> None:
        """Accept modules of transformers."""

    def forward(
        self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor | None = None, context: Context | None = None
    ) -> Tensor:
        """Compute logits, or hidden states for the next stage, of tokens (1, N), or hidden states (1, N, D).

        All rows of a batch lie one after another. Documents are told apart by positions (1, N), which begin anew, and
        by cu_seqlens, or by the context of a rank that has a part of the sequence.
        """
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            hidden = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
            tables = self._model[0].model.rotary_emb.to(positions.device)(hidden, position_ids=positions)
            more: dict[str, Any] = {} if context is None else {"context": context}
            more |= {"position_embeddings": tables, "attention_mask": None, "cu_seq_lens_q": cu_seqlens}
            for layer in self.layers.values():
                hidden = layer(hidden, **more)
            hidden = hidden if self.norm is None else self.norm(hidden)
            return hidden if self.lm_head is None or self._skip_lm_head else self.lm_head(hidden)

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Draw the first weights of `diff-lab train`: each module's from a stream named by seed and module."""
        if self.config.hf.tie_word_embeddings:
            self.lm_head.weight = self.tok_embeddings.weight
        named = ((hf_name(name), module) for name, module in self.named_modules() if name)
        draw_weights(self._model[0], self.config.seed, named)


class Adapter(StateDictAdapter):
    """Names of transformers' model and back; no weight changes."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        tied = self.model_config.hf.tie_word_embeddings
        return {hf_name(name): x for name, x in state_dict.items() if not (tied and name == "lm_head.weight")}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        names = {name: name.removeprefix("model.").replace("embed_tokens", "tok_embeddings") for name in hf_state_dict}
        return {names[name]: x for name, x in hf_state_dict.items()}
