"""`ullage replay`: what a policy would have done with recorded data, and beside it another policy.

`sources` gives readings from an agent's recording or from Prometheus, `effects` estimates what a step would have
brought, `lane` runs one policy over them with the operator's own `decide`, `report` and `picture` show the outcome.
"""
