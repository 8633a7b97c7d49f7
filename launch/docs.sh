#!/usr/bin/env bash
# Build the documents strictly into build/site, and serve them at http://127.0.0.1:8008.
#
#   launch/docs.sh [--port N]     build and serve; pages are built anew when they change; Ctrl-C ends it
#   launch/docs.sh --build        build only
#   launch/docs.sh --write        write the generated parts of docs/ and README.md, then build
#
# Sets everything up first. The site needs no network: it holds its own scripts, styles and search.
set -euo pipefail
port=8008 what=serve
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
    --port) port=$2 && shift ;;
    --build) what=build ;;
    --write) what=write ;;
    *) echo "launch/docs.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
  shift
done
extras=(docs)
if [ "$what" = write ]; then extras+=(serve); fi # they tell what workers take, too
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" "${extras[@]}"
cd "$root"
export NO_MKDOCS_2_WARNING=1 # the theme's note on another generator
if [ "$what" = write ]; then python -m docs.generate --write; fi
if [ "$what" = serve ]; then exec python -m mkdocs serve --strict --dev-addr "127.0.0.1:$port"; fi
python -m mkdocs build --strict
