"""Tenants: who a call is served for, and what each may take."""

import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outrider.net.errors import invalid_field
from outrider.net.tokens import tenant
from outrider.observe.catalogue import UNLISTED

MAX_NAME = 128
# A bucket whose size is not given holds what comes in so many seconds.
_BURST_SECONDS = 10.0

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
# Names the tenant of a call. Raises OutriderError when the call may not be served.
TenantOf = Callable[[Context], str]


@dataclass(frozen=True)
class Caller:
    """For whom a call is served, and until when.

    Attributes:
        tenant: its name; empty where nobody is told apart.
        weight: of the tenant, beside those of others.
        deadline: when the caller stops waiting, in the event loop's time.
    """

    tenant: str = ""
    weight: float = 1.0
    deadline: float = math.inf


ANYONE = Caller()


def by_token(_: Context) -> str:
    """The tenant whose token the call carries; all callers are one where none is asked for."""
    return tenant()


def by_metadata(key: str) -> TenantOf:
    """The tenant as the call's metadata name it: for a proxy in front that sets them and lets no client do so.

    Raises OutriderError(INVALID_FIELD) for a name that is too long.
    """

    key = key.lower()  # as gRPC writes them

    def tenant_of(context: Context) -> str:
        names = [value for name, value in context.invocation_metadata() or () if name == key]
        name = str(names[0]) if names else ""
        if len(name) > MAX_NAME:
            raise invalid_field(f"metadata {key} has {len(name)} characters, limit {MAX_NAME}")
        return name

    return tenant_of


class TenantLimits(BaseModel):
    """What one tenant may take; what is not set is not limited."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: float = Field(default=1.0, gt=0, le=1e6, description="share where there is not enough for all")
    max_sessions: int | None = Field(default=None, ge=1, description="generations that run at once")
    tokens_per_second: float | None = Field(default=None, gt=0, description="prompt and generated tokens, on average")
    burst: float | None = Field(default=None, gt=0, description="tokens that may come at once; 10 s' worth unless told")

    @property
    def bucket_size(self) -> float:
        """Tokens that the bucket holds; without meaning where there is no rate."""
        return self.burst or _BURST_SECONDS * (self.tokens_per_second or 0.0)


class Tenants(BaseModel):
    """The tenants that are known, and the limits of each that is not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    default: TenantLimits = TenantLimits()
    tenants: dict[str, TenantLimits] = Field(default_factory=dict)

    def limits(self, name: str) -> TenantLimits:
        """What the tenant may take."""
        return self.tenants.get(name, self.default)

    def label(self, name: str) -> str:
        """The tenant in metrics: callers may have any names, and only those of the file are told apart."""
        return name if name in self.tenants else UNLISTED


def load_tenants(path: str) -> Tenants:
    """Reads the file of tenants; an empty path is one without any. Raises ValueError, one line that names the place."""
    if not path:
        return Tenants()
    try:
        return Tenants.model_validate(tomllib.loads(Path(path).read_text()))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValidationError as error:
        places = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ValueError(f"{path}: {'; '.join(places)}") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # no TOML, no text, nested too deeply, or a number of thousands of digits
        raise ValueError(f"{path}: {error}") from error


class TokenBucket:
    """Tokens that come in at a rate, up to a size. More may be taken than there is: then there are none for a while.

    Args:
        rate: tokens per second, more than 0.
        size: most that it holds; it begins full.
        now: seconds.
    """

    def __init__(self, rate: float, size: float, now: float) -> None:
        self._rate, self._size = rate, size
        self._level, self._at = size, now

    def add(self, tokens: float, now: float) -> None:
        """Takes tokens out where the number is negative, gives back what was not used where it is positive."""
        self._level, self._at = self._level_at(now) + tokens, now

    def full(self, now: float) -> bool:
        """Whether it is as if it were new."""
        return self._level_at(now) >= self._size

    def empty_for(self, now: float) -> float:
        """Seconds until what was taken too much has come in; 0 when nothing was."""
        return max(0.0, -self._level_at(now) / self._rate)

    def _level_at(self, now: float) -> float:
        return min(self._size, self._level + (now - self._at) * self._rate)
