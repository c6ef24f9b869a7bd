"""`python -m headrace_worker.timing.card_process FD`: an engine process as far as the tokenizer and `Loaded`."""

import os
import socket
import sys

from headrace_shared import codec
from headrace_shared.errors import ConfigError
from headrace_worker.engine_frames import Load, Refused, read_frames
from headrace_worker.engine_process import EXIT_REFUSED, Outlet, announce
from headrace_worker.iteration import EngineFacts
from headrace_worker.models.checkpoint import open_model
from headrace_worker.models.source import find_model


def main() -> int:
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        outlet = Outlet(connection)
        config = codec.decode(next(read_frames(connection.makefile("rb"))), Load).config
        try:
            files = find_model(config.model)
            checkpoint = open_model(files, config.generation_config)
            card = checkpoint.make_card(config.served_name or files.name, checkpoint.config.context)
        except ConfigError as error:
            outlet.send(Refused(key=error.key, problem=error.problem))
            return EXIT_REFUSED
        announce(outlet, EngineFacts(card, 1, 1, card.context, 1, 1, "none", "none"))
        connection.recv(1)  # until the parent has read it all
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
