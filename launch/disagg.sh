#!/usr/bin/env bash
# Serve a model disaggregated on this machine: pool node, prefill workers, decode workers, router.
#
#   launch/disagg.sh [--model PATH] [--port N] [--prefill-workers N] [--decode-workers N] [--config FILE]
#                    [--run-dir DIR] [-- SGLANG_FLAGS]
#
# Sets everything up first (virtual environment, demo model). Without --model SmolLM2-135M is downloaded and
# served. --config takes the place of launch/disagg.toml. Ctrl-C stops every process.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/up.sh" disagg "$@"
