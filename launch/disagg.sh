#!/usr/bin/env bash
# Serve a model disaggregated on this machine: pool node, prefill workers, decode workers, router. See serve.sh --help.
exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" disagg "$@"
