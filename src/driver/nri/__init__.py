# SPDX-License-Identifier: Apache-2.0
"""The driver as the container runtime sees it: a plugin of the Node Resource Interface.

The transport knows frames, calls and the handshake, and decides nothing. From the bottom: `errors`; `mux`, two byte
streams on one socket; `ttrpc`, messages on such a stream; `client` and `server`, calls in either direction;
`subscription`, which events to ask for; `session`, one connection from its registration to its end; `connection`, which
makes one session after the other.
"""
