"""The entry of the command `headrace`. What it imports before it is called is next to nothing.

Ctrl-C during an import would come out as pages of text, or be lost in a callback of Python's own: until a command
begins it just ends us.
"""

import io
import logging
import os
import signal
import sys
from importlib import import_module

from headrace_shared.standard_streams import fill_standard_streams


def main() -> None:
    has_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else whoever started us ignores it
    if has_default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    fill_standard_streams()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # terminals that know few characters are answered with what they know
            stream.reconfigure(errors="replace")

    def before_start() -> None:
        if "structlog" in sys.modules:  # commands tell what goes wrong themselves, and nothing else
            structlog = import_module("structlog")
            structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
        if has_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    code = 1
    try:
        code = import_module("headrace_cli.commands").run(sys.argv[1:], before_start)
        sys.stdout.flush()
    except BrokenPipeError:  # `headrace ps | head`
        # Python would write at its end what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
