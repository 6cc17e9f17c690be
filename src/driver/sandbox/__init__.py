# SPDX-License-Identifier: Apache-2.0
"""A one-node cluster in a box: an API server, a kubelet and a machine that speak the real protocols.

Authors of schedulers and of this driver's tests use it to see the real driver process at work without a cluster.
Nothing of it is ever imported by the driver itself: only the command line (`dracpu demo`, `dracpu box`) and tests do.
"""
