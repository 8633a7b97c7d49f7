{{- /* What is special of each group of pods: `pdserve.groups` collects it, in JSON. */ -}}

{{- define "pdserve.poolGroup" -}}
{{- $values := .root.Values.pool -}}
{{- $user := deepCopy ($values.config | default dict) -}}
{{- $secrets := "/etc/pdserve/secrets" -}}
{{- $default := dict -}}
{{- if not $user.insecure -}}
{{- $default = dict "admin_token_file" (printf "%s/pool-admin-token" $secrets) "cluster" (dict "token_file" (printf "%s/pool-cluster-token" $secrets)) "namespace_defaults" (dict "read_token_file" (printf "%s/pool-token" $secrets)) -}}
{{- end -}}
{{- $fixed := dict "listen" (list "tcp:0.0.0.0:7700") "metrics" "0.0.0.0:9100" "arena_dir" "/dev/shm/pdserve" "tcp" (dict "port" 7701) -}}
{{- $_ := set $fixed "capacity_bytes" (printf "%dGiB" (int $values.capacityGiB)) -}}
{{- $memory := printf "%dMi" (mul 1024 (add (int $values.capacityGiB) (int $values.overheadGiB))) -}}
{{- $limits := dict "memory" $memory -}}
{{- $mounts := list (dict "name" "shm" "mountPath" "/dev/shm") -}}
{{- $volumes := list (dict "name" "shm" "emptyDir" (dict "medium" "Memory" "sizeLimit" (printf "%dMi" (mul 1076 (int $values.capacityGiB))))) -}}
{{- with $values.hugePages -}}
{{- $size := trimSuffix "B" . -}}
{{- $_ := set $fixed "huge_pages" . -}}{{- $_ := set $fixed "huge_pages_dir" "/hugepages/pdserve" -}}
{{- $limits = dict "memory" (printf "%dMi" (mul 1024 (int $values.overheadGiB))) (printf "hugepages-%s" $size) (printf "%dMi" (mul 1024 (int $values.capacityGiB))) -}}
{{- $mounts = append $mounts (dict "name" "hugepages" "mountPath" "/hugepages") -}}
{{- $volumes = append $volumes (dict "name" "hugepages" "emptyDir" (dict "medium" (printf "HugePages-%s" $size))) -}}
{{- end -}}
{{- $tiers := list -}}
{{- $claims := list -}}
{{- range $i, $tier := $values.tiers -}}
{{- $name := printf "tier%d" $i -}}
{{- $tiers = append $tiers (merge (dict "path" (printf "/var/lib/pdserve/%s/pages" $name)) (omit $tier "volume")) -}}
{{- $mounts = append $mounts (dict "name" $name "mountPath" (printf "/var/lib/pdserve/%s" $name)) -}}
{{- if $tier.volume -}}
{{- $spec := dict "accessModes" (list "ReadWriteOnce") "resources" (dict "requests" (dict "storage" $tier.volume.storage)) -}}
{{- with $tier.volume.storageClassName -}}{{- $_ := set $spec "storageClassName" . -}}{{- end -}}
{{- $claims = append $claims (dict "metadata" (dict "name" $name) "spec" $spec) -}}
{{- else -}}{{- /* pages on their way to a bucket */ -}}
{{- if ne $tier.kind "object" -}}{{- fail (printf "pool.tiers: %s needs a volume: { storage: ... }" $tier.kind) -}}{{- end -}}
{{- $volumes = append $volumes (dict "name" $name "emptyDir" dict) -}}
{{- end -}}
{{- end -}}
{{- with $tiers -}}{{- $_ := set $fixed "tiers" . -}}{{- end -}}
{{- $service := printf "%s-pool" .root.Release.Name -}}
{{- $peers := list (printf "dns+tcp:%s:7700" $service) -}}
{{- if dig "tls" "ca" "" $user -}}{{- /* certificates name hosts, and DNS gives addresses */ -}}
{{- $peers = list -}}{{- range include "pdserve.poolNodes" . | fromJsonArray -}}{{- $peers = append $peers .address -}}{{- end -}}
{{- end -}}
{{- $_ := set $default "cluster" (merge (dict "peers" $peers) ($default.cluster | default dict)) -}}
{{- $config := mustMergeOverwrite $default $user $fixed -}}
{{- $ports := dict "control" 7700 "pages" 7701 "metrics" 9100 -}}
{{- with regexFind "^tcp://.*:[0-9]+$" (dig "events" "address" "" $config) -}}{{- $_ := set $ports "events" (regexFind "[0-9]+$" . | int) -}}{{- end -}}
{{- $group := dict "name" "pool" "role" "pool" "ports" $ports "values" $values "config" $config "tls" false "claims" $claims "mounts" $mounts "volumes" $volumes -}}
{{- $_ := set $group "args" (list "pool" "serve" "--config" "/etc/pdserve/config/pool.toml" "--name" "$(POD_NAME)" "--cluster.advertise" (printf "tcp:$(POD_NAME).%s:7700" $service)) -}}
{{- $drain := int $values.stopSeconds | default (add 30 (mul 3 (int $values.capacityGiB)) | int) -}}
{{- if gt (int $values.replicas) 1 -}}
{{- $hook := list "pdserve" "pool" "drain" "tcp:127.0.0.1:7700" "--deadline" (toString $drain) -}}
{{- with $config.admin_token_file -}}{{- $hook = concat $hook (list "--token-file" .) -}}{{- end -}}
{{- with dig "tls" "ca" "" $config -}}{{- $hook = concat $hook (list "--tls-ca" .) -}}{{- end -}}
{{- $_ := set $group "preStop" $hook -}}
{{- end -}}
{{- $_ := set $group "stopSeconds" (add 40 $drain) -}}
{{- $_ := set $group "resources" (dict "requests" $limits "limits" $limits) -}}
{{- toJson $group -}}
{{- end }}

{{- define "pdserve.workerGroup" -}}
{{- $values := mustMergeOverwrite (deepCopy .root.Values.workerDefaults) (deepCopy (.own | default dict)) -}}
{{- $role := $values.role | default .name -}}
{{- if not (has $role (list "prefill" "decode" "agg" "elastic")) -}}{{- fail (printf "workers.%s: role is prefill, decode, agg or elastic" .name) -}}{{- end -}}
{{- $secrets := "/etc/pdserve/secrets" -}}
{{- $user := $values.config -}}
{{- $default := dict "stop_grace_s" (sub (int $values.stopSeconds) 8) "pool" (dict "nodes" (include "pdserve.poolNodes" . | fromJsonArray)) -}}
{{- if not $user.insecure -}}{{- $_ := set $default "cluster_token_file" (printf "%s/cluster-token" $secrets) -}}{{- end -}}
{{- if not (.root.Values.pool.config | default dict).insecure -}}{{- $_ := set $default.pool "token_file" (printf "%s/pool-token" $secrets) -}}{{- end -}}
{{- $config := mustMergeOverwrite $default $user (dict "engine" (dict "host" "0.0.0.0" "port" 30000)) -}}
{{- $tls := not (empty (dig "tls" "certificate" "" $config)) -}}
{{- $ports := dict "http" 30000 -}}
{{- with dig "direct" "bootstrap_port" "" $config -}}{{- $_ := set $ports "bootstrap" . -}}{{- end -}}
{{- $service := include "pdserve.name" . -}}
{{- $args := list $role "--config" (printf "/etc/pdserve/config/%s.toml" $role) "--advertise" (printf "%s://$(POD_NAME).%s:30000" ($tls | ternary "https" "http") $service) -}}
{{- $words := $values.args -}}
{{- $hosts := int $values.hosts | default 1 -}}
{{- if gt $hosts 1 -}}{{- /* the set's controller says each pod its number and the leader's address */ -}}
{{- if not (dig "engine" "trusted_network" false $config) -}}{{- fail (printf "workers.%s: hosts needs config.engine.trusted_network: true, because ranks talk without a token" .name) -}}{{- end -}}
{{- $words = concat $words (list "--nnodes" (toString $hosts) "--node-rank" "$(LWS_WORKER_INDEX)" "--dist-init-addr" "$(LWS_LEADER_ADDRESS):20000") -}}
{{- end -}}
{{- if $words -}}{{- $args = concat $args (list "--") $words -}}{{- end -}}
{{- $resources := dict -}}
{{- with $values.gpus -}}{{- $resources = dict "limits" (dict "nvidia.com/gpu" .) -}}{{- end -}}
{{- $group := dict "name" .name "role" $role "ports" $ports "values" $values "config" $config "tls" $tls "hosts" $hosts "args" $args "resources" $resources "stopSeconds" $values.stopSeconds -}}
{{- $_ := set $group "mounts" (list (dict "name" "shm" "mountPath" "/dev/shm") (dict "name" "models" "mountPath" "/models" "readOnly" true)) -}}
{{- $_ := set $group "volumes" (list (dict "name" "shm" "emptyDir" (dict "medium" "Memory" "sizeLimit" $values.shm)) (merge (dict "name" "models") .root.Values.models)) -}}
{{- toJson $group -}}
{{- end }}

{{- define "pdserve.routerGroup" -}}
{{- $root := .root -}}
{{- $values := $root.Values.router -}}
{{- $user := deepCopy ($values.config | default dict) -}}
{{- $secrets := "/etc/pdserve/secrets" -}}
{{- if not (or $user.insecure (dig "access" "keys_file" "" $user)) -}}{{- fail "router.config.access.keys_file is needed: others reach the router (or insecure: true)" -}}{{- end -}}
{{- if dig "admin" "key" "" $user -}}{{- fail "router.config.admin.key is a secret in plain text: give key_file" -}}{{- end -}}
{{- $admin := dict "key_file" (printf "%s/admin-key" $secrets) -}}
{{- $default := dict "stop_grace_s" (sub (int $values.stopSeconds) 10) "access" (dict "cluster_token_file" (printf "%s/cluster-token" $secrets)) "admin" $admin -}}
{{- $fixed := dict "host" "0.0.0.0" "port" $values.port "admin" (dict "host" "127.0.0.1" "port" 9000) -}}
{{- if not (dig "etcd" "endpoints" "" $user) -}}
{{- range $name, $own := $root.Values.workers -}}
{{- $role := ($own | default dict).role | default $name -}}
{{- $service := include "pdserve.name" (dict "root" $root "name" $name) -}}
{{- $urls := list (printf "dns+http://%s%s:30000" $service (gt (int ($own | default dict).hosts) 1 | ternary "-leaders" "")) -}}
{{- if dig "tls" "ca" "" $user -}}{{- /* certificates name hosts, and DNS gives addresses */ -}}
{{- $urls = list -}}
{{- $count := int (dig "autoscale" "max" (dig "replicas" 1 ($own | default dict)) ($own | default dict)) -}}
{{- range $i := until $count -}}{{- $urls = append $urls (printf "https://%s-%d.%s:30000" $service $i $service) -}}{{- end -}}
{{- end -}}
{{- $_ := set $fixed $role (concat (get $fixed $role | default (get $user $role) | default list) $urls) -}}
{{- end -}}
{{- end -}}
{{- $config := mustMergeOverwrite $default $user $fixed -}}
{{- $group := dict "name" "router" "role" "router" "ports" (dict "http" $values.port) "values" $values "config" $config "resources" dict "mounts" list "volumes" list -}}
{{- $_ := set $group "tls" (not (empty (dig "access" "tls_cert_file" "" $config))) -}}
{{- $_ := set $group "args" (list "router" "--config" "/etc/pdserve/config/router.toml") -}}
{{- $_ := set $group "preStop" (list "sleep" "5") -}}{{- /* services name a pod for some moments after it was asked to end */ -}}
{{- $_ := set $group "stopSeconds" $values.stopSeconds -}}
{{- toJson $group -}}
{{- end }}
