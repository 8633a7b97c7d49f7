# Sourced by agg.sh and disagg.sh with the name of the cluster and the user's arguments: set up, make the demo model
# where no other is asked for, and hand over to `pdserve up`.
cluster=$1
shift
for argument in "$@"; do
  case $argument in
    --help | -h) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
    --model | --model=*) model_given=1 ;;
    --config | --config=*) config_given=1 ;;
    --) break ;;
  esac
done
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh" serve
defaults=()
if [ -z "${config_given:-}" ]; then
  defaults+=(--run-dir "$root/logs/$cluster")
  if [ -z "${model_given:-}" ]; then
    defaults+=(--model "$root/models/demo-small")
    [ -f "$root/models/demo-small/config.json" ] ||
      "$venv/bin/pdserve" model demo --size small --out "$root/models/demo-small"
  fi
fi
exec "$venv/bin/pdserve" up "$root/launch/$cluster.toml" "${defaults[@]}" "$@"
