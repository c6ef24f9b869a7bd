"""Tools and clients that others wrote, unmodified, against a running system; what they say themselves.

    benchmarks/conformance/setup.sh              # once
    python -m benchmarks.conformance [TOOL …] [--url http://127.0.0.1:8000 --model NAME]

Without --url it starts a system with the built-in model; lm-eval gets one of its own, with the weights that
transformers reads. Exits with 1 if a tool found a fault, could not be run, or measured nothing plausible.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.conformance.clients import FORMATS, llm_comply, openai_command
from benchmarks.conformance.evaluation import lm_eval
from benchmarks.conformance.load_tools import LOAD_TOOLS, NUM_PLACES, PATHS
from benchmarks.conformance.target import Finding, NotInstalled, Target, ToolFailed
from benchmarks.peers.specs import find_root
from benchmarks.peers.weights import MODEL, checkpoint_folder
from tests.e2e.launcher import launched

Tool = Callable[[Target, str], Finding]
TOOLS: dict[str, tuple[Tool, tuple[str, ...]]] = {
    "llm-comply": (llm_comply, tuple(FORMATS)),
    "openai-command": (openai_command, tuple(PATHS)),
    **{name: (tool, tuple(PATHS)) for name, tool in LOAD_TOOLS.items()},
    "lm-eval": (lm_eval, ("text",)),
}


@contextlib.contextmanager
def target_for(name: str, options: argparse.Namespace) -> Iterator[Target]:
    root = find_root()
    checkpoint = checkpoint_folder(root)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "files").mkdir()
        with contextlib.ExitStack() as stack:
            url, model = options.url, options.model
            if url is None:
                own = ["--model", str(checkpoint)] if name == "lm-eval" else []
                environment = {"HEADRACE_DTYPE": "float32"} if own else {"HEADRACE_CONTEXT": "2048"}
                places = ["--max-sequences", str(NUM_PLACES)] if name in LOAD_TOOLS else []
                system = stack.enter_context(
                    launched(folder, "--no-autoscaler", *own, *places, environment=environment, timeout_s=300)
                )
                url, model = system.url, checkpoint.name if own else MODEL
            yield Target(url, model, checkpoint, folder / "files", root / "conformance", root)


def measure(name: str, options: argparse.Namespace) -> Iterator[tuple[str, Finding | str]]:
    """Each way of a tool, with what it found or why it found nothing."""
    tool, ways = TOOLS[name]
    with target_for(name, options) as target:
        for way in ways:
            own = target._replace(folder=target.folder / way)
            own.folder.mkdir()
            try:
                yield way, tool(own, way)
            except NotInstalled as error:
                yield way, f"not installed: {error}"
            except (ToolFailed, KeyError, ValueError) as error:
                yield way, f"{type(error).__name__}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance")
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"of {', '.join(TOOLS)}; all of them by default")
    parser.add_argument("--url", help="of a running system, without /v1")
    parser.add_argument("--model", default=MODEL, help="with --url: what is asked for")
    options = parser.parse_args()
    if unknown := set(options.tools) - set(TOOLS):
        parser.error(f"no tool called {', '.join(sorted(unknown))}")
    print(f"{'tool':<18} {'way':<10} {'version':<10} {'done':>5} {'failed':>6} {'first token':>12}  what it says")
    is_good = True
    for name in options.tools or TOOLS:
        for way, found in measure(name, options):
            if isinstance(found, str):
                is_good = False
                print(f"{name:<18} {way:<10} {found}", flush=True)
                continue
            is_good = is_good and found.is_good
            first = "" if found.first_token_ms is None else f"{found.first_token_ms:.1f} ms"
            figures = f"{found.version:<10} {found.num_done:>5} {found.num_failed:>6} {first:>12}"
            print(f"{found.tool:<18} {way:<10} {figures}  {found.note}", flush=True)
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
