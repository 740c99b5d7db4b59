"""Bits per byte: every byte counted once, in a context that is long enough, at the price that the model says."""

import math

import pytest
import torch
from torch import Tensor, nn

from tools.tiny.dense_attention import Mode
from tools.tiny.dense_model import Output
from tools.tiny.evaluation import bits_per_byte
from tools.tiny.training_data import SEPARATOR_BYTE, TokenStream

VOCABULARY, BOS = 272, 256


def stream_of(documents: list[bytes]) -> TokenStream:
    content = b"".join(document + bytes([SEPARATOR_BYTE]) for document in documents)
    return TokenStream(torch.frombuffer(bytearray(content), dtype=torch.uint8), BOS, torch.device("cpu"))


class Priced(nn.Module):
    """A token costs what `prices` says of it, in bits, wherever it stands; what the model was shown is kept."""

    def __init__(self, prices: Tensor, mtp: bool = False) -> None:
        super().__init__()
        self.prices = prices
        self.mtp = [None] if mtp else []
        self.windows: list[Tensor] = []

    def forward(self, tokens: Tensor, mode: Mode, next_tokens: Tensor) -> Output:
        self.windows.append(tokens)
        logits = (-self.prices * math.log(2)).expand(*tokens.shape, -1)
        return Output(logits, logits if self.mtp else None, torch.zeros(()), {})


def uniform(mtp: bool = False) -> Priced:
    return Priced(torch.zeros(VOCABULARY, dtype=torch.float64), mtp)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 31, 64, 100, 129])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_uniform_model_needs_log2_of_the_vocabulary(length: int, rows: int) -> None:
    """One document of `length` bytes: with its end it costs length + 1 tokens, charged to length bytes."""
    stream = stream_of([(bytes(range(65, 91)) * 5)[:length]])
    result = bits_per_byte(uniform(mtp=True), stream, Mode(), rows=rows, window=16)
    assert result["tokens"] == length + 1
    assert result["bits_per_byte"] == pytest.approx(math.log2(VOCABULARY) * (length + 1) / length, rel=1e-6)
    assert result["mtp_bits_per_byte"] == pytest.approx(result["bits_per_byte"], rel=1e-9)


def test_every_byte_is_counted_exactly_once() -> None:
    """Prices that differ by byte value, and bytes that occur in known numbers: the sum tells which were counted how often."""
    prices = torch.zeros(VOCABULARY, dtype=torch.float64)
    prices[: VOCABULARY - 1] = 40.0  # the last token keeps nearly all probability: the prices need no normalising
    weights = {ord("a"): 41.0, ord("b"): 43.0, ord("c"): 47.0, BOS: 53.0}
    for token, price in weights.items():
        prices[token] = price
    documents = [b"a" * 11 + b"b" * 3, b"c", b"b" * 30 + b"a" * 2, b"cab" * 5]
    stream = stream_of(documents)
    text = b"".join(documents)
    expected = sum(weights[byte] for byte in text) + len(documents) * weights[BOS]
    for window in (8, 16, 64, 4096):
        result = bits_per_byte(Priced(prices), stream, Mode(), rows=2, window=window)
        assert result["tokens"] == len(text) + len(documents)
        assert result["bits_per_byte"] * len(text) == pytest.approx(expected, abs=1e-3)


def test_a_counted_token_has_half_a_window_of_context_or_all_there_is() -> None:
    model, stream = uniform(), stream_of([bytes(i % 250 for i in range(100))])
    bits_per_byte(model, stream, Mode(), rows=1, window=16)
    starts = [int(window[0, 0]) for window in model.windows]
    assert starts[0] == BOS and starts[1:] == [8 * step - 1 for step in range(1, len(starts))]
    assert 8 * len(starts) + 8 >= 101, "the last window reaches the end"


def test_some_windows_only_are_spread_over_the_whole_stream() -> None:
    model, stream = uniform(), stream_of([bytes(i % 250 for i in range(247))])
    result = bits_per_byte(model, stream, Mode(), rows=4, window=16, max_windows=3)
    assert result["bits_per_byte"] == pytest.approx(math.log2(VOCABULARY), rel=1e-6)
    assert result["tokens"] == 16 + 8 + 8  # the first window counts whole, the others their second halves
