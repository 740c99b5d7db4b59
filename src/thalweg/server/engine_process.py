"""The engine's process: takes messages, steps, and sends what each step gave. It ends with the process that started it.

It waits on the socket while idle. While busy it takes what has come before every step, so a request that is cancelled has
given its pages back before the next row is computed.
"""

import ctypes
import os
import signal
import socket
import sys

from thalweg.errors import UserError
from thalweg.server.connection import Connection
from thalweg.server.messages import LoadFailed, Start

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int) -> int:
    """Serves over the inherited socket `descriptor` until told to stop; returns the exit code: 0, or 2 after LoadFailed."""
    # Ctrl-C in a terminal and a supervisor's SIGTERM reach every process; the HTTP process decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with(parent)
    connection = Connection(socket.socket(fileno=descriptor))
    try:
        for message in connection.receive(wait=True):
            if isinstance(message, Start):
                return _load_and_run(connection, message)
        raise RuntimeError(f"the first message to the engine was no Start: {message}")
    except EOFError:
        return 0  # nobody is left to serve


def _load_and_run(connection: Connection, start: Start) -> int:
    # Imported here: a parent that dies meanwhile is noticed although torch takes seconds.
    from thalweg.server.engine_loop import EngineLoop, open_engine

    try:
        engine, ready = open_engine(start.settings)
    except UserError as error:
        connection.send(LoadFailed(str(error)))
        return 2
    connection.send(ready)
    EngineLoop(engine, connection).run()
    return 0


def _die_with(parent: int) -> None:
    """A killed parent ends this process in the middle of a step too; elsewhere than on Linux, between two steps."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # it died before it could be watched
