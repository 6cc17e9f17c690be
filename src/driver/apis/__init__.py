# SPDX-License-Identifier: Apache-2.0
"""The kubelet's and the runtime's interfaces: our own `.proto` files and the stubs generated from them.

The `*_pb2*` files are generated and committed; `README.md` says from what and how. Nothing here is imported but by the
modules that speak gRPC or ttrpc.
"""
