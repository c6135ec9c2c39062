"""A server with one answer, for the commands that name a server."""

import socket
import threading
import time
from functools import cache


Piece = tuple[bytes, float]  # what is sent, and the seconds to wait before it


class Server:
    """A server that sends `pieces` to every client."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}/v1"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self.listening.accept()
            threading.Thread(target=self._answer, args=(connection, list(self.pieces)), daemon=True).start()

    def _answer(self, connection: socket.socket, pieces: list[Piece]) -> None:
        with connection:
            try:
                connection.settimeout(10)
                connection.recv(65536)
                for data, wait in pieces:
                    time.sleep(wait)
                    connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(65536)
            except OSError:  # the client went away, as it should from some of these
                return


@cache
def server() -> Server:
    return Server()


def reply(
    body: bytes, status: str = "200 OK", headers: str = "Content-Type: application/json\r\n", length: int | None = None
) -> bytes:
    head = f"HTTP/1.1 {status}\r\n{headers}Connection: close\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
    return head.encode("latin-1", "replace") + body
