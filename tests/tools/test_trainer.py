"""Training at toy size on the CPU: the loss falls, and a run that is stopped and resumed ends where it would have ended."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.heldout import GENCOL, PTY, TITUS
from tools.tiny.optimiser import Optimiser
from tools.tiny.schedule import Schedule
from tools.tiny.tiny_config import CONFIG_PATH
from tools.tiny.trainer import Settings, Trainer
from tools.tiny.training_data import TokenStream

CPU = torch.device("cpu")
STEPS, STOP = 20, 10
LENGTHS = ((0.0, 64), (0.5, 128))
SETTINGS = Settings(
    total_steps=STEPS,
    batch_tokens=256,
    seed=1,
    muon_rate=0.02,
    log_every=5,
    evaluate_every=STEPS,
    evaluation_windows=4,
    evaluation_window=128,
)


def toy_config() -> dict:
    """The real layers and stages at a small width; 128 tokens are 32 entries, of which the indexer chooses 8."""
    toy = {"hidden_size": 32, "q_lora_rank": 16, "o_lora_rank": 8, "moe_intermediate_size": 16, "index_topk": 8}
    return json.loads(CONFIG_PATH.read_text()) | toy | {"sliding_window": 32, "num_attention_heads": 2}


def stream(*documents: bytes) -> TokenStream:
    content = b"\xff".join(documents) + b"\xff"
    return TokenStream(torch.frombuffer(bytearray(content), dtype=torch.uint8), bos=256, device=CPU)


def fresh(settings: Settings = SETTINGS) -> Trainer:
    schedule = Schedule(settings.total_steps, settings.batch_tokens, LENGTHS)
    return Trainer(toy_config(), settings, schedule, stream(PTY, GENCOL), stream(TITUS), CPU)


def run(trainer: Trainer, out: Path, stop_at: int | None = None) -> list[dict]:
    """Trains and returns the log."""
    trainer.run(out, time.monotonic() + 3600, stop_at, say=lambda line: None)
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def weights(trainer: Trainer) -> Tensor:
    """Every parameter and router bias in one row."""
    return torch.cat([tensor.detach().float().flatten() for tensor in trainer.model.state_dict().values()])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, list[dict]]:
    """A run that was never stopped."""
    trainer = fresh()
    return trainer, run(trainer, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    """(the folder of a run that stopped half way, the trainer as it stopped)."""
    out, trainer = tmp_path_factory.mktemp("half"), fresh()
    run(trainer, out, stop_at=STOP)
    return out, trainer


def test_the_loss_falls_and_the_log_says_so(whole: tuple[Trainer, list[dict]]) -> None:
    trainer, log = whole
    assert trainer.step == STEPS
    steps = [entry for entry in log if "lm_bits" in entry]
    assert [entry["step"] for entry in steps] == [1, 2, 3, 5, 10, 15, 20]
    assert steps[0]["lm_bits"] > 7.5, "an untrained model knows little more than that there are 272 tokens"
    assert steps[-1]["lm_bits"] < 0.75 * steps[0]["lm_bits"]
    assert steps[-1]["mtp_bits"] < 0.85 * steps[0]["mtp_bits"]
    (evaluation,) = (entry for entry in log if "heldout_bits_per_byte" in entry)
    assert evaluation["heldout_bits_per_byte"] < 6.5


def test_a_resumed_run_begins_with_the_weights_that_were_saved(half: tuple[Path, Trainer]) -> None:
    out, stopped = half
    trainer = fresh()
    trainer.resume(out / "state")
    assert trainer.step == STOP
    assert torch.equal(weights(trainer), weights(stopped))


def test_a_resumed_run_ends_where_an_uninterrupted_one_ends(
    half: tuple[Path, Trainer], whole: tuple[Trainer, list[dict]], tmp_path: Path
) -> None:
    """Weights are saved in float32, moments in bfloat16 (8 bits): the second half moves the weights to the same place but for
    1.5% of the way (root mean square). Without any moments it is another place altogether.
    """
    out, stopped = half
    resumed, forgetful = fresh(), fresh()
    resumed.resume(out / "state")
    log = run(resumed, tmp_path / "resumed")
    forgetful.resume(out / "state")
    forgetful.optimiser = Optimiser(forgetful.model, SETTINGS.muon_rate)
    run(forgetful, tmp_path / "forgetful")
    uninterrupted = weights(whole[0])
    way = float((uninterrupted - weights(stopped)).norm())
    off = float((weights(resumed) - uninterrupted).norm()) / way
    off_without = float((weights(forgetful) - uninterrupted).norm()) / way
    print(f"resumed: {off:.4f} of the way off; without moments: {off_without:.4f}")
    assert off < 0.04
    assert off_without > 0.5
    assert log[-2]["lm_bits"] == pytest.approx(whole[1][-2]["lm_bits"], abs=0.02)


def test_the_rounding_of_the_moments_is_all_that_a_resumed_run_lacks(
    half: tuple[Path, Trainer], whole: tuple[Trainer, list[dict]], tmp_path: Path
) -> None:
    """With the float32 moments of the run that stopped it ends bit for bit where the uninterrupted one ends."""
    out, stopped = half
    resumed = fresh()
    resumed.resume(out / "state")
    for shape, momentum in stopped.optimiser.momenta.items():
        resumed.optimiser.momenta[shape].copy_(momentum)
    for name in stopped.optimiser.adam_names:
        theirs = stopped.optimiser.adam.state[stopped.optimiser.parameters[name]]
        ours = resumed.optimiser.adam.state[resumed.optimiser.parameters[name]]
        for key in ("step", "exp_avg", "exp_avg_sq"):
            ours[key].copy_(theirs[key])
    run(resumed, tmp_path)
    assert torch.equal(weights(resumed), weights(whole[0]))


def test_the_data_of_a_step_depend_on_seed_and_step_alone() -> None:
    text = stream(PTY, GENCOL)
    assert torch.equal(text.batch(1, 7, 4, 64), text.batch(1, 7, 4, 64))
    assert not torch.equal(text.batch(1, 7, 4, 64), text.batch(1, 8, 4, 64))
    assert not torch.equal(text.batch(1, 7, 4, 64), text.batch(2, 7, 4, 64))


def test_a_run_is_not_resumed_with_other_settings(half: tuple[Path, Trainer], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="other settings"):
        fresh(replace(SETTINGS, muon_rate=0.01)).resume(half[0] / "state")
    with pytest.raises(FileNotFoundError, match="--resume"):
        fresh().resume(tmp_path)


def test_the_deadline_ends_a_run_with_its_state_saved(tmp_path: Path) -> None:
    trainer = fresh()
    done = trainer.run(tmp_path, time.monotonic() - 1, say=lambda line: None)
    assert not done and trainer.step == 1
    later = fresh()
    later.resume(tmp_path / "state")
    assert later.step == 1


def test_each_loss_moves_its_own_weights() -> None:
    """The distillation loss reaches the indexers and nothing else; the other losses reach everything else."""
    trainer = fresh()
    ids = trainer.train.batch(1, 0, 2, 130)
    output = trainer.model(ids[:, :-2], trainer.schedule.mode(STEPS - 1), next_tokens=ids[:, 1:-1])
    named = dict(trainer.model.named_parameters())

    def moved(loss: Tensor) -> set[str]:
        gradients = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
        return {
            name for name, gradient in zip(named, gradients, strict=True) if gradient is not None and gradient.any()
        }

    indexers = {name for name in named if ".indexer." in name}
    assert moved(output.index_loss) == indexers
    assert output.mtp_logits is not None
    language = output.logits.logsumexp(-1).mean() + output.mtp_logits.logsumexp(-1).mean()
    assert moved(language) == set(named) - indexers
