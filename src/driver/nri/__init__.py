# SPDX-License-Identifier: Apache-2.0
"""The driver as the container runtime sees it: a plugin of the Node Resource Interface.

The transport knows frames, calls and the handshake, and decides nothing. From the bottom: `errors`; `mux`, two byte
streams on one socket; `ttrpc`, messages on such a stream; `client` and `server`, calls in either direction;
`subscription`, which events to ask for; `session`, one connection from its registration to its end; `connection`, which
makes one session after the other.

The rest decides, and knows nothing of frames. From the bottom: `container`, what may be true of each; `occupancy` and
`containers`, which of them may have some CPUs; `evidence`, what in them speaks of claims, and `environment`, where that
is found; `decisions`, what a container gets; `sharedpool`, the CPUs of those without a claim; `reservations`, for which
pods claims are; `messages`, between these values and the runtime's messages; `enforcement`, all that is known, and what
preparing claims waits for; `survey` and `precedence`, what a runtime tells of all that lives, and who comes first;
`living`, what those containers are; `moves`, what answers to events carry for other containers; `plugin`, the answers
to the runtime; `pushes`, what it is told unasked. `runtimeside` puts it all together. `runtimes` tells from what a
runtime says of itself which of these it allows.
"""
