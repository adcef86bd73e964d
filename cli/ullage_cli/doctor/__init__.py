"""`ullage doctor`: looks an installation over and says what to fix.

`facts` reads everything once; `checks_*` are pure functions from facts to findings, listed in `checks.CHECKS`; `report`
prints. A check that could not see what it needs says so and is never counted as passed.
"""
