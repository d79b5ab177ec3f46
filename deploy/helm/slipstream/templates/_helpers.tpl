{{- define "slipstream.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/*
Beginning of the names of objects. Names of services have no dots and begin with a letter; those of StatefulSets, such
as `<fullname>-transferqueue-shard`, have at most 52 characters.
*/}}
{{- define "slipstream.fullname" -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $name := include "slipstream.name" . -}}
{{- $full = contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- end -}}
{{- $full = $full | replace "." "-" | trunc 32 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z]" $full) -}}
{{- fail (printf "the name of a service must begin with a letter, got %s; choose another release name, or set fullnameOverride" $full) -}}
{{- end -}}
{{- $full -}}
{{- end -}}

{{/* Namespace of worker pods. Separate, because whoever may create pods in a namespace can read all its secrets. */}}
{{- define "slipstream.workersNamespace" -}}
{{- default (printf "%s-workers" (.Release.Namespace | trunc 55)) .Values.workers.namespace -}}
{{- end -}}

{{/* Namespaces of worker pods, as a JSON list: that of all projects, and those of projects with a namespace of their own */}}
{{- define "slipstream.workerNamespaces" -}}
{{- $namespaces := list (include "slipstream.workersNamespace" .) -}}
{{- $taken := concat $namespaces (list .Release.Namespace (include "slipstream.sandboxesNamespace" .)) -}}
{{- range $project, $own := .Values.workers.projects -}}
{{- with $own.namespace -}}
{{- if has . $taken -}}
{{- fail (printf "workers.projects.%s.namespace must be a namespace of that project alone, but %s is that of the release, of its sandboxes, of all workers or of another project; name another one" $project .) -}}
{{- end -}}
{{- $namespaces = append $namespaces . -}}
{{- $taken = append $taken . -}}
{{- end -}}
{{- end -}}
{{- $namespaces | toJson -}}
{{- end -}}

{{/* Namespace of the pods of sandboxes */}}
{{- define "slipstream.sandboxesNamespace" -}}
{{- default (printf "%s-sandboxes" (.Release.Namespace | trunc 53)) .Values.sandboxes.namespace -}}
{{- end -}}

{{/* Labels that select pods; never change them, because selectors are immutable. Needs: root, component */}}
{{- define "slipstream.selectorLabels" -}}
app.kubernetes.io/name: {{ include "slipstream.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "slipstream.labels" -}}
{{ include "slipstream.selectorLabels" . }}
app.kubernetes.io/part-of: slipstream
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Needs: root, image */}}
{{- define "slipstream.image" -}}
{{- $name := .image.repository -}}
{{- with .root.Values.global.imageRegistry | default .root.Values.image.registry }}{{ $name = printf "%s/%s" (trimSuffix "/" .) $name }}{{ end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default .root.Chart.AppVersion .root.Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "slipstream.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "slipstream.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "slipstream.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* A map of environment variables as a list */}}
{{- define "slipstream.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* A map of quantities as text, because server-side apply refuses numbers */}}
{{- define "slipstream.quantities" -}}
{{- range $name, $quantity := . }}
{{ $name }}: {{ ternary (int64 $quantity | toString) $quantity (kindIs "float64" $quantity) | toString | quote }}
{{- end }}
{{- end -}}

{{/* Scheduling of a pod. Needs a map with nodeSelector, tolerations, affinity, priorityClassName */}}
{{- define "slipstream.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/*
Probe of a gRPC server. Kubernetes supports the gRPC health service since 1.24, but not over TLS; otherwise the probe
only checks that the port is open.
*/}}
{{- define "slipstream.grpcProbe" -}}
{{- if and (eq .Values.tls.mode "off") (semverCompare ">=1.24-0" .Capabilities.KubeVersion.Version) -}}
grpc: {port: 50051}
{{- else -}}
tcpSocket: {port: grpc}
{{- end -}}
{{- end -}}

{{/* Name of the secret with a part of the identity that all services share. Needs: root, settings, part */}}
{{- define "slipstream.secretName" -}}
{{- default (printf "%s-%s" (include "slipstream.fullname" .root) .part) .settings.existingSecret -}}
{{- end -}}

{{/* Pods of a component in any namespace, as a peer of a network policy. Needs: root, component */}}
{{- define "slipstream.peer" -}}
{{- $isWorker := eq .component "worker" -}}
{{- $namespaces := list .root.Release.Namespace -}}
{{- if $isWorker }}{{ $namespaces = include "slipstream.workerNamespaces" .root | fromJsonArray }}{{ end -}}
namespaceSelector:
  {{- if eq (len $namespaces) 1 }}
  matchLabels:
    kubernetes.io/metadata.name: {{ first $namespaces }}
  {{- else }}
  matchExpressions: [{key: kubernetes.io/metadata.name, operator: In, values: {{ $namespaces | toJson }}}]
  {{- end }}
podSelector:
  matchLabels:
    {{- if $isWorker }}
    {{- include "slipstream.workerLabels" .root | nindent 4 }}
    {{- else }}
    {{- include "slipstream.selectorLabels" . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Labels of every worker pod */}}
{{- define "slipstream.workerLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
slipstream.dev/worker: "true"
{{- end -}}

{{/* Not empty if pods of some project are in a queue of Kueue */}}
{{- define "slipstream.hasQueue" -}}
{{- .Values.workers.kueue.queueName -}}
{{- range .Values.workers.projects -}}{{- dig "kueue" "queueName" "" . -}}{{- end -}}
{{- end -}}

{{/* Name of objects that belong to no namespace, and so must differ between releases of a cluster */}}
{{- define "slipstream.clusterName" -}}
{{ .Release.Namespace }}-{{ include "slipstream.fullname" . }}-controller
{{- end -}}

{{/* Part of a selector: pods that the controller has not released from a drained node */}}
{{- define "slipstream.notEvictable" -}}
matchExpressions: [{key: slipstream.dev/evictable, operator: DoesNotExist}]
{{- end -}}

{{/* Environment of the span collector, the same for every service */}}
{{- define "slipstream.tracingEnv" -}}
{{- with .Values.tracing }}
{{- if .endpoint }}
- name: SLIPSTREAM_TRACE_ENDPOINT
  value: {{ .endpoint | quote }}
- name: SLIPSTREAM_TRACE_RATIO
  value: {{ .ratio | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "slipstream.tlsMount" -}}
{{- if ne .Values.tls.mode "off" }}
- {name: tls, mountPath: /etc/slipstream/tls, readOnly: true}
{{- end }}
{{- end -}}

{{/* Volume of the issuer with which services sign their certificates */}}
{{- define "slipstream.issuerVolume" -}}
{{- if ne .Values.tls.mode "off" }}
- name: tls
  secret: {secretName: {{ include "slipstream.fullname" . }}-issuer, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* Peers of all fleets of servers for network policies, as a JSON list */}}
{{- define "slipstream.fleetPeers" -}}
{{- $peers := list -}}
{{- range .Values.fleets }}{{ $peers = concat $peers (default list .to) }}{{ end -}}
{{- $peers | toJson -}}
{{- end -}}

{{- define "slipstream.keyVolume" -}}
- name: service-key
  secret:
    secretName: {{ include "slipstream.secretName" (dict "root" . "settings" .Values.serviceKey "part" "service-key") }}
    items: [{key: {{ .Values.serviceKey.key }}, path: key}]
    defaultMode: 0440
{{- end -}}

{{/* Environment with the paths and hosts that specifications may name. Downloaded models are data, never code. Needs: root, prefix */}}
{{- define "slipstream.allowanceEnv" -}}
{{- $workers := .root.Values.workers -}}
{{- $code := concat (list "/opt/slipstream/code") $workers.codeRoots -}}
{{- $hosts := $workers.rewardHosts -}}
{{- range .root.Values.fleets }}{{ range .addresses }}{{ $hosts = append $hosts (urlParse .).hostname }}{{ end }}{{ end -}}
- name: {{ .prefix }}_ALLOWED_ROOTS
  value: {{ concat $code (list "/var/cache/slipstream" "/var/lib/slipstream") $workers.allowedRoots | toJson | quote }}
- name: {{ .prefix }}_ALLOWED_URLS
  value: {{ $workers.allowedUrls | toJson | quote }}
- name: {{ .prefix }}_CODE_ROOTS
  value: {{ $code | toJson | quote }}
- name: {{ .prefix }}_ALLOWED_COMMANDS
  value: {{ $workers.allowedCommands | toJson | quote }}
- name: {{ .prefix }}_REWARD_HOSTS
  value: {{ uniq $hosts | toJson | quote }}
{{- end -}}

{{/* Environment of a pod whose metrics need a token. Needs: root, prefix */}}
{{- define "slipstream.metricsEnv" -}}
{{- if .root.Values.monitoring.tokenSecret.name }}
- name: {{ .prefix }}_METRICS_TOKEN_FILE
  value: /etc/slipstream/metrics/token
{{- end }}
{{- end -}}

{{- define "slipstream.metricsMount" -}}
{{- if .Values.monitoring.tokenSecret.name }}
- {name: metrics-token, mountPath: /etc/slipstream/metrics, readOnly: true}
{{- end }}
{{- end -}}

{{- define "slipstream.metricsVolume" -}}
{{- with .Values.monitoring.tokenSecret }}
{{- if .name }}
- name: metrics-token
  secret: {secretName: {{ .name }}, items: [{key: {{ .key }}, path: token}]}
{{- end }}
{{- end }}
{{- end -}}
