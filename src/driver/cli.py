# SPDX-License-Identifier: Apache-2.0
"""The ``dracpu`` command.

What a command needs is imported once it is known: a wrong flag is answered before NumPy, gRPC or the Kubernetes client
are loaded, and the node plugin never loads the sandbox.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from driver.errors import ConfigError
from driver.flags import HelpRequest
from driver.logs import one_line

if TYPE_CHECKING:
    from driver.commandline import Invocation

_FAILED = 1
_WRONG_USE = 2
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    arguments : sequence of str, optional
        The command line without the program's name; the process's own by default.

    Returns
    -------
    int
        The exit status: 2 for a wrong flag or file, after one line on stderr that says what is wrong.
    """
    from driver.commandline import parse_command_line

    if arguments is None:
        arguments = sys.argv[1:]
        # The image has the report under a name of its own as well, as dra-driver-cpu's has.
        if os.path.basename(sys.argv[0]) == "dracpu-gatherinfo":
            arguments = ["gatherinfo", *arguments]
    try:
        invocation = parse_command_line(arguments)
        if invocation.command == "run":
            return _run_plugin(invocation)
        return _run_tool(invocation)
    except HelpRequest as request:
        print(request)  # noqa: T201
        return 0
    except ConfigError as error:
        print(f"dracpu: {one_line(str(error))}", file=sys.stderr)  # noqa: T201
        return _WRONG_USE


def _run_tool(invocation: Invocation) -> int:
    try:
        match invocation.command:
            case "gatherinfo":
                from driver import gatherinfo

                return gatherinfo.main(invocation.config, invocation.report)
            case "introspect-metrics":
                from driver import introspect

                return introspect.main()
            case "demo":
                from driver.sandbox import demo

                return demo.main(invocation.sandbox)
            case _:
                from driver.sandbox import box

                return box.main(invocation.sandbox)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever reads the output has what they wanted; without this the interpreter complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED


def _run_plugin(invocation: Invocation) -> int:
    import logging
    from pathlib import Path

    from driver import logs
    from driver.config import check_socket_path

    config = invocation.config
    node_name = config.node_name
    check_socket_path(config.dra_socket)
    check_socket_path(config.registration_socket)
    if config.nri_socket:
        check_socket_path(Path(config.nri_socket))
    logs.configure(config.log_format, config.verbosity, config.vmodule)
    log = logging.getLogger(__name__)
    log.info("configuration", extra=logs.fields(node=node_name, **config.describe()))
    for warning in invocation.warnings:
        log.warning(warning)
    from driver import app

    return app.run(config)
