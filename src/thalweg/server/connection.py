"""The engine's end of the socket: blocking writes, and reads that wait only when there is nothing else to do."""

import select
import socket

from thalweg.server.messages import LENGTH_BYTES, FromEngine, ToEngine, frame, length, to_engine

_READ_BYTES = 1 << 20


class Connection:
    """Raises EOFError where the other process is gone, in `receive` and in `send`."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray()

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """The complete messages that are there now; with `wait`, at least one."""
        while True:
            readable, _, _ = select.select([self._socket], [], [], None if wait else 0)
            if readable:
                try:
                    data = self._socket.recv(_READ_BYTES)
                except ConnectionResetError:
                    data = b""
                if not data:
                    raise EOFError("the HTTP process is gone")
                self._buffer += data
            messages = self._complete()
            # A large message comes in pieces: read on while there is more, or while one has to come.
            if messages or not (readable or wait):
                return messages

    def send(self, message: FromEngine) -> None:
        """Writes all of it."""
        try:
            self._socket.sendall(frame(message))
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError("the HTTP process is gone") from None

    def _complete(self) -> list[ToEngine]:
        messages = []
        while len(self._buffer) >= LENGTH_BYTES:
            end = LENGTH_BYTES + length(bytes(self._buffer[:LENGTH_BYTES]))
            if len(self._buffer) < end:
                break
            messages.append(to_engine(bytes(self._buffer[LENGTH_BYTES:end])))
            del self._buffer[:end]
        return messages
