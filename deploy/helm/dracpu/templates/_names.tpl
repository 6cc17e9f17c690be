{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}
{{- /* Names and selector labels must come out as those of dra-driver-cpu's chart do, or a release of it could not be
upgraded in place: a DaemonSet's selector is immutable. */ -}}

{{- define "dracpu.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "dracpu.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- $full := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{- .Values.fullnameOverride | default $full | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "dracpu.selectorLabels" -}}
app.kubernetes.io/name: {{ include "dracpu.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "dracpu.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "dracpu.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}
