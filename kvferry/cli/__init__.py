"""The command line: ``kvferry COMMAND [--flags]``. One line to standard error and a non-zero status where something is wrong.

Exit status: 0 done, 1 failed, 2 the caller can mend it (a flag, a port, a path, memory), 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry import __version__
from kvferry.cli.status import EXIT_INTERRUPTED, EXIT_USER, exit_status
from kvferry.config import BenchConfig, DaemonConfig, DemoConfig, RouterConfig, UpConfig, WorkerConfig, parse
from kvferry.errors import KvferryError

__all__ = ["main"]


@dataclass(frozen=True, slots=True)
class Command:
    """``run`` takes the arguments after the command's name; ``extras``: what it needs besides the base install."""

    summary: str
    run: Callable[[Sequence[str]], int]
    extras: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else EXIT_USER
    if arguments[0] in ("-V", "--version"):
        print(f"kvferry {__version__}")
        return 0
    command = _COMMANDS.get(arguments[0])
    if command is None:
        print(f"kvferry: there is no command {arguments[0]!r}. `kvferry --help` lists them.", file=sys.stderr)
        return EXIT_USER
    try:
        return command.run(arguments[1:])
    except KvferryError as error:
        print(f"kvferry: {error}", file=sys.stderr)
        return exit_status(error)
    except ModuleNotFoundError as missing:
        if not command.extras or (missing.name or "").startswith("kvferry"):
            raise
        hint = f"Install it: pip install 'kvferry[{command.extras}]'"
        print(f"kvferry: {arguments[0]} needs the package {missing.name}, which is not installed. {hint}", file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _usage() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: kvferry COMMAND [--flags]",
            "",
            *lines,
            "",
            "`kvferry COMMAND --help` tells each command's flags. Every flag is also a variable: KVFERRY_PORT for --port.",
        ]
    )


def _up(arguments: Sequence[str]) -> int:
    from kvferry.cli.up import run

    return run(parse(UpConfig, arguments, prog="kvferry up", examples=_UP_EXAMPLES))


def _demo(arguments: Sequence[str]) -> int:
    from kvferry.cli.demo import run

    return run(parse(DemoConfig, arguments, prog="kvferry demo", examples="example: kvferry demo --path tcp"))


def _bench(arguments: Sequence[str]) -> int:
    from kvferry.cli.bench import run

    if arguments and arguments[0] == "transfer":
        arguments = arguments[1:]
    return run(parse(BenchConfig, arguments, prog="kvferry bench transfer", examples="example: kvferry bench transfer --json"))


def _router(arguments: Sequence[str]) -> int:
    from kvferry.router.main import run

    return run(parse(RouterConfig, arguments, prog="kvferry router", examples=_ROUTER_EXAMPLES))


def _daemon(arguments: Sequence[str]) -> int:
    from kvferry.kvstore.daemon import run

    return run(parse(DaemonConfig, arguments, prog="kvferry daemon", examples=_DAEMON_EXAMPLES))


def _worker(arguments: Sequence[str]) -> int:
    from kvferry.workers.main import run

    return run(parse(WorkerConfig, arguments, prog="kvferry worker", examples=_WORKER_EXAMPLES))


_UP_EXAMPLES = """examples:
  kvferry up
  kvferry up --prefill 2 --decode 1 --port 9000
  kvferry up --model ~/models/my-llama --path tcp --pool-bytes 4GiB"""
_ROUTER_EXAMPLES = """examples:
  kvferry router --host 0.0.0.0 --directory-listen 0.0.0.0:7000
  kvferry router --directory redis://redis:6379"""
_DAEMON_EXAMPLES = """example:
  kvferry daemon --node decode-0 --socket-dir /run/kvferry/decode-0 --directory router:7000 \\
      --listen 0.0.0.0:7100 --advertise decode-0:7100 --data-listen 0.0.0.0:7200 --data-advertise decode-0:7200"""
_WORKER_EXAMPLES = """example:
  kvferry worker --role decode --socket-dir /run/kvferry/decode-0 --listen 0.0.0.0:7300 --advertise decode-0:7300"""

_COMMANDS = {
    "up": Command("run router, daemons and workers on this machine until Ctrl-C", _up, "router,worker"),
    "demo": Command("run a cluster, send it two requests, compare with the undivided model", _demo, "router,worker"),
    "bench": Command("measure transfers between two processes on this machine", _bench),
    "router": Command("the HTTP front of a cluster", _router, "router"),
    "daemon": Command("the sidecar beside one worker: memory, blocks, transfers", _daemon),
    "worker": Command("the reference torch engine, for prefill, decode or both", _worker, "worker"),
}

if __name__ == "__main__":
    sys.exit(main())
