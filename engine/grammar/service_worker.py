"""A started compile worker as the service has it: its process, and the messages that go between."""

from __future__ import annotations

import anyio
from anyio.abc import SocketStream

from engine.children import Child
from engine.grammar.worker import LENGTH


class Worker:
    """One started worker.

    gone   its process has ended
    owed   jobs that the disk hasn't got all of yet
    """

    def __init__(self, child: Child) -> None:
        self.child = child
        self.gone = False
        self.owed = 0
        self._data = bytearray()

    async def tell(self, data: bytes) -> bool:
        """Sends a message; False where its process has ended before."""
        try:
            await self.child.stream.send(LENGTH.pack(len(data)) + data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return False
        return True

    async def hear(self) -> bytes | None:
        """Its next message; None at its end."""
        stream: SocketStream = self.child.stream
        while True:
            if len(self._data) >= LENGTH.size:
                end = LENGTH.size + LENGTH.unpack_from(self._data)[0]
                if len(self._data) >= end:
                    found = bytes(self._data[LENGTH.size : end])
                    del self._data[:end]
                    return found
            try:
                self._data += await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return None
