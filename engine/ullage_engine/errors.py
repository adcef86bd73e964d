"""Errors of the engine.

EngineError
├── ConfigError          a setting that cannot work; ends the start with one line
│   ├── ModelError       the model cannot be found, read or served
│   ├── SizingError      the KV cache does not fit the memory given
│   └── KernelError      the kernels asked for cannot be had on this machine
├── RequestRejected      a request refused before it holds any memory
│   ├── RequestTooLong   can never fit, or exceeds a limit in force for good
│   └── Overloaded       refused for now; carries `retry_after_s`
│       ├── Draining     the engine no longer admits
│       └── QueueTimeout waited too long in the queue
├── RequestFailed        one admitted request ended early; the others go on
├── PoolExhausted        not enough free or reclaimable blocks; state unchanged
└── LoopUnavailable      the step loop did not answer in time or has ended
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors raised on purpose by the engine."""


class ConfigError(EngineError):
    """A setting that cannot work: the message names the setting, its value and the remedy."""


class ModelError(ConfigError):
    """The model cannot be found, read or served."""


class SizingError(ConfigError):
    """The KV cache does not fit the memory given."""


class KernelError(ConfigError):
    """The kernels asked for cannot be had on this machine."""


class RequestRejected(EngineError):
    """A request refused before it holds any memory.

    `param` names the request's field at fault, if one is.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLong(RequestRejected):
    """The request can never fit."""


class Overloaded(RequestRejected):
    """Refused for now: try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class Draining(Overloaded):
    """The engine is about to stop and admits nothing more."""


class QueueTimeout(Overloaded):
    """The request waited in the queue for as long as the server lets it, and was never begun."""


class RequestFailed(EngineError):
    """An admitted request ended early for a reason of its own."""


class PoolExhausted(EngineError):
    """Not enough free or reclaimable blocks; nothing was changed."""


class LoopUnavailable(EngineError):
    """The step loop did not answer in time, or has ended."""
