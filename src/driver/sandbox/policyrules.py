# SPDX-License-Identifier: Apache-2.0
"""The API's rules for the request policy of a consumable capacity."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Final

from driver.quantity import parse_quantity
from driver.sandbox.apistatus import FieldErrors, JsonObject, StatusError
from driver.sandbox.syntax import members, respell

_MOST_VALID_VALUES: Final = 10
_RANGE_FIELDS: Final = ("min", "max", "step")


def check_policy(policy: JsonObject, value: str, field: str, errors: FieldErrors) -> None:
    """Report what is wrong with a policy, and put its quantities in the server's spelling, in place.

    Parameters
    ----------
    policy : dict
        `requestPolicy` of a capacity.
    value : str
        The capacity itself.
    field : str
        Where the policy stands.
    errors : FieldErrors
    """
    capacity = parse_quantity(value)
    default = _take(policy, "default", field)
    valid_values, valid_range = policy.get("validValues"), policy.get("validRange")
    if valid_values and valid_range is not None:
        text = 'exactly one policy can be specified, cannot specify "validValues" and "validRange" at the same time'
        errors.forbidden(field, text)
        return
    kind = "validValues" if valid_values else "validRange"
    if not valid_values and valid_range is None:
        return
    if default is None:
        errors.required(f"{field}.default", f"required when {kind} is defined")
    elif valid_values:
        _check_values(valid_values, default, capacity, f"{field}.validValues", errors)
    else:
        place = f"{field}.validRange"
        _check_range(members(valid_range, place), default, capacity, place, errors)


def _take(holder: JsonObject, key: str, field: str) -> Fraction | None:
    if key not in holder:
        return None
    holder[key] = respell(holder[key], f"{field}.{key}")
    return parse_quantity(holder[key])


def _check_values(values: Any, default: Fraction, capacity: Fraction, field: str, errors: FieldErrors) -> None:
    if not isinstance(values, list):
        raise StatusError(400, f"{field} must be a list")
    values[:] = [respell(option, field) for option in values]
    if len(values) > _MOST_VALID_VALUES:
        errors.too_many(field, len(values), _MOST_VALID_VALUES)
    options = [parse_quantity(option) for option in values]
    for index, option in enumerate(options):
        place = f"{field}[{index}]"
        if index and option < options[index - 1]:
            errors.invalid(place, values[index], "values must be sorted in ascending order")
        if option in options[:index]:
            errors.duplicate(place, values[index])
        if option > capacity:
            errors.invalid(place, values[index], f"option is larger than capacity value: {capacity}")
    if default not in options:
        errors.invalid(field, str(default), "default value is not valid according to the requestPolicy")


def _check_range(bounds: JsonObject, default: Fraction, capacity: Fraction, field: str, errors: FieldErrors) -> None:
    low, high, step = (_take(bounds, key, field) for key in _RANGE_FIELDS)
    if low is None:
        errors.required(f"{field}.min", "required when validRange is defined")
        return
    if low > capacity:
        errors.invalid(f"{field}.min", bounds["min"], f"min is larger than capacity value: {capacity}")
    if default < low:
        errors.invalid(f"{field}.default", str(default), f"default is less than min: {low}")
    if high is not None:
        if low > high:
            errors.invalid(f"{field}.max", bounds["min"], f"min is larger than max: {high}")
        if high > capacity:
            errors.invalid(f"{field}.max", bounds["max"], f"max is larger than capacity value: {capacity}")
        if default > high:
            errors.invalid(f"{field}.default", str(default), f"default is more than max: {high}")
    if step is not None:
        given = {"default": default, "min": low, "max": high, "step": step}
        # Only whole units count, rounded up, unless a gate that is off says otherwise.
        whole = {name: math.ceil(amount) for name, amount in given.items() if amount is not None}
        if any(amount < 0 for amount in whole.values()):
            errors.invalid(field, None, "must not be negative")
        elif step <= 0:
            errors.invalid(f"{field}.step", bounds["step"], "must be greater than zero")
        else:
            if low + step > capacity:
                text = f"one step {low + step} is larger than capacity value: {capacity}"
                errors.invalid(f"{field}.step", bounds["step"], text)
            _check_step(whole, f"{field}.step", errors)


def _check_step(whole: dict[str, int], field: str, errors: FieldErrors) -> None:
    for name in ("default", "max"):
        if name in whole and (whole[name] - whole["min"]) % whole["step"]:
            text = f"value is not a multiple of a given step ({whole['step']}) from ({whole['min']})"
            errors.invalid(field, str(whole[name]), text)
