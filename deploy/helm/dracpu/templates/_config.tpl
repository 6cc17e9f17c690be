{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}

{{- /* The driver's configuration file: driverConfig, and over it the older values under args. */ -}}
{{- define "dracpu.config" -}}
{{- $config := deepCopy (.Values.driverConfig | default dict) -}}
{{- range $key := list "cpuDeviceMode" "groupBy" "reservedCPUs" "hostnameOverride" -}}
{{- with get ($.Values.args | default dict) $key -}}
{{- $_ := set $config $key . -}}
{{- end -}}
{{- end -}}
{{- $machine := and (eq (get $config "groupBy") "machine") (ne (get $config "cpuDeviceMode") "individual") -}}
{{- if and $machine (ne (get $config "allocator") "external") -}}
{{- fail "groupBy machine needs driverConfig.allocator external: nothing but a claim's cpuset says where its CPUs are" -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{- /* The kubelet's folder as the driver understands it, so that the mounts are where the driver looks. */ -}}
{{- define "dracpu.kubeletRootDir" -}}
{{- $folder := .Values.kubeletRootDir | default "/var/lib/kubelet" | clean -}}
{{- $socket := printf "%s/plugins_registry/dra.cpu-reg.sock" $folder -}}
{{- if gt (len $socket) 107 -}}
{{- fail (printf "kubeletRootDir is too long: the socket path %s has %d bytes, the kernel takes 107" $socket (len $socket)) -}}
{{- end -}}
{{- $folder -}}
{{- end -}}

{{- define "dracpu.cdiDir" -}}
{{- .Values.cdiDir | default "/var/run/cdi" | clean -}}
{{- end -}}

{{- define "dracpu.nriSocketDir" -}}
{{- $folder := .Values.nriSocketDir | default "/var/run/nri" | clean -}}
{{- $socket := printf "%s/nri.sock" $folder -}}
{{- if gt (len $socket) 107 -}}
{{- fail (printf "nriSocketDir is too long: the socket path %s has %d bytes, the kernel takes 107" $socket (len $socket)) -}}
{{- end -}}
{{- $folder -}}
{{- end -}}
