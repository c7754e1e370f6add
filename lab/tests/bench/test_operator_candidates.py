import pytest
import torch
from torch import Tensor, nn

from diff_lab.bench.benchmark import DECODE, FORWARD, TRAINING
from diff_lab.bench.operator_candidates import (
    BASELINE,
    OperatorProblem,
    Shape,
    arrange,
    backend_of_auto,
    candidates,
    compute,
    draw,
    timed_run,
)
from diff_transformer.ops import flex
from diff_transformer.ops.backends import BACKENDS

CPU = torch.device("cpu")
SHAPE = Shape(batch=2, heads=4, width=8, queries=20, keys=20)


@pytest.fixture
def problem() -> OperatorProblem:
    return draw(SHAPE, CPU)


def reason(name: str, pass_: str, length: int) -> str | None:
    """Of inputs that take no memory, however long they are."""
    shape = Shape(batch=1, heads=2, width=64, queries=1 if pass_ == DECODE else length, keys=length)
    problem = arrange(shape, lambda *size: torch.zeros(()).expand(size))
    return candidates()[name].reason(problem, pass_)


def test_every_backend_is_a_candidate() -> None:
    assert {BASELINE, "auto", *BACKENDS} < candidates().keys()
    assert next(iter(candidates())) == BASELINE


def test_the_baseline_has_the_same_bytes(problem: OperatorProblem) -> None:
    q, k, v = candidates()[BASELINE].arrange(problem.q, problem.k, problem.v)
    assert {tensor.shape for tensor in (q, k, v)} == {(2, 4, 20, 8)}
    assert all(tensor.is_contiguous() for tensor in (q, k, v))
    gradients = timed_run(candidates()[BASELINE], problem, TRAINING)()
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("name", [f"{BASELINE} vLLM", f"{BASELINE} zentorch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("queries", "pass_"), [(300, FORWARD), (1, DECODE)])
def test_other_projects_attend_as_the_baseline(queries: int, pass_: str, dtype: torch.dtype, name: str) -> None:
    if name not in candidates():
        pytest.skip("its library is in the environment of `make bench-anchors` alone")
    case = draw(Shape(2, 4, 64, queries, 300), torch.device("cpu")).to(dtype)
    ours, its = (timed_run(candidates()[one], case, pass_)() for one in (BASELINE, name))
    torch.testing.assert_close(its, ours, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0)
    assert candidates()[name].reason(case, TRAINING) == "it has no backward"


def test_a_timed_run_gives_gradients_of_the_inputs_and_of_lambda(problem: OperatorProblem) -> None:
    gradients = timed_run(candidates()["auto"], problem, TRAINING)()
    truth = compute(candidates()["reference"], problem, TRAINING)
    assert len(gradients) == 4
    torch.testing.assert_close(gradients[0], truth["q"])
    torch.testing.assert_close(gradients[3], truth["lam"].sum())
    assert not any(tensor.requires_grad for tensor in (problem.q, problem.k, problem.v, problem.lam))


class _PreparedHeads(nn.Module):
    """In the place of a projection: hands over what was prepared."""

    def __init__(self, heads: Tensor) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, hidden: Tensor) -> Tensor:
        return self.heads.transpose(1, 2).flatten(2)


def test_diffllama_is_what_its_module_computes(problem: OperatorProblem) -> None:
    from transformers import DiffLlamaConfig
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

    candidate = candidates()["DiffLlama"]
    q, k, v = candidate.arrange(problem.q, problem.k, problem.v)
    config = DiffLlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=4, head_dim=8)
    config._attn_implementation = "sdpa"
    module = DiffLlamaAttention(config, layer_idx=2)
    module.q_proj, module.k_proj, module.v_proj = _PreparedHeads(q), _PreparedHeads(k), _PreparedHeads(v)
    module.groupnorm = module.o_proj = nn.Identity()
    vectors = (module.lambda_q1, module.lambda_k1, module.lambda_q2, module.lambda_k2)
    for vector in vectors:
        nn.init.zeros_(vector)
    positions = torch.ones(2, 20, 8), torch.zeros(2, 20, 8)  # a rotation by nothing
    with torch.no_grad():
        theirs, _ = module(torch.zeros(2, 20, 32), positions)
        lam = torch.tensor(module.lambda_init).expand(2, 2, 20)
        ours = candidate.attend((q, k, v), lam, True).transpose(1, 2).flatten(2) * (1 - module.lambda_init)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_what_is_left_out_has_a_reason() -> None:
    assert reason("reference", FORWARD, 2048) is None
    assert reason("reference", TRAINING, 2049) == "it takes long: measured up to length 2048"
    assert reason("reference", DECODE, 8192) is None
    assert "length 4096" in str(reason("sdpa_split_v", TRAINING, 8192))
    assert "no backward on the CPU" in str(reason("flex", TRAINING, 64)) or not flex._cpu_has_vectors()
    assert "length 2048" in str(reason("flex", DECODE, 4096))
    assert reason("auto", TRAINING, 10**6) is None


def test_auto_stands_for_a_backend(problem: OperatorProblem) -> None:
    assert backend_of_auto(problem, FORWARD) in BACKENDS
