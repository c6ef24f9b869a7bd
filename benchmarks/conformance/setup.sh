#!/bin/sh
# Installs the tools that `benchmarks.conformance` runs, each in a virtual environment of its own:
# ./setup.sh [PYTHON [TOOL…]]. About 6 GB under ${HEADRACE_BENCH:-~/.cache/headrace-bench}/conformance, most of it torch,
# which some of them want for its types. What is there stays as it is. Needs no model hub.
set -eu

PYTHON=${1:-python3}
[ $# -eq 0 ] || shift
ROOT=${HEADRACE_BENCH:-$HOME/.cache/headrace-bench}/conformance
TORCH=2.13.0
mkdir -p "$ROOT"

install() { # folder, then what pip is told
    if [ ! -e "$ROOT/$1/done" ]; then
        "$PYTHON" -m venv "$ROOT/$1"
        PIP="$ROOT/$1/bin/pip"
        shift
        "$PIP" install --quiet "$@"
        touch "${PIP%/bin/pip}/done"
    fi
}

for TOOL in ${*:-llm-comply openai-1 lm-eval guidellm inference-perf aiperf}; do
    case $TOOL in
    llm-comply) install "$TOOL" llm-comply==0.5.0 ;;
    # The last series that has the `openai` command.
    openai-1) install "$TOOL" "openai==1.109.1" ;;
    lm-eval) install "$TOOL" "lm-eval[hf,api]==0.4.13" "torch==$TORCH" ;;
    guidellm) install "$TOOL" guidellm==0.8.1 "torch==$TORCH" ;;
    # It declares Python 3.12, and its code runs unchanged on 3.11, with the releases of what it needs that do so too.
    inference-perf)
        install "$TOOL" aiofiles aiohttp av boto3 datasets google-cloud-storage jinja2 numpy pillow prometheus-client \
            pydantic pyyaml requests rich tiktoken tqdm transformers==5.13.0 uvloop
        [ -e "$ROOT/$TOOL/bin/inference-perf" ] || \
            "$ROOT/$TOOL/bin/pip" install --quiet --no-deps --ignore-requires-python inference-perf==0.7.0
        ;;
    aiperf) install "$TOOL" aiperf==0.13.0 ;;
    *)
        echo "no tool called $TOOL"
        exit 1
        ;;
    esac
done

echo "the tools are in $ROOT"
