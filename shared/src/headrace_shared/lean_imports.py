"""Makes the imports of a service cheaper: to be imported before all others. `run_service` ends it.

The garbage collector looks at all that imports make again and again while it grows: a fifth to a third of their time.

Where rich is installed, as beside the command `headrace`, structlog imports it for its tracebacks: 0.1 s of a processor
at each start of each service. What a service says is JSON, or has plain tracebacks (`logs.py`).
"""

import gc
import sys

gc.disable()
sys.modules.setdefault("rich", None)  # type: ignore[arg-type]  # None: importing it fails, as where it is not installed
