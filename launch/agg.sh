#!/usr/bin/env bash
# Serve a model on this machine with workers that do prefill and decode: pool node, workers, router. See serve.sh --help.
exec "$(dirname "${BASH_SOURCE[0]}")/serve.sh" agg "$@"
