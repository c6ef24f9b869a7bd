"""Keeps the library for drawings in terminals out of a service: to be imported before anything that imports structlog.

Where rich is installed, as beside the command `headrace`, structlog imports it for its tracebacks: 0.1 s of a processor
at each start of each service. What a service says is JSON, or has plain tracebacks (`logs.py`).
"""

import sys

sys.modules.setdefault("rich", None)  # type: ignore[arg-type]  # None: importing it fails, as where it is not installed
