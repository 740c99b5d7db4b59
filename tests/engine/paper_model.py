"""A model on paper: its caches hold the tokens themselves, and its next token is a sum over all that it reads back.

A page of a neighbour, a window page given back too early, a state that was not restored: each changes the sum, and with it
every token after it. What it should write follows from the tokens alone, so the engine is checked against `continuation`.
"""

from dataclasses import dataclass

import torch

from thalweg.models.batch import RowBatch
from thalweg.models.interface import PoolSizes

VOCABULARY = 50
WINDOW = 128
_NOTHING = -7


@dataclass(frozen=True)
class PaperConfig:
    vocab_size: int = VOCABULARY
    max_position_embeddings: int = 4096
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass
class PaperCaches:
    pages: torch.Tensor
    windows: torch.Tensor
    carried: torch.Tensor


def mark(history: list[int], window: list[int], carried: list[int]) -> int:
    """A number that any change of what was read changes, almost surely."""
    total = 0
    for factor, tokens in ((31, history), (37, window), (41, carried)):
        for token in tokens:
            total = (total * factor + token + 1) % 1_000_003
    return total % VOCABULARY


def continuation(prompt: list[int], count: int) -> list[int]:
    """What the model writes after `prompt`, from the tokens alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(mark(tokens, tokens[-WINDOW:], tokens[-5:-1]))
    return tokens[len(prompt) :]


class PaperModel:
    """The engine's model interface. A row reads every token before it through its tables, and checks nothing itself."""

    config = PaperConfig()
    device = torch.device("cpu")
    kv_layouts = ("paper",)
    window = WINDOW

    def pool_bytes(self, pool: PoolSizes, kv_layout: str) -> int:
        return 8 * 256 * (pool.pages + pool.window_pages)

    def allocate(self, pool: PoolSizes, kv_layout: str) -> PaperCaches:
        return PaperCaches(
            torch.full((pool.pages, 256), _NOTHING),
            torch.full((pool.window_pages, 256), _NOTHING),
            torch.full((pool.state_slots, 4), _NOTHING),
        )

    def carry_out(self, caches: PaperCaches, state_slot: int) -> torch.Tensor:
        return caches.carried[state_slot].clone()

    def carry_in(self, caches: PaperCaches, state_slot: int, carried: torch.Tensor) -> None:
        caches.carried[state_slot] = carried

    def forward(self, batch: RowBatch, caches: PaperCaches) -> torch.Tensor:
        marks = []
        rows = zip(batch.tokens.tolist(), batch.positions.tolist(), batch.row_to_request.tolist(), strict=True)
        for token, position, request in rows:
            pages, windows = batch.page_table[request].tolist(), batch.window_table[request].tolist()
            caches.pages[pages[position // 256], position % 256] = token
            caches.windows[windows[position // 256], position % 256] = token
            history = [int(caches.pages[pages[p // 256], p % 256]) for p in range(position + 1)]
            window = [
                int(caches.windows[windows[p // 256], p % 256])
                for p in range(max(position - WINDOW + 1, 0), position + 1)
            ]
            slot = int(batch.state_slots[request])
            carried = caches.carried[slot].tolist()[max(4 - position, 0) :]
            marks.append(mark(history, window, carried))
            caches.carried[slot] = torch.tensor([*caches.carried[slot].tolist()[1:], token])
        return torch.tensor(marks)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(hidden, VOCABULARY).float()
