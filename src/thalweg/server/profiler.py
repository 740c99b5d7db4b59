"""A torch profiler trace of the engine's process, started and stopped between steps."""

import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from thalweg.errors import UserError


class Profiler:
    """One trace at a time; it grows with every step, so it is meant for seconds."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._path = Path()

    def start(self, folder: str) -> str:
        """Records from now on; the path of the trace to come. Raises UserError."""
        if self._profile is not None:
            raise UserError(f"a trace is being recorded already, to {self._path}: stop it first")
        path = Path(folder).resolve() / f"trace-{time.strftime('%Y%m%d-%H%M%S')}.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{path.parent}: cannot be made: {error.strerror}") from None
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile, self._path = profile(activities=activities), path
        self._profile.start()
        return str(path)

    def stop(self) -> str:
        """Writes the trace; its path. Raises UserError where none is being recorded, or where it cannot be written."""
        if self._profile is None:
            raise UserError("no trace is being recorded: start one first")
        recorded, self._profile = self._profile, None
        recorded.stop()
        try:
            recorded.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            raise UserError(f"{self._path}: the trace cannot be written: {error}") from None
        return str(self._path)
