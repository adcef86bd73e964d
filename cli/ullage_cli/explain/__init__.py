"""`ullage explain`: one remediation in words: what was seen, which rule fired, what was done, what came of it, and what
the alternative was. `story` tells it, `otherwise` asks the policy again, `records` finds it, `command` prints.
"""
