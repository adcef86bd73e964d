"""A remediation told in sentences. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ullage_operator.model import Evidence, Remediation

from .. import words

TERMS = {
    "classic": "how full the pool is of blocks in use, and how much of the rest cannot be handed out",
    "forecast": "how soon admitted work would no longer fit",
    "thrash": "work that was lost to preemption and computed again",
    "device": "accelerator memory outside the cache",
    "host": "memory of the container outside the cache",
}
REASONS = {
    "Emergency": (
        "Memory outside the cache (device or host) is nearly gone, which no eviction lowers: prompts are limited."
    ),
    "EvictColdBlocks": "Risk is at the threshold or above: drop the coldest blocks.",
    "CompactPool": "Eviction does not help enough, and closing holes frees blocks or joins scattered free ones.",
    "ThrottleLongPrompts": (
        "Risk stays high though eviction failed, brought nothing or is not to be had: refuse long prompts."
    ),
    "ReleaseThrottle": "Risk fell to the release threshold: admit long prompts again.",
    "BridgeUntilReady": "The throttle is about to lapse while a new engine is not ready yet: it is renewed.",
    "ScaleUp": "Engine-level steps do not help, or demand stays: one engine more.",
    "ScaleDown": "The load fitted on one engine less for the whole window: one engine takes no more requests.",
}
"""Rules that begin a remediation; a test holds the words to `docs/operator.md`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The parts, each a few sentences."""

    title: str
    seen: str
    rule: str
    done: str
    outcome: str
    otherwise: str

    @property
    def parts(self) -> list[tuple[str, str]]:
        """Headings and texts, in order."""
        return [
            ("Seen", self.seen),
            ("Rule", self.rule),
            ("Done", self.done),
            ("Outcome", self.outcome),
            ("Otherwise", self.otherwise),
        ]


def tell(record: Remediation, otherwise: str) -> Story:
    """The whole story; `otherwise` is what the alternative was."""
    spec, status = record.spec, record.status
    return Story(
        title=f"{record.metadata.name}: {words.step(record)}, {status.phase}",
        seen=seen(spec.pod, spec.inputs),
        rule=f"{spec.reason}: {REASONS.get(spec.reason, 'a rule that this version does not know.')}",
        done=done(record),
        outcome=outcome(record),
        otherwise=otherwise,
    )


def seen(pod: str, evidence: Evidence) -> str:
    """What the rule saw."""
    because = f", by {evidence.winner} ({TERMS[evidence.winner]})" if evidence.winner in TERMS else ""
    parts = [f"At {clock(evidence.sampled_at)} the risk of {pod} was {evidence.score:.0f} of 100{because}."]
    others = {name: value for name, value in evidence.terms.items() if name != evidence.winner}
    if others:
        parts.append(f"Other terms: {', '.join(f'{name} {value:.0f}' for name, value in sorted(others.items()))}.")
    if pool := _pool(evidence):
        parts.append(pool)
    if evidence.running is not None:
        waiting = "" if evidence.waiting is None else f", {evidence.waiting} waited"
        parts.append(f"{evidence.running} requests ran{waiting}.")
    if evidence.exhaustion_seconds is not None:
        parts.append(f"At that pace the cache would be full in {words.duration(evidence.exhaustion_seconds)}.")
    elif evidence.total_blocks is not None:
        parts.append("The forecast saw no exhaustion.")
    if evidence.max_prompt_tokens is not None:
        parts.append(f"Prompts above {evidence.max_prompt_tokens} tokens were refused already.")
    return " ".join(parts)


def done(record: Remediation) -> str:
    """What was done, by whose leave, and what it moved."""
    spec, status = record.spec, record.status
    if spec.mode == "Observe":
        return f"Nothing: the mode was Observe, so {words.step(record)} was only noted down."
    if status.started_at is None:
        return f"Nothing: {words.step(record)} was proposed at {clock(status.proposed_at)} and never started."
    leave = {"Enforce": "the policy itself may do this", "Propose": f"approved{_by(record)}"}[spec.mode]
    parts = [f"{words.step(record)} at {clock(status.started_at)} ({leave})."]
    if status.attempts > 1:
        parts.append(f"It was sent {status.attempts} times under one key, because answers were lost; it acts once.")
    if status.blocks_freed:
        parts.append(f"It freed {status.blocks_freed} blocks, {words.mebibytes(status.bytes_freed or 0)}.")
    elif spec.action == "evict" and status.answered_at is not None:
        parts.append("It freed nothing.")
    return " ".join(parts)


def outcome(record: Remediation) -> str:
    """What came of it."""
    status = record.status
    before, after = status.before or record.spec.inputs, status.after
    parts = [_PHASES[status.phase]]
    if after is not None:
        took = words.duration((after.sampled_at - before.sampled_at).total_seconds())
        parts.append(f"Risk went from {before.score:.0f} to {after.score:.0f} within {took}.")
        if before.hot_blocks is not None and after.hot_blocks is not None and before.total_blocks:
            shares = [100 * hot / before.total_blocks for hot in (before.hot_blocks, after.hot_blocks)]
            parts.append(f"Hot blocks went from {shares[0]:.0f} to {shares[1]:.0f} % of the pool.")
    if status.message:
        parts.append(f"In its own words: {status.message}.")
    return " ".join(parts)


_PHASES = {
    "Proposed": "It waits for approval.",
    "Approved": "It is approved and about to start.",
    "Running": "It is under way; its effect is not measured yet.",
    "Succeeded": "A reading taken afterwards shows that it worked.",
    "Ineffective": "A reading taken afterwards shows no effect.",
    "Failed": "It failed.",
    "Expired": "It expired without being done.",
}


def as_dict(record: Remediation, story: Story) -> dict[str, Any]:
    """For programs: the sentences beside the record itself."""
    return {
        "name": record.metadata.name,
        "title": story.title,
        **{heading.lower(): text for heading, text in story.parts},
        "record": record.write(),
    }


def text(story: Story, width: int = 96) -> str:
    """For people: headings and wrapped sentences."""
    lines = [story.title]
    for heading, sentences in story.parts:
        lines += ["", heading, *(f"  {line}" for line in _wrapped(sentences, width - 2))]
    return "\n".join(lines)


def clock(moment: datetime) -> str:
    """Date and time to the second, in UTC as records have it."""
    return moment.strftime("%Y-%m-%d %H:%M:%S UTC")


def _pool(evidence: Evidence) -> str:
    total = evidence.total_blocks
    if not total or evidence.hot_blocks is None:
        return ""
    parts = [f"{evidence.hot_blocks} hot ({100 * evidence.hot_blocks / total:.0f} %)"]
    if evidence.reclaimable_blocks is not None:
        parts.append(f"{evidence.reclaimable_blocks} cached")
    if evidence.free_blocks is not None:
        run = (
            "" if evidence.largest_free_run_blocks is None else f" in runs of up to {evidence.largest_free_run_blocks}"
        )
        parts.append(f"{evidence.free_blocks} free{run}")
    return f"Of {total} blocks {', '.join(parts)}."


def _by(record: Remediation) -> str:
    return f" by {record.spec.approved_by}" if record.spec.approved_by else ""


def _wrapped(sentences: str, width: int) -> Sequence[str]:
    return textwrap.wrap(sentences, width) or [""]
