{{/*
Pod of a worker that runs a program (trainer or rollout). The controller adds the pod's name, labels, owner, and the
environment with the run, the worker and its ports. Needs: root, program
*/}}
{{- define "slipstream.worker" -}}
{{- $workers := .root.Values.workers -}}
{{- $own := get .root.Values .program -}}
{{- $gang := $workers.gang.scheduler -}}
{{- $prefix := printf "SLIPSTREAM_%s" (upper .program) -}}
apiVersion: v1
kind: Pod
metadata:
  namespace: {{ include "slipstream.workersNamespace" .root }}
  labels:
    {{- include "slipstream.labels" (dict "root" .root "component" .program) | nindent 4 }}
    slipstream.dev/worker: "true"
    {{- with $workers.kueue.queueName }}
    kueue.x-k8s.io/queue-name: {{ . }}
    {{- end }}
    {{- if eq $gang "coscheduling" }}
    scheduling.x-k8s.io/pod-group: $(GROUP)
    {{- end }}
    {{- with $workers.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    {{- if $own.gpu.resourceClaimTemplate }}
    slipstream.dev/gpu-claim-template: {{ $own.gpu.resourceClaimTemplate }}
    {{- else if $own.gpu.resourceName }}
    slipstream.dev/gpu-resource: {{ $own.gpu.resourceName }}
    {{- end }}
    {{- with $own.perGpu }}
    slipstream.dev/resources-per-gpu: {{ toJson . | quote }}
    {{- end }}
    {{- with $workers.kinds }}
    slipstream.dev/resources-of-kinds: {{ toJson . | quote }}
    {{- end }}
    {{- with $workers.countedClass }}
    # The quota of the project counts the pods of this priority class.
    slipstream.dev/counted-priority-class: {{ . }}
    {{- end }}
    {{- if eq $gang "volcano" }}
    scheduling.k8s.io/group-name: $(GROUP)
    {{- else if eq $gang "kai" }}
    pod-group-name: $(GROUP)
    # KAI would make a group of the pods of all runs, which have the same owner.
    kai.scheduler/skip-podgrouper: "true"
    {{- end }}
    # An autoscaler must not move workers: a restart costs the run more than an idle node.
    cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
    {{- with $workers.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  restartPolicy: Never
  serviceAccountName: {{ include "slipstream.fullname" .root }}-worker
  automountServiceAccountToken: false
  subdomain: {{ include "slipstream.fullname" .root }}-workers
  terminationGracePeriodSeconds: {{ $workers.terminationGracePeriodSeconds }}
  hostNetwork: {{ $workers.hostNetwork }}
  hostIPC: {{ $workers.hostIPC }}
  {{- if $workers.hostNetwork }}
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  securityContext:
    {{- include "slipstream.podSecurityContext" .root | nindent 4 }}
    {{- if not $workers.hostNetwork }}
    # NCCL and Gloo listen on ephemeral ports. Restrict these to the ports that the network policy allows.
    sysctls:
      - {name: net.ipv4.ip_local_port_range, value: "29501 39500"}
    {{- end }}
  {{- include "slipstream.pullSecrets" .root | nindent 2 }}
  {{- include "slipstream.placement" (merge (dict "priorityClassName" $workers.priorityClassName) $own) | nindent 2 }}
  {{- with $own.topologySpreadConstraints }}
  topologySpreadConstraints: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $own.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $workers.schedulerName | default (get (dict "volcano" "volcano" "coscheduling" "scheduler-plugins-scheduler" "kai" "kai-scheduler") $gang) }}
  schedulerName: {{ . }}
  {{- end }}
  {{- if eq $gang "native" }}
  schedulingGroup: {podGroupName: $(GROUP)}
  {{- end }}
  {{- with $workers.resourceClaimTemplates }}
  resourceClaims:
    {{- range $name, $template := . }}
    - {name: {{ $name }}, resourceClaimTemplateName: {{ $template }}}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .program }}
      image: {{ include "slipstream.image" (dict "root" .root "image" $own.image) }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      # Puts the last log lines of a failed worker into the pod's status, for the run's message.
      terminationMessagePolicy: FallbackToLogsOnError
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
          {{- if $workers.rdma.resourceName }}
          add: [IPC_LOCK]
          {{- end }}
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: NODE_NAME
          valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
        - name: {{ $prefix }}_ADVERTISE_HOST
          value: "$(POD_IP)"
        - name: {{ $prefix }}_LOG_LEVEL
          value: {{ $workers.logLevel }}
        - name: {{ $prefix }}_LOG_FORMAT
          value: json
        {{- if ne .root.Values.tls.mode "off" }}
        - name: {{ $prefix }}_TLS_CERTIFICATE
          value: /etc/slipstream/tls/tls.crt
        - name: {{ $prefix }}_TLS_KEY
          value: /etc/slipstream/tls/tls.key
        - name: {{ $prefix }}_TLS_AUTHORITY
          value: /etc/slipstream/tls/ca.crt
        {{- end }}
        {{- include "slipstream.allowanceEnv" (dict "root" .root "prefix" $prefix) | nindent 8 }}
        - name: {{ $prefix }}_OBJECT_CACHE
          value: /var/cache/slipstream/objects
        {{- if $workers.secrets }}
        - name: {{ $prefix }}_SECRETS_DIRECTORY
          value: /etc/slipstream/secrets
        {{- end }}
        {{- if eq .program "rollout" }}
        {{- if .root.Values.sandboxes.enabled }}
        - name: SLIPSTREAM_ROLLOUT_SANDBOX_NAMESPACE
          value: {{ include "slipstream.sandboxesNamespace" .root }}
        - name: SLIPSTREAM_ROLLOUT_SANDBOX_RUNTIME_CLASS
          value: {{ .root.Values.sandboxes.runtimeClassName | quote }}
        - name: SLIPSTREAM_ROLLOUT_KUBERNETES_CREDENTIALS
          value: /etc/slipstream/kubernetes
        {{- end }}
        # Rollouts store unfinished responses before the grace period ends.
        - name: SLIPSTREAM_ROLLOUT_DRAIN_TIMEOUT_S
          value: {{ max 3 (sub (int $workers.terminationGracePeriodSeconds) 10) | quote }}
        {{- end }}
        {{- if eq .program "trainer" }}
        - name: SLIPSTREAM_TRAINER_MODEL_CACHE
          value: /var/cache/slipstream/models
        {{- end }}
        - name: HOME
          value: /tmp
        - name: HF_HOME
          value: /var/cache/slipstream/huggingface
        - name: PYTHONPATH
          value: /opt/slipstream/code
        # NCCL uses NVLink between pods of a node only if they have the same host id.
        - name: NCCL_HOSTID
          value: "$(NODE_NAME)"
        # NVLink SHARP needs multicast permissions that shared nodes do not grant.
        - name: NCCL_NVLS_ENABLE
          value: "0"
        {{- include "slipstream.metricsEnv" (dict "root" .root "prefix" $prefix) | nindent 8 }}
        {{- include "slipstream.tracingEnv" .root | nindent 8 }}
        {{- include "slipstream.env" (merge (deepCopy $own.env) $workers.env) | nindent 8 }}
      {{- with $workers.envFromSecrets }}
      envFrom:
        {{- range . }}
        - secretRef: {name: {{ . }}}
        {{- end }}
      {{- end }}
      resources: {{- include "slipstream.workerResources" . | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        - {name: cache, mountPath: /var/cache/slipstream}
        - {name: runs, mountPath: /var/lib/slipstream}
        {{- include "slipstream.tlsMount" .root | nindent 8 }}
        {{- include "slipstream.metricsMount" .root | nindent 8 }}
        {{- if $workers.secrets }}
        - {name: secrets, mountPath: /etc/slipstream/secrets, readOnly: true}
        {{- end }}
        {{- if and (eq .program "rollout") .root.Values.sandboxes.enabled }}
        - {name: kubernetes, mountPath: /etc/slipstream/kubernetes, readOnly: true}
        {{- end }}
        {{- if $workers.codeConfigMap }}
        - {name: code, mountPath: /opt/slipstream/code, readOnly: true}
        {{- end }}
  volumes:
    {{- include "slipstream.metricsVolume" .root | nindent 4 }}
    - name: tmp
      emptyDir: {sizeLimit: {{ $workers.scratch | quote }}}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $workers.sharedMemory | quote }}}
    - name: cache
      {{- include "slipstream.claimOrScratch" $workers.modelCache | nindent 6 }}
    - name: runs
      {{- include "slipstream.claimOrScratch" $workers.checkpoints | nindent 6 }}
    {{- if ne .root.Values.tls.mode "off" }}
    # The controller fills in the name of the run's secret.
    - name: tls
      secret: {defaultMode: 0440}
    {{- end }}
    {{- with $workers.secrets }}
    - name: secrets
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- if and (eq .program "rollout") .root.Values.sandboxes.enabled }}
    # Access to the Kubernetes API, with rights only in the namespace of sandboxes.
    - name: kubernetes
      projected:
        defaultMode: 0440
        sources:
          - serviceAccountToken: {path: token, expirationSeconds: 3600}
          - configMap:
              name: kube-root-ca.crt
              items: [{key: ca.crt, path: ca.crt}]
    {{- end }}
    {{- with $workers.codeConfigMap }}
    - name: code
      configMap: {name: {{ . }}}
    {{- end }}
{{- end -}}

{{/*
Pod group of a run for a gang scheduler. The controller adds its name and owner and fills in the number of pods.
*/}}
{{- define "slipstream.podGroup" -}}
{{- if include "slipstream.hasQueue" . -}}
{{- fail "workers.gang.scheduler and workers.kueue.queueName exclude each other: Kueue already admits all pods of a run together; set one of them to an empty text" -}}
{{- end -}}
apiVersion: {{ include "slipstream.podGroupVersion" . }}
kind: PodGroup
metadata:
  namespace: {{ include "slipstream.workersNamespace" . }}
spec:
  {{- if eq .Values.workers.gang.scheduler "native" }}
  schedulingPolicy: {gang: {minCount: $(PODS)}}
  {{- else }}
  minMember: $(PODS)
  {{- end }}
  {{- if and .Values.workers.gang.queueName (eq .Values.workers.gang.scheduler "volcano") }}
  queue: {{ .Values.workers.gang.queueName }}
  {{- else if eq .Values.workers.gang.scheduler "kai" }}
  queue: {{ .Values.workers.gang.queueName | default "default-queue" }}
  {{- with .Values.workers.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  # The run goes on while a lost worker is replaced; KAI would evict all others after a minute.
  stalenessGracePeriod: -1s
  {{- end }}
{{- end -}}

{{- define "slipstream.podGroupVersion" -}}
{{- get (dict "volcano" "scheduling.volcano.sh/v1beta1" "coscheduling" "scheduling.x-k8s.io/v1alpha1" "kai" "scheduling.run.ai/v2alpha2" "native" "scheduling.k8s.io/v1alpha2") .Values.workers.gang.scheduler -}}
{{- end -}}

{{/*
JobSet of a worker on several nodes. The controller adds its name, labels, owner, number of pods and their template. Only
the controller restarts pods.
*/}}
{{- define "slipstream.jobSet" -}}
{{- if include "slipstream.hasQueue" . -}}
{{- fail "workers.jobSet.enabled and workers.kueue.queueName exclude each other: Kueue would admit a JobSet separately from the rollouts of its run, and the two could deadlock on resources; without JobSets, Kueue admits all pods of a run together" -}}
{{- end -}}
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  namespace: {{ include "slipstream.workersNamespace" . }}
  {{- with .Values.workers.jobSet.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  # The pods belong to the workers' headless service.
  network: {enableDNSHostnames: false}
  failurePolicy: {maxRestarts: 0}
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          completionMode: Indexed
          backoffLimit: 0
{{- end -}}

{{/* Needs a map with existingClaim and scratch */}}
{{- define "slipstream.claimOrScratch" -}}
{{- if .existingClaim -}}
persistentVolumeClaim: {claimName: {{ .existingClaim }}}
{{- else -}}
emptyDir: {sizeLimit: {{ .scratch | quote }}}
{{- end -}}
{{- end -}}

{{/* Requests and limits with RDMA devices; the controller adds GPUs. Server-side apply needs quantities as text. Needs: root, program */}}
{{- define "slipstream.workerResources" -}}
{{- $own := get .root.Values .program -}}
{{- $rdma := .root.Values.workers.rdma -}}
{{- $devices := dict -}}
{{- if $rdma.resourceName }}{{ $_ := set $devices $rdma.resourceName (toString $rdma.count) }}{{ end -}}
requests: {{- merge (deepCopy $devices) (default dict $own.resources.requests) | toYaml | nindent 2 }}
limits: {{- merge (deepCopy $devices) (default dict $own.resources.limits) | toYaml | nindent 2 }}
{{- with .root.Values.workers.resourceClaimTemplates }}
claims:
  {{- range $name, $_ := . }}
  - {name: {{ $name }}}
  {{- end }}
{{- end }}
{{- end -}}
