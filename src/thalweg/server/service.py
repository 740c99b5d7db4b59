"""What the endpoints share: the engine, what it loaded, and whether the server is going down."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from thalweg.engine.text import Text
from thalweg.server.chat import ChatTemplate
from thalweg.server.engine_client import EngineClient
from thalweg.server.messages import Ready
from thalweg.server.metrics import Metrics
from thalweg.server.settings import ServerSettings
from thalweg.server.vocabulary import Vocabulary


@dataclass(frozen=True)
class Loaded:
    """The model as the HTTP process knows it. name: what requests call it; created: Unix seconds."""

    name: str
    created: int
    context_length: int
    text: Text
    vocabulary: Vocabulary
    chat: ChatTemplate


class Service:
    """One server. tell: called each time the model is loaded, with a line's worth of facts."""

    def __init__(self, settings: ServerSettings, started: int, tell: Callable[[str], None]) -> None:
        self.settings, self._started, self._tell = settings, started, tell
        self.metrics = Metrics()
        self.engine = EngineClient(settings.engine, self.metrics, self._on_ready)
        self.metrics.watch_engine(lambda: self.engine.report)
        self.loaded: Loaded | None = None
        self.draining = False

    def _on_ready(self, ready: Ready) -> None:
        """Raises UserError for a checkpoint whose chat template cannot be used."""
        folder, context_length = ready.settings.model, ready.settings.context_length
        assert folder is not None and context_length is not None
        name = self.settings.served_model_name or Path(folder).resolve().name
        vocabulary = Vocabulary(folder)
        chat = ChatTemplate(folder, vocabulary, ready.bos_token_id, ready.eos_token_ids)
        text = Text(folder, ready.bos_token_id)
        self.loaded = Loaded(name, self._started, context_length, text, vocabulary, chat)
        engine = ready.settings
        self._tell(
            f"ready after {ready.load_seconds:.1f} s: {name} on {engine.device} as {engine.dtype}, context "
            f"{context_length:,}, {engine.kv_tokens:,} KV tokens as {engine.kv_layout}, {engine.max_requests} at once"
        )
