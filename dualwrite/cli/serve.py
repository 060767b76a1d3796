"""``dualwrite serve``: the process around the supervisors and their pages: its signals, its log, its exit codes."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

import click

from dualwrite.cli.options import ERROR, exit_code_for_errors

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger(__name__)

_NEEDED: Final = ("starlette", "uvicorn", "jinja2", "prometheus_client")
_USAGE_ERROR: Final = 2


@click.command()
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar="DUALWRITE_SERVE_CONFIG",
    required=True,
    help="TOML file that names the databases and their clusters.",
)
@click.option("--check", is_flag=True, help="Read the file, and end.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What is logged, on standard error.",
)
@exit_code_for_errors
def serve(*, config_file: Path, check: bool, log_level: str) -> None:
    """Keep every writer of some databases settled, and show on a page what is open and what becomes of it.

    Start as many replicas as you like: for each database one of them settles, the others stand by. SIGTERM ends a replica
    after its present settlement. What has a live owner is left alone.

    Exit code: 0 stopped, or with --check the file can be used, 1 an error, 2 wrong usage.
    """
    missing = [name.replace("_", "-") for name in _NEEDED if find_spec(name) is None]
    if missing:
        click.echo(f"dualwrite: serve needs {' and '.join(missing)}: pip install 'dualwrite[serve]'", err=True)
        sys.exit(_USAGE_ERROR)
    from dualwrite.serving.configuration import read_settings  # noqa: PLC0415 - other commands do not need it

    settings = read_settings(config_file)
    if check:
        click.echo(f"{config_file}: targets: {', '.join(one.name for one in settings.targets)}")
        return
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("dualwrite").setLevel(log_level.upper())

    import uvicorn  # noqa: PLC0415 - as above

    from dualwrite.serving.app import make_app  # noqa: PLC0415 - as above
    from dualwrite.serving.supervisor import Supervisor  # noqa: PLC0415 - as above

    class Server(uvicorn.Server):
        """Says where it listens, which is news if the port was 0; and ends at the second signal."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            for listening in self.servers:
                for bound in listening.sockets:
                    host, port = bound.getsockname()[:2]
                    logger.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit:  # nothing is lost: whoever leads next goes on
                signal.signal(sig, signal.SIG_DFL)
                signal.raise_signal(sig)
            super().handle_exit(sig, frame)

    app = make_app([Supervisor(target, settings) for target in settings.targets], settings.actions)
    server = Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # the peer's own address decides whether its user header is believed
            timeout_graceful_shutdown=5,
        )
    )
    _end_with_zero(server)
    server.run()
    if not server.started:
        sys.exit(ERROR)


def _end_with_zero(server: uvicorn.Server) -> None:
    """Let SIGTERM and SIGINT end the process with exit code 0.

    The server stops at the signal, and then raises it again for whoever handled it before: by default that kills the process.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
