# SPDX-License-Identifier: Apache-2.0
"""The forms of names and values that the API's kinds share."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Final

from driver.quantity import parse_quantity
from driver.sandbox.amounts import respelled
from driver.sandbox.apistatus import FieldErrors, JsonObject, StatusError

_DNS_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_DNS_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)
_C_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_LONGEST_NAME: Final = 253
_LONGEST_DOMAIN: Final = 63
_LONGEST_IDENTIFIER: Final = 32
_LARGEST_OPAQUE: Final = 10 * 1024

_LABEL_FORM: Final = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', "
    "and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', "
    "regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
_SUBDOMAIN_FORM: Final = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', "
    "and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_IDENTIFIER_FORM: Final = (
    "a valid C identifier must start with alphabetic character or '_', followed by a string of alphanumeric characters "
    "or '_' (e.g. 'my_name',  or 'MY_NAME',  or 'MyName', regex used for validation is '[A-Za-z_][A-Za-z0-9_]*')"
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
        errors.invalid(field, identifier, _IDENTIFIER_FORM)
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


def respell(quantity: object, field: str) -> str:
    """Return a quantity in the server's spelling.

    Raises
    ------
    StatusError
        400 if it is none: the server cannot even decode it.
    """
    try:
        return respelled(quantity)
    except ValueError as error:
        raise StatusError(400, f"{field}: {error}") from error


def respell_all(quantities: Any, field: str) -> None:
    """Rewrite a map of quantities in the server's spelling, in place."""
    for name, value in members(quantities, field).items():
        quantities[name] = respell(value, f"{field}[{name}]")


def is_positive(quantity: object) -> bool:
    """Whether a text is a quantity above zero."""
    try:
        return parse_quantity(quantity) > 0
    except ValueError:
        return False


def without_empty(value: Any, maps: Collection[str], *, is_map: bool = False) -> Any:
    """Return a copy without members that are null, an empty list or an empty object: the server does not store them.

    Parameters
    ----------
    value : object
        Decoded JSON.
    maps : collection of str
        Names of members that are maps: their entries stay even if they are empty.
    is_map : bool
        Whether `value` is such a map.
    """
    if isinstance(value, list):
        return [without_empty(entry, maps) for entry in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, member in value.items():
        cleaned = without_empty(member, maps, is_map=key in maps and not is_map)
        if is_map:
            kept[key] = {} if cleaned is None else cleaned
        elif cleaned is not None and cleaned not in ({}, []):
            kept[key] = cleaned
    return kept


def text(value: object, field: str) -> str:
    """Return a text, or an empty one for null.

    Raises
    ------
    StatusError
        400 if it is anything else.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise StatusError(400, f"{field} must be a string")
    return value


def texts(value: object, field: str) -> list[str]:
    """Return the entries of a list of texts.

    Raises
    ------
    StatusError
        400 if it is anything else.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise StatusError(400, f"{field} must be a list of strings")
    return [text(entry, field) for entry in value]


def objects(value: object, field: str) -> list[JsonObject]:
    """Return the entries of a list of objects.

    Raises
    ------
    StatusError
        400 if it is anything else: the server cannot even decode it.
    """
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise StatusError(400, f"{field} must be a list of objects")
    return value


def members(value: object, field: str) -> JsonObject:
    """Return an object's members.

    Raises
    ------
    StatusError
        400 if it is anything else.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise StatusError(400, f"{field} must be an object")
    return value
