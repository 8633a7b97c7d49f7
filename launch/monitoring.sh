#!/usr/bin/env bash
# Watch clusters on this machine: Prometheus, and Grafana with pdserve's dashboards where Grafana is installed.
#
#   launch/monitoring.sh [--port N] [--grafana-port N] [--data DIR] [RUN_DIR...]
#
# RUN_DIR: of clusters started by `pdserve up` (default: logs/disagg logs/agg); one that starts later, or anew, is
# found within seconds. Prometheus listens on 127.0.0.1:9090, Grafana on 127.0.0.1:3000 (nobody need log in to look).
# A router with API keys shows its metrics to the admin key alone: give its file as PDSERVE_ADMIN_KEY_FILE.
# Workers and pool nodes with metrics_token show theirs to it: give its file as PDSERVE_METRICS_TOKEN_FILE.
# Ctrl-C stops both; what was measured stays in DIR (default: logs/monitoring).
set -euo pipefail
case ${1:-} in
  --help | -h) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
esac
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=$PATH:/usr/sbin:/sbin # where Debian has grafana-server, and only root looks
port=9090 grafana_port=3000 data=$root/logs/monitoring
run_dirs=()
while [ $# -gt 0 ]; do
  case $1 in
    --port) port=$2; shift ;;
    --grafana-port) grafana_port=$2; shift ;;
    --data) data=$2; shift ;;
    -*) echo "monitoring: unknown option $1; see --help" >&2; exit 2 ;;
    *) run_dirs+=("$(realpath -m "$1")") ;;
  esac
  shift
done
[ ${#run_dirs[@]} -gt 0 ] || run_dirs=("$root/logs/disagg" "$root/logs/agg")
command -v prometheus >/dev/null || {
  echo "monitoring: Prometheus is missing: run 'sudo apt-get install prometheus' (or your system's like)" >&2
  exit 1
}
mkdir -p "$data"
data=$(realpath "$data")

{
  printf 'global:\n  scrape_interval: 5s\nscrape_configs:\n'
  for job in router worker pool lmcache; do
    printf '  - job_name: %s\n    honor_labels: true\n    file_sd_configs:\n      - refresh_interval: 5s\n        files:\n' "$job"
    printf '          - "%s/prometheus-targets.json"\n' "${run_dirs[@]}"
    printf '    relabel_configs:\n      - {source_labels: [job], regex: %s, action: keep}\n' "$job"
    # this host's own process; its certificate names another one
    if [ "$job" = router ]; then printf '    tls_config: {insecure_skip_verify: true}\n'; fi
    if [ "$job" = router ] && [ -n "${PDSERVE_ADMIN_KEY_FILE:-}" ]; then
      printf '    authorization: {credentials_file: "%s"}\n' "$(realpath "$PDSERVE_ADMIN_KEY_FILE")"
    fi
    if [ "$job" != router ] && [ -n "${PDSERVE_METRICS_TOKEN_FILE:-}" ]; then
      printf '    authorization: {credentials_file: "%s"}\n' "$(realpath "$PDSERVE_METRICS_TOKEN_FILE")"
    fi
  done
} >"$data/prometheus.yml"

started=()
stop() {
  trap - EXIT INT TERM
  kill "${started[@]}" 2>/dev/null || true
  wait
}
trap stop EXIT
trap 'exit 0' INT TERM
prometheus --config.file="$data/prometheus.yml" --storage.tsdb.path="$data/prometheus" \
  --web.listen-address="127.0.0.1:$port" --log.level=warn &
started+=($!)
echo "Prometheus: http://127.0.0.1:$port"

if grafana=$(command -v grafana-server || command -v grafana); then
  mkdir -p "$data"/grafana/{data,datasources,dashboards}
  printf 'apiVersion: 1\ndatasources:\n  - {name: pdserve, type: prometheus, access: proxy, url: "http://127.0.0.1:%s", isDefault: true}\n' \
    "$port" >"$data/grafana/datasources/pdserve.yaml"
  printf 'apiVersion: 1\nproviders:\n  - {name: pdserve, type: file, options: {path: "%s/launch/grafana"}}\n' \
    "$root" >"$data/grafana/dashboards/pdserve.yaml"
  case $grafana in
    *server) command=("$grafana") ;;
    *) command=("$grafana" server) ;;
  esac
  GF_PATHS_PROVISIONING=$data/grafana GF_PATHS_DATA=$data/grafana/data GF_PATHS_LOGS=$data/grafana/data \
    GF_SERVER_HTTP_ADDR=127.0.0.1 GF_SERVER_HTTP_PORT=$grafana_port GF_AUTH_ANONYMOUS_ENABLED=true GF_LOG_LEVEL=warn \
    "${command[@]}" --homepath "${GRAFANA_HOME:-/usr/share/grafana}" &
  started+=($!)
  echo "Grafana: http://127.0.0.1:$grafana_port/dashboards"
else
  echo "Grafana is not installed; its dashboards are launch/grafana/*.json"
fi
wait -n # the end of either is the end of both
