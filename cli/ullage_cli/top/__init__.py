"""`ullage top`: the fleet at a glance, from a cluster, from services that run on this machine, or from bare agents.

`fleet` is what is shown, `sources` read it, `picture` draws it, `keys` listens, `command` is the loop.
"""
