"""`headrace trace REQUEST`: the spans of a request as text, for where there is no collector."""

from collections.abc import Sequence

from headrace_cli.explain_command import REQUEST, tell


def run(argv: Sequence[str]) -> int:
    return tell(argv, "trace", "span_tree", f"Shows the spans of a request as a tree, without a collector. {REQUEST}")
