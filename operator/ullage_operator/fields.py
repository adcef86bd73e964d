"""Building blocks of the API models: the strict base class, quantities, timestamps and readable faults.

Non-goal: anything about a particular kind; those are in `model`.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
"""Kubernetes quantities that can mean a resource: no sign, no exponent, a known suffix or none."""
BUDGET_PATTERN = r"^(([1-9][0-9]?(\.[0-9]+)?|0\.[0-9]*[1-9][0-9]*|100(\.0+)?)%|[2-9]|[1-9][0-9]{1,8})$"
"""Tokens from 2 on, or a percentage above 0% and up to 100%."""
MINIMUM_KV_BYTES = 1024 * 1024
"""Below this a KV cache memory is a forgotten or mistaken suffix (`48`, `48m`), not a wish."""
CEL_KEY = "x-kubernetes-validations"
FAULT = "ullage"
"""Error type of every `fault`."""


def fault(message: str, *, field: str | None = None) -> PydanticCustomError:
    """A validation error whose text is ours; `field` names a part of the value it is raised for.

    The text completes the sentence "<field>: …": it gives the value and the remedy.
    """
    return PydanticCustomError(FAULT, "{message}", {"message": message, "field": field or ""})


def cel(*rules: tuple[str, str]) -> dict[str, Any]:
    """Schema extra that repeats validators of ours as CEL rules (rule, message), so that the API server refuses early.

    The validators stay the authority: servers before 1.25 evaluate no rules.
    """
    return {CEL_KEY: [{"rule": rule, "message": message} for rule, message in rules]}


class Part(BaseModel):
    """Base of all API types: camelCase outside, snake_case inside, frozen, no coercion, no unknown fields."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        validate_by_name=True,
        validate_by_alias=True,
    )

    @classmethod
    def read(cls, value: object, *, lenient: bool = False) -> Self:
        """Read the API form. `lenient` ignores unknown fields: for objects stored by a newer version.

        Raises:
            pydantic.ValidationError: the value does not fit.
        """
        return cls.model_validate(value, extra="ignore" if lenient else None, by_alias=True, by_name=False)

    def write(self) -> dict[str, Any]:
        """The API form as JSON-ready values; absent optionals are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def parse_bytes(quantity: str) -> int:
    """Bytes of a Kubernetes quantity such as `48Mi`.

    Raises:
        ValueError: not a quantity.
    """
    from kubernetes.utils.quantity import (
        parse_quantity,
    )  # costs 0.3 s, and only those who size memory need it

    if not re.fullmatch(QUANTITY_PATTERN, quantity):
        raise ValueError(f"{quantity!r} is not a quantity")
    return int(parse_quantity(quantity))  # type: ignore[no-untyped-call]


def _check_quantity(value: str) -> str:
    if re.fullmatch(QUANTITY_PATTERN, value):
        return value
    if value.startswith("-"):
        raise fault(f"{value!r} is negative; give an amount above 0")
    meant = re.fullmatch(r"([0-9.]+)\s*([KMGTP])i?[Bb]?", value, re.IGNORECASE)
    remedy = f'write "{meant[1]}{meant[2].upper()}i"' if meant else 'write a number with Ki, Mi or Gi, like "48Mi"'
    raise fault(f"{value!r} is not a Kubernetes quantity; {remedy}")


def _check_cache_memory(value: str) -> str:
    size = parse_bytes(_check_quantity(value))
    if size < MINIMUM_KV_BYTES:
        digits = value.rstrip("mkKi")
        raise fault(f'{value!r} is {size} bytes, less than 1Mi; a suffix is missing or wrong, like "{digits}Mi"')
    return value


def _check_budget(value: str) -> str:
    if not re.fullmatch(BUDGET_PATTERN, value):
        raise fault(
            f'{value!r} is no budget; write tokens from 2 on, like "2048", or a percentage up to 100%, like "30%"'
        )
    return value


def _refuse_numbers(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise fault(f'{value} is a number without a unit; write a quoted quantity like "{value}Mi"')
    return value


def _refuse_bare_numbers(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise fault(f'{value} is a number; write it in quotes, "{value}"')
    return value


Quantity = Annotated[
    str,
    BeforeValidator(_refuse_bare_numbers),
    AfterValidator(_check_quantity),
    WithJsonSchema({"type": "string", "pattern": QUANTITY_PATTERN}),
]
Budget = Annotated[
    str,
    BeforeValidator(_refuse_bare_numbers),
    AfterValidator(_check_budget),
    WithJsonSchema({"type": "string", "pattern": BUDGET_PATTERN}),
]
CacheMemory = Annotated[
    str,
    BeforeValidator(_refuse_numbers),
    AfterValidator(_check_cache_memory),
    WithJsonSchema({"type": "string", "pattern": QUANTITY_PATTERN}),
]


def moment(unix_seconds: float) -> datetime:
    """Unix seconds as the models carry them."""
    return datetime.fromtimestamp(unix_seconds, UTC)


def _read_time(value: object) -> object:
    if isinstance(value, str):
        try:
            parsed = datetime.fromisoformat(value)
        except ValueError as error:
            raise fault(f"{value!r} is not an RFC 3339 time") from error
        if parsed.tzinfo is None:
            raise fault(f"{value!r} has no time zone; append Z for UTC")
        return parsed
    return value


def _write_time(value: datetime) -> str:
    return value.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


Timestamp = Annotated[
    datetime,
    BeforeValidator(_read_time),
    PlainSerializer(_write_time, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
"""RFC 3339 with microseconds, like `metav1.MicroTime`: short cooldowns are derived from records."""
