# SPDX-License-Identifier: Apache-2.0
"""The forms of names and values that the API's kinds share."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from driver.quantity import parse_quantity
from driver.sandbox.amounts import respelled
from driver.sandbox.apistatus import FieldErrors, JsonObject

_DNS_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_DNS_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)
_C_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_LONGEST_NAME: Final = 253
_LONGEST_DOMAIN: Final = 63
_LONGEST_IDENTIFIER: Final = 32
_LARGEST_OPAQUE: Final = 10 * 1024

_LABEL_FORM: Final = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', "
    "and must start and end with an alphanumeric character"
)
_SUBDOMAIN_FORM: Final = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', "
    "and must start and end with an alphanumeric character"
)


def check_label(value: object, field: str, errors: FieldErrors) -> None:
    """Report what is not a DNS label, such as a device's name."""
    if not value:
        errors.required(field)
    elif not isinstance(value, str) or not _DNS_LABEL.fullmatch(value):
        errors.invalid(field, value, _LABEL_FORM)


def check_subdomain(value: object, field: str, errors: FieldErrors, longest: int = _LONGEST_NAME) -> None:
    """Report what is not a DNS subdomain, such as an object's name."""
    if not value:
        errors.required(field)
    elif not isinstance(value, str) or not _DNS_SUBDOMAIN.fullmatch(value):
        errors.invalid(field, value, _SUBDOMAIN_FORM)
    elif len(value) > longest:
        errors.too_long(field, longest)


def check_driver(value: object, field: str, errors: FieldErrors) -> None:
    """Report what cannot be a driver's name; upper case is tolerated there."""
    check_subdomain(value.lower() if isinstance(value, str) else value, field, errors, _LONGEST_DOMAIN)


def check_pool(value: object, field: str, errors: FieldErrors) -> None:
    """Report what cannot be a pool's name: DNS subdomains joined by slashes."""
    if not value or not isinstance(value, str):
        errors.required(field)
        return
    if len(value) > _LONGEST_NAME:
        errors.too_long(field, _LONGEST_NAME)
    for part in value.split("/"):
        if not _DNS_SUBDOMAIN.fullmatch(part):
            errors.invalid(field, part, _SUBDOMAIN_FORM)


def check_qualified(name: str, field: str, errors: FieldErrors) -> None:
    """Report what cannot name an attribute or a capacity: a C identifier, perhaps with a domain and a slash before."""
    domain, slash, identifier = name.rpartition("/")
    if slash:
        check_driver(domain, field, errors)
    if not _C_IDENTIFIER.fullmatch(identifier):
        errors.invalid(field, name, "a valid C identifier must start with alphabetic character or '_'")
    elif len(identifier) > _LONGEST_IDENTIFIER:
        errors.too_long(field, _LONGEST_IDENTIFIER)


def check_opaque(value: object, field: str, errors: FieldErrors) -> None:
    """Report opaque data that is missing, no object, or larger than 10 KiB."""
    if value is None:
        errors.required(field)
    elif not isinstance(value, dict):
        errors.invalid(field, "<value omitted>", "must be a valid JSON object")
    elif len(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()) > _LARGEST_OPAQUE:
        errors.too_long(field, _LARGEST_OPAQUE)


def respell_quantities(quantities: Any, field: str, errors: FieldErrors) -> None:
    """Rewrite a map of quantities in the server's spelling, in place, and report those that are none."""
    if not isinstance(quantities, dict):
        return
    for name, value in quantities.items():
        try:
            quantities[name] = respelled(value)
        except ValueError as error:
            errors.invalid(f"{field}[{name}]", value, str(error))


def is_positive(quantity: object) -> bool:
    """Whether a text is a quantity above zero."""
    try:
        return parse_quantity(quantity) > 0
    except ValueError:
        return False


def without_empty(value: Any) -> Any:
    """Return a copy without members that are null, an empty list or an empty object: the server does not store them."""
    if isinstance(value, dict):
        kept = {key: without_empty(member) for key, member in value.items() if member is not None}
        return {key: member for key, member in kept.items() if member not in ({}, [])}
    if isinstance(value, list):
        return [without_empty(entry) for entry in value]
    return value


def objects(value: object, field: str, errors: FieldErrors) -> list[JsonObject]:
    """Return the entries of a list of objects; anything else is reported and read as empty."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        errors.invalid(field, "<value omitted>", "must be a list of objects")
        return []
    return value


def members(value: object, field: str, errors: FieldErrors) -> JsonObject:
    """Return an object; anything else is reported and read as empty."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        errors.invalid(field, "<value omitted>", "must be an object")
        return {}
    return value
