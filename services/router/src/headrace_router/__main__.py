"""`python -m headrace_router`: one router, until SIGTERM."""

import sys

import headrace_shared.lean_imports  # noqa: F401 - first

# isort: split
from headrace_router.allocator import bound_allocator, bound_tokenizers
from headrace_router.service import RouterService
from headrace_router.settings import RouterSettings
from headrace_shared.service import run_service
from headrace_shared.settings import load_settings_or_exit
from headrace_shared.standard_streams import fill_standard_streams


def main() -> int:
    fill_standard_streams()
    bound_allocator()
    bound_tokenizers()
    settings = load_settings_or_exit(
        RouterSettings, prog="headrace-router", description="OpenAI-compatible front of Headrace."
    )
    # Its own web server answers the probes.
    return run_service(RouterService(settings), name="router", settings=settings, serve_health=False)


if __name__ == "__main__":
    sys.exit(main())
