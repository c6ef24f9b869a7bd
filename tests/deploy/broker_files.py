"""The broker's image as folders: its configuration, and what `headrace init` puts beside it."""

import subprocess
from pathlib import Path

from headrace_cli.init_command import InitSettings, make_secrets
from headrace_shared.broker import find_nats_server

ROOT = Path(__file__).resolve().parents[2]
BROKERS = ("nats-1", "nats-2", "nats-3")


def lay_out(root: Path, *, tls: bool = False) -> Path:
    """Below `root`; returns the folder that stands for /etc."""
    for folder in ("etc/nats", "etc/headrace", "run"):
        (root / folder).mkdir(parents=True)
    make_secrets(root / "secrets", InitSettings(cluster=BROKERS, tls=tls, broker_dir=str(root / "run/headrace")))
    (root / "run/headrace").symlink_to(root / "secrets/broker")
    for name in ("nats.conf", "cluster.conf"):
        (root / "etc/nats" / name).write_text((ROOT / "deploy/nats" / name).read_text())
    return root / "etc"


def check(config: Path) -> None:
    """As the server reads it."""
    command = [str(find_nats_server()), "--config", str(config), "-t"]
    environment = {"NATS_SERVER_NAME": "nats-1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
