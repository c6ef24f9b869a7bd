"""Standard input, output and errors of a process that was started without them, as some start daemons."""

import os
import sys


def fill_standard_streams() -> None:
    """What is closed becomes /dev/null, for our children as well. To be called before anything else is opened, which
    would get the numbers of these streams: libraries would write their messages into it, and libuv ends the process
    when it closes a socket with such a number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this stream's
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 - as long as the process lives
