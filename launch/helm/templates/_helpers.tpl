{{- /* Every template here takes a dict; `root` is the chart's context, `group` what `pdserve.groups` says of a group of pods. */ -}}

{{- define "pdserve.name" -}}{{ .root.Release.Name }}-{{ .name }}{{- end }}

{{- define "pdserve.selector" -}}
app.kubernetes.io/name: pdserve
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .group }}
pdserve-group: {{ .name }}
{{- end }}
{{- end }}

{{- define "pdserve.labels" -}}
app.kubernetes.io/name: pdserve
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .group.role }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "pdserve.head" -}}
metadata:
  name: {{ include "pdserve.name" (dict "root" .root "name" .group.name) }}{{ .suffix }}
  labels: {{ include "pdserve.labels" . | nindent 4 }}
{{- end }}

{{- /* All groups of pods by name, in JSON: role, ports by name, values, config as it is written, whether it has TLS. */ -}}
{{- define "pdserve.groups" -}}
{{- $root := .root -}}
{{- $groups := dict "pool" (include "pdserve.poolGroup" . | fromJson) "router" (include "pdserve.routerGroup" . | fromJson) -}}
{{- range $name, $own := $root.Values.workers -}}
{{- if has $name (list "pool" "router") -}}{{- fail (printf "workers.%s: call the group otherwise" $name) -}}{{- end -}}
{{- $_ := set $groups $name (include "pdserve.workerGroup" (dict "root" $root "name" $name "own" $own) | fromJson) -}}
{{- end -}}
{{- toJson $groups -}}
{{- end }}

{{- define "pdserve.image" -}}
{{- $kind := "cpu" -}}
{{- range .root.Values.workers -}}{{- if or .gpus $.root.Values.workerDefaults.gpus -}}{{- $kind = "gpu" -}}{{- end -}}{{- end -}}
{{ .root.Values.image.repository }}:{{ .root.Values.image.tag | default (printf "%s-%s" .root.Chart.AppVersion $kind) }}
{{- end }}

{{- /* Control addresses of the first nodes of the pool: one that answers names the others. */ -}}
{{- define "pdserve.poolNodes" -}}
{{- $service := printf "%s-pool" .root.Release.Name -}}
{{- $nodes := list -}}
{{- range $i := until (min 3 (int .root.Values.pool.replicas) | int) -}}
{{- $nodes = append $nodes (dict "node" (printf "%s-%d" $service $i) "address" (printf "tcp:%s-%d.%s:7700" $service $i $service)) -}}
{{- end -}}
{{- toJson $nodes -}}
{{- end }}

{{- /* The keys of the Secret that a configuration names, in JSON. */ -}}
{{- define "pdserve.secretFiles" -}}
{{- $keys := list -}}
{{- range regexFindAll "/etc/pdserve/secrets/[-._A-Za-z0-9]+" . -1 -}}{{- $keys = append $keys (base .) -}}{{- end -}}
{{- $keys | uniq | sortAlpha | toJson -}}
{{- end }}

{{- /* TOML of a group's configuration. Helm's numbers are floats after JSON: whole ones are written as whole ones. */ -}}
{{- define "pdserve.config" -}}
{{- $text := regexReplaceAll "(?m)^( *[-_A-Za-z0-9]+ = -?[0-9]+)[.]0$" (toToml .group.config) "${1}" -}}
{{- with regexFind "(?m)^ *(token|cluster_token|admin_token|read_token|write_token|metrics_token|page_key|password) *=" $text -}}
{{- fail (printf "%s: a secret in plain text (%s): name a file of the Secret, with _file at the option's end" $.group.name .) -}}
{{- end -}}
{{- range .group.values.env -}}
{{- if and .value (regexMatch "(?i)(token|secret|password|_key|_key_id)$" .name) -}}
{{- fail (printf "%s: env.%s is a secret in plain text: give it by valueFrom" $.group.name .name) -}}
{{- end -}}
{{- end -}}
{{- $text -}}
{{- end }}

{{- define "pdserve.configMap" -}}
apiVersion: v1
kind: ConfigMap
{{ include "pdserve.head" . }}
data:
  {{ .group.role }}.toml: {{ include "pdserve.config" . | quote }}
{{- end }}

{{- define "pdserve.service" -}}
apiVersion: v1
kind: Service
{{ include "pdserve.head" . }}
spec:
  {{- if eq .group.role "router" }}
  {{- toYaml .group.values.service | nindent 2 }}
  {{- else }}
  clusterIP: None # names the pods, also before they are ready: pool nodes find each other while they start
  publishNotReadyAddresses: true
  {{- end }}
  selector:
    {{- include "pdserve.selector" . | nindent 4 }}
    {{- if .leaders }}
    app.kubernetes.io/component: {{ .group.role }}
    {{- end }}
  ports:
    {{- range $name, $port := .group.ports }}
    - { name: {{ $name }}, port: {{ $port }}, targetPort: {{ $name }} }
    {{- end }}
{{- end }}

{{- define "pdserve.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
{{ include "pdserve.head" . }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{ include "pdserve.selector" . | nindent 6 }}
{{- end }}

{{- /* A pod's template. `plain`: without role and HTTP, for the further pods of a worker on several hosts. */ -}}
{{- define "pdserve.podTemplate" -}}
{{- $group := .group -}}
{{- $values := $group.values -}}
{{- $isWorker := and (ne $group.role "pool") (ne $group.role "router") -}}
{{- $secrets := include "pdserve.config" . | include "pdserve.secretFiles" | fromJsonArray -}}
metadata:
  annotations:
    checksum/config: {{ include "pdserve.config" . | sha256sum }}
  labels:
    {{- include "pdserve.selector" . | nindent 4 }}
    {{- if not .plain }}
    app.kubernetes.io/component: {{ $group.role }}
    pdserve-job: {{ $isWorker | ternary "worker" $group.role }}
    {{- if $isWorker }}
    llm-d.ai/engine-type: sglang # an endpoint picker reads the metrics by the names of this engine
    inference.networking.k8s.io/engine-type: sglang
    {{- end }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ $group.stopSeconds }}
  securityContext:
    { runAsNonRoot: true, runAsUser: 1000, runAsGroup: 1000, fsGroup: 1000, fsGroupChangePolicy: OnRootMismatch, seccompProfile: { type: RuntimeDefault } }
  {{- with $values.pod }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if and $values.gpus (not (dig "tolerations" nil ($values.pod | default dict))) }}
  tolerations:
    - { key: nvidia.com/gpu, operator: Exists, effect: NoSchedule }
  {{- end }}
  {{- if ne $group.role "router" }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels: {{ include "pdserve.selector" . | nindent 10 }}
  {{- end }}
  containers:
    - name: {{ $group.role }}
      image: {{ include "pdserve.image" . }}
      args: {{ toJson $group.args }}
      env:
        - name: POD_NAME
          valueFrom: { fieldRef: { fieldPath: metadata.name } }
        - { name: HOME, value: /tmp }
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- range $name, $port := $group.ports }}
        - { name: {{ $name }}, containerPort: {{ $port }} }
        {{- end }}
      startupProbe:
        {{- include "pdserve.probe" (merge (dict "kind" (eq $group.role "router" | ternary "alive" "ready")) .) | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add (int $values.startSeconds) 4) 5 }}
      readinessProbe:
        {{- include "pdserve.probe" (merge (dict "kind" "ready") .) | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      livenessProbe: # of a worker the port alone: SGLang's watchdog ends a scheduler that hangs, and a long prompt delays answers
        {{- include "pdserve.probe" (merge (dict "kind" "alive") .) | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      {{- with $group.preStop }}
      lifecycle: { preStop: { exec: { command: {{ toJson . }} } } }
      {{- end }}
      resources: {{ toYaml (mustMergeOverwrite (deepCopy ($values.resources | default dict)) $group.resources) | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        {{- /* SYS_NICE: without it the runtime's seccomp profile forbids to bind memory to a NUMA node */}}
        capabilities: { drop: [ALL]{{ if hasKey $group.config "numa_node" }}, add: [SYS_NICE]{{ end }} }
      volumeMounts:
        - { name: config, mountPath: /etc/pdserve/config, readOnly: true }
        {{- if $secrets }}
        - { name: secrets, mountPath: /etc/pdserve/secrets, readOnly: true }
        {{- end }}
        - { name: tmp, mountPath: /tmp }
        {{- with concat $group.mounts ($values.mounts | default list) }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - { name: config, configMap: { name: {{ include "pdserve.name" (dict "root" .root "name" $group.name) }} } }
    {{- if $secrets }}
    - name: secrets
      secret:
        secretName: {{ .root.Values.secretName }}
        defaultMode: 0440
        items:
          {{- range $secrets }}
          - { key: {{ . }}, path: {{ . }} }
          {{- end }}
    {{- end }}
    - { name: tmp, emptyDir: {} }
    {{- with concat $group.volumes ($values.volumes | default list) }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- /* Servers that ask for certificates are probed by their ports alone, because the kubelet has none. */ -}}
{{- define "pdserve.probe" -}}
{{- $group := .group -}}
{{- $path := eq $group.role "router" | ternary (eq .kind "ready" | ternary "/ready" "/health") "/pd/ready" -}}
{{- if or .plain (eq $group.role "pool") (dig "tls" "client_ca" "" $group.config) (and (ne $group.role "router") (eq .kind "alive")) -}}
tcpSocket: { port: {{ eq $group.role "pool" | ternary "control" "http" }} }
{{- else -}}
httpGet: { path: {{ $path }}, port: http, scheme: {{ $group.tls | ternary "HTTPS" "HTTP" }} }
{{- end -}}
{{- end }}
