#!/usr/bin/env bash
# Serve a model on this machine with aggregated workers: pool node, workers that do prefill and decode, router.
#
#   launch/agg.sh [--model PATH] [--port N] [--workers N] [--config FILE] [--run-dir DIR] [-- SGLANG_FLAGS]
#
# Sets everything up first (virtual environment, demo model). Without --model SmolLM2-135M is downloaded and
# served. --config takes the place of launch/agg.toml. Ctrl-C stops every process.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/up.sh" agg "$@"
