"""The images that our Dockerfiles start from. Where no registry can be reached, stand-ins take their names.

A stand-in is a Debian root made by debootstrap that has what the Dockerfiles use of the official image, and this
machine's way to the package index: its certificates, and pip's index and folders of wheels. It is labelled with a hash
of how it was made, and made again when that changes. Images that came from a registry are never touched.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.docker.engine import ROOT, CommandError, run

LABEL = "headrace.stand-in"
PULL_TIMEOUT_S = 300.0
DEBIAN = "bookworm"
PYTHON_VERSION = "3.11"
PACKAGES = ("busybox-static", "ca-certificates", "python3", "python3-pip", "python3-venv")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
NATS_ENTRYPOINT = """\
#!/bin/sh
set -e
case "$1" in -*) set -- nats-server "$@" ;; esac
exec "$@"
"""


def base_images() -> list[str]:
    """What our Dockerfiles name in FROM, python before nats."""
    dockerfiles = [*ROOT.glob("services/*/Dockerfile"), ROOT / "deploy/nats/Dockerfile"]
    names = {name for path in dockerfiles for name in re.findall(r"^FROM (\S+)", path.read_text(), re.MULTILINE)}
    return sorted(names, key=lambda name: not name.startswith("python:"))


def ensure_base_images() -> None:
    """Makes every base image available. Raises CommandError."""
    recipe = _recipe()
    missing = []
    for name in base_images():
        label = _stand_in_label(name)
        if label == recipe or label == "":
            continue
        try:
            run(["docker", "pull", name], PULL_TIMEOUT_S)
        except CommandError:
            missing.append(name)
    if missing:
        with tempfile.TemporaryDirectory() as folder:
            _make_stand_ins(missing, Path(folder) / "root", recipe)


def _stand_in_label(name: str) -> str | None:
    """The hash of a stand-in, "" for an image from elsewhere, None if there is no image of this name."""
    try:
        [image] = json.loads(run(["docker", "image", "inspect", name]))
    except CommandError:
        return None
    return str((image["Config"].get("Labels") or {}).get(LABEL, ""))


def _recipe() -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update(CERTIFICATES.read_bytes())
    digest.update(_pip_configuration().encode())
    digest.update(" ".join(wheel.name for wheel in _torch_wheels()).encode())
    digest.update(_nats_server().read_bytes())
    return digest.hexdigest()[:16]


def _make_stand_ins(names: Sequence[str], root: Path, recipe: str) -> None:
    if shutil.which("debootstrap") is None:
        raise CommandError(f"cannot pull {', '.join(names)}, nor make stand-ins without debootstrap")
    run(["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", DEBIAN, root], timeout_s=600)
    busybox = root.parent / "busybox"
    shutil.move(root / "bin/busybox", busybox)
    for name in names:
        if name.startswith("python:"):
            _dress_as_python(root)
            _import(root, name, recipe, ['CMD ["python3"]'])
        elif name.startswith("nats:"):
            alpine = root.parent / "nats"
            _dress_as_nats(alpine, busybox)
            commands = [
                'ENTRYPOINT ["docker-entrypoint.sh"]',
                'CMD ["nats-server", "--config", "/etc/nats/nats-server.conf"]',
            ]
            _import(alpine, name, recipe, commands)
        else:
            raise CommandError(f"there is no recipe for a stand-in of {name}")


def _dress_as_python(root: Path) -> None:
    """python and pip in /usr/local/bin, pip free to install there."""
    local = root / "usr/local/bin"
    for link, target in (("python", "python3"), ("python3", "python3"), ("pip", "pip3"), ("pip3", "pip3")):
        (local / link).symlink_to(f"/usr/bin/{target}")
    (root / f"usr/lib/python{PYTHON_VERSION}/EXTERNALLY-MANAGED").unlink()
    shutil.copy(CERTIFICATES, root / "etc/ssl/certs/ca-certificates.crt")
    (root / "etc/pip.conf").write_text(_pip_configuration())
    wheels = root / "opt/wheels"
    wheels.mkdir()
    for wheel in _torch_wheels():
        shutil.copy(wheel, wheels)
    for unused in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
        shutil.rmtree(root / unused, ignore_errors=True)


def _dress_as_nats(root: Path, busybox: Path) -> None:
    """A busybox system, as Alpine is one."""
    for folder in ("bin", "etc/nats", "tmp", "usr/bin", "usr/sbin", "usr/local/bin"):
        (root / folder).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    shutil.copy(busybox, root / "bin/busybox")
    shutil.copy(_nats_server(), root / "usr/local/bin/nats-server")
    entrypoint = root / "usr/local/bin/docker-entrypoint.sh"
    entrypoint.write_text(NATS_ENTRYPOINT)
    entrypoint.chmod(0o755)
    for applet in run([busybox, "--list"]).split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("/bin/busybox")


def _import(root: Path, name: str, recipe: str, commands: Sequence[str]) -> None:
    path = "ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
    changes = [part for command in (f"LABEL {LABEL}={recipe}", path, *commands) for part in ("--change", command)]
    with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as archive:
        subprocess.run(
            ["docker", "import", *changes, "-", name],
            stdin=archive.stdout,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=300,
        )


def _pip_settings() -> dict[str, str]:
    """pip's configuration on this machine, the environment's over the files'."""
    listed = run([sys.executable, "-m", "pip", "config", "list"])
    found = re.findall(r"^(.*)\.([a-z-]+)='(.*)'$", listed, re.MULTILINE)
    return {key: value for _, key, value in sorted(found, key=lambda item: item[0] == ":env:")}


def _pip_configuration() -> str:
    """For inside: what can be reached from there. Indexes in folders of this machine cannot."""
    settings = _pip_settings()
    lines = ["[global]", "cert = /etc/ssl/certs/ca-certificates.crt", "timeout = 180", "find-links = /opt/wheels"]
    if settings.get("index-url", "").startswith("http"):
        lines.append(f"index-url = {settings['index-url']}")
    extra = [url for url in settings.get("extra-index-url", "").split() if url.startswith("http")]
    if extra:
        lines.append(f"extra-index-url = {' '.join(extra)}")
    return "\n".join(lines) + "\n"


def _torch_wheels() -> list[Path]:
    """The CPU build of torch, where this machine's pip has it in a folder: much smaller than the index's."""
    tag = f"cp{PYTHON_VERSION.replace('.', '')}"
    folders = [Path(place) for place in _pip_settings().get("find-links", "").split() if os.path.isdir(place)]
    return sorted(wheel for folder in folders for wheel in folder.glob(f"torch-*+cpu-{tag}-{tag}-*.whl"))


def _nats_server() -> Path:
    """The broker that the other tests use."""
    found = shutil.which("nats-server", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if found is None:
        raise CommandError("there is no nats-server; `make setup` installs one")
    return Path(found)
