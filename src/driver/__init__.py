# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes DRA driver for CPUs: what is published, prepared and enforced, on top of `fastcpu`.

Imports go down only; ARCHITECTURE.md has the layers, and the linter holds them.
"""
