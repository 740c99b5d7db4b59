"""`thalweg serve`: the model behind OpenAI's HTTP API."""

import argparse
from typing import Any

from thalweg.errors import UserError
from thalweg.models.config import read_config

_EXTRA = {"fastapi", "jinja2", "msgspec", "prometheus_client", "pydantic", "starlette", "uvicorn"}


def add(verbs: Any) -> None:
    """Adds the verb to the parser."""
    parser = verbs.add_parser("serve", help="answer OpenAI's HTTP API", description=__doc__)
    option = parser.add_argument
    option("--model", help="checkpoint folder (default: the bundled thalweg-tiny)")
    option("--served-model-name", help="what requests call the model (default: the folder's name)")
    option("--host", default="127.0.0.1", help="address to listen on (default %(default)s: this machine only)")
    option("--port", type=int, default=8000, help="0 takes a free one and prints it (default %(default)s)")
    option(
        "--context-length", type=int, help="ceiling of a request in tokens (default: the model's, at most --kv-tokens)"
    )
    option("--kv-tokens", type=int, default=65_536, help="size of the cache pool in tokens (default %(default)s)")
    option("--kv-layout", help="byte layout of the cache (default: the one the GPU path uses)")
    option("--max-requests", type=int, default=16, help="sequences that run at once (default %(default)s)")
    option("--chunk-tokens", type=int, default=256, help="rows of a step that reads prompts (default %(default)s)")
    option("--no-prefix-reuse", action="store_true", help="compute every prompt anew")
    option("--device", help="cpu or cuda (default: cuda if there is one, else cpu)")
    option("--dtype", choices=("float32", "bfloat16"), help="default: float32 on the CPU, else bfloat16")
    option("--drain-seconds", type=float, default=30.0, help="for running requests after SIGTERM (default %(default)g)")
    option("--profile-folder", default="thalweg-profiles", help="where /stop_profile writes (default ./%(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serves until a signal."""
    try:
        from thalweg.server.run import run as serve
        from thalweg.server.settings import EngineSettings, ServerSettings
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        raise UserError(f"{error.name} is not installed; run: pip install 'thalweg[serve]'") from None
    if not 0 <= arguments.drain_seconds < float("inf"):
        raise UserError(f"drain-seconds is {arguments.drain_seconds}; possible is 0 or more")
    if arguments.model is not None:
        read_config(arguments.model)  # before anything is bound or loaded
    engine = EngineSettings(
        model=arguments.model,
        context_length=arguments.context_length,
        kv_tokens=arguments.kv_tokens,
        max_requests=arguments.max_requests,
        chunk_tokens=arguments.chunk_tokens,
        kv_layout=arguments.kv_layout,
        device=arguments.device,
        dtype=arguments.dtype,
        prefix_reuse=not arguments.no_prefix_reuse,
    )
    return serve(
        ServerSettings(
            engine,
            arguments.host,
            arguments.port,
            arguments.served_model_name,
            arguments.drain_seconds,
            arguments.profile_folder,
        )
    )
