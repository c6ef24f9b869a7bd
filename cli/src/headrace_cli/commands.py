"""The commands of `headrace`."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from headrace_cli.errors import CommandError
from headrace_shared.errors import ConfigError
from headrace_shared.heap import kept_from_collector
from headrace_shared.settings import EXIT_CONFIG

COMMANDS = {
    "up": "start broker, router, scheduler, worker and autoscaler on this machine",
    "init": "make the keys and certificates of broker and services, as files",
    "ps": "list the processes of running instances",
    "chat": "talk to a model",
    "top": "show the fleet: queue, batches, KV blocks, tokens a second",
    "flood": "send load and measure what users would feel; compare two runs",
    "keys": "create, list or revoke API keys",
    "drain": "empty a worker and end it, without losing a token",
    "park": "empty a worker and keep it loaded, in reserve",
    "promote": "make a parked or draining worker ready again",
    "dead": "list, show, requeue or drop requests that were given up",
    "explain": "tell what became of a request",
    "trace": "show the spans of a request as a tree, without a collector",
    "record": "save what the schedulers have seen and done of late",
    "replay": "run such a recording again and compare every decision",
    "simulate": "run a fleet's day under several scaling policies, in minutes",
    "sim-worker": "start workers that take a GPU's time and compute nothing",
    "doctor": "check whether this machine can run Headrace",
    "version": "print the version",
}


def run(argv: Sequence[str], before_start: Callable[[], None] = lambda: None) -> int:
    """Runs one command; returns the exit code: 0, 1 for a failure, 2 for a wrong setting, 130 for Ctrl-C.
    `before_start` is called when everything is imported."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        lines = [f"  {name:10} {text}" for name, text in COMMANDS.items()]
        sys.stdout.write(
            "usage: headrace COMMAND …\n\n" + "\n".join(lines) + "\n\n`headrace COMMAND --help` says more.\n"
        )
        return 0 if argv else EXIT_CONFIG
    name, rest = argv[0], argv[1:]
    if name in ("version", "--version", "-V"):
        sys.stdout.write(f"headrace {_version()}\n")
        return 0
    if name not in COMMANDS:
        sys.stderr.write(f"headrace: {name}: unknown command; one of {', '.join(COMMANDS)}\n")
        return EXIT_CONFIG
    try:
        # Imported only now, since each command pays for its own libraries.
        with kept_from_collector():
            module = import_module(f"headrace_cli.{name.replace('-', '_')}_command")
        command: Callable[[Sequence[str]], int] = module.run
        before_start()
        return command(rest)
    except ConfigError as error:
        sys.stderr.write(f"headrace {name}: {error}\n")
        return EXIT_CONFIG
    except CommandError as error:
        sys.stderr.write(f"headrace {name}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _version() -> str:
    from importlib import metadata  # slower than all other imports together

    try:
        return metadata.version("headrace-cli")
    except metadata.PackageNotFoundError:
        return "of a source tree"
