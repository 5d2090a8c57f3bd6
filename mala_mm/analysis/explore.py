r"""Serves a page in the browser on which to look inside of models.

python tools/explore.py CONFIG mala.pth softmax.pth --images photos/

Click on the image: the scores of the query there, for every stage and mechanism; the model's
prediction; the singular values of the KV states. Needs no package more than the other tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from mala_mm.engine.arguments import make_parser
from mala_mm.errors import UserError

from .arguments import add_model_options, load_models
from .explorer import OPERATORS, Explorer
from .inside import find_images

PAGE = Path(__file__).with_name('explore.html')
LARGEST_UPLOAD = 32 << 20  # bytes


class Handler(BaseHTTPRequestHandler):
    """Hands requests to the server's :class:`Explorer`."""

    server: ExplorerServer
    protocol_version = 'HTTP/1.1'

    def do_GET(self) -> None:
        """Serve the page, an image or a look."""
        url = urlsplit(self.path)
        explorer = self.server.explorer
        if url.path == '/':
            self._send(PAGE.read_bytes(), 'text/html; charset=utf-8')
        elif url.path == '/setup':
            self._answer(explorer.setup)
        elif url.path == '/image':
            self._answer(lambda: explorer.image(**_integers(url.query)), 'image/jpeg')
        elif url.path == '/look':
            self._answer(lambda: explorer.look(**_integers(url.query)))
        else:
            self._send(b'there is no such page', 'text/plain', 404)

    def do_POST(self) -> None:
        """Take an image file."""
        url = urlsplit(self.path)
        length = self.headers.get('Content-Length', '')
        if url.path != '/image' or not length.isdigit():
            self._send(b'there is no such page', 'text/plain', 404)
        elif int(length) > LARGEST_UPLOAD:
            self.close_connection = True
            message = f'an image file may have {LARGEST_UPLOAD >> 20} MiB at most'
            self._send(message.encode(), 'text/plain', 413)
        else:
            data = self.rfile.read(int(length))
            name = parse_qs(url.query).get('name', ['image'])[0]
            self._answer(lambda: dict(number=self.server.explorer.add_image(name, data)))

    def _answer(self, ask: Callable[[], Any], content_type: str = 'application/json') -> None:
        try:
            answer = ask()
        except (UserError, TypeError) as error:
            self._send(str(error).encode(), 'text/plain; charset=utf-8', 400)
            return
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self._send(body, content_type)

    def _send(self, body: bytes, content_type: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header('Content-Type', content_type)
        self.send_header('Content-Length', str(len(body)))
        self.send_header('Cache-Control', 'no-store')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Keep quiet."""


def _integers(query: str) -> dict[str, int]:
    found = {}
    for key, (value, *_) in parse_qs(query).items():
        try:
            found[key] = int(value)
        except ValueError as error:
            raise UserError(f'{key} must be an integer, got {value!r}') from error
    return found


class ExplorerServer(ThreadingHTTPServer):
    """A server for one :class:`Explorer`.

    Args:
        explorer (Explorer): What answers.
        host (str): The address to listen at.
        port (int): The port; 0 takes any that is free.

    Raises:
        UserError: If the port is taken.
    """

    daemon_threads = True

    def __init__(self, explorer: Explorer, host: str = '127.0.0.1', port: int = 7860) -> None:
        self.explorer = explorer
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f'cannot listen at {host}:{port} ({error}); name another --port'
            ) from error

    @property
    def address(self) -> str:
        """Where the page is."""
        return f'http://{self.server_address[0]}:{self.server_address[1]}/'


def main(argv: Sequence[str] | None = None) -> None:
    """Serve from the command line, until it is interrupted.

    Args:
        argv (Sequence[str], optional): Arguments; those of the process by default.

    Raises:
        UserError: If an image, the config, a checkpoint or an option is wrong.
    """
    parser = make_parser(__doc__)
    add_model_options(parser)
    parser.add_argument(
        '--images', nargs='+', default=(), metavar='PATH', help='image files and folders'
    )
    parser.add_argument(
        '--operators',
        nargs='+',
        default=OPERATORS,
        metavar='NAME',
        help=f'mechanisms to show (default: {" ".join(OPERATORS)})',
    )
    parser.add_argument('--host', default='127.0.0.1', help='address (default: this machine only)')
    parser.add_argument('--port', type=int, default=7860, help='port (default: 7860)')
    args = parser.parse_args(argv)
    images = find_images(args.images)[:50]
    explorer = Explorer(list(load_models(args)), images, args.size, args.operators)
    with ExplorerServer(explorer, args.host, args.port) as server:
        print(f'Open {server.address} in a browser; Ctrl-C ends it.', flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
