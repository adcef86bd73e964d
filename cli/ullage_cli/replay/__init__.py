"""`ullage replay`: what a policy would have done with recorded data, and beside it another policy.

`readings` and `prometheus` give `data`, `effects` estimates what a step would have brought, `lane` runs one of
`policies` over them with the operator's own `decide`, `report` and `picture` show the outcome.
"""
