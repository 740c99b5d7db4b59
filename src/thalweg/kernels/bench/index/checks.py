"""Is what a call returned right? Scores against float64 on the same bytes, selections against torch.topk. Cheap: rows sampled."""

import torch

from thalweg.kernels.bench.benchmark import Wrong
from thalweg.kernels.bench.index.inputs import Inputs
from thalweg.ops.mqa_logits import mqa_logits

SCORES_CHECKED = 2**20  # rows x keys held to float64 (two rows at least)
TOLERANCE = 5e-4  # of the row's largest magnitude: products of e4m3 in Hopper's accumulator reach 2.6e-4


def sample_rows(inputs: Inputs) -> torch.Tensor:
    """Row numbers int64: all of them, or as many as are cheap, the first and the last among them."""
    rows = inputs.case.total_rows
    between = 1 + torch.randperm(max(0, rows - 2))[: max(0, SCORES_CHECKED // inputs.case.keys - 2)]
    return torch.cat([torch.tensor([0, rows - 1]), between]).unique().to(inputs.q.device)


def exact_scores(inputs: Inputs, rows: torch.Tensor) -> torch.Tensor:
    """float32 [rows, keys], computed in float64, of the sampled rows."""
    request = rows // inputs.case.rows
    table = inputs.page_table[:, : inputs.case.live_pages]
    args = (inputs.q[rows], inputs.cache, inputs.weights[rows], inputs.lengths[rows], table, request.int())
    return mqa_logits(*args, implementation="reference")[:, : inputs.case.keys]


def check_scores(inputs: Inputs, logits: torch.Tensor) -> tuple[float, int]:
    """(error, rows checked) of scores [R, >= keys]. Raises Wrong."""
    live = logits[:, : inputs.case.keys]
    if not bool(torch.isfinite(live).all()):
        raise Wrong(
            f"{int((~torch.isfinite(live)).sum())} of {live.numel()} live scores are not finite or were not written"
        )
    rows = sample_rows(inputs)
    exact = exact_scores(inputs, rows)
    error = _relative((live[rows] - exact).abs().amax(dim=1), exact)
    if error > TOLERANCE:
        raise Wrong(f"scores are off by {error:.1e} of the row's largest, allowed {TOLERANCE:.0e}")
    return error, rows.numel()


def check_indices(inputs: Inputs, indices: torch.Tensor, scores: torch.Tensor, rows: torch.Tensor) -> float:
    """The error of a selection int [rows, k] from scores [rows, keys]: 0 where it is exact. Raises Wrong if it is none."""
    keys, wanted = inputs.case.keys, min(inputs.case.k, inputs.case.keys)
    if indices.shape != (rows.numel(), inputs.case.k):
        raise Wrong(f"selection of shape {tuple(indices.shape)}, needs {(rows.numel(), inputs.case.k)}")
    ordered = indices.long().sort(dim=1, descending=True).values
    chosen, rest = ordered[:, :wanted], ordered[:, wanted:]
    if not bool(((chosen >= 0) & (chosen < keys)).all()) or not bool((rest == -1).all()):
        raise Wrong(f"a row selects other than {wanted} of its {keys} entries and -1")
    if bool((chosen[:, 1:] == chosen[:, :-1]).any()):
        raise Wrong("a row selects one entry twice")
    selected = scores.gather(1, chosen).sort(dim=1, descending=True).values
    best = torch.topk(scores, wanted, dim=1).values
    return _relative((selected - best).abs().amax(dim=1), scores)


def entries_of(inputs: Inputs, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Slots int [rows, k] of the index cache back to entries of each row's request. Raises Wrong for another's slot."""
    page_keys, live = inputs.cache.shape[1], inputs.case.live_pages
    entries = torch.full_like(slots, -1)
    for line, row in enumerate(rows.tolist()):
        position = torch.full((inputs.cache.shape[0],), -1, dtype=torch.int64, device=slots.device)
        position[inputs.page_table[row // inputs.case.rows, :live].long()] = torch.arange(live, device=slots.device)
        slot = slots[line].long()
        page = slot.clamp(min=0) // page_keys
        if bool((page >= position.numel()).any()) or bool((position[page] < 0)[slot >= 0].any()):
            raise Wrong("a selected slot is not on a page of the row's request")
        entries[line] = torch.where(slot < 0, -1, position[page] * page_keys + slot % page_keys).to(slots.dtype)
    return entries


def check_selection(inputs: Inputs, outputs: dict[str, torch.Tensor], op: str) -> tuple[float, int]:
    """(error, rows checked) of `indices` or `slots` or both. topk must be exact, index_topk within what its scores may err."""
    rows = sample_rows(inputs)
    scores = inputs.logits[rows, : inputs.case.keys] if op == "topk" else exact_scores(inputs, rows)
    selections = []
    if "indices" in outputs:
        selections.append(outputs["indices"][rows])
    if "slots" in outputs:
        selections.append(entries_of(inputs, outputs["slots"][rows], rows))
    if len(selections) == 2 and not torch.equal(selections[0].long(), selections[1].long()):
        raise Wrong("slots are not those of the indices")
    error = check_indices(inputs, selections[0], scores, rows)
    allowed = 0.0 if op == "topk" else TOLERANCE
    if error > allowed:
        raise Wrong(f"selected scores are off by {error:.1e} of the row's largest, allowed {allowed:.0e}")
    return error, rows.numel()


def check(inputs: Inputs, outputs: dict[str, torch.Tensor], op: str) -> tuple[float, int]:
    """(error, rows checked) of what `op` returned. Raises Wrong."""
    return check_scores(inputs, outputs["logits"]) if op == "mqa_logits" else check_selection(inputs, outputs, op)


def _relative(differences: torch.Tensor, scores: torch.Tensor) -> float:
    return float((differences / scores.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny)).max())
