"""What SECURITY.md names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()


def test_every_test_and_file_that_is_named_exists() -> None:
    folder = ""
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "test" in line]
    assert len(rows) > 30
    named = 0
    for row in rows:
        for path in re.findall(r"(?:[\w./-]+/)?test_\w+\.py|tests/[\w/]+|benchmarks\.\w+|deploy/[\w./-]+", row):
            if path.startswith("benchmarks."):
                path = path.replace(".", "/") + ".py"
            elif "/" in path:
                folder = path.rpartition("/")[0]
            else:
                path = f"{folder}/{path}"
            assert (ROOT / path).exists(), path
            named += 1
    assert named > 40
