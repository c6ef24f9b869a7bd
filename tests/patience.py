"""How long tests wait for what must come."""

PATIENCE_S = 60.0
"""For what takes a second or two on an idle machine. It costs nothing unless something is broken."""
