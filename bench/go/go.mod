module dracpu/bench/go

go 1.23.0

require k8s.io/utils v0.0.0-20260626114624-be93311217bd
