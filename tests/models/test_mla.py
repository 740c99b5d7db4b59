"""The MLA model's parts that transformers cannot show: refusals, memory, ties, steps of mixed shapes."""

from dataclasses import replace

import pytest
import torch

from thalweg.errors import UserError
from thalweg.models.batch import RowBatch
from thalweg.models.config_mla import MlaConfig
from thalweg.models.interface import PoolSizes
from thalweg.models.linear import Weights
from thalweg.models.mla.caches import allocate, pool_bytes
from thalweg.models.mla.experts import Experts
from thalweg.models.mla.model import MlaModel
from thalweg.models.mla.step import Step
from thalweg.models.weights.expected import expected_tensors

CONFIG = MlaConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=16,
    qk_rope_head_dim=64,
    v_head_dim=16,
    first_k_dense_replace=1,
    intermediate_size=48,
    moe_intermediate_size=16,
    n_routed_experts=8,
    num_experts_per_token=2,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.0,
    norm_topk_prob=True,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    rope_theta=10000.0,
    rope_scaling=None,
    rope_interleave=True,
    rms_norm_eps=1e-6,
    attention_bias=False,
    max_position_embeddings=4096,
    num_mtp_layers=0,
    vocab_size=40,
    bos_token_id=None,
    eos_token_ids=(),
    pad_token_id=None,
    quantization=None,
)


def random_weights(config: MlaConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tensor.shape for name, tensor in expected_tensors(config).items()}
    return {n: (torch.randn(s, generator=generator) * s[-1] ** -0.5).to(dtype) for n, s in shapes.items()}


def row_batch(parts: list[tuple[int, int, int]], page_table: torch.Tensor) -> RowBatch:
    """parts: (request, first position, number of rows)."""
    positions = torch.cat([torch.arange(start, start + count) for _, start, count in parts])
    return RowBatch(
        tokens=positions % CONFIG.vocab_size,
        positions=positions,
        row_to_request=torch.cat([torch.full((count,), request) for request, _, count in parts]),
        page_table=page_table,
        window_table=torch.full_like(page_table, -1),
        state_slots=torch.zeros(len(page_table), dtype=torch.int64),
    )


def experts_that_score(scores: list[float], bias: list[float], config: MlaConfig = CONFIG) -> Experts:
    """Experts whose sigmoid scores for the input (1, 0, 0, ...) are `scores`."""
    prefix = f"model.layers.{CONFIG.first_k_dense_replace}.mlp."
    tensors = {n.removeprefix(prefix): t for n, t in random_weights(config).items() if n.startswith(prefix)}
    tensors["gate.weight"] = torch.zeros(8, 32)
    tensors["gate.weight"][:, 0] = torch.logit(torch.tensor(scores, dtype=torch.float64)).float()
    tensors["gate.e_score_correction_bias"] = torch.tensor(bias)
    return Experts(config, Weights(tensors, torch.float32, batch_invariant=True))


def route(experts: Experts) -> tuple[list[int], list[float]]:
    x = torch.zeros(1, 32)
    x[0, 0] = 1.0
    chosen, weights = experts.route(x)
    return chosen[0].tolist(), weights[0].tolist()


def test_only_experts_of_the_best_groups_are_chosen_and_the_bias_chooses_without_weighing() -> None:
    """Groups of two score 0.9, 1.0, 1.1, 0.7 (+ 0.5 by bias): groups 3 (1.2) and 2 stay; the best single expert, 1, is out."""
    scores = [0.05, 0.85, 0.5, 0.5, 0.6, 0.5, 0.4, 0.3]
    experts = experts_that_score(scores, [0, 0, 0, 0, 0, 0, 0, 0.5])
    chosen, weights = route(experts)
    assert chosen == [7, 4]  # 0.8 with its bias, 0.6
    assert weights == pytest.approx([2.0 * 0.3 / 0.9, 2.0 * 0.6 / 0.9])


def test_equal_scores_choose_the_lower_group_and_the_lower_expert() -> None:
    assert route(experts_that_score([0.5] * 8, [0.0] * 8))[0] == [0, 1]


def test_without_groups_and_without_normalisation() -> None:
    config = replace(CONFIG, n_group=1, topk_group=1, norm_topk_prob=False)
    chosen, weights = route(experts_that_score([0.05, 0.85, 0.5, 0.5, 0.6, 0.5, 0.4, 0.3], [0.0] * 8, config))
    assert chosen == [1, 4] and weights == pytest.approx([1.7, 1.2])


def test_a_row_is_routed_alike_alone_and_in_a_batch() -> None:
    """Eight scores a row: narrower than a vector, so a float32 sigmoid would differ with the row's place."""
    tensors = random_weights(CONFIG)
    weights = Weights(tensors, torch.float32, batch_invariant=True).scope("model.layers.1").scope("mlp")
    experts = Experts(CONFIG, weights)
    x = torch.randn(101, 32, generator=torch.Generator().manual_seed(1))
    chosen, together = experts.route(x)
    for row in range(101):
        alone = experts.route(x[row : row + 1])
        assert torch.equal(alone[0][0], chosen[row]) and torch.equal(alone[1][0], together[row])


def test_a_latent_that_no_cache_holds_is_refused() -> None:
    with pytest.raises(UserError, match="kv_lora_rank 256 and qk_rope_head_dim 64: possible are 512 and 64"):
        MlaModel(replace(CONFIG, kv_lora_rank=256), Weights({}, torch.float32, True))


def test_an_unknown_weight_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"does not know.*surprise"):
        MlaModel(CONFIG, Weights({**random_weights(CONFIG), "surprise": torch.zeros(1)}, torch.float32, True))


@pytest.mark.parametrize("kv_layout", ["mla_bf16", "exact"])
def test_the_pool_takes_what_the_arithmetic_says(kv_layout: str) -> None:
    caches = allocate(CONFIG, 5, kv_layout, torch.device("cpu"))
    assert [tuple(cache.shape) for cache in caches] == [(5, 256, 1, 576)] * 2
    assert sum(cache.nbytes for cache in caches) == pool_bytes(CONFIG, 5, kv_layout)


def test_an_unknown_kv_layout_is_refused() -> None:
    with pytest.raises(UserError, match="'v4': the MLA family has mla_bf16 and exact"):
        allocate(CONFIG, 5, "v4", torch.device("cpu"))


def test_requests_with_as_many_rows_share_a_call_and_the_table_is_as_wide_as_they_need() -> None:
    table = torch.arange(1, 4 * 4096 + 1).view(4, 4096)
    parts = [(2, 256, 1), (0, 10, 3), (3, 600, 1), (1, 0, 3)]
    one, three = Step(row_batch(parts, table)).groups
    assert one.rows.tolist() == [[0], [4]] and three.rows.tolist() == [[1, 2, 3], [5, 6, 7]]
    assert one.prefix_lengths.tolist() == [256, 600] and three.prefix_lengths.tolist() == [10, 0]
    assert torch.equal(one.page_table, table[[2, 3], :3]) and torch.equal(three.page_table, table[[0, 1], :1])
    assert three.parents.tolist() == [[-1, 0, 1]] * 2


def test_a_request_without_pages_writes_nothing_and_disturbs_nobody() -> None:
    model = MlaModel(CONFIG, Weights(random_weights(CONFIG), torch.float32, True))
    table = torch.tensor([[2, -1], [-1, -1]])
    together, alone = (model.allocate(PoolSizes(3, 0, 0), "exact") for _ in range(2))
    hidden = model.forward(row_batch([(0, 0, 5), (1, 0, 3)], table), together)
    expected = model.forward(row_batch([(0, 0, 5)], table), alone)
    torch.testing.assert_close(hidden[:5], expected, rtol=1e-6, atol=1e-6)
    assert hidden.isfinite().all()
    for cache in together:
        assert (cache[:2] == 0).all() and (cache[2, 5:] == 0).all()


def test_a_bf16_model_stays_near_the_float32_one() -> None:
    weights = random_weights(CONFIG, torch.bfloat16)
    table = torch.tensor([[1, 2]])
    logits = []
    for dtype, kv_layout in ((torch.float32, "exact"), (torch.bfloat16, "mla_bf16")):
        model = MlaModel(CONFIG, Weights({name: tensor.to(dtype) for name, tensor in weights.items()}, dtype, False))
        caches = model.allocate(PoolSizes(3, 0, 0), kv_layout)
        logits.append(model.logits(model.forward(row_batch([(0, 0, 300)], table), caches)))
    assert logits[1].dtype == torch.float32
    error = (logits[0] - logits[1]).abs().amax(dim=1)
    assert error.median() < 0.1 * logits[0].std()
