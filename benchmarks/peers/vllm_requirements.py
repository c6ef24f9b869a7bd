"""The requirements of a vLLM wheel for plain text on a CPU, one a line: python vllm_requirements.py WHEEL."""

import re
import sys
import zipfile
from email.parser import HeaderParser

LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")


def main(path: str) -> None:
    with zipfile.ZipFile(path) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(wheel.read(name).decode())
    for requirement in metadata.get_all("Requires-Dist") or []:
        package = re.match(r"[A-Za-z0-9._-]+", requirement)
        if package and package[0].lower() not in LEFT_OUT and "extra ==" not in requirement:
            sys.stdout.write(f"{requirement}\n")


if __name__ == "__main__":
    main(sys.argv[1])
