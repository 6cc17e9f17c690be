# SPDX-License-Identifier: Apache-2.0
"""Whose word counts on how CPUs are placed: the node's, a DeviceClass's, the claim's. Pure.

The node's ``placement`` is the default of every key. A DeviceClass overrides it, and the claim overrides both, key by
key: a class that spreads over cores and a claim that wants full cores give both. Of several configurations of one
source the later one wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from driver.claims import FROM_CLAIM, FROM_CLASS, AllocatedClaim, OpaqueConfig
from driver.errors import ClaimError
from driver.json_values import quoted
from driver.parameters import Parameters, parse_parameters

__all__ = ["placements"]

_BY_PRECEDENCE: Final = (FROM_CLASS, FROM_CLAIM)
_SOURCES: Final = {FROM_CLASS: "a DeviceClass", FROM_CLAIM: "the claim"}


def placements(claim: AllocatedClaim, default: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
    """Return the placement that is asked for each request of a claim.

    Parameters
    ----------
    claim : AllocatedClaim
        The claim. Configurations that apply to none of its results are not looked at.
    default : mapping of str to str
        The node's own placement.

    Returns
    -------
    dict of str to mapping
        By request as the results name it; the keys and values of ``cpuConfig.placement`` that somebody chose.

    Raises
    ------
    ClaimError
        If a configuration that applies cannot be read, or names CPUs.
    """
    requests = list(dict.fromkeys(result.request for result in claim.results))
    found: dict[str, dict[str, str]] = {request: dict(default) for request in requests}
    for source in _BY_PRECEDENCE:
        for config in claim.configs:
            concerned = [request for request in requests if config.source == source and config.applies_to(request)]
            if concerned:
                chosen = _read(config, concerned[0]).placement or {}
                for request in concerned:
                    found[request] |= chosen
    return dict(found)


def _read(config: OpaqueConfig, request: str) -> Parameters:
    try:
        parameters = parse_parameters(config.parameters)
    except ClaimError as error:
        raise ClaimError(f'request "{request}", configured by {_SOURCES[config.source]}: {error}') from None
    if parameters.cpuset is not None:
        raise ClaimError(
            f'request "{request}": {_SOURCES[config.source]} gives it the cpuset {quoted(parameters.cpuset)}, but on '
            "this node the driver itself chooses the CPUs; expected no cpuset, or allocator: external in the "
            "driver's configuration"
        )
    return parameters
