{{/*
Pods of the transferqueue: the pod with the index and the first shard, or the pods with the other shards.
Needs: root, component, replicas
*/}}
{{- define "slipstream.transferqueue" -}}
{{- $values := .root.Values.transferqueue -}}
{{- $index := printf "%s-transferqueue" (include "slipstream.fullname" .root) -}}
{{- $host := printf "%s.%s.svc" $index .root.Release.Namespace -}}
{{- $isIndex := eq .component "transferqueue" -}}
{{- $memory := printf "%dMi" (add (int $values.capacityMiB) (int $values.overheadMiB)) }}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ include "slipstream.fullname" .root }}-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "slipstream.labels" . | nindent 4 }}
spec:
  replicas: {{ .replicas }}
  serviceName: {{ $index }}
  podManagementPolicy: Parallel
  selector:
    matchLabels: {{- include "slipstream.selectorLabels" . | nindent 6 }}
  template:
    metadata:
      labels: {{- include "slipstream.labels" . | nindent 8 }}
      {{- with $values.podAnnotations }}
      annotations: {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      serviceAccountName: {{ $index }}
      automountServiceAccountToken: false
      terminationGracePeriodSeconds: 30
      securityContext: {{- include "slipstream.podSecurityContext" .root | nindent 8 }}
      {{- include "slipstream.pullSecrets" .root | nindent 6 }}
      {{- include "slipstream.placement" $values | nindent 6 }}
      {{- if gt (int .replicas) 1 }}
      # Spread the shards, so that the loss of a node loses few of them.
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels: {{- include "slipstream.selectorLabels" . | nindent 14 }}
      {{- end }}
      containers:
        - name: transferqueue
          image: {{ include "slipstream.image" (dict "root" .root "image" $values.image) }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          securityContext: {{- include "slipstream.securityContext" .root | nindent 12 }}
          env:
            - name: POD_IP
              valueFrom: {fieldRef: {fieldPath: status.podIP}}
            - name: SLIPSTREAM_TRANSFERQUEUE_SHARD_ID
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            {{- /* A shard serves only metrics on this address, with a port of their own. */}}
            - name: SLIPSTREAM_TRANSFERQUEUE_BIND
              value: "$(POD_IP):50051"
            {{- if $isIndex }}
            - name: SLIPSTREAM_TRANSFERQUEUE_ADVERTISE_HOST
              value: {{ $host | quote }}
            {{- else }}
            - name: SLIPSTREAM_TRANSFERQUEUE_INDEX_ADDRESS
              value: {{ printf "%s:50051" $host | quote }}
            - name: SLIPSTREAM_TRANSFERQUEUE_ADVERTISE_HOST
              value: "$(POD_IP)"
            {{- end }}
            - name: SLIPSTREAM_TRANSFERQUEUE_DATA_BIND
              value: "$(POD_IP):5555"
            - name: SLIPSTREAM_TRANSFERQUEUE_USE_CURVE
              value: "true"
            - name: SLIPSTREAM_TRANSFERQUEUE_METRICS_PORT
              value: "9090"
            - name: SLIPSTREAM_TRANSFERQUEUE_CAPACITY_BYTES
              value: {{ mul (int64 $values.capacityMiB) 1048576 | quote }}
            - name: SLIPSTREAM_TRANSFERQUEUE_SPILL_BYTES
              value: {{ mul (int64 $values.spillMiB) 1048576 | quote }}
            - name: SLIPSTREAM_TRANSFERQUEUE_SPILL_FOLDER
              value: /var/spool/slipstream
            - name: SLIPSTREAM_TRANSFERQUEUE_SNAPSHOT_FOLDER
              value: /var/lib/slipstream
            {{- if $isIndex }}
            - name: SLIPSTREAM_TRANSFERQUEUE_SAMPLE_FOLDER
              value: /var/lib/slipstream/samples
            - name: SLIPSTREAM_TRANSFERQUEUE_SAMPLE_BYTES
              value: {{ mul (int64 $values.sampleMiB) 1048576 | quote }}
            {{- end }}
            - name: SLIPSTREAM_TRANSFERQUEUE_LOG_LEVEL
              value: {{ $values.logLevel }}
            - name: SLIPSTREAM_TRANSFERQUEUE_LOG_FORMAT
              value: json
            - name: SLIPSTREAM_TRANSFERQUEUE_SERVICE_KEY_FILE
              value: /etc/slipstream/service-key/key
            {{- if ne .root.Values.tls.mode "off" }}
            - name: SLIPSTREAM_TRANSFERQUEUE_TLS_ISSUER
              value: /etc/slipstream/tls
            {{- end }}
            {{- include "slipstream.metricsEnv" (dict "root" .root "prefix" "SLIPSTREAM_TRANSFERQUEUE") | nindent 12 }}
            {{- include "slipstream.tracingEnv" .root | nindent 12 }}
            {{- include "slipstream.env" $values.env | nindent 12 }}
          ports:
            {{- if $isIndex }}
            - {name: grpc, containerPort: 50051, protocol: TCP}
            {{- end }}
            - {name: data, containerPort: 5555, protocol: TCP}
            - {name: metrics, containerPort: 9090, protocol: TCP}
          startupProbe:
            {{- include "slipstream.transferqueueProbe" . | nindent 12 }}
            periodSeconds: 2
            failureThreshold: 60
          livenessProbe:
            {{- include "slipstream.transferqueueProbe" . | nindent 12 }}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          readinessProbe:
            {{- include "slipstream.transferqueueProbe" . | nindent 12 }}
            periodSeconds: 2
            timeoutSeconds: 3
          resources:
            # Its files in /tmp and the spilled samples.
            requests: {cpu: {{ $values.cpu | quote }}, memory: {{ $memory }}, ephemeral-storage: {{ printf "%dMi" (add (int $values.spillMiB) 128) }}}
            limits: {memory: {{ $memory }}}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
            - {name: spill, mountPath: /var/spool/slipstream}
            - {name: snapshots, mountPath: /var/lib/slipstream}
            - {name: service-key, mountPath: /etc/slipstream/service-key, readOnly: true}
            {{- include "slipstream.tlsMount" .root | nindent 12 }}
            {{- include "slipstream.metricsMount" .root | nindent 12 }}
      volumes:
        {{- include "slipstream.metricsVolume" .root | nindent 8 }}
        - name: tmp
          emptyDir: {sizeLimit: 1Gi}
        - name: spill
          emptyDir: {sizeLimit: {{ printf "%dMi" (add (int $values.spillMiB) 64) }}}
        - name: snapshots
          {{- include "slipstream.claimOrScratch" $values.snapshots | nindent 10 }}
        {{- include "slipstream.keyVolume" .root | nindent 8 }}
        {{- include "slipstream.issuerVolume" .root | nindent 8 }}
{{- end -}}

{{/* A pod with only a storage shard serves no gRPC. */}}
{{- define "slipstream.transferqueueProbe" -}}
{{- if eq .component "transferqueue" -}}
{{- include "slipstream.grpcProbe" .root -}}
{{- else -}}
tcpSocket: {port: data}
{{- end -}}
{{- end -}}
