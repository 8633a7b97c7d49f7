#!/usr/bin/env bash
# Serve a model on several hosts over ssh: pool nodes, prefill workers, decode workers, two routers.
#
#   launch/hosts.sh [--hosts NAME,NAME=ADDRESS,...] [--remote-shell COMMAND] [--config FILE] [--model PATH]
#                   [--port N] [--run-dir DIR] [-- SGLANG_FLAGS]
#
# Sets everything up here first. The hosts have this checkout, its .venv and the model at the same paths.
# --config takes the place of launch/hosts.toml, --hosts that of its list. COMMAND is called as ssh is, with a
# host's name and one string for a shell there. Ctrl-C stops every process.
set -euo pipefail
arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    --remote-shell) export PDSERVE_REMOTE_SHELL=$2; shift 2 ;;
    --remote-shell=*) export PDSERVE_REMOTE_SHELL=${1#*=}; shift ;;
    --) break ;;
    *) arguments+=("$1"); shift ;;
  esac
done
. "$(dirname "${BASH_SOURCE[0]}")/up.sh" hosts "${arguments[@]}" --on hosts "$@"
