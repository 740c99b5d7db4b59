"""Training for retrieval at toy size: what costs what, what is computed in blocks, and that the answers are learned."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.heldout import GENCOL, PTY, TITUS
from thalweg.models.open import TINY
from tools.tiny import dense_attention
from tools.tiny.checkpoint import load_model
from tools.tiny.dense_attention import Marks, Mode
from tools.tiny.dense_model import DenseModel, Output
from tools.tiny.initialise import initialise
from tools.tiny.needles import NeedleStream
from tools.tiny.retrieval_evaluation import accuracy
from tools.tiny.retrieval_schedule import RetrievalSchedule
from tools.tiny.retrieval_trainer import RetrievalSettings, RetrievalTrainer
from tools.tiny.tiny_config import CONFIG_PATH, TinyConfig
from tools.tiny.training_data import TokenStream

CPU = torch.device("cpu")
SETTINGS = RetrievalSettings(
    total_steps=24,
    batch_tokens=512,
    seed=1,
    muon_rate=0.02,
    log_every=4,
    evaluate_every=20,
    evaluation_windows=2,
    evaluation_window=128,
    needle_documents=2,
    needle_distances=(64, 600),
)
LENGTHS = ((0.0, 128), (0.75, 256))


def toy_config() -> dict:
    toy = {"hidden_size": 32, "q_lora_rank": 16, "o_lora_rank": 8, "moe_intermediate_size": 16, "index_topk": 8}
    return json.loads(CONFIG_PATH.read_text()) | toy | {"sliding_window": 32, "num_attention_heads": 2}


def stream(*documents: bytes) -> TokenStream:
    content = b"\xff".join(documents) + b"\xff"
    return TokenStream(torch.frombuffer(bytearray(content), dtype=torch.uint8), bos=256, device=CPU)


def fresh(settings: RetrievalSettings = SETTINGS) -> RetrievalTrainer:
    schedule = RetrievalSchedule(settings.total_steps, settings.batch_tokens, LENGTHS)
    return RetrievalTrainer(toy_config(), settings, schedule, stream(PTY, GENCOL), stream(TITUS), CPU)


@pytest.fixture(scope="module")
def toy_model() -> DenseModel:
    model = DenseModel(TinyConfig.from_dict(toy_config()))
    initialise(model, 3)
    return model


@pytest.mark.parametrize("mode", [Mode("dense", distil=True), Mode("indexer", quantise_cache=True, distil=True)])
@pytest.mark.parametrize("time_", [192, 203])
def test_blocks_change_neither_values_nor_gradients(toy_model: DenseModel, mode: Mode, time_: int) -> None:
    ids = torch.randint(0, 256, (2, time_), generator=torch.Generator().manual_seed(1))
    marks = Marks(*(torch.rand(ids.shape, generator=torch.Generator().manual_seed(i)) < 0.2 for i in range(2)))
    results = []
    for block_rows in (0, 64):
        output = toy_model(ids, replace(mode, block_rows=block_rows), marks=marks)
        loss = output.logits.logsumexp(-1).mean() + output.index_loss
        results.append(
            (output.logits, loss, torch.autograd.grad(loss, list(toy_model.parameters()), allow_unused=True))
        )
    (logits, loss, gradients), (in_blocks, loss_in_blocks, gradients_in_blocks) = results
    assert (logits - in_blocks).abs().max() < 1e-5
    assert loss.item() == pytest.approx(loss_in_blocks.item(), rel=1e-6)
    for one, other in zip(gradients, gradients_in_blocks, strict=True):
        assert one is None or (one - other).abs().max() < 1e-5 + 1e-4 * one.abs().max()


def test_marked_rows_see_no_hca_entry_and_the_others_do(toy_model: DenseModel) -> None:
    """A change in the first 128 tokens reaches the last row of an HCA layer through its entry, unless the row is marked."""
    attention = toy_model.layers[2].attn
    x = torch.randn(1, 256, 32, generator=torch.Generator().manual_seed(1))
    changed = x.clone()
    changed[:, :128] += 1.0

    def last(values: Tensor, mode: Mode, marked: bool) -> Tensor:
        marks = Marks(torch.zeros(1, 256, dtype=torch.bool), torch.full((1, 256), marked))
        return attention(values, mode, marks)[0][0, -1]

    seen = Mode("indexer")
    assert (last(x, seen, False) - last(changed, seen, False)).norm() > 1e-3
    assert torch.equal(last(x, seen, True), last(changed, seen, True))
    blind = Mode("indexer", coarse=False)
    assert torch.allclose(last(x, blind, False), last(x, seen, True), atol=1e-6)


def test_rows_that_answer_weigh_more_in_the_indexers_loss(
    toy_model: DenseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(0, 256, (1, 200), generator=torch.Generator().manual_seed(2))
    answers = torch.zeros(1, 200, dtype=torch.bool)
    answers[0, 150] = True
    nothing = torch.zeros_like(answers)
    mode = Mode("dense", distil=True)
    with torch.no_grad():
        plain = float(toy_model(ids, mode).index_loss)
        marked = float(toy_model(ids, mode, marks=Marks(answers, nothing)).index_loss)
        monkeypatch.setattr(dense_attention, "ANSWER_KL_WEIGHT", 3.0)
        thrice = float(toy_model(ids, mode, marks=Marks(answers, nothing)).index_loss)
    assert marked > plain and thrice - plain == pytest.approx(3 * (marked - plain), rel=1e-4)


class Priced(nn.Module):
    """Every token costs so many nats, wherever it stands: the last of the vocabulary keeps the rest."""

    def __init__(self, prices: Tensor) -> None:
        super().__init__()
        self.prices = prices

    def forward(
        self, tokens: Tensor, mode: Mode, next_tokens: Tensor | None = None, marks: Marks | None = None
    ) -> Output:
        logits = (-self.prices).expand(*tokens.shape, -1)
        return Output(logits, logits, torch.tensor(7.0), {})


def test_what_costs_what() -> None:
    """Digits cost 30 nats, everything else 20: values in planted lines count nowhere, values in answers apart."""
    trainer = fresh()
    prices = torch.full((272,), 20.0)
    prices[271] = 0.0
    prices[ord("0") : ord("9") + 1] = 30.0
    trainer.model = Priced(prices)
    letters = stream(bytes(b"abcdefgh" * 600))
    text = letters.batch(1, 0, 2, 258)
    needles = NeedleStream(letters).training_batch(1, 0, 2, 258)
    total, parts, _ = trainer.retrieval_losses(text, needles, Mode(), csa_alone=True)
    assert float(parts["lm"]) == pytest.approx(20.0) and float(parts["mtp"]) == pytest.approx(20.0)
    assert float(parts["answer_bits"]) == pytest.approx(30.0 / math.log(2))
    assert float(parts["answer_digits"]) == 0.0
    assert float(total) == pytest.approx(20.0 + 30.0 + 0.1 * 20.0 + 7.0)


class Reader(nn.Module):
    """Finds every answer by reading the text, but for the last digit of every other document."""

    def forward(self, tokens: Tensor, mode: Mode) -> Output:
        logits = torch.zeros(*tokens.shape, 272)
        logits[:, :-1].scatter_(-1, tokens[:, 1:, None], 1.0)
        logits[1::2, -4] = 0.0  # what follows are the last digit, a full stop and a line break
        return Output(logits, None, torch.zeros(()), {})


def test_a_value_is_found_when_all_its_digits_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.tiny.needles.EVALUATION_OFFSETS", 1)  # all documents of one length
    found = accuracy(Reader(), NeedleStream(stream(PTY)), 100, Mode(), documents=10, device=CPU)
    assert found == {"values": 0.5, "digits": 0.9}


def test_the_schedule_is_dense_first_short_first_and_ends_with_everything_on() -> None:
    schedule = RetrievalSchedule(1000, 65536)
    assert [schedule.length(step) for step in (0, 499, 500, 720, 860, 999)] == [1024, 1024, 4096, 8192, 16384, 16384]
    assert [schedule.rows(step) for step in (0, 500, 720, 860)] == [64, 16, 8, 4]
    assert schedule.mode(249).selection == "dense" and schedule.mode(250).selection == "indexer"
    assert schedule.mode(999).quantise_cache and schedule.mode(0).distil
    assert schedule.csa_alone(749) and not schedule.csa_alone(750)


def test_the_loss_on_answers_falls_and_the_run_resumes(tmp_path: Path) -> None:
    trainer = fresh()
    trainer.run(tmp_path, time.monotonic() + 3600, stop_at=20, say=lambda line: None)
    later = fresh()
    later.resume(tmp_path / "state")
    assert later.step == 20
    assert later.run(tmp_path, time.monotonic() + 3600, say=lambda line: None)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [entry for entry in log if "answer_bits" in entry]
    assert steps[-1]["answer_bits"] < steps[0]["answer_bits"] - 0.8
    midway, last = (entry for entry in log if "found_at_64" in entry)
    assert "found_at_600" not in midway and "found_at_600" in last, "distances that training has reached, at last all"
    with pytest.raises(ValueError, match="other settings"):
        fresh(replace(SETTINGS, seed=2)).resume(tmp_path / "state")


def test_a_run_begins_with_a_released_checkpoint() -> None:
    config = json.loads((TINY / "config.json").read_text())
    schedule = RetrievalSchedule(SETTINGS.total_steps, SETTINGS.batch_tokens, LENGTHS)
    trainer = RetrievalTrainer(config, SETTINGS, schedule, stream(PTY), stream(TITUS), CPU)
    trainer.start_from(TINY)
    released = load_model(TINY, CPU).state_dict()
    assert all(torch.equal(tensor, released[name]) for name, tensor in trainer.model.state_dict().items())
