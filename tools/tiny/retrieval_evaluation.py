"""How often a planted line is found, by its distance."""

from contextlib import nullcontext

import torch

from thalweg.engine.needle import DIGITS
from tools.tiny.dense_attention import Mode
from tools.tiny.dense_model import DenseModel
from tools.tiny.needles import NeedleStream, evaluation_length

DISTANCES = (1024, 2048, 4096, 8192, 16384)
BATCH_TOKENS = 65536
RANDOM_SEED = 11


@torch.no_grad()
def accuracy(
    model: DenseModel,
    stream: NeedleStream,
    distance: int,
    mode: Mode,
    documents: int,
    device: torch.device,
    seed: int = 1,
    autocast: bool = False,
) -> dict[str, float]:
    """Shares of whole values and of single digits found, over so many evaluation documents of one distance.

    A value counts where every digit is the most probable token after the true ones before it. That is when, and only
    when, greedy decoding writes the whole value: up to the first wrong digit both see the same text.
    """
    torch.manual_seed(RANDOM_SEED)
    context = torch.autocast(device.type, dtype=torch.bfloat16) if autocast else nullcontext()
    rows = max(1, BATCH_TOKENS // evaluation_length(distance))
    whole = digits = 0
    for first in range(0, documents, rows):
        batch = stream.evaluation_batch(seed, first, min(rows, documents - first), distance).to(device)
        with context:
            logits = model(batch.ids, mode).logits
        best = logits[:, :-1].argmax(-1)
        right = (best == batch.ids[:, 1:])[batch.answers[:, 1:]].view(-1, DIGITS)
        whole += int(right.all(-1).sum())
        digits += int(right.sum())
    return {"values": whole / documents, "digits": digits / documents / DIGITS}
