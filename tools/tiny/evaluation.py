"""Bits per byte on held-out text."""

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F

from tools.tiny.dense_attention import Mode
from tools.tiny.dense_model import DenseModel
from tools.tiny.training_data import TokenStream

WINDOW = 4096  # tokens a window holds; its first half is context alone, except in the first window
RANDOM_SEED = 11


@torch.no_grad()
def bits_per_byte(
    model: DenseModel,
    stream: TokenStream,
    mode: Mode,
    rows: int = 16,
    window: int = WINDOW,
    max_windows: int | None = None,
    autocast: bool = False,
) -> dict[str, float]:
    """Bits the model needs per byte of text, document separators charged to the text they end.

    The stream is read in windows that overlap by half, so a token has at least window / 2 tokens of context, or all
    there are. max_windows: only so many windows, evenly spread (then bytes are counted as tokens). Returns
    "bits_per_byte", "tokens" scored and, where the model has an MTP layer, "mtp_bits_per_byte" over the same places.
    """
    half = window // 2
    torch.manual_seed(RANDOM_SEED)
    starts = torch.arange(0, max(1, len(stream) - 1 - half), half)
    if max_windows is not None and len(starts) > max_windows:
        starts = starts[torch.linspace(0, len(starts) - 1, max_windows).round().long()]
    device = stream.content.device
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    scored = 0
    context = torch.autocast(device.type, dtype=torch.bfloat16) if autocast else nullcontext()
    for chunk in starts.split(rows):
        ids = stream.windows(chunk, window + 2)
        places = chunk.to(device)[:, None] + torch.arange(window, device=device)
        fresh = (torch.arange(window, device=device) >= half) | (chunk.to(device)[:, None] == 0)
        wanted = fresh & (places + 1 < len(stream))
        with context:
            output = model(ids[:, :window], mode, next_tokens=ids[:, 1 : window + 1])
        for index, (logits, shift) in enumerate(((output.logits, 1), (output.mtp_logits, 2))):
            if logits is None:
                continue
            nats = F.cross_entropy(
                logits.float().flatten(0, 1), ids[:, shift : shift + window].flatten(), reduction="none"
            )
            totals[index] += nats.double()[wanted.flatten()].sum()
        scored += int(wanted.sum())
    bits = totals / math.log(2)
    bytes_ = stream.num_text_bytes if max_windows is None else scored
    result = {"bits_per_byte": float(bits[0]) / bytes_, "tokens": scored}
    if len(model.mtp):
        result["mtp_bits_per_byte"] = float(bits[1]) / bytes_
    return result
