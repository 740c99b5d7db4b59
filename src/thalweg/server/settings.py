"""What `thalweg serve` is told: for the engine's process, and for the one that answers HTTP."""

from dataclasses import dataclass

import msgspec


class EngineSettings(msgspec.Struct, frozen=True):
    """None: the engine decides, and says what it took in `messages.Ready`. The command line explains each."""

    model: str | None = None
    context_length: int | None = None
    kv_tokens: int = 65_536
    max_requests: int = 16
    chunk_tokens: int = 256
    kv_layout: str | None = None
    device: str | None = None
    dtype: str | None = None
    prefix_reuse: bool = True


@dataclass(frozen=True)
class ServerSettings:
    """port 0 takes a free one. drain_seconds: how long running requests may go on after SIGTERM."""

    engine: EngineSettings
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    drain_seconds: float = 30.0
    profile_folder: str = "thalweg-profiles"
