#!/usr/bin/env bash
# Check this machine's GPU with pdserve, in a quarter of an hour at most and without a network: HiCache's copies,
# a page mover and the pool with pages of the GPU, UCX's transports for it, SGLang alone, with the pool and
# disaggregated, conversations, streams beside a page mover. Without a GPU these checks are skipped.
#
#   launch/gpu_check.sh [--out DIR] [--model PATH] [--only GROUP] [--on-cpu]
#
# Sets everything up first, for which a network is needed; PDSERVE_PYTHON=PYTHON takes a Python that has pdserve and
# SGLang already. The report is DIR/report.md and DIR/report.jsonl (logs/gpu-check).
set -euo pipefail
case ${1:-} in
  --help | -h) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
esac
if [ -n "${PDSERVE_PYTHON:-}" ]; then
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  python=$PDSERVE_PYTHON
else
  . "$(dirname "${BASH_SOURCE[0]}")/setup.sh" serve
  python=$venv/bin/python
fi
cd "$root"
case " $* " in
  *" --model"*) ;;
  *) [ -f models/demo-small/config.json ] || "$python" -m pdserve model demo --size small --out models/demo-small ;;
esac
exec "$python" -m python -m benchmarks gpu-check "$@"
