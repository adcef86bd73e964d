"""`ullage plan`: how much KV cache a model needs, what fits a machine, and what a million tokens cost.

`shape` reads the model, `machines` knows the accelerators, `sums` is the arithmetic, `report` puts it into words,
`picture` draws it, `measure` asks a running engine instead, `command` is the command line. Nothing but `measure` and
`command` does input or output.
"""
