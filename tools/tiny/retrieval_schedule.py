"""What each step of the training for retrieval looks like."""

from dataclasses import dataclass, replace

from tools.tiny.dense_attention import Mode
from tools.tiny.schedule import Schedule

# Part of the run from which a sequence length holds. Most of it is short: there a step holds the most questions.
LENGTHS = ((0.0, 1024), (0.5, 4096), (0.72, 8192), (0.86, 16384))
DENSE = 0.25  # all entries are attended to until the model can find a line; the indexer learns from that attention
CSA_ALONE = 0.75  # until then questions see no HCA entry: the CSA layers must answer, and have answered before HCA may
PEAK = 0.6  # of the learning rates that made the checkpoint
BLOCK_ROWS = 4096  # query rows at a time


@dataclass(frozen=True)
class RetrievalSchedule(Schedule):
    """Half of a step's rows are ordinary text, half are documents with planted lines."""

    lengths: tuple[tuple[float, int], ...] = LENGTHS

    def rows(self, step: int) -> int:
        """Rows of a step, an even number."""
        return max(2, self.batch_tokens // self.length(step) // 2 * 2)

    def mode(self, step: int) -> Mode:
        if step < DENSE * self.total_steps:
            mode = Mode("dense", distil=True)
        else:
            mode = Mode("indexer", quantise_cache=True, distil=True)
        return replace(mode, block_rows=BLOCK_ROWS)

    def csa_alone(self, step: int) -> bool:
        """Whether the rows of questions see no HCA entry."""
        return step < CSA_ALONE * self.total_steps

    def rate_factor(self, step: int) -> float:
        return PEAK * super().rate_factor(step)
