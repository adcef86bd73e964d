"""Errors of the agent.

AgentError
├── ConfigError          a setting that cannot work; ends the start with one line
├── EngineError          the engine could not be read, or did not act
│   ├── EngineUnreachable    no connection, or it broke before the answer was whole
│   ├── EngineTimeout        no whole answer in time
│   ├── EngineProtocolError  an answer that cannot be understood
│   └── EngineRefused        the engine answered with an error; carries its HTTP `status`
└── ActionRefused        an action the agent did not start
    ├── BadAction            its parameters cannot work
    ├── KeyReused            its idempotency key belongs to another request
    └── Busy                 refused for now; carries `retry_after_s`
"""

from __future__ import annotations


class AgentError(Exception):
    """Base of all errors raised on purpose by the agent."""


class ConfigError(AgentError):
    """A setting that cannot work: the message names the setting, its value and the remedy."""


class EngineError(AgentError):
    """The engine could not be read, or did not act."""


class EngineUnreachable(EngineError):
    """No connection, or it broke before the answer was whole."""


class EngineTimeout(EngineError):
    """No whole answer in time."""


class EngineProtocolError(EngineError):
    """An answer that cannot be understood."""


class EngineRefused(EngineError):
    """The engine answered with an error status."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class ActionRefused(AgentError):
    """An action that the agent did not start."""


class BadAction(ActionRefused):
    """The action's parameters cannot work."""


class KeyReused(ActionRefused):
    """The idempotency key belongs to another request."""


class Busy(ActionRefused):
    """Refused for now: try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
