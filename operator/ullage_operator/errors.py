"""Errors of the operator.

OperatorError
├── ManifestError         a manifest that cannot be used; one line naming object, field, value and remedy
├── IllegalTransition     a remediation was asked to enter a phase that its present phase does not lead to
├── AgentError            a call to an agent that gave no result
│   ├── AgentUnreachable  no trustworthy answer: the call may or may not have been carried out
│   └── AgentRefused      the agent answered and said no; nothing was done. Carries `status`
├── CertificateError      a certificate or key that cannot be read
├── SetupError            the operator cannot start; one line with the remedy
├── WatchesLost           the process can watch no longer, only another one can
└── ClusterError          the Kubernetes API refused or did not answer. Carries `status` where it answered
    └── Blocked           a service's children cannot be made until somebody changes something
        ├── NameTaken     an object of a child's name exists and belongs to someone else
        └── NotServed     a kind that the spec needs is not installed in the cluster
"""

from __future__ import annotations


class OperatorError(Exception):
    """Base of all errors raised on purpose by the operator."""


class ManifestError(OperatorError):
    """A manifest that cannot be used. `str()` is one line: object, field, value, remedy."""


class IllegalTransition(OperatorError):
    """A remediation cannot go from its present phase to the one asked for."""


class AgentError(OperatorError):
    """A call to an agent gave no result."""


class AgentUnreachable(AgentError):
    """No trustworthy answer came: the call may have been carried out or not; repeat it under the same key."""


class AgentRefused(AgentError):
    """The agent answered and did nothing."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class CertificateError(OperatorError):
    """A certificate or key that cannot be read."""


class ClusterError(OperatorError):
    """The Kubernetes API refused a call, or did not answer (`status` is None then).

    `about` is the object's name where the answer names one: only then does a 404 say that it is not there. A server
    that is starting answers 404 for kinds that it has not loaded yet.
    """

    def __init__(self, message: str, *, status: int | None = None, about: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.about = about


class Blocked(ClusterError):
    """Children cannot be made until somebody changes something; nothing was written."""


class NotServed(Blocked):
    """A kind that the spec needs is not installed in the cluster."""


class NameTaken(Blocked):
    """An object of a child's name exists and belongs to someone else; it is not touched."""


class SetupError(OperatorError):
    """The operator cannot start. `str()` is one line: what, which value, remedy."""


class WatchesLost(OperatorError):
    """The process can watch no longer: too much of what should have ended still runs in it."""
