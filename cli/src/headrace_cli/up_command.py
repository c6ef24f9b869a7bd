"""Entry of `headrace up`."""

import asyncio
import os
from collections.abc import Sequence

from headrace_cli.display import make_display
from headrace_cli.settings import UpSettings
from headrace_cli.up import run_up
from headrace_shared.settings import PREFIX, load_settings


def run(argv: Sequence[str]) -> int:
    settings = load_settings(
        UpSettings,
        argv,
        os.environ,
        prog="headrace up",
        description="Starts everything on this machine. Other settings of the services are taken from the environment "
        "and from the sections router, scheduler, worker and autoscaler of the YAML file.",
        elsewhere="see --help. Settings of the services that are not there are variables, here {variable}, or keys of "
        "the YAML file",
    )
    settings.check()
    asyncio.run(run_up(settings, os.environ, make_display(os.environ), _config_file(argv)))
    return 0


def _config_file(argv: Sequence[str]) -> str:
    for index, argument in enumerate(argv):
        if argument == "--config" and index + 1 < len(argv):
            return argv[index + 1]
        if argument.startswith("--config="):
            return argument.partition("=")[2]
    return os.environ.get(PREFIX + "CONFIG", "")
