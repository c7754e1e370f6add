"""Makes a layer's parts beside its attention: λ, norms, rotary tables, feed-forward; draws their parameters.

Section 2.2's decoder layer puts them together around any attention.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diff_transformer.ops import lambda_init_schedule, lambda_value, rms_norm, rotary_tables
from diff_transformer.ops.attention_request import PLAIN, may_skip_dispatcher
from diff_transformer.ops.cpu.cpu_backend import token_step

_DRAWN_AT_ONCE = 1 << 20  # numbers, 8 MiB of them beside the weights


def residual_projection(in_features: int, out_features: int, bias: bool = False) -> nn.Linear:
    """Make a projection whose output is added to the residual stream: W_O of attention, W_down of SwiGLU.

    It is marked, and no class of its own, as tools that quantise look for `nn.Linear` itself.
    """
    projection = nn.Linear(in_features, out_features, bias=bias)
    projection.adds_to_residual = True  # type: ignore[assignment]  # nn.Module takes it for a weight
    return projection


def draw_normal(weight: Tensor, std: float) -> Tensor:
    """Fill a weight with numbers from N(0, std²), in place, without a gradient.

    On the CPU they come from torch's global generator in float64 and are rounded once to the weight's dtype. In float32
    torch draws by vectors, and by another formula, if the processor has them: the numbers of one seed differ between
    processors. Other devices draw with generators of their own. On the meta device nothing is drawn.

    The weight is floating and on the CPU contiguous; it is also returned.
    """
    with torch.no_grad():
        if weight.device.type != "cpu":
            return weight.normal_(std=std)
        for part in weight.view(-1).split(_DRAWN_AT_ONCE):
            part.copy_(torch.randn(part.shape, dtype=torch.float64, device="cpu").mul_(std))
    return weight


class KeepsFloat32(nn.Module):
    """Mixin: parameters and buffers follow the model's device, and its dtype except below float32.

    Examples:
        >>> Lambda(head_dim=16, layer=1).half().q1.dtype
        torch.float32
    """

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, in float32 if it is narrower: servers set the model's dtype before they load."""
        if param is not None and param.is_floating_point() and param.dtype.itemsize < torch.float32.itemsize:
            param = nn.Parameter(param.detach().to(torch.float32), requires_grad=param.requires_grad)
        super().register_parameter(name, param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KeepsFloat32":
        def in_float32_at_least(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.is_floating_point() and moved.dtype.itemsize < torch.float32.itemsize:
                return tensor.to(moved.device, torch.float32)
            return moved

        return super()._apply(in_float32_at_least, recurse)


class ReplicatedAcrossHeads(nn.Module):
    """Mixin: one set of parameters for all heads of a layer.

    Under tensor parallelism a rank computes some of the heads, so that its backward pass gives the part of the gradient
    that comes from those. Whoever spreads the heads sets ``sum_gradient``: a function that returns its argument and, in
    the backward pass, sums the gradient over the ranks.
    """

    sum_gradient: Callable[[Tensor], Tensor] | None = None

    def shared(self, value: Tensor) -> Tensor:
        """Return a value computed from this module's parameters alone, as the heads are to use it."""
        return value if self.sum_gradient is None else self.sum_gradient(value)


class Lambda(KeepsFloat32, ReplicatedAcrossHeads):
    """λ = exp(λq1·λk1) − exp(λq2·λk2) + λ_init: four d-vectors shared by the heads of a layer.

    The vectors stay in float32 when the model around them is cast to a half-precision type: λ is an exponential of
    their products, and its steps during training are smaller than bfloat16 resolves.

    Args:
        head_dim: width d of the vectors.
        layer: the layer's number l, counted from 1.
        lambda_init: "schedule" for 0.8 − 0.6·exp(−0.3·(l − 1)), or one constant.

    Examples:
        >>> Lambda(head_dim=16, layer=1)().shape
        torch.Size([])
    """

    STD = 0.1  # of the vectors at the start (Section 2.1)

    def __init__(self, head_dim: int, layer: int, lambda_init: float | str = "schedule") -> None:
        super().__init__()
        self.lambda_init = constant_lambda(layer, lambda_init)
        self.q1, self.k1, self.q2, self.k2 = (nn.Parameter(torch.empty(head_dim)) for _ in range(4))
        self._known: Tensor | None = None  # the vectors' numbers, λ_init and λ
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the four vectors from N(0, 0.1²)."""
        for vector in self.parameters():
            draw_normal(vector, self.STD)

    def forward(self) -> Tensor:
        """Return λ as a scalar, float32."""
        vectors = self.q1, self.k1, self.q2, self.k2
        # While decoding, eight operators a layer and token would compute the same number again. It is known by the
        # vectors' numbers: writing to a parameter's .data leaves its version as it is.
        lam: Tensor | None = token_step("known_lambda", *vectors, self.lambda_init, self._known)
        if lam is not None:
            return lam
        lam = self.shared(lambda_value(*vectors, self.lambda_init))
        is_plain = may_skip_dispatcher() and all(type(x) in PLAIN for x in vectors)
        if is_plain and lam.is_cpu and not torch.is_grad_enabled():
            self._known = torch.cat((*vectors, lam.new_tensor([self.lambda_init]), lam.view(1)))
        return lam


def constant_lambda(layer: int, lambda_init: float | str) -> float:
    """Return λ_init of layer l, counted from 1: by the schedule, or the one constant, which must be finite."""
    if isinstance(lambda_init, str):
        if lambda_init != "schedule":
            raise ValueError(f"lambda_init must be 'schedule' or a number, got {lambda_init!r}.")
        return lambda_init_schedule(layer)
    if isinstance(lambda_init, bool) or not math.isfinite(lambda_init):
        raise ValueError(f"lambda_init must be 'schedule' or a finite number, got {lambda_init!r}.")
    return float(lambda_init)


class DualLambda(KeepsFloat32, ReplicatedAcrossHeads):
    """λ = exp(a) − exp(b) + λ_init: two numbers in the place of four vectors, as timm's ``dual_lambda``.

    They start at 0, and λ at λ_init. Arguments are those of :class:`Lambda`.

    Examples:
        >>> round(DualLambda(layer=1)().item(), 3)
        0.2
    """

    def __init__(self, layer: int, lambda_init: float | str = "schedule") -> None:
        super().__init__()
        self.lambda_init = constant_lambda(layer, lambda_init)
        self.a, self.b = (nn.Parameter(torch.empty(1)) for _ in range(2))  # FSDP2 shards no scalars
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set both numbers to 0."""
        for number in self.parameters():
            nn.init.zeros_(number)

    def forward(self) -> Tensor:
        """Return λ as a scalar, float32."""
        return self.shared((self.a.exp() - self.b.exp() + self.lambda_init).squeeze(0))


class RMSNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight over the last axis, (…, n) → (…, n).

    Examples:
        >>> RMSNorm(2)(torch.tensor([3.0, 4.0])).detach()
        tensor([0.8485, 1.1314])
    """

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def reset_parameters(self) -> None:
        """Set the weight to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor | None = token_step("normed", x, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps) if normed is None else normed


class HeadwiseNorm(RMSNorm, ReplicatedAcrossHeads):
    """(1 − λ_init) · RMSNorm over each head's own channels (Equation 3), (…, H, 2d) → (…, H, 2d).

    The weight is shared by the heads of a layer. The factor takes the *constant* λ_init, not the learned λ: it aligns
    the gradients with the Transformer's at the start of training (Appendix G).

    No "RMSNorm" at the end of the name: servers replace modules of that name by a norm of theirs, which has no factor.
    The operator applies a subclass as the RMSNorm that this is, whatever its ``forward`` says. A norm with another
    formula subclasses :class:`RMSNorm`, whose weights a model draws, and :class:`ReplicatedAcrossHeads`: it is called
    on the heads that the operator returns.

    Examples:
        >>> HeadwiseNorm(2, lambda_init=0.2)(torch.tensor([3.0, 4.0])).detach()
        tensor([0.6788, 0.9051])
    """

    def __init__(self, size: int, lambda_init: float, eps: float = 1e-5) -> None:
        super().__init__(size, eps)
        self.factor = 1.0 - lambda_init

    def forward(self, x: Tensor | None) -> Tensor:
        """Normalise heads (…, H, 2d); for None, return the weight (2d,) as the heads use it.

        Ask for the weight by this call: whoever keeps weights elsewhere (accelerate, offloaded to the CPU or to disk)
        brings those of a module that is called.
        """
        weight = self.shared(self.weight)
        return weight if x is None else rms_norm(x, weight, self.eps) * self.factor


class QueryKeyNorm(RMSNorm, ReplicatedAcrossHeads):
    """RMSNorm over the d channels of each query, or of each key, (…, d) → (…, d); all heads and maps share the weight.

    It has a class of its own, since the heads of a layer share the weight: see :class:`HeadwiseNorm`.

    Examples:
        >>> QueryKeyNorm(16)(torch.randn(2, 10, 4, 16)).shape
        torch.Size([2, 10, 4, 16])
    """

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.shared(self.weight), self.eps)


class QueryKeyClip(nn.Module):
    """x · min(1, 3 / √(mean(x²) + eps)) over the d channels of each query, or of each key, (…, d) → (…, d).

    RMSClip, as public code calls it: computed in float32 at least, it leaves a root mean square of 3 or less alone.

    Examples:
        >>> QueryKeyClip()(torch.tensor([[6.0, -6.0], [1.0, 2.0]]))
        tensor([[ 3.0000, -3.0000],
                [ 1.0000,  2.0000]])
    """

    LARGEST = 3.0  # root mean square

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        size = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide * (self.LARGEST * size).clamp(max=1.0)).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Cosines and sines for :func:`diff_transformer.ops.apply_rotary`; owns no parameters.

    Args:
        head_dim: width d of a query or key; even.
        theta: base of the frequencies.

    Examples:
        >>> cos, sin = RotaryEmbedding(head_dim=16)(torch.arange(10))
        >>> cos.shape
        torch.Size([10, 16])
    """

    def __init__(self, head_dim: int, theta: float = 10000.0) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for a rotary embedding, got {head_dim}.")
        self.head_dim = head_dim
        self.theta = theta

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each (B, N, d) or (N, d) in float32, of positions (B, N) or (N,)."""
        return rotary_tables(positions, self.head_dim, self.theta)

    def positions(self, x: Tensor, past: int = 0) -> tuple[Tensor, Tensor]:
        """Return the tables for x (B, N, D) whose first token stands at position ``past``."""
        return self(torch.arange(past, past + x.shape[1], device=x.device))


class PolyNorm(nn.Module):
    """w₀·n(x³) + w₁·n(x²) + w₂·n(x) + b with n(z) = z / √(mean(z²) + eps) over the last axis, (…, n) → (…, n).

    An activation with four numbers to train (arXiv 2411.03884). It is computed in float32 at least, since the mean of
    x⁶ overflows in half precision, and given back in the dtype of x.

    Examples:
        >>> PolyNorm()(torch.tensor([1.0, -1.0])).detach()
        tensor([ 1.0000, -0.3333])
    """

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.bias = nn.Parameter(torch.empty(1))
        self.eps = eps
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the three weights to ⅓ and the bias to 0."""
        nn.init.constant_(self.weight, 1 / 3)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        square = wide.square()
        of_cube, of_square, of_itself = (rms_norm(power, eps=self.eps) for power in (square * wide, square, wide))
        weight = self.weight
        return (weight[0] * of_cube + weight[1] * of_square + weight[2] * of_itself + self.bias).to(x.dtype)


class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) ⊙ W_up x), no biases, (…, D) → (…, D).

    Examples:
        >>> SwiGLU(64, intermediate_size=128)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = residual_projection(intermediate_size, hidden_size)
        self.act_fn: Callable[[Tensor], Tensor] = F.silu

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PolyNormGLU(SwiGLU):
    """W_down (PolyNorm(W_gate x) ⊙ W_up x): SwiGLU with another activation, as in Motif's models.

    Examples:
        >>> PolyNormGLU(64, intermediate_size=128)(torch.randn(2, 10, 64)).shape
        torch.Size([2, 10, 64])
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__(hidden_size, intermediate_size)
        self.act_fn = PolyNorm()


# By the name of the activation.
FEED_FORWARDS: dict[str, type[SwiGLU]] = {"silu": SwiGLU, "poly_norm": PolyNormGLU}


def feed_forward_class(hidden_act: str) -> type[SwiGLU]:
    """Return the feed-forward network with an activation. Raises ValueError for an unknown one."""
    if hidden_act not in FEED_FORWARDS:
        raise ValueError(f"hidden_act must be one of {', '.join(map(repr, FEED_FORWARDS))}, got {hidden_act!r}.")
    return FEED_FORWARDS[hidden_act]


class DecoderLayer(nn.Module):
    """Y = Attention(RMSNorm(X)) + X;  X' = SwiGLU(RMSNorm(Y)) + Y  (Section 2.2).

    Args:
        self_attn: any module that maps (B, N, D) to (B, N, D); keyword arguments of ``forward`` go to it.
        hidden_size: D.
        intermediate_size: width of the feed-forward network.
        norm_eps: eps of both norms.
        hidden_act: the feed-forward network's activation, "silu" or "poly_norm" (:class:`PolyNormGLU`).

    Raises:
        ValueError: another activation.

    Examples:
        >>> layer = DecoderLayer(DiffAttention(64, num_attention_heads=4, layer=1), 64, intermediate_size=128)
        >>> layer(torch.randn(2, 10, 64), is_causal=True).shape
        torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        self_attn: nn.Module,
        hidden_size: int,
        intermediate_size: int,
        norm_eps: float = 1e-5,
        hidden_act: str = "silu",
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = feed_forward_class(hidden_act)(hidden_size, intermediate_size)
        self.input_layernorm = RMSNorm(hidden_size, norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, norm_eps)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        hidden_states = hidden_states + self.attend(self.input_layernorm(hidden_states), **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    def attend(self, normed: Tensor, **kwargs: Any) -> Tensor:
        return self.self_attn(normed, **kwargs)
